"""What the search ranks by: bytes per lane, in proportion; and what it looks at first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.adviser.adviser import Adviser
from autotune.adviser.forecasts import Prospects
from autotune.adviser.search import promising, update_share
from autotune.efficiency import FITTED
from tests.autotune.test_advice import question
from tests.autotune.worlds import CONFIG, HERE, SPACE, Truth, twin


@pytest.mark.parametrize(
    ("interval", "moments", "share"),
    [(1, "step", 1.0), (4, "step", 28 / 82), (1, "window", 1.0), (4, "window", 28 / 58)],
)
def test_updates_are_the_hosts_whole_traffic_only_where_every_step_ends_a_window(
    interval, moments, share
):
    config = replace(CONFIG, deferred_moments=moments)
    assert update_share(replace(HERE, update_interval=interval), config) == pytest.approx(share)


@pytest.mark.parametrize("rolling", [True, False])
def test_windows_of_the_other_kind_are_looked_at_first(rolling):
    """Of what they do to a step the bound that ranks settings knows nothing."""
    here = replace(HERE, rolling=rolling)
    truth = Truth(h2d=2.0)
    asked = question([truth.stretch(0, here)], here, num_trials=6)
    prospects = Prospects.of(asked, twin(), FITTED, (100,))
    feasibility = Adviser(twin(), SPACE).feasibility(None)
    first, *others = promising(prospects, SPACE, feasibility, 4)
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
