"""Constraints: what is allowed, and what is said where nothing is."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autotune.constraints import Constraints, Feasibility, Need, needs_of, staleness_of
from autotune.space import SearchSpace
from sim.hardware.catalog import find_machine
from sim.memory.need import memory_of
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Strategy
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

GB = 1e9
SPACE = SearchSpace(
    topk_ratios=(0.1, 0.2, 0.3, 0.4),
    update_intervals=(1, 2, 4),
    select_intervals=(100,),
)
DEFAULT = Knobs.of(ZenFlowConfig())


def need(knobs):
    """Return needs in closed form: k costs the device, 1 - k and 1 / S the host."""
    k, window = knobs.topk_ratio, knobs.update_interval
    return Need(
        device_bytes=(10 + 100 * k) * GB,
        host_bytes=(50 * (1 - k) + 8 / window) * GB,
        staleness=staleness_of(knobs),
        captured=k**0.5,
    )


def feasibility(**limits):
    return Feasibility(Constraints(**limits), need, SPACE)


def message_of(**limits):
    with pytest.raises(ConfigError) as caught:
        feasibility(**limits).check()
    return str(caught.value)


def test_a_setting_is_allowed_if_it_keeps_every_limit():
    knobs = Knobs(topk_ratio=0.2, update_interval=2, select_interval=100)
    kept = {
        "device_bytes": 30 * GB,
        "host_bytes": 44 * GB,
        "largest_staleness": 3,
        "smallest_captured": 0.44,
    }
    assert feasibility().allows(knobs)
    assert feasibility(**kept).allows(knobs)
    broken = {
        "device_bytes": 29.9 * GB,
        "host_bytes": 43.9 * GB,
        "largest_staleness": 2,
        "smallest_captured": 0.45,
    }
    for name, value in broken.items():
        limited = feasibility(**{**kept, name: value})
        assert not limited.allows(knobs)
        assert [key for key, missed in limited.misses(knobs).items() if missed] == [name]


def test_misses_are_shares_of_the_limit():
    knobs = Knobs(topk_ratio=0.2, update_interval=4, select_interval=100)
    limited = feasibility(device_bytes=20 * GB, largest_staleness=4, host_bytes=100 * GB)
    assert limited.misses(knobs) == pytest.approx(
        {"device_bytes": 0.5, "largest_staleness": 0.25, "host_bytes": 0.0}
    )


def test_a_limit_that_nothing_meets_is_named_with_the_best_there_is():
    text = message_of(device_bytes=15 * GB, smallest_captured=0.4)
    assert "device memory <= 15 GB" in text
    assert "can't be met by any setting" in text
    assert "comes down to 20 GB, 5 GB too much, with k=0.1" in text
    assert "captured" not in text
    assert "reaches 0.632, 0.268 too little, with k=0.4" in message_of(smallest_captured=0.9)
    assert "staleness comes down to 2 steps, 1 step too much" in message_of(largest_staleness=1)


def test_two_limits_that_conflict_are_named_with_the_knob_between_them_and_both_misses():
    text = message_of(device_bytes=31 * GB, smallest_captured=0.6, host_bytes=60 * GB)
    assert text == (
        "captured energy >= 0.6 needs topk_ratio >= 0.4, but device memory <= 31 GB allows "
        "topk_ratio <= 0.2: with captured energy >= 0.6 kept, device memory comes down to 50 GB, "
        "19 GB too much; with device memory <= 31 GB kept, captured energy reaches 0.447, "
        "0.153 too little. Relax one of the two."
    )


def test_the_knob_is_named_whichever_of_the_two_limits_asks_for_more_of_it():
    text = message_of(host_bytes=34 * GB, device_bytes=45 * GB)
    assert text.startswith(
        "host memory <= 34 GB needs topk_ratio >= 0.4, but device memory <= 45 GB allows "
        "topk_ratio <= 0.3:"
    )
    text = message_of(host_bytes=33 * GB, largest_staleness=3)
    assert text.startswith(
        "host memory <= 33 GB needs update_interval >= 4, but staleness <= 3 steps allows "
        "update_interval <= 2:"
    )


def test_two_limits_that_no_single_knob_parts_are_named_without_one():
    def crossed(knobs):
        ends = (knobs.topk_ratio < 0.25) == (knobs.update_interval > 1)
        host, device = (1 * GB, 2 * GB) if ends else (3 * GB, 1 * GB)
        return Need(device_bytes=device, host_bytes=host, staleness=2, captured=None)

    limits = Constraints(device_bytes=1 * GB, host_bytes=2 * GB)
    with pytest.raises(ConfigError) as caught:
        Feasibility(limits, crossed, SPACE).check()
    assert str(caught.value) == (
        "device memory <= 1 GB and host memory <= 2 GB can't be met together: with host memory "
        "<= 2 GB kept, device memory comes down to 2 GB, 1 GB too much; with device memory <= 1 "
        "GB kept, host memory comes down to 3 GB, 1 GB too much. Relax one of the two."
    )


def test_a_knob_that_may_have_the_same_value_under_both_limits_parts_nothing():
    def touching(knobs):
        k, is_short = knobs.topk_ratio, knobs.update_interval == 1
        host = 1 if k > 0.2 or (k == 0.2 and is_short) else 9
        device = 1 if k < 0.2 or (k == 0.2 and not is_short) else 9
        return Need(device_bytes=device * GB, host_bytes=host * GB, staleness=2, captured=None)

    with pytest.raises(ConfigError, match="can't be met together"):
        Feasibility(Constraints(device_bytes=GB, host_bytes=GB), touching, SPACE).check()


def test_three_limits_of_which_any_two_can_be_met_are_named_together():
    text = message_of(host_bytes=38 * GB, largest_staleness=3, device_bytes=41 * GB)
    # Staleness 3 leaves S <= 2, memory k <= 0.3: 35 + 4 GB are needed at least.
    assert "needs" not in text
    assert "can't be met together, though any 2 of them can" in text
    assert "host memory comes down to 39 GB, 1 GB too much" in text
    assert "staleness comes down to 5 steps, 2 steps too much" in text
    assert "device memory comes down to 50 GB, 9 GB too much" in text


bounds = st.fixed_dictionaries(
    {},
    optional={
        "device_bytes": st.floats(15 * GB, 60 * GB),
        "host_bytes": st.floats(25 * GB, 60 * GB),
        "largest_staleness": st.integers(1, 8),
        "smallest_captured": st.floats(0.2, 0.8),
    },
)


@given(bounds)
def test_check_refuses_exactly_where_no_point_of_the_grid_is_allowed(limits):
    found = feasibility(**limits)
    if any(found.allows(knobs) for knobs in SPACE.grid()):
        found.check()
    else:
        with pytest.raises(ConfigError):
            found.check()


@given(bounds)
@settings(max_examples=200)
def test_the_misses_that_are_named_are_what_it_takes(limits):
    """Relaxing any one of the conflicting limits by what it is missed by makes room."""
    try:
        feasibility(**limits).check()
    except ConfigError as error:
        text = str(error)
    else:
        assume(False)
    named = {
        name: words
        for name, words in {
            "device_bytes": r"device memory comes down to [\d.]+ \wB, ([\d.]+) (\wB) too much",
            "host_bytes": r"host memory comes down to [\d.]+ \wB, ([\d.]+) (\wB) too much",
            "largest_staleness": r"staleness comes down to \d+ steps?, (\d+) step(s?) too much",
            "smallest_captured": r"captured energy reaches [\d.]+, ([\d.e-]+)( )too little",
        }.items()
        if re.search(words, text)
    }
    assert named
    conflicting = {name: limits[name] for name in named}
    units = {"GB": GB, "MB": 1e6, "kB": 1e3}
    for name, words in named.items():
        amount, unit = re.search(words, text).groups()
        missed = float(amount) * units.get(unit, 1)
        sign = -1 if name == "smallest_captured" else 1
        rounding = 0 if name == "largest_staleness" else 0.01 * missed + 1e-9
        relaxed = limits[name] + sign * (missed + rounding)
        others = {key: value for key, value in conflicting.items() if key != name}
        feasibility(**others, **{name: relaxed}).check()
        if missed > rounding:
            nearly = limits[name] + sign * (missed - (rounding or 1))
            if name != "largest_staleness" or nearly >= 1:
                message_of(**others, **{name: nearly})


def test_energy_that_is_not_known_keeps_nothing_out():
    def blind(knobs):
        own = need(knobs)
        return Need(
            device_bytes=own.device_bytes,
            host_bytes=own.host_bytes,
            staleness=own.staleness,
            captured=None,
        )

    found = Feasibility(Constraints(smallest_captured=0.99), blind, SPACE)
    found.check()
    assert found.allows(DEFAULT)


@pytest.mark.parametrize(
    ("limits", "rule"),
    [
        ({"device_bytes": 0}, "positive number of bytes"),
        ({"host_bytes": float("nan")}, "positive number of bytes"),
        ({"largest_staleness": 0}, "at least 1 step"),
        ({"largest_staleness": 2.5}, "whole number"),
        ({"smallest_captured": 1.0}, "on_device"),
    ],
)
def test_a_limit_that_means_nothing_is_refused(limits, rule):
    with pytest.raises(ConfigError, match=rule):
        Constraints(**limits)


def workload():
    return Workload.of_config(*find_model("qwen2.5-0.5b"), batch_size=2, sequence=256)


def test_needs_are_the_simulators_memory_and_the_rules_staleness():
    machine = find_machine("rtx4090-desktop")
    work = workload()
    knobs = Knobs(topk_ratio=0.05, update_interval=4, select_interval=50)
    own = needs_of(work, machine, captured=lambda ratio: 2 * ratio)(knobs)
    strategy = Strategy.of("zenflow", topk_ratio=0.05, update_interval=4)
    memory = memory_of(work, strategy, machine)
    assert (own.device_bytes, own.host_bytes) == (memory.device_bytes, memory.host_bytes)
    assert own.staleness == 5
    assert own.captured == 0.1
    assert needs_of(work, machine)(knobs).captured is None


def test_a_cpu_in_the_devices_role_has_the_hosts_memory_only():
    machine = find_machine("rtx4090-desktop")
    cpu = replace(machine, device=replace(machine.device, is_cpu=True))
    own = needs_of(workload(), cpu)(DEFAULT)
    memory = memory_of(workload(), "zenflow", cpu)
    assert own.host_bytes == memory.host_bytes + memory.device_bytes
    limits = Constraints().within(cpu)
    assert limits.device_bytes is None
    assert limits.host_bytes == cpu.host.dram_bytes.value


def test_needs_that_are_known_are_those_of_the_setting_that_is_asked_for():
    needs = needs_of(workload(), find_machine("rtx4090-desktop"))
    more = replace(DEFAULT, topk_ratio=0.3)
    assert needs(DEFAULT).host_bytes > needs(more).host_bytes
    assert needs(replace(DEFAULT, select_interval=7)) == needs(DEFAULT)


def test_the_machines_own_memory_limits_where_nothing_smaller_does():
    machine = find_machine("rtx4090-desktop")
    room = machine.device.memory.value
    assert Constraints().within(machine).device_bytes == room
    assert Constraints(device_bytes=room / 2).within(machine).device_bytes == room / 2
    assert Constraints(device_bytes=2 * room).within(machine).device_bytes == room
    assert Constraints().within(machine).host_bytes == machine.host.dram_bytes.value
    assert Constraints(largest_staleness=5).within(machine).largest_staleness == 5


def test_staleness_is_window_and_lag_and_none_without_deferred_columns():
    for knobs in SearchSpace().grid():
        assert staleness_of(knobs) == knobs.update_interval + 1
    assert staleness_of(replace(DEFAULT, topk_ratio=1.0)) == 0
    assert staleness_of(DEFAULT, ZenFlowConfig(overlap_step=False)) == 4
    assert staleness_of(DEFAULT, ZenFlowConfig(update_rule="published")) == 8
