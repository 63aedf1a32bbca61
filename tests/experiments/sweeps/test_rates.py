"""Points that are answered together are as points answered one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.sweeps import points
from experiments.sweeps.rates import groups_of, in_groups, machines_of, rate_axes
from sim.closed_forms.steady import ClosedForm, has_closed_form
from sim.machine import Rates
from sim.replay.tape import CannotRecordError
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


def by_itself(sweep, index):
    """A point's step by its own costs and no others, and the formula's where it holds."""
    case = sweep.case(index)
    own = costs_of(case.workload, case.hardware)
    predicted = simulate(own, case.strategy, keeps_spans=False)
    formula = None
    if has_closed_form(own, case.strategy):
        found = ClosedForm(own, case.strategy).solve(tolerance=sweep.tolerance)
        formula = found.step_seconds[0] if found.applies[0] else None
    return predicted, formula


@given(sweeps())
@settings(max_examples=12, deadline=None)
def test_points_of_a_grid_are_as_by_themselves(sweep):
    for index, row in all_rows(sweep).items():
        if row["status"] == "invalid":
            with pytest.raises(ConfigError):
                sweep.case(index).check()
        elif row["status"] == "ok":
            predicted, formula = by_itself(sweep, index)
            is_solved = row["method"] == "closed form"
            assert is_solved == (formula is not None)
            expected = formula if is_solved else predicted.step_seconds
            assert row["step_seconds"] == pytest.approx(expected, rel=1e-9)
            assert row["step_seconds"] == pytest.approx(predicted.step_seconds, rel=2e-3)
            near = 2e-3 if is_solved else 1e-9
            for name in ("stall_seconds", "selection_seconds"):
                assert row[name] == pytest.approx(
                    getattr(predicted, name), rel=1e-9, abs=near * predicted.step_seconds
                )
        else:
            assert row["status"] == "does not fit"


@given(sweeps())
@settings(max_examples=16, deadline=None)
def test_rates_as_arrays_are_each_machines_own(sweep):
    for group in groups_of(sweep, np.arange(sweep.num_points)):
        try:
            case = sweep.case(int(group.points[0]))
        except ConfigError:
            continue
        axes, known = machines_of(sweep, case, group)
        for place, index in enumerate(group.points.tolist()):
            try:
                own = sweep.case(index)
            except ConfigError:
                assert not known[place]
                continue
            assert known[place]
            rates, costs = Rates.of(own.hardware), costs_of(own.workload, own.hardware)
            for name in ("d2h", "h2d", "duplex", "dram", "host", "steps"):
                assert axes[name][place] == pytest.approx(getattr(rates, name), rel=1e-12)
            if "forward" in axes:
                assert axes["forward"][place] == pytest.approx(costs.forward_seconds)
                assert axes["backward"][place].sum() == pytest.approx(costs.backward_seconds)


def test_without_the_replay_rows_are_the_same(monkeypatch):
    sweep = sweep_of("model=qwen2.5-0.5b", "S=1,4", "dram=20,80", "tflops=80,300",
                     method="simulate")  # fmt: skip
    rows = all_rows(sweep)

    def refuse(*_):
        raise CannotRecordError("the replay is not built")

    monkeypatch.setattr(points, "recording_of", refuse)
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
