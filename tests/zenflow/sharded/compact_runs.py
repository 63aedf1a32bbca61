"""Runs with formats of few bytes in which ranks sum exactly: equal bits are to be expected."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.models import TINY, closing
from tests.zenflow.sharded.runs import columns_of, load, save, whole
from zenflow import ZenFlowAdamW, ZenFlowConfig

CONFIG = ZenFlowConfig(
    topk_ratio=0.25, update_interval=4, select_interval=3, block_elements=1500,
    host_state="compact", importance_decay=0.5, **TINY,
)  # fmt: skip
SHORT = replace(CONFIG, gradient_link="e4m3")
CONFIGS = {
    "keep": CONFIG, "release": SHORT,
    "factored": replace(SHORT, second_moment="factored"),
}  # fmt: skip
SAVED_AT, LAST = 6, 13
OPTIONS = {
    "keep": {"offload_gradients": "keep"},
    "release": {"offload_gradients": "release", "max_grad_norm": 1e9},
    "factored": {"offload_gradients": "release", "max_grad_norm": 1e9},
}


class Given(nn.Module):
    """Matrices with gradients that averages keep exact, of sizes that differ within a group.

    Without `differs` columns' norms are exact sums too, whoever adds their rows up.
    """

    def __init__(self, seed=0, *, differs=True):
        super().__init__()
        self.least = -12 if differs else 0
        torch.manual_seed(seed)
        self.first = nn.Parameter(torch.randn(256, 20))
        self.second = nn.Parameter(torch.randn(512, 9))

    def forward(self, step):
        generator = torch.Generator().manual_seed(step)
        total = 0.0
        for weight in self.parameters():
            grad = torch.randint(-40, 41, weight.shape, generator=generator)
            scale = 2.0 ** torch.randint(-3, 4, weight.shape[1:], generator=generator)
            of_rows = 2.0 ** torch.randint(self.least, 1, (len(weight), 1), generator=generator)
            total = total + (weight * grad * scale * of_rows).sum()
        return total


def trained(wrap, folder, mode, *, loads=False):
    """Return true weights and columns of a run that was saved on the way, or goes on from there.

    Args:
        wrap: Function from a module to what ranks train.
        folder: Folder of the checkpoint.
        mode: Key of `OPTIONS`.
        loads: Whether to go on from a checkpoint that is there.
    """
    model = wrap(Given(7 if loads else 0, differs=mode != "factored"))
    options = dict(OPTIONS[mode])
    if isinstance(model, DistributedDataParallel):
        options["process_group"] = model.process_group
    options |= {"lr": 1e-2, "config": CONFIGS[mode]}
    with closing(ZenFlowAdamW(model.parameters(), **options)) as optimizer:
        if "process_group" in options and mode != "keep":
            optimizer.release_from(model)
        if loads:
            load(model, optimizer, folder)
        for step in range(SAVED_AT if loads else 0, LAST):
            if step == SAVED_AT and not loads:
                save(model, optimizer, folder)
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.true_weights():
            return [whole(p) for p in model.parameters()], columns_of(optimizer)


def all_modes(wrap, folder, *, loads=False):
    """Return what comes of both modes."""
    return {mode: trained(wrap, folder / f"compact {mode}", mode, loads=loads) for mode in OPTIONS}


def refused(wrap):
    """Return the error of a model whose rows ranks would cut within a group."""
    model = wrap(nn.Linear(9, 200, bias=False))
    shared = isinstance(model, DistributedDataParallel)
    options = {"process_group": model.process_group} if shared else {}
    try:
        ZenFlowAdamW(model.parameters(), config=CONFIG, **options)
    except ValueError as error:
        return str(error)
