"""Host time of a layer's passes, for transformers' modules of several families.

    python -m evidence.benchmarks.module_launches [--rounds 15] [--out FILE]

Sizes are tiny, so that what is left is Python and dispatch. A pass's kernels are counted where
PyTorch dispatches them. A GPU's driver takes some microseconds more for each, which a CPU does not
show: the last column adds them and compares with Llama's layers. `sim.models.kernels` takes its
counts of plain layers from here.

Layers through einops and einx are measured where both are installed, and Megatron Core's own where
that is.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from evidence.benchmarks.dispatched import num_launches
from evidence.benchmarks.framework_hooks import passes
from evidence.benchmarks.record import setting, take_turns
from experiments.output.files import write_json

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2},
    "qwen2": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
              "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_inner": 64, "n_head": 2},
    "opt": {"hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 2, "word_embed_proj_dim": 32},
    "bert": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2},
}  # fmt: skip
"""Sizes of each family's layers, under its own names."""
LAUNCH = 4.5e-6
"""Seconds that the driver takes to launch a kernel: the table's ``compiled_launch``."""
_LAYERS = (2, 10)


class CountKernels(TorchDispatchMode):
    """Counts the operations that launch a kernel on a GPU."""

    def __init__(self) -> None:
        """Begin at none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the operation and run it."""
        del types
        self.count += num_launches(func, args)
        return func(*args, **(kwargs or {}))


def model_of(family: str, attention: str, num_layers: int) -> nn.Module:
    """Return a tiny language model without dropout, which is several kernels on a CPU alone."""
    number = "n_layer" if family == "gpt2" else "num_hidden_layers"
    config = AutoConfig.for_model(
        family, vocab_size=64, use_cache=False, **FAMILIES[family], **{number: num_layers}
    )
    kind = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    made: nn.Module = kind.from_config(config, attn_implementation=attention)
    return made.eval()


def einops_of(num_layers: int) -> nn.Module:
    """Return so many layers through einops and einx."""
    from evidence.benchmarks.einops_layer import EinopsLayer

    return nn.Sequential(*(EinopsLayer(32, 2, 64, 8) for _ in range(num_layers)))


def megatron_of(num_layers: int) -> nn.Module:
    """Return a model of so many layers of Megatron Core's own modules."""
    from evidence.benchmarks.megatron_layer import MegatronModel

    return MegatronModel(32, 2, 64, num_layers)


def kernels_of(model: nn.Module, inputs: Tensor) -> tuple[int, int]:
    """Return the kernels of a model's forward and backward."""
    with CountKernels() as forward:
        found = model(inputs)
        total = (found if isinstance(found, Tensor) else found.logits).sum()
    with CountKernels() as backward:
        total.backward()
    return forward.count, backward.count


Layer = dict[str, list[float]]
"""Kernels and seconds of one layer, forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of layers to measure."""

    make: Callable[[int], nn.Module]
    """Returns so many layers."""
    inputs: Tensor
    is_cast: bool = False
    """Whether products are cast to 16 bits (`torch.autocast`)."""

    def measure(self, read: Callable[[nn.Module, Tensor], tuple[float, float]]) -> list[float]:
        """Return a layer's part of what is read of a model: many layers less a few."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_cast):
            few, many = (read(self.make(count), self.inputs) for count in _LAYERS)
        return [(b - a) / (_LAYERS[1] - _LAYERS[0]) for a, b in zip(few, many, strict=True)]


def cases_of(families: Iterable[str]) -> dict[str, Case]:
    """Return each family with each kind of attention, and other modules that are installed."""
    tokens = torch.ones(1, 8, dtype=torch.long)
    found = {
        f"{family} {attention}": Case(make=partial(model_of, family, attention), inputs=tokens)
        for family in families
        for attention in ("eager", "sdpa")
    }
    if all(importlib.util.find_spec(name) for name in ("einops", "einx")):
        inputs = torch.ones(1, 8, 32, requires_grad=True)
        found["einops eager"] = Case(make=einops_of, inputs=inputs)
        found["autocast eager"] = Case(make=einops_of, inputs=inputs, is_cast=True)
    if importlib.util.find_spec("megatron"):
        found["megatron eager"] = Case(make=megatron_of, inputs=tokens)
    return found


def measure(cases: Mapping[str, Case], repeats: int, rounds: int) -> dict[str, Layer]:
    """Return layers of all cases; these take turns, so that none has a faster machine."""
    turns = {
        name: partial(case.measure, partial(passes, repeats=repeats))
        for name, case in cases.items()
    }
    seconds = take_turns(turns, rounds, warm_rounds=1)
    return {
        name: {
            "kernels": case.measure(kernels_of),
            "seconds": [statistics.median(own) for own in zip(*seconds[name], strict=True)],
        }
        for name, case in cases.items()
    }


def on_gpu(layer: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the seconds of a layer's passes with what the driver adds for each kernel."""
    return [s + LAUNCH * n for s, n in zip(layer["seconds"], layer["kernels"], strict=True)]


def table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return a line for each layer."""
    lines = [f"{'':14}{'kernels':>14}{'us of the host':>18}{'of Llama, launched':>22}"]
    for name, layer in found.items():
        other = on_gpu(found[f"llama {name.split()[1]}"])
        shares = [own / whole for own, whole in zip(on_gpu(layer), other, strict=True)]
        cells = [f"{n:.0f} + {m:.0f}" for n, m in (layer["kernels"],)]
        cells += [f"{1e6 * a:.0f} + {1e6 * b:.0f}" for a, b in (layer["seconds"],)]
        cells += [f"{shares[0]:.2f} + {shares[1]:.2f}"]
        lines.append(f"{name:14}{cells[0]:>14}{cells[1]:>18}{cells[2]:>22}")
    lines.append("forward + backward of one layer, tiny, in float32 on one thread of a CPU")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)  # of einx
    found = measure(cases_of(FAMILIES), chosen.repeats, chosen.rounds)
    print(table(found))
    if chosen.out is not None:
        write_json(
            chosen.out, {**setting(repeats=chosen.repeats, rounds=chosen.rounds), "layers": found}
        )


if __name__ == "__main__":
    main()
