"""One of several ranks under FSDP2, run by tests as a process.

    python -m tests.zenflow.sharded.ranks TASK RANK RANKS FOLDER

It leaves what it found in FOLDER/TASK-RANK.pt.
"""

import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.models import closing
from tests.zenflow.sharded.runs import (
    NUM_STEPS,
    SCENARIOS,
    Uneven,
    columns_of,
    optimizer_of,
    take_steps,
)


def sharded(mesh, *, seed=0, reshard=True):
    """Return the model with its layers and itself sharded."""
    model = Uneven(seed)
    for layer in (model.conv, model.wide, model.narrow, model.back, model.frozen):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def whole_weights(model):
    """Return copies of the whole parameters, on every rank."""
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def train(rank, mesh, folder):
    """Train every scenario."""
    found = {}
    for name, scenario in SCENARIOS.items():
        model = sharded(mesh, reshard=scenario.get("reshard", True))
        with closing(optimizer_of(model, scenario)) as optimizer:
            take_steps(model, optimizer, scenario, range(NUM_STEPS), rank, mesh.size())
            with optimizer.true_weights():
                weights = whole_weights(model)
            found[name] = {
                "weights": weights,
                "columns": columns_of(optimizer),
                "added_up": optimizer._engine.layout.shards.num_bytes,
                "memory": optimizer.memory,
                "d2h_bytes": optimizer.report.d2h_bytes,
            }
    return found


TASKS = {"train": train}


def main(task, rank, num_ranks, folder):
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting-{task}", rank=rank, world_size=num_ranks
    )
    found = TASKS[task](rank, init_device_mesh("cpu", (num_ranks,)), Path(folder))
    torch.save(found, f"{folder}/{task}-{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
