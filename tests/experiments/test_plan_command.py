import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from experiments.cli import main
from sim.catalog import find_machine
from sim.profile_file import write_profile

GIB = 1 << 30
SMALL = ["plan", "--model", "qwen2.5-0.5b", "--gpu", "rtx4090"]


def run(*arguments):
    return CliRunner().invoke(main, [*arguments])


def record(*arguments):
    ran = run(*arguments, "--json")
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def test_a_plan_has_a_table_a_recommendation_and_what_would_help():
    ran = run(
        "plan",
        "--model",
        "llama-2-7b",
        "--machine",
        "dgx-a100-80",
        "--num-gpus",
        "1",
        "--host",
        "desktop-ddr4",
        "--host-ram",
        "512",
    )
    assert ran.exit_code == 0, ran.output
    lines = ran.output.splitlines()
    assert lines[0].startswith("llama-2-7b, 6.74 billion parameters in bfloat16")
    for name in ("on_device", "zenflow", "published_zero_offload", "superoffload"):
        assert any(f"│ {name} " in line for line in lines), name
    assert "Use: zenflow" in ran.output
    assert "zenflow train --model llama-2-7b --strategy zenflow" in ran.output
    assert "on_device: device memory: needs" in ran.output
    assert "host memory twice as fast: saves" in ran.output
    assert "Predicted, not measured" in ran.output


def test_where_nothing_fits_it_is_said_with_what_would():
    ran = run("plan", "--model", "llama-3.1-70b", "--gpu", "rtx4090", "--host-ram", "64")
    assert ran.exit_code == 0, ran.output
    assert "Use: nothing here. No preset of the engine fits" in ran.output
    assert "the weights alone are 131 GiB" in ran.output
    assert "With more memory:" in ran.output


def test_the_machine_is_the_gpus_usual_one_with_what_is_given_in_its_place():
    found = record(*SMALL, "--host-ram", "31.5", "--link", "pcie3-x16", "--nvme", "none")
    assert found["notes"] == ["assumed as in rtx4090-desktop: host"]
    short = record(*SMALL, "--host-ram", "3", "--nvme", "none")
    missing = {s["place"]: s for o in short["options"] for s in o["shortfalls"]}
    assert missing["host"]["available"] == 3 * GIB
    assert missing["nvme"]["available"] == 0
    slow, fast = (
        {o["strategy"]: o["prediction"] for o in plan["options"]}
        for plan in (found, record(*SMALL, "--link", "pcie5-x16"))
    )
    assert slow["zero_offload"]["step_seconds"] > fast["zero_offload"]["step_seconds"]


def test_several_gpus_take_a_machine_that_holds_them():
    found = record(*SMALL, "--num-gpus", "4")
    assert found["num_devices"] == 4
    assert found["notes"] == ["assumed as in rtx4090-server: host, link, fabric, drives"]
    made = record(
        *SMALL, "--num-gpus", "2", "--host", "2x-epyc-7742", "--link", "pcie4-x16",
        "--fabric", "pcie4-host",
    )  # fmt: skip
    assert made["notes"] == []
    assert made["num_devices"] == 2


def test_a_profile_file_is_a_machine(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(find_machine("rtx4090-desktop"), path)
    model = ["plan", "--model", "qwen2.5-0.5b"]
    from_file = record(*model, "--profile", str(path))
    by_name = record(*model, "--machine", "rtx4090-desktop")
    assert from_file == by_name


def test_a_config_file_and_a_size_of_train_are_models(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
                "vocab_size": 50257, "n_positions": 1024,
            }
        )
    )  # fmt: skip
    assert record("plan", "--model", str(path), "--gpu", "rtx4090")["num_params"] == 124_439_808
    size = record("plan", "--model", "1b", "--gpu", "rtx4090")
    assert size["num_params"] == pytest.approx(1.0e9, rel=0.05)


