"""Tasks of one of several ranks under FSDP2, each of which is a process that tests start."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from tests.models import TinyStack, closing
from tests.test_documents import python_blocks
from tests.zenflow.host_work import host_work
from tests.zenflow.sharded.compact_runs import all_modes, refused
from tests.zenflow.sharded.runs import (
    DELAYED,
    DROPPING,
    LAST,
    NUM_STEPS,
    SAVED,
    SAVED_AT,
    SCENARIOS,
    TRAINED,
    Uneven,
    columns_of,
    drop_some,
    groups_of,
    load,
    loss_of,
    optimizer_of,
    save,
    stack,
    take_steps,
    whole,
)
from tests.zenflow.step.test_timing import delay
from zenflow import GradientError, ZenFlowAdamW, ZenFlowConfig, ZenFlowError
from zenflow.lanes.copies import CopyLane


def sharded(mesh, *, seed=0, reshard=True):
    """Return the model with its layers and itself sharded."""
    model = Uneven(seed).to(mesh.device_type)
    for layer in (model.conv, model.wide, model.frozen):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def whole_weights(model):
    """Return copies of the whole parameters, on every rank."""
    return [whole(p) for p in model.parameters()]


def train_one(scenario, rank, mesh, num_ranks=None):
    """Train a scenario and return what comes of it."""
    model = sharded(mesh, reshard=scenario.get("reshard", True))
    with closing(optimizer_of(model, scenario)) as optimizer:
        steps = range(NUM_STEPS)
        take_steps(model, optimizer, scenario, steps, rank, num_ranks or mesh.size())
        with optimizer.true_weights():
            return {"weights": whole_weights(model), "columns": columns_of(optimizer)}


def trained(names, rank, mesh, folder):
    """Train some scenarios."""
    return {name: train_one(SCENARIOS[name], rank, mesh) for name in names}


def checkpointed(scenario, rank, mesh, folder, *, loads):
    """Train on from step `SAVED_AT`, saving there or resuming from there; return the weights."""
    num_ranks = mesh.size()
    model = sharded(mesh, seed=7 if loads else 0)
    with closing(optimizer_of(model, scenario)) as optimizer:
        if loads:
            load(model, optimizer, folder)
        else:
            take_steps(model, optimizer, scenario, range(SAVED_AT), rank, num_ranks)
            save(model, optimizer, folder)
        take_steps(model, optimizer, scenario, range(SAVED_AT, LAST), rank, num_ranks)
        with optimizer.true_weights():
            return whole_weights(model), columns_of(optimizer)


def saved_behind(rank, mesh, folder):
    """Save in the background while training goes on, and resume."""
    scenario, ends = SCENARIOS["k = 0.3, S = 4, release"], []
    for seed in (0, 7):
        model = sharded(mesh, seed=seed)
        with closing(optimizer_of(model, scenario)) as optimizer:
            if seed:
                load(model, optimizer, folder / "behind")
            else:
                take_steps(model, optimizer, scenario, range(SAVED_AT), rank, mesh.size())
                model_state, state = get_state_dict(model, optimizer)
                saving = dcp.async_save(
                    {"model": model_state, "optimizer": state},
                    checkpoint_id=folder / "behind",
                    process_group=distributed.new_group(backend="gloo"),
                )
            take_steps(model, optimizer, scenario, range(SAVED_AT, LAST), rank, mesh.size())
            saving.result()
            with optimizer.true_weights():
                ends.append(whole_weights(model))
    return ends


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


def beside_adamw(rank, mesh, folder):
    """Train under FSDP2 with every column on the device, and by torch's AdamW."""
    scenario = {"config": {"topk_ratio": 1.0}}
    ours = train_one(scenario, rank, mesh)["weights"]
    model = sharded(mesh)
    optimizer = torch.optim.AdamW(groups_of(model))
    take_steps(model, optimizer, scenario, range(NUM_STEPS), rank, mesh.size())
    return {"ours": ours, "torch's": whole_weights(model)}


