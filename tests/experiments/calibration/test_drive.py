"""A drive's rates: of an emulated drive as they are, written into a profile that predicts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from experiments.calibration import drive
from experiments.calibration.drive import check_drive, measure_drive
from experiments.cli import main
from sim.hardware.catalog import find_machine
from sim.hardware.file import read_profile, write_profile
from zenflow.drive import disk
from zenflow.errors import ConfigError
from zenflow.lanes.copies import PacedDirection
from zenflow.rule.sizes import SECTOR

SIZES = {"file_bytes": 256 * SECTOR, "record_bytes": 4 * SECTOR}
RATE = 256 * SECTOR / 0.4


@pytest.fixture
def emulated(monkeypatch):
    """Let reads, writes, and both take known times; writes are three times as fast at first."""
    shared, ways = [], {"read": PacedDirection(2 * RATE), "write": PacedDirection(RATE)}
    written = 0

    def paced(name):
        def move(file, memory, offset):
            nonlocal written
            own = name == "write" and written < 128 * SECTOR
            written += memory.nbytes * (name == "write")
            with ways[name].carrying(memory.nbytes // (3 if own else 1)):
                for link in shared:
                    with link.carrying(memory.nbytes):
                        pass

        return move

    for name in ways:
        monkeypatch.setattr(disk, name, paced(name))
    return shared


def test_rates_are_those_of_the_drive(emulated, state_dir):
    found = measure_drive(state_dir, **SIZES)
    assert found.read == pytest.approx(2 * RATE, rel=0.15)
    assert found.write == pytest.approx(RATE, rel=0.15)
    assert found.first_write == pytest.approx(3 * RATE, rel=0.25)
    assert found.both == pytest.approx(3 * RATE, rel=0.15)
    assert list(state_dir.iterdir()) == []


def test_reads_and_writes_that_share_the_drive_are_told(emulated, state_dir):
    emulated.append(PacedDirection(1.0 * RATE))
    found = measure_drive(state_dir, **SIZES)
    assert found.both == pytest.approx(RATE, rel=0.15)


def test_a_profile_keeps_them(state_dir, tmp_path):
    rates = measure_drive(state_dir, **SIZES)
    profile = replace(find_machine("rtx4090-desktop"), nvme=rates.to_nvme(state_dir))
    write_profile(profile, tmp_path / "mine.json")
    again = read_profile(tmp_path / "mine.json").nvme
    assert again.most_both == pytest.approx(min(rates.both, rates.read + rates.write))
    assert (again.read.value, again.write.value) == (rates.read, rates.write)
    assert again.read.kind == "measured"


def test_folders_that_are_no_drive_are_refused(state_dir, monkeypatch):
    with pytest.raises(ConfigError, match="no folder"):
        check_drive(state_dir / "absent")
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1 << 30)
    with pytest.raises(ConfigError, match=r"1\.0 GiB free, and measuring it takes 4 GiB"):
        check_drive(state_dir)
    monkeypatch.setattr(drive.disk, "file_system", lambda path: "tmpfs")
    with pytest.raises(ConfigError, match="in memory"):
        check_drive(state_dir)


def test_the_command_measures_the_drive_beside_the_machine(state_dir, tmp_path, monkeypatch):
    made = SimpleNamespace(profile=replace(find_machine("rtx4090-desktop"), nvme=None))
    monkeypatch.setattr("experiments.commands.calibrate._calibrate", lambda flags: made)
    monkeypatch.setattr("experiments.calibration.findings.findings", lambda done: "found")
    rates = measure_drive(state_dir, **SIZES)
    monkeypatch.setattr(drive, "measure_drive", lambda folder: rates)
    out = tmp_path / "mine.json"
    ran = CliRunner().invoke(main, ["calibrate", "--drive", str(state_dir), "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    assert f"reads {rates.read / 1e9:.3g} GB/s" in ran.output
    assert read_profile(out).nvme.write.value == rates.write
    ran = CliRunner().invoke(main, ["calibrate", "--drive", str(tmp_path / "no"), "--out", "x"])
    assert ran.exit_code != 0
    assert "is no folder" in ran.output
