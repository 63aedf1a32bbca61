"""Runs of a model whose rows may be spread over ranks, the same in one process and in several."""

import contextlib

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.models import TINY, TinyStack, closing, weights_of
from tests.zenflow.decisions import decisions
from zenflow import LoggedDecisions, ZenFlowAdamW, ZenFlowConfig

RANKS_OF_BATCH = 4
"""Parts of a step's batch, which ranks share out."""
NUM_STEPS = 14
"""Steps of a run, more than the 12 after which windows and selections meet again."""


class Uneven(nn.Module):
    """Rows that no number of ranks divides, a tied embedding, a frozen layer, a checkpointed one.

    With four ranks one has no row of `narrow`.
    """

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.wide = nn.Linear(8, 13)
        self.narrow = nn.Linear(13, 3)
        self.back = nn.Linear(3, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.conv(x.mT).mT
        x = x + checkpoint(self._middle, x, use_reentrant=False)
        x = x + torch.tanh(self.frozen(x))
        return self.head(self.norm(x))

    def _middle(self, x):
        return self.back(torch.tanh(self.narrow(torch.tanh(self.wide(x)))))


def groups_of(model):
    """Return matrices and the other parameters as two groups with settings of their own."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "lr": 3e-3, "betas": (0.9, 0.98)},
        {"params": [(n, p) for n, p in named if p.ndim <= 1], "lr": 1e-3, "weight_decay": 0.0},
    ]


def part_of_batch(step, part):
    """Return the tokens of one part of a step's batch."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randint(11, (2, 7), generator=generator)


def loss_of(model, step, parts):
    """Return the mean loss over some parts of a step's batch."""
    tokens = torch.cat([part_of_batch(step, part) for part in parts])
    tokens = tokens.to(next(model.parameters()).device)
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


CONFIG = {"topk_ratio": 0.3, "update_interval": 4, "select_interval": 6, "block_elements": 40}

SCENARIOS = {
    f"k = {k:g}, S = {s}, {mode}": {
        "config": {"topk_ratio": k, "update_interval": s},
        "optimizer": {"offload_gradients": mode, "max_grad_norm": 0.5},
    }
    for k in (0.0, 0.3, 1.0)
    for s in (1, 4)
    for mode in ("keep", "release")
} | {
    "published": {"config": {"update_rule": "published"}},
    "warm-up": {"config": {"full_warm_up_rounds": 6}},
    "no overlap": {"config": {"overlap_step": False}},
    "accumulated": {
        "micro_batches": 2,
        "optimizer": {"offload_gradients": "keep", "max_grad_norm": 0.5},
    },
    "accumulated, release": {
        "micro_batches": 2,
        "optimizer": {"offload_gradients": "release", "accumulation_steps": 2},
    },
    "accumulated without sync": {
        "micro_batches": 2,
        "sync": False,
        "optimizer": {"offload_gradients": "release", "max_grad_norm": 0.5},
    },
    "clipped by a call": {"clip": 0.4, "optimizer": {"offload_gradients": "release"}},
    "clipped by a call, keep": {"clip": 0.4},
    "gathered once": {"reshard": False, "optimizer": {"offload_gradients": "release"}},
    "k changes": {
        "decisions": [(3, {"topk_ratio": 0.6}), (9, {"topk_ratio": 0.2, "update_interval": 2})],
        "optimizer": {"offload_gradients": "release", "max_grad_norm": 0.5},
    },
}
"""Settings of runs, by name."""
TRAINED = (
    "k = 0, S = 1, keep",
    "k = 0.3, S = 4, keep",
    "k = 0.3, S = 4, release",
    "accumulated, release",
    "accumulated without sync",
    "clipped by a call",
    "k changes",
)
"""Those that every test run trains; the others are slow tests."""
DELAYED = ("k = 0.3, S = 4, keep", "k = 0.3, S = 4, release")
"""Those whose copies and host work are made late."""


def config_of(scenario):
    return ZenFlowConfig(**{**TINY, **CONFIG, **scenario.get("config", {})})


def optimizer_of(model, scenario, **settings):
    log = decisions(config_of(scenario), scenario.get("decisions", []))
    return ZenFlowAdamW(
        groups_of(model),
        config=config_of(scenario),
        controller=LoggedDecisions(log) if log else None,
        host_threads=1,
        **scenario.get("optimizer", {}),
        **settings,
    )


def reducing(model, is_on):
    """Return what lets a pass reduce gradients over ranks, or leave them with each."""
    if isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext() if is_on else model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_on)
    return contextlib.nullcontext()


