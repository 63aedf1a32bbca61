"""Measured backend: a setting's figures from real short runs on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

import torch

from autotune.constraints import Need, needs_of
from autotune.offline.backends import AbstractBackend
from autotune.offline.objective import TrialMetrics
from experiments.calibration.short_run import ShortRun, short_run
from experiments.training.parts.setup import build_setup, workload_of
from experiments.training.settings.training import TrainSettings
from sim.hardware.catalog import find_machine
from sim.hardware.profile import HardwareProfile
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

_WINDOWS = 2
_FEWEST_STEPS = 8
"""Least steps of a repeat, however short the windows are."""


class MeasuredBackend(AbstractBackend):
    """Short runs of a training: warm until queues are full, then whole windows, repeated.

    Selections come once in many steps and are outside of what is measured, so that
    ``select_interval`` should have one value in the search space.
    """

    kind = "measured"

    def __init__(self, settings: TrainSettings, *, repeats: int = 3) -> None:
        """Note what is trained; nothing is built yet.

        Args:
            settings: Of the training; its knobs are the default setting.
            repeats: Stretches of whole windows, of which the median counts.
        """
        self.settings = settings
        self._repeats = repeats

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings; what has been worked out is worked out again."""
        return {"settings": self.settings, "_repeats": self._repeats}

    @property
    def default(self) -> Knobs:
        """The knobs of the settings."""
        return Knobs.of(self.settings.config(steps_per_epoch=1))

    @cached_property
    def _needs(self) -> Callable[[Knobs], Need]:
        """Function from knobs to their needs, on a machine with this one's kind of device."""
        settings = self.settings
        setup = build_setup(settings)
        return needs_of(
            workload_of(setup),
            _stand_in(setup.device, settings.link),
            releases=settings.gradients == "release",
            base=settings.config(steps_per_epoch=1),
        )

    def need(self, knobs: Knobs) -> Need:
        """Return memory as the simulator counts it, and staleness; energy takes a run."""
        return self._needs(knobs)

    def measure(self, knobs: Knobs) -> TrialMetrics:
        """Return the medians of a short run.

        Raises:
            ConfigError: The run can't be carried out, or the device's memory is too small for it.
        """
        values = self.settings.to_dict()
        values |= {"knobs": {**self.settings.knobs, **knobs.to_dict()}, "timeline_steps": 0}
        try:
            with short_run(TrainSettings.from_dict(values)) as run:
                return self._measured(run, knobs)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise ConfigError(f"the device's memory is too small for {knobs}: {error}") from error

    def _measured(self, run: ShortRun, knobs: Knobs) -> TrialMetrics:
        window = knobs.update_interval
        on_gpu = run.setup.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2 * window + 2):  # the first windows have nothing to land
            run.step()
        length = -(-max(_FEWEST_STEPS, _WINDOWS * window) // window) * window
        turns = [run.reports(length) for _ in range(self._repeats)]
        need, settings = self.need(knobs), self.settings
        return TrialMetrics(
            step_seconds=median(fmean(report.seconds for report in turn) for turn in turns),
            stall_seconds=median(fmean(report.stall_seconds for report in turn) for turn in turns),
            device_bytes=torch.cuda.max_memory_allocated() if on_gpu else need.device_bytes,
            host_bytes=need.host_bytes,
            staleness=need.staleness,
            captured=fmean(report.captured_energy for turn in turns for report in turn),
            tokens_per_step=settings.batch_size * settings.sequence * settings.grad_accum,
        )

    def describe(self) -> dict[str, Any]:
        """Return the settings of the training."""
        return {"backend": self.kind, "settings": self.settings.to_dict()}


def _stand_in(device: torch.device, link: tuple[float, float] | None) -> HardwareProfile:
    """Return a machine for counting bytes: its speeds decide only what waits to leave."""
    machine = find_machine("rtx4090-desktop", 1)
    if device.type == "cpu":
        machine = replace(machine, device=replace(machine.device, is_cpu=True))
    if link is not None:
        machine = machine.with_values({"link.d2h": link[0], "link.h2d": link[1]})
    return machine
