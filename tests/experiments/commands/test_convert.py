"""``zenflow convert``: every key has its outcome, and what is printed does what the file says."""

import json
import re
import shlex
import textwrap
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from experiments.cli import main
from experiments.commands.training.config_file import read_config_file, settle_auto
from experiments.commands.training.train import train
from experiments.commands.training.train_flags import given_flags, given_tuning
from tests.experiments.commands.test_cli import HUGGING_FACE
from tests.experiments.runs import FAST, steps, trained, write_text
from zenflow import ZenFlowAdamW, deepspeed_lr_scheduler, read_deepspeed
from zenflow.deepspeed.keys import SECTIONS
from zenflow.deepspeed.outcomes import read_with_outcomes

PUBLISHED = json.loads((Path(__file__).parents[2] / "zenflow" / "zf_config.json").read_text())
"""training/DeepSpeed-ZenFlow/finetuning/zf_config.json of DeepSpeedExamples."""
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
DECAYING = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_num_steps": 3,
        "total_num_steps": 8,
        "warmup_max_lr": 3e-4,
        "warmup_type": "linear",
    },
}
HALF = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": True, "initial_scale_power": 4},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.0}},
    "scheduler": DECAYING,
    "zero_optimization": OFFLOADED,
}  # fmt: skip
FILES = {
    "published": PUBLISHED,
    "hugging face": HUGGING_FACE,
    "half precision": HALF,
    "schedule": {**PUBLISHED, "gradient_accumulation_steps": 2, "scheduler": DECAYING},
    "left to DeepSpeed": {
        "train_batch_size": 4, "zero_optimization": {**OFFLOADED, "zenflow": {}},
        "optimizer": {"type": "AdamW", "params": {}}},
    "on the device": {"train_batch_size": 4, "gradient_clipping": 0,
                      "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}},
}  # fmt: skip
YOURS = {
    "lr": 3e-4, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.2, "dtype": torch.float32,
    "max_grad_norm": 0.7, "accumulation_steps": 2, "warmup_steps": 2, "total_steps": 6,
}  # fmt: skip


@pytest.fixture(params=FILES.values(), ids=FILES)
def content(request):
    return request.param


def convert(path, content, *flags):
    path.write_text(json.dumps(content))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return CliRunner().invoke(main, ["convert", str(path), *map(str, flags)])


def indented(said):
    """Return the blocks of the output that are to be copied: Python lines, and the command."""
    _, lines, command = said.split("\n\n    ", 2)[0], *said.split(":\n\n    ", 2)[1:]
    lines = "    " + lines.split("\n\nThe file leaves")[0].split("\n\nOr (")[0]
    return textwrap.dedent(lines), command.splitlines()[0]


def read_silently(read, *arguments, **named):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read(*arguments, **named)


def leaves(content, prefix=""):
    for key, value in content.items():
        if isinstance(value, dict) and f"{prefix}{key}." in SECTIONS:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_every_key_of_a_file_is_told_once(tmp_path, content):
    result = convert(tmp_path / "ds.json", content)
    assert result.exit_code == 0, result.output
    told = [line.split(" = ")[0] for line in result.output.splitlines() if " = " in line]
    told = [name for name in told if name and not name.startswith(" ")]
    assert told == list(leaves(content))


def test_the_published_example_says_what_becomes_of_it(tmp_path):
    said = " ".join(convert(tmp_path / "ds.json", PUBLISHED).output.split())
    for words in (
        "0 refused",
        "zero_optimization.stage = 2 no meaning weights are whole on the GPU",
        "zero_optimization.zenflow.topk_ratio = 0.1 kept topk_ratio",
        "zero_optimization.zenflow.select_interval (absent) changed once an epoch",
        "gradient_clipping = 1.0 kept max_grad_norm",
        "No scheduler: the learning rate is constant",
        "topk_ratio=0.1, update_interval=4, overlap_step=True,",
        "model.to(torch.bfloat16)",
    ):
        assert words in said, words


def test_the_guide_shows_what_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "deepspeed.md").read_text("utf-8")
    (shown,) = re.findall(r"```text\n(.*?)```", guide, re.DOTALL)
    assert shown.split() == convert(Path("ds_config.json"), PUBLISHED).output.split()
    (content,) = re.findall(r'write_text\("""(.*?)"""', guide, re.DOTALL)
    assert json.loads(content) == PUBLISHED


@pytest.fixture
def clipped(monkeypatch):
    """Return the norms that optimizers are asked to clip to; a GradScaler is the CPU's."""
    norms = []
    clip = ZenFlowAdamW.clip_grad_norm_
    monkeypatch.setattr(
        ZenFlowAdamW, "clip_grad_norm_", lambda self, norm: norms.append(norm) or clip(self, norm)
    )
    scaler = partial(torch.amp.grad_scaler.GradScaler, "cpu")
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    return norms