def take_steps(model, optimizer, scenario, steps, rank=0, num_ranks=1):
    """Train on the rank's share of every step's batch."""
    share = RANKS_OF_BATCH // num_ranks
    parts = range(rank * share, (rank + 1) * share)
    count = scenario.get("micro_batches", 1)
    for step in steps:
        for micro in range(count):
            is_reducing = micro == count - 1 or scenario.get("sync", True)
            with reducing(model, is_reducing):
                (loss_of(model, 10 * step + micro, parts) / count).backward()
        if "clip" in scenario:
            optimizer.clip_grad_norm_(scenario["clip"])
        optimizer.step()
        optimizer.zero_grad()


DROPPED_AT = {2: [5], 5: [6, 1, 6], 6: [6, 6], 8: [3], 9: [2, 6]}
"""Batches that are dropped before some steps: the number of layers that each goes through.

The model has two layers in a bucket, and backward begins with the last one's. So of 5 layers the
first bucket lacks one, and of 6 all are full.
"""
DROPPING = {
    f"{mode}, {rule}": {
        "config": {"update_rule": rule, "topk_ratio": 0.25, "block_elements": 5_000},
        "optimizer": {"offload_gradients": mode, "max_grad_norm": 0.5, "eps": 1e-3},
    }
    for mode, rule in (("release", "exact"), ("release", "published"), ("keep", "exact"))
} | {"release, clipped": {"clip": 0.4, "optimizer": {"offload_gradients": "release", "eps": 1e-3}}}
"""Scenarios in which batches are dropped."""


def stack():
    """Return a model of three buckets."""
    return TinyStack(num_layers=6, width=96)


def drop_some(model, optimizer, scenario, rank=0, num_ranks=1):
    """Train and drop batches; return the weights after steps behind these, then the true ones."""

    def backward(batch, num_layers):
        generator = torch.Generator().manual_seed(batch)
        rows = torch.randn(RANKS_OF_BATCH, 96, generator=generator).chunk(num_ranks)[rank]
        model(rows, num_layers).square().sum(dim=1).mean().backward()
        if "clip" in scenario:
            optimizer.clip_grad_norm_(scenario["clip"])

    def seen():
        return [whole(p) for p in model.parameters()]

    found = []
    for step in range(12):
        for number, num_layers in enumerate(DROPPED_AT.get(step, ())):
            backward(100 * step + number, num_layers)
            optimizer.zero_grad()
        backward(step, 6)
        optimizer.step()
        if step in DROPPED_AT:
            found += seen()
    with optimizer.true_weights():
        return found + seen()


def whole(param):
    """Return a copy of a parameter that may be sharded."""
    param = param.full_tensor() if isinstance(param, DTensor) else param
    return param.detach().cpu().clone()


SAVED = ("k = 0.3, S = 4, release", "published", "k = 1, S = 4, keep")
"""Scenarios that are saved and resumed."""
SAVED_AT, LAST = 5, 11
"""Number of steps before a checkpoint, in the middle of windows, and in all."""


def save(model, optimizer, folder):
    """Save a run by `torch.distributed.checkpoint`."""
    model_state, state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)


def load(model, optimizer, folder):
    """Go on from what `save` saved, on any number of ranks."""
    model_state, state = get_state_dict(model, optimizer)
    loaded = {"model": model_state, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )


def columns_of(optimizer):
    """Return the important columns of each split parameter, in ascending order."""
    layout = optimizer._engine.layout
    return [split.important_columns.cpu().sort().values for split in layout.splits]


def alone(scenario):
    """Return the weights and the columns after a run in one process."""
    model = Uneven()
    # In one process every pass adds to the gradient, whether ranks would have reduced it or not.
    scenario = dict(scenario)
    if not scenario.get("sync", True):
        settings = {**scenario["optimizer"], "accumulation_steps": scenario["micro_batches"]}
        scenario["optimizer"] = settings
    with contextlib.ExitStack() as stack:
        optimizer = stack.enter_context(closing(optimizer_of(model, scenario)))
        take_steps(model, optimizer, scenario, range(NUM_STEPS))
        with optimizer.true_weights():
            weights = weights_of(model)
        return weights, columns_of(optimizer)


def dropping_alone(scenario):
    """Return what `drop_some` finds in one process."""
    model = stack()
    with closing(optimizer_of(model, scenario)) as optimizer:
        return drop_some(model, optimizer, scenario)
