import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.traces.compare import load
from experiments.training.parts.files.step_log import StepLog, read_steps
from experiments.training.run.summary import step_figures, whole_windows
from experiments.training.settings.rates import schedule_factor
from experiments.training.settings.training import TrainSettings
from tests.experiments.runs import (
    FAST,
    end,
    ended,
    equal,
    saved_tensors,
    steps,
    summary,
    train,
    trained,
    write_text,
)
from tests.starts import environment
from zenflow.trace.timeline import LANES, Timeline

PROMISED = {
    "strategy", "config", "emulated_link", "num_params", "model_bytes", "steps",
    "mean_step_seconds", "p95_step_seconds", "stall_seconds", "stall_fraction",
    "d2h_bytes_per_step", "h2d_bytes_per_step", "host_bytes_per_param", "device_bytes_extra",
    "final_train_loss", "eval_loss", "tokens_per_second", "hardware", "versions", "commit",
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path, blank_pictures: None) -> Path:
    return write_text(tmp_path / "text.txt")


def test_run_leaves_every_promised_file_and_figure(tmp_path):
    text = write_text(tmp_path / "text.txt")
    out = trained(tmp_path / "run", *FAST, "--data", text, "--steps", "16", "--eval-every", "4")
    names = {path.name for path in out.iterdir()}
    assert names >= {"config.json", "steps.jsonl", "summary.json", "trace.json", "timeline.png"}
    found = summary(out)
    assert found.keys() >= PROMISED
    assert found["emulated_link"] is None
    assert found["steps"] == 16
    rows = steps(out)
    assert [row["step"] for row in rows] == list(range(1, 17))
    assert found["stall_seconds"] == pytest.approx(sum(row["stall_seconds"] for row in rows))
    total = sum(row["seconds"] for row in rows)
    assert found["mean_step_seconds"] == pytest.approx(total / 16)
    assert found["tokens_per_second"] == pytest.approx(16 * 2 * 32 / total)
    assert rows[3]["eval_loss"] > found["eval_loss"]
    assert rows[15]["loss"] < rows[0]["loss"]
    assert set(Timeline.read(out / "trace.json").lanes) == set(LANES)
    facts = load(out).facts
    assert (facts.strategy, facts.num_params) == ("zenflow", found["num_params"])
    assert (facts.batch_size, facts.sequence, facts.grad_accum) == (2, 32, 1)
    assert facts.commit == found["commit"]


@pytest.mark.parametrize(("count", "every"), [(12, 4), (10, 4), (3, 1)])
def test_no_evaluation_is_skipped_and_each_is_printed(tmp_path, text, count, every):
    flags = [*FAST, "--data", text, "--steps", str(count)]
    out = tmp_path / "run"
    said = ended(0, "--out", out, *flags, "--eval-every", str(every))
    asked = list(range(every, count + 1, every))
    evaluated = {row["step"]: row["eval_loss"] for row in steps(out) if "eval_loss" in row}
    assert list(evaluated) == asked
    for step, loss in evaluated.items():
        assert f"step {step}/{count} held-out loss {loss:.4f}" in said
    if asked[-1] == count:
        assert summary(out)["eval_loss"] == evaluated[count]
    alone = trained(tmp_path / "alone", *flags)
    assert summary(alone)["eval_loss"] == summary(out)["eval_loss"]
    assert [row["loss"] for row in steps(alone)] == [row["loss"] for row in steps(out)]
    assert equal(alone, out)


def test_a_finished_run_that_is_resumed_is_evaluated_again(tmp_path, text):
    flags = [*FAST, "--data", text, "--steps", "4", "--eval-every", "4"]
    out = trained(tmp_path / "run", *flags)
    before = steps(out), summary(out)["eval_loss"]
    ended(0, "--resume", out)
    assert (steps(out), summary(out)["eval_loss"]) == before


def test_the_log_the_console_and_the_summary_have_one_loss(tmp_path, text):
    flags = [*FAST, "--data", text, "--steps", "4", "--grad-accum", "2"]
    said = ended(0, "--out", tmp_path / "run", *flags)
    losses = [row["loss"] for row in steps(tmp_path / "run")]
    mean = sum(losses) / 4
    assert summary(tmp_path / "run")["final_train_loss"] == pytest.approx(mean)
    assert f"mean loss {mean:.3f} of 4 steps" in said
    assert f"training loss {mean:.4f} (mean of the last 4 steps)" in said
    alone = trained(tmp_path / "one", *flags, "--steps", "1")
    assert steps(alone)[0]["loss"] == losses[0]


def test_a_comparisons_evaluations_leave_its_timeline_alone():
    for count in (1, 4, 16, 24, 50, 100, 500, 1000):
        made = TrainSettings(steps=count).for_comparison()
        inner = range(made.eval_every, count, made.eval_every)
        assert all(step <= count - made.timeline_steps for step in inner)
        assert count < 100 or len(inner) >= 5
    assert TrainSettings(steps=50, eval_every=3).for_comparison().eval_every == 3


