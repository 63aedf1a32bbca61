"""What the search ranks by: bytes per lane, in proportion; and what it looks at first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.adviser.adviser import Adviser
from autotune.adviser.forecasts import Forecasts
from autotune.adviser.search import lane_loads, promising, update_share
from autotune.model.twin import Twin
from tests.autotune.adviser.test_adviser import question
from tests.autotune.worlds import CONFIG, HERE, SPACE, Truth, machine, twin, workload


def a_twin(dtype, **changes):
    return Twin(workload(dtype=dtype), machine(), replace(CONFIG, **changes))


@pytest.mark.parametrize(
    ("interval", "dtype", "moments", "update", "intake"),
    [
        # Master and moments read and written, the weight for upload, the last gradient.
        (1, "bfloat16", "step", 24 + 2 + 2, 0),
        (1, "float32", "step", 24 + 4 + 4, 0),
        # Both moments read and written, and a gradient read, in each of the other steps.
        (4, "bfloat16", "step", 24 + 2 + 2, 3 * (16 + 2)),
        (4, "float32", "step", 24 + 4 + 4, 3 * (16 + 4)),
        # The window's sum: written once, read and written after that, read by the update.
        (4, "bfloat16", "window", 24 + 2 + 2 + 4, (4 + 2) + 2 * (8 + 2)),
        (4, "float32", "window", 24 + 4 + 4 + 4, (4 + 4) + 2 * (8 + 4)),
    ],
)
def test_the_hosts_load_counts_the_bytes_of_the_models_dtype(
    interval, dtype, moments, update, intake
):
    knobs = replace(HERE, update_interval=interval, lag=1)
    own = a_twin(dtype, deferred_moments=moments)
    assert update_share(knobs, own) == pytest.approx(update / (update + intake))
    per_step = 0.9 * (update + intake) / interval
    assert lane_loads(own)["host"](knobs) == pytest.approx(per_step)


@pytest.mark.parametrize("rolling", [True, False])
def test_windows_of_the_other_kind_are_looked_at_first(rolling):
    """Of what they do to a step the bound that ranks settings knows nothing."""
    here = replace(HERE, rolling=rolling)
    truth = Truth(h2d=2.0)
    asked = question([truth.stretch(0, here)], here, num_trials=6)
    forecasts = Forecasts.of(asked, twin(), (100,))
    feasibility = Adviser(twin(), SPACE).feasibility(None)
    first, *others = promising(forecasts, SPACE, feasibility, 4)
    assert others[0] == replace(here, rolling=not rolling)
    assert replace(first, rolling=not first.rolling) in others
    assert len(dict.fromkeys([first, *others])) == 4


def test_a_search_ends_when_its_cpu_time_is_spent():
    truth = Truth(h2d=2.0)
    asked = question([truth.stretch(0, HERE)], HERE, num_trials=12)
    whole = Adviser(twin(), SPACE).advise(asked)
    cut = Adviser(twin(), SPACE).advise(replace(asked, most_seconds=0.0))
    assert 0 < cut.num_simulated < whole.num_simulated
    assert cut.here.knobs == whole.here.knobs
