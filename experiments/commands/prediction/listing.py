"""Lists of ``zenflow plan --list``: the names that predictions know, with what they stand for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from experiments.commands.answer import Answer
from sim.hardware import catalog
from sim.memory_parts import gib

Row = dict[str, Any]
_GPU_GROUPS = (
    ("AMD", ("AMD",)),
    ("NVIDIA, desktop", ("GeForce", "Titan")),
    ("NVIDIA, workstation", (" RTX ",)),
    ("NVIDIA, data centre", ("",)),
)
"""Groups of devices, each with words of which its titles have one; the first that fits counts."""


def _gpus() -> Iterator[Row]:
    for name in catalog.names("device"):
        device, title = catalog.find_device(name), catalog.title_of("device", name)
        dtype = "bfloat16" if "bfloat16" in device.flops else "float16"
        group = next(g for g, words in _GPU_GROUPS if any(word in title for word in words))
        yield {
            "group": group,
            "name": name,
            "title": title,
            "memory_bytes": device.memory.value,
            "bytes_per_second": device.bandwidth.value,
            "flops": device.flops[dtype].value,
            "dtype": dtype,
        }


def _machines() -> Iterator[Row]:
    for name in catalog.names("machine"):
        found = catalog.find_machine(name)
        yield {
            "group": found.device.name,
            "name": name,
            "title": catalog.title_of("machine", name),
            "num_devices": found.num_devices,
            "host": found.host.name,
            "host_bytes": found.host.dram_bytes.value,
            "link": found.link.name,
        }


def _hosts() -> Iterator[Row]:
    for name in catalog.names("host"):
        host = catalog.find_host(name)
        yield {
            "group": "one socket" if host.sockets == 1 else f"{host.sockets} sockets",
            "name": name,
            "title": catalog.title_of("host", name),
            "cores": host.cores,
            "memory_bytes": host.dram_bytes.value,
            "bytes_per_second": host.dram.value,
        }


def _links() -> Iterator[Row]:
    for name in catalog.names("link"):
        link = catalog.find_link(name)
        yield {
            "name": name,
            "title": catalog.title_of("link", name),
            "d2h": link.d2h.value,
            "h2d": link.h2d.value,
        }


def _drives() -> Iterator[Row]:
    for name in catalog.names("nvme"):
        drive = catalog.find_nvme(name)
        yield {
            "name": name,
            "title": catalog.title_of("nvme", name),
            "memory_bytes": drive.capacity.value,
            "read": drive.read.value,
            "write": drive.write.value,
        }


def _models() -> Iterator[Row]:
    from sim.models.table import find_model, hub_name, model_names
    from sim.models.workload import Workload

    for name in model_names():
        _, config = find_model(name)
        yield {
            "group": config["model_type"],
            "name": name,
            "title": hub_name(name),
            "num_params": Workload.of_config(name, config).num_params,
        }


def _families() -> Iterator[Row]:
    from sim.models.families import FAMILIES

    yield from ({"name": name} for name in sorted(FAMILIES))


LISTS: Mapping[str, Callable[[], Iterable[Row]]] = {
    "gpus": _gpus,
    "machines": _machines,
    "hosts": _hosts,
    "links": _links,
    "drives": _drives,
    "models": _models,
    "families": _families,
}
"""Rows of each list, by the word that asks for it."""
_FLAGS = {
    "gpus": "--gpu NAME", "machines": "--machine NAME", "hosts": "--host NAME",
    "links": "--link NAME", "drives": "--nvme NAME", "models": "--model NAME",
    "families": "a config.json whose model_type is one of these",
}  # fmt: skip
_SHOWN: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "name": ("name", str),
    "memory_bytes": ("memory", gib),
    "num_devices": ("devices", str),
    "host": ("host", str),
    "host_bytes": ("host memory", gib),
    "link": ("link", str),
    "cores": ("cores", str),
    "bytes_per_second": ("bandwidth", lambda value: f"{value / 1e9:,.0f} GB/s"),
    "d2h": ("to the host", lambda value: f"{value / 1e9:.3g} GB/s"),
    "h2d": ("to the device", lambda value: f"{value / 1e9:.3g} GB/s"),
    "read": ("reads", lambda value: f"{value / 1e9:.3g} GB/s"),
    "write": ("writes", lambda value: f"{value / 1e9:.3g} GB/s"),
    "flops": ("dense peak, 16 bits", lambda value: f"{value / 1e12:,.0f} TFLOP/s"),
    "num_params": ("parameters", lambda value: f"{value / 1e9:.3g} billion"),
    "title": ("is", str),
}
"""Head of each column of a list, and what it shows."""


def listed(kind: str) -> Answer:
    """Return a list as an answer.

    Args:
        kind: One of `LISTS`.
    """
    rows = list(LISTS[kind]())
    groups = [row.get("group", "") for row in rows]
    order = list(dict.fromkeys(groups))
    rows.sort(key=lambda row: order.index(row.get("group", "")))
    return Answer(record={kind: rows}, show=lambda: _show(kind, rows))


def _show(kind: str, rows: list[Row]) -> None:
    from rich.table import Table

    from experiments.output.bar import wide_console

    columns = [name for name in _SHOWN if name in rows[0]]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        is_text = isinstance(rows[0][name], str)
        table.add_column(_SHOWN[name][0], justify="left" if is_text else "right",
                         no_wrap=name == "name")  # fmt: skip
    for group, own in itertools.groupby(rows, key=lambda row: row.get("group")):
        if group is not None:
            table.add_row(f"[italic]{group}[/]")
        for row in own:
            table.add_row(*(_SHOWN[name][1](row[name]) for name in columns))
    console = wide_console()
    console.print(table)
    console.print(f"Use one as {_FLAGS[kind]}.", markup=False)