def test_the_first_row_is_shown_as_the_model_sees_it(tmp_path, text):
    data = tmp_path / "data"
    data.mkdir()
    for number in range(3):
        (data / f"{number}.txt").write_text(f'line {number}\n\tsays "é"\n')
    (data / "big.txt").write_text("x" * 300)
    (data / "chat.jsonl").write_text('{"messages": []}')
    flags = ["--steps", "1", "--sequence", "350", "--batch-size", "1", "--eval-data", text]
    said = train("--out", tmp_path / "run", *FAST, "--data", data, *flags).output
    row = next(line for line in said.splitlines() if line.startswith("first row as the model"))
    shown = json.loads(row[row.index('"') : row.rindex('"') + 1])
    assert "(350 tokens): " in row
    assert len(shown) == 200
    assert row.endswith(" ...")
    parts = [*(f'line {number}\n\tsays "é"\n' for number in range(3)), "x" * 300]
    assert "<|separator|>".join(parts).startswith(shown)
    assert "4 text files read; passed over: chat.jsonl (JSON" in said
    rows = "".join(f"{'good' if n % 2 else 'bad'} {n}\t{n % 2}\n" for n in range(200))
    (tmp_path / "a.tsv").write_text(rows)
    flags = ["--data", tmp_path / "a.tsv", "--steps", "1"]
    said = ended(0, "--out", tmp_path / "labelled", *FAST, *flags)
    assert re.search(r'tokens, class (1\): "good \d+"|0\): "bad \d+")', said)


def test_measured_traffic_is_the_rules(tmp_path, text):
    flags = [*FAST, "--data", text, "--steps", "20", "--select-interval", "0"]
    moved = {}
    for strategy in ("zero_offload", "zenflow"):
        found = summary(trained(tmp_path / strategy, *flags, "--strategy", strategy))
        split = json.loads((tmp_path / strategy / "config.json").read_text())["config"]
        share = 1 - split["topk_ratio"]
        moved[strategy] = (
            found["d2h_bytes_per_step"] / (share * found["model_bytes"]),
            found["h2d_bytes_per_step"] / (share * found["model_bytes"]),
        )
    # Norms (0.3% of this model) stay on the device, and columns are counted in whole numbers.
    assert moved["zero_offload"] == pytest.approx((1, 1), rel=0.02)
    assert moved["zenflow"] == pytest.approx((1, 1 / 4), rel=0.03)


def test_emulated_link_is_in_every_output(tmp_path, text):
    flags = [*FAST, "--data", text, "--steps", "8", "--link-gbps", "0.05,0.04"]
    assert "(emulated link)" in ended(0, "--out", tmp_path / "run", *flags)
    rates = {"d2h_bytes_per_second": 5e7, "h2d_bytes_per_second": 4e7}
    assert summary(tmp_path / "run")["emulated_link"] == rates
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert "emulated link" in json.dumps(trace["traceEvents"])


@pytest.mark.parametrize("strategy", ["zenflow", "zenflow_paper"])
@pytest.mark.parametrize("gradients", ["release", "keep"])
def test_three_steps_and_three_resumed_are_six_bit_for_bit(tmp_path, text, strategy, gradients):
    flags = [*FAST, "--data", text, "--strategy", strategy, "--gradients", gradients]
    flags += ["--select-interval", "4", "--warmup", "0"]
    whole = trained(tmp_path / "whole", *flags, "--steps", "6")
    parts = trained(tmp_path / "parts", *flags, "--steps", "3")
    assert not equal(whole, parts)
    ended(0, "--resume", parts, "--steps", "6")
    assert equal(whole, parts)
    assert [row["loss"] for row in steps(whole)] == [row["loss"] for row in steps(parts)]
    assert summary(whole)["eval_loss"] == summary(parts)["eval_loss"]


