"""The controller on runs whose truth is hidden, and on one that really trains."""

import json
import logging
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

from autotune.adviser.adviser import Adviser
from autotune.constraints import Constraints
from autotune.decisions.file import Decision, WindowRecord, read_decisions
from autotune.model.twin import Twin
from autotune.online.controller import TwinController
from autotune.online.zen_auto import ZenAuto
from experiments.training.parts.models.decoder import DecoderConfig, LanguageModel
from experiments.training.settings.sizes import MODEL_SIZES
from sim.hardware.unknown import generic_cpu
from tests.autotune.runs import Notes, Priced, Run, a_controller, started_log
from tests.autotune.worlds import CONFIG, HERE, SMALL, StandIn, Truth, knobs_at, log_gap, workload
from tests.models import assert_equal, closing, weights_of
from zenflow import LoggedDecisions, PacedLink, ZenFlowAdamW
from zenflow.errors import CheckpointError, ConfigError
from zenflow.report import WindowNorms

TRUTHS = {
    "slow uploads": {"h2d": 2.5},
    "slow copies down": {"d2h": 2.0, "device": 0.7},
    "slow host": {"host": 3.0, "d2h": 0.8},
}


@pytest.mark.parametrize(
    ("name", "late"),
    [
        ("slow copies down", 0),
        ("slow host", 0),
        ("slow uploads", 1),
        pytest.param("slow uploads", 0, marks=pytest.mark.slow),
    ],
)
def test_it_comes_to_the_best_of_the_grid_also_by_reports_that_are_a_step_late(name, late):
    truth = Truth(**TRUTHS[name])
    controller, _ = a_controller()
    run = Run(truth, controller, late=late).take(400)
    assert truth.shortfall(run.knobs, SMALL.grid()) < 0.02
    assert run.decision_log[-1][0] < 300, "it comes to rest"


def test_what_it_writes_is_what_was_done_in_the_order_in_which_it_was(tmp_path):
    log = started_log(tmp_path / "decisions.jsonl")
    controller, _ = a_controller(log=log)
    run = Run(Truth(h2d=2.5), controller).take(400)
    log.end(step=400, search_seconds=controller.search_seconds, run_seconds=run.seconds)
    log.close()
    told = read_decisions(log.path)
    assert told.changes == run.decision_log
    assert len(told.decisions) >= 1
    assert {decision.by for decision in told.decisions} == {"twin"}
    assert [window.window for window in told.windows] == list(range(len(told.windows)))
    in_force = [(0, HERE), *told.changes]
    for window in told.windows:
        knobs = [own for step, own in in_force if step < window.step][-1]
        assert window.knobs == knobs
        assert window.step_seconds == pytest.approx(run.truth.forecast(knobs).step_seconds)
        assert window.rho == pytest.approx(run.truth.rho(knobs))
        assert window.goodput == pytest.approx(
            workload().tokens_per_step * run.truth.progress(knobs)
        )
    for decision in told.decisions:
        measured = [w for w in told.windows if w.knobs == decision.old and w.step <= decision.step]
        assert decision.measured_step_seconds == pytest.approx(measured[-1].step_seconds)


@pytest.mark.parametrize(
    ("h2d", "changes"),
    [(1.5, {"update_interval": 8}), (0.05, {"topk_ratio": 0.3})],
    ids=["longer", "shorter"],
)
def test_a_stretchs_evidence_is_of_its_own_knobs_alone(h2d, changes):
    """Also right after a change."""
    truth, start = Truth(h2d=h2d), knobs_at(**changes)
    controller, handle = a_controller(config=start.applied_to(CONFIG))
    Run(truth, controller, knobs=start).take(300)
    stretches = {s.index: s for question in handle.asked for s in question.stretches}
    assert len({stretch.knobs for stretch in stretches.values()}) >= 2
    seen = 0
    for stretch in stretches.values():
        expected = truth.forecast(stretch.knobs).busy_seconds
        for lane, seconds in stretch.busy_seconds.items():
            assert log_gap(seconds, expected[lane]) < 0.01, (lane, stretch.knobs)
            seen += 1
    assert seen > 8


def test_steps_beside_which_something_searches_are_no_evidence():
    """What is in force would look slow while its rivals are sought, and always lose to them."""
    truth = Truth(h2d=1.5)
    controller, handle = a_controller(prices={"polls": 9})
    run = Run(truth, controller, slower=lambda: 1.5 if handle.is_busy else 1.0).take(400)
    windows = [r for r in handle.notes.records if isinstance(r, WindowRecord)]
    assert len(handle.asked) >= 3
    assert run.seconds > 1.05 * 400 * min(w.step_seconds for w in windows)
    for window in windows:
        expected = truth.forecast(window.knobs).step_seconds
        assert window.step_seconds == pytest.approx(expected, rel=1e-6), window


