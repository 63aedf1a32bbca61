import json
import shutil

import pytest

from autotune.decisions.file import read_decisions
from experiments.training.run.tuned.replay import HARMLESS
from tests.experiments.runs import (
    FAST,
    MEASURED,
    ended,
    equal,
    saved_tensors,
    steps,
    trained,
    write_text,
)


@pytest.fixture
def flags(blank_pictures, tmp_path):
    text = write_text(tmp_path / "text.txt")
    return [*FAST, "--data", text, "--warmup", "0", "--auto"]


def replayed(tmp_path, decisions, *flags):
    return trained(tmp_path / "replay", "--replay", decisions, *flags)


def test_a_replay_ends_with_the_same_bits(tmp_path, flags, clock):
    # In a model of this width, how blocks are cut depends on the largest S to come.
    flags = [*flags, "--model", "own:mini"]
    out = trained(tmp_path / "run", *flags, "--steps", "20")
    found = read_decisions(out / "decisions.jsonl")
    assert len(found.decisions) >= 5  # of ten turns some may change nothing
    assert len({knobs.update_interval for _, knobs in found.changes}) > 1
    other = trained(tmp_path / "other", *flags, "--steps", "20")
    assert not equal(out, other)  # the clock decided otherwise
    again = replayed(tmp_path, out / "decisions.jsonl")
    assert equal(out, again)
    assert [row["loss"] for row in steps(again)] == [row["loss"] for row in steps(out)]
    record = json.loads((again / "config.json").read_text())
    assert record["settings"]["replay"] == str(out / "decisions.jsonl")
    assert any(name.endswith(MEASURED) for name in saved_tensors(out))
    assert len(clock.controllers) == 2  # and no controller was asked


def test_an_interrupted_run_replays_as_it_went_on(tmp_path, flags, clock):
    out = trained(tmp_path / "run", *flags, "--steps", "9", "--warmup", "0.3")
    first = read_decisions(out / "decisions.jsonl")
    flags = ["--resume", out, "--steps", "20", "--schedule", "constant"]
    ended(0, *flags)
    found = read_decisions(out / "decisions.jsonl")
    assert found.changes[: len(first.changes)] == first.changes
    assert len(found.changes) > len(first.changes)
    assert found.end.step == found.header.settings["steps"] == 20
    assert equal(out, replayed(tmp_path, out / "decisions.jsonl"))
    assert (
        clock.controllers[1].turns == 10
    )  # the second controller went on where the first had stopped


def test_lines_behind_the_checkpoint_are_written_anew(tmp_path, flags, clock):
    out = trained(tmp_path / "run", *flags, "--steps", "12", "--save-every", "5")
    whole = (out / "decisions.jsonl").read_text().splitlines(keepends=True)
    kept = trained(tmp_path / "part", *flags, "--steps", "5")
    lines = (kept / "decisions.jsonl").read_text().splitlines(keepends=True)
    # As a kill after step 5 leaves it: later decisions in the file, and one of them torn.
    lines[-1:] = [json.dumps({**json.loads(whole[-2]), "n": len(lines) - 1})[:-20]]
    (kept / "decisions.jsonl").write_text("".join(lines))
    ended(0, "--resume", kept, "--steps", "12")
    assert equal(kept, replayed(tmp_path, kept / "decisions.jsonl"))


def test_a_replay_that_was_interrupted_goes_on(tmp_path, flags, clock):
    out = trained(tmp_path / "run", *flags, "--steps", "12")
    whole = replayed(tmp_path, out / "decisions.jsonl", "--save-every", "5")
    assert equal(out, whole)
    ended(0, "--resume", whole)
    assert equal(out, whole)
    said = ended(2, "--resume", whole, "--steps", "20")
    assert "took 12 steps, and its settings now mean 20" in said


def test_what_changes_no_weight_may_be_changed(tmp_path, flags, clock):
    out = trained(tmp_path / "run", *flags, "--steps", "8")
    changes = ["--link-gbps", "1", "--eval-every", "3", "--timeline-steps", "4"]
    changes += ["--host-threads", "2", "--eval-batches", "1", "--save-every", "3"]
    changes += ["--save-minutes", "1"]
    others = {"parallel", "bind_cores", "memory_check"}  # which need ranks, or is no pair
    assert len(changes) == 2 * len(HARMLESS - others)
    assert equal(out, replayed(tmp_path, out / "decisions.jsonl", *changes))


def test_a_compact_run_is_saved_and_evaluated_when_it_was(tmp_path, flags, clock):
    """Its state is rounded then."""
    state = ["--host-state", "compact", "--save-every", "3"]
    out = trained(tmp_path / "run", *flags, *state, "--steps", "8")
    assert equal(out, replayed(tmp_path, out / "decisions.jsonl", "--timeline-steps", "4"))
    asked = ["--replay", out / "decisions.jsonl", "--save-every", "4", "--eval-every", "2"]
    said = ended(2, "--out", tmp_path / "other", *asked)
    assert "--save-every, --eval-every would make another one" in said
    assert "save_every was 3, now 2" in ended(1, "--resume", out, "--save-every", "2")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lr", "0.1", "--steps", "3"], ["--steps, --lr would make another one"]),
        (["--topk-ratio", "0.2"], ["--topk-ratio would make another one"]),
        (["--auto"], ["--controller would make another one"]),
        (["--compare"], ["leave out --compare"]),
        (["--config", "run.toml"], ["leave out --config"]),
    ],
)
def test_flags_that_would_make_another_run_are_refused(tmp_path, flags, words):
    said = ended(2, "--out", tmp_path / "run", "--replay", tmp_path / "decisions.jsonl", *flags)
    for word in words:
        assert word in said
    assert not (tmp_path / "run").exists()


def test_files_that_can_not_be_replayed_are_explained(tmp_path, flags, clock):
    def refused(decisions, *words):
        said = ended(2, "--out", tmp_path / "replay", "--replay", decisions)
        for word in words:
            assert word in said
        assert not (tmp_path / "replay" / "checkpoint").exists()
        shutil.rmtree(tmp_path / "replay", ignore_errors=True)

    def change_header(**changes):
        header = json.loads(lines[0])
        header.update({key: value for key, value in changes.items() if key != "settings"})
        header["settings"].update(changes.get("settings", {}))
        path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")

    out = trained(tmp_path / "run", *flags, "--steps", "6")
    path = out / "decisions.jsonl"
    lines = path.read_text().splitlines()
    refused(tmp_path / "absent.jsonl", "can't be read")
    path.write_text("\n".join(lines[:-1]) + "\n")
    refused(path, "without its end record", "resume the run in", "or run it again")
    path.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    refused(path, "line 2: n must be 1, but is 2")
    change_header(settings={"warp": 9})
    refused(path, "does not know (warp)", "the version that wrote it")
    change_header(settings={"steps": 7})
    refused(path, "the run took 6 steps, and its settings now mean 7")
    change_header(knobs={**json.loads(lines[0])["knobs"], "select_interval": 50})
    refused(path, "line 2: old is")


def test_resume_takes_no_replay(tmp_path):
    said = ended(2, "--resume", tmp_path, "--replay", tmp_path / "decisions.jsonl")
    assert "leave out --replay" in said
