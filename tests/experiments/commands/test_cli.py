import importlib.util
import json
import shlex
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import zenflow
from experiments.cli import main
from experiments.commands.training.config_file import read_config_file, said_of_rates, with_flags
from experiments.commands.training.train_flags import KNOB_NAMES
from experiments.training.settings.field import settings_of as known_settings
from experiments.training.settings.rates import schedule_factor
from experiments.training.settings.training import MIN_SPLIT_ELEMENTS, TrainSettings
from tests.experiments.runs import FAST, ended, train, trained, write_text
from zenflow.config import ZenFlowConfig
from zenflow.deepspeed.schedule import DeepSpeedSchedule
from zenflow.errors import ConfigError


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_loads_neither_torch_nor_matplotlib(arguments):
    program = (
        "import sys\nfrom experiments.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code, end.code\n"
        "loaded = {'torch', 'numpy', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "Usage" in ran.stdout


@pytest.mark.parametrize(
    "flags",
    [["--device", "tpu"], ["--data", "nosuch.txt"], ["--model", "llama-2-7b"], ["--steps", "0"]],
)
def test_what_can_be_seen_without_torch_is_refused_before_it_loads(flags):
    program = (
        "import sys\nfrom experiments.cli import main\n"
        f"try: main(['train', *{flags!r}])\nexcept SystemExit as end: assert end.code == 2\n"
        "sys.exit('torch' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def test_training_without_torch_says_how_to_get_it(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else find(name)
    )
    assert "pip install torch" in ended(2)


def test_a_run_can_be_resumed_from_another_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "a.txt")
    out = trained(tmp_path / "run", *FAST, "--data", "a.txt", "--steps", "1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ended(0, "--resume", out, "--steps", "2")
    assert len((out / "steps.jsonl").read_text().splitlines()) == 2


def test_a_run_whose_record_has_a_relative_path_resumes_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "a.txt")
    monkeypatch.setattr(
        "experiments.commands.training.train.located", dict
    )  # as runs of earlier versions were
    out = trained(tmp_path / "run", *FAST, "--data", "a.txt", "--steps", "1")
    assert json.loads((out / "config.json").read_text())["settings"]["data"] == "a.txt"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    ended(0, "--resume", out, "--steps", "2")


def test_the_command_tells_its_version():
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith(f"zenflow {zenflow.__version__}, commit ")


def test_the_version_with_an_unknown_kernel_is_a_usage_error(monkeypatch):
    monkeypatch.setenv("ZENFLOW_KERNEL", "fortran")
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 2
    assert "'fortran': unset it" in result.output


EXAMPLES = [(name, line) for name, own in main.commands.items() for line in own.examples]


def test_every_command_has_an_example():
    assert {name for name, _ in EXAMPLES} == set(main.commands)


@pytest.mark.parametrize(("name", "line"), EXAMPLES)
def test_an_example_is_a_line_that_its_command_takes(name, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, command, *arguments = shlex.split(line)
    assert (program, command) == ("zenflow", name)
    for word in arguments:  # what has to be there
        if word == "mine.json":
            Path(word).touch()
        elif word.startswith("runs/"):
            Path(word).mkdir(parents=True)
    main.commands[name].make_context(name, arguments)


def test_every_field_of_the_config_has_a_flag():
    fields = set(ZenFlowConfig().to_dict()) - {"steps_per_epoch"}  # follows from the data
    assert set(KNOB_NAMES) == fields
    flags = {option.name for option in main.commands["train"].params}
    assert fields <= flags


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--topk-ratio", "1.5"], ["topk_ratio", "1.5", "[0, 1]"]),
        (["--queue-depth", "0"], ["queue_depth must be an integer >= 1", "0"]),
        (["--lag", "2"], ["No such option", "--lag"]),
        (["--update-rule", "old"], ["'old' is not one of", "published"]),
        (["--lr", "-1", "--batch-size", "0"], ["lr must be", "batch_size must be", "2 rules"]),
        (["--steps", "5", "--epochs", "1"], ["steps (5)", "give one of them"]),
        (["--dtype", "float16"], ["float16", "gradients='keep'"]),
        (["--link-gbps", "fast"], ["GB/s", "fast"]),
        (["--link-gbps", "0.1,0"], ["positive"]),
        (["--queue-depth", "soon"], ["soon", "integer"]),
        (["--strategy", "zenflwo"], ["zenflwo"]),
        (["--data", "/no/such/file.txt"], ["/no/such/file.txt"]),
        (["--model", "/no/such/config.json"], ["config.json"]),
        (["--task", "classification"], ["no labels", "TSV"]),
        (["--compare", "--strategy", "zenflow"], ["--compare", "leave out --strategy"]),
        (["--start-steps", "5"], ["--start-steps is for --compare"]),
        (["--start-steps", "-5", "--compare"], ["start_steps must be 0"]),
        (["--device", "abacus"], ["device", "abacus"]),
        (["--config", "/no/such/config.toml"], ["can't be read"]),
        (["--eval-data", "no/such/folder"], ["--eval-data", "no directory"]),
        (["--model", "llama-2-7b"], ["--model meta-llama/Llama-2-7b-hf"]),
        (["--model", "Qwen2.5-0.5B"], ["--model Qwen/Qwen2.5-0.5B"]),
        (["--model", "./llama-2-7b"], ["has no llama-2-7b"]),
    ],
)
def test_bad_input_ends_with_rule_value_and_remedy(tmp_path, flags, words):
    result = train("--out", tmp_path / "run", "--model", "own:tiny", *flags)
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output
    assert not (tmp_path / "run" / "steps.jsonl").exists()