def test_the_python_lines_train_as_the_file_says(tmp_path, content, clipped):
    lines, _ = indented(convert(tmp_path / "ds.json", content).output)
    settings = read_silently(read_deepspeed, content, steps_per_epoch=6)
    said = {**YOURS, **settings.optimizer}
    if "gradient_clipping" not in settings.auto:
        said["max_grad_norm"] = settings.max_grad_norm
    if "gradient_accumulation_steps" not in settings.auto:
        said["accumulation_steps"] = settings.gradient_accumulation_steps or 1
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    before = model.weight.detach().clone()
    loader = [torch.randn(2, 64) for _ in range(6 * said["accumulation_steps"])]
    rates = []

    def loss_of(model, batch):
        rates.append(names["optimizer"].param_groups[0]["lr"])
        return model(batch.to(model.weight.dtype)).float().square().mean()

    names = {"model": model, "loader": loader, "loss_of": loss_of, **YOURS}
    exec(lines, names)
    optimizer = names["optimizer"]
    (group,) = optimizer.param_groups
    assert names["config"] == settings.config
    assert all(group[name] == said[name] for name in ("betas", "eps", "weight_decay"))
    assert ("controller=ZenAuto()" in lines) == ("update_interval" in settings.auto_knobs)
    if settings.dtype == "fp16":
        assert not optimizer.releases_gradients
        assert clipped == [said["max_grad_norm"]] * 6
    else:
        assert optimizer.releases_gradients
        assert optimizer.max_grad_norm == said["max_grad_norm"]
        assert optimizer.accumulation_steps == said["accumulation_steps"]

    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=said["lr"])
    auto = {name: YOURS[name] for name in ("warmup_steps", "total_steps")}
    scheduler = deepspeed_lr_scheduler(other, settings.schedule, **auto)
    planned = []
    for _ in range(6):
        planned += [other.param_groups[0]["lr"]] * said["accumulation_steps"]
        other.step()
        scheduler.step()
    assert rates == planned
    optimizer.eval()
    assert not torch.equal(model.weight.float(), before)
    optimizer.close()


def parsed(words):
    context = train.make_context("train", words)
    settings, knobs = given_flags(context)
    config = context.params["config_file"]
    return {**settings, **given_tuning(context)}, knobs, config


def test_the_command_is_the_files_settings(tmp_path, content):
    path = tmp_path / "ds.json"
    _, command = indented(convert(path, content).output)
    zenflow, name, *words = shlex.split(command)
    assert (zenflow, name) == ("zenflow", "train")
    settings, knobs, config = parsed(words)
    assert settings.pop("data") == "my_texts/"
    if config is None:
        assert (settings, knobs) == settle_auto(*read_silently(read_config_file, path))
    else:
        assert (config, settings, knobs) == (path, {}, {})


@pytest.mark.parametrize("name", ["run.toml", "run.json"])
def test_the_settings_file_says_what_the_deepspeed_file_says(tmp_path, content, name):
    path, output = tmp_path / "ds.json", tmp_path / name
    result = convert(path, content, "--output", output)
    assert result.exit_code == 0, result.output
    assert read_config_file(output) == read_silently(read_config_file, path)
    if "scheduler" in content:  # which has no flags
        assert shlex.split(indented(result.output)[1])[-2:] == ["--config", str(output)]


def test_half_precision_keeps_its_gradients_for_the_loss_scale(tmp_path):
    output = tmp_path / "run.toml"
    convert(tmp_path / "ds.json", HALF, "--output", output)
    settings, _ = read_config_file(output)
    assert (settings["dtype"], settings["gradients"]) == ("float16", "keep")
    assert settings["grad_scaler"] == {"init_scale": 16.0, "growth_interval": 1000}


def test_a_converted_file_trains_at_deepspeeds_rates(tmp_path, blank_pictures):
    output = tmp_path / "run.toml"
    convert(tmp_path / "ds.json", {**PUBLISHED, "scheduler": DECAYING}, "--output", output)
    text = write_text(tmp_path / "text.txt")
    fast = FAST[: FAST.index("--schedule")]
    out = trained(tmp_path / "run", "--config", output, "--data", text, *fast)
    rates = [row["learning_rates"][0] for row in steps(out)]
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-5)
    scheduler = deepspeed_lr_scheduler(other, read_deepspeed({"scheduler": DECAYING}).schedule)
    for rate in rates:
        assert rate == pytest.approx(other.param_groups[0]["lr"], rel=1e-12, abs=0)
        other.step()
        scheduler.step()
    assert len(rates) == 8


