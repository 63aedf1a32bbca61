"""A sweep says the same by formula and by events, and says which it used."""

import numpy as np
import pytest

from sim.catalog import find_machine
from sim.costs import costs_of
from sim.models import find_model
from sim.simulate import Strategy, simulate
from sim.sweep import sweep
from sim.workload import Workload
from zenflow.errors import ConfigError

MODEL = Workload.of_config(*find_model("qwen2.5-0.5b"), batch_size=8, sequence=1024)
ZENFLOW = Strategy.of("zenflow", select_interval=0)


def costs(**values):
    return costs_of(MODEL, find_machine("hgx-h200", 1).with_values(values))


def test_points_are_answered_by_formula_where_it_holds_and_by_events_elsewhere():
    base = costs(**{"link.duplex": 1.0})
    host = np.array([3e9, 3e11])  # far too slow, and fast
    found = sweep(base, ZENFLOW, host=host)
    assert list(found.is_formula) == [False, True]
    assert found.method == "closed form for 1, events for 1"
    threads = base.hardware.threads_per_device
    for index, rate in enumerate(host):
        alone = simulate(
            costs(**{"link.duplex": 1.0, "host.core_bandwidth": rate / threads}), ZENFLOW
        )
        assert found.step_seconds[index] == pytest.approx(alone.step_seconds, rel=1e-6)
        assert found.stall_seconds[index] == pytest.approx(
            alone.stall_seconds, abs=1e-6 * alone.step_seconds
        )


def test_every_axis_reaches_the_simulated_machine():
    base = costs()
    axes = {
        "forward": 0.01, "backward": 0.03, "d2h": 9e9, "h2d": 8e9, "duplex": 12e9, "dram": 5e10,
        "host": 2e10,
    }  # fmt: skip
    before = sweep(base, ZENFLOW)
    assert not before.is_formula[0]  # half-duplex: by events
    for name, value in axes.items():
        after = sweep(base, ZENFLOW, **{name: value})
        if name != "duplex":
            assert after.step_seconds[0] != before.step_seconds[0], name
    slow = costs(**{"link.d2h": 9e9, "link.h2d": 8e9, "link.duplex": 12 / 17})
    expected = simulate(slow, ZENFLOW).step_seconds
    found = sweep(base, ZENFLOW, d2h=9e9, h2d=8e9, duplex=12e9)
    assert found.step_seconds[0] == pytest.approx(expected, rel=1e-9)


def test_strategies_without_a_formula_are_simulated_point_by_point():
    told = []
    found = sweep(
        costs(), Strategy.of("superoffload"), host=[1e10, 2e11], on_point=lambda: told.append(1)
    )
    assert not found.is_formula.any()
    assert len(told) == 2
    assert found.step_seconds[0] > found.step_seconds[1]


def test_wrong_axes_are_refused():
    with pytest.raises(ConfigError, match="axis 'hosts' is unknown; did you mean 'host'"):
        sweep(costs(), ZENFLOW, hosts=1.0)
    with pytest.raises(ConfigError, match="positive"):
        sweep(costs(), ZENFLOW, d2h=[1e9, -1e9])
    with pytest.raises(ConfigError, match="positive"):
        sweep(costs(), Strategy.of("superoffload"), d2h=0.0)
