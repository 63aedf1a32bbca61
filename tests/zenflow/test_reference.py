"""Between its limits the engine follows the update rule, as `tests/reference.py` states it."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factored_reference import FactoredReference
from tests.models import GivenGradients, closing, weights_of
from tests.published_reference import PublishedReference
from tests.reference import Reference
from tests.rounded_reference import RoundedReference
from tests.zenflow.decisions import decisions, schedules
from zenflow import Knobs, LoggedDecisions, ZenFlowAdamW, ZenFlowConfig
from zenflow.device.kernels import torch_kernels

SHAPES = [(7,), (), (6, 5), (3, 8), (1, 9), (9, 1), (4, 3, 2), (2, 2, 3, 2), (5, 16)]


@dataclasses.dataclass
class Scenario:
    """A run with given gradients: what the optimizer is made of, and what it is fed."""

    config: ZenFlowConfig
    shapes: list[tuple[int, ...]]
    num_steps: int = 14
    max_norm: float | None = None
    log: list[tuple[int, Knobs]] = dataclasses.field(default_factory=list)
    absent: float = 0.0
    seed: int = 0
    host_threads: int | None = None
    schedules: bool = False
    """Whether rates and betas change from step to step."""

    def model(self, dtype=torch.float32):
        return GivenGradients(self.shapes, dtype, self.seed)

    def groups(self, model):
        """Return two groups with settings of their own, in the order of the parameters."""
        cut, params = len(self.shapes) // 2, list(model.parameters())
        first = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        second = {"lr": 3e-3, "betas": (0.7, 0.99), "eps": 1e-6, "weight_decay": 0.0}
        groups = [{"params": params[:cut], **first}, {"params": params[cut:], **second}]
        return [group for group in groups if group["params"]]

    def schedule(self, groups, step):
        """Set what holds in a step, before its backward."""
        if self.schedules:
            for index, group in enumerate(groups):
                group["lr"] = 1e-2 / (1 + (step + index) % 4)
                group["betas"] = (0.9 - 0.1 * (step % 3), 0.95 + 0.04 * (step % 2))

    def optimizer(self, model, mode, **settings):
        if mode == "release":
            settings |= {"offload_gradients": mode, "max_grad_norm": self.max_norm}
        return ZenFlowAdamW(
            self.groups(model),
            config=self.config,
            controller=LoggedDecisions(self.log) if self.log else None,
            host_threads=self.host_threads,
            **settings,
        )

    def reference(self, model):
        return reference_of(self.groups(model), self.config, self.max_norm, self.log)


def reference_of(groups, config, max_norm=None, log=()):
    """Return the reference of the configuration's rule."""
    kind = RoundedReference if config.rounds_gradients else Reference
    kind = FactoredReference if config.is_factored else kind
    kind = kind if config.is_exact else PublishedReference
    return kind(groups, config, max_norm, log)


@st.composite
def configs(draw, **fixed):
    """Draw a configuration for matrices of at most some dozens of elements."""
    values = {
        "topk_ratio": draw(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.8, 1.0])),
        "update_interval": draw(st.integers(1, 6)),
        "overlap_step": draw(st.sampled_from([True, True, False])),
        "update_rule": draw(st.sampled_from(["exact", "exact", "exact", "published"])),
        "forward_delay": draw(st.sampled_from([True, True, False])),
        "queue_depth": draw(st.none() | st.integers(1, 6)),
        "select_interval": draw(st.integers(0, 6)),
        "full_warm_up_rounds": draw(st.sampled_from([0, 0, 1, 3])),
        "importance_decay": draw(st.sampled_from([0.0, 0.5, 0.9])),
        "hysteresis": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "min_split_elements": draw(st.sampled_from([1, 10, 25])),
        "block_elements": draw(st.none() | st.integers(1, 40)),
    }
    return ZenFlowConfig(**(values | fixed))


