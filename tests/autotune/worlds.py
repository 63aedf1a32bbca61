"""A small machine for the tuner's tests, and a hidden twin that plays the truth on it."""

import math
import os
import subprocess
import time
from dataclasses import replace

from autotune.adviser.messages import Advice, ForecastedSetting, Question
from autotune.efficiency import FITTED, DelayCost, EnergyCurve
from autotune.model.refit import Prior
from autotune.model.stretch import Stretch
from autotune.model.twin import NEUTRAL, Twin
from autotune.space import SearchSpace
from experiments.training.settings.sizes import MODEL_SIZES
from sim.hardware.unknown import generic_cpu
from sim.models.workload import Workload
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs

SPACE = SearchSpace(
    topk_ratios=(0.05, 0.1, 0.2, 0.3),
    update_intervals=(1, 2, 4, 8, 16),
    select_intervals=(100,),
)
SMALL = replace(SPACE, topk_ratios=(0.1, 0.3), update_intervals=(1, 2, 4, 8))
CONFIG = ZenFlowConfig(min_split_elements=1024)
HERE = Knobs.of(CONFIG)
STEEP = DelayCost(interval=20.0, power=2.0, rate_power=1.0)
"""A price of late updates at which every knob has something to weigh."""
CURVE = EnergyCurve.of({0.05: 0.15, 0.1: 0.25, 0.3: 0.5})


def workload(size="tiny", **changes):
    settings = {"batch_size": 2, "sequence": 64, "dtype": "float32", **changes}
    return Workload.of_config(size, MODEL_SIZES[size].config(), **settings)


def machine(d2h=20e6, h2d=6e6):
    """Return a machine on which every lane has something to do: a short S waits for uploads."""
    values = {"link.d2h": d2h, "link.h2d": h2d, "host.core_bandwidth": 4e8}
    return generic_cpu(2, 8e9).with_values({**values, "device.flops.float32": 8e9})


def dear_columns():
    """Return a machine on which important columns have a price: each link has a best k."""
    return machine(d2h=40e6, h2d=12e6).with_values({"overheads.device_update": 2e7})


def twin(config=CONFIG, on=None):
    return Twin(workload(), on or machine(), config)


def a_stretch(index=0, knobs=HERE, step_seconds=1.0, **changes):
    settings = {"last_step": 20 * (index + 1), "noise": 0.002, "stall_seconds": 0.0, "rho": 0.8}
    settings |= changes
    return Stretch(index=index, knobs=knobs, step_seconds=step_seconds, **settings)


class Truth:
    """The machine as it is: a twin whose constants nobody is told."""

    def __init__(self, curve=CURVE, on=None, **constants):
        self.twin = twin(on=on)
        self.constants = {**NEUTRAL, **constants}
        self.curve = curve

    def forecast(self, knobs):
        return self.twin.forecast(knobs, self.constants)

    def rho(self, knobs):
        return 1.0 - self.curve.captured(knobs.topk_ratio)

    def stretch(self, index, knobs, *, slower=1.0, noise=0.001):
        """Return what measuring a setting gives, ``slower`` being a factor on the step."""
        found = self.forecast(knobs)
        return a_stretch(
            index,
            knobs,
            found.step_seconds * slower,
            noise=noise,
            stall_seconds=found.stall_seconds,
            rho=self.rho(knobs),
            busy_seconds=dict(found.busy_seconds),
        )

    def progress(self, knobs):
        """Return steps of AdamW's worth per second, selections aside."""
        return FITTED.of(knobs, self.rho(knobs)) / self.forecast(knobs).step_seconds

    def best(self, settings):
        return max(settings, key=self.progress)

    def shortfall(self, knobs, settings):
        """Return by which share a setting is worse than the best of some."""
        return 1.0 - self.progress(knobs) / self.progress(self.best(settings))


def knobs_at(**changes):
    return replace(HERE, **changes)


def log_gap(one, other):
    return abs(math.log(one / other))


class StandIn:
    """Stands in for an adviser: answers any question with an answer that shows it was heard."""

    def __init__(self, *, seconds=0.0, error=None, intervals=(1, 1), bests=()):
        """Think for some seconds; raise an error if asked to "fail".

        Advise ``bests`` one after another, then to stay, and that ``intervals`` are as good.
        """
        self.seconds = seconds
        self.error = error
        self.intervals = intervals
        self.bests = list(bests)

    def seconds_per_forecast(self):
        return 0.25

    def advise(self, question):
        time.sleep(self.seconds)
        if question.seed == FAIL:
            raise self.error
        if question.seed == PRINT:
            print("printed", flush=True)  # noqa: T201
            os.write(1, b"written\n")
            subprocess.run(["echo", "echoed"], check=True)
        knobs = question.here
        here = ForecastedSetting(
            knobs=knobs, step_seconds=1.0, efficiency=1.0, gain=0.0, error=0.0
        )
        best = replace(here, knobs=self.bests.pop(0), gain=0.1) if self.bests else None
        return Advice(
            constants=NEUTRAL,
            here=here,
            best=best,
            must_move=False,
            peak=here,
            intervals=self.intervals,
            error=0.0,
            num_simulated=question.seed,
            seconds=0.0,
        )


FAIL, PRINT = -1, -2


def a_question(stretches=(), here=HERE, **changes):
    """Return a question whose details don't matter."""
    settings = {"start": HERE, "curve": CURVE, "prior": Prior(NEUTRAL, 0.35), "num_trials": 12}
    return Question(stretches=tuple(stretches), here=here, **{**settings, **changes})
