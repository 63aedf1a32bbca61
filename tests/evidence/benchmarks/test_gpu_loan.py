"""A loan's calls: what is cut, killed or missing costs no record, and every part runs."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from evidence.benchmarks.gpu import device_pass, finetune
from evidence.benchmarks.gpu import environment as gpu_environment
from evidence.benchmarks.gpu import figures as gpu_figures
from evidence.benchmarks.gpu import keep as gpu_keep
from evidence.benchmarks.gpu import setup as gpu_setup
from evidence.benchmarks.gpu import step as gpu_step
from evidence.benchmarks.gpu.loan import __main__ as loan
from evidence.benchmarks.gpu.loan import bring, calls, records
from evidence.benchmarks.gpu.loan import run as loan_run
from evidence.benchmarks.gpu.loan.calls import CALLS, PREDICTED, Part
from evidence.benchmarks.gpu.peers import engines as peers
from evidence.pages.gpu import read_suite
from experiments.output.files import write_json
from tests.starts import environment
from zenflow.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
HANGS = """
import subprocess, sys, time
far = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                       start_new_session=True)
near = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(far.pid, near.pid, flush=True)
time.sleep(600)
"""
"""A part with two children, one of which has left its process group."""


def part(name, code, **settings):
    return Part(
        name=name,
        limit=settings.pop("limit", 60),
        command=lambda place: [sys.executable, "-c", code],
        needs=settings.pop("needs", ()),
        **settings,
    )


@pytest.fixture
def take(monkeypatch, tmp_path):
    """Return what runs parts as a call; handlers of signals stay as they are."""
    monkeypatch.setattr(loan.signal, "signal", lambda *_: None)
    monkeypatch.setattr(bring, "build_kernel", lambda: "torch operations")
    monkeypatch.setattr(loan, "facts", lambda: dict(SOME_CALL))

    def run(*parts, out=tmp_path / "out", arguments=()):
        monkeypatch.setitem(CALLS, 1, parts)
        code = loan.main(["1", "--smoke", "--out", str(out), *arguments])
        return code, whole_of(out)

    return run


def whole_of(out):
    """Return the call's record from the archive, every file of which is read."""
    found = {}
    with tarfile.open(out / records.ARCHIVE) as archive:
        for member in archive:
            found[Path(member.name).name] = archive.extractfile(member).read()
    return json.loads(found["suite.json"]) | {"files": found}


