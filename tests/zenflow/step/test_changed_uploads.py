"""Uploads of changed weights: after each step the device's weights are those of whole uploads."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import GivenGradients, closing, weights_of
from tests.zenflow.decisions import schedules
from tests.zenflow.host.test_kernel import own_backend, select  # noqa: F401
from tests.zenflow.test_reference import MODES, feed
from zenflow import Knobs, LoggedDecisions, ZenFlowAdamW, ZenFlowConfig
from zenflow.step.host.changed import ChangedUploads

SHAPES = [(130, 40), (64, 70), (5, 16), (70, 9)]
NUM_STEPS = 26


@dataclasses.dataclass
class Run:
    """A run on weights of two bytes whose learning rate steps over the limit and back."""

    config: ZenFlowConfig
    mode: str = "keep"
    dtype: torch.dtype = torch.bfloat16
    rates: tuple[float, ...] = (1e-6, 1e-5)
    """Learning rates in turn, seven steps each."""
    absent: float = 0.0
    host_threads: int = 2
    log: tuple[tuple[int, Knobs], ...] = ()
    evaluates: frozenset[int] = frozenset()
    drops: frozenset[int] = frozenset()
    """Steps before which a batch is dropped."""
    resumes: frozenset[int] = frozenset()
    """Steps after which another optimizer goes on from the state."""

    def optimizer(self, model):
        return ZenFlowAdamW(
            model.parameters(),
            lr=self.rates[0],
            config=self.config,
            controller=LoggedDecisions(self.log) if self.log else None,
            host_threads=self.host_threads,
            offload_gradients=self.mode,
        )

    def weights(self):
        """Yield the weights after each step, and the bytes that came up in it."""
        model = GivenGradients(SHAPES, self.dtype, 0)
        optimizer = self.optimizer(model)
        for step in range(1, NUM_STEPS + 1):
            optimizer.param_groups[0]["lr"] = self.rates[step // 7 % len(self.rates)]
            if step in self.drops:
                self._drop(model, optimizer, step)
            feed(model, optimizer, self._gradients(model, step), self.mode)
            yield weights_of(model), optimizer.report.h2d_bytes
            if step in self.evaluates:
                optimizer.eval()
                optimizer.train()
            if step in self.resumes:
                state = optimizer.state_dict()
                optimizer.close()
                optimizer = self.optimizer(model)
                optimizer.load_state_dict(state)
        optimizer.eval()
        yield weights_of(model), 0
        optimizer.close()

    def _gradients(self, model, step):
        return model.draw_gradients(step, 0, self.absent)

    def _drop(self, model, optimizer, step):
        gradients = self._gradients(model, 1000 + step)
        if self.mode == "release":
            model.backward(gradients)
        else:
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = g
        optimizer.zero_grad()


def pairs_of(run):
    """Yield (bytes, bytes of whole uploads) after each step, after comparing all weights."""
    with pytest.MonkeyPatch.context() as patch:
        noted = ChangedUploads.noted

        def whole(self, step, block, upload):
            self.forget([block])
            return noted(self, step, block, upload)

        patch.setattr(ChangedUploads, "noted", whole)
        expected = list(run.weights())
    for step, ((there, whole), (here, own)) in enumerate(
        zip(expected, run.weights(), strict=True), 1
    ):
        for place, (a, b) in enumerate(zip(there, here, strict=True)):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16)), (step, place)
        yield own, whole


@st.composite
def runs(draw):
    config = ZenFlowConfig(
        uploads="changed",
        topk_ratio=draw(st.sampled_from([0.0, 0.1, 0.5])),
        update_interval=draw(st.sampled_from([1, 2, 4, 16])),
        queue_depth=draw(st.sampled_from([None, 1, 4, 16])),
        select_interval=draw(st.sampled_from([0, 3, 10])),
        full_warm_up_rounds=draw(st.sampled_from([0, 0, 3])),
        host_state=draw(st.sampled_from(["float32", "compact"])),
        hysteresis=0.0,
        min_split_elements=1,
        block_elements=draw(st.none() | st.just(1500)),
    )
    if draw(st.booleans()):
        config = dataclasses.replace(config, gradient_link="e4m3", full_warm_up_rounds=0)
    steps = st.frozensets(st.integers(1, NUM_STEPS), max_size=2)
    return Run(
        config,
        mode=draw(MODES),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        rates=draw(st.sampled_from([(1e-6, 1e-5), (1e-6, 1e-2, 1e-5), (1e-5,), (1e-3, 1e-6)])),
        absent=draw(st.sampled_from([0.0, 0.3])),
        host_threads=draw(st.sampled_from([1, 2, 4])),
        log=tuple(draw(schedules(config, last=NUM_STEPS - 1))),
        evaluates=draw(steps),
        drops=draw(steps),
        resumes=draw(steps),
    )


@settings(max_examples=25, deadline=None)
@given(run=runs())
def test_weights_are_those_of_whole_uploads(run):
    for own, whole in pairs_of(run):
        assert own <= whole


@pytest.mark.parametrize("interval", [1, 4, 16])
@pytest.mark.parametrize("backend", ["c", "torch"])
@pytest.mark.parametrize("host_state", ["float32", "compact"])
def test_most_uploads_of_small_rates_are_of_changed_weights(
    monkeypatch, interval, backend, host_state
):
    select(monkeypatch, backend)
    config = ZenFlowConfig(
        uploads="changed", topk_ratio=0.1, update_interval=interval, queue_depth=16,
        host_state=host_state, min_split_elements=1, select_interval=0, block_elements=1500,
    )  # fmt: skip
    sent = list(pairs_of(Run(config, rates=(1e-6,))))[-interval - 1 : -1]
    share = sum(own for own, _ in sent) / sum(whole for _, whole in sent)
    assert 1 / 16 < share < 0.25