def test_too_long_a_sequence_for_the_text_is_an_error(tmp_path):
    text = write_text(tmp_path / "a.txt", num_lines=10)
    said = ended(2, "--out", tmp_path / "run", *FAST, "--data", text, "--sequence", "4096")
    assert "lower --sequence" in said


def test_out_that_holds_something_is_not_written_over(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "new or empty" in ended(2, "--out", tmp_path, *FAST)
    ended(2, "--out", tmp_path, "--overwrite", *FAST)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_overwrite_replaces_results_and_leaves_other_files(tmp_path):
    text = write_text(tmp_path / "a.txt")
    out = trained(tmp_path / "run", *FAST, "--data", text, "--steps", "1")
    (out / "notes.txt").write_text("mine")
    assert "notes.txt" in ended(2, "--out", out, "--overwrite", *FAST, "--data", text)
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "summary.json").exists(), "nothing is lost to a refusal"
    (out / "notes.txt").unlink()
    trained(out, "--overwrite", *FAST, "--data", text, "--steps", "2")
    assert json.loads((out / "summary.json").read_text())["steps"] == 2


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    text = write_text(tmp_path / "a.txt")
    config = tmp_path / "run.toml"
    config.write_text(
        'strategy = "zenflow_paper"\nsteps = 1\nlr = 0.5\nlink_gbps = [1.0, 2.0]\n'
        'max_grad_norm = "none"\n[zenflow]\nupdate_interval = 2\ntopk_ratio = 0.25\n'
    )
    flags = ["--config", config, "--lr", "0.001", "--topk-ratio", "0.5", "--data", text]
    out = trained(tmp_path / "run", *FAST, *flags)
    record = json.loads((out / "config.json").read_text())
    assert record["settings"]["lr"] == 0.001
    assert record["settings"]["link"] == [1e9, 2e9]
    assert record["settings"]["max_grad_norm"] is None
    assert record["config"]["topk_ratio"] == 0.5
    assert record["config"]["update_interval"] == 2
    assert record["config"]["update_rule"] == "published"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("learning_rate = 1", "'learning_rate' is unknown"),
        ("step = 3", "did you mean 'steps'"),
        ("[zenflow]\ntop_k_ratio = 0.1", "did you mean 'topk_ratio'"),
        ("lr = = 1", "not valid TOML"),
        ('lr = "fast"', "lr must be a number, but is 'fast'"),
        ("lr = [1, 2]", "lr must be a number"),
        ('betas = "x"', "betas must be two numbers"),
        ("betas = [0.9]", "betas must be two numbers"),
        ("seed = true", "seed must be a whole number, but is True"),
        ("steps = 1.5", "steps must be a whole number, but is 1.5"),
        ('device_memory = "lots"', "device_memory must be a number"),
        ("model = 5", "model must be text in quotes, but is 5"),
        ("data = [1]", "data must be text in quotes"),
        ('checkpointing = "no"', "checkpointing must be true or false, but is 'no'"),
        ('link_gbps = "fast"', "link_gbps must be two numbers"),
        ('lr = "fast"\nmodel = 5', "breaks 2 rules"),
    ],
)
def test_config_file_mistakes_name_the_nearest_key(tmp_path, text, hint):
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert hint in ended(2, "--config", path)


