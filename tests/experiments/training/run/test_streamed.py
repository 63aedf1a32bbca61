"""Runs whose weights are streamed are those whose weights stay, file by file."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from experiments.training.parts.streams import stream_arguments
from experiments.training.settings.training import TrainSettings
from tests.experiments.deadly_runs import differences, trial
from tests.experiments.runs import FAST, ended, steps, trained, write_text
from zenflow import ZenFlowConfig, stream_weights


@pytest.fixture
def flags(tmp_path, blank_pictures, monkeypatch):
    visiting = partial(stream_weights, least_elements=1000)
    monkeypatch.setattr("experiments.training.parts.setup.stream_weights", visiting)
    return [*FAST, "--data", write_text(tmp_path / "text.txt"), "--warmup", "0"]


def test_a_streamed_run_leaves_equal_files(tmp_path, flags):
    flags = [*flags, "--steps", 6, "--grad-accum", 2, "--eval-every", 3, "--checkpointing"]
    plain = trained(tmp_path / "plain", *flags)
    streamed = trained(
        tmp_path / "streamed", *flags, "--stream", "--resident-layers", 1, "--offload-sums",
        "--offload-activations",
    )  # fmt: skip
    assert differences(streamed, plain) == []
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (streamed, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert all(row["weights_h2d_bytes"] > 0 for row in steps(streamed)[1:])


def test_a_run_goes_on_with_other_residents(tmp_path, flags):
    whole = trained(tmp_path / "whole", *flags, "--steps", 6)
    out = trained(tmp_path / "parts", *flags, "--steps", 2, "--stream")
    ended(0, "--resume", out, "--steps", 4, "--resident-layers", 1)
    ended(0, "--resume", out, "--steps", 6, "--no-stream", "--resident-layers", 0)
    assert differences(out, whole) == []


@pytest.mark.slow
def test_a_streamed_run_that_is_killed_ends_with_the_bits_of_one_that_stays(tmp_path):
    more = ["--model", "own:small"]
    deaths = trial(tmp_path, kills=3, inside=1, num_steps=90, more=more, of_killed=["--stream"])
    assert deaths.total >= 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--resident-layers", 1], "give --stream too"),
        (["--offload-activations"], "give --stream too"),
        (["--offload-sums", "--gradients", "keep"], "needs gradients='release'"),
        (["--offload-sums", "--parallel", "fsdp"], "for one process"),
        (["--stream", "--gradients", "keep"], "needs gradients='release'"),
        (["--stream", "--strategy", "on_device"], "needs state on the host"),
        (["--stream", "--topk-ratio", 1], "needs state on the host"),
        (["--stream", "--auto"], "no tuner yet"),
        (["--stream", "--parallel", "ddp"], "for one process"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, flags, more, message):
    assert message in ended(2, *flags, "--out", tmp_path / "run", *more)


def test_layers_without_a_weight_to_stream_are_refused(tmp_path, flags, monkeypatch):
    monkeypatch.setattr("experiments.training.parts.setup.stream_weights", stream_weights)
    assert "no weight to stream" in ended(2, *flags, "--out", tmp_path / "run", "--stream")


@pytest.mark.parametrize(("free_gb", "streams"), [(1.0, True), (100.0, False)])
def test_layers_visit_by_themselves_where_a_gpu_is_full(monkeypatch, free_gb, streams):
    monkeypatch.setattr("experiments.training.parts.streams.free_on", lambda _: free_gb * 1e9)
    model = torch.nn.Linear(10_000, 10_000, bias=False)  # 0.4 GB, with little beside it
    settings = TrainSettings(stream="auto", offload_activations=True)
    config = ZenFlowConfig(topk_ratio=0)
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    found = stream_arguments(model, config, gpu, settings)
    expected = {"resident_layers": None, "offload_activations": True}
    assert found == (expected if streams else None)
    assert stream_arguments(model, config, cpu, settings) is None
    assert stream_arguments(model, config, gpu, TrainSettings()) is None
    always = stream_arguments(model, config, cpu, TrainSettings(stream="yes"))
    assert always == {"resident_layers": None, "offload_activations": False}


def test_a_comparison_streams_what_offloads(tmp_path, flags):
    out = trained(
        tmp_path / "runs", *flags, "--steps", 4, "--compare", "--stream",
        "--link-gbps", "0.05,0.05", "--start-steps", 0,
    )  # fmt: skip
    assert "weights_h2d_bytes" in steps(out / "zenflow")[-1]
