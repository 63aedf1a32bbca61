"""`zenflow train` on several ranks trains, stops, resumes and tunes as one process does."""

import json
import re
import signal

import pytest
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.checkpoint import FileSystemReader

from autotune.decisions.file import read_decisions
from experiments.training.parts.files.checkpoint import (
    CHECKPOINTS,
    latest_checkpoint,
    load_checkpoint,
)
from tests.experiments.conftest import leave_blank
from tests.experiments.runs import FAST, ended, steps, summary, trained, write_text
from tests.experiments.training.parts.rank import be_rank
from tests.forks import FORKS, exit_codes
from zenflow import Timeline
from zenflow.errors import CheckpointError

pytestmark = [
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.timeout(300),
]
ROUNDING = 2e-5
"""Largest difference of weights that comes of adding up in another order, of the largest."""


HALF = {
    "steps": 8,
    "lr": 1e-3,
    "warmup": 0.0,
    "dtype": "float16",
    "gradients": "keep",
    "grad_scaler": {"init_scale": 2.0**22, "growth_interval": 100},
}
"""Settings of a float16 run whose first steps overflow."""


class Ranks:
    """Processes that carry out the same commands together."""

    def __init__(self, folder, commands, num_ranks=2):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.store.port, "TORCHELASTIC_USE_AGENT_STORE": True,
        }  # fmt: skip
        self.processes = []
        for rank in range(num_ranks):
            own = {**shared, "RANK": rank, "LOCAL_RANK": rank}
            environment = {name: str(value) for name, value in own.items()}
            process = FORKS.Process(
                target=be_rank, args=(folder, commands, environment), daemon=True
            )
            process.start()
            self.processes.append(process)

    def ended(self):
        """Return the exit code and the output of each command that ended, by rank."""
        codes = exit_codes(self.processes, 240)
        errors = [self.folder / f"error-{rank}" for rank in range(len(codes))]
        assert codes == [1, -signal.SIGKILL], [path.read_text() for path in errors]
        ended = [self.folder / f"ended-{rank}.json" for rank in range(len(codes))]
        return [json.loads(path.read_text()) for path in ended]


NUM_STEPS = 12
TUNED = (*FAST, "--batch-size", 4, "--steps", NUM_STEPS, "--lr", 1e-3, "--warmup", 0, "--auto")
FLAGS = (*TUNED[:-1], "--select-interval", 4)
COMPARED = (*FAST, "--compare", "--batch-size", 4, "--steps", 4, "--start-steps", 3)
PARALLELS = ("fsdp", "ddp")


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    with pytest.MonkeyPatch.context() as patch:
        leave_blank(patch)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of runs, by what they are, and what ranks said of those that are theirs."""
    folder = tmp_path_factory.mktemp("runs")
    data = ["--data", write_text(folder / "text.txt")]
    flags = [*FLAGS, *data]
    trained(folder / "alone", *flags, "--timeline-steps", 4, "--eval-every", 6)
    trained(folder / "alone, twice", *flags, "--grad-accum", 2, "--timeline-steps", 2)
    trained(folder / "begun alone", *flags, "--steps", 5)
    trained(folder / "compared alone", *COMPARED, *data)
    (folder / "half.json").write_text(json.dumps(HALF))
    half = ["--config", folder / "half.json", *FAST, "--batch-size", 4, *data]
    trained(folder / "half alone", *half)
    fsdp, ddp = ["--parallel", "fsdp", *data], ["--parallel", "ddp", *data]
    commands = {
        "fsdp": {"flags": [*FLAGS, *fsdp, "--timeline-steps", 4, "--eval-every", 6]},
        "ddp": {"flags": [*FLAGS, *ddp, "--grad-accum", 2, "--timeline-steps", 2]},
        "stopped": {"flags": [*FLAGS, *fsdp], "SIGINT": [1, 4]},
        "stopped, on": {"resume": "stopped", "flags": []},
        "begun alone, on": {
            "resume": "begun alone", "flags": ["--steps", NUM_STEPS, "--parallel", "fsdp"],
        },
        "tuned": {"flags": [*TUNED, *fsdp], "clock": True},
        "tuned again": {"flags": ["--replay", folder / "tuned" / "decisions.jsonl"]},
        "tuned, stopped": {"flags": [*TUNED, *ddp], "clock": True, "SIGINT": [0, 4]},
        "tuned, on": {"resume": "tuned, stopped", "flags": [], "clock": True},
        **{f"half {way}": {"flags": [*half, "--parallel", way]} for way in PARALLELS},
        "compared": {"flags": [*COMPARED, *ddp], "SIGINT": [1, 3]},
        "compared, on": {"resume": "compared", "flags": []},
        "full": {"flags": [*FLAGS, *fsdp, "--save-every", 4], "full": [1, 4]},
        "three": {"flags": [*FLAGS, *fsdp, "--batch-size", 3]},
        "killed": {"flags": [*FLAGS, *fsdp, "--save-every", 4], "SIGKILL": [1, 5]},
    }  # fmt: skip
    for name, command in commands.items():
        on = command.get("resume")
        where = ["--out", folder / name] if on is None else ["--resume", folder / on]
        command["flags"] = [str(word) for word in [*where, *command["flags"]]]
    of_ranks = Ranks(folder / "ranks", list(commands.values())).ended()
    said = [dict(zip(commands, ended, strict=False)) for ended in of_ranks]
    return folder, {name: [of[name] for of in said if name in of] for name in commands}


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def difference(ours, theirs):
    """Return the largest difference of two runs' weights, of the largest weight."""
    mine, others = weights(ours), weights(theirs)
    assert mine.keys() == others.keys()
    most = max(tensor.abs().max() for tensor in others.values())
    return max(float((mine[name] - others[name]).abs().max() / most) for name in mine)


