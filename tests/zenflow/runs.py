"""Runs that tests of failures disturb: a small model, one rule, either gradient mode."""

from tests.models import TINY, TinyStack, closing, weights_of
from zenflow import ZenFlowAdamW, ZenFlowConfig

CONFIG = ZenFlowConfig(
    topk_ratio=0.3, update_interval=2, select_interval=3, block_elements=20, **TINY
)
MODES = {"keep": {}, "release": {"offload_gradients": "release", "max_grad_norm": 0.5}}


def make(mode="keep", config=CONFIG, model=None, **settings):
    model = model or TinyStack(num_layers=4)
    return model, ZenFlowAdamW(model.parameters(), config=config, **MODES[mode], **settings)


def take_steps(model, optimizer, steps):
    for step in steps:
        model.loss(step).backward()
        optimizer.step()


def undisturbed_weights(num_steps):
    """Return the weights after a run in which nothing goes wrong."""
    model, optimizer = make()
    with closing(optimizer):
        take_steps(model, optimizer, range(num_steps))
        optimizer.synchronize()
        return weights_of(model)
