"""What frameworks' own code takes the host around layers and optimizer steps.

    python -m benchmarks.framework_hooks [--repeats 25] [--out FILE]

Parameters are tiny and collectives do nothing (torch's fake process group), so that what is left
is Python and dispatch. Each figure is a line through a few sizes: seconds of a layer or a step,
and seconds more for each parameter. The simulator takes them from here (`sim.timing.framework`).

DeepSpeed is measured where it is installed. Its optimizer's step is on the CPU here, kernels and
all.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.record import setting
from experiments.output.files import write_json

COUNTS = (1, 9, 17)
"""Parameters of a layer."""
STEP_COUNTS = (50, 250, 450)
"""Parameters of an optimizer."""
_LAYERS = (2, 14)
_RANKS = 8
_WARM_ROUNDS = 4


class Layer(nn.Module):
    """A sum over so many small parameters."""

    def __init__(self, count: int) -> None:
        """Make the parameters."""
        super().__init__()
        self.own = nn.ParameterList(nn.Parameter(torch.zeros(16, 8)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Add the parameters' sums to the input."""
        return x + torch.stack([each.sum() for each in self.own]).sum().to(x.dtype)


def line(points: Mapping[int, float]) -> tuple[float, float]:
    """Return where a least-squares line through points crosses zero, and its slope.

    >>> line({1: 3.0, 3: 7.0})
    (1.0, 2.0)
    """
    slope, start = statistics.linear_regression(list(points), list(points.values()))
    return start, slope


def seconds_of(run: Callable[[], Any]) -> float:
    """Return what a call takes of this thread, whatever else the machine does."""
    started = time.thread_time()
    run()
    return time.thread_time() - started


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call that is warm."""
    times = [seconds_of(run) for _ in range(_WARM_ROUNDS + repeats)]
    return statistics.median(times[_WARM_ROUNDS:])


def passes(model: nn.Module, inputs: Tensor, repeats: int) -> tuple[float, float]:
    """Return the seconds of a model's forward and backward."""

    def forward() -> Tensor:
        found = model(inputs)
        found = found if isinstance(found, Tensor) else found.logits
        return found.sum()

    def both() -> None:
        model.zero_grad()
        forward().backward()

    alone = median_seconds(forward, repeats)
    return alone, median_seconds(both, repeats) - alone