@pytest.mark.parametrize(("shared", "whole"), [("fsdp", "alone"), ("ddp", "alone, twice")])
def test_ranks_train_as_one_process_with_the_same_batches(runs, shared, whole):
    folder, said = runs
    assert [code for code, _ in said[shared]] == [0, 0], said[shared]
    assert difference(folder / shared, folder / whole) < ROUNDING
    ours, theirs = steps(folder / shared), steps(folder / whole)
    assert [row["tokens"] for row in ours] == [row["tokens"] for row in theirs]
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in ours] == pytest.approx([row[name] for row in theirs], 1e-4)
    evaluated = [
        [row["eval_loss"] for row in rows if "eval_loss" in row] for rows in (ours, theirs)
    ]
    assert len(evaluated[0]) == 2 * (shared == "fsdp")
    assert evaluated[0] == pytest.approx(evaluated[1], 1e-4)
    mine, other = summary(folder / shared), summary(folder / whole)
    assert mine["eval_loss"] == pytest.approx(other["eval_loss"], 1e-4)
    assert (mine["ranks"], other["ranks"]) == (2, 1)
    assert mine["num_params"] == other["num_params"]


@pytest.mark.parametrize("way", PARALLELS)
def test_float16_skips_the_same_overflows_on_ranks_as_in_one_process(way, runs):
    folder, said = runs
    assert [code for code, _ in said[f"half {way}"]] == [0, 0], said[f"half {way}"]
    ours, theirs = steps(folder / f"half {way}"), steps(folder / "half alone")
    skipped = [row["skipped"] for row in theirs]
    assert [row["skipped"] for row in ours] == skipped
    assert (skipped[0], skipped[-1]) == (True, False), "a scale that overflows, until it doesn't"
    # Sums are rounded to 11 bits, in another order.
    losses = [[row["loss"] for row in rows] for rows in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_ranks_compare_strategies_as_one_process_does(runs):
    folder, said = runs
    # The signal came with the start's last step, to one rank, when steps tell nobody any more.
    assert [code for code, _ in said["compared"]] == [130, 130], said["compared"]
    assert [code for code, _ in said["compared, on"]] == [0, 0], said["compared, on"]
    ours, theirs = (
        json.loads((folder / name / "compare.json").read_text())
        for name in ("compared", "compared alone")
    )
    assert ours["runs"].keys() == theirs["runs"].keys()
    for name in ours["runs"]:
        assert difference(folder / "compared" / name, folder / "compared alone" / name) < ROUNDING
        own, whole = ours["runs"][name], theirs["runs"][name]
        assert own["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-4)
        assert own["d2h_bytes_per_step"] == whole["d2h_bytes_per_step"]
    (_, first), (_, second) = said["compared, on"]
    assert first.count("Strategies side by side") == 1
    assert "1/4 on_device" in " ".join(first.split()), "the start is there already"
    assert "Strategies" not in second
    assert "To do" not in second


def test_a_row_has_figures_of_all_ranks(runs):
    folder, _ = runs
    for row in steps(folder / "fsdp"):
        assert row["stall_seconds"] == max(row["rank_stall_seconds"])
        assert len(row["rank_stall_seconds"]) == 2
    sent = [sum(r["d2h_bytes"] for r in steps(folder / name)) for name in ("fsdp", "alone")]
    assert sent[0] == pytest.approx(sent[1], 0.05)  # ranks share the link's work


def test_only_the_first_rank_speaks(runs):
    _, said = runs
    for name in ("fsdp", "ddp", "tuned"):
        (_, first), (_, second) = said[name]
        assert "shared by 2 ranks" in first
        assert re.search("rank 0: .*core.*\nrank 1: .*core", first)
        assert second == ""


def test_the_size_that_is_said_is_that_of_what_ranks_save(runs):
    folder, said = runs
    shards = latest_checkpoint(folder / "fsdp" / CHECKPOINTS) / "shards"
    found = FileSystemReader(shards).read_metadata().state_dict_metadata.values()
    # Of tensors alone: the files of a model as small as this one are full of indices.
    sizes = [entry.size.numel() * entry.properties.dtype.itemsize for entry in found
             if hasattr(entry, "size")]  # fmt: skip
    ((_, first), _) = said["fsdp"]
    told = re.search(r"checkpoint (\S+) MB each, two while saving", " ".join(first.split()))
    assert float(told[1]) * 1e6 == pytest.approx(sum(sizes), rel=0.02)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(runs):
    _, said = runs
    assert [code for code, _ in said["stopped"]] == [130, 130]
    command = "torchrun --nproc-per-node 2 -m zenflow train --resume .*stopped"
    assert re.search(command, said["stopped"][0][1])
    assert "Stopped by SIGINT after step 5; everything is saved" in said["stopped"][0][1]


def test_as_many_ranks_go_on_bit_for_bit(runs):
    folder, said = runs
    assert [code for code, _ in said["stopped, on"]] == [0, 0], said["stopped, on"]
    assert difference(folder / "stopped", folder / "fsdp") == 0
    losses = [[row["loss"] for row in steps(folder / name)] for name in ("stopped", "fsdp")]
    assert losses[0] == losses[1]


def test_ranks_go_on_with_what_one_process_has_saved(runs):
    folder, said = runs
    assert [code for code, _ in said["begun alone, on"]] == [0, 0], said["begun alone, on"]
    assert difference(folder / "begun alone", folder / "alone") < ROUNDING


def test_the_first_rank_decides_for_all_and_its_log_repeats_the_run(runs, tmp_path):
    folder, said = runs
    for name in ("tuned", "tuned again", "tuned, on"):
        assert [code for code, _ in said[name]] == [0, 0], said[name]
    assert difference(folder / "tuned again", folder / "tuned") == 0
    path = folder / "tuned" / "decisions.jsonl"
    assert len(read_decisions(path).decisions) > 1
    ended(0, "--out", tmp_path / "replay", "--replay", path)
    assert difference(tmp_path / "replay", folder / "tuned") < ROUNDING


def test_a_tuned_run_that_was_stopped_goes_on_with_the_decision_to_come(runs, tmp_path):
    folder, said = runs
    assert [code for code, _ in said["tuned, stopped"]] == [130, 130]
    path = folder / "tuned, stopped" / "decisions.jsonl"
    found = read_decisions(path)
    assert found.end.step == NUM_STEPS
    # Now and then the clock says what holds already, which is no decision.
    steps = [decision.step for decision in found.decisions]
    assert set(steps) <= set(range(3, NUM_STEPS + 1, 2))
    assert max(steps) > 5
    ended(0, "--out", tmp_path / "replay", "--replay", path)
    assert difference(tmp_path / "replay", folder / "tuned, stopped") < ROUNDING


def test_a_trace_has_a_process_for_each_rank_on_one_clock(runs):
    folder, _ = runs
    trace = json.loads((folder / "fsdp" / "trace.json").read_text())
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0: cpu", "rank 0: host", "rank 1: cpu", "rank 1: host"]
    starts = {}
    for event in trace["traceEvents"]:
        if event["name"] == f"ProfilerStep#{NUM_STEPS}":
            starts[event["pid"]] = event["ts"], event["ts"] + event["dur"]
    assert len(starts) == 2
    (first, last), (other_first, other_last) = starts.values()
    assert max(first, other_first) < min(last, other_last)  # ranks take a step together
    timeline = Timeline.read(folder / "fsdp" / "trace.json")
    forwards = [span for span in timeline.spans if span.name == "forward"]
    assert len(forwards) == 4  # the first rank's alone


def test_a_batch_that_ranks_cannot_share_is_refused(runs):
    folder, said = runs
    for code, text in said["three"]:
        assert code == 2
        assert "use a --batch-size that 2 divides" in " ".join(text.split())
    assert not (folder / "three").exists()


def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_run_goes_on(runs):
    folder, said = runs
    (code, text), (other_code, _) = said["full"]
    assert (code, other_code) == (0, 0), text
    assert "Warning: the checkpoint of step 4 can't be written" in text
    assert "step 8" not in text
    assert load_checkpoint(folder / "full" / CHECKPOINTS).step == NUM_STEPS
    assert difference(folder / "full", folder / "fsdp") == 0


def test_a_rank_that_dies_ends_the_others_and_one_process_goes_on_with_what_they_saved(runs):
    folder, said = runs
    ((code, text),) = said["killed"]
    assert code == 1
    assert "Its newest checkpoint is of step 4, and is whole" in text
    assert load_checkpoint(folder / "killed" / CHECKPOINTS).step == 4
    ended(0, "--resume", folder / "killed")
    assert difference(folder / "killed", folder / "alone") < ROUNDING


def test_damage_to_what_ranks_have_saved_is_found(runs, tmp_path):
    folder, _ = runs
    path = latest_checkpoint(folder / "fsdp" / CHECKPOINTS)
    for shard in sorted((path / "shards").iterdir()):
        good = shard.read_bytes()
        shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=f"checksum of {shard.name}"):
            load_checkpoint(folder / "fsdp" / CHECKPOINTS)
        shard.write_bytes(good)
    assert load_checkpoint(folder / "fsdp" / CHECKPOINTS).step == NUM_STEPS
