"""Host time of frameworks' own code around layers and optimizer steps.

    python -m evidence.benchmarks.framework_hooks [--repeats 25] [--out FILE]

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

from evidence.benchmarks.record import setting
from experiments.output.files import write_json

COUNTS = (1, 9, 17)
"""Parameters of a layer."""
STEP_COUNTS = (50, 250, 450)
"""Parameters of an optimizer."""
AROUND_LAYERS = {
    "decoder": "FSDP2 around a Llama layer",
    "zero3": "ZeRO-3 around a Llama layer",
    "zero3_recomputed": "ZeRO-3 around a Llama layer that is recomputed",
}
"""Measurements around transformers' Llama layer, in words."""
_LAYERS = (2, 14)
_RANKS = 8
_RANK = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(_RANKS), "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500", "DS_ACCELERATOR": "cpu",
}  # fmt: skip
_WARM_ROUNDS = 4
_TOKENS = torch.ones(1, 8, dtype=torch.long)

Seconds = Sequence[float]
"""Seconds of forward and backward."""


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
    """Return the seconds of a call in this thread, whatever else the machine does."""
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
    """Return the seconds that FSDP2 adds to a layer's passes, and those for each parameter."""

    def read(num_layers: int, *, count: int, is_sharded: bool) -> Seconds:
        model = nn.Sequential(*[Layer(count) for _ in range(num_layers)])
        if is_sharded:
            sharded(model, list(model))
        return passes(model, torch.zeros(4), repeats)

    added = {count: _added(partial(read, count=count)) for count in COUNTS}
    return {
        name: list(line({count: seconds[index] for count, seconds in added.items()}))
        for index, name in enumerate(("forward", "backward"))
    }


def decoder(repeats: int) -> list[float]:
    """Return the seconds that FSDP2 adds to the passes of transformers' Llama layer."""

    def read(num_layers: int, *, is_sharded: bool) -> Seconds:
        model = llama(num_layers)
        if is_sharded:
            sharded(model, list(model.model.layers))
        return passes(model, _TOKENS, repeats)

    return _added(read)


def zero3(repeats: int, *, recomputes: bool) -> list[float]:
    """Return the seconds that ZeRO-3 adds to the passes of that layer, whose norms stay whole.

    Args:
        repeats: Number of turns.
        recomputes: Whether backward recomputes each layer, whose hooks then run once more.
    """

    def read(num_layers: int, *, is_sharded: bool) -> Seconds:
        model = llama(num_layers).to(torch.bfloat16)
        if recomputes:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if not is_sharded:
            return passes(model, _TOKENS, repeats)
        stage = {"stage": 3, "stage3_param_persistence_threshold": 65}
        forward, backward, _ = _median_turn(_engine(model, stage), _TOKENS, repeats)
        return forward, backward

    return _added(read)


def llama(num_layers: int) -> Any:
    """Return transformers' Llama of so many tiny layers."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=128,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def _added(read: Callable[..., Seconds]) -> list[float]:
    """Return the seconds that sharding adds to a layer's passes, from models of two depths."""
    plain, hooked = (_of_a_layer(partial(read, is_sharded=is_so)) for is_so in (False, True))
    return [after - before for before, after in zip(plain, hooked, strict=True)]


def _of_a_layer(read: Callable[[int], Seconds]) -> Seconds:
    """Return the seconds of one layer's forward and backward, from models of a few and of more."""
    few, more = (read(count) for count in _LAYERS)
    layers = _LAYERS[1] - _LAYERS[0]
    return (more[0] - few[0]) / layers, (more[1] - few[1]) / layers


def adamw(repeats: int) -> dict[str, list[float]]:
    """Return the seconds of a step of PyTorch's AdamW, and those for each parameter."""
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
    """Return the seconds that ZeRO-2 adds to passes, those of its step, and for a parameter."""
    inputs = torch.zeros(4, dtype=torch.bfloat16)
    points: dict[str, dict[int, float]] = {"forward": {}, "backward": {}, "step": {}}
    for count in STEP_COUNTS:
        plain = passes(Layer(count).to(torch.bfloat16), inputs, repeats)
        engine = _engine(Layer(count), {"stage": 2, "reduce_bucket_size": 10**6})
        parts = _median_turn(engine, inputs, repeats)
        for name, part, before in zip(points, parts, (*plain, 0.0), strict=True):
            points[name][count] = part - before
    return {name: list(line(each)) for name, each in points.items()}


def _engine(model: nn.Module, zero: Mapping[str, Any]) -> Any:
    """Return DeepSpeed's engine of a model in bfloat16, with PyTorch's fused AdamW."""
    import deepspeed as released

    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "zero_optimization": zero, "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return released.initialize(model=model, optimizer=optimizer, config=config)[0]


def _median_turn(engine: Any, inputs: Tensor, repeats: int) -> list[float]:
    """Return the median seconds of an engine's forward, backward and step."""
    turns = [_turn(engine, inputs) for _ in range(_WARM_ROUNDS + repeats)][_WARM_ROUNDS:]
    return [statistics.median(part) for part in zip(*turns, strict=True)]


def _turn(engine: Any, inputs: Tensor) -> tuple[float, float, float]:
    losses: list[Tensor] = []

    def run() -> None:
        found = engine(inputs)
        losses.append((found if isinstance(found, Tensor) else found.logits).sum())

    forward = seconds_of(run)
    backward = seconds_of(lambda: engine.backward(losses[0]))
    return forward, backward, seconds_of(engine.step)


def table(found: Mapping[str, Any]) -> str:
    """Return the figures in microseconds."""
    rows = []
    for framework in ("fsdp2", "adamw", "deepspeed"):
        for part, (start, each) in (found.get(framework) or {}).items():
            rows.append(f"{framework:10}{part:10}{1e6 * start:8.0f}{1e6 * each:16.1f}")
    for name, label in AROUND_LAYERS.items():
        if found.get(name):
            forward, backward = (1e6 * each for each in found[name])
            rows.append(f"{label}: {forward:.0f} forward, {backward:.0f} backward")
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
    has_deepspeed, has_transformers = (
        importlib.util.find_spec(name) is not None for name in ("deepspeed", "transformers")
    )
    os.environ.update(_RANK)  # as DeepSpeed wants it
    dist.init_process_group("fake", rank=0, world_size=_RANKS, store=FakeStore())
    found["fsdp2"] = fsdp2(chosen.repeats)
    if has_transformers:
        found["decoder"] = decoder(chosen.repeats)
    if has_deepspeed:
        found["deepspeed"] = deepspeed(chosen.repeats)
        versions["deepspeed"] = importlib.import_module("deepspeed").__version__
    if has_transformers and has_deepspeed:
        for name, recomputes in (("zero3", False), ("zero3_recomputed", True)):
            found[name] = zero3(chosen.repeats, recomputes=recomputes)
    dist.destroy_process_group()
    print(table(found))
    if chosen.out is not None:
        facts = setting(repeats=chosen.repeats, frameworks=versions)
        write_json(chosen.out, {**facts, "seconds": found})


if __name__ == "__main__":
    main()