@st.composite
def scenarios(draw):
    """Draw a run of any shape under a drawn configuration; knobs may change on the way."""
    config = draw(configs())
    return Scenario(
        config=config,
        shapes=draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4)),
        max_norm=draw(st.sampled_from([None, 0.3, 5.0, 1e6])),
        log=draw(schedules(config, last=13)),
        absent=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.integers(0, 10**6)),
        host_threads=draw(st.sampled_from([None, 1, 2])),
        schedules=draw(st.booleans()),
    )


def true_weights(reference):
    """Return the masters, rounded to the model's dtype: what evaluation must see."""
    pairs = zip(reference.weights, reference.runs, strict=True)
    return [torch.cat([b.master for b in run], dim=1).view(w.shape).to(w) for w, run in pairs]


def feed(model, optimizer, grads, mode, max_norm=None):
    """Take one step with given gradients: set by hand in keep mode, by a backward in release."""
    if mode == "release":
        model.backward(grads)
    else:
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = None if g is None else g.clone()
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
    optimizer.step()


def run_engine(scenario, mode, dtype=torch.float32, device="cpu"):
    """Yield after every step the engine's weights, then those under `eval()`."""
    model = scenario.model(dtype).to(device)
    with closing(scenario.optimizer(model, mode)) as optimizer:
        for step in range(1, scenario.num_steps + 1):
            grads = model.draw_gradients(step, scenario.seed, scenario.absent)
            scenario.schedule(optimizer.param_groups, step)
            feed(model, optimizer, grads, mode, scenario.max_norm)
            yield weights_of(model)
        optimizer.eval()
        yield weights_of(model)


def run_reference(scenario, dtype=torch.float32):
    """Yield what `run_engine` must."""
    model = scenario.model(dtype)
    reference = scenario.reference(model)
    for step in range(1, scenario.num_steps + 1):
        scenario.schedule(reference.groups, step)
        reference.step(model.draw_gradients(step, scenario.seed, scenario.absent))
        yield [w.clone() for w in reference.weights]
    yield true_weights(reference)


def assert_near(actual, expected, step):
    """Compare float32 weights; a step moves them by about a hundredth of their size."""
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        bound = 2e-6 * max(1.0, float(b.abs().max()))
        error = float((a - b).abs().max())
        assert error <= bound, f"parameter {i} {tuple(a.shape)} after step {step}: {error:.3g}"


def assert_rounded_alike(actual, expected, step):
    """Compare bfloat16 weights: few may be rounded the other way, none by more than that."""
    different = total = 0
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == b.dtype == torch.bfloat16
        near = torch.isclose(a.float(), b.float(), rtol=2**-7, atol=1e-6)
        assert near.all(), f"parameter {i} {tuple(a.shape)} after step {step}"
        different, total = different + int((a != b).sum()), total + a.numel()
    assert different <= max(2, 0.02 * total), f"step {step}: {different} of {total} differ"


def check_scenario(scenario, mode, dtype=torch.float32, device="cpu"):
    """Compare engine and reference after every step, and under `eval()` at the end."""
    compare = assert_near if dtype == torch.float32 else assert_rounded_alike
    engine = run_engine(scenario, mode, dtype, device)
    expected = run_reference(scenario, dtype)
    for step, (ours, theirs) in enumerate(zip(engine, expected, strict=True), start=1):
        compare(ours, theirs, "eval" if step > scenario.num_steps else step)


MODES = st.sampled_from(["keep", "release"])


@settings(max_examples=30, deadline=None)
@given(mode=MODES, scenario=scenarios())
def test_float32_weights_follow_the_reference_step_for_step(mode, scenario):
    check_scenario(scenario, mode)


