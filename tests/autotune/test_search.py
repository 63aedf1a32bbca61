"""What the search ranks by: bytes per lane, in proportion."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.search import update_share
from tests.autotune.worlds import CONFIG, HERE


@pytest.mark.parametrize(
    ("interval", "moments", "share"),
    [(1, "step", 1.0), (4, "step", 28 / 82), (1, "window", 1.0), (4, "window", 28 / 58)],
)
def test_updates_are_the_hosts_whole_traffic_only_where_every_step_ends_a_window(
    interval, moments, share
):
    config = replace(CONFIG, deferred_moments=moments)
    assert update_share(replace(HERE, update_interval=interval), config) == pytest.approx(share)