def test_whole_numbers_may_be_written_with_an_exponent(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"steps": 1e3, "lr": 1, "betas": [0.9, 0.95]}')
    settings, _ = read_config_file(path)
    assert repr(settings) == "{'steps': 1000, 'lr': 1, 'betas': (0.9, 0.95)}"


def test_a_file_with_a_setting_that_is_no_more_says_so(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[zenflow]\nlag = 1\nqueue_dept = 2\n")
    said = ended(2, "--config", path)
    assert "key 'lag' is no longer a setting" in " ".join(said.split())
    assert "did you mean 'queue_depth'" in said


@pytest.mark.parametrize("text", ["lr = -1.0", '[zenflow]\noverlap_step = "yes"', "model = 5"])
def test_a_broken_rule_names_the_file_it_came_from(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert str(path) in ended(2, "--config", path)


@pytest.mark.parametrize(
    "text", ["[]", '{"settings": 5}', '{"settings": {"lr": "x"}}', "{", "{}", "[" * 50_000,
             '{"settings": {"knobs": 3}}'],
)  # fmt: skip
def test_a_damaged_record_of_a_run_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert str(tmp_path / "config.json") in ended(2, "--resume", tmp_path)


def test_deepspeed_json_becomes_settings(tmp_path):
    path = tmp_path / "ds.json"
    zenflow = {
        "topk_ratio": 0.2,
        "select_strategy": "step",
        "select_interval": 10,
        "update_interval": 8,
        "overlap_step": True,
    }
    content = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.7,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.8, 0.9]}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "zenflow": zenflow,
        },
    }
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="pin_memory"):
        settings, knobs = read_config_file(path)
    made = TrainSettings(**settings, knobs=knobs)
    assert made.strategy == "zenflow_paper"
    assert made.config(None).update_interval == 8
    assert made.config(None).topk_ratio == 0.2
    assert (made.batch_size, made.grad_accum, made.max_grad_norm) == (3, 2, 0.7)
    assert (made.lr, made.betas, made.dtype) == (2e-5, (0.8, 0.9), "bfloat16")


HUGGING_FACE = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
             "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {
        "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True,
        "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip
"""As transformers' documentation has it for ZeRO-2 with offloading."""


def settings_of(path, content, **flags):
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="no effect"):
        settings, _ = read_config_file(path)
    return TrainSettings(**with_flags(settings, flags))


def rates_of(settings, total_steps):
    return [schedule_factor(settings, total_steps, n) * settings.lr for n in range(total_steps)]


def test_a_deepspeed_json_whose_values_are_left_to_the_program_trains(tmp_path):
    made = settings_of(tmp_path / "ds.json", HUGGING_FACE)
    plain = TrainSettings()
    assert (made.strategy, made.schedule) == ("zero_offload", "WarmupLR")
    assert (made.lr, made.warmup, made.betas) == (plain.lr, plain.warmup, plain.betas)
    # Its rise is a share of the run, as no file says how long it is.
    filled = DeepSpeedSchedule(kind="WarmupLR", warmup_steps=5)
    assert rates_of(made, 50) == [filled.factor(n, made.lr) * made.lr for n in range(50)]


def test_a_deepspeed_schedule_is_followed_and_flags_win(tmp_path):
    params = {"total_num_steps": 40, "warmup_num_steps": 10, "warmup_max_lr": 3e-5}
    content = {**HUGGING_FACE, "scheduler": {"type": "WarmupDecayLR", "params": params}}
    path = tmp_path / "ds.json"

    def rates(count, lr=3e-5, **changes):
        schedule = replace(DeepSpeedSchedule(kind="WarmupDecayLR", warmup_steps=10,
                                             total_steps=40), **changes)  # fmt: skip
        return [schedule.factor(n, lr) * lr for n in range(count)]

    made = settings_of(path, content)
    assert (made.steps, made.lr) == (40, 3e-5)
    assert rates_of(made, 40) == rates(40)
    assert rates_of(settings_of(path, content, steps=20), 20) == rates(20)  # a part of it
    assert rates_of(settings_of(path, content, lr=1e-3), 40) == rates(40, lr=1e-3)
    assert rates_of(settings_of(path, content, warmup=0.5), 40) == rates(40, warmup_steps=20)
    other = settings_of(path, content, schedule="cosine")
    assert (other.schedule, other.schedule_params) == ("cosine", {})
    assert settings_of(path, content, epochs=2.0).steps is None
    params["total_num_steps"] = "auto"
    assert rates_of(settings_of(path, content), 30) == rates(30, total_steps=30)


