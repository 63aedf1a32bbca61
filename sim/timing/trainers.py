"""Trainers: what their own code adds to every micro-batch, while the device waits.

``evidence/benchmarks/trainer_steps.py`` measured the seconds beside a plain loop on a CPU (record
2026-11-28_trainer-steps_amd-epyc). None comes from the time of a training step.

A trainer reads the loss behind every micro-batch: transformers' Trainer (5.23) to look whether it
is finite (`logging_nan_inf_filter`), TRL's SFTTrainer (1.16) to log tokens and entropy. So the
device has nothing to do until the next one is launched, and a long backward hides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sim.models.shapes.parts import Layer
from sim.models.workload import LOOP, Workload

_BESIDE_MATRICES = 6
"""Modules of a layer without weights of two dimensions: itself, attention, the feed-forward block,
its activation, and two norms, as transformers' Llama has them."""
_AT_LEAST = 13
"""Modules of a layer of Llama's, and of GPT-2's: fewer matrices, and dropouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCode:
    """Seconds of the host, beyond those of a plain loop."""

    step: float
    """Seconds of an optimizer step."""
    micro_batch: float
    """Seconds of a micro-batch, however large the model is."""
    module: float
    """Seconds of each module in a micro-batch: `model.train()` walks through all."""


CODE: Mapping[str, TrainerCode] = {
    "transformers": TrainerCode(step=0.66e-3, micro_batch=0.20e-3, module=6.2e-6),
    "trl": TrainerCode(step=0.71e-3, micro_batch=1.19e-3, module=7.2e-6),
}
"""Trainers by name: transformers' Trainer, and TRL's SFTTrainer."""


def trainer_seconds(workload: Workload, *, more_modules: int = 0) -> float:
    """Return the seconds of the workload's trainer before each micro-batch; 0 of a plain loop.

    Args:
        workload: Model and batch. A trace has its trainer's time in it, and nothing is added.
        more_modules: Number of modules that the model's shapes do not tell, such as adapters'.
    """
    if workload.trainer == LOOP or workload.traced is not None:
        return 0.0
    code = CODE[workload.trainer]
    modules = more_modules + sum(map(num_modules, workload.layers))
    return code.micro_batch + modules * code.module + code.step / workload.accumulation


def num_modules(layer: Layer) -> int:
    """Return about how many modules a layer has in transformers' code."""
    matrices = sum(len(parameter.shape) > 1 for parameter in layer.parameters)
    return max(_AT_LEAST, matrices + _BESIDE_MATRICES) if layer.is_inner else matrices
