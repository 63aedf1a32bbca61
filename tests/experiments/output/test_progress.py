"""What is shown of a run: a loss says what it is of, and evaluations are seen."""

import io
import re

import pytest
from rich.console import Console

from experiments.output import bar as bar_module
from experiments.output.outlook import Outlook, PlannedRun
from experiments.output.progress import Reporter


def row(step, loss, **more):
    return {
        "step": step, "loss": loss, "seconds": 0.5, "stall_seconds": 0.125, "tokens": 100,
        "lr": 1e-5, **more,
    }  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """Return the time as a list of one, which a test moves."""
    now = [1000.0]
    monkeypatch.setattr(bar_module.time, "monotonic", lambda: now[0])
    return now


def shown(clock, losses, *, done=0, every=10.0):
    """Return the lines off a terminal, of steps so many seconds apart."""
    console = Console(record=True, width=200, file=io.StringIO())
    reporter = Reporter(console)
    reporter.start("zenflow", done, done + len(losses))
    for step, loss in enumerate(losses, start=done + 1):
        clock[0] += every
        reporter.step(row(step, loss))
    return console.export_text().splitlines()


def test_a_line_has_the_mean_loss_since_the_line_before(clock):
    lines = shown(clock, [8.0, 4.0, 2.0, 1.0, 1.0], every=5.0)
    assert [re.search(r"mean loss .* steps?", line)[0] for line in lines] == [
        "mean loss 6.000 of 2 steps", "mean loss 1.500 of 2 steps", "mean loss 1.000 of 1 step",
    ]  # fmt: skip


def test_what_is_shown_after_a_resume_depends_on_nothing_before(clock):
    whole = shown(clock, [8.0, 4.0, 2.0, 1.0], every=5.0)
    rest = shown(clock, [2.0, 1.0], done=2, every=5.0)
    assert whole[-1] == rest[-1]


def test_a_loss_that_is_not_finite_stays_with_its_line(clock):
    assert ["nan" in line for line in shown(clock, [1.0, None, 1.0])] == [False, True, False]


def test_a_line_has_speed_learning_rate_and_time_left(clock):
    first, *_, last = shown(clock, [1.0] * 12, every=10.0)
    assert "step 1/12  mean loss 1.000 of 1 step  500 ms/step  200 tokens/s  stalled 25%" in first
    assert re.search(r"lr 1e-05  (about|less than) .* left$", first)
    assert last.endswith("lr 1e-05")


def test_a_terminal_shows_the_loss_of_the_step():
    file = io.StringIO()
    reporter = Reporter(Console(file=file, force_terminal=True, width=140))
    reporter.start("zenflow", 0, 3)
    for step, loss in enumerate((8.0, 4.0, 2.0), start=1):
        reporter.step(row(step, loss))
    reporter.close()
    assert re.findall(r"loss ([\d.]+)", file.getvalue())[-1] == "2.000"
    assert "mean" not in file.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True], ids=["lines", "terminal"])
def test_an_evaluation_is_shown_when_it_happens(is_terminal):
    file = io.StringIO()
    reporter = Reporter(Console(file=file, force_terminal=is_terminal, width=140, highlight=False))
    reporter.start("zenflow", 0, 8)
    reporter.evaluated(4, {"eval_loss": 2.5, "eval_accuracy": 0.75})
    reporter.close()
    assert "step 4/8  held-out loss 2.5000, accuracy 0.750" in file.getvalue()


def test_runs_that_share_a_bar_keep_evaluations_to_their_logs_and_tell_of_data_once():
    file = io.StringIO()
    reporter = Reporter(Console(file=file, width=140))
    reporter.plan(Outlook([PlannedRun("a", 2), PlannedRun("b", 2)], is_guessed=False))
    for name in ("a", "b"):
        reporter.start(name, 0, 2)
        reporter.once("first row")
        reporter.evaluated(1, {"eval_loss": 2.5})
    assert file.getvalue().count("first row") == 1
    assert "held-out" not in file.getvalue()
