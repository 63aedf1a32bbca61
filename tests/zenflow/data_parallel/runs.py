"""Settings of runs whose ranks share the host's work, and what that work is."""

import pytest
import torch
from torch import nn

from tests.models import closing
from tests.zenflow.sharded import runs as sharded
from zenflow import ZenFlowAdamW
from zenflow.host.pool import HostPool

SCENARIOS = {
    f"k = {k:g}, S = {s}, {mode}": {
        "config": {"topk_ratio": k, "update_interval": s},
        "optimizer": {"offload_gradients": mode, "max_grad_norm": 0.5},
        "views": s == 4,
        "static": k == 1,
    }
    for k in (0.0, 0.1, 1.0)
    for s in (1, 4)
    for mode in ("keep", "release")
} | {
    name: sharded.SCENARIOS[name]
    for name in (
        *("published", "warm-up", "no overlap", "accumulated", "accumulated, release"),
        *("accumulated without sync", "clipped by a call", "clipped by a call, keep", "k changes"),
    )
}
"""Settings of runs, by name; "views" and "static" are settings of DDP."""
TRAINED = (
    "k = 0, S = 1, keep",
    "k = 0.1, S = 4, keep",
    "k = 0.1, S = 4, release",
    "k = 1, S = 1, release",
    "no overlap",
    "accumulated, release",
    "accumulated without sync",
    "clipped by a call",
    "k changes",
)
"""Those that every test run trains; the others are slow tests."""
DELAYED = ("k = 0.1, S = 4, keep", "k = 0.1, S = 4, release")
"""Those whose copies and host work are made late."""
SAVED = ("k = 0.1, S = 4, release", "published", "k = 1, S = 4, keep")
"""Those that are saved and resumed."""


def wide_model():
    """Return a model of whose rows ranks have one more or less."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(501, 503, bias=False), nn.Linear(503, 501, bias=False))


def work_of_host(model, **settings):
    """Train a little; return the number of AdamW steps of an element that the host takes."""
    element_steps = 0

    def counted(run):
        def count_and_run(*arguments):
            nonlocal element_steps
            for job in arguments[-1]:
                element_steps += job.rows * job.cols * job.num_steps
            return run(*arguments)

        return count_and_run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostPool, "run", counted(HostPool.run))
        optimizer = ZenFlowAdamW(model.parameters(), host_threads=1, **settings)
        with closing(optimizer):
            for seed in range(24):
                inputs = torch.randn(4, 501, generator=torch.Generator().manual_seed(seed))
                model(inputs).square().mean().backward()
                optimizer.step()
            optimizer.eval()  # what waits is applied
    return element_steps