def test_a_search_that_failed_disturbs_no_more():
    controller, handle = a_controller(prices={"fails_at": 1, "polls": 3})
    Run(Truth(), controller).take(300)
    assert len(handle.asked) == 1
    assert sum(isinstance(r, WindowRecord) for r in handle.notes.records) > 10


@pytest.mark.parametrize("forecast", [0.01, 0.05])
def test_searching_stays_within_its_budget(forecast):
    controller, handle = a_controller(
        prices={"start": 0.2, "forecast": forecast}, total_steps=1000, budget=0.05
    )
    truth = Truth(h2d=2.5)
    run = Run(truth, controller).take(1000)
    assert handle.asked
    assert controller.search_seconds <= 0.05 * run.seconds
    assert all(question.num_trials >= 6 or not question.num_trials for question in handle.asked)
    limits = [question.most_seconds for question in handle.asked]
    assert all(0 < limit <= 0.05 * run.seconds for limit in limits)
    assert limits[-1] < limits[0]
    assert run.seconds < 900 * truth.forecast(HERE).step_seconds


def test_the_budget_is_used_where_searching_is_cheap_enough():
    controller, handle = a_controller(prices={"start": 0.2, "forecast": 0.001}, budget=0.02)
    Run(Truth(h2d=2.5), controller).take(400)
    assert handle.asked
    assert controller.search_seconds > 0.2


def test_when_the_budget_is_spent_what_was_seen_is_weighed_anew_until_a_drift():
    class Disappointing(Truth):
        """All that is promised turns out slow, so that there is always something else to try."""

        def forecast(self, knobs):
            found = super().forecast(knobs)
            return replace(
                found, step_seconds=found.step_seconds * (1.0 if knobs == HERE else 1.5)
            )

    controller, handle = a_controller(prices={"start": 0.05, "forecast": 0.012}, total_steps=1500)
    run = Run(Disappointing(h2d=1.5), controller).take(400)
    trials = [question.num_trials for question in handle.asked]
    assert trials[0] >= 6
    assert 0 in trials, "and then it costs nothing"
    assert run.knobs == HERE
    before = len(trials)
    run.truth.constants = {**run.truth.constants, "device": 3.0}
    run.take(100)
    assert controller.rules.drifts == 1
    after = [q for q in handle.asked[before:] if q.stretches[0].last_step > 400]
    assert 0 not in [question.num_trials for question in after][:1]


def test_where_starting_has_used_the_budget_up_nothing_is_asked_and_it_says_so_once(caplog):
    controller, handle = a_controller(prices={"start": 100.0, "forecast": 0.001})
    with caplog.at_level(logging.WARNING):
        run = Run(Truth(h2d=2.5), controller).take(200)
    assert handle.asked == []
    assert run.decision_log == []
    assert len(caplog.records) == 1
    assert "too short a run" in caplog.text
    assert "100.00 s" in caplog.text


def test_a_run_that_may_be_searched_later_is_not_called_too_short(caplog):
    truth = Truth(h2d=2.5)
    step = truth.forecast(HERE)
    whole = 0.01 * 1000 * (step.step_seconds - step.stall_seconds)
    prices = {
        "start": 0.85 * whole,
        "forecast": 0.001 * whole,
    }  # four fifths may be spent at first
    controller, handle = a_controller(prices=prices, total_steps=1000, budget=0.01)
    with caplog.at_level(logging.WARNING):
        run = Run(truth, controller).take(200)
        assert not handle.asked
        run.take(800)
    assert handle.asked
    assert not caplog.records


def test_a_run_that_is_about_to_end_is_left_alone():
    controller, handle = a_controller(total_steps=50)
    Run(Truth(h2d=2.5), controller).take(50)
    assert handle.asked == []


def test_without_its_process_training_goes_on_as_it_is(caplog):
    controller, handle = a_controller(prices={"fails_at": 2})
    with caplog.at_level(logging.WARNING):
        run = Run(Truth(h2d=2.5), controller).take(400)
    assert len(handle.asked) == 2
    assert [record.message for record in caplog.records if "training goes on" in record.message]
    windows = [r for r in handle.notes.records if isinstance(r, WindowRecord)]
    assert windows[-1].step > 350, "it is measured all the same"
    assert run.step == 400


def test_what_turns_out_worse_is_undone_after_one_stretch():
    class Trap(Truth):
        """Another S than the first is not what it looks like."""

        def forecast(self, knobs):
            found = super().forecast(knobs)
            worse = 1.0 if knobs == HERE else 3.0
            return replace(found, step_seconds=worse * found.step_seconds)

    controller, handle = a_controller()
    run = Run(Trap(h2d=2.5), controller).take(300)
    decisions = [r for r in handle.notes.records if isinstance(r, Decision)]
    assert run.knobs == HERE
    assert {d.new for d in decisions[1::2]} == {HERE}
    assert all("worse" in d.reason for d in decisions[1::2])


