"""One of several ranks under DistributedDataParallel, run by tests as a process.

    python -m tests.zenflow.data_parallel.ranks TASKS RANK RANKS FOLDER

The variable RANKS_DEVICE says where: on "cpu" or on "cuda".

It leaves what it found, by task, in FOLDER/found-RANK.pt.
"""

import sys
from contextlib import ExitStack

from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from tests.models import closing, weights_of
from tests.zenflow.data_parallel.runs import SCENARIOS, TRAINED
from tests.zenflow.sharded.ranks import carry_out
from tests.zenflow.sharded.runs import NUM_STEPS, Uneven, columns_of, optimizer_of, take_steps


def parallel(where, scenario, seed=0):
    """Return the model with averaged gradients."""
    model = Uneven(seed).to(where)
    return DistributedDataParallel(model, gradient_as_bucket_view=scenario.get("views", False))


def sharing(stack, model, scenario, **settings):
    """Return the optimizer, whose host work ranks share."""
    settings = {"process_group": distributed.group.WORLD, **settings}
    optimizer = stack.enter_context(closing(optimizer_of(model.module, scenario, **settings)))
    if optimizer.releases_gradients:
        optimizer.release_from(model)
    return optimizer


def train_one(scenario, rank, mesh, **settings):
    """Train a scenario and return what comes of it."""
    model = parallel(mesh.device_type, scenario)
    with ExitStack() as stack:
        optimizer = sharing(stack, model, scenario, **settings)
        take_steps(model, optimizer, scenario, range(NUM_STEPS), rank, mesh.size())
        with optimizer.true_weights():
            return {"weights": weights_of(model), "columns": columns_of(optimizer)}


def trained(names, rank, mesh, folder):
    """Train some scenarios."""
    return {name: train_one(SCENARIOS[name], rank, mesh) for name in names}


TASKS = {
    "train": lambda *where: trained(TRAINED, *where),
    "train more": lambda *where: trained(SCENARIOS, *where),
}

if __name__ == "__main__":
    carry_out(TASKS, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