def test_modes_and_micro_batches_of_a_step_give_the_same_run(tmp_path, text):
    flags = [*FAST, "--data", text, "--steps", "6", "--grad-accum", "2"]
    release = trained(tmp_path / "release", *flags, "--gradients", "release")
    keep = trained(tmp_path / "keep", *flags, "--gradients", "keep")
    losses = [[row["loss"] for row in steps(out)] for out in (release, keep)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_resume_refuses_another_run_and_says_what_differs(tmp_path, text):
    out = trained(tmp_path / "run", *FAST, "--data", text, "--steps", "2")
    before = saved_tensors(out)
    for flags, words in (
        (["--weight-decay", "0.5"], "weight_decay was 0.1, now 0.5"),
        (["--topk-ratio", "0.3"], "knobs was {}, now {'topk_ratio': 0.3}"),
        (["--model", "own:small"], "model was 'own:tiny', now 'own:small'"),
        (["--steps", "1"], "past the 1 steps"),
    ):
        assert words in ended(1, "--resume", out, *flags)
    assert saved_tensors(out).keys() == before.keys()
    ended(0, "--resume", out, "--steps", "3")


def test_resume_of_no_run_is_explained(tmp_path):
    assert "config.json can't be read" in ended(2, "--resume", tmp_path)


def start(
    request: pytest.FixtureRequest, out: Path, text: Path, *flags: str
) -> subprocess.Popen[str]:
    """Start a run that would take hours and wait for its second checkpoint."""
    command = [sys.executable, "-m", "experiments.cli", "train", "--out", str(out), *FAST]
    command += ["--data", str(text), "--steps", "1000000", "--warmup", "0", *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    request.addfinalizer(lambda: end(process))
    deadline = time.monotonic() + 200
    while not (out / "checkpoint" / "step-00000004").exists() and not _past(out, 4):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def _past(out: Path, step: int) -> bool:
    found = (out / "checkpoint").glob("step-*")
    return any(int(path.name.removeprefix("step-")) >= step for path in found)


def test_signal_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, text, request):
    out = tmp_path / "run"
    process = start(request, out, text, "--save-every", "2")
    for _ in range(3):  # who sees nothing happen presses again
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Stopping: the step under way is finished" in output
    assert "Stopped by SIGINT after step" in output
    assert f"--resume {out}" in output
    done = steps(out)[-1]["step"]
    assert (out / "checkpoint" / f"step-{done:08d}").is_dir()
    assert summary(out)["steps"] == done
    ended(0, "--resume", out, "--steps", str(done + 1))


def test_classification_reports_accuracy_and_learns(tmp_path):
    rows = [f"{'good' if n % 2 else 'bad'} film number {n}\t{n % 2}\n" for n in range(300)]
    (tmp_path / "a.tsv").write_text("".join(rows))
    flags = ["--data", tmp_path / "a.tsv", "--steps", "60", "--lr", "0.003", "--batch-size", "8"]
    out = trained(tmp_path / "run", *FAST, *flags, "--strategy", "on_device")
    assert summary(out)["eval_accuracy"] > 0.9


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_train(tmp_path, text, dtype):
    flags = ["--data", text, "--steps", "12", "--dtype", dtype, "--gradients", "keep"]
    out = trained(tmp_path / "run", *FAST, *flags)
    rows = steps(out)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert summary(out)["model_bytes"] == 2 * summary(out)["num_params"]


def test_a_float16_run_clips_its_gradients_without_their_loss_scale(tmp_path, text):
    flags = ["--data", text, "--steps", "4", "--dtype", "float16", "--gradients", "keep"]
    out = trained(tmp_path / "run", *FAST, *flags, "--max-grad-norm", "0.01")
    for row in steps(out):
        assert row["clip_factor"] == pytest.approx(0.01 / row["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedule_rises_to_one_and_every_step_counts(schedule):
    settings = TrainSettings(schedule=schedule, warmup=0.1)
    factors = [schedule_factor(settings, 100, done) for done in range(100)]
    assert factors[:3] == pytest.approx([1 / 11, 2 / 11, 3 / 11])
    assert max(factors) == factors[10] == 1.0
    assert min(factors) > 0
    if schedule != "constant":
        assert factors[10:] == sorted(factors[10:], reverse=True)
        assert factors[55] == pytest.approx(0.5)


def row(step, loss=1.0):
    return {"step": step, "loss": loss, "seconds": 1.0, "stall_seconds": 0.0, "tokens": 8}


def test_log_drops_rows_that_will_be_run_again_and_a_torn_line(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(row(n)) + "\n" for n in (1, 2, 3)) + '{"st')
    log = StepLog(path, keep_steps=2)
    log.append(row(3, loss=float("nan")))
    log.close()
    assert read_steps(path) == [row(1), row(2), row(3, loss=None)]


def test_bytes_are_means_over_whole_windows_behind_the_warm_up():
    rows = [
        {"step": n, "seconds": 1.0, "stall_seconds": 0.25, "tokens": 5, "loss": float(n),
         "d2h_bytes": 100 if n > 10 else 1, "h2d_bytes": 40 if n % 4 == 0 and n > 10 else 0}
        for n in range(1, 24)
    ]  # fmt: skip
    assert [row["step"] for row in whole_windows(rows, 4, 2)] == list(range(11, 23))
    figures = step_figures(rows, 4, 2)
    assert figures["d2h_bytes_per_step"] == 100
    assert figures["h2d_bytes_per_step"] == 10
    assert figures["stall_fraction"] == 0.25
    assert figures["final_train_loss"] == 18.5
