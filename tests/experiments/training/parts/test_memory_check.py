"""Memory that is not there is refused before it is allocated."""

import math
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from experiments.training.parts import memory_check
from experiments.training.parts.memory_check import check_device_memory, check_host_memory
from experiments.training.parts.ranks.ranks import ALONE
from experiments.training.parts.setup import build_setup, make_optimizer
from experiments.training.settings.training import TrainSettings
from tests.experiments.runs import FAST, ended, write_text
from tests.zenflow.step.test_gradient_ring import CpuWithRing
from zenflow import ConfigError, ZenFlowConfig
from zenflow.host import limits
from zenflow.host.limits import free_bytes
from zenflow.surface import assembly


def group(folder, limit, used, cache):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def left(monkeypatch, folders):
    """Return what the control groups in these folders leave; infinite without a limit."""
    monkeypatch.setattr(limits, "control_groups", lambda controller: folders)
    machine = SimpleNamespace(available=math.inf)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    return free_bytes()


def test_the_tightest_limit_of_a_group_and_those_above_it_counts(tmp_path, monkeypatch):
    folders = [tmp_path / "outer" / "inner", tmp_path / "outer", tmp_path]
    assert left(monkeypatch, folders)[0] == math.inf
    group(folders[0], "max", 100, 10)
    assert left(monkeypatch, folders)[0] == math.inf
    group(folders[1], 1000, 400, 50)
    assert left(monkeypatch, folders) == (650, "the container's limit")
    group(folders[0], 500, 100, 10)
    assert left(monkeypatch, folders)[0] == 410
    group(folders[2], 300, 100, 0)
    assert left(monkeypatch, folders)[0] == 200


def test_groups_of_the_first_version_count_too(tmp_path, monkeypatch):
    (tmp_path / "memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory.usage_in_bytes").write_text("300\n")
    (tmp_path / "memory.stat").write_text("total_inactive_file 30\n")
    assert left(monkeypatch, [tmp_path])[0] == 730


