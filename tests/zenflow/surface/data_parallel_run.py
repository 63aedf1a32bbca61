"""One of two data-parallel ranks that save, go on, and resume: run by a test as a process."""

import sys

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

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
    parallel, optimizer = make(seed=0)
    with closing(optimizer):
        train(parallel, optimizer, range(5), rank)
        model_state, state = get_state_dict(parallel, optimizer)
        dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=f"{folder}/saved")
        sys.stdout.write(f"{true_sum(parallel, optimizer)}\n")
        expected = train(parallel, optimizer, range(5, 8), rank)
    parallel, optimizer = make(seed=7)
    with closing(optimizer):
        model_state, state = get_state_dict(parallel, optimizer)
        loaded = {"model": model_state, "optimizer": state}
        dcp.load(loaded, checkpoint_id=f"{folder}/saved")
        set_state_dict(
            parallel,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        assert_equal(train(parallel, optimizer, range(5, 8), rank), expected)


if __name__ == "__main__":
    number, where = int(sys.argv[1]), sys.argv[2]
    distributed.init_process_group(
        "gloo", init_method=f"file://{where}/meeting", rank=number, world_size=2
    )
    main(number, where)
    distributed.destroy_process_group()
