"""A process with states on a drive has the memory of their buffers, and not of the states."""

import resource

import pytest
import torch
from torch import nn

from tests.forks import FORKS
from zenflow import ZenFlowAdamW, ZenFlowConfig

LAYERS, WIDTH = 4, 5120
PARAMS = LAYERS * WIDTH * WIDTH
STATE = 12 * PARAMS


def most_memory(state_dir, found):
    """Take some steps, and tell the largest resident memory and that planned."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model.to(torch.bfloat16)
    optimizer = ZenFlowAdamW(
        model.parameters(), lr=1e-4, offload_gradients="release", host_threads=1,
        config=ZenFlowConfig(topk_ratio=0, queue_depth=4), state_dir=state_dir,
    )  # fmt: skip
    for _ in range(5):
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
    planned = optimizer.memory.host_bytes
    optimizer.close()
    found.put((1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, planned))


def measured(state_dir):
    found = FORKS.SimpleQueue()
    process = FORKS.Process(target=most_memory, args=(state_dir, found))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    return found.get()


@pytest.mark.slow
def test_resident_memory_is_less_by_the_states(state_dir):
    """With 105M parameters buffers are a twelfth of the states; larger models have no more."""
    (in_memory, planned), (on_drive, planned_then) = measured(None), measured(state_dir)
    assert STATE - (planned - planned_then) < STATE / 12
    assert STATE - (in_memory - on_drive) < STATE / 4