def test_checkpointing_is_held_where_it_is_given():
    model = ["plan", "--model", "qwen2.5-1.5b", "--gpu", "rtx4090"]
    free, never, always = (
        {option["strategy"]: option for option in record(*model, *flags)["options"][::-1]}
        for flags in ([], ["--no-checkpointing"], ["--checkpointing"])
    )
    assert free["zenflow"]["changes"] == ["checkpointing"]
    assert never["zenflow"]["shortfalls"]
    assert always["zenflow"]["fits"]
    assert always["zenflow"]["changes"] == []


def test_the_dtype_is_what_the_device_can():
    assert record("plan", "--model", "gpt2", "--gpu", "v100")["dtype"] == "float16"
    assert record(*SMALL, "--dtype", "float32")["dtype"] == "float32"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "rtx409"], ["rtx409", "rtx4090", "nearest"]),
        (["--machine", "dgx-a10"], ["dgx-a10", "dgx-a100-80"]),
        (["--gpu", "rtx4090", "--host", "epyc-7743"], ["epyc-7742"]),
        (["--gpu", "rtx4090", "--link", "pcie9"], ["pcie5-x16"]),
        (["--gpu", "rtx4090", "--nvme", "floppy"], ["floppy", "4x-gen4"]),
        (["--gpu", "rtx4090", "--host-ram", "-5"], ["positive number of GiB", "-5"]),
        (["--gpu", "rtx4090", "--host-ram", "0"], ["positive number of GiB"]),
        (["--gpu", "rtx4090", "--host-ram", "nan"], ["positive number of GiB"]),
        (["--gpu", "rtx4090", "--batch-size", "0"], ["batch_size", "at least 1"]),
        (["--gpu", "rtx4090", "--num-gpus", "0"], ["num-gpus"]),
        (["--gpu", "rtx4090", "--num-gpus", "9"], ["9 rtx4090", "--fabric"]),
        (["--machine", "dgx-a100-80", "--num-gpus", "99"], ["holds 8"]),
        (["--gpu", "v100", "--dtype", "bfloat16"], ["no peak for bfloat16"]),
        (["--profile", "/no/such/profile.json"], ["can't be read"]),
        ([], ["--gpu", "--machine", "--profile"]),
        (["--gpu", "rtx4090", "--machine", "dgx-a100-80"], ["--gpu and --machine"]),
    ],
)
def test_a_mistake_is_named(flags, words):
    ran = run("plan", "--model", "qwen2.5-0.5b", *flags)
    assert ran.exit_code == 2, ran.output
    for word in words:
        assert word in ran.output, ran.output


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"model_type": "llama", "hidden_size": 64}', ["lacks num_attention_heads"]),
        ('{"model_type": "lama"}', ["lama", "llama"]),
        ("not json", ["is not JSON"]),
        ("[]", ["must hold an object"]),
    ],
)
def test_a_models_file_that_is_none_is_named(tmp_path, content, words):
    path = tmp_path / "config.json"
    path.write_text(content)
    ran = run("plan", "--model", str(path), "--gpu", "rtx4090")
    assert ran.exit_code == 2, ran.output
    assert isinstance(ran.exception, SystemExit)
    for word in words:
        assert word in ran.output, ran.output


def test_an_answer_takes_less_than_two_seconds_and_no_torch():
    """Of the processor, imports included: others may keep it from this process for as long.

    On one that takes more than 0.15 s to add two million squares, longer in proportion.
    """
    program = (
        "import sys, time\nsum(i * i for i in range(2_000_000))\nsquares = time.process_time()\n"
        "from experiments.cli import main\n"
        "try: main(['plan', '--model', 'llama-2-7b', '--machine', 'dgx-a100-80',"
        " '--num-gpus', '1'])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "loaded = {'torch', 'matplotlib', 'transformers', 'pandas'} & set(sys.modules)\n"
        "answer = time.process_time() - squares\n"
        "print(answer / max(1.0, squares / 0.15), file=sys.stderr)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    taken = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", program], check=False, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        assert "Use: zenflow" in ran.stdout
        taken.append(float(ran.stderr.splitlines()[-1]))
    assert min(taken) < 2.0