@pytest.mark.parametrize("rule", ["exact", "published"])
def test_columns_come_to_a_host_that_had_none(rule):
    """Rounding to whole columns may leave a block's host without one until k is smaller."""
    log = [(1, Knobs(topk_ratio=0.05, update_interval=1, select_interval=0))]
    config = ZenFlowConfig(
        topk_ratio=0.8, update_interval=1, select_interval=0, update_rule=rule,
        min_split_elements=1, block_elements=4, hysteresis=0.0,
    )  # fmt: skip
    check_scenario(Scenario(config, [(3, 8)], 6, log=log), "keep")


@settings(max_examples=12, deadline=None)
@given(mode=MODES, scenario=scenarios())
def test_bfloat16_weights_are_the_references_up_to_rounding(mode, scenario):
    check_scenario(scenario, mode, torch.bfloat16)


@settings(max_examples=6, deadline=None)
@given(config=configs(block_elements=None, min_split_elements=1), seed=st.integers(0, 99))
def test_automatic_blocks_follow_the_reference(config, seed):
    check_scenario(Scenario(config, [(3, 200), (130, 2), (2, 64)], 10, seed=seed), "release")


@pytest.mark.parametrize("mode", ["keep", "release"])
def test_a_matrix_that_is_moved_in_pieces_follows_the_reference(mode, monkeypatch):
    """As those of millions of elements are, each piece by the factors of its own rows."""
    monkeypatch.setattr(torch_kernels, "FRESH_ELEMENTS", 20)
    config = ZenFlowConfig(
        topk_ratio=0.25, update_interval=4, min_split_elements=1, block_elements=30
    )
    check_scenario(Scenario(config, [(9, 8), (7, 3), (5, 24)], max_norm=0.3), mode)


def sign_config(**changes):
    """Return a configuration whose arithmetic a reader can do, with `SIGN_STEPS` as settings."""
    plain = {"min_split_elements": 1, "importance_decay": 0.0, "hysteresis": 0.0}
    return ZenFlowConfig(**(plain | changes))


SIGN_STEPS = {"lr": 1.0, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}
"""Adam without memory moves a weight by lr times the sign of its mean gradient."""
MOMENTUM = SIGN_STEPS | {"betas": (0.5, 0.0)}
"""Under a steady gradient each step moves a weight by 1, of which the newest gradient has half."""

DELAY = 9 / 98
"""That of two forwards with beta1 = 1/2: 3/2 (4 - 1) / (3 + 2 + 2)^2."""
LAST = 1 - DELAY
"""Part of the last step that forwards see."""

