"""Formulas say what the event simulation says, wherever they claim to hold."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.closed_forms.steady import ClosedForm, has_closed_form
from sim.hardware.catalog import find_machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of
from zenflow.errors import ConfigError

STRATEGIES = {
    "on_device": Strategy.of("on_device"),
    "zero_offload": Strategy.of("zero_offload"),
    "delayed": Strategy.of("delayed"),
    "zenflow_paper": Strategy.of("zenflow_paper", select_interval=0),
    "zenflow": Strategy.of("zenflow", select_interval=0),
    "zenflow S=2": Strategy.of("zenflow", select_interval=0, update_interval=2),
    "zenflow q=1": Strategy.of("zenflow", select_interval=0, queue_depth=1),
    "zenflow S=5 q=3": Strategy.of("zenflow", select_interval=0, update_interval=5, queue_depth=3),
    "zenflow S=1": Strategy.of("zenflow", select_interval=0, update_interval=1),
    "published S=1": Strategy.of("zenflow_paper", select_interval=0, update_interval=1),
    "zenflow in turn": Strategy.of(
        "zenflow", select_interval=0, overlap_step=False, update_interval=1
    ),
    "zenflow selecting": Strategy.of("zenflow", select_interval=20),
    "zenflow selecting S=1": Strategy.of("zenflow", select_interval=20, update_interval=1),
    "zenflow selecting k=0.5": Strategy.of("zenflow", select_interval=12, topk_ratio=0.5),
    "zenflow selecting q=1": Strategy.of("zenflow", select_interval=40, queue_depth=1),
    "zenflow selecting in turn": Strategy.of(
        "zenflow", select_interval=10, overlap_step=False, update_interval=1
    ),
    "published selecting S=1": Strategy.of("zenflow_paper", select_interval=20, update_interval=1),
    "published_on_device": Strategy.of("published_on_device"),
    "published_zero_offload": Strategy.of("published_zero_offload"),
}


def costs(model="qwen2.5-0.5b", machine="hgx-h200", batch=8, **values):
    workload = Workload.of_config(*find_model(model), batch_size=batch, sequence=1024)
    hardware = find_machine(machine, 1)
    update = hardware.overheads.device_update
    overheads = replace(hardware.overheads, column_update=replace(update, value=update.value / 3))
    return costs_of(workload, replace(hardware, overheads=overheads).with_values(values))


@pytest.mark.parametrize("name", STRATEGIES)
@given(
    *(st.floats(0.2, 3.0), st.floats(0.2, 3.0), st.floats(0.1, 4.0), st.floats(0.05, 2.0)),
    st.sampled_from([2, 8, 32]),
)
@settings(max_examples=12, deadline=None)
def test_the_formula_equals_the_simulation_where_it_applies(name, down, up, host, steps, batch):
    full = {"link.duplex": 1.0}
    base = costs(batch=batch, **full)
    link, cpu = base.hardware.link, base.hardware.host
    values = {
        "link.d2h": down * link.d2h.value,
        "link.h2d": up * link.h2d.value,
        "host.core_bandwidth": host * cpu.core_bandwidth.value,
        "host.core_update": steps * cpu.core_update.value,
        **full,
    }
    given_costs = costs(batch=batch, **values)
    found = ClosedForm(given_costs, STRATEGIES[name]).solve()
    if not found.applies[0]:
        return
    predicted = simulate(given_costs, STRATEGIES[name], keeps_spans=False)
    assert found.step_seconds[0] == pytest.approx(predicted.step_seconds, rel=1e-6)
    assert found.stall_seconds[0] == pytest.approx(
        predicted.stall_seconds, abs=1e-6 * predicted.step_seconds
    )
    assert found.selection_seconds[0] == pytest.approx(
        predicted.selection_seconds, abs=1e-6 * predicted.step_seconds
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_formula_applies_on_a_machine_that_keeps_up(name):
    fast = {
        "link.duplex": 1.0, "host.dram": 1e14, "host.core_bandwidth": 1e11, "link.d2h": 1e13,
        "link.h2d": 1e13, "host.core_update": 1e10,
    }  # fmt: skip
    given_costs = costs("llama-3.1-8b", batch=16, **fast)
    found = ClosedForm(given_costs, STRATEGIES[name]).solve()
    assert found.applies[0]
    predicted = simulate(given_costs, STRATEGIES[name], keeps_spans=False)
    assert found.step_seconds[0] == pytest.approx(predicted.step_seconds, rel=1e-6)


def test_many_machines_at_once_are_each_as_by_itself():
    given_costs = costs("llama-3.1-8b", batch=32, **{"link.duplex": 1.0})
    form = ClosedForm(given_costs, STRATEGIES["zenflow"])
    rates = np.linspace(5e9, 60e9, 1500)  # more than one chunk
    together = form.solve(d2h=rates, h2d=rates[::-1], duplex=1e15)
    for index in (0, 700, 1499):
        alone = form.solve(d2h=rates[index], h2d=rates[::-1][index], duplex=1e15)
        assert alone.step_seconds[0] == together.step_seconds[index]
        assert alone.applies[0] == together.applies[index]
    assert 0 < together.applies.sum() < len(rates)


def test_within_a_tolerance_it_holds_on_a_half_duplex_link_too():
    given_costs = costs("llama-3.1-8b", batch=32)
    assert given_costs.hardware.link.duplex.value < 1
    form = ClosedForm(given_costs, STRATEGIES["zenflow"])
    assert not form.solve().applies[0]
    found = form.solve(tolerance=0.01)
    assert found.applies[0]
    predicted = simulate(given_costs, STRATEGIES["zenflow"], keeps_spans=False)
    assert found.step_seconds[0] == pytest.approx(predicted.step_seconds, rel=0.01)


@given(
    *(st.floats(0.2, 3.0), st.floats(0.2, 3.0), st.floats(0.3, 4.0), st.floats(0.3, 3.0)),
    st.sampled_from([1.0, 0.9, 0.75, 0.6]),
    st.sampled_from(["zero_offload", "zenflow", "zenflow_paper", "delayed"]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([10, 100]),
)
@settings(max_examples=60, deadline=None)
def test_a_step_with_its_selections_is_as_near_as_the_tolerance_says(
    down, up, host, dram, duplex, name, interval, every
):
    machine = find_machine("hgx-h200", 1)
    values = {
        "link.d2h": down * machine.link.d2h.value,
        "link.h2d": up * machine.link.h2d.value,
        "link.duplex": duplex,
        "host.core_bandwidth": host * machine.host.core_bandwidth.value,
        "host.dram": dram * machine.host.dram.value,
    }
    knobs = {"update_interval": interval, "select_interval": every}
    strategy = Strategy.of(name, **(knobs if name.startswith("zenflow") else {}))
    given_costs = costs(**values)
    found = ClosedForm(given_costs, strategy).solve(tolerance=0.002)
    if not found.applies[0]:
        return
    predicted = simulate(given_costs, strategy, keeps_spans=False)
    assert found.step_seconds[0] == pytest.approx(predicted.step_seconds, rel=0.002)
    assert found.selection_seconds[0] == pytest.approx(
        predicted.selection_seconds, abs=0.002 * predicted.step_seconds
    )
    if name.startswith("zenflow"):
        assert found.selection_seconds[0] > 0


def test_a_slow_host_is_left_to_the_simulation():
    slow = costs(**{"link.duplex": 1.0, "host.core_bandwidth": 1e8})
    assert not ClosedForm(slow, STRATEGIES["zenflow"]).solve().applies[0]


def test_what_has_no_formula_is_said():
    one = costs()
    two = replace(one, hardware=find_machine("hgx-h200", 2))
    assert not has_closed_form(two, STRATEGIES["zenflow"])
    with pytest.raises(ConfigError, match="no closed form for 2 devices"):
        ClosedForm(two, STRATEGIES["zenflow"])
    with pytest.raises(ConfigError, match="superoffload has no closed form"):
        ClosedForm(one, Strategy.of("superoffload"))
    form = ClosedForm(one, STRATEGIES["zenflow"])
    with pytest.raises(ConfigError, match="axis 'dh2' is unknown; did you mean 'h2d'"):
        form.solve(dh2=1e9)
    for bad in (0.0, -1.0, np.nan):
        with pytest.raises(ConfigError, match="d2h must be positive"):
            form.solve(d2h=bad)
