"""Calibrate: probe this machine, fit its constants, refine them on short runs.

The runs of a validation are measured here too, in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from experiments.calibration import plans, selection
from experiments.calibration.compute import ComputeShapes, measure_sharing
from experiments.calibration.link import measure_link
from experiments.calibration.parts import measure_host, measure_parts
from experiments.calibration.profile import fitted_device, host_of, link_of, overheads_of
from experiments.calibration.runs import ObservedRun, observe
from experiments.calibration.selection import measure_selection
from experiments.output.outlook import PlannedRun
from experiments.output.stages import Stages
from experiments.training.parts.setup import DTYPES, choose_device, use_threads
from experiments.training.settings.training import TrainSettings
from sim.fitting.device import ComputeTimes, DeviceFit
from sim.fitting.marquardt import SWEEPS
from sim.fitting.refine import Refinement, refine
from sim.hardware.profile import HardwareProfile
from zenflow.host.limits import usable_cores
from zenflow.provenance import provenance
from zenflow.surface.arguments import default_host_threads

_COMPUTE = "compute by layer shape"
_PARTS = "parts of the engine by themselves"
_NUM_PARTS = 4
_SELECTIONS = "selections"
_RUNS = "short runs of the engine"
_REFINING = "refining constants"
_FIRST_ROUNDS = 3
"""Number of times that each compute shape is timed before anything else, to size emulated links.

