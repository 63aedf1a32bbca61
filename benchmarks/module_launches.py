"""What a layer's passes take the host, for transformers' modules of several families.

    python -m benchmarks.module_launches [--repeats 100] [--out FILE]

Sizes are tiny, so that what is left is Python and dispatch. A pass's kernels are counted where
PyTorch dispatches them. A GPU's driver takes some microseconds more for each, which a CPU does
not show: the last column adds them and compares with Llama's layers. `sim.models.kernels` takes
its counts of plain layers from here.

Layers through einops and einx are measured where both are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from benchmarks.framework_hooks import passes
from benchmarks.record import setting
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
_VIEWS = frozenset({
    "view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select",
    "unbind", "split", "detach", "alias", "_unsafe_view", "as_strided", "split_with_sizes",
    "_reshape_alias", "lift_fresh", "chunk",
})  # fmt: skip
"""Operations that launch nothing."""


class CountKernels(TorchDispatchMode):
    """Counts the operations that launch a kernel on a GPU."""

    def __init__(self) -> None:
        """Begin at none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the operation and run it."""
        del types
        self.count += func.overloadpacket.__name__ not in _VIEWS
        return func(*args, **(kwargs or {}))


def model_of(family: str, attention: str, num_layers: int) -> nn.Module:
    """Return a tiny language model without dropout, which is several kernels on a CPU alone."""
    number = "n_layer" if family == "gpt2" else "num_hidden_layers"
    config = AutoConfig.for_model(
        family, vocab_size=64, use_cache=False, **FAMILIES[family], **{number: num_layers}
    )
    kind = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    made: nn.Module = kind.from_config(config, attn_implementation=attention)  # type: ignore
    return made.eval()


def einops_of(num_layers: int) -> nn.Module:
    """Return so many layers through einops and einx."""
    from benchmarks.einops_layer import EinopsLayer

    return nn.Sequential(*(EinopsLayer(32, 2, 64, 8) for _ in range(num_layers)))


def kernels_of(model: nn.Module, inputs: Tensor) -> tuple[int, int]:
    """Return the kernels of a model's forward and backward."""
    with CountKernels() as forward:
        found = model(inputs)
        total = (found if isinstance(found, Tensor) else found.logits).sum()
    with CountKernels() as backward:
        total.backward()
    return forward.count, backward.count


def layer_of(
    make: Callable[[int], nn.Module], inputs: Tensor, repeats: int
) -> dict[str, list[float]]:
    """Return a layer's kernels and seconds, forward and backward.

    They are differences between a model of many layers and one of few.
    """
    few, many = (make(count) for count in _LAYERS)
    found = {}
    for name, pair in (
        ("kernels", (kernels_of(few, inputs), kernels_of(many, inputs))),
        ("seconds", (passes(few, inputs, repeats), passes(many, inputs, repeats))),
    ):
        found[name] = [(b - a) / (_LAYERS[1] - _LAYERS[0]) for a, b in zip(*pair, strict=True)]
    return found


def measure(families: Iterable[str], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return layers of families with each kind of attention."""
    tokens = torch.ones(1, 8, dtype=torch.long)
    found = {
        f"{family} {attention}": layer_of(partial(model_of, family, attention), tokens, repeats)
        for family in families
        for attention in ("eager", "sdpa")
    }
    if all(importlib.util.find_spec(name) for name in ("einops", "einx")):
        inputs = torch.ones(1, 8, 32, requires_grad=True)
        casts = torch.autocast("cpu", torch.bfloat16)
        for name, context in (
            ("einops eager", contextlib.nullcontext()),
            ("autocast eager", casts),
        ):
            with context, warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                found[name] = layer_of(einops_of, inputs, repeats)
    return found


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
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = measure(FAMILIES, chosen.repeats)
    print(table(found))
    if chosen.out is not None:
        write_json(chosen.out, {**setting(repeats=chosen.repeats), "layers": found})


if __name__ == "__main__":
    main()
