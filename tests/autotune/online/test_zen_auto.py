"""ZenAuto finds the window length that closed forms ask for, and the one that training does."""

import itertools
import json
import math

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autotune.online.zen_auto import ZenAuto
from experiments.training.parts.models.decoder import DecoderConfig, LanguageModel
from tests.models import closing
from tests.zenflow.step.test_reporter import a_report
from zenflow import (
    CheckpointError,
    ConfigError,
    LoggedDecisions,
    WindowNorms,
    ZenFlowAdamW,
    ZenFlowConfig,
)

NOISE, PERSISTENT = 0.5, 1.0


def norms(age, ratio, exponent, k):
    """Return norms whose ratio, per column, grows as a power of the age."""
    per_column = ratio * age**exponent
    return WindowNorms(age, per_column**2 * (1 - k), k)


def drive(controller, ratio, exponent, *, num_steps=200, k=0.1, rolling=True, delay=0, first=1):
    """Return S in force at every step of a run whose gradients grow so."""
    intervals = [controller.interval] * delay
    for step in range(first, first + num_steps):
        intervals.append(controller.interval)
        interval = intervals[-1 - delay]
        ages = range(1, interval + 1) if rolling else [1 + (step - 1) % interval]
        windows = tuple(norms(age, ratio, exponent, k) for age in ages)
        report = a_report(step=step, update_interval=interval, topk_ratio=k, windows=windows)
        controller.next_interval(report)
    return intervals


@pytest.mark.parametrize("rolling", [True, False], ids=["rolling", "aligned"])
@pytest.mark.parametrize("k", [0.01, 0.1, 0.3, 0.9])
@pytest.mark.parametrize(
    ("ratio", "exponent", "expected"),
    [
        (0.25, PERSISTENT, 4),
        (0.0999, PERSISTENT, 11),
        (0.5, NOISE, 4),
        (1 / 3, NOISE, 9),
        (0.5, 0.75, 3),
        (1.0, NOISE, 1),
        (3.0, PERSISTENT, 1),
        (0.01, NOISE, 16),
        (0.5, 0.0, 16),
    ],
)
def test_windows_end_when_the_closed_form_says_so_at_every_k(
    ratio, exponent, expected, k, rolling
):
    controller = ZenAuto(hysteresis=0.0)
    assert drive(controller, ratio, exponent, k=k, rolling=rolling)[-1] == expected


@given(
    n=st.floats(1.0, 40.0),
    exponent=st.floats(0.3, 1.0),
    threshold=st.floats(0.2, 3.0),
    start=st.integers(1, 16),
    rolling=st.booleans(),
)
def test_s_comes_to_within_the_hysteresis_of_where_the_ratio_reaches_the_threshold(
    n, exponent, threshold, start, rolling
):
    controller = ZenAuto(threshold=threshold, start=start)
    last = drive(controller, threshold / n**exponent, exponent, rolling=rolling)[-1]
    assert abs(n - last) < 1 + 0.25 * last or last == 16 < n


@given(
    ratio=st.floats(0.01, 3.0),
    exponent=st.floats(0.2, 1.0),
    rolling=st.booleans(),
    delay=st.integers(0, 1),
)
def test_decisions_are_a_window_apart_and_at_most_double(ratio, exponent, rolling, delay):
    intervals = drive(ZenAuto(), ratio, exponent, rolling=rolling, delay=delay)
    assert intervals[: 10 + delay] == [1] * (10 + delay)
    changes = [i for i in range(1, len(intervals)) if intervals[i] != intervals[i - 1]]
    for earlier, later in itertools.pairwise(changes):
        assert later - earlier >= intervals[earlier]
    assert all(after <= 2 * before for before, after in itertools.pairwise(intervals))
    assert len(set(intervals[100:])) == 1, "it doesn't come to rest"


def test_s_stays_where_the_wanted_one_is_near():
    controller = ZenAuto(start=4, decay=0.0)
    assert set(drive(controller, 1 / 4.9, PERSISTENT)) == {4}
    assert drive(controller, 1 / 5.1, PERSISTENT, first=201)[-1] == 6


def test_a_report_from_before_a_decision_does_not_count_for_the_next_one():
    controller = ZenAuto(warm_up=0)

    def after(step, interval):
        windows = tuple(norms(age, 0.1, NOISE, 0.1) for age in range(1, interval + 1))
        return controller.next_interval(
            a_report(step=step, update_interval=interval, topk_ratio=0.1, windows=windows)
        )

    assert [after(1, 1), after(2, 1), after(3, 2), after(4, 2)] == [2, 2, 2, 4]


def test_what_longer_windows_showed_is_forgotten_with_them():
    controller = ZenAuto(start=8)
    drive(controller, 0.125, PERSISTENT)
    drive(controller, 2.0, PERSISTENT, first=201)
    assert controller.interval == 1
    assert [controller.ratio(age) is None for age in (1, 2, 8)] == [False, True, True]


def test_a_single_odd_step_moves_nothing():
    controller = ZenAuto(start=4, decay=0.0)
    drive(controller, 0.25, PERSISTENT)
    assert drive(controller, 0.01, NOISE, num_steps=1, first=201) == [4]
    assert set(drive(controller, 0.25, PERSISTENT, first=202)) == {4}


