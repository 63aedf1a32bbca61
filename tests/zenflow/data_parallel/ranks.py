"""Tasks of one of several ranks under DistributedDataParallel, each a process of tests."""

import os
import signal
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.models import TinyStack, closing, weights_of
from tests.zenflow.data_parallel.runs import (
    DELAYED,
    SAVED,
    SCENARIOS,
    TRAINED,
    wide_model,
    work_of_host,
)
from tests.zenflow.host_work import host_work
from tests.zenflow.sharded.compact_runs import all_modes, refused
from tests.zenflow.sharded.ranks import guided, told
from tests.zenflow.sharded.runs import (
    LAST,
    NUM_STEPS,
    SAVED_AT,
    Uneven,
    columns_of,
    load,
    loss_of,
    optimizer_of,
    save,
    take_steps,
)
from tests.zenflow.step.test_gradient_ring import CpuWithRing
from tests.zenflow.step.test_timing import delay
from zenflow import GradientError, ZenFlowAdamW, ZenFlowConfig
from zenflow.lanes.copies import CopyLane
from zenflow.rule import sizes
from zenflow.surface import assembly

SMALL_BUCKETS = {"bucket_cap_mb": 0.0005}
"""Settings of DDP by which even a small model has several buckets."""


@contextmanager
def training(where, scenario, seed=0, **settings):
    """Yield a model whose gradients are averaged, and its optimizer."""
    model = DistributedDataParallel(
        Uneven(seed).to(where),
        gradient_as_bucket_view=scenario.get("views", False),
        static_graph=scenario.get("static", False),
        **SMALL_BUCKETS,
    )
    settings = {"process_group": model.process_group, **settings}
    with closing(optimizer_of(model.module, scenario, **settings)) as optimizer:
        if optimizer.releases_gradients:
            optimizer.release_from(model)
        yield model, optimizer


def train_one(scenario, rank, mesh, **settings):
    """Train a scenario and return what comes of it."""
    with training(mesh.device_type, scenario, **settings) as (model, optimizer):
        take_steps(model, optimizer, scenario, range(NUM_STEPS), rank, mesh.size())
        with optimizer.true_weights():
            return {"weights": weights_of(model), "columns": columns_of(optimizer)}


def trained(names, rank, mesh, folder):
    """Train some scenarios."""
    return {name: train_one(SCENARIOS[name], rank, mesh) for name in names}


def alone_together(rank, mesh, folder):
    """Train as ranks that average gradients and share nothing."""
    scenario = SCENARIOS["k = 0.1, S = 4, keep"]
    return train_one(scenario, rank, mesh, process_group=None)


def through_ring(rank, mesh, folder):
    """Train with gradients that leave through a ring, as they do on a GPU, in small pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "CpuDevice", CpuWithRing)
        patch.setattr(sizes, "RING_BYTES", 1)
        patch.setattr(sizes, "ALIGNMENT", 4)
        return train_one(SCENARIOS["k = 0.1, S = 4, release"], rank, mesh)


def checkpointed(scenario, rank, mesh, folder, *, loads):
    """Train on from step `SAVED_AT`, saving there or resuming from there; return the weights."""
    with training(mesh.device_type, scenario, seed=7 if loads else 0) as (model, optimizer):
        if loads:
            load(model, optimizer, folder)
        else:
            take_steps(model, optimizer, scenario, range(SAVED_AT), rank, mesh.size())
            save(model, optimizer, folder)
        take_steps(model, optimizer, scenario, range(SAVED_AT, LAST), rank, mesh.size())
        with optimizer.true_weights():
            return weights_of(model), columns_of(optimizer)


def save_all(rank, mesh, folder):
    """Save every scenario of `SAVED` on the way."""
    return {
        name: checkpointed(SCENARIOS[name], rank, mesh, folder / name, loads=False)
        for name in SAVED
    }


def load_all(rank, mesh, folder, names=SAVED):
    """Resume some scenarios of `SAVED`."""
    return {
        name: checkpointed(SCENARIOS[name], rank, mesh, folder / name, loads=True)
        for name in names
    }


def delayed(rank, mesh, folder):
    """Train with random waits before copies and host work, other ones on every rank."""
    found = {}
    for name in DELAYED:
        with pytest.MonkeyPatch.context() as patch:
            for owner, function in ((CopyLane, "_perform"), *host_work("sum", "catch_up")):
                delay(patch, owner, function, 0.004, seed=rank)
            found[name] = train_one(SCENARIOS[name], rank, mesh)["weights"]
    return found


def exported(rank, mesh, folder):
    """Return a whole state on rank 0, and the state that torch's AdamW goes on with."""
    scenario = SCENARIOS["k = 0.1, S = 4, release"]
    with training(mesh.device_type, scenario) as (model, optimizer):
        take_steps(model, optimizer, scenario, range(SAVED_AT), rank, mesh.size())
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = get_optimizer_state_dict(model, optimizer, options=options)
        states = optimizer.to_adamw_state_dict()["state"].values()
        moments = [entry["exp_avg"] for entry in states]
        moments = [m.full_tensor() if isinstance(m, DTensor) else m for m in moments]
        return {"full": full, "exp_avg": moments}