def test_a_limit_of_the_shell_counts():
    program = (
        "import resource, psutil\nfrom zenflow.host.limits import free_bytes\n"
        "room = psutil.Process().memory_info().vms + 200_000_000\n"
        "resource.setrlimit(resource.RLIMIT_AS, (room, room))\n"
        "free, limit = free_bytes()\n"
        "assert 0 < free <= 200_000_000, free\nassert limit == 'ulimit -v'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


COUNTED = [
    ("on_device", {}),
    ("zero_offload", {}),
    ("zenflow_paper", {}),
    ("zenflow", {"queue_depth": 3}),
    ("zenflow", {"host_state": "compact"}),
    ("zenflow", {"host_state": "compact", "queue_depth": 2}),
    ("zenflow", {"second_moment": "factored", "queue_depth": 3}),
    ("zenflow", {"second_moment": "factored", "host_state": "compact"}),
]


def small(tmp_path, **settings):
    data = str(write_text(tmp_path / "a.txt"))
    return TrainSettings(model="own:small", data=data, sequence=32, device="cpu", **settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("strategy", "knobs"), COUNTED, ids=str)
def test_what_is_counted_is_what_the_optimizer_takes(
    strategy, knobs, dtype, tmp_path, monkeypatch
):
    setup = build_setup(small(tmp_path, strategy=strategy, knobs=knobs, dtype=dtype))
    optimizer = make_optimizer(setup)
    plan = optimizer.memory
    optimizer.close()
    taken = plan.host_bytes + plan.device_extra_bytes
    monkeypatch.setattr(memory_check, "free_bytes", lambda: (float(taken), "a test"))
    check_host_memory(setup.model, setup.config, on_cpu=True)
    monkeypatch.setattr(memory_check, "free_bytes", lambda: (float(taken - 1), "a test"))
    with pytest.raises(ConfigError, match="a test leaves"):
        check_host_memory(setup.model, setup.config, on_cpu=True)


def test_a_run_that_fits_with_fewer_waiting_gradients_is_not_refused(tmp_path, monkeypatch):
    setup = build_setup(small(tmp_path))
    shallow = build_setup(small(tmp_path, knobs={"queue_depth": 1}))
    optimizer = make_optimizer(shallow)
    least = optimizer.memory.host_bytes + optimizer.memory.device_extra_bytes
    optimizer.close()
    monkeypatch.setattr(memory_check, "free_bytes", lambda: (float(least), "a test"))
    check_host_memory(setup.model, setup.config, on_cpu=True)


def test_what_fits_with_compact_state_alone_is_told_so(tmp_path, monkeypatch):
    setup = build_setup(small(tmp_path))
    compact = build_setup(small(tmp_path, knobs={"host_state": "compact", "queue_depth": 1}))
    optimizer = make_optimizer(compact)
    least = optimizer.memory.host_bytes + optimizer.memory.device_extra_bytes
    optimizer.close()
    for free, is_told in ((least, True), (least - 1, False)):
        monkeypatch.setattr(memory_check, "free_bytes", lambda free=free: (float(free), "a test"))
        with pytest.raises(ConfigError, match="a test leaves") as refused:
            check_host_memory(setup.model, setup.config, on_cpu=True)
        assert ("--host-state compact --queue-depth 1" in str(refused.value)) == is_told
    monkeypatch.setattr(memory_check, "free_bytes", lambda: (float(least), "a test"))
    check_host_memory(compact.model, compact.config, on_cpu=True)


def test_what_fits_with_states_on_a_drive_alone_is_told_so(tmp_path, state_dir, monkeypatch):
    """The command that is told takes the bytes that are told, and is refused without them."""
    setup = build_setup(small(tmp_path, knobs={"host_state": "compact"}))
    drive = build_setup(
        small(
            tmp_path,
            state_dir=str(state_dir),
            knobs={"host_state": "compact", "topk_ratio": 0.0, "queue_depth": 1},
        )
    )
    optimizer = make_optimizer(drive)
    least = optimizer.memory.host_bytes + optimizer.memory.device_extra_bytes
    optimizer.close()
    for free, is_told in ((least, True), (least - 1, False)):
        monkeypatch.setattr(memory_check, "free_bytes", lambda free=free: (float(free), "a test"))
        with pytest.raises(ConfigError, match="a test leaves") as refused:
            check_host_memory(setup.model, setup.config, on_cpu=True)
        told = "--topk-ratio 0 --queue-depth 1 --state-dir FOLDER needs"
        assert (told in str(refused.value)) == is_told
    with pytest.raises(ConfigError) as refused:
        make_optimizer(drive)
    assert "--state-dir" not in str(refused.value)
    monkeypatch.setattr(memory_check, "free_bytes", lambda: (float(least), "a test"))
    make_optimizer(drive).close()


def test_several_processes_are_not_told_of_a_drive(monkeypatch):
    layers = (nn.Linear(8192, 8192, dtype=torch.bfloat16, device="meta") for _ in range(6))
    model, config = nn.Sequential(*layers), ZenFlowConfig()
    two = SimpleNamespace(
        parallel="ddp", count=2, place=SimpleNamespace(local_count=2), collect=lambda _: None
    )
    monkeypatch.setattr(memory_check, "free_bytes", lambda: (2e9, "a test"))
    for ranks, is_told in ((ALONE, True), (two, False)):
        with pytest.raises(ConfigError) as refused:
            check_host_memory(model, config, on_cpu=False, ranks=ranks)
        assert ("--state-dir" in str(refused.value)) == is_told


def gpu_with(monkeypatch, free, unused=0):
    """Let a GPU have so many free bytes, and torch so many that it keeps and does not use."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10 * free))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: unused + 7)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7)


@pytest.mark.parametrize("strategy", ["on_device", "zenflow"])
def test_states_that_do_not_fit_a_gpu_are_refused(strategy, tmp_path, monkeypatch):
    """Their bytes are those that an optimizer with a ring takes there."""
    setup = build_setup(small(tmp_path, strategy=strategy))
    monkeypatch.setattr(assembly, "CpuDevice", CpuWithRing)
    optimizer = make_optimizer(setup)
    plan = optimizer.memory
    optimizer.close()
    taken = plan.device_extra_bytes + plan.device_ring_bytes
    gpu = torch.device("cuda")
    gpu_with(monkeypatch, taken - 100, 100)
    check_device_memory(setup.model, setup.config, gpu)
    gpu_with(monkeypatch, taken - 100, 99)
    with pytest.raises(ConfigError, match="GB on cuda beside the model") as refused:
        check_device_memory(setup.model, setup.config, gpu)
    assert ("a smaller --topk-ratio than 0.1" in str(refused.value)) == (strategy == "zenflow")


def test_a_run_that_is_told_to_go_on_does(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_check, "free_bytes", lambda: (1000.0, "a test"))
    with pytest.raises(ConfigError, match="--no-memory-check"):
        make_optimizer(build_setup(small(tmp_path)))
    make_optimizer(build_setup(small(tmp_path, memory_check=False))).close()


def test_what_stays_on_a_gpu_is_not_the_hosts(monkeypatch):
    monkeypatch.setattr(memory_check, "free_bytes", lambda: (1000.0, "a test"))
    model, config = nn.Linear(100, 100), ZenFlowConfig.preset("on_device")
    check_host_memory(model, config, on_cpu=False)
    with pytest.raises(ConfigError, match="a test leaves"):
        check_host_memory(model, config, on_cpu=True)


def test_a_run_without_enough_memory_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_check, "free_bytes", lambda: (1e5, "the container's limit"))
    data = write_text(tmp_path / "a.txt")
    said = ended(3, *FAST, "--data", data, "--steps", "1", "--out", tmp_path / "run")
    assert "the container's limit leaves 0.0 GB" in said


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "the host's memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: tried 5"), "the host's memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), "the device's memory"),
    ],
)
def test_memory_that_runs_out_on_the_way_is_told_in_words(tmp_path, monkeypatch, error, words):
    def fail(*_):
        raise error

    monkeypatch.setattr("experiments.training.run.stepper.loss_of", fail)
    data = write_text(tmp_path / "a.txt")
    said = ended(3, *FAST, "--data", data, "--steps", "1", "--out", tmp_path / "run")
    assert f"{words} is too small for this run" in said
    assert "--checkpointing" in said


def test_there_is_some_memory_here():
    free, limit = free_bytes()
    assert free > 0
    assert limit
