"""Uploads of changed weights: after each step the device's weights are those of whole uploads."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import GivenGradients, closing, weights_of
from tests.zenflow.decisions import schedules
from tests.zenflow.host.test_kernel import own_backend, select  # noqa: F401
from tests.zenflow.test_reference import MODES, feed
from zenflow import ConfigError, Knobs, LoggedDecisions, ZenFlowAdamW, ZenFlowConfig
from zenflow.host_state import mark_bytes
from zenflow.step.host import rules
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
    num_steps: int = NUM_STEPS

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
        for step in range(1, self.num_steps + 1):
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
        forward_delay=draw(st.booleans()),
        second_moment=draw(st.sampled_from(["element", "element", "factored"])),
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


@settings(max_examples=8, deadline=None)
@given(run=runs())
def test_weights_are_those_of_whole_uploads(run):
    for own, whole in pairs_of(run):
        assert own <= whole


def config_of(**changes):
    return ZenFlowConfig(
        **{
            **{"uploads": "changed", "queue_depth": 16, "min_split_elements": 1},
            **{"block_elements": 1500, "hysteresis": 0.0, "select_interval": 0, **changes},
        }
    )


SMALL = (1e-6,)
CASES = {
    "columns move": Run(config_of(select_interval=3, topk_ratio=0.5), rates=SMALL),
    "columns move in a window without a gradient": Run(
        config_of(select_interval=2, topk_ratio=0.5, update_interval=1), rates=SMALL, absent=0.6
    ),
    "k and S change": Run(
        config_of(topk_ratio=0.25),
        rates=SMALL,
        log=(
            (9, Knobs(topk_ratio=0.5, update_interval=2, select_interval=0)),
            (17, Knobs(topk_ratio=0.1, update_interval=5, select_interval=4)),
        ),
    ),
    "rates step over the limit": Run(config_of(), rates=(1e-6, 1e-2)),
    "batches are dropped": Run(
        config_of(), rates=(1e-6, 1e-3), mode="release", drops=frozenset({10, 12, 19})
    ),
    "passes before the window's end": Run(config_of(queue_depth=2), rates=SMALL),
    "a window is interrupted": Run(
        config_of(host_state="compact"),
        rates=SMALL,
        evaluates=frozenset({9, 14}),
        resumes=frozenset({6, 18}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_whole_uploads_where(name):
    for own, whole in pairs_of(CASES[name]):
        assert own <= whole


def test_a_run_goes_on_bit_for_bit_from_a_state():
    """Windows of the rest are still where they were, whatever the rate is when it goes on."""
    run = Run(config_of(), rates=(1e-6, 1e-2, 1e-6))
    whole = list(run.weights())
    for step in (6, 7, 8, 14, 20):
        again = list(dataclasses.replace(run, resumes=frozenset({step})).weights())
        for (one, _), (other, _) in zip(whole, again, strict=True):
            assert all(map(torch.equal, one, other)), step


@pytest.mark.parametrize("interval", [1, 4, 16])
@pytest.mark.parametrize("backend", ["c", "torch"])
@pytest.mark.parametrize("host_state", ["float32", "compact"])
def test_most_uploads_of_small_rates_are_of_changed_weights(
    monkeypatch, interval, backend, host_state
):
    select(monkeypatch, backend)
    monkeypatch.setattr(rules, "pool_bytes", lambda size, depth: 2 * size * depth)  # room for all
    config = config_of(update_interval=interval, host_state=host_state)
    run = Run(config, rates=SMALL, num_steps=10 + 2 * interval)
    sent = list(pairs_of(run))[-interval - 1 : -1]
    share = sum(own for own, _ in sent) / sum(whole for _, whole in sent)
    assert 1 / 16 < share < 0.25


def test_bytes_are_those_of_marks_and_changed_values():
    config = config_of(topk_ratio=0.0, update_interval=1)
    run = Run(config, rates=SMALL, num_steps=7)
    weights, sent = zip(*run.weights(), strict=True)
    for step in range(2, run.num_steps):  # in step 2 all weights land, by the first upload
        pairs = zip(weights[step - 1], weights[step], strict=True)
        found = sum(2 * int((a != b).sum()) + b.shape[1] * mark_bytes(len(b)) for a, b in pairs)
        assert sent[step] == found, step


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"update_rule": "published"}, "update_rule must be 'exact'"),
        ({"overlap_step": False}, "overlap_step must be True"),
        ({"uploads": "some"}, "uploads must be one of all, changed"),
    ],
)
def test_settings_without_late_uploads_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        ZenFlowConfig(**{"uploads": "changed", **changes})


def test_weights_of_four_bytes_are_refused():
    model = GivenGradients(SHAPES, torch.float32, 0)
    with pytest.raises(ValueError, match="float32 change in every step: load the model in bf"):
        ZenFlowAdamW(model.parameters(), config=config_of())


def test_states_on_a_drive_are_refused(tmp_path):
    model = GivenGradients(SHAPES, torch.bfloat16, 0)
    with pytest.raises(ValueError, match='uploads="changed": states on a drive'):
        ZenFlowAdamW(model.parameters(), config=config_of(topk_ratio=0.0), state_dir=tmp_path)


def test_an_optimizer_that_goes_back_to_a_state_forgets_its_last_uploads():
    run = Run(config_of(update_interval=1), rates=SMALL)
    model = GivenGradients(SHAPES, torch.bfloat16, 0)
    found = []
    with closing(run.optimizer(model)) as optimizer:
        for step in (1, 2, 3, 4, 5, 6):
            optimizer.param_groups[0]["lr"] = 4e-4 * 2**-step
            feed(model, optimizer, model.draw_gradients(step, 0, 0.0), "keep")
            if step == 3:
                state = copy.deepcopy(optimizer.state_dict())
        found.append(weights_of(model))
        optimizer.load_state_dict(state)
        for step in (4, 5, 6):
            optimizer.param_groups[0]["lr"] = 4e-4 * 2**-step
            feed(model, optimizer, model.draw_gradients(step, 0, 0.0), "keep")
        found.append(weights_of(model))
    assert all(map(torch.equal, *found))
