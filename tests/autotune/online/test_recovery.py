"""Runs whose machine changes in mid-run: how soon goodput is near the new best again."""

import math
import random
from statistics import fmean, median

import pytest

from autotune.online.controller import SIGMAS
from autotune.space import SearchSpace
from tests.autotune.runs import Run, a_controller
from tests.autotune.worlds import Truth, dear_columns

SPACE = SearchSpace(
    topk_ratios=(0.02, 0.1, 0.2, 0.3, 0.5),
    update_intervals=(1, 2, 4, 8, 16, 32),
    select_intervals=(100,),
)
WINDOW = 20
"""Steps that are looked at together, as in the study of tuned goodput."""
USUAL = {}
CHANGES = {
    "link 4 times slower": (USUAL, {"d2h": 4.0, "h2d": 4.0}),
    "host 3 times slower": (USUAL, {"host": 3.0}),
    "link as fast as usual": ({"d2h": 4.0, "h2d": 4.0}, USUAL),
}


class Drawn:
    """A drawn machine whose steps are noisy, and a tuner with the budget of a longer run."""

    def __init__(self, seed):
        draw = random.Random(seed)
        device, host = math.exp(draw.gauss(0, 0.2)), 2.5 * math.exp(draw.gauss(0, 0.2))
        self._constants = {"device": device, "step": 1.0, "d2h": device, "h2d": device}
        self._constants["host"] = host
        self._truth = Truth(on=dear_columns())
        controller, _ = a_controller(
            on=dear_columns(),
            space=SPACE,
            total_steps=20_000,
            sigma=SIGMAS["generic"],
            prices={"start": 0.3, "forecast": 0.012, "polls": 20},
            seed=seed,
        )
        self._run = Run(self._truth, controller, slower=lambda: math.exp(0.04 * draw.gauss(0, 1)))

    def take(self, num_steps, slower):
        """Take steps; return by how much each is behind the best setting's."""
        self._truth.constants = {p: c * slower.get(p, 1.0) for p, c in self._constants.items()}
        best = self._truth.progress(self._truth.best(SPACE.grid()))
        regrets = []
        for _ in range(num_steps):
            self._run.take(1)
            regrets.append(best / self._truth.progress(self._run.knobs) - 1.0)
        return regrets


def windows_until_back(seed, before, after, most=12):
    """Return after how many windows goodput is within 5 % of the best, over five of them."""
    machine = Drawn(seed)
    machine.take(300 + 37 * seed, before)
    regrets = machine.take((most + 5) * WINDOW, after)
    ends = (i * WINDOW for i in range(most))
    near = (fmean(regrets[at : at + 5 * WINDOW]) <= 0.05 for at in ends)
    return next((i for i, is_near in enumerate(near) if is_near), most)


@pytest.mark.parametrize(
    "change",
    [
        "link 4 times slower",
        pytest.param("host 3 times slower", marks=pytest.mark.slow),
        pytest.param("link as fast as usual", marks=pytest.mark.slow),
    ],
)
def test_goodput_is_soon_near_the_new_best_whatever_the_change_interrupts(change):
    """A trial, a search, queues that fill after one, or rest."""
    windows = [windows_until_back(seed, *CHANGES[change]) for seed in range(3)]
    assert median(windows) <= 4, windows
    assert max(windows) < 12, windows