def test_constraints_are_kept_and_a_contradiction_is_refused_at_once():
    limits = Constraints(largest_staleness=5)
    controller, _ = a_controller(constraints=limits)
    run = Run(Truth(h2d=2.5), controller).take(400)
    assert all(k.update_interval + 1 <= 5 for _, k in [(0, HERE), *run.decision_log])
    with pytest.raises(ConfigError, match="staleness"):
        a_controller(constraints=Constraints(largest_staleness=1))


# ---- Zen-auto beside it -----------------------------------------------------------------------


class Scripted(ZenAuto):
    """Wants a given S as far as its bounds let it."""

    def __init__(self, wish):
        super().__init__(start=HERE.update_interval)
        self.wish = wish
        self.allowed = []

    def set_bounds(self, least, largest):
        super().set_bounds(least, largest)
        if hasattr(self, "allowed"):
            self.allowed.append((least, largest))

    def next_interval(self, report):
        return min(max(self.wish, self.least), self.largest)


@pytest.mark.parametrize(("wish", "reached"), [(1, 2), (4, 4), (16, 8)])
def test_zen_auto_moves_s_only_within_what_is_as_good(wish, reached):
    advises = StandIn(intervals=(2, 8))
    controller, handle = a_controller(zen_auto=Scripted(wish), advises=advises)
    assert controller.measures_windows
    run = Run(Truth(), controller).take(200)
    assert run.knobs == replace(HERE, update_interval=reached)
    records = [r for r in handle.notes.records if isinstance(r, Decision)]
    assert [r.by for r in records] == ["zen-auto"] * (wish != HERE.update_interval)


def test_zen_auto_moves_nothing_before_an_answer_or_while_something_is_on_trial():
    tried = knobs_at(topk_ratio=0.3)
    advises = StandIn(intervals=(2, 8), bests=[tried])
    controller, handle = a_controller(zen_auto=Scripted(8), advises=advises)
    Run(Truth(), controller).take(600)
    kinds = [getattr(record, "by", "window") for record in handle.notes.records]
    assert kinds[:3] == ["window", "twin", "window"]
    assert [kind for kind in kinds if kind != "window"] == ["twin", "zen-auto"]
    final = [r for r in handle.notes.records if isinstance(r, Decision)][-1]
    assert final.new == replace(tried, update_interval=8)


def test_it_looks_at_windows_now_and_then_and_only_where_zen_auto_could_move_s():
    controller, _ = a_controller(zen_auto=Scripted(4), advises=StandIn(intervals=(2, 8)))
    run = Run(Truth(), controller)
    assert not controller.looks_at_windows, "nothing is known of other S yet"
    looks = []
    for _ in range(1023):
        run.take(1)
        looks.append(controller.looks_at_windows)
    spans = "".join("x" if look else " " for look in looks[128:]).split()
    assert {len(span) for span in spans} == {32}
    assert sum(looks[128:]) == pytest.approx(len(looks[128:]) / 8, abs=32)
    alone, _ = a_controller(zen_auto=Scripted(4), advises=StandIn(intervals=(4, 4)))
    run = Run(Truth(), alone)
    for _ in range(600):
        run.take(1)
        assert not alone.looks_at_windows


def test_s_that_zen_auto_moved_is_what_the_twin_goes_on_from():
    advises = StandIn(intervals=(2, 8))
    controller, handle = a_controller(zen_auto=Scripted(8), advises=advises)
    Run(Truth(), controller).take(200)
    assert handle.asked[-1].here == replace(HERE, update_interval=8)
    assert handle.asked[-1].stretches[-1].knobs == replace(HERE, update_interval=8)


def test_zen_auto_stays_where_another_s_would_be_worse():
    controller, handle = a_controller(zen_auto=Scripted(1))
    run = Run(Truth(h2d=2.5), controller).take(300)
    assert run.knobs.update_interval == 8
    assert [r for r in handle.notes.records if getattr(r, "by", None) == "zen-auto"] == []


def test_zen_auto_that_can_not_follow_everywhere_is_refused():
    with pytest.raises(ConfigError, match="bounds of S"):
        a_controller(zen_auto=ZenAuto(largest=4))


def test_zen_auto_that_has_seen_nothing_moves_nothing():
    """Its own idea of S follows the twin's, or it would move S to where it once began."""
    moves = [knobs_at(topk_ratio=0.3, update_interval=8)]
    advises = StandIn(intervals=(2, 8), bests=moves)
    controller, _ = a_controller(zen_auto=ZenAuto(), advises=advises)
    run = Run(Truth(h2d=2.5), controller).take(200)
    assert [knobs for _, knobs in run.decision_log] == moves


