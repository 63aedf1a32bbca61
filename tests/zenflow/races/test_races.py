"""No access to memory without an order, whatever the engine does; see the package's docstring."""

import io

import pytest
import torch

from tests.interpreted import needs_triton
from tests.models import TinyStack, closing
from tests.zenflow.races.harness import Training, checked, races
from tests.zenflow.step.test_timing import RULES
from zenflow.host import kernel
from zenflow.rule import sizes
from zenflow.step.host.changed import ChangedUploads

MODES = ("release", "keep")
both_modes = pytest.mark.parametrize("mode", MODES)
keep_slowly = pytest.mark.parametrize(
    "mode", ["release", pytest.param("keep", marks=pytest.mark.slow)]
)
"""For what both modes do in the same way."""
S2, S3 = {"update_interval": 2}, {"update_interval": 3, "select_interval": 2}


def rules():
    """Yield each rule in release mode, which does most; in keep mode a few, the others slowly."""
    for place, rule in enumerate(RULES):
        yield "release", rule
        yield pytest.param("keep", rule, marks=[pytest.mark.slow] if place % 3 else [])


@pytest.mark.parametrize(("mode", "rule"), [*rules()])
def test_a_rule(mode, rule):
    assert races(mode, RULES[rule], steps=8) == []


@keep_slowly
def test_the_fallback_in_torch(mode, monkeypatch):
    monkeypatch.setattr(kernel, "c_library", lambda: None)
    monkeypatch.setattr("zenflow.host.pool.c_library", lambda: None)
    assert races(mode, S3, steps=5) == []


@pytest.mark.parametrize("num_bytes", [1, 700])
def test_a_ring_that_is_full_now_and_then(num_bytes, monkeypatch):
    monkeypatch.setattr(sizes, "RING_BYTES", num_bytes)
    assert races("release", S2, steps=8) == []


@needs_triton
@keep_slowly
@pytest.mark.parametrize("rule", ["S 3", "published"])
def test_tritons_kernels(mode, rule):
    assert races(mode, RULES[rule], steps=6, kernels="triton") == []


@needs_triton
def test_tritons_kernels_where_the_ring_cuts_matrices(monkeypatch):
    """A piece's kernel must not write to columns of the piece before, whose update lands."""
    monkeypatch.setattr(sizes, "RING_BYTES", 1)
    assert races("release", S2, steps=6, kernels="triton") == []


@keep_slowly
def test_bfloat16_weights(mode):
    assert races(mode, S2, steps=6, model=TinyStack(num_layers=3, dtype=torch.bfloat16)) == []


def calm(training, step):
    """Let the learning rate be so small that windows are still, but for one window."""
    for group in training.optimizer.param_groups:
        group["lr"] = 1e-2 if step == 4 else 1e-5


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=needs_triton)])
@keep_slowly
def test_changed_weights(mode, kernels, monkeypatch):
    """They come up without a race, and are those of whole uploads."""
    noted, runs, sent = ChangedUploads.noted, [], []

    def whole(self, step, block, upload):
        self.forget([block])
        return noted(self, step, block, upload)

    def keep(training, step):
        calm(training, step)
        training.optimizer.synchronize()
        runs[-1].append([p.detach().clone() for p in training.model.parameters()])
        sent[-1] += training.optimizer.report.h2d_bytes if step > 1 else 0

    for way in (whole, noted):
        monkeypatch.setattr(ChangedUploads, "noted", way)
        runs.append([])
        sent.append(0)
        model = TinyStack(num_layers=3, dtype=torch.bfloat16)
        rule = {"update_interval": 1, "uploads": "changed"}
        assert races(mode, rule, then=keep, steps=7, model=model, kernels=kernels) == []
    for step, pair in enumerate(zip(*runs, strict=True), 1):
        assert all(torch.equal(*both) for both in zip(*pair, strict=True)), step
    assert sent[1] < 0.9 * sent[0]


def look(training, step):
    """See the true weights, now and then."""
    if step % 3 == 1:
        training.optimizer.eval()
        training.loss(step)
        training.optimizer.train()


@keep_slowly
def test_true_weights_in_between(mode):
    assert races(mode, S2, then=look, steps=8) == []


KNOBS = [
    (3, {"topk_ratio": 0.6}),
    (6, {"topk_ratio": 0.2, "update_interval": 3}),
    (9, {"update_interval": 1, "select_interval": 2}),
]


@both_modes
def test_changes_of_the_knobs(mode):
    assert races(mode, S2, log=KNOBS, steps=11) == []


def drop(training, step):
    """Let some batches be computed in vain."""
    if step % 3 == 2:
        training.backward(step)
        training.optimizer.zero_grad()


@both_modes
def test_batches_that_are_dropped(mode):
    assert races(mode, S3, then=drop, steps=9) == []


@both_modes
def test_gradients_in_one_buffer_that_every_backward_overwrites(mode):
    assert races(mode, S2, views=True, steps=6) == []


def drop_some(training, step):
    """Take a step without gradients that have left already."""
    training.backward(100 + step)
    for param in list(training.model.parameters())[step % 3 :: 3]:
        param.grad = None
    training.optimizer.step()


@both_modes
def test_steps_without_some_gradients_that_have_left(mode):
    assert races(mode, S3, then=drop_some, steps=6) == []


def test_gradients_that_the_program_writes_again_behind_the_step():
    assert races("keep", S2, rewrites=True, steps=6) == []


def save_and_load(training, step):
    """Go on from a state that was saved, in mid-window."""
    if step == 5:
        saved = io.BytesIO()
        torch.save(training.optimizer.state_dict(), saved)
        saved.seek(0)
        training.optimizer.load_state_dict(torch.load(saved, weights_only=False))


@keep_slowly
def test_resuming(mode):
    assert races(mode, S3, then=save_and_load, steps=9) == []


def waits_of(mode, *, num_layers=3, steps=13, **changes):
    """Return the operations for which a thread waits in each of the last six steps."""
    config = {"update_interval": 3, "select_interval": 0, **changes}
    found = []
    with checked() as checker:
        training = Training(checker, mode, config, model=TinyStack(num_layers=num_layers))
        with closing(training.optimizer):
            for step in range(1, steps + 1):
                checker.waits.clear()
                training.step(step)
                found.append(list(checker.waits))
    return found[-6:]


@both_modes
@pytest.mark.parametrize("rule", ["exact", "published"])
def test_no_step_waits_for_the_device_by_an_operation(mode, rule):
    assert not any(waits_of(mode, update_rule=rule))


@keep_slowly
def test_a_selection_waits_as_often_for_many_blocks_as_for_few(mode):
    often = {"steps": 8, "update_interval": 1, "select_interval": 1}
    few, many = (max(map(len, waits_of(mode, num_layers=n, **often))) for n in (2, 5))
    assert few == many > 0
