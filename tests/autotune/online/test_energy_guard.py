"""The guard of captured energy: urgent while too little is, asked once for each stretch."""

from __future__ import annotations

from autotune.model.stretch import Stretch
from autotune.online.energy_guard import EnergyGuard
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs


def stretch(index, captured):
    return Stretch(
        index=index,
        last_step=12 * index,
        knobs=Knobs.of(ZenFlowConfig()),
        step_seconds=1.0,
        noise=0.01,
        stall_seconds=0.0,
        rho=1.0 - captured,
    )


def test_without_a_limit_nothing_is_urgent():
    guard = EnergyGuard(None)
    guard.see(stretch(0, 0.0))
    assert not guard.is_urgent
    assert not guard.was_met


def test_too_little_energy_is_urgent_once_for_each_stretch():
    guard = EnergyGuard(0.5)
    assert not guard.is_urgent
    guard.see(stretch(0, 0.4))
    assert guard.is_urgent
    guard.asked()
    assert not guard.is_urgent
    guard.see(stretch(1, 0.4))
    assert guard.is_urgent
    guard.see(stretch(2, 0.6))
    assert not guard.is_urgent
    assert guard.was_met


def test_what_was_given_up_is_not_urgent():
    guard = EnergyGuard(0.5)
    guard.see(stretch(0, 0.4))
    guard.has_given_up = True
    assert not guard.is_urgent