The fit goes by one time in each turn of the runs."""
WINDOWS = 2
"""Number of windows in each turn of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """Purpose and thoroughness of a calibration."""

    device: torch.device
    dtype: str = "float32"
    link: tuple[float, float] | None = None
    """An emulated link for every run, bytes/s; None sizes one for each run on a CPU."""
    turns: int = 4
    """Number of turns of each run."""
    host_threads: int | None = None

    @classmethod
    def of(cls, device: str, dtype: str | None, **others: Any) -> CalibrationOptions:
        """Return options of a device by its name, auto too, in its own precision by default.

        Raises:
            ConfigError: The device is not there, or takes no emulated link.
        """
        found = choose_device(TrainSettings(device=device, link=others.get("link")))
        own = "float32" if found.type == "cpu" else "bfloat16"
        return cls(device=found, dtype=dtype or own, **others)

    @property
    def together(self) -> int | None:
        """Runs in memory at a time: all small ones, two of a GPU's, whose states fill the host."""
        return None if self.device.type == "cpu" else 2

    @property
    def settings(self) -> TrainSettings:
        """Settings that all runs share."""
        return TrainSettings(
            device=self.device.type, dtype=self.dtype, host_threads=self.host_threads
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A profile and everything it rests on."""

    profile: HardwareProfile
    compute: Sequence[ComputeTimes]
    compute_fit: DeviceFit
    refinement: Refinement
    others: Sequence[ObservedRun]
    """Runs that took turns with those that refine the profile, and have no part in it."""


def calibrate(
    options: CalibrationOptions, stages: Stages, others: Sequence[plans.RunPlan] = ()
) -> Calibration:
    """Return the profile of this machine.

    Args:
        options: What to do.
        stages: Shows how far it is.
        others: Runs that calibrate nothing, and are measured while the machine is as fast.
    """
    use_threads(options.settings, options.device, usable_cores())
    with stages.planned(_plan(options, others), is_guessed=options.device.type == "cpu"):
        return _calibrate(options, stages, others)


def _plan(options: CalibrationOptions, others: Sequence[plans.RunPlan]) -> list[PlannedRun]:
    """Return the stages, with the seconds of each one's parts on two cores of an AMD EPYC."""
    _, own, _ = plans.of(options.device)
    runs = [*own, *others]
    return [
        PlannedRun(_COMPUTE, _FIRST_ROUNDS, 3.5),
        PlannedRun(_PARTS, _NUM_PARTS, 2.5),
        PlannedRun(_SELECTIONS, selection.RUNS * options.turns, 0.7),
        PlannedRun(_RUNS, len(runs) * options.turns, 1.1),
        PlannedRun(_REFINING, SWEEPS, 2.5),
    ]


def _calibrate(
    options: CalibrationOptions, stages: Stages, others: Sequence[plans.RunPlan]
) -> Calibration:
    base = options.settings
    shapes, run_plans, selection_model = plans.of(options.device)
    with stages.stage(_COMPUTE, _FIRST_ROUNDS) as advance:
        compute = ComputeShapes(
            [
                replace(base, strategy="on_device", model=m, batch_size=b, sequence=s)
                for m, b, s in shapes
            ]
        )
        for _ in range(_FIRST_ROUNDS):
            compute.round()
            advance()
    played = fitted_device(options.device, compute.times(), options.dtype)
    probed, facts = _probe(options, played, stages)
    with stages.stage(_SELECTIONS, selection.RUNS * options.turns) as advance:
        seconds = measure_selection(
            base, selection_model, probed, turns=options.turns, on_turn=advance
        )
    probed = probed.with_values({"overheads.select": seconds})
    settings = [plan.resolve(probed, base) for plan in (*run_plans, *others)]
    if options.link is not None:
        settings = [replace(own, link=options.link) for own in settings]
    compute.forget()  # a machine's speed drifts: compute and runs are to have the same
    with stages.stage(_RUNS, len(settings) * options.turns) as advance:
        found = observe_runs(settings, options, advance, between=compute.round)
    runs = found[: len(run_plans)]
    times = compute.times()
    seen = [run.observation for run in runs]
    played = fitted_device(options.device, times, options.dtype, seen)
    probed = replace(probed, device=played.device)
    with stages.stage(_REFINING, SWEEPS) as advance:
        refinement = refine(probed, seen, on_sweep=lambda *_: advance())
    metadata = _metadata(options, times, played, facts, runs, refinement)
    return Calibration(
        profile=replace(refinement.profile, metadata=metadata),
        compute=times,
        compute_fit=played,
        refinement=refinement,
        others=found[len(run_plans) :],
    )


def observe_runs(
    settings: Sequence[TrainSettings],
    options: CalibrationOptions,
    on_turn: Callable[[], None],
    *,
    between: Callable[[], None] = lambda: None,
) -> list[ObservedRun]:
    """Return the steady state of every run, measured in turn, as thoroughly as options say.

    Args:
        settings: Of the runs.
        options: How many turns each takes, and on what.
        on_turn: Called after each.
        between: Called before all runs take their next turn.
    """
    return observe(
        settings,
        turns=options.turns,
        windows=WINDOWS,
        on_turn=on_turn,
        between=between,
        together=options.together,
    )


def _probe(
    options: CalibrationOptions, played: DeviceFit, stages: Stages
) -> tuple[HardwareProfile, dict[str, Any]]:
    """Return the profile as parts measured by themselves give it, and their measurements."""
    device = options.device
    is_cpu = device.type == "cpu"
    threads = options.host_threads or default_host_threads()
    sharing = 2.0
    with stages.stage(_PARTS, _NUM_PARTS) as advance:
        host_rates = measure_host(threads, device)
        advance()
        parts = measure_parts(device, DTYPES[options.dtype])
        advance()
        link = None if is_cpu else measure_link(device)
        advance()
        if is_cpu:
            busy = replace(
                options.settings, strategy="on_device", model="small", batch_size=2, sequence=128
            )
            sharing = measure_sharing(busy)
        advance()
    memory = psutil.virtual_memory().total
    profile = HardwareProfile(
        name=played.device.name,
        device=played.device,
        link=link_of(link),
        host=host_of(host_rates, sharing, memory),
        overheads=overheads_of(parts, is_cpu=is_cpu),
        host_threads=threads,
    )
    return profile, {
        "host_bytes_per_second_by_threads": {str(n): r for n, r in host_rates.by_threads.items()},
        "host_bytes_per_second_beside_copies": host_rates.beside_copies,
        "host_steps_per_second": host_rates.steps,
        "part_median_errors": {name: fit.median_error for name, fit in parts.items()},
    }


def _metadata(
    options: CalibrationOptions,
    times: Sequence[ComputeTimes],
    compute: DeviceFit,
    facts: Mapping[str, Any],
    runs: Sequence[ObservedRun],
    refinement: Refinement,
) -> Mapping[str, Any]:
    return {
        "calibration": {
            "device": options.device.type,
            "dtype": options.dtype,
            "emulated_link": options.device.type == "cpu",
            "compute": [
                {"shape": t.label, "forward_seconds": t.forward, "backward_seconds": t.backward}
                for t in times
            ],
            "compute_residuals": dict(compute.residuals),
            "compute_median_error": compute.median_error,
            **facts,
            "runs": [
                {
                    "run": run.observation.label,
                    "step_seconds": run.observation.step_seconds,
                    "spread": run.spread,
                    "residual": refinement.residuals[run.observation.label],
                }
                for run in runs
            ],
            "refined_over_probed": dict(refinement.factors),
            "constant_residuals": dict(refinement.sensitivity),
            "error_before": refinement.before,
            "error_after": refinement.after,
        },
        **provenance(),
    }