def test_what_is_refused_is_told_with_its_remedy_and_nothing_is_written(tmp_path):
    content = {
        **PUBLISHED,
        "gradient_cliping": 1.0,
        "amp": {"enabled": True},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0}},
    }
    output = tmp_path / "run.toml"
    result = convert(tmp_path / "ds.json", content, "--output", output)
    said = " ".join(result.output.split())
    assert result.exit_code == 2
    assert "3 refused" in said
    for words in (
        "gradient_cliping = 1.0 refused is unknown; did you mean 'gradient_clipping'?",
        'amp = {"enabled": true} refused would change results and can\'t be honoured: use bf16',
        'scheduler.type = "OneCycle" refused would change results',
        "OneCycleLR in your own loop",
        "scheduler.params.cycle_min_lr = 0 no meaning",
        "topk_ratio = 0.1 kept",
        "mend what is refused",
    ):
        assert words in said, words
    assert "ZenFlowAdamW(" not in said
    assert not output.exists()


@pytest.mark.parametrize("section", SECTIONS)
def test_known_keys_have_the_outcome_of_their_list(section):
    known = SECTIONS[section]
    for keys, value, kinds in (
        (known.unused, "x", {"no meaning", "refused"}),  # some must have one value
        (known.refused, True, {"refused"}),
        (known.refused, False, {"no meaning"}),
        (known.refused, {"enabled": False}, {"no meaning"}),
    ):
        content = dict.fromkeys(keys, value)
        if section in ("bf16.", "fp16."):
            content["enabled"] = True
        for name in reversed(section.split(".")[:-1]):
            content = {name: content}
        _, outcomes = read_with_outcomes(content)
        found = {outcome.key: outcome for outcome in outcomes}
        for key in keys:
            outcome = found[f"{section}{key}"]
            assert outcome.kind in kinds, outcome
            assert not re.search("unknown|not looked at", outcome.words), outcome


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "can't be read"),
        ("{", "must be JSON"),
        ('{"bf16": {},,}', "a comma behind the last key are passed over"),
        ('{"bf16": {} /* on', "must be JSON"),
        ("[]", "must hold a JSON object"),
        ('{"bf16": 1, "bf16": 2}', "'bf16' stands there twice"),
        (
            '{"traceEvents": [], "schemaVersion": 1}',
            "none of DeepSpeed's keys, but schemaVersion, ",
        ),
        (
            '{"model_type": "llama", "_name_or_path": "x"}',
            "DeepSpeed's keys, but model_type: give",
        ),
    ],
)
def test_a_file_that_can_not_be_read_is_an_error_of_usage(tmp_path, text, words):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    result = CliRunner().invoke(main, ["convert", str(path)])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_the_source_is_not_written_over(tmp_path):
    path = tmp_path / "ds.json"
    result = convert(path, PUBLISHED, "--output", path)
    assert result.exit_code == 2
    assert json.loads(path.read_text()) == PUBLISHED


def batches(**keys):
    plain = {key: value for key, value in PUBLISHED.items() if "batch" not in key}
    del plain["gradient_accumulation_steps"]
    return {**plain, **keys}


def test_steps_that_do_not_divide_the_batch_convert_nothing(tmp_path):
    result = convert(
        tmp_path / "ds.json", batches(train_batch_size=8, gradient_accumulation_steps=3)
    )
    assert result.exit_code == 2
    assert "--batch-size" not in result.output
    assert "must be a multiple of gradient_accumulation_steps" in result.output


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4},
         ["--grad-accum 8 --batch-size 4 ", "accumulation_steps=8,"]),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,
          "gradient_accumulation_steps": 2},
         ["--grad-accum 2 --batch-size 4 ", "The file is for 4 GPUs. On one a step has 8 samples; "
          "accumulation of 8 makes it 32 again."]),
        ({"gradient_accumulation_steps": 2}, ["- No batch size, with which DeepSpeed would stop"]),
    ],
)  # fmt: skip
def test_a_converted_step_has_the_files_samples_or_says_so(tmp_path, keys, words):
    result = convert(tmp_path / "ds.json", batches(**keys))
    assert result.exit_code == 0, result.output
    for part in words:
        assert part in result.output


def test_a_run_on_fewer_gpus_than_the_file_is_for_is_refused(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(batches(train_batch_size=32, train_micro_batch_size_per_gpu=4,
                                       gradient_accumulation_steps=2)))  # fmt: skip
    result = CliRunner().invoke(
        main, ["train", "--config", str(path), "--out", str(tmp_path / "o")]
    )
    assert result.exit_code == 2
    assert "got 32 on 1 GPU: train on as many GPUs" in " ".join(result.output.split())
    assert not (tmp_path / "o").exists()


def test_comments_are_told_as_what_they_are(tmp_path):
    result = convert(tmp_path / "ds.json", {"_comment": "mine", **PUBLISHED})
    assert result.exit_code == 0
    assert re.search(r'_comment = "mine" +no meaning  a comment\n', result.output)
    assert (
        result.output.split("In your own loop")[1]
        == (convert(tmp_path / "ds.json", PUBLISHED).output.split("In your own loop")[1])
    )
