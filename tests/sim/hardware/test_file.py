"""Profile files: what is written comes back bit for bit, and what is wrong is refused by name."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.hardware.catalog import find_machine, names
from sim.hardware.components import (
    COMPACT_CODING,
    CORE_UPDATE,
    DEEPSPEED_SHARE,
    PAGE_BANDWIDTH,
)
from sim.hardware.file import KERNEL_IS_DRAM, SCHEMA_VERSION, read_profile, write_profile
from sim.hardware.quantity import KINDS, Quantity
from zenflow.errors import ConfigError

TABLE = find_machine("rtx4090-server", num_hosts=2, network="2x-roce-100")
BASE = replace(
    TABLE.with_values({"host.page_bandwidth": 1e9}),
    overheads=replace(TABLE.overheads, column_update=TABLE.overheads.device_update),
)
"""A machine with what calibration alone finds, too."""
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
SHARES = ("duplex", "pageable", "numa_hop", "efficiency", "sustained_share", "adam_share",
          "collective_share")  # fmt: skip
FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | FINITE,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "profile.json"


def edited(path, change):
    """Write a profile, change its JSON, and return the file."""
    write_profile(BASE, path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def values_of(name):
    if name.endswith(SHARES):
        return st.floats(min_value=0, exclude_min=True, max_value=1)
    return st.floats(min_value=1, max_value=2) if name == "host.core_sharing" else POSITIVE


@pytest.mark.parametrize("name", names("machine"))
def test_every_machine_of_the_table_comes_back(name, path):
    profile = find_machine(name)
    write_profile(profile, path)
    assert read_profile(path) == profile


@settings(max_examples=25, deadline=None)
@given(
    values=st.fixed_dictionaries({name: values_of(name) for name in BASE.quantities()}),
    figure=st.builds(
        Quantity,
        value=POSITIVE | st.integers(min_value=1),
        kind=st.sampled_from(KINDS),
        source=st.text(),
        sigma=st.none() | POSITIVE,
    ),
    metadata=st.dictionaries(st.text(), JSON),
    threads=st.none() | st.integers(min_value=1),
    binds=st.booleans(),
)
def test_any_profile_comes_back_bit_for_bit(
    tmp_path_factory, values, figure, metadata, threads, binds
):
    profile = replace(
        BASE.with_values(values), metadata=metadata, host_threads=threads, binds_cores=binds
    )
    profile = replace(profile, nvme=None, link=replace(profile.link, d2h=figure))
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    write_profile(profile, path)
    assert read_profile(path) == profile


def test_an_earlier_file_survives_a_failed_write(path, monkeypatch):
    write_profile(BASE, path)

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_profile(find_machine("gh200"), path)
    assert read_profile(path) == BASE
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("metadata", [{"a": (1, 2)}, {1: "a"}, {"a": float("nan")}, {"a": {1, 2}}])
def test_metadata_that_json_would_change_is_not_written(metadata, path):
    with pytest.raises(ConfigError, match="metadata must"):
        write_profile(replace(BASE, metadata=metadata), path)
    assert not path.exists()


LATER = {
    2: {"host": {"core_update": CORE_UPDATE}},
    3: {"device": {"sustained_share": None, "attention_backward_efficiency": None}},
    4: {"device": {"compiled_launch": None}, "host": {"deepspeed_share": DEEPSPEED_SHARE}},
    5: {"host": {"adam_share": KERNEL_IS_DRAM}},
    6: {
        "device": {"float32_efficiency": None, "cache": None},
        "overheads": {"column_update": None},
    },
    7: {
        "device": {
            "native_attention_efficiency": None,
            "native_attention_backward_efficiency": None,
            "attention_tokens": None,
        }
    },
    8: {"device": {"collective_share": None}, "host": {"page_bandwidth": PAGE_BANDWIDTH}},
    9: {"host": {"compact_coding": COMPACT_CODING}},
}
LATER_FIELDS = {4: {"num_hosts": 1, "network": None}}
"""Figures that a version is the first to have, and what stands for them in files before it."""


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_file_of_a_former_version_is_read_with_what_stands_for_later_figures(version, path):
    later = [parts for number, parts in LATER.items() if number > version]
    added = [fields for number, fields in LATER_FIELDS.items() if number > version]

    def change(content):
        content["schema_version"] = version
        for parts in later:
            for part, figures in parts.items():
                for name in figures:
                    del content[part][name]
        for fields in added:
            for name in fields:
                del content[name]

    edited(path, change)
    expected = BASE
    for fields in added:
        expected = replace(expected, **fields)
    for parts in later:
        for part, figures in parts.items():
            changed = replace(getattr(expected, part), **figures)
            expected = replace(expected, **{part: changed})
    assert read_profile(path) == expected != BASE
    edited(path, lambda content: content["host"].pop("core_update"))
    with pytest.raises(ConfigError, match=r"host\.core_update is missing"):
        read_profile(path)


@pytest.mark.parametrize("version", [0, 10, "1", "3", 1.5, True, None])
def test_another_schema_is_refused(version, path):
    edited(path, lambda content: content.update(schema_version=version))
    with pytest.raises(ConfigError, match=f"schema_version must be {SCHEMA_VERSION}, got "):
        read_profile(path)


@pytest.mark.parametrize("value", [0, -1.5, True, "12", None, float("inf"), float("nan")])
def test_a_value_that_is_no_positive_number_is_refused(value, path):
    edited(path, lambda content: content["link"]["d2h"].update(value=value))
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    message = str(caught.value)
    assert str(path) in message
    assert f"link.d2h.value, which is {value!r}, must be a positive finite number" in message
    assert "zenflow calibrate" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["host"].pop("dram"), r"host\.dram is missing: measure again"),
        (
            lambda c: c["host"]["dram"].pop("sigma"),
            r"host\.dram\.sigma is missing: add it, as nul",
        ),
        (lambda c: c.pop("fabric"), r"fabric is missing: add it, as null"),
        (lambda c: c["link"].update(speed=1), r"link\.'speed' is unknown"),
        (lambda c: c.update(fabrik=None), r"'fabrik' is unknown; did you mean 'fabric'"),
        (lambda c: c["link"]["d2h"].update(kind="guess"), r"d2h\.kind, .*'guess'.* one of spec"),
        (lambda c: c["link"]["d2h"].update(sigma=-1), r"d2h\.sigma, which is -1, must be a pos"),
        (lambda c: c["link"].update(d2h=25e9), r"link\.d2h, which is .* must be an object: value"),
        (lambda c: c.update(device=None), r"device, which is None, must be an object: name, "),
        (lambda c: c["device"].update(flops=[1]), r"device\.flops, .* must be an object"),
        (
            lambda c: c["device"]["flops"]["float16"].update(value=0),
            r"device\.flops\.float16\.value, which is 0, must be",
        ),
        (lambda c: c.update(num_devices="8"), r"num_devices, which is '8', must be of type int"),
        (lambda c: c.update(num_devices=True), r"num_devices, which is True, must be of type int"),
        (lambda c: c.update(binds_cores=1), r"binds_cores, which is 1, must be of type bool"),
        (lambda c: c["host"].update(name=7), r"host\.name, which is 7, must be of type str"),
        (lambda c: c.update(fabric=None), r"several devices need a fabric"),
        (lambda c: c["link"]["duplex"].update(value=1.5), r"link\.duplex must be a share"),
    ],
)
def test_what_breaks_a_rule_is_named_with_its_file(change, message, path):
    edited(path, change)
    with pytest.raises(ConfigError, match=message) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


def test_all_broken_rules_are_listed_at_once(path):
    def change(content):
        content["link"]["d2h"]["value"] = 0
        del content["host"]["cores"]

    edited(path, change)
    with pytest.raises(ConfigError, match="breaks 2 rules"):
        read_profile(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold an object"),
        (b"\xff\xfe", "is not JSON"),
        ("[" * 50_000, "is not JSON"),
    ],
)
def test_a_file_that_holds_no_object_is_refused(text, message, path):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        read_profile(path)


def test_a_file_that_is_not_there_is_refused(path):
    with pytest.raises(ConfigError, match="can't be read"):
        read_profile(path)
