"""A signal whose handler raises, or saves, finds every step whole."""

import copy
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import zenflow
from tests.models import assert_equal, closing, weights_of
from tests.zenflow.runs import MODES, make, take_steps
from zenflow.host import signals

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="signals are POSIX's")

ENGINE = str(Path(zenflow.__file__).parent)


class Lines:
    """Sends a signal to this process at one line of the engine, of those that run in a block."""

    def __init__(self, number=signal.SIGINT):
        self.number = number
        self.num_left = 0
        self.num_seen = 0
        self.place = None

    @contextmanager
    def sending(self, line):
        """Send it before the line of this index, counted from the block's begin."""
        self.num_left, self.num_seen, self.place = line + 1, 0, None
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)

    def _called(self, frame, event, argument):
        return self._passed if frame.f_code.co_filename.startswith(ENGINE) else None

    def _passed(self, frame, event, argument):
        if event == "line":
            self.num_seen += 1
            self.num_left -= 1
            if self.num_left == 0:
                self.place = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                signal.raise_signal(self.number)
        return self._passed


class Timeout(Exception):  # noqa: N818 - a program's own
    pass


def time_out(number, frame):
    raise Timeout


def leave(number, frame):
    sys.exit(143)


@contextmanager
def handled(number, handler):
    former = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, former)


NUM_STEPS = 40


def spread(count, of):
    """Return so many of the numbers below a limit, whatever the step: all kinds of places."""
    return [(7919 * index) % of for index in range(count)]


def num_lines(mode, call="step"):
    """Return how many lines of the engine a `step` runs, or a `backward`: the median of some.

    One that waits, on a busy machine, looks again and again whether its wait is over.
    """
    model, optimizer = make(mode)
    lines, found = Lines(), []
    with closing(optimizer):
        take_steps(model, optimizer, range(3))
        for step in range(3, 8):
            loss = model.loss(step)
            with lines.sending(10**9):
                loss.backward()
            if call == "step":
                with lines.sending(10**9):
                    optimizer.step()
            found.append(lines.num_seen)
            if call != "step":
                optimizer.step()
    return sorted(found)[len(found) // 2]


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize(
    ("number", "handler", "error"),
    [
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGALRM, time_out, Timeout),
        (signal.SIGTERM, leave, SystemExit),
    ],
)
def test_a_step_in_which_a_signal_comes_is_whole_or_not_begun(mode, number, handler, error):
    model, optimizer = make(mode)
    with closing(optimizer):
        take_steps(model, optimizer, range(NUM_STEPS))
        undisturbed = weights_of(model)
    model, optimizer = make(mode)
    lines, num_sent, num_raised = Lines(number), 0, 0
    with closing(optimizer), handled(number, handler):
        for step, line in enumerate(spread(NUM_STEPS, num_lines(mode))):
            model.loss(step).backward()
            with lines.sending(line):
                try:
                    optimizer.step()
                except error:
                    num_raised += 1
            num_sent += lines.place is not None  # not all steps have as many lines
            if optimizer._engine.step == step:
                optimizer.step()
            assert signal.getsignal(number) is handler, lines.place
        weights = weights_of(model)
    assert_equal(weights, undisturbed)
    assert num_raised == num_sent > NUM_STEPS / 2, "every signal is heard"


@pytest.mark.parametrize("mode", sorted(MODES))
def test_a_handler_that_saves_sees_no_half_step(mode):
    states = []

    def save(number, frame):
        states.append(copy.deepcopy([model.state_dict(), optimizer.state_dict()]))

    model, optimizer = make(mode)
    lines = Lines(signal.SIGUSR1)
    with closing(optimizer), handled(signal.SIGUSR1, save):
        take_steps(model, optimizer, range(3))
        # Before a step begins, a state can't be taken in release mode: gradients have left.
        total = num_lines(mode)
        for step, line in enumerate([total * n // 16 for n in range(3, 9)], start=3):
            model.loss(step).backward()
            with lines.sending(line):
                optimizer.step()
        undisturbed = weights_of(model)
    assert len(states) == 6
    for saved in states:
        model, optimizer = make(mode)
        with closing(optimizer):
            for part, state in zip((model, optimizer), saved, strict=True):
                part.load_state_dict(state)
            take_steps(model, optimizer, range(optimizer._engine.step, 9))
            assert_equal(weights_of(model), undisturbed)


class Broken(BaseException):
    pass


def break_off(*arguments):
    raise Broken


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=pytest.mark.slow if part % 2 else ()) for part in range(30)],
)
def test_backward_breaks_off_behind_the_gradient_in_which_a_signal_comes(part):
    """As if a hook of the user's, behind the optimizer's, had raised."""
    line = num_lines("release", "backward") * part // 32  # not all have as many lines
    lines = Lines(signal.SIGALRM)
    model, optimizer = make("release", wait_timeout=20.0)
    with closing(optimizer), handled(signal.SIGALRM, break_off):
        take_steps(model, optimizer, range(3))
        loss = model.loss(3)
        with lines.sending(line), pytest.raises(Broken):
            loss.backward()
        last = len(optimizer._source._left)
        optimizer.zero_grad()
        take_steps(model, optimizer, range(3, 8))
        weights = weights_of(model)

    model, optimizer = make("release")
    with closing(optimizer):
        take_steps(model, optimizer, range(3))
        if last:  # else it came before the first gradient was taken

            def count(param):
                last_left[0] -= 1
                if last_left[0] == 0:
                    raise Broken

            last_left = [last]
            hooks = [p.register_post_accumulate_grad_hook(count) for p in model.parameters()]
            with pytest.raises(Broken):
                model.loss(3).backward()
            for hook in hooks:
                hook.remove()
        optimizer.zero_grad()
        take_steps(model, optimizer, range(3, 8))
        assert_equal(weights, weights_of(model))


@pytest.mark.parametrize("mode", sorted(MODES))
def test_what_a_save_is_interrupted_in_applies_no_gradient_twice(mode):
    lines_of_interest = range(200, 300, 2)
    model, optimizer = make(mode)
    with closing(optimizer):
        take_steps(model, optimizer, range(len(lines_of_interest)))
        undisturbed = weights_of(model)
    model, optimizer = make(mode)
    lines = Lines()
    with closing(optimizer), handled(signal.SIGINT, signal.default_int_handler):
        for step, line in enumerate(lines_of_interest):
            take_steps(model, optimizer, [step])
            with lines.sending(line), pytest.raises(KeyboardInterrupt):
                optimizer.state_dict()
        assert_equal(weights_of(model), undisturbed)


def test_a_signal_that_comes_again_breaks_off_a_step_that_hangs(monkeypatch):
    model, optimizer = make("keep")
    now = [0.0]
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def hang(*arguments, **settings):
        for _ in range(9):
            now[0] += 0.5
            signal.raise_signal(signal.SIGINT)
        pytest.fail("nobody was heard")

    with closing(optimizer), handled(signal.SIGINT, signal.default_int_handler):
        take_steps(model, optimizer, range(2))
        model.loss(2).backward()
        monkeypatch.setattr(optimizer._engine, "finish_step", hang)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert now[0] == 2.0
        with pytest.raises(zenflow.WorkerError, match=r"broken off .* last checkpoint"):
            optimizer.step()
