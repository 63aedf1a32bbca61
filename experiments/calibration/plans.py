"""Plans of the runs that calibrate and of those that validate, which are never the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.training.settings.training import TrainSettings
from sim.hardware.profile import HardwareProfile
from sim.timing.costs import costs_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run, its link's speed still to be chosen."""

    strategy: str
    model: str
    batch: int
    sequence: int
    copy_share: float | None = None
    """Time of the model's bytes over the emulated link, as a share of compute; None is no link."""
    up_share: float | None = None
    """Share of the link for copies to the device; None is as for copies to the host."""
    knobs: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def resolve(self, profile: HardwareProfile, base: TrainSettings) -> TrainSettings:
        """Return the run's settings, with a link that follows from the predicted compute."""
        knobs = dict(self.knobs)
        if self.strategy.startswith("zenflow"):
            knobs.setdefault("select_interval", 0)  # once: a steady state repeats every window
        made = replace(
            base,
            strategy=self.strategy,
            model=self.model,
            batch_size=self.batch,
            sequence=self.sequence,
            knobs=knobs,
            **self.settings,
        )
        if self.copy_share is None or not profile.device.is_cpu:
            return made
        costs = costs_of(made.workload(), profile)
        seconds = costs.compute_seconds
        rate = costs.num_params * costs.dtype_bytes / seconds
        up = self.copy_share if self.up_share is None else self.up_share
        return replace(made, link=(rate / self.copy_share, rate / up))


CPU_SHAPES = (
    ("tiny", 2, 128), ("mini", 1, 128), ("mini", 4, 128), ("mini", 6, 64), ("small", 1, 256),
    ("small", 4, 128), ("base", 1, 64), ("base", 2, 192), ("base", 6, 64),
)  # fmt: skip
"""Model, sequences, tokens of each for the fit of compute."""

GPU_SHAPES = (
    ("medium", 8, 512), ("medium", 16, 1024), ("large", 4, 1024), ("large", 8, 1024),
    ("1b", 1, 1024), ("1b", 4, 1024), ("1b", 2, 2048), ("1b", 8, 1024),
)  # fmt: skip

CPU_RUNS = (
    RunPlan("on_device", "mini", 3, 128),
    RunPlan("on_device", "base", 2, 96),
    RunPlan("zero_offload", "mini", 3, 128, 1.2),
    RunPlan("zero_offload", "base", 2, 96, 0.8),
    RunPlan("delayed", "mini", 6, 64, 0.8),
    RunPlan("zenflow_paper", "small", 2, 128, 1.0),
    RunPlan("zenflow", "mini", 3, 128, 1.2),
    RunPlan("zenflow", "small", 2, 128, 0.5, knobs={"update_interval": 2}),
    RunPlan("zenflow", "base", 2, 96, 1.4),
    RunPlan("zenflow", "base", 1, 64, knobs={"topk_ratio": 0.3}),
    RunPlan("zenflow", "mini", 5, 64, 0.7, settings={"gradients": "keep"}),
)
"""Runs that refine the engine's constants."""

GPU_RUNS = (
    RunPlan("on_device", "large", 8, 1024),
    RunPlan("zero_offload", "large", 8, 1024),
    RunPlan("zenflow_paper", "1b", 4, 1024),
    RunPlan("zenflow", "large", 4, 1024),
    RunPlan("zenflow", "1b", 4, 1024, knobs={"update_interval": 2}),
    RunPlan("zenflow", "1b", 8, 1024),
)

CPU_VALIDATION = (
    RunPlan("on_device", "small", 3, 96),
    RunPlan("on_device", "base", 3, 128),
    RunPlan("zero_offload", "small", 2, 192, 1.0),
    RunPlan("zero_offload", "mini", 4, 96, 0.6),
    RunPlan("delayed", "small", 3, 96, 0.9),
    RunPlan("zenflow_paper", "mini", 5, 96, 1.1),
    RunPlan("zenflow_paper", "base", 2, 128, 0.8, knobs={"update_interval": 8}),
    RunPlan("zenflow", "mini", 2, 128, 1.2),
    RunPlan("zenflow", "small", 3, 128, 0.9, knobs={"topk_ratio": 0.2}),
    RunPlan("zenflow", "base", 3, 96, 1.0, knobs={"topk_ratio": 0.05, "update_interval": 8}),
    RunPlan("zenflow", "small", 2, 96, 2.0, knobs={"update_interval": 2}),
    RunPlan("zenflow", "mini", 5, 128, 1.5, knobs={"update_interval": 16}),
    RunPlan("zenflow", "base", 2, 64, 0.5, knobs={"topk_ratio": 0.3, "update_interval": 2}),
    RunPlan("zenflow", "small", 4, 64, 0.8, settings={"gradients": "keep"}),
    RunPlan("zenflow", "mini", 3, 96, 1.0, settings={"grad_accum": 2}),
    RunPlan("zenflow", "base", 1, 128),
    RunPlan("zenflow", "small", 3, 64, 0.6, knobs={"queue_depth": 1}, up_share=3.0),
)
"""Runs of which none was used to calibrate: other batches, k, S, q, links, modes."""

