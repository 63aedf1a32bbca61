import ast
import functools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from experiments.cli import main
from experiments.commands.prediction.plan import _FINE_TUNING
from experiments.commands.training.finetune import shared_flags
from experiments.commands.training.train_flags import given_flags
from experiments.finetuning.settings import settle
from experiments.training.settings.sizes import MODEL_SIZES
from experiments.training.settings.training import TrainSettings
from sim.hardware.catalog import find_machine
from sim.hardware.file import write_profile
from sim.memory_parts import gib
from sim.models.table import find_model
from sim.planning import plan as planning
from tests.conftest import remembering
from zenflow.config import ZenFlowConfig

pytestmark = pytest.mark.usefixtures("planned_once")
GIB = 1 << 30
SMALL = ["plan", "--model", "qwen2.5-0.5b", "--gpu", "rtx4090"]
SHORT = [*SMALL, "--batch-size", "1", "--sequence", "512", "--draws", "0"]
"""A step with so few tokens that little has to be searched."""


@pytest.fixture(scope="module")
def planned_once(simulated_once):
    """Let a question be planned once that is asked for people and for programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "plan", remembering(planning.plan))
        yield


@functools.cache
def run(*arguments):
    return CliRunner().invoke(main, [*arguments])


def record(*arguments):
    ran = run(*arguments, "--json")
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def command_of(output):
    """Return the words of the last line, which is what to run."""
    words = shlex.split(output.splitlines()[-1])
    assert words[0] == "zenflow", output
    assert words[1] in ("finetune", "train"), output
    return words[1:]


def settings_of(words):
    """Return what a command makes of its words: click parses them, settings check them."""
    name, *arguments = words
    context = main.commands[name].make_context(name, arguments)
    if name == "finetune":
        shared, knobs = shared_flags(context)
        assert context.params["out"] is not None
        return settle(context.params["model"], context.params["data"], shared, knobs, {}).run
    settings, knobs = given_flags(context)
    return TrainSettings(**settings, knobs=knobs)


LLAMA = ["plan", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "rtx5090", "--draws", "20"]
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "predict.md"
GUIDES = shlex.split(
    next(x for x in GUIDE.read_text().splitlines() if x.strip().startswith("zenflow plan"))
)[1:]


@pytest.mark.parametrize(
    "asked",
    [
        GUIDES,
        ["plan", "--model", "Qwen/Qwen2.5-1.5B", "--gpu", "rtx3090"],
        pytest.param(
            ["plan", "--model", "qwen2.5-14b-instruct", "--gpu", "h100", "--num-gpus", "8"],
            marks=pytest.mark.slow,
        ),
        ["plan", "--model", "qwen3-0.6b", "--gpu", "t4", "--tokens", "10M", *SHORT[5:]],
        ["plan", "--model", "1b", "--gpu", "rtx4090", "--data", "my texts/all.txt"],
    ],
    ids=lambda asked: " ".join(asked[2:5]),
)
def test_the_last_line_is_a_command_that_finetune_or_train_takes(asked):
    ran = run(*asked)
    assert ran.exit_code == 0, ran.output
    settings = settings_of(command_of(ran.stdout))
    found = record(*asked)
    ones = [option for option in found["per_devices"] if option["memory"]["num_devices"] == 1]
    chosen = (ones or [found["recommended"] or found["likeliest"]])[-1]
    assert (settings.batch_size, settings.grad_accum) == (
        chosen["batch_size"], chosen["accumulation"],
    )  # fmt: skip
    assert settings.checkpointing == chosen["checkpointing"]
    if "zenflow train" in found["command"]:  # TRL's trainer has no other loss than chunked
        assert settings.chunked_loss == chosen["chunked_loss"]
    assert settings.strategy == chosen["strategy"]
    is_tuned = settings.model not in MODEL_SIZES and settings.dtype != "float16"
    assert found["command"].startswith(f"zenflow {'finetune' if is_tuned else 'train'} ")
    own = settings.config(None).to_dict()
    assert {k: v for k, v in own.items() if k != "min_split_elements"} == {
        k: v for k, v in chosen["config"].items() if k != "min_split_elements"
    }
    assert settings.save_every > 0
    assert settings.lr <= 2e-5 or settings.model in MODEL_SIZES
    assert "/" in settings.model or settings.model in MODEL_SIZES
    assert found["command"] == ran.stdout.splitlines()[-1].strip()


def test_a_model_of_more_than_the_card_is_told_to_visit_it():
    asked = [
        "plan",
        "--model",
        "qwen3-14b",
        "--gpu",
        "rtx4090",
        "--host-ram",
        "256",
        "--draws",
        "0",
    ]
    ran, found = run(*asked), record(*asked)
    assert "Its layers visit the rtx4090" in ran.output
    assert found["recommended"] == found["streamed"]
    assert found["command"] == ran.stdout.splitlines()[-1].strip()
    settings = settings_of(command_of(ran.stdout))
    assert settings.stream
    assert settings.resident_layers == found["streamed"]["streams"]["resident_layers"]
    assert settings.config(None).topk_ratio == 0
    assert settings.batch_size == found["streamed"]["batch_size"]


def test_streams_stand_beside_what_fits_for_fewer_tokens():
    asked = shlex.split(
        "plan --model qwen2.5-7b --gpu rtx4090 --host-ram 256 --batch-size 8 --draws 0"
    )
    ran, found = run(*asked), record(*asked)
    assert "With all 8 x 1024 tokens to a step, its layers can visit the rtx4090" in ran.output
    assert f"Micro-batches of {found['hiding_tokens']:,} tokens or more" in ran.output
    assert f"    {found['streamed_command']}\n" in ran.stdout
    assert found["command"] == ran.stdout.splitlines()[-1].strip()
    settings = settings_of(shlex.split(found["streamed_command"])[1:])
    assert settings.stream == "yes"
    assert settings.batch_size == 8
    assert settings.resident_layers == found["streamed"]["streams"]["resident_layers"]


def test_the_model_is_called_as_the_hub_calls_it():
    found = record("plan", "--model", "qwen2.5-1.5b", "--gpu", "rtx3090", "--draws", "0")
    assert settings_of(shlex.split(found["command"])[1:]).model == "Qwen/Qwen2.5-1.5B"


def test_a_32_gb_card_is_told_how_to_train_8b():
    asked = ["plan", "--model", "qwen3-8b", *LLAMA[3:], "--host-ram", "128", "--no-chunked-loss"]
    ran = run(*asked, "--tokens", "1e9", "--usd-per-hour", "0.5")
    assert "with a chance of 90%; 3 x 1024 tokens do. Use zenflow" in ran.output
    assert re.search(r"tokens/s \(80% interval: [\d,]+ to [\d,]+\)", ran.output)
    days, price = re.search(
        r"1,000,000,000 tokens: ([\d.]+) days .*, ([\d.]+) USD", ran.output
    ).groups()
    rate = float(re.search(r"checkpointing: ([\d,]+) tokens/s", ran.output)[1].replace(",", ""))
    assert float(days) == pytest.approx(1e9 / rate / 86400, rel=0.01)
    assert float(price) == pytest.approx(1e9 / rate / 3600 * 0.5, rel=0.01)
    steps = settings_of(command_of(ran.stdout)).steps
    assert (steps - 1) * 3072 < 1e9 <= steps * 3072
    assert "accumulation keeps a whole gradient, 15.3 GiB" in ran.output
    assert "autograd adds each to .grad" in ran.output


def test_with_too_little_host_memory_the_first_change_is_more_of_it():
    ran = run(*LLAMA, "--host-ram", "64", "--host-state", "float32", "--nvme", "none")
    answer = ran.stdout.split("\n\n")[-1].splitlines()
    assert answer[0].startswith("Nothing fits this machine")
    (first,) = (index for index, line in enumerate(answer) if line.startswith("Change first"))
    assert answer[first].startswith("Change first: 128 GiB of host memory. Then zenflow")
    assert "--host-ram 128" in answer[first + 1]
    assert "--data" not in ran.output


def test_an_8b_model_on_a_host_of_64_gb_is_told_of_compact_state_and_its_price():
    ran = run(*LLAMA, "--host-ram", "64")
    assert ran.exit_code == 0
    assert "Nothing fits with float32 weights and moments on the host" in ran.output
    assert "within rounding, not bit for bit. Small models kept their loss" in ran.output
    assert "For float32 change first: 128 GiB of host memory. Then zenflow" in ran.output
    assert "AdamW exactly fits" in ran.output
    knobs = settings_of(command_of(ran.stdout)).knobs
    assert knobs["host_state"] == "compact"
    found = record(*LLAMA, "--host-ram", "64")
    assert found["without_compact"][0]["host_memory"] == 128 * GIB
    assert found["recommended"]["config"]["host_state"] == "compact"
    more = run(*LLAMA, "--host-ram", "128", "--tokens", "1e9", "--usd-per-hour", "0.5")
    assert "compact" not in more.output


def test_a_model_beyond_a_device_is_told_so_first_and_in_few_words():
    ran = run("plan", "--model", "meta-llama/Llama-3.3-70B-Instruct", "--gpu", "h100",
              "--num-gpus", "8", "--parallel", "ddp")  # fmt: skip
    answer = ran.stdout.split("\n\n")[-1].splitlines()
    assert "the weights of llama-3.3-70b alone are 131 GiB" in answer[1]
    assert answer[2].endswith("ask with --parallel fsdp.")
    assert len(answer) <= 6
    assert "gemma-2-27b" in ran.stdout


def test_a_model_is_planned_sharded_over_two_hosts():
    ran = ["plan", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "h100", "--num-gpus", "8",
            "--parallel", "fsdp", "--batch-size", "1", "--checkpointing", "--draws",
           "0"]  # fmt: skip
    text = run(*ran, "--num-hosts", "2").output
    assert "hgx-h100: 2 hosts, each 8 x h100-sxm" in text
    assert "8x-infiniband-ndr" in text
    assert "with fully_shard" in text
    assert "process_group" not in text
    one, two = (record(*ran, "--num-hosts", hosts) for hosts in ("1", "2"))
    assert (one["num_devices"], two["num_devices"], two["num_hosts"]) == (8, 16, 2)
    assert one["recommended"]["memory"]["num_devices"] == 8
    assert two["recommended"]["tokens_per_second"] > one["recommended"]["tokens_per_second"]


def test_one_of_eight_devices_is_recommended_where_eight_are_not_likely_to_fit():
    ran = run("plan", "--model", "Qwen/Qwen2.5-14B", "--gpu", "h100", "--num-gpus", "8",
              "--draws", "0", "--parallel", "ddp")  # fmt: skip
    assert "8 devices do not fit" in ran.output
    assert "Use one." in ran.output
    assert re.search(r"Faster, but riskier: on 8 devices, .* chance of \d\d%", ran.output)


def test_what_may_not_fit_is_shown_with_a_warning_and_is_no_recommendation():
    asked = ["plan", "--model", "qwen3-8b", "--gpu", "rtx3090", "--host-ram", "128",
             "--draws", "0", "--no-chunked-loss", "--no-stream"]  # fmt: skip
    ran = run(*asked)
    assert ran.exit_code == 0
    answer = ran.stdout.split("\n\n")[-1]
    assert answer.index("Warning: this may run out of memory") < answer.index("Likeliest to fit")
    assert "Use " not in answer
    assert "Run it, and watch its memory" in answer
    found = record(*asked)
    assert found["recommended"] is None
    shown = found["likeliest"]["chance_to_fit"]
    assert f"the likeliest to fit does with {shown:.0%}" in ran.stdout
    assert found["tight"]["chance_to_fit"] < shown < 0.9


def test_nothing_that_fits_is_exit_code_3():
    for more in ([], ["--json"]):
        asked = ["--gpu", "rtx4080", "--nvme", "none", "--draws", "0"]
        ran = run("plan", "--model", "llama-3.1-8b", *asked, *more)
        assert ran.exit_code == 3, ran.output
        assert "Traceback" not in ran.output
    assert json.loads(ran.stdout)["recommended"] is None


def test_states_on_a_drive_are_an_answer_where_nothing_else_fits():
    asked = ["plan", "--model", "llama-3.1-8b", "--gpu", "rtx4080", "--draws", "0",
             "--nvme", "gen4-desktop", "--drive-tbw", "1200"]  # fmt: skip
    ran = run(*asked)
    assert ran.exit_code == 0, ran.output
    assert "state_on_drive" in ran.stdout.split("Use ")[1].splitlines()[0]
    assert "in a folder of yours in place of" in ran.stdout
    assert "ZeRO-Infinity, whose weights visit too (--strategy zero_infinity)" in ran.stdout
    assert "% of the warranted 1200 TB" in ran.stdout
    settings = settings_of(command_of(ran.stdout))
    assert settings.state_dir is not None
    assert settings.drive_tbw == 1200


def test_the_nearest_record_is_named_and_what_lies_outside_of_all():
    ran = run("plan", "--model", "Qwen/Qwen3-8B", "--gpu", "a6000", "--draws", "0")
    assert "Nearest record: " in ran.stdout
    outside = ran.stdout.split("Outside of what was recorded: ")[1]
    assert outside.startswith("model size (8.19B; recorded 0.837M to 135M). ")


def test_a_long_wait_and_a_k_of_0_are_said_in_words():
    waits = run("plan", "--model", "qwen3-8b", "--gpu", "rtx3090", "--host-ram", "128",
                "--draws", "0", "--no-stream").stdout  # fmt: skip
    share = re.search(r"stalled for (\d+%)", waits)[1]
    assert f"the GPU waits {share} of the time, most of all for the host's update" in waits
    assert "k = 0 means" in waits
    short = run(*SHORT).stdout
    assert "the GPU waits" not in short
    assert "k = 0 means" not in short


def test_several_devices_get_their_own_loop_and_the_command_of_one():
    ran = run("plan", "--model", "llama-2-7b", "--gpu", "h100", "--num-gpus", "8",
              "--draws", "0", "--parallel", "ddp")  # fmt: skip
    assert "One device makes" in ran.output
    assert "DistributedDataParallel" in ran.output
    assert 'offload_gradients="release", process_group=model.process_group' in ran.output
    assert "optimizer.release_from(model)" in ran.output
    made = re.search(r"ZenFlowConfig\.preset\((.*)\)\)", ran.output)[1]
    name, *knobs = made.split(", ")
    given = {key: ast.literal_eval(value) for key, value in (knob.split("=") for knob in knobs)}
    found = record("plan", "--model", "llama-2-7b", "--gpu", "h100", "--num-gpus", "8",
                   "--draws", "0", "--parallel", "ddp")["recommended"]  # fmt: skip
    assert ZenFlowConfig.preset(name.strip('"'), **given).to_dict() == found["config"]
    command_of(ran.stdout)


def test_other_systems_are_shown_apart_and_only_where_asked_for():
    ran = run(*SHORT)
    assert "superoffload" not in ran.output
    shown = run(*SHORT, "--systems").output
    ours, theirs = shown.split("other systems, not run here")
    assert "zenflow_paper" in ours
    assert "published_zero_offload" in theirs
    assert "zenflow_paper" not in theirs.split("Use ")[0]


def test_other_systems_without_masters_are_shown_as_such():
    found = record(*SHORT, "--systems", "--no-float32-master")
    rules = {o["strategy"]: (o["rule"], o["changes"]) for o in found["options"]}
    assert rules["ddp"][0] == "AdamW, without float32 masters"
    assert rules["ddp"][1][0] == "float32_master=False"
    assert rules["published_on_device"] == ("AdamW exactly", rules["published_on_device"][1])
    refused = run(*SHORT, "--no-float32-master")
    assert refused.exit_code == 2
    assert "give --systems as well" in " ".join(refused.output.split())


def test_the_machine_is_the_gpus_usual_one_with_what_is_given_in_its_place():
    found = record(*SHORT, "--host-ram", "31.5", "--link", "pcie3-x16", "--nvme", "none")
    assert found["notes"] == ["assumed as in rtx4090-desktop: host", _FINE_TUNING]
    short = record(*SHORT, "--host-ram", "3", "--nvme", "none")
    missing = {s["place"]: s for o in short["options"] for s in o["shortfalls"]}
    assert missing["host"]["available"] == 3 * GIB
    slow, fast = (
        {o["strategy"]: o["prediction"] for o in plan["options"]}
        for plan in (found, record(*SHORT, "--link", "pcie5-x16"))
    )
    assert slow["zero_offload"]["step_seconds"] > fast["zero_offload"]["step_seconds"]


def test_one_devices_times_are_those_of_the_command_that_is_printed(tmp_path):
    asked = ["plan", "--gpu", "rtx4090", "--nvme", "none", "--draws", "0", "--batch-size", "1"]
    own, loop, trl = (
        record(*asked, "--model", "gpt2", *more)
        for more in ((), ("--trainer", "loop"), ("--trainer", "trl"))
    )
    assert own["command"].startswith("zenflow finetune ")
    assert own["options"] == trl["options"] != loop["options"]
    assert _FINE_TUNING not in [*loop["notes"], *trl["notes"]]
    config = tmp_path / "gpt2.json"
    config.write_text(json.dumps(find_model("gpt2")[1]), encoding="utf-8")
    bare = record(*asked, "--model", str(config))
    assert bare["command"].startswith("zenflow train ")
    times = [{o["strategy"]: o["prediction"] for o in plan["options"]} for plan in (bare, loop)]
    assert times[0] == times[1]
    assert _FINE_TUNING not in record(*asked, "--model", "gpt2", "--num-gpus", "2")["notes"]


def test_several_gpus_take_a_machine_that_holds_them():
    small = ["plan", "--model", "gpt2", *SHORT[3:]]
    found = record(*small, "--num-gpus", "4")
    assert found["num_devices"] == 4
    (note,) = found["notes"]
    assert note.startswith("assumed as in rtx4090-server: host, link, fabric, drives")
    assert "--host 2x-epyc-7742 keeps this one" in note
    made = record(
        *small, "--num-gpus", "2", "--host", "2x-epyc-7742", "--link", "pcie4-x16",
        "--fabric", "pcie4-host",
    )  # fmt: skip
    assert made["notes"] == []
    assert made["num_devices"] == 2


def test_a_card_of_no_machine_of_the_table_borrows_from_one_of_its_family():
    found = record("plan", "--model", "gpt2", "--gpu", "a100-40-pcie", "--draws", "0")
    assert found["notes"] == [
        "assumed as in a100-epyc-7742: host, link; no machine of the table has a100-40-pcie",
        _FINE_TUNING,
    ]
    several = record("plan", "--model", "gpt2", "--gpu", "h100-pcie", "--num-gpus", "2",
                     "--draws", "0")  # fmt: skip
    assert several["num_devices"] == 2
    assert "fabric" in several["notes"][0]


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--gpu", "h100"],
        ["simulate", "--gpu", "h100"],
        ["tune", "--gpu", "h100"],
        ["sweep", "--gpu", "h100", "--vary", "S=2,4"],
        ["sweep", "--gpu", "h100", "--vary", "S=2,4", "--find", "S", "--rate", "1"],
        ["train", "--data", __file__],
    ],
    ids=lambda command: " ".join([command[0], *command[5:6]]),
)
def test_sequences_beyond_learned_positions_are_refused_by_every_command(command, tmp_path):
    name = "openai-community/gpt2"
    out = [] if command[0] in ("plan", "simulate") else ["--out", str(tmp_path / "out")]
    ran = run(*command, "--model", name, "--sequence", "1025", *out)
    assert ran.exit_code == 2, ran.output
    assert "1,024 learned positions" in " ".join(ran.output.split())
    assert not (tmp_path / "out").exists()


def test_sequences_beyond_rotary_positions_are_noted():
    found = record("plan", "--model", "llama-2-7b", "--gpu", "h100", "--sequence", "8192",
                   "--batch-size", "1", "--draws", "0")  # fmt: skip
    assert any("made for 4,096 positions" in note for note in found["notes"])


def test_a_part_of_the_layers_may_be_recomputed_but_not_by_train():
    ran = run(*SHORT, "--checkpointing", "1/2")
    assert ran.exit_code == 0, ran.output
    assert "--data" not in ran.stdout
    found = record(*SHORT, "--checkpointing", "1/2")
    assert found["recommended"]["checkpointing"] == 0.5
    assert found["command"] is None


def test_a_configuration_of_very_many_layers_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**find_model("gpt2")[1], "n_layer": 2000}))
    ran = run("plan", "--model", str(path), "--gpu", "h100")
    assert ran.exit_code == 2
    assert "n_layer must be a whole number from 1 to 1,000, got 2000" in " ".join(
        ran.output.split()
    )


def test_a_profile_file_is_a_machine(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(find_machine("rtx4090-desktop"), path)
    model = ["plan", "--model", "qwen2.5-0.5b", *SHORT[5:]]
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
    for flags, held in (([], False), (["--no-checkpointing"], False), (["--checkpointing"], True)):
        assert record(*SHORT, *flags)["recommended"]["checkpointing"] == held


def test_the_dtype_is_what_the_device_can():
    assert record("plan", "--model", "gpt2", *SHORT[3:4], "v100", *SHORT[5:])["dtype"] == "float16"
    assert record(*SHORT, "--dtype", "float32")["dtype"] == "float32"


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
        (["--gpu", "rtx4090", "--host-ram", "4096"], ["desktop-ddr5 takes at most 256", "--host"]),
        (["--gpu", "rtx4090", "--reserve", "-1"], ["0 or more GiB", "-1"]),
        (["--gpu", "rtx4090", "--tokens", "many"], ["300M", "many"]),
        (["--gpu", "rtx4090", "--tokens", "0"], ["at least 1"]),
        (["--gpu", "rtx4090", "--usd-per-hour", "0"], ["usd-per-hour"]),
        (["--gpu", "rtx4090", "--usd-per-hour", "nan"], ["positive number", "nan"]),
        (["--gpu", "rtx4090", "--usd-per-hour", "inf"], ["positive number", "inf"]),
        (["--gpu", "rtx4090", "--tokens", "1,5B"], ["1,5B", "1.5B", "three digits"]),
        (["--gpu", "rtx4090", "--reserve", "24GB"], ["24GB", "write 24"]),
        (["--gpu", "rtx4090", "--grad-accum", "1000000"], ["grad-accum", "4,096"]),
        (["--gpu", "rtx4090", "--checkpointing", "3/2"], ["shares of the layers"]),
        (["--gpu", "rtx4090", "--draws", "-3"], ["draws"]),
        (["--gpu", "rtx4090", "--host-ram", "nan"], ["positive number of GiB"]),
        (["--gpu", "rtx4090", "--batch-size", "0"], ["batch_size", "at least 1"]),
        (["--gpu", "rtx4090", "--num-gpus", "0"], ["num-gpus"]),
        (["--gpu", "rtx4090", "--num-gpus", "9"], ["9 rtx4090", "--fabric"]),
        (["--machine", "dgx-a100-80", "--num-gpus", "99"], ["holds 8", "--num-hosts 13"]),
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


def test_an_answer_takes_few_seconds_and_no_torch():
    """Seconds of the processor, imports included: about three, six on a machine that is shared."""
    program = (
        "import sys, time\n"
        "from experiments.cli import main\n"
        "try: main(['plan', '--model', 'llama-2-7b', '--machine', 'dgx-a100-80',"
        " '--num-gpus', '1'])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "loaded = {'torch', 'matplotlib', 'transformers', 'pandas'} & set(sys.modules)\n"
        "print(time.process_time(), file=sys.stderr)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "Use zenflow" in ran.stdout
    assert float(ran.stderr.splitlines()[-1]) < 12


def test_a_checkpoint_s_room_on_the_disk_is_in_the_table_the_answer_and_the_record():
    said, options = run(*SHORT).output, record(*SHORT)["options"]
    assert {option["checkpoint_bytes"] > 0 for option in options} == {True}
    recommended = record(*SHORT)["recommended"]
    size = gib(recommended["checkpoint_bytes"])
    assert f"Disk: {size} for a checkpoint" in said
    table = [line for line in said.splitlines() if line.startswith("│")]
    assert any(f"{size} │" in line for line in table)
    # Masters and moments, the weights of training, and a sixteenth or more of what lands.
    each = recommended["checkpoint_bytes"] / record(*SHORT)["num_params"]
    assert 12 < each < 18


def test_other_systems_have_no_checkpoint_of_ours():
    options = record(*SHORT, "--systems")["options"]
    assert {o["checkpoint_bytes"] is None for o in options if not o["is_ours"]} == {True}


def test_a_loss_in_chunks_takes_less_of_the_device():
    needs = {}
    for is_chunked, flag in ((False, "--no-chunked-loss"), (True, "--chunked-loss")):
        found = record(*LLAMA, "--host-ram", "128", flag)
        assert found["without_chunks"] is None, "nothing was left open"
        option = found["recommended"] or found["likeliest"]
        assert option["chunked_loss"] == is_chunked
        needs[is_chunked] = {part["name"]: part["num_bytes"] for part in option["memory"]["parts"]}
        assert settings_of(shlex.split(found["command"])[1:]).chunked_loss  # TRL has no other
    assert needs[True].get("logits and loss", 0) <= needs[False].get("logits and loss", 0)


def test_a_loss_in_chunks_is_found_said_in_a_sentence_and_run():
    asked = ["plan", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "rtx4090", "--host-ram",
             "128", "--draws", "0", "--no-stream"]  # fmt: skip
    said, found = run(*asked).stdout, record(*asked)
    without = record(*asked, "--no-chunked-loss")
    assert settings_of(command_of(said)).chunked_loss
    assert found["likeliest"]["chunked_loss"]
    assert found["without_chunks"] == without["likeliest"]
    old, new = without["likeliest"], found["likeliest"]
    times = new["tokens_per_second"] / old["tokens_per_second"]
    assert f"Logits come in chunks (--chunked-loss), never whole, to be {times:.2g} times" in said
    assert f"Without that: {', '.join([old['strategy'], *old['changes']])} with 1 x 1024" in said
    before, after = (f"{option['chance_to_fit']:.0%}" for option in (old, new))
    assert f"{old['tokens_per_second']:,.0f} tokens/s, it fits with a chance of {before}" in said
    assert f"one as likely as any, to 3 points, does with {after}" in said


def test_a_plan_says_that_chunks_are_for_a_rule_nearer_to_adamw():
    said = run(*SMALL, "--draws", "0").stdout
    assert "Logits come in chunks (--chunked-loss), never whole, to be nearer to AdamW." in said
    assert settings_of(command_of(said)).strategy == "on_device"


def test_whole_logits_stay_without_a_word_where_chunks_bring_nothing():
    said, found = run(*SHORT).stdout, record(*SHORT)
    assert "chunk" not in said
    assert found["without_chunks"] is None
    assert found["recommended"]["chunked_loss"] is False


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "gemma-2-9b"], "changes its logits behind the output layer"),
        (["--model", "bert-large"], "is no decoder with an output layer"),
        (["--model", "gpt2", "--dtype", "float16"], "has gradients in float16"),
    ],
)
def test_a_loss_in_chunks_is_refused_for_models_that_train_refuses(flags, words):
    ran = run("plan", "--gpu", "rtx4090", "--sequence", "512", *flags, "--chunked-loss")
    assert ran.exit_code == 2, ran.output
    assert words in " ".join(ran.output.split())


def test_several_devices_are_told_of_the_loss_in_chunks_of_their_own_loop():
    flags = ["plan", "--model", "qwen2.5-0.5b", "--gpu", "rtx4090", "--num-gpus", "2",
             "--batch-size", "1", "--draws", "0"]  # fmt: skip
    for flag, is_told in (("--chunked-loss", True), ("--no-chunked-loss", False)):
        said = run(*flags, flag).stdout
        assert ("and a loss in chunks (Liger-Kernel has one):" in said) == is_told
