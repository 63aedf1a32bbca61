"""What people do with an optimizer that this one refuses; each takes what makes optimizers.

Parameters are named `weight` and `bias`, so that messages are the same everywhere.
"""

import copy

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.zenflow.conformance.subjects import affine, train


def named(weight, bias):
    return [("weight", weight), ("bias", bias)]


def made(make, **settings):
    problem = affine(params=named, **settings)
    return problem, problem.made_by(make)


def in_group(make, **settings):
    problem = affine(params=lambda w, b: [{"params": named(w, b), **settings}])
    return problem.made_by(make)


def made_of(make, *tensors):
    return make(list(zip(("weight", "bias"), tensors, strict=False)))


def views_of_one_tensor():
    both = torch.zeros(10, 8)
    return nn.Parameter(both[:, :4]), nn.Parameter(both[:, 4:])


def sharded_by_columns():
    """Return a parameter as tensor parallelism has it, of the only rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        return nn.Parameter(distribute_tensor(torch.ones(4, 5), mesh, [Shard(1)]))
    finally:
        distributed.destroy_process_group()


# ---- at a step ----------------------------------------------------------------------------------


def step_with_gradient(make, gradient):
    problem, optimizer = made(make)
    problem.tensors[0].grad = gradient(problem.tensors[0])
    optimizer.step()


def train_after(make, change):
    problem, optimizer = made(make)
    train(problem, optimizer, 1)
    change(problem.tensors, optimizer)
    train(problem, optimizer, 1)


@torch.no_grad()
def clamp_weights(tensors, _):
    tensors[0].clamp_(-0.1, 0.1)


def replace_memory(tensors, _):
    tensors[0].data = tensors[0].data.clone()


def cast(make):
    problem, optimizer = made(make)
    for p in problem.tensors:
        p.data = p.data.bfloat16()
    train(problem, optimizer, 1)


def empty_state(_, optimizer):
    optimizer.state.clear()


def replace_parameter(tensors, optimizer):
    optimizer.param_groups[0]["params"][1] = nn.Parameter(tensors[1].detach().clone())


def unfreeze(make):
    problem = affine(params=named)
    problem.tensors[1].requires_grad_(False)
    optimizer = problem.made_by(make)
    train(problem, optimizer, 1)
    problem.tensors[1].requires_grad_(True)
    train(problem, optimizer, 1)


def renormalize_rows(make):
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 5, max_norm=0.1)
    optimizer = make(embedding.named_parameters())
    for row in (1, 2):
        embedding(torch.tensor([row])).sum().backward()
        optimizer.step()


def train_by_two(make):
    problem, first = made(make)
    second = problem.made_by(make)
    for optimizer in (first, second, first):
        train(problem, optimizer, 1)


# ---- copies and states --------------------------------------------------------------------------


def load(make, theirs, *, by=None, **settings):
    """Load the state of an optimizer that trained another problem."""
    other = by(theirs.tensors, **settings) if by else theirs.made_by(make)
    train(theirs, other, 1)
    _, optimizer = made(make)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))


# ---- between backward and step ------------------------------------------------------------------


def after_backward(make, use):
    problem, optimizer = made(make)
    problem.loss().backward()
    use(problem.tensors[0], optimizer)


def add_group(_, optimizer):
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(3)))]})


def drop_and_go_on(param, _):
    param.grad = None
    param.sum().backward()


def replace_gradient(param, optimizer):
    param.grad = torch.ones_like(param)
    optimizer.step()


def load_after_backward(make):
    problem, optimizer = made(make)
    state = optimizer.state_dict()
    problem.loss().backward()
    optimizer.load_state_dict(state)


def unscale(make):
    problem, optimizer = made(make)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(problem.loss()).backward()
    scaler.unscale_(optimizer)
