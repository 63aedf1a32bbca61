"""Findings of a calibration, in words and units: a short table for people."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from experiments.calibration.calibrate import Calibration
from sim.hardware.profile import HardwareProfile
from sim.hardware.quantity import Quantity

_KNOWN = 1e-3
"""Growth of the error below which runs say little of a constant."""
_UNSEEN = 1e12
"""Rate from which on the cost was too small to be seen."""
_OVERHEADS = {
    "step": "an optimizer step, beside its parts",
    "bucket": "a parameter in a step: hook, gathering, writing back",
    "copy": "a copy, beside its bytes",
    "host_task": "a task of the host's, handed over",
    "select": "a block's selection of columns",
}


def findings(done: Calibration) -> str:
    """Return the machine's constants, and how well they tell the runs they were refined on."""
    rows = list(_rows(done.profile))
    width = max(len(words) for words, _, _ in rows)
    lines = [f"{done.profile.name}, as the engine finds it:"]
    refined = done.refinement
    for words, value, name in rows:
        note = ""
        if name in refined.factors:
            known = refined.sensitivity[name] > _KNOWN
            note = f"{refined.factors[name]:.2g} x its probe" if known else "runs say little of it"
        lines.append(f"  {words:<{width}}  {value:>14}  {note}".rstrip())
    off = [abs(error) for error in refined.residuals.values()]
    fit = done.compute_fit
    lines.append(
        f"These tell compute of {len(done.compute)} layer shapes, alone and in runs, to "
        f"{fit.median_error:.1%} (median; worst {fit.worst_error:.1%}), and the step of "
        f"{len(off)} short runs to {median(off):.1%} (median; worst {max(off):.1%}). How far off "
        "other runs are: zenflow validate"
    )
    return "\n".join(lines)


def _rows(profile: HardwareProfile) -> Iterator[tuple[str, str, str]]:
    """Yield each constant in words, its value with a unit, and its name in the profile."""
    device, host, parts = profile.device, profile.host, profile.overheads
    for dtype in device.flops:
        rate = _si(device.product_rate(dtype), "FLOP/s")
        yield f"matrix products, {dtype}", rate, f"device.flops.{dtype}"
    bandwidth = device.bandwidth.value * device.bandwidth_efficiency.value
    yield "elementwise operations on the device", _si(bandwidth, "B/s"), "device.bandwidth"
    if not device.is_cpu:
        yield "link to the host", _rate(profile.link.d2h, "B/s"), "link.d2h"
        yield "link to the device", _rate(profile.link.h2d, "B/s"), "link.h2d"
    yield "host update, one core", _rate(host.core_bandwidth, "B/s"), "host.core_bandwidth"
    yield "host update, all cores", _rate(host.dram, "B/s"), "host.dram"
    yield "AdamW on a core, its arithmetic", _rate(host.core_update, "param/s"), "host.core_update"
    if device.is_cpu:
        sharing = f"{host.core_sharing.value:.2f} x one"
        yield "compute and host update at once, together", sharing, "host.core_sharing"
    for name, words in (
        ("intake_bandwidth", "gradients measured and gathered"),
        ("pack_bandwidth", "gradients packed for the host"),
        ("unpack_bandwidth", "weights written back"),
    ):
        rate = getattr(parts, name)
        if rate is not None:
            yield words, _rate(rate, "B/s"), f"overheads.{name}"
    yield "AdamW on the device", _rate(parts.device_update, "param/s"), "overheads.device_update"
    if parts.column_update is not None:
        updated = _rate(parts.column_update, "param/s")
        yield "AdamW on important columns", updated, "overheads.column_update"
    for name, words in _OVERHEADS.items():
        yield words, _time(getattr(parts, name).value), f"overheads.{name}"


def _rate(figure: Quantity, unit: str) -> str:
    return _si(figure.value, unit)


def _si(value: float, unit: str) -> str:
    if value >= _UNSEEN and unit != "FLOP/s":
        return "not seen"
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _time(seconds: float) -> str:
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"
