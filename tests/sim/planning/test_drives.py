"""Plans with states on a drive: when these are told, and which setting."""

import shlex
from dataclasses import replace
from functools import cache

import pytest

from experiments.commands.prediction.plan_drive import on_drive
from experiments.commands.prediction.plan_run import Wishes, run_command
from sim import steady
from sim.hardware.catalog import find_machine, find_nvme
from sim.hardware.quantity import Quantity
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.planning.drives import DEPTHS, with_drive
from sim.planning.options import Planner
from sim.planning.plan import plan
from sim.simulate import simulate


def asked(host_gib, *, model="llama-2-7b", has_drive=True):
    machine = find_machine("rtx4090-desktop")
    machine = replace(
        machine,
        nvme=find_nvme("gen4-desktop") if has_drive else None,
        host=replace(machine.host, dram_bytes=Quantity(value=host_gib * 2.0**30)),
    )
    return Workload.of_config(*find_model(model), batch_size=4, sequence=1024), machine


@cache
def found(host_gib, *, model="llama-2-7b", has_drive=True, **settings):
    work, machine = asked(host_gib, model=model, has_drive=has_drive)
    return plan(work, machine, strategies=("on_device", "zenflow"), draws=0, **settings)


def test_a_host_with_room_and_a_machine_without_drives_get_none():
    assert found(192).on_drive is None
    assert found(48, has_drive=False).on_drive is None


def test_where_states_fit_the_host_only_when_rounded_a_drive_keeps_them_whole():
    made = found(64)
    assert made.shown.strategy.config.is_compact
    option = made.on_drive
    assert option.fits
    assert option.strategy.state_on_drive
    assert not option.strategy.config.is_compact
    assert option.need.queue_depth == 4  # fewer would write more


def test_a_smaller_host_lets_fewer_gradients_wait_and_write_more():
    large, small = found(64, host_state="float32", state_on_drive=True), found(28)
    assert small.recommended is small.on_drive
    assert small.on_drive.fits
    assert small.on_drive.need.queue_depth < large.on_drive.need.queue_depth
    wear = [made.on_drive.prediction.drive_written_bytes for made in (large, small)]
    each = [
        size / (5.03 if made.on_drive.strategy.config.is_compact else 12)
        for size, made in zip(wear, (large, small), strict=True)
    ]
    assert each[1] > 1.5 * each[0]


@pytest.mark.parametrize("host_gib", [24, 64, 192])
def test_no_number_of_waiting_gradients_that_is_left_out_is_faster(host_gib):
    work, machine = asked(host_gib)
    made = with_drive(Planner(machine), work, is_asked=True)
    kind = made.strategy.config.host_state
    each = [
        with_drive(
            Planner(machine), work, is_asked=True, knobs={"host_state": kind, "queue_depth": depth}
        )
        for depth in DEPTHS
    ]
    fastest = max(filter(None, each), key=lambda option: option.tokens_per_second)
    assert made.tokens_per_second == fastest.tokens_per_second
    assert made.need.queue_depth == fastest.need.queue_depth


def test_passes_that_take_too_long_by_themselves_are_not_simulated(monkeypatch):
    depths = []

    def simulated(costs, strategy, **settings):
        if strategy.name == "zenflow" and strategy.state_on_drive:
            depths.append(strategy.config.queue_depth)
        return simulate(costs, strategy, **settings)

    monkeypatch.setattr(steady, "simulate", simulated)
    work, machine = asked(192)
    with_drive(Planner(machine), work, is_asked=True)
    assert set(depths) == {4}  # for each format of state


def test_weights_visit_where_they_must():
    option = found(128, model="qwen3-14b").on_drive
    assert option.fits
    assert option.strategy.streams is not None


def test_asked_for_they_are_told_beside_states_in_memory():
    made = found(192, state_on_drive=True)
    assert made.recommended is not None
    assert made.on_drive.strategy.state_on_drive


def test_the_command_and_the_wear():
    made, wishes = found(64), Wishes(model="llama-2-7b", drive_tbw=100.0)
    words = shlex.split(run_command(made, wishes, made.on_drive))
    for flag, value in {"--state-dir": "/nvme/run1", "--topk-ratio": "0", "--queue-depth": "4",
                        "--drive-tbw": "100"}.items():  # fmt: skip
        assert words[words.index(flag) + 1] == value
    assert "--state-on-drive" not in words
    written = 1000 * made.on_drive.prediction.drive_written_bytes / 1e12
    said = "\n".join(on_drive(made, wishes))
    assert f"{written:.3g} TB" in said
    assert f"{written / 100:.2%} of the warranted" in said
    assert written == pytest.approx(12e-3 * 6.7 * 1000 / 4, rel=0.05)