def saved_by_one(rank, mesh, folder):
    """Save on rank 0 alone, and let all ranks load that; return the error."""
    scenario = SCENARIOS["k = 0.1, S = 4, keep"]
    with training(mesh.device_type, scenario) as (model, optimizer):
        take_steps(model, optimizer, scenario, range(SAVED_AT), rank, mesh.size())
        state = optimizer.state_dict()
        if rank == 0:
            torch.save(state, folder / "by one")
        distributed.barrier()
        state = torch.load(folder / "by one")
        return told(lambda: optimizer.load_state_dict(state))


def weighed(rank, mesh, folder):
    """Return what a larger model takes and sends on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))
    parallel = DistributedDataParallel(model)
    config = ZenFlowConfig(update_interval=1)
    optimizer = ZenFlowAdamW(
        model.parameters(),
        config=config,
        host_threads=1,
        process_group=parallel.process_group,
    )
    with closing(optimizer):
        for _ in range(2):
            parallel(torch.randn(4, 512)).square().mean().backward()
            optimizer.step()
        report = optimizer.report
        found = {
            "memory": optimizer.memory,
            "d2h_bytes": report.d2h_bytes,
            "h2d_bytes": report.h2d_bytes,
        }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "CpuDevice", CpuWithRing)
        optimizer = ZenFlowAdamW(
            model.parameters(),
            host_threads=1,
            offload_gradients="release",
            process_group=parallel.process_group,
        )
        with closing(optimizer):
            found["ring"] = optimizer.memory
    optimizer = ZenFlowAdamW(
        model.parameters(),
        config=ZenFlowConfig(host_state="compact"),
        host_threads=1,
        process_group=parallel.process_group,
    )
    with closing(optimizer):
        return {**found, "compact": optimizer.memory}


def worked(rank, mesh, folder):
    """Return what the host does on a rank that shares its work."""
    model = DistributedDataParallel(wide_model())
    return work_of_host(model, process_group=model.process_group)


class Transposed(nn.Module):
    """A matrix and a kernel whose memory is in another order than their dimensions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 12, bias=False)
        self.first.weight.data = self.first.weight.data.t().contiguous().t()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.conv(self.first(x).view(-1, 3, 2, 2))


def in_other_order(rank, mesh, folder):
    """Train parameters in another order in memory, in both modes."""
    found = []
    for mode in ("keep", "release"):
        model = DistributedDataParallel(Transposed(), **SMALL_BUCKETS)
        optimizer = ZenFlowAdamW(
            model.parameters(),
            lr=1e-2,
            config=ZenFlowConfig(min_split_elements=16),
            offload_gradients=mode,
            process_group=model.process_group,
        )
        with closing(optimizer):
            if mode == "release":
                optimizer.release_from(model)
            for step in range(8):
                generator = torch.Generator().manual_seed(2 * step + rank)
                model(torch.randn(4, 6, generator=generator)).square().mean().backward()
                optimizer.step()
            found.append(weights_of(model))
    return found