def are_gone(pids, seconds=10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(psutil.pid_exists(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_a_part_that_hangs_is_killed_with_its_children_and_the_others_run(take, tmp_path):
    code, whole = take(
        part("good", "print('all well')"),
        part("hanging", HANGS, limit=2),
        part("bad", "raise SystemExit(3)"),
        part("last", "pass"),
    )
    assert code == 1
    assert [(each["ended"], each["code"]) for each in whole["parts"]] == [
        ("done", 0), ("stopped after 2 s", 124), ("failed with code 3", 3), ("done", 0),
    ]  # fmt: skip
    log = tmp_path / "hanging.txt"
    with tarfile.open(tmp_path / "out" / records.ARCHIVE) as archive:
        log.write_bytes(archive.extractfile("call1/hanging/log.txt").read())
    pids = [int(word) for word in log.read_text().split()]
    assert len(pids) == 2
    assert are_gone(pids)
    for name in ("commit", "hardware", "versions"):
        assert name in whole
    shown = (tmp_path / "out" / records.TABLE).read_text()
    assert "stopped after 2 s" in shown


def test_parts_that_time_does_not_suffice_for_are_named(take):
    code, whole = take(part("first", "pass"), arguments=("--seconds", "5"))
    assert code == 1
    assert [each["ended"] for each in whole["parts"]] == ["left out: no time"]


def test_missing_packages_are_named_in_one_line_before_anything_runs(take, capsys):
    needs = ("no_such_package", "json", "neither_this_one")
    code, whole = take(part("first", "pass"), part("needing", "pass", needs=needs))
    assert code == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("missing packages: no_such_package, neither_this_one;")
    assert [each["ended"] for each in whole["parts"]] == [
        "done",
        "left out: needs no_such_package, neither_this_one",
    ]


def test_nothing_begins_without_what_all_parts_need(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(loan, "NEEDED", ("torch", "no_such_package", "neither_this_one"))
    arguments = ["1", "--smoke", "--parts", "environment", "--out", str(tmp_path / "out")]
    assert loan.main(arguments) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "missing packages: no_such_package, neither_this_one; nothing can run"
    assert not (tmp_path / "out").exists()


def test_a_machine_without_a_gpu_is_told_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(loan, "facts", lambda: dict(SOME_CALL))
    assert loan.main(["1", "--out", str(tmp_path / "out")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert loan.main(["1", "--smoke", "--parts", "lost", "--out", str(tmp_path / "out")]) == 2
    assert "PART must be of environment, tests" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_part_is_left_out_where_memory_or_a_file_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(loan_run, "free_bytes", lambda: (3 * 2**30, "the machine"))
    whole = {**SOME_CALL, "smoke": False, "parts": []}
    call = loan_run.Call(whole, tmp_path / "call1", tmp_path, {}, end=time.monotonic() + 60)
    call.take(part("small", "pass", host_gib=2))
    call.take(part("large", "pass", host_gib=4))
    call.take(part("lacking", "pass", files=("no such model", "nor tokens")))
    assert [each["ended"] for each in whole["parts"]] == [
        "done",
        "left out: needs 4 GiB of free host memory, there are 3",
        "left out: no such model, nor tokens did not travel along",
    ]


SOME_CALL = {
    "call": 1,
    "hardware": {"gpu": None, "cores": 1},
    "versions": {},
    "commit": None,
    "kernel": "",
    "missing": [],
    "parts": [],
}
SAVES = f"""
import sys
from pathlib import Path
from evidence.benchmarks.gpu.loan.records import save
folder, out = map(Path, sys.argv[1:])
whole = {SOME_CALL}
while True:
    whole["parts"].append(dict(part="p", seconds=1.0, limit=2.0, ended="done", code=0))
    (folder / "suite.json").write_text(str(len(whole["parts"])))
    save(whole, folder, out, dict())
    print("saved", flush=True)
"""


def test_records_are_whole_at_whatever_moment_their_writer_is_killed(tmp_path):
    folder, out = tmp_path / "call1", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    (folder / "large.bin").write_bytes(os.urandom(1 << 20))
    for moment in range(6):
        command = [sys.executable, "-c", SAVES, str(folder), str(out)]
        writer = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(0.013 * moment)
        writer.kill()
        writer.communicate()
        with tarfile.open(out / records.ARCHIVE) as archive:
            read = {m.name: archive.extractfile(m).read() for m in archive}
        assert len(read["call1/large.bin"]) == 1 << 20
        assert int(read["call1/suite.json"]) > 0
        assert "measured" in (out / records.TABLE).read_text()
        records.forget_drafts(out)
        assert sorted(path.name for path in out.iterdir()) == [records.ARCHIVE, records.TABLE]


CALLED = f"""
import sys
from evidence.benchmarks.gpu.loan import __main__ as loan, bring
from evidence.benchmarks.gpu.loan.calls import CALLS, Part
bring.build_kernel = lambda: "torch operations"
CALLS[1] = (Part(name="hanging", limit=60, needs=(),
                 command=lambda place: [sys.executable, "-c", '''{HANGS}''']),)
sys.exit(loan.main(["1", "--smoke", "--out", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_call_that_is_killed_leaves_its_records_and_no_process(number, tmp_path):
    """The guard ends the part even where nobody can tell it to."""
    out = tmp_path / "out"
    own = {**environment(), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", CALLED, str(out)], env=own)
    logs, pids = [], []
    end = time.monotonic() + 120
    while len(pids) < 2 and time.monotonic() < end:
        time.sleep(0.1)
        logs = list(tmp_path.glob("zenflow-loan-*/call1/hanging/log.txt"))
        pids = [int(word) for log in logs for word in log.read_text().split()]
    assert len(pids) == 2
    assert all(psutil.pid_exists(pid) for pid in pids)
    process.send_signal(number)
    process.wait(timeout=30)
    assert are_gone(pids)
    (ended,) = (each["ended"] for each in whole_of(out)["parts"])
    expected = "running when" if number == signal.SIGKILL else "stopped by SystemExit"
    assert ended.startswith(expected)


def test_results_of_tests_are_read_from_a_log_that_was_cut(tmp_path):
    log = (
        "tests/a.py::test_one[S 3, q 1] PASSED                    [ 20%]\n"
        "[gw3] [ 40%] FAILED tests/a.py::test_two\n"
        "[gw0] [ 60%] SKIPPED tests/a.py::test_three\n"
        "[gw1] [ 80%] PASSED tests/a.py::test_four\n"
        "tests/a.py::test_five \n"
        "[gw1] [ 99%] PAS"
    )
    assert records.outcomes(log) == {"PASSED": 2, "FAILED": 1, "SKIPPED": 1}
    summary = "\nFAILED tests/a.py::test_two - assert PASSED\n"
    assert records.outcomes(log + summary) == records.outcomes(log)


def test_pieces_of_a_file_are_joined_when_all_have_come(tmp_path):
    kept, carried = tmp_path / "kept", tmp_path / "carried"
    carried.mkdir()
    (carried / "model.gguf.1of2").write_bytes(b"first ")
    bring.take_along(carried, kept)
    assert not (kept / "model.gguf").exists()
    (carried / "model.gguf.1of2").unlink()
    (carried / "model.gguf.2of2").write_bytes(b"second")
    bring.take_along(carried, kept)
    assert (kept / "model.gguf").read_bytes() == b"first second"


def test_a_wheel_that_was_carried_is_installed_offline(tmp_path, monkeypatch):
    wheel = tmp_path / "wheels" / "carried_thing-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    facts = "carried_thing-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("carried_thing.py", "VALUE = 7\n")
        archive.writestr(
            f"{facts}/METADATA", "Metadata-Version: 2.1\nName: carried-thing\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{facts}/RECORD", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    assert bring.missing_of(["carried_thing", "json"]) == ["carried_thing"]
    assert bring.install(wheel.parent, tmp_path / "kept") == ""
    assert bring.missing_of(["carried_thing"]) == []
    done = subprocess.run([sys.executable, "-c", "import carried_thing"], check=False)
    assert done.returncode == 0, "processes that it starts find it, too"
    wheel.write_bytes(b"no wheel")
    assert "not installed" in bring.install(wheel.parent, tmp_path / "kept")


def test_the_plan_says_what_to_carry_and_what_to_type(capsys):
    assert loan.main(["plan"]) == 0
    said = capsys.readouterr().out
    for number in CALLS:
        assert f"python3 -m evidence.benchmarks.gpu.loan {number} --out $OUT" in said
    assert "pip download --no-deps -d runs/loan/wheels simpy gguf" in said
    packages = {each.package for each in peers.ENGINES.values()} - {"torch", "zenflow"}
    for package in packages:
        assert re.search(rf"pip (download|wheel) --no-deps -[dw] runs/loan/[45] .*{package}", said)


@pytest.mark.parametrize("known", [None, "ba9876543210-dirty"])
def test_the_commit_of_a_copy_is_the_one_that_is_told(monkeypatch, known):
    """A copy may have come to an older repository."""
    from zenflow import commit

    monkeypatch.setattr(commit, "describe", lambda root: known)
    assert commit.commit() == known
    monkeypatch.setenv(commit.TOLD, "0123456789ab")
    assert commit.commit() == "0123456789ab"


def test_parts_run_without_packages_that_they_do_not_ask_for():
    """One import for all of them: each takes a while."""
    place = calls.Place(out=Path("out"), kept=Path("kept"), seconds=60, is_smoke=True)
    modules = [
        each.command(place)[2]
        for parts in CALLS.values()
        for each in parts
        if "simpy" not in each.needs and "pytest" not in each.needs
    ]
    assert len(modules) > 4
    blocked = "import sys; sys.modules.update(dict.fromkeys(('simpy', 'transformers', 'rich')));"
    imports = f"{blocked} import {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", imports], env=environment(), check=False)
    assert done.returncode == 0


def test_every_call_fits_its_time_and_its_predictions_have_parts():
    assert set(CALLS) == set(PREDICTED) == {1, 2, 3, 4, 5, 6}
    for number, parts in CALLS.items():
        assert sum(each.limit for each in parts) < loan._SECONDS + 60
        names = {each.name for each in parts}
        assert {name.partition(": ")[0] for name in PREDICTED[number]} <= names


def run_smoke(number, out, *arguments):
    command = [
        sys.executable,
        "-m",
        "evidence.benchmarks.gpu.loan",
        str(number),
        "--smoke",
        "--out",
        str(out),
    ]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # parts may need torch's compiler
        capture_output=True,
        text=True,
        check=False,
    )
    whole = whole_of(out)
    logs = {name: text[-2000:] for name, text in whole["files"].items() if name == records.LOG}
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    assert len(list(out.rglob("*"))) <= 8
    assert done.stdout.endswith((out / records.TABLE).read_text())
    for name, text in whole["files"].items():
        if name == "record.json":
            assert {"hardware", "versions", "commit"} <= set(json.loads(text))
    return whole


def test_facts_of_a_machine_are_kept_and_shown(tmp_path):
    assert gpu_environment.main(["--smoke", "--out", str(tmp_path)]) == 0
    facts = json.loads((tmp_path / "environment.json").read_text())
    assert {"hardware", "versions", "commit"} <= facts.keys()
    assert facts["host"]["kernel"] in (tmp_path / "table.txt").read_text()


def test_the_first_call_runs_on_a_cpu(tmp_path):
    """Without `races`, which is `tests` with another mark, and parts that are tested alone."""
    alone = ("environment", "races", "device_pass", "presets-1b")
    names = [each.name for each in CALLS[1] if each.name not in alone]
    whole = run_smoke(1, tmp_path, "--parts", *names)
    assert [each["part"] for each in whole["parts"]] == names
    shown = (tmp_path / records.TABLE).read_text().splitlines()
    (line,) = (line for line in shown if line.startswith("given: wrong bytes"))
    assert line.split()[-2:] == ["0", "0"]


@pytest.mark.slow
@pytest.mark.parametrize("number", sorted(CALLS))
def test_every_call_runs_whole_on_a_cpu(number, tmp_path):
    whole = run_smoke(number, tmp_path)
    assert [each["part"] for each in whole["parts"]] == [each.name for each in CALLS[number]]


def test_predictions_are_of_figures_that_parts_leave():
    shapes = [{"shape": [8192, 2048], "bytes_per_second": 1.0, "seconds_per_parameter": 1.0}]
    rows = [{**row, "part": name, "implementation": "torch"}
            for row in shapes for name in ("pack", "land", "fresh step")]  # fmt: skip
    run = {
        "step_seconds": {"median": 1.0},
        "stall_fraction": 0.0,
        "device_seconds": {},
        "losses": [],
    }
    run["peak_device_bytes"] = 2**30
    series = {
        "presets-1b": "1b-short",
        "presets-8b-capped": "8b-capped",
        "presets-8b": "8b",
        "presets-8b-visits": "8b-visits",
    }
    report = {"held_out": {"8": 1.0}, "weights": "abc"}
    names = ("on_device 0", "S 4 0", "S 16 0", "resumed 0")
    made = {
        "device_pass": device_pass.shown_figures(rows, (8192, 2048)),
        "finetune": finetune.figures_of({name: report for name in names}),
        "given": {"wrong bytes": 0},
    } | {
        name: gpu_figures.shown_figures(
            [
                {
                    "cell": {"name": str(cell)},
                    "torch_fused": run,
                    "runs": [{**run, "name": each} for each in gpu_step.NAMES],
                }
                for cell in gpu_setup.SERIES[own]
            ]
        )
        for name, own in series.items()
    }
    left = {f"{name}: {figure}" for name, figures in made.items() for figure in figures}
    assert {name for predicted in PREDICTED.values() for name in predicted} <= left


def call_of(number, name, **changes):
    return {
        **SOME_CALL,
        "call": number,
        "commit": "0123456789ab",
        "hardware": {"gpu": "NVIDIA H100", "cores": 16},
        "versions": {"torch": "2.11.0"},
        "parts": [{"part": name, "ended": "done", "code": 0, "seconds": 1.0, "limit": 2.0}],
        **changes,
    }


def archive_of(whole, tmp_path, log=""):
    folder, out = tmp_path / f"call{whole['call']}", tmp_path / f"out{whole['call']}"
    own = folder / whole["parts"][0]["part"]
    own.mkdir(parents=True)
    out.mkdir()
    (own / records.LOG).write_text(log)
    write_json(folder / records.SUITE, whole)
    records.save(whole, folder, out, {})
    return out / records.ARCHIVE


def test_archives_of_several_calls_become_one_record(tmp_path, monkeypatch):
    log = "[gw0] [ 50%] PASSED tests/a.py::test_one\n[gw0] [ 99%] FAILED tests/a.py::test_two\n"
    first = archive_of(call_of(1, "tests"), tmp_path, log)
    second = archive_of(call_of(2, "finetune"), tmp_path)
    results = tmp_path / "results"
    keep = gpu_keep.keep
    monkeypatch.setattr(gpu_keep, "keep", lambda runs: keep(runs, results))
    assert gpu_keep.main([str(first), str(second)]) == 0
    (folder,) = results.iterdir()
    suite = json.loads((folder / records.SUITE).read_text())
    assert [each["part"] for each in suite["parts"]] == ["tests", "finetune"]
    assert (folder / "tests" / records.LOG).read_text() == log
    found = read_suite(folder)
    assert found["parts"] == ["tests 1 failed, 1 passed (done)", "finetune done"]
    assert found["commit"] == "0123456789ab"


def test_logs_do_not_say_where_the_tree_lay(tmp_path):
    root = records.REPOSITORY
    archive_of(call_of(1, "tests"), tmp_path, f"rootdir: {root}\n{root}/tests/a.py:3: a warning\n")
    records.unpack([tmp_path / "out1" / records.ARCHIVE], tmp_path / "whole")
    log = tmp_path / "whole" / "tests" / records.LOG
    assert log.read_text() == "rootdir: .\n./tests/a.py:3: a warning\n"


@pytest.mark.parametrize("is_archive", [False, True])
def test_archives_of_several_commits_are_not_mixed(tmp_path, is_archive):
    first = archive_of(call_of(1, "tests"), tmp_path)
    second = tmp_path / "no archive"
    second.write_text("text")
    if is_archive:
        second = archive_of(call_of(2, "finetune", commit="ba9876543210"), tmp_path)
    message = "of one commit" if is_archive else "a call of a loan has left"
    with pytest.raises(ConfigError, match=message):
        records.unpack([first, second], tmp_path / "joined")
