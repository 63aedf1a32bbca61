"""Points that are answered together are as points answered one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.sweeps.rates import groups_of, in_groups, machines_of, rate_axes
from sim import steady
from sim.replay.arrays import RATES, rates_of
from sim.replay.tape import times_of
from sim.simulate import simulate
from sim.timing.costs import costs_of
from tests.experiments.swept import all_rows, sweep_of
from zenflow.errors import ConfigError

AXES = {
    "link_rate": st.floats(3.0, 80.0), "d2h": st.floats(3.0, 80.0), "h2d": st.floats(3.0, 80.0),
    "duplex": st.floats(0.5, 1.2), "dram": st.floats(10.0, 900.0),
    "core_rate": st.floats(1.0, 30.0), "host.core_update": st.floats(1e8, 4e9),
    "cores": st.integers(1, 65), "host_threads": st.integers(1, 60),
    "tflops": st.floats(20.0, 900.0),
}  # fmt: skip
OTHERS = {
    "S": st.sampled_from([1, 2, 4]), "k": st.sampled_from([0.0, 0.1, 0.5]),
    "host": st.sampled_from(["epyc-9654", "2x-epyc-9654"]),
    "strategy": st.sampled_from(["zenflow", "zero_offload", "published_zero_offload"]),
    "batch": st.sampled_from([1, 8, 4000]), "offload_activations": st.sampled_from(["no", "yes"]),
}  # fmt: skip


@st.composite
def sweeps(draw, **more):
    """A sweep of some axes of rates and of one other."""
    names = draw(st.lists(st.sampled_from(sorted(AXES)), min_size=1, max_size=3, unique=True))
    other = draw(st.sampled_from(sorted(OTHERS)))
    axes = []
    for name, values in [*((name, AXES[name]) for name in names), (other, OTHERS[other])]:
        own = draw(st.lists(values, min_size=1, max_size=3, unique=True))
        axes.append(
            f"{name}={','.join(f'{v:.6g}' if isinstance(v, float) else str(v) for v in own)}"
        )
    fixed = [text for text in ("batch=4", "host=epyc-9654") if not text.startswith(f"{other}=")]
    return sweep_of(
        "model=qwen2.5-0.5b", "sequence=512", *fixed, *draw(st.permutations(axes)), **more
    )


@given(sweeps())
@settings(max_examples=4, deadline=None)
def test_points_of_a_grid_are_as_by_themselves(sweep):
    for index, row in all_rows(sweep).items():
        if row["status"] == "invalid":
            with pytest.raises(ConfigError):
                sweep.case(index).check()
        elif row["status"] == "ok":
            case = sweep.case(index)
            costs = costs_of(case.workload, case.hardware)
            predicted = simulate(costs, case.strategy, keeps_spans=False)
            for name in ("step_seconds", "stall_seconds", "selection_seconds"):
                assert row[name] == pytest.approx(
                    getattr(predicted, name), rel=1e-9, abs=1e-9 * predicted.step_seconds
                )
            for name in ("d2h_bytes", "h2d_bytes"):
                assert row[name] == pytest.approx(getattr(predicted, name))
        else:
            assert row["status"] == "does not fit"


@given(sweeps())
@settings(max_examples=10, deadline=None)
def test_rates_as_arrays_are_each_machines_own(sweep):
    for group in groups_of(sweep, np.arange(sweep.num_points)):
        try:
            case = sweep.case(int(group.points[0]))
        except ConfigError:
            continue
        costs = costs_of(case.workload, case.hardware)
        rates, times, known = machines_of(sweep, case, costs, group)
        for place, index in enumerate(group.points.tolist()):
            try:
                own = sweep.case(index)
            except ConfigError:
                assert not known[place]
                continue
            assert known[place]
            costs = costs_of(own.workload, own.hardware)
            found, expected = (
                {
                    name: rate
                    for name, rate in zip(RATES, own_rates, strict=True)
                    if name != "cores"
                }
                for own_rates in (rates[place], rates_of(costs))
            )  # cores are shared where a CPU plays the device
            assert found == pytest.approx(expected, rel=1e-12)
            own_times = times[place if len(times) > 1 else 0]
            assert own_times.tolist() == pytest.approx(times_of(costs), rel=1e-12)


def test_without_the_replay_rows_are_the_same(monkeypatch):
    sweep = sweep_of("model=qwen2.5-0.5b", "S=1,4", "dram=20,80", "tflops=80,300")
    rows = all_rows(sweep)
    monkeypatch.setattr(steady, "replay_library", lambda: None)
    slowly = all_rows(sweep)
    assert rows.keys() == slowly.keys()
    for index, row in rows.items():
        assert row == {
            name: pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value
            for name, value in slowly[index].items()
        }


def test_groups_differ_in_rates_alone_and_lie_together():
    sweep = sweep_of("dram=20,40", "S=1,2", "link_rate=8,16", "batch=1,2")
    assert [axis.name for axis in rate_axes(sweep)] == ["link_rate", "dram"]
    order = in_groups(sweep, np.arange(16))
    assert sorted(order) == list(range(16))
    groups = list(groups_of(sweep, order))
    assert [list(group.points) for group in groups] == [
        list(own) for own in np.split(order, len(groups))
    ]
    for group in groups:
        values = [sweep.values(int(index)) for index in group.points]
        assert len({(own["S"], own["batch"]) for own in values}) == 1
        assert len({(own["dram"], own["link_rate"]) for own in values}) == 4
