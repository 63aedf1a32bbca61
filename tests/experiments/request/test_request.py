"""A field of a request is a flag, a key of a sweep's record and an axis, all at once."""

import json
from dataclasses import fields

import click
import pytest

from experiments.commands.prediction.request_flags import request_flags
from experiments.request.hardware import hardware_of
from experiments.request.request import Request
from experiments.sweeps.axes.kinds import KINDS
from experiments.sweeps.axes.parsing import parse_axis
from experiments.sweeps.grid import Sweep
from experiments.training.settings.field import settings_of
from zenflow.errors import ConfigError

WORDS = {
    "model": ("mini", "mini"),
    "gpu": ("rtx4090", "rtx4090"),
    "machine": ("gh200", "gh200"),
    "profile": ("mine.json", "mine.json"),
    "host": ("epyc-9654", "epyc-9654"),
    "link": ("pcie5-x16", "pcie5-x16"),
    "fabric": ("nvlink4", "nvlink4"),
    "network": ("8x-infiniband-ndr", "8x-infiniband-ndr"),
    "nvme": ("4x-gen4", "4x-gen4"),
    "host_ram": ("64", 64.0 * 2**30),
    "checkpointing": ("20/32", 0.625),
    "from_trace": ("mine.json", "mine.json"),
    "traced_batch": ("4x1024", [4, 1024]),
}
"""A word for each field whose type doesn't say one, and the value in a record."""


def words_of(item):
    """Return a word that changes a field, and the value that it stands for."""
    if item.name in WORDS:
        return WORDS[item.name]
    if known := item.choices or item.known:
        word = next(one for one in known if one != item.default)
        return word, word
    if item.kind is bool:
        return ("no", False) if item.default is not False else ("yes", True)
    assert item.kind is int
    return "7", 7


def request_of(*arguments):
    """Return the request of a command line."""

    @click.command()
    @request_flags()
    def command(**flags):
        return Request.of(flags)

    return command.main(arguments, standalone_mode=False)


def record_of(request):
    record = Sweep(axes=(), request=request).to_dict()
    return {**record, **record["settings"], **record["knobs"]}


FIELDS = pytest.mark.parametrize("item", settings_of(Request).values(), ids=lambda one: one.name)


@FIELDS
def test_a_flag_sets_the_field_and_nothing_else(item):
    word, value = words_of(item)
    flag = item.name.replace("_", "-")
    words = (
        [f"--{flag}" if value else f"--no-{flag}"] if item.kind is bool else [f"--{flag}", word]
    )
    before, after = Request(), request_of(*words)
    changed = {own.name for own in fields(Request)
               if getattr(before, own.name) != getattr(after, own.name)}  # fmt: skip
    assert changed == {item.name}
    assert json.dumps(getattr(after, item.name), default=str) == json.dumps(value)


@FIELDS
def test_a_record_has_the_field_by_its_name(item):
    _, value = words_of(item)
    given = Request(**{item.name: tuple(value) if isinstance(value, list) else value})
    assert record_of(given)[item.name] == value
    assert record_of(given) != record_of(Request())


@FIELDS
def test_an_axis_takes_the_flags_word_for_the_flags_value(item):
    word, value = words_of(item)
    if not item.is_axis:
        with pytest.raises(ConfigError, match=f"no axis '{item.name}'"):
            parse_axis(f"{item.name}={word}")
        return
    axis = parse_axis(f"{item.name}={word}")
    (found,) = axis.values
    assert axis.kind.target == item.name
    assert (found * axis.kind.scale if item.unit != 1 else found) == value


@pytest.mark.parametrize("name", [*settings_of(Request), *KINDS])
def test_every_flag_and_axis_says_what_it_is(name):
    known = settings_of(Request).get(name) or KINDS[name]
    assert known.help


def test_another_host_launches_the_devices_of_a_machine_or_a_card():
    def launch(**named):
        return hardware_of(Request(**named))[0].device.launch.value

    fast, slow = launch(machine="hgx-h100"), launch(machine="dgx-a100-80")
    assert fast == pytest.approx(0.64 * slow)
    assert launch(machine="hgx-h100", host="epyc-7742") == slow
    assert launch(machine="dgx-a100-80", host="xeon-8480c") == fast
    assert launch(gpu="rtx4090", host="xeon-8480c") == fast
    assert launch(gpu="h100", host="epyc-7742", link="pcie5-x16") == slow