def exported(rank, mesh, folder):
    """Save all of a state on rank 0, and the state that torch's AdamW goes on with."""
    model = sharded(mesh)
    scenario = SCENARIOS["k = 0.3, S = 4, release"]
    with closing(optimizer_of(model, scenario)) as optimizer:
        take_steps(model, optimizer, scenario, range(SAVED_AT), rank, mesh.size())
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = get_optimizer_state_dict(model, optimizer, options=options)
        moments = optimizer.to_adamw_state_dict()["state"]
        whole = {
            key: {name: value.full_tensor() for name, value in entry.items() if name != "step"}
            for key, entry in moments.items()
        }
        weights = get_model_state_dict(model, options=options)
        again = _sent_on(full, weights, scenario, rank, mesh)
        take_steps(model, optimizer, scenario, range(SAVED_AT, LAST), rank, mesh.size())
        with optimizer.true_weights():
            ends = whole_weights(model), again
        return {"full": full, "adamw": whole, "ends": ends}


def _sent_on(full, weights, scenario, rank, mesh):
    """Train on from what rank 0 alone has; return the weights."""
    model = sharded(mesh, seed=7)
    with closing(optimizer_of(model, scenario)) as optimizer:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, weights, options=options)
        set_optimizer_state_dict(model, optimizer, full, options=options)
        take_steps(model, optimizer, scenario, range(SAVED_AT, LAST), rank, mesh.size())
        with optimizer.true_weights():
            return whole_weights(model)


def replicated(rank, mesh, folder):
    """Train two replicas of two shards each (HSDP)."""
    scenario = SCENARIOS["k = 0.3, S = 4, release"]
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return train_one(scenario, rank, pairs, num_ranks=4)


def weighed(rank, mesh, folder):
    """Return what a larger model takes and sends on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))
    fully_shard(model, mesh=mesh)
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(), host_threads=1)
    with closing(optimizer):
        model(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()
        shards = optimizer._engine.layout.shards
        sent = optimizer.report.d2h_bytes
        return {"memory": optimizer.memory, "d2h_bytes": sent, "added_up": shards.num_bytes}


class Loss(TinyStack):
    """A model as the guide has it: with layers, and a loss."""

    def forward(self, x):
        return super().forward(x).square().mean()


def guided(rank, mesh, folder, *, number=0):
    """Run one of the blocks that the guide shows and return the loss before and after."""
    page = Path(__file__).resolve().parents[3] / "docs" / "guides" / "many-gpus.md"
    block = python_blocks(page)[number]
    model = Loss(num_layers=2, width=8)
    batch = torch.randn(16, 8)
    before = model(batch).item()
    names = {"model": model, "batches": [batch] * 30}
    exec(compile(block.replace("lr=1e-5", "lr=1e-2"), str(page), "exec"), names)
    names["optimizer"].close()
    return before, model(batch).item()


def told(make):
    """Return the error's text; every rank has to get one."""
    try:
        optimizer = make()
    except (ValueError, RuntimeError, ZenFlowError) as error:
        return f"{type(error).__name__}: {error}"
    if optimizer is not None:
        optimizer.close()
    return None


def misused(rank, mesh, folder):
    """Return the errors of what can't be trained."""
    whole = nn.Parameter(torch.zeros(8, 8))
    wide = nn.Linear(8, 8)
    fully_shard(wide, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None)
    other = fully_shard(nn.Linear(8, 8), mesh=DeviceMesh("cpu", list(range(mesh.size()))[::-1]))
    good = sharded(mesh)
    config = ZenFlowConfig(update_interval=4 + rank)
    return {
        "mixed": told(lambda: ZenFlowAdamW([*good.parameters(), whole])),
        "by columns": told(lambda: ZenFlowAdamW(wide.parameters())),
        "two meshes": told(lambda: ZenFlowAdamW([*good.parameters(), *other.parameters()])),
        "other settings": told(lambda: ZenFlowAdamW(good.parameters(), config=config)),
        "other rates": told(lambda: ZenFlowAdamW(good.parameters(), lr=1e-3 * (1 + rank))),
    }


