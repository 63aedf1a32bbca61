"""Cells of the hardware table: each has its source, wrong units and values are refused."""

import itertools
from dataclasses import fields

import pytest

from sim.hardware.cells import UNITS, dimension_of, quantity_of, read_table, record_of
from sim.hardware.components import Device, EngineOverheads, Fabric, Host, Link, Nvme
from sim.hardware.quantity import KINDS, Quantity
from zenflow.errors import ConfigError

TABLES = ("devices", "hosts", "links", "fabrics", "networks", "nvme", "overheads")
CELL = {"value": 25.0, "unit": "GB/s", "kind": "measured", "source": "nvbandwidth"}


def cells(node, path):
    """Yield every cell below, with where it stands."""
    if "value" in node:
        yield path, node
        return
    for key, inner in node.items():
        if isinstance(inner, dict):
            yield from cells(inner, (*path, key))


@pytest.mark.parametrize("table", [*TABLES, "machines"])
def test_every_figure_of_the_table_has_its_unit_kind_and_source(table):
    found = list(cells(read_table(table), (table,)))
    assert found
    for path, cell in found:
        assert cell["unit"] in UNITS, path
        assert cell["kind"] in KINDS, path
        assert len(cell["source"]) > 5, path


@pytest.mark.parametrize("table", TABLES)
def test_no_figure_stands_bare(table):
    counts = {"cores", "max_sockets", "sms", "mhz", "flop_per_clock", "bus_bits", "channels",
              "bits", "mts", "value", "sigma"}  # fmt: skip
    nodes = [read_table(table)]
    while nodes:
        for key, inner in nodes.pop().items():
            assert not isinstance(inner, int | float) or key in counts, (table, key)
            nodes += [inner] if isinstance(inner, dict) else []


def test_every_figure_of_a_record_has_a_dimension():
    records = (Device, Link, Fabric, Host, Nvme, EngineOverheads)
    for item in itertools.chain.from_iterable(map(fields, records)):
        if "Quantity" in str(item.type):
            assert dimension_of(item.name) in {dimension for dimension, _, _ in UNITS.values()}
    with pytest.raises(ConfigError, match="nothing says what colour measures"):
        dimension_of("colour")


@pytest.mark.parametrize(
    ("value", "unit", "field", "expected"),
    [
        (312, "TFLOP/s", "flops", 312e12),
        (25.0, "GB/s", "d2h", 25e9),
        (40, "GB", "memory", 40e9),
        (24, "GiB", "memory", 24 * 2**30),
        (40960, "MiB", "memory", 40 * 2**30),
        (10, "us", "copy", 1e-5),
        (86.9, "%", "matmul_efficiency", 0.869),
        (5.15, "Gparam/s", "device_update", 5.15e9),
    ],
)
def test_units_become_si(value, unit, field, expected):
    found = quantity_of({**CELL, "value": value, "unit": unit}, field, "x")
    assert found == Quantity(value=found.value, kind="measured", source="nvbandwidth")
    assert found.value == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "Gb/s"}, r"mine, d2h: unit 'Gb/s' is unknown; did you mean 'GB/s'"),
        ({"unit": "GB"}, r"measures bytes, but this quantity is bytes/s: write it in GB/s, TB/s"),
        ({"source": ""}, r"mine, d2h: the cell lacks source"),
        ({"kind": None, "value": None}, r"the cell lacks value and kind"),
        ({"kind": "guess"}, r"mine, d2h: a quantity's kind must be one of spec, measured"),
        ({"value": 0}, r"mine, d2h: a quantity must be positive, got 0"),
        ({"value": -25}, r"a quantity must be positive"),
        ({"value": "25"}, r"value must be a number, got '25'"),
        ({"value": True}, r"value must be a number, got True"),
        ({"note": "fast"}, r"mine, d2h: key 'note' is unknown"),
    ],
)
def test_a_wrong_cell_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        quantity_of({**CELL, **change}, "d2h", "mine")


def test_a_bare_number_is_refused():
    with pytest.raises(ConfigError, match="a cell is a table of value, unit, kind, source"):
        quantity_of(25e9, "d2h", "mine")


def test_an_entry_with_a_cell_too_few_or_too_many_is_refused():
    entry = dict(read_table("links")["pcie4-x16"])
    with pytest.raises(ConfigError, match="pcie lacks duplex"):
        record_of(Link, {k: entry[k] for k in ("d2h", "h2d")}, "pcie", name="pcie")
    with pytest.raises(ConfigError, match="key 'dupplex' is unknown; did you mean 'duplex'"):
        record_of(Link, {**entry, "dupplex": CELL}, "pcie", name="pcie")
