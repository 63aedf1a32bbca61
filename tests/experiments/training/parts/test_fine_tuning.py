"""A model with weights is fine-tuned by default, and train, plan and tune agree on how."""

import json
import shlex

import pytest
import torch
from click.testing import CliRunner

from experiments.cli import main
from experiments.training.parts.models.fine_tuning import FINE_TUNING, weights_dtype
from tests.experiments.runs import FAST, ended, steps, summary, trained, write_text

SHARED = ("lr", "schedule", "warmup", "betas", "weight_decay", "epochs", "steps")


@pytest.fixture
def settings_of(monkeypatch):
    """Return a function that gives the settings of a command without running it."""
    seen = []
    monkeypatch.setattr(
        "experiments.training.run.launch.launch",
        lambda found, folder, **_: (seen.append(found) or 0, {}),
    )
    monkeypatch.chdir("/")

    def find(*flags):
        ended(0, *flags)
        return seen[-1]

    return find


@pytest.fixture
def out(tmp_path):
    return ["--out", tmp_path / "run"]


@pytest.fixture
def model(tmp_path):
    """Return a function that saves a small decoder in a precision, and returns its folder."""
    transformers = pytest.importorskip("transformers")

    def save(dtype=torch.bfloat16, **how):
        shape = transformers.LlamaConfig(
            vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2,
        )  # fmt: skip
        torch.manual_seed(0)
        folder = tmp_path / str(dtype).removeprefix("torch.")
        transformers.LlamaForCausalLM(shape).to(dtype).save_pretrained(folder, **how)
        return folder

    return save


def chosen(settings):
    return {name: getattr(settings, name) for name in FINE_TUNING}


def test_a_model_with_weights_has_fine_tunings_defaults_and_they_are_said(settings_of, model, out):
    folder = model()
    settings = settings_of("--model", folder, *out)
    assert chosen(settings) == FINE_TUNING
    assert (settings.dtype, settings.steps) == ("bfloat16", None)
    said = ended(0, "--model", folder, *out)
    assert "A model with weights: lr 1e-5, schedule linear," in said
    assert "dtype bfloat16" in said
    assert "change with --lr, --schedule," in said


@pytest.mark.parametrize("is_file", [False, True], ids=["size", "config.json"])
def test_a_model_without_weights_trains_from_scratch(settings_of, model, out, is_file):
    name = model() / "config.json" if is_file else "tiny"
    settings = settings_of("--model", name, *out)
    assert (settings.lr, settings.schedule, settings.epochs) == (4e-4, "cosine", None)
    assert settings.dtype == "float32"
    assert "with weights" not in ended(0, "--model", name, *out)


def test_flags_and_files_win_and_are_not_called_defaults(settings_of, model, out, tmp_path):
    config = tmp_path / "mine.toml"
    config.write_text("lr = 3e-4\nschedule = 'cosine'\nsteps = 7\n")
    flags = ["--model", model(), "--config", config, "--dtype", "float32", *out]
    settings = settings_of(*flags, "--lr", "2e-4")
    assert (settings.lr, settings.schedule, settings.dtype) == (2e-4, "cosine", "float32")
    assert (settings.steps, settings.epochs) == (7, None)
    assert settings.betas == (0.9, 0.999)
    assert "A model with weights: warmup 0.03, betas 0.9 0.999, weight_decay 0;" in ended(
        0, *flags
    )


def test_a_comparison_keeps_its_own_length(settings_of, model, out):
    settings = settings_of("--model", model(), "--compare", *out)
    assert (settings.lr, settings.epochs, settings.steps) == (1e-5, None, 500)


@pytest.mark.parametrize("how", [{}, {"max_shard_size": "20KB"}], ids=["whole", "in parts"])
@pytest.mark.parametrize(
    ("stored", "trained_as"),
    [("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "bfloat16")],
)
def test_the_precision_is_the_weights_own_as_far_as_a_run_has_it(model, stored, trained_as, how):
    folder = model(getattr(torch, stored), **how)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert weights_dtype(str(folder)) == trained_as


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "float16"}, "bfloat16"),
        ({}, None),
    ],
)
def test_the_hubs_configuration_says_the_precision(
    settings_of, tmp_path, monkeypatch, out, config, dtype
):
    hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    assert weights_dtype("owner/name") == dtype
    settings = settings_of("--model", "owner/name", *out)
    assert settings.dtype == (dtype or "float32")
    assert chosen(settings) == FINE_TUNING


def test_train_plan_and_tune_agree(settings_of, tmp_path, out, blank_pictures):
    name = ["--model", "Qwen/Qwen2.5-0.5B"]
    data = str(write_text(tmp_path / "text.txt"))
    run = CliRunner().invoke
    small = ["--gpu", "rtx4090", "--batch-size", "1", "--sequence", "512"]
    planned = run(main, ["plan", *name, *small, "--draws", "0", "--data", data])
    command = shlex.split(planned.output.splitlines()[-1])[2:]
    best = tmp_path / "best"
    fixed = ["--update-interval", "4", "--select-interval", "100", "--trials", "2"]
    tuned = run(main, ["tune", *name, *small, *fixed, "--out", str(best)])
    assert tuned.exit_code == 0, tuned.output
    made = [
        settings_of(*command[: command.index("--out")], *out),
        settings_of("--config", best / "best.toml", "--data", data, *out),
        settings_of(*name, "--dtype", "bfloat16", *out),
    ]
    assert [{key: getattr(found, key) for key in SHARED} for found in made] == [
        {**FINE_TUNING, "steps": None}
    ] * 3
    assert {found.dtype for found in made} == {"bfloat16"}


def test_a_measured_search_writes_what_its_runs_train_with(model, tmp_path, blank_pictures):
    data = str(write_text(tmp_path / "text.txt"))
    flags = ["--backend", "measured", "--model", str(model()), "--data", data, "--trials", "1"]
    flags += ["--batch-size", "1", "--sequence", "16", "--device", "cpu", "--weight-decay", "0.5"]
    flags += ["--update-interval", "2", "--topk-ratio", "0.1", "--out", str(tmp_path / "best")]
    done = CliRunner().invoke(main, ["tune", *flags])
    assert done.exit_code == 0, done.output
    written = (tmp_path / "best" / "best.toml").read_text()
    for line in ("lr = 1e-05", 'schedule = "linear"', 'dtype = "bfloat16"', "weight_decay = 0.5"):
        assert line in written.splitlines()


def test_one_epoch_is_trained_in_the_precision_said_and_the_lines_load_it(model, tmp_path):
    data = write_text(tmp_path / "text.txt", num_lines=60)
    flags = [*FAST[2:-2], "--model", model(), "--data", data, "--timeline-steps", "0"]
    run = trained(tmp_path / "run", *flags)
    found, rows = summary(run), steps(run)
    assert found["dtype"] == "bfloat16"
    assert found["steps"] == json.loads((run / "config.json").read_text())["steps_per_epoch"]
    assert rows[-1]["lr"] < rows[1]["lr"] <= 1e-5
    said = CliRunner().invoke(main, ["train", "--resume", str(run)]).output
    code = [line.strip() for line in said.splitlines() if line.startswith("    ")]
    names = {}
    exec("\n".join(code), names)
    assert names["model"].dtype == torch.bfloat16