BY_HAND = {
    # The window ends in steps 1, 3, 5; AdamW's weights are -1, -2, -3. In step t + i a gradient of
    # step t moves the weights by 2^-(i + 1) / (1 - 2^-(t + i)), and a displacement of step t goes
    # on by 2^-i (1 - 2^-t) / (1 - 2^-(t + i)). Two forwards see the first of these motions, the
    # second one that and the next; of the last one each sees a part.
    "lead and fresh steps": (
        sign_config(topk_ratio=0.0, update_interval=2), MOMENTUM, [], [(1,)] * 5,
        [(-LAST,),
         (-1 - (LAST / 3 + 1 / 3 + LAST / 7) / 2 - (LAST * 2 / 3 + 2 / 3 + LAST * 2 / 7) / 2,),
         (-1 - (LAST / 3 + 1 / 3 + LAST / 7) / 2 - (LAST * 2 / 3 + 2 / 3 + LAST * 2 / 7) / 2
          - LAST * 4 / 7,),
         (-3 - (LAST * 7 / 15 + 7 / 15 + LAST * 7 / 31) / 2
          - (LAST * 8 / 15 + 8 / 15 + LAST * 8 / 31) / 2,),
         (-3 - (LAST * 7 / 15 + 7 / 15 + LAST * 7 / 31) / 2
          - (LAST * 8 / 15 + 8 / 15 + LAST * 8 / 31) / 2 - LAST * 16 / 31,)],
    ),
    # Without overlap an upload lands in its own step: its first forward sees what was there a
    # part of a step before, the second one a part of the next step.
    "no overlap": (
        sign_config(topk_ratio=0.0, update_interval=2, overlap_step=False), MOMENTUM, [],
        [(1,)] * 4,
        [(-1 - (-DELAY + LAST / 3) / 2,), (-1 - (-DELAY + LAST / 3) / 2 - LAST * 2 / 3,),
         (-3 - (-DELAY + LAST * 7 / 15) / 2,),
         (-3 - (-DELAY + LAST * 7 / 15) / 2 - LAST * 8 / 15,)],
    ),
    # Without momentum every gradient has done all it does in its own step: AdamW's weights.
    "no momentum": (
        sign_config(topk_ratio=0.5, update_interval=3, select_interval=2), SIGN_STEPS, [],
        [(1, 2), (-1, 3), (1, -1), (4, 1)], [(-1, -1), (0, -2), (-1, -1), (-2, -2)],
    ),
    # The paper's rule: an update lands a window after it started. S = 3 from step 6 on: the
    # window open since step 4 ends at 7; what started in 4 still lands in 6.
    "published windows, then longer ones": (
        sign_config(topk_ratio=0.0, update_interval=2, update_rule="published"), SIGN_STEPS,
        [(5, {"update_interval": 3})], [(1, 1)] * 10,
        [(a, a) for a in (0, 0, 0, -1, -1, -2, -2, -2, -2, -3)],
    ),
    # Half of two columns important. Selection is asked for in steps 1 and 4, and happens in 2 and
    # 4: column 1 leaves the host with the step of its window (mean 2.5), then column 0 with that
    # of its own (1 - 4 < 0). What window 6 does lands in 8.
    "published selection": (
        sign_config(topk_ratio=0.5, update_interval=2, update_rule="published",
                    select_interval=3),
        SIGN_STEPS, [], [(1, 2), (1, 3), (1, 1), (-4, 1), (1, 1), (1, 1), (1, 1), (1, 1)],
        [(-1, 0), (-2, -1), (-2, -2), (-1, -3), (-2, -3), (-3, -3), (-4, -3), (-5, -4)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_the_reference_and_the_engine_do_what_was_computed_by_hand(case):
    config, settings, log, grads, expected = BY_HAND[case]
    model = GivenGradients([(1, len(grads[0]))], scale=0.0)
    groups = [{"params": list(model.parameters()), **settings}]
    log = decisions(config, log)
    reference = reference_of(groups, config, log=log)
    optimizer = ZenFlowAdamW(groups, config=config, controller=LoggedDecisions(log))
    with closing(optimizer):
        for grad, weight in zip(grads, expected, strict=True):
            grad_IO = [torch.tensor([grad], dtype=torch.float32)]
            reference.step(grad_IO)
            assert reference.weights[0].tolist() == [pytest.approx(weight, abs=1e-6)]
            feed(model, optimizer, grad_IO, "keep")
            assert model.weights[0].tolist() == [pytest.approx(weight, abs=1e-6)]


def test_a_norm_of_all_gradients_scales_each_of_them():
    grads = [torch.full((2, 2), 3.0), torch.full((4,), 4.0)]
    model = GivenGradients([(2, 2), (4,)], scale=0.0)
    config = sign_config(topk_ratio=0.0, update_interval=1, overlap_step=False)
    # betas of 0 and a huge eps: a weight moves by its clipped gradient, to float32's precision.
    linear = {"lr": 2.0**40, "betas": (0.0, 0.0), "eps": 2.0**40, "weight_decay": 0.0}
    with closing(ZenFlowAdamW(model.parameters(), config=config, **linear)) as optimizer:
        feed(model, optimizer, grads, "keep", max_norm=1.0)
    norm = math.sqrt(4 * 9 + 4 * 16)
    assert model.weights[0].flatten().tolist() == pytest.approx([-3 / norm] * 4)
    assert model.weights[1].tolist() == pytest.approx([-4 / norm] * 4)
