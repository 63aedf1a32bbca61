"""How `zenflow train` is started on several ranks, and what it says where it was not."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import distributed

from experiments.training.parts.data.batches import LabelledBatches, TokenWindows
from experiments.training.parts.data.tokens import ByteTokenizer
from experiments.training.parts.files.checkpoint import CHECKPOINTS, load_checkpoint
from experiments.training.parts.ranks import launched
from experiments.training.parts.ranks.cores import Cores
from experiments.training.parts.ranks.launched import Launched
from experiments.training.parts.ranks.ranks import Ranks
from tests.experiments.runs import FAST, ended, steps, write_text
from zenflow.errors import ConfigError


@pytest.fixture
def two_ranks(monkeypatch):
    """What torchrun tells the first of two processes."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


def test_processes_that_would_train_a_model_each_are_refused(tmp_path, two_ranks):
    said = ended(2, "--out", tmp_path / "run", *FAST)
    assert "2 processes were started, and each would train a model of its own" in said
    assert "--parallel fsdp" in said
    assert not (tmp_path / "run").exists()


def test_ranks_without_a_launcher_get_the_command(tmp_path, monkeypatch):
    flags = ["--out", tmp_path / "run", *FAST, "--parallel", "fsdp"]
    monkeypatch.setattr(sys, "argv", ["zenflow", "train", *map(str, flags)])
    said = ended(2, *flags)
    assert f"torchrun --nproc-per-node 2 -m zenflow train --out {tmp_path / 'run'}" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--parallel", "fsdp", "--device", "cuda:1"], "each rank takes its own"),
        (["--parallel", "mpi"], "'mpi' is not one of 'fsdp', 'ddp'"),
    ],
)
def test_what_ranks_cannot_do_is_refused(tmp_path, two_ranks, flags, words):
    assert words in ended(2, "--out", tmp_path / "run", *FAST, *flags)


def test_an_error_of_all_ranks_is_told_by_the_first_of_a_machine(monkeypatch):
    waited = []
    monkeypatch.setattr(launched.time, "sleep", waited.append)
    for local_rank in (0, 1):
        with pytest.raises(ConfigError), Launched(local_rank=local_rank).telling_once():
            raise ConfigError("no")
    assert len(waited) == 1


def test_shares_of_ranks_are_the_batches_of_one_process():
    places = [Launched(rank=rank, count=3) for rank in range(3)]
    rows = [(f"text {number}" * (1 + number % 4), number % 2) for number in range(20)]
    for make in (
        lambda **how: TokenWindows(torch.arange(500), batch_size=6, sequence=8, seed=3, **how),
        lambda **how: LabelledBatches(
            rows, ByteTokenizer(), batch_size=6, sequence=9, seed=3, **how
        ),
    ):
        whole, parts = make(), [make(ranks=Ranks(place=place)) for place in places]
        for index in range(9):  # some of them in the next epoch
            shares = [part.batch(index) for part in parts]
            assert [len(share.targets) for share in shares] == [2, 2, 2]
            targets = torch.cat([share.targets for share in shares])
            assert torch.equal(targets, whole.batch(index).targets)
            assert sum(share.num_tokens for share in shares) == whole.batch(index).num_tokens


def test_cores_are_told_as_linux_tells_them():
    found = Cores(count=6, cpus=(0, 1, 2, 3, 8, 10), nodes=(0, 1), node_of_gpu=1)
    assert str(found) == "6 cores (0-3,8,10 of NUMA node 0,1, its GPU on node 1)"
    assert str(Cores(count=2, cpus=())) == "2 cores, bound to none"


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")
def test_a_signal_to_torchrun_saves_once_at_the_same_step(tmp_path):
    data = write_text(tmp_path / "text.txt")
    out = tmp_path / "run"
    flags = ["--out", out, *FAST, "--data", data, "--parallel", "fsdp", "--steps", 100_000]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", 2, "-m", "zenflow", "train", *flags]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            list(map(str, command)), stdout=said, stderr=said, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    try:
        until = time.monotonic() + 100
        while not (out / "steps.jsonl").is_file() or len(steps(out)) < 3:
            assert process.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < until, (tmp_path / "said").read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)  # the launcher hands it on to all ranks
        process.wait(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = (tmp_path / "said").read_text()
    assert text.count("Stopping: the step under way is finished") == 1
    assert text.count("Stopped by SIGINT") == 1
    assert load_checkpoint(out / CHECKPOINTS).step == steps(out)[-1]["step"]