def misused(rank, mesh, folder):
    """Return the errors of what can't be trained."""
    sharded = fully_shard(nn.Linear(8, 8), mesh=mesh)
    model = DistributedDataParallel(TinyStack(num_layers=2))
    other = DistributedDataParallel(TinyStack(num_layers=2))
    unsure = DistributedDataParallel(TinyStack(num_layers=2), find_unused_parameters=True)
    own = distributed.new_group([rank], use_local_synchronization=True)
    narrow = DistributedDataParallel(TinyStack(num_layers=2), process_group=own)

    def make(source, mode="release", **settings):
        settings = {"process_group": distributed.group.WORLD, **settings}
        return ZenFlowAdamW(source.parameters(), offload_gradients=mode, **settings)

    def release(source, wrapped, **settings):
        with closing(make(source, **settings)) as optimizer:
            optimizer.release_from(wrapped)
            optimizer.release_from(wrapped)

    def step():
        with closing(make(model)) as optimizer:
            model(torch.zeros(1, 6)).sum().backward()
            optimizer.step()

    config = ZenFlowConfig(update_interval=4 + rank)
    return {
        "sharded": told(lambda: make(sharded)),
        "other settings": told(lambda: make(model, config=config)),
        "other rates": told(lambda: make(model, lr=1e-3 * (1 + rank))),
        "another mode": told(lambda: make(model, "keep" if rank else "release")),
        "no group": told(lambda: make(model, process_group=None)),
        "keep mode": told(lambda: release(model, model, mode="keep")),
        "another model": told(lambda: release(model, other)),
        "no member": told(lambda: make(model, process_group=-100)),
        "other ranks": told(lambda: release(narrow, narrow)),
        "unused": told(lambda: release(unsure, unsure)),
        "twice": told(lambda: release(model, model)),
        "not released from": told(step),
    }


def one_too_many(rank, mesh, folder):
    """Run a backward pass more than the optimizer knows of."""
    scenario = {"optimizer": {"offload_gradients": "release"}, "micro_batches": 2}
    with training(mesh.device_type, scenario) as (model, optimizer):
        try:
            take_steps(model, optimizer, scenario, [0], rank, mesh.size())
        except GradientError as error:
            return f"GradientError: {error}"


def dropped(rank, mesh, folder):
    """Drop a step's gradients between backward and step(), and train on."""
    scenario = SCENARIOS["k = 0.1, S = 4, release"]
    with training(mesh.device_type, scenario) as (model, optimizer):
        for first in (0, 7):
            take_steps(model, optimizer, scenario, range(first, first + 5), rank, mesh.size())
            model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
            refused = told(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.zero_grad()
        return {"refused": refused, "weights": weights_of(model)}


class _Failing(torch.autograd.Function):
    """Lets what ends a backward pass fail, behind what others have put there before."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        def fail():
            raise ValueError("a callback of somebody else")

        torch.autograd.Variable._execution_engine.queue_callback(fail)
        return grad


def broken_off(rank, mesh, folder):
    """Break a backward off when all buckets have been averaged, or don't; return the weights."""
    ends = []
    for breaks in (False, True):
        model = DistributedDataParallel(TinyStack(), **SMALL_BUCKETS)
        options = {"offload_gradients": "release", "process_group": model.process_group}
        with closing(optimizer_of(model.module, {}, **options)) as optimizer:
            optimizer.release_from(model)
            for step in range(8):
                rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + rank))
                rows.requires_grad_()
                if breaks and step == 4:
                    with pytest.raises(ValueError, match="somebody else"):
                        model(_Failing.apply(3.0 * rows)).square().sum().backward()
                    optimizer.zero_grad()
                model(rows).square().sum().backward()
                optimizer.step()
            with optimizer.true_weights():
                ends.append(weights_of(model))
    return ends


