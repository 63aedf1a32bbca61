"""The guard of captured energy: urgent while too little is, asked once for each stretch."""

from __future__ import annotations

from autotune.online.energy_guard import EnergyGuard
from tests.autotune.worlds import a_stretch


def test_without_a_limit_nothing_is_urgent():
    guard = EnergyGuard(None)
    guard.see(a_stretch(0, rho=1.0))
    assert not guard.is_urgent
    assert not guard.was_met


def test_too_little_energy_is_urgent_once_for_each_stretch():
    guard = EnergyGuard(0.5)
    assert not guard.is_urgent
    guard.see(a_stretch(0, rho=0.6))
    assert guard.is_urgent
    guard.asked()
    assert not guard.is_urgent
    guard.see(a_stretch(1, rho=0.6))
    assert guard.is_urgent
    guard.see(a_stretch(2, rho=0.4))
    assert not guard.is_urgent
    assert guard.was_met


def test_what_was_given_up_is_not_urgent():
    guard = EnergyGuard(0.5)
    guard.see(a_stretch(0, rho=0.6))
    guard.has_given_up = True
    assert not guard.is_urgent