GPU_VALIDATION = (
    RunPlan("on_device", "1b", 3, 1024),
    RunPlan("on_device", "large", 16, 512),
    RunPlan("zero_offload", "1b", 2, 1024),
    RunPlan("zero_offload", "medium", 12, 1024),
    RunPlan("delayed", "large", 6, 1024),
    RunPlan("zenflow_paper", "large", 10, 1024, knobs={"update_interval": 8}),
    RunPlan("zenflow_paper", "1b", 3, 2048),
    RunPlan("zenflow", "1b", 2, 1024),
    RunPlan("zenflow", "1b", 1, 2048, knobs={"topk_ratio": 0.2}),
    RunPlan("zenflow", "1b", 6, 1024, knobs={"topk_ratio": 0.05, "update_interval": 8}),
    RunPlan("zenflow", "large", 8, 512, knobs={"update_interval": 2}),
    RunPlan("zenflow", "large", 16, 1024, knobs={"update_interval": 16}),
    RunPlan("zenflow", "1b", 4, 512, settings={"gradients": "keep"}),
)


def _shared(parallel: str, **settings: Any) -> dict[str, Any]:
    return {"parallel": parallel, **settings}


CPU_RANK_RUNS = (
    RunPlan("on_device", "mini", 8, 64, settings=_shared("ddp")),
    RunPlan("on_device", "base", 4, 128, settings=_shared("ddp")),
    RunPlan("on_device", "mini", 8, 64, settings=_shared("fsdp")),
    RunPlan("on_device", "base", 4, 128, settings=_shared("fsdp")),
    RunPlan("zenflow", "small", 8, 64, 0.8, settings=_shared("ddp")),
    RunPlan("zenflow", "small", 8, 64, 0.8, settings=_shared("fsdp")),
)
"""Runs of two processes that refine what collectives and shared cores cost."""

GPU_RANK_RUNS = (
    RunPlan("on_device", "large", 16, 512, settings=_shared("ddp")),
    RunPlan("on_device", "1b", 2, 1024, settings=_shared("fsdp")),
)

CPU_RANK_VALIDATION = (
    RunPlan("on_device", "small", 6, 96, settings=_shared("ddp")),
    RunPlan("zero_offload", "base", 6, 96, 0.9, settings=_shared("ddp")),
    RunPlan("zenflow", "small", 4, 160, 0.9, settings=_shared("ddp")),
    RunPlan("zenflow", "base", 4, 96, 0.6, settings=_shared("ddp", gradients="keep")),
    RunPlan("zenflow", "base", 6, 64, knobs={"topk_ratio": 0.2}, settings=_shared("ddp")),
    RunPlan("zenflow", "mini", 6, 96, 1.0, settings=_shared("ddp", grad_accum=2)),
    RunPlan("on_device", "base", 6, 96, settings=_shared("fsdp")),
    RunPlan("zero_offload", "small", 4, 160, 0.9, settings=_shared("fsdp")),
    RunPlan("zenflow", "small", 6, 96, 0.9, settings=_shared("fsdp")),
    RunPlan("zenflow", "base", 4, 96, 0.6, knobs={"update_interval": 8},
            settings=_shared("fsdp")),
    RunPlan("zenflow", "base", 4, 64, settings=_shared("fsdp", gradients="keep")),
    RunPlan("zenflow", "mini", 8, 96, 1.0, settings=_shared("fsdp", grad_accum=2)),
)  # fmt: skip
"""Runs of two processes, of which none was used to calibrate."""

GPU_RANK_VALIDATION = (
    RunPlan("zero_offload", "1b", 4, 1024, settings=_shared("fsdp")),
    RunPlan("zenflow", "1b", 4, 1024, settings=_shared("fsdp")),
    RunPlan("zenflow", "1b", 8, 1024, settings=_shared("ddp")),
    RunPlan("zenflow", "large", 16, 1024, settings=_shared("ddp", gradients="keep")),
)

SMOKE_RANK_RUNS = (RunPlan("on_device", "tiny", 2, 48, settings=_shared("fsdp")),)
SMOKE_RANK_VALIDATION = (RunPlan("zenflow", "tiny", 2, 32, settings=_shared("ddp")),)
"""Plans of the ranks' validation in a smoke test."""

SMOKE_VALIDATION = (
    RunPlan("on_device", "tiny", 1, 48),
    RunPlan("zero_offload", "tiny", 1, 32),
    RunPlan("zenflow", "tiny", 2, 32),
)
"""Runs of a smoke test."""

CPU_SELECTION, GPU_SELECTION = "small", "large"
"""Models on which selections are timed."""


Shape = tuple[str, int, int]


def of(device: torch.device) -> tuple[Sequence[Shape], Sequence[RunPlan], str]:
    """Return compute shapes, runs and the model of selections that calibrate a device."""
    if device.type == "cpu":
        return CPU_SHAPES, CPU_RUNS, CPU_SELECTION
    return GPU_SHAPES, GPU_RUNS, GPU_SELECTION


class RankPlans(NamedTuple):
    """Runs that several ranks share."""

    calibrating: Sequence[RunPlan]
    """Runs that give what several ranks cost beside one."""
    validating: Sequence[RunPlan]
    """Runs that are predicted, none of which calibrates."""


def of_ranks(device: torch.device, *, smoke: bool) -> RankPlans:
    """Return the runs of several ranks that calibrate a device, and those that validate it."""
    if smoke:
        return RankPlans(SMOKE_RANK_RUNS, SMOKE_RANK_VALIDATION)
    if device.type == "cpu":
        return RankPlans(CPU_RANK_RUNS, CPU_RANK_VALIDATION)
    return RankPlans(GPU_RANK_RUNS, GPU_RANK_VALIDATION)