def sharded(model: nn.Module, layers: Sequence[nn.Module]) -> nn.Module:
    """Return the model with each layer and the rest sharded by FSDP2, over ranks that are not."""
    mesh = init_device_mesh("cpu", (_RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def fsdp2(repeats: int) -> dict[str, list[float]]:
    """Return what FSDP2 adds to a layer's passes: seconds, and seconds for each parameter."""
    inputs = torch.zeros(4)
    added: dict[str, dict[int, float]] = {"forward": {}, "backward": {}}
    for count in COUNTS:
        plain, hooked = (
            _layer_passes(partial(_stack, count=count, is_sharded=is_so), inputs, repeats)
            for is_so in (False, True)
        )
        for points, before, after in zip(added.values(), plain, hooked, strict=True):
            points[count] = after - before
    return {name: list(line(points)) for name, points in added.items()}


def _stack(num_layers: int, *, count: int, is_sharded: bool) -> nn.Module:
    model = nn.Sequential(*[Layer(count) for _ in range(num_layers)])
    return sharded(model, list(model)) if is_sharded else model


def decoder(repeats: int) -> list[float]:
    """Return what FSDP2 adds to the passes of transformers' Llama layer, of nine parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(num_layers: int, *, is_sharded: bool) -> nn.Module:
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers,
            num_attention_heads=4, num_key_value_heads=4, vocab_size=128,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        return sharded(model, list(model.model.layers)) if is_sharded else model

    inputs = torch.randint(0, 128, (1, 8))
    plain, hooked = (
        _layer_passes(partial(make, is_sharded=is_so), inputs, repeats) for is_so in (False, True)
    )
    return [after - before for before, after in zip(plain, hooked, strict=True)]


def _layer_passes(
    make: Callable[[int], nn.Module], inputs: Tensor, repeats: int
) -> tuple[float, float]:
    """Return the seconds of one layer's forward and backward, from models of a few and of more."""
    few, more = (passes(make(count), inputs, repeats) for count in _LAYERS)
    layers = _LAYERS[1] - _LAYERS[0]
    return (more[0] - few[0]) / layers, (more[1] - few[1]) / layers


def adamw(repeats: int) -> dict[str, list[float]]:
    """Return what a step of PyTorch's AdamW takes, and more for each parameter."""
    kinds: dict[str, dict[str, Any]] = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "loop": {"foreach": False},
    }
    found = {}
    for name, flags in kinds.items():
        points = {}
        for count in STEP_COUNTS:
            params = [nn.Parameter(torch.zeros(4)) for _ in range(count)]
            for param in params:
                param.grad = torch.ones(4)
            points[count] = median_seconds(torch.optim.AdamW(params, **flags).step, repeats)
        found[name] = list(line(points))
    return found


def deepspeed(repeats: int) -> dict[str, list[float]]:
    """Return what ZeRO-2 adds to passes, and what its step takes: seconds, and for a parameter."""
    import deepspeed as released

    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 10**6},
        "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
    }  # fmt: skip
    inputs = torch.zeros(4, dtype=torch.bfloat16)
    points: dict[str, dict[int, float]] = {"forward": {}, "backward": {}, "step": {}}
    for count in STEP_COUNTS:
        plain = passes(Layer(count).to(torch.bfloat16), inputs, repeats)
        model = Layer(count)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine, *_ = released.initialize(model=model, optimizer=optimizer, config=config)
        turns = [_turn(engine, inputs) for _ in range(_WARM_ROUNDS + repeats)][_WARM_ROUNDS:]
        parts = [statistics.median(part) for part in zip(*turns, strict=True)]
        for name, part, before in zip(points, parts, (*plain, 0.0), strict=True):
            points[name][count] = part - before
    return {name: list(line(each)) for name, each in points.items()}


def _turn(engine: Any, inputs: Tensor) -> tuple[float, float, float]:
    losses: list[Tensor] = []
    forward = seconds_of(lambda: losses.append(engine(inputs).sum()))
    backward = seconds_of(lambda: engine.backward(losses[0]))
    return forward, backward, seconds_of(engine.step)


def table(found: Mapping[str, Any]) -> str:
    """Return the figures in microseconds."""
    rows = []
    for framework in ("fsdp2", "adamw", "deepspeed"):
        for part, (start, each) in (found.get(framework) or {}).items():
            rows.append(f"{framework:10}{part:10}{1e6 * start:8.0f}{1e6 * each:16.1f}")
    if found.get("decoder"):
        forward, backward = (1e6 * each for each in found["decoder"])
        rows.append(f"FSDP2 around a Llama layer: {forward:.0f} forward, {backward:.0f} backward")
    return "\n".join([f"{'':20}{'us':>8}{'us a parameter':>16}", *rows])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"adamw": adamw(chosen.repeats)}
    versions: dict[str, str] = {}
    if importlib.util.find_spec("deepspeed") is not None:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": "29500", "DS_ACCELERATOR": "cpu"}  # fmt: skip
        os.environ.update(alone)
        found["deepspeed"] = deepspeed(chosen.repeats)
        versions["deepspeed"] = importlib.import_module("deepspeed").__version__
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=_RANKS, store=FakeStore())
    found["fsdp2"] = fsdp2(chosen.repeats)
    if importlib.util.find_spec("transformers") is not None:
        found["decoder"] = decoder(chosen.repeats)
    dist.destroy_process_group()
    print(table(found))
    if chosen.out is not None:
        facts = setting(repeats=chosen.repeats, frameworks=versions)
        write_json(chosen.out, {**facts, "seconds": found})


if __name__ == "__main__":
    main()