def test_zen_auto_follows_what_it_sees():
    def norms(knobs):
        """Accumulated gradients that are comparable from 3 steps on."""
        k = knobs.topk_ratio
        ages = range(1, knobs.update_interval + 1)
        return tuple(WindowNorms(n, (1 - k) / k * (n / 3) ** 2, 1.0) for n in ages)

    advises = StandIn(intervals=(1, 8))
    controller, _ = a_controller(zen_auto=ZenAuto(hysteresis=0.1), advises=advises)
    run = Run(Truth(), controller).take(200, norms)
    assert [knobs.update_interval for _, knobs in run.decision_log] == [3]


# ---- state ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cut", [45, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (10, 90))]
)
def test_one_that_was_saved_goes_on_to_the_same_place(cut):
    truth = Truth(**TRUTHS["slow uploads"])
    first, _ = a_controller(zen_auto=ZenAuto())
    before = Run(truth, first).take(cut)
    state = json.loads(json.dumps(first.state_dict()))
    second, handle = a_controller(zen_auto=ZenAuto())
    second.load_state_dict(state)
    assert second.state_dict() == first.state_dict()
    own = before.seconds - cut * truth.forecast(HERE).stall_seconds
    assert state["budget"]["run_seconds"] > 0.8 * own, "what the budget is a share of"
    run = Run(truth, second, knobs=before.knobs)
    run.step = cut
    run.take(300)
    assert truth.shortfall(run.knobs, SMALL.grid()) < 0.02
    kept = {s["index"] for s in state["tuner"]["stretches"]}
    indices = [s.index for s in handle.asked[-1].stretches]
    assert kept <= set(indices)
    assert indices == sorted(set(indices)), "no number is given twice"


def test_another_controllers_state_is_refused():
    with_zen, _ = a_controller(zen_auto=ZenAuto())
    without, _ = a_controller()
    for state in (with_zen.state_dict(), {}, {"tuner": {}, "zen_auto": None}):
        with pytest.raises(CheckpointError, match="resume with the controller"):
            without.load_state_dict(state)


def test_closing_it_closes_what_searches():
    controller, handle = a_controller()
    controller.close()
    assert handle.is_closed


# ---- a real run -------------------------------------------------------------------------------

LINK = (40e6, 10e6)
STEPS = 60


def trained(controller, link):
    """Train a tiny decoder and return its optimizer, closed, and its weights."""
    torch.manual_seed(0)
    model = LanguageModel(DecoderConfig.of_size(MODEL_SIZES["tiny"], 256))
    optimizer = ZenFlowAdamW(
        model.parameters(),
        config=SLOW.applied_to(CONFIG),
        offload_gradients="release",
        max_grad_norm=1.0,
        controller=controller,
        link=link,
        timeline_steps=controller.timeline_steps,
    )
    draw = torch.Generator().manual_seed(1)
    with closing(optimizer):
        for _ in range(STEPS):
            tokens = torch.randint(256, (2, 65), generator=draw)
            with optimizer.span("forward"):
                logits = model(tokens[:, :-1]).logits
                loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            with optimizer.span("backward"):
                loss.backward()
            optimizer.step()
        optimizer.eval()
        return optimizer.decision_log, weights_of(model)


SLOW = knobs_at(update_interval=1)


def test_a_tuned_training_changes_something_and_replays_bit_for_bit():
    rates = {"link.d2h": LINK[0], "link.h2d": LINK[1]}
    notes = Notes()
    config = SLOW.applied_to(CONFIG)
    machine = generic_cpu(2, 8e9).with_values(rates)
    controller = TwinController(
        Adviser(Twin(workload(), machine, config), SMALL),
        config=config,
        total_steps=10 * STEPS,
        log=notes,
        sigma=1.0,
        make_handle=Priced,
    )
    decisions, weights = trained(controller, PacedLink(*LINK))
    assert decisions
    assert decisions[0][1].update_interval > 1, "uploads of every step are what it waits for"
    assert [(r.step, r.new) for r in notes.records if isinstance(r, Decision)] == decisions
    replay = LoggedDecisions(decisions, largest_interval=controller.largest_interval)
    again, same = trained(replay, None)
    assert again == decisions
    assert_equal(same, weights, "the replay")


def test_an_answer_from_before_a_drift_is_dropped():
    controller, handle = a_controller()
    run = Run(Truth(h2d=2.5), controller)
    asked = []
    handle.ask = asked.append  # the answer takes its time
    run.take(60)
    assert asked
    controller.rules.drifts += 1
    before = controller.rules.here
    handle._answers.append(handle._adviser.advise(asked[0]))
    run.take(1)
    assert controller.rules.here == before
    assert controller.rules.home is None