def test_without_a_scheduler_the_rate_is_constant_and_that_is_said(tmp_path):
    content = {key: value for key, value in HUGGING_FACE.items() if key != "scheduler"}
    path = tmp_path / "ds.json"
    assert set(rates_of(settings_of(path, content), 10)) == {TrainSettings().lr}
    settings, _ = read_silently(path)
    assert "has no scheduler, so the learning rate is constant" in said_of_rates(
        path, settings, ()
    )
    assert said_of_rates(path, settings, {"schedule": "linear"}) is None
    path.write_text(json.dumps(HUGGING_FACE))
    assert "DeepSpeed's WarmupLR" in said_of_rates(path, read_silently(path)[0], ())


def read_silently(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_config_file(path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule_params": {"warmup_type": "log"}}, "schedule is 'cosine': leave them out"),
        ({"schedule": "WarmupLR", "schedule_params": {"warmup_max_lr": 1}}, "give it as lr"),
        ({"schedule": "WarmupLR", "schedule_params": {"warmup_typ": "log"}}, "'warmup_type'"),
    ],
)
def test_parameters_of_a_schedule_are_the_schedules_own(settings, words):
    with pytest.raises(ConfigError, match=words):
        TrainSettings(**settings)


def test_a_run_says_what_it_makes_of_a_deepspeed_json(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({key: HUGGING_FACE[key] for key in ("zero_optimization",)}))
    said = ended(2, "--config", path, "--data", tmp_path / "absent.txt")
    assert "Note: these DeepSpeed keys have no effect here" in said
    assert "has no scheduler, so the learning rate is constant, as it is in DeepSpeed" in said


def test_epochs_of_selection_are_counted_in_the_runs_own_steps():
    settings = TrainSettings(knobs={"select_strategy": "epoch", "select_interval": 2})
    assert settings.config(steps_per_epoch=30).select_interval_steps == 60


def test_comparison_keeps_baselines_what_they_are():
    knobs = {"topk_ratio": 0.3, "update_interval": 8, "queue_depth": 2}
    settings = TrainSettings(knobs=knobs)
    made = {
        name: settings.with_strategy(name).config(None)
        for name in ("on_device", "zero_offload", "zenflow_paper", "zenflow")
    }
    floor = {"min_split_elements": MIN_SPLIT_ELEMENTS}
    assert made["on_device"] == ZenFlowConfig.preset("on_device", **floor)
    assert made["zero_offload"] == ZenFlowConfig.preset("zero_offload", **floor)
    assert made["zenflow_paper"] == ZenFlowConfig.preset(
        "zenflow_paper", topk_ratio=0.3, update_interval=8, **floor
    )
    assert made["zenflow"] == ZenFlowConfig.preset("zenflow", **knobs, **floor)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("device_memory = 24", "device_memory", 24e9),
        ("link_gbps = 0.05", "link", (0.05e9, 0.05e9)),
        ("link_gbps = [0.05, 0.1]", "link", (0.05e9, 0.1e9)),
        ('max_grad_norm = "none"', "max_grad_norm", None),
        ("steps = 1e3", "steps", 1000),
    ],
)
def test_a_file_says_a_setting_in_its_flags_unit(tmp_path, text, name, value):
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert read_config_file(path)[0] == {name: value}
    known = known_settings(TrainSettings)[name]
    assert value is None or known.read(known.written(value)) == (value, None)


def test_what_is_wrong_with_data_is_not_told_as_wrong_usage(tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "short.txt").write_text("too short")
    for name in ("chat.jsonl", "short.txt"):
        result = train(*FAST, "--data", tmp_path / name, "--out", tmp_path / "run")
        assert result.exit_code == 2
        assert result.output.splitlines()[-1].startswith(("Error: ", "Or write"))
        assert "Usage" not in result.output
    assert "Usage" in train("--steps", "0").output


def test_rows_are_refused_before_torch_loads(tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    program = (
        "import sys\nfrom experiments.cli import main\n"
        f"try: main(['train', '--data', {str(tmp_path / 'chat.jsonl')!r}])\n"
        "except SystemExit as end: assert end.code == 2\n"
        "sys.exit('torch' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
