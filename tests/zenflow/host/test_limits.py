"""Cores and control groups of this process, by files of both versions of control groups."""

import os

import pytest

from zenflow.host import limits as process_limits
from zenflow.host.limits import control_groups, usable_cores
from zenflow.surface.arguments import default_host_threads


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Return a function that says which groups this process is in; there are eight cores."""
    own = tmp_path / "own"
    monkeypatch.setattr(process_limits, "_OWN_CGROUPS", own)
    monkeypatch.setattr(process_limits, "_CGROUPS", tmp_path / "root")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    return own.write_text


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_process_is_in_its_group_and_in_those_above_it(groups, tmp_path):
    assert list(control_groups("memory")) == []
    root = tmp_path / "root"
    groups("0::/outer/inner\n")
    assert list(control_groups("memory")) == [root / "outer" / "inner", root / "outer", root]
    groups("3:cpu,cpuacct:/a\n2:memory:/b\n1:name=systemd:/c\n")
    assert list(control_groups("cpu")) == [root / "cpu" / "a", root / "cpu"]
    assert list(control_groups("memory")) == [root / "memory" / "b", root / "memory"]


def test_cores_are_those_of_the_tightest_quota(groups, tmp_path):
    assert usable_cores() == 8
    groups("0::/outer/inner\n")
    write(tmp_path / "root" / "outer" / "inner" / "cpu.max", "max 100000\n")
    assert usable_cores() == 8
    write(tmp_path / "root" / "outer" / "cpu.max", "350000 100000\n")
    assert usable_cores() == 3
    write(tmp_path / "root" / "cpu.max", "50000 100000\n")
    assert usable_cores() == 1


def test_quotas_of_the_first_version_count_too(groups, tmp_path):
    groups("3:cpu,cpuacct:/a\n")
    folder = tmp_path / "root" / "cpu" / "a"
    write(folder / "cpu.cfs_period_us", "100000\n")
    write(folder / "cpu.cfs_quota_us", "-1\n")
    assert usable_cores() == 8
    write(folder / "cpu.cfs_quota_us", "200000\n")
    assert usable_cores() == 2


@pytest.mark.parametrize(
    ("cores", "threads"), [(1, 1), (2, 1), (4, 3), (8, 6), (16, 12), (64, 60)]
)
def test_a_quarter_of_the_cores_at_most_four_is_left_to_other_threads(cores, threads, monkeypatch):
    monkeypatch.setattr("zenflow.surface.arguments.usable_cores", lambda: cores)
    assert default_host_threads() == threads
