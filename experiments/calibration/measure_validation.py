"""The runs of a validation, measured on this machine."""

from __future__ import annotations

from experiments.calibration import plans
from experiments.calibration.calibrate import CalibrationOptions, observe_runs
from experiments.output.stages import Stages
from experiments.training.settings import TrainSettings
from sim.fitting.refine import Observation
from sim.hardware.profile import HardwareProfile


def measure_validation(
    profile: HardwareProfile, options: CalibrationOptions, stages: Stages
) -> list[tuple[TrainSettings, Observation, float]]:
    """Return settings, steady state and spread of every validation run.

    Args:
        profile: Sizes the emulated links; it decides nothing else.
        options: Device, precision and thoroughness.
        stages: Shows how far it is.
    """
    is_cpu = options.device.type == "cpu"
    chosen = plans.CPU_VALIDATION if is_cpu else plans.GPU_VALIDATION
    settings = [plan.resolve(profile, options.settings) for plan in chosen]
    runs = observe_runs("runs to predict", settings, options, stages)
    return [(run.settings, run.observation, run.spread) for run in runs]
