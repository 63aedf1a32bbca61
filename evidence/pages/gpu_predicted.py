"""Step times that the simulator predicts for the runs of a GPU's record, from the table's GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evidence.benchmarks.gpu.observations import observation
from evidence.benchmarks.gpu.setup import SERIES
from sim.hardware.catalog import assemble, find_host, find_link
from sim.hardware.profile import HardwareProfile
from sim.hardware.quantity import Quantity
from sim.simulate import Strategy
from sim.steady import steady
from sim.timing.costs import costs_of
from zenflow.errors import ConfigError

PRESETS = ("on_device", "zero_offload", "zenflow")
"""Runs of a cell that are predicted where none was reached."""
_HOST = "xeon-8480c"
"""Host whose cores are taken for those of a machine that does not tell its own."""


def _measured(former: Quantity, value: float) -> Quantity:
    return replace(former, value=value, kind="measured", source="the record", sigma=None)


def machine_of(
    suite: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]
) -> HardwareProfile | None:
    """Return the machine: the table's GPU, the record's link, and the fastest AdamW of its host.

    Args:
        suite: Record of all parts.
        cells: Cells of its series.

    Returns:
        None where the table does not know the GPU, or no run had work for the host.
    """
    lanes = [run["lanes"].get("host", {}) for cell in cells for run in cell["runs"]]
    rates = [lane["bytes_per_second"] for lane in lanes if "bytes_per_second" in lane]
    link = next((cell["speeds"]["link"] for cell in cells if "speeds" in cell), None)
    if not rates or link is None:
        return None
    host, table = find_host(_HOST), find_link("pcie5-x16")
    host = replace(
        host,
        cores=suite["hardware"]["cores"],
        dram=_measured(host.dram, max(rates) / host.adam_share.value),
        dram_bytes=_measured(host.dram_bytes, suite["hardware"]["memory_bytes"]),
    )
    down, up = _measured(table.d2h, link["d2h"]), _measured(table.h2d, link["h2d"])
    try:
        return assemble(suite["hardware"]["gpu"], host, replace(table, d2h=down, h2d=up))
    except ConfigError:
        return None


def predicted(
    suite: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], not_reached: Sequence[str] = ()
) -> dict[tuple[str, str], float]:
    """Return the predicted seconds of a step, by cell and run.

    Args:
        suite: Record of all parts.
        cells: Cells of its series.
        not_reached: Cells, or "cell: run", that time did not suffice for.
    """
    machine = machine_of(suite, cells)
    if machine is None:
        return {}
    works = {
        (cell["cell"]["name"], run["name"]): (own.workload, own.strategy)
        for cell in cells
        for run in cell["runs"]
        for own in (observation(cell["cell"], run),)
    }
    named = {str(cell): cell for series in SERIES.values() for cell in series}
    for words in not_reached:
        name, _, run = words.partition(": ")
        for preset in [run] if run else PRESETS:
            if name in named and preset in PRESETS:
                works[name, preset] = named[name].workload(), Strategy.of(preset)
    return {
        key: steady(costs_of(workload, machine), strategy).step_seconds
        for key, (workload, strategy) in works.items()
    }
