"""One of two data-parallel ranks that save, go on, and resume: a process of a test."""

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from tests.forks import send_output
from tests.models import TinyStack, assert_equal, closing, weights_of
from tests.zenflow.runs import CONFIG
from zenflow import ZenFlowAdamW


def train(parallel, optimizer, steps, rank):
    for step in steps:
        generator = torch.Generator().manual_seed(2 * step + rank)
        parallel(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return weights_of(parallel)


def make(seed):
    parallel = DistributedDataParallel(TinyStack(num_layers=3, seed=seed))
    return parallel, ZenFlowAdamW(parallel.parameters(), config=CONFIG)


def true_sum(parallel, optimizer):
    """Return a number by which two states of training are told apart."""
    with optimizer.true_weights():
        return sum(p.double().sum().item() for p in parallel.parameters())


def main(rank, folder):
    """Be a rank, whose errors go to a file."""
    send_output(errors=folder / f"error-{rank}")
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    save_and_resume(rank, folder)
    distributed.destroy_process_group()


def save_and_resume(rank, folder):
    parallel, optimizer = make(seed=0)
    with closing(optimizer):
        train(parallel, optimizer, range(5), rank)
        model_state, state = get_state_dict(parallel, optimizer)
        dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder / "saved")
        (folder / f"sum-{rank}").write_text(str(true_sum(parallel, optimizer)))
        expected = train(parallel, optimizer, range(5, 8), rank)
    parallel, optimizer = make(seed=7)
    with closing(optimizer):
        model_state, state = get_state_dict(parallel, optimizer)
        loaded = {"model": model_state, "optimizer": state}
        dcp.load(loaded, checkpoint_id=folder / "saved")
        set_state_dict(
            parallel,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        assert_equal(train(parallel, optimizer, range(5, 8), rank), expected)