def test_s_follows_training_down_again():
    controller = ZenAuto()
    assert drive(controller, 0.125, PERSISTENT)[-1] == 8
    assert drive(controller, 0.5, PERSISTENT, first=201)[-1] <= 3


def test_bounds_hold_and_can_be_moved_in_mid_run():
    controller = ZenAuto(least=2, largest=6, start=2)
    assert drive(controller, 3.0, PERSISTENT)[-1] == 2
    assert drive(controller, 0.01, NOISE, first=201)[-1] == 6
    controller.set_bounds(1, 3)
    assert drive(controller, 0.01, NOISE, first=401)[0] == 3
    controller.set_bounds(5, 5)
    assert controller.interval == 5
    for least, largest in ((0, 3), (4, 3), (1, 7)):
        with pytest.raises(ConfigError, match="bounds of S must have"):
            controller.set_bounds(least, largest)


def test_without_deferred_columns_s_stays():
    controller = ZenAuto(start=3)
    for step in range(1, 50):
        report = a_report(step=step, update_interval=3, topk_ratio=1.0)
        assert controller.next_interval(report) == 3


def test_without_important_columns_windows_are_as_short_as_may_be():
    controller = ZenAuto(start=8, least=2)
    windows = tuple(WindowNorms(age, float(age), 0.0) for age in range(1, 9))
    for step in range(1, 30):
        report = a_report(
            step=step, update_interval=controller.interval, topk_ratio=0.0, windows=windows
        )
        controller.next_interval(report)
    assert controller.interval == 2


@pytest.mark.parametrize("values", [(0.0, 0.0), (math.nan, 1.0), (1.0, math.inf)])
def test_numbers_that_say_nothing_decide_nothing(values):
    controller = ZenAuto(start=3)
    for step in range(1, 50):
        windows = (WindowNorms(1, *values),)
        report = a_report(step=step, update_interval=3, topk_ratio=0.1, windows=windows)
        assert controller.next_interval(report) == 3


def test_a_state_goes_through_json_and_decides_the_same():
    controller, twin = ZenAuto(), ZenAuto()
    drive(controller, 0.11, 0.8, num_steps=23)
    twin.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert twin.state_dict() == controller.state_dict()
    rest = [drive(c, 0.11, 0.8, first=24) for c in (controller, twin)]
    assert rest[0] == rest[1]
    assert len(set(rest[0])) > 1
    with pytest.raises(CheckpointError, match="a state of ZenAuto has"):
        twin.load_state_dict({})


@pytest.mark.parametrize(
    "setting", [{"threshold": 0.0}, {"decay": 1.0}, {"start": 17}, {"least": 0}, {"warm_up": -1}]
)
def test_settings_that_make_no_sense_are_refused(setting):
    with pytest.raises(ConfigError):
        ZenAuto(**setting)


def decoder_losses(model, num_steps, vocab=64):
    """Yield losses on sequences of a random Markov chain."""
    generator = torch.Generator().manual_seed(3)
    table = torch.softmax(3 * torch.randn(vocab, vocab, generator=generator), dim=-1)
    for _ in range(num_steps):
        tokens = [torch.randint(vocab, (16,), generator=generator)]
        for _ in range(12):
            tokens.append(torch.multinomial(table[tokens[-1]], 1, generator=generator)[:, 0])
        batch = torch.stack(tokens, dim=1)
        logits = model(batch[:, :-1]).logits
        yield nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train_decoder(controller, *, num_steps=160, **knobs):
    """Return S at every step, the loss at the end, and the decisions."""
    torch.manual_seed(0)
    model = LanguageModel(
        DecoderConfig(
            vocab_size=64,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=96,
        )
    )
    config = ZenFlowConfig(
        update_interval=1, min_split_elements=16, select_interval=20, importance_decay=0.9, **knobs
    )
    optimizer = ZenFlowAdamW(
        model.parameters(),
        lr=3e-3,
        config=config,
        controller=controller,
        offload_gradients="release",
        max_grad_norm=1.0,
    )
    intervals, loss = [], 0.0
    with closing(optimizer):
        for drawn in decoder_losses(model, num_steps):
            drawn.backward()
            optimizer.step()
            intervals.append(optimizer.report.update_interval)
            loss = float(drawn.detach())
    return intervals, loss, optimizer.decision_log


@pytest.mark.parametrize(
    ("ratio", "rule"),
    [
        (0.05, "exact"),
        (0.1, "published"),
        *(pytest.param(*case, marks=pytest.mark.slow)
          for case in [(0.05, "published"), (0.1, "exact"), (0.3, "exact"), (0.3, "published")]),
    ],
)  # fmt: skip
def test_windows_are_short_early_in_training_and_longer_once_it_settles(ratio, rule):
    intervals, loss, _ = train_decoder(ZenAuto(), topk_ratio=ratio, update_rule=rule)
    assert max(intervals[:20]) <= 2
    assert min(intervals[-40:]) >= 4
    assert loss < 3.5  # of log(64) = 4.2 for a guess


def test_a_tuned_run_is_replayed_from_its_log():
    _, loss, log = train_decoder(ZenAuto(), num_steps=60, topk_ratio=0.1)
    replay = LoggedDecisions(log, largest_interval=ZenAuto().largest_interval)
    _, again, same = train_decoder(replay, num_steps=60, topk_ratio=0.1)
    assert (again, same) == (loss, log)
    assert len(log) >= 2