def one_too_many(rank, mesh, folder):
    """Run a backward pass more than the optimizer knows of."""
    model = sharded(mesh)
    scenario = {"optimizer": {"offload_gradients": "release"}, "micro_batches": 2}
    with closing(optimizer_of(model, scenario)) as optimizer:
        try:
            take_steps(model, optimizer, scenario, [0], rank, mesh.size())
        except GradientError as error:
            return f"GradientError: {error}"


def overflown(rank, mesh, folder):
    """Let only the last rank's rows have a gradient that is not finite, in one step of three."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(64, 6, bias=False), mesh=mesh)
    scaler = torch.amp.GradScaler(mesh.device_type, init_scale=2.0)
    config = ZenFlowConfig(min_split_elements=16, update_interval=1, overlap_step=False)
    found = []
    with closing(ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)) as optimizer:
        for step in range(3):
            inputs = torch.ones(2, 64, device=mesh.device_type)
            scaler.scale(model(inputs).square().sum()).backward()
            if step == 1 and rank == mesh.size() - 1:
                model.weight.grad.to_local()[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()  # a step that is skipped leaves them behind
            found.append((scaler.get_scale(), whole_weights(model)[0]))
    return found


def dropped(rank, mesh, folder):
    """Drop batches on the way, in several modes."""
    found = {}
    for name, scenario in DROPPING.items():
        model = stack()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with closing(optimizer_of(model, scenario)) as optimizer:
            found[name] = drop_some(model, optimizer, scenario, rank, mesh.size())
    return found


def awaited(rank, mesh, folder):
    """Take a step that the other rank does not take; return the error and the seconds.

    The last task: what was waited for in vain stays in the way of what comes behind it.
    """
    model = sharded(mesh)
    scenario = {"optimizer": {"offload_gradients": "release", "wait_timeout": 1.0}}
    given_up = folder / "given-up"
    with closing(optimizer_of(model, scenario)) as optimizer:
        loss_of(model, 0, [rank]).backward()
        started = time.monotonic()
        if rank == 0:
            error, seconds = told(optimizer.step), time.monotonic() - started
            given_up.touch()
            return error, seconds
        while not given_up.exists() and time.monotonic() < started + 100:
            time.sleep(0.05)
        return None


def killed(rank, mesh, folder):
    """Train, saving before every third step, until rank 1 is killed in the middle of a step."""
    model = sharded(mesh)
    scenario = SCENARIOS["k = 0.3, S = 4, release"]
    optimizer = optimizer_of(model, scenario)
    for step in range(100):
        if step and step % 3 == 0:
            save(model, optimizer, folder / f"step-{step}")
        if step == 8 and rank == 1:
            model.wide.weight.register_post_accumulate_grad_hook(
                lambda _: os.kill(os.getpid(), signal.SIGKILL)
            )
        take_steps(model, optimizer, scenario, [step], rank, mesh.size())


def compacted(rank, mesh, folder, *, loads=False):
    """Train with compact host state."""
    return all_modes(partial(fully_shard, mesh=mesh), folder, loads=loads)


TASKS = {
    "compact": compacted,
    "go on compact": partial(compacted, loads=True),
    "refuse compact": lambda rank, mesh, folder: refused(partial(fully_shard, mesh=mesh)),
    "train": lambda *where: trained(TRAINED, *where),
    "train more": lambda *where: trained(SCENARIOS, *where),
    "save": save_all,
    "load": load_all,
    "load one": partial(load_all, names=SAVED[:1]),
    "delay": delayed,
    "adamw": beside_adamw,
    "export": exported,
    "replicas": replicated,
    "weigh": weighed,
    "misuse": misused,
    "guide": guided,
    "too many": one_too_many,
    "save behind": saved_behind,
    "overflow": overflown,
    "drop": dropped,
    "await": awaited,
    "kill": killed,
}


def carry_out(by_name, tasks, device, num_ranks, folder, rank):
    """Carry out some tasks on a device together with other ranks; leave what was found in a file.

    FOLDER/found-RANK.pt has it, by task.
    """
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=num_ranks,
    )
    mesh = init_device_mesh(device, (num_ranks,))
    found = {task: by_name[task](rank, mesh, folder) for task in tasks}
    torch.save(found, folder / f"found-{rank}.pt")
    distributed.destroy_process_group()