def apart(rank, mesh, folder):
    """Return the errors of ranks that don't do the same, and how long they took."""

    def own_gradients(model, optimizer):
        with model.no_sync():
            loss_of(model, 5, [rank]).backward()
        optimizer.step()

    def beside_the_module(model, optimizer):
        loss_of(model.module, 5, [rank]).backward()
        optimizer.step()

    def half_averaged(model, optimizer):
        loss_of(model, 5, [rank]).backward()
        own_gradients(model, optimizer)

    def joined(model, optimizer):
        with model.join():
            for step in range(5, 8 + rank):
                loss_of(model, step, [rank]).backward()
                optimizer.step()

    def none_comes(model, optimizer):
        loss_of(model, 5, [rank]).backward()
        if rank == 0:
            optimizer.step()

    cases = {
        "no_sync, keep": ("keep", 1, own_gradients),
        "no_sync, release": ("release", 1, own_gradients),
        "module, keep": ("keep", 1, beside_the_module),
        "module, release": ("release", 1, beside_the_module),
        "no_sync behind an average": ("release", 3, half_averaged),
        "join, keep": ("keep", 1, joined),
        "join, release": ("release", 1, joined),
        "none comes": ("keep", 1, none_comes),
    }
    found = {}
    for name, (mode, accumulation_steps, take) in cases.items():
        options = {"offload_gradients": mode, "accumulation_steps": accumulation_steps}
        scenario = {"optimizer": options, "micro_batches": accumulation_steps}
        settings = {"wait_timeout": 3.0}
        with training(mesh.device_type, scenario, **settings) as (model, optimizer):
            take_steps(model, optimizer, scenario, range(5), rank, mesh.size())
            started = time.monotonic()
            error = told(partial(take, model, optimizer))
            found[name] = error, time.monotonic() - started
            distributed.barrier()
    return found


def failing(rank, mesh, folder):
    """Train until the host of rank 1 fails; nobody waits for long."""
    scenario = SCENARIOS["k = 0.1, S = 4, keep"]
    with (
        training(mesh.device_type, scenario, wait_timeout=8.0) as (model, optimizer),
        pytest.MonkeyPatch.context() as patch,
    ):
        for step in range(30):
            if step == 8 and rank == 1:
                ((owner, function),) = host_work("catch_up")
                patch.setattr(owner, function, lambda *_: 1 / 0)
            try:
                take_steps(model, optimizer, scenario, [step], rank, mesh.size())
            except Exception as error:  # noqa: BLE001 - DDP's own where the other has gone
                return f"{type(error).__name__}: {error}"
    return None


def killed(rank, mesh, folder):
    """Train, saving before every third step, until rank 1 is killed in the middle of a step."""
    scenario = SCENARIOS["k = 0.1, S = 4, release"]
    with training(mesh.device_type, scenario) as (model, optimizer):
        for step in range(100):
            if step and step % 3 == 0:
                save(model, optimizer, folder / f"step-{step}")
            if step == 8 and rank == 1:
                model.module.wide.weight.register_post_accumulate_grad_hook(
                    lambda _: os.kill(os.getpid(), signal.SIGKILL)
                )
            take_steps(model, optimizer, scenario, [step], rank, mesh.size())


def compacted(rank, mesh, folder, *, loads=False):
    """Train with compact host state."""
    return all_modes(DistributedDataParallel, folder, loads=loads)


TASKS = {
    "compact": compacted,
    "go on compact": partial(compacted, loads=True),
    "refuse compact": lambda rank, mesh, folder: refused(DistributedDataParallel),
    "train": lambda *where: trained(TRAINED, *where),
    "train more": lambda *where: trained(SCENARIOS, *where),
    "share nothing": alone_together,
    "ring": through_ring,
    "save": save_all,
    "load": load_all,
    "load one": partial(load_all, names=SAVED[:1]),
    "delay": delayed,
    "export": exported,
    "save by one": saved_by_one,
    "weigh": weighed,
    "work": worked,
    "guide": partial(guided, number=1),
    "other order": in_other_order,
    "misuse": misused,
    "too many": one_too_many,
    "broken off": broken_off,
    "apart": apart,
    "drop": dropped,
    "fail": failing,
    "kill": killed,
}
