"""From torch's AdamW to this optimizer in mid-run, and back."""

import copy

import pytest
import torch

from tests.models import (
    TINY,
    GivenGradients,
    OddShapes,
    TinyStack,
    assert_equal,
    closing,
    two_groups,
    weights_of,
)
from tests.reference import Reference
from tests.zenflow.runs import MODES
from zenflow import CheckpointError, ZenFlowAdamW, ZenFlowConfig

SHAPES = [(7, 12), (5,), (4, 9), (2, 3, 4), (6, 8)]
SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
RULES = {
    "between": {"topk_ratio": 0.3, "update_interval": 3, "select_interval": 4},
    "warm-up": {"topk_ratio": 0.3, "update_interval": 3, "full_warm_up_rounds": 7},
    "no overlap": {"topk_ratio": 0.3, "overlap_step": False},
    "only deferred": {"topk_ratio": 0.0},
    "only important": {"topk_ratio": 1.0},
}
rules = pytest.mark.parametrize("rule", RULES)


def config_of(rule):
    return ZenFlowConfig(block_elements=20, **TINY, **RULES[rule])


def take(model, optimizer, steps, absent=0.2):
    for step in steps:
        model.backward(model.draw_gradients(step, absent=absent))
        optimizer.step()
        optimizer.zero_grad()


def adamw(model, steps=(), **settings):
    optimizer = torch.optim.AdamW(model.parameters(), **{**SETTINGS, **settings})
    take(model, optimizer, steps)
    return optimizer


def truth(model, optimizer):
    with optimizer.true_weights():
        return weights_of(model)


def assert_close(model_weights, expected):
    for ours, theirs in zip(model_weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@rules
@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_from_adamw_to_zenflow_and_back(rule, mode):
    """Gradients that depend on no weight make the host's masters AdamW's, whatever the rule."""
    whole = GivenGradients(SHAPES)
    expected = adamw(whole)
    model = copy.deepcopy(whole)
    first = adamw(model, range(5))
    take(whole, expected, range(5))

    release = {"offload_gradients": mode}
    ours = ZenFlowAdamW(model.parameters(), config=config_of(rule), **release)
    with closing(ours):
        ours.load_state_dict(first.state_dict())
        assert ours.param_groups[0]["betas"] == SETTINGS["betas"]
        take(model, ours, range(5, 12))
        take(whole, expected, range(5, 12))
        assert_close(truth(model, ours), weights_of(whole))
        assert ours.report.step == 12
        back = ours.to_adamw_state_dict()
        ours.eval()

    last = torch.optim.AdamW(model.parameters(), lr=9.0)
    last.load_state_dict(back)
    take(model, last, range(12, 16))
    take(whole, expected, range(12, 16))
    assert_close(weights_of(model), weights_of(whole))


@rules
def test_a_state_that_is_only_taken_up_is_given_back_bit_for_bit(rule):
    model = OddShapes()
    groups = two_groups(model)
    torchs = torch.optim.AdamW(groups)
    for step in range(4):
        model.loss(step, idle=True).backward()
        torchs.step()
        torchs.zero_grad()
    with closing(ZenFlowAdamW(two_groups(model), config=config_of(rule))) as ours:
        ours.load_state_dict(torchs.state_dict())
        back = ours.to_adamw_state_dict()
    there = torchs.state_dict()
    assert back["state"].keys() == there["state"].keys()
    for index, state in there["state"].items():
        for name, value in state.items():
            assert torch.equal(back["state"][index][name], value), (index, name)
    for ours_group, group in zip(back["param_groups"], there["param_groups"], strict=True):
        assert {key: ours_group[key] for key in group} == group


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_the_models_weights_may_come_before_or_after(order):
    source = GivenGradients(SHAPES)
    state = adamw(source, range(3)).state_dict()
    model = GivenGradients(SHAPES, seed=5)
    with closing(ZenFlowAdamW(model.parameters(), config=config_of("between"))) as ours:
        take(model, ours, range(20, 25))  # a used one, with updates in flight
        if order == "model first":
            model.load_state_dict(source.state_dict())
            ours.load_state_dict(state)
        else:
            ours.load_state_dict(state)
            model.load_state_dict(source.state_dict())
        assert_equal(truth(model, ours), weights_of(source))
        take(model, ours, range(3, 6))
        expected = torch.optim.AdamW(source.parameters(), **SETTINGS)
        expected.load_state_dict(state)
        take(source, expected, range(3, 6))
        assert_close(truth(model, ours), weights_of(source))


def test_columns_are_chosen_by_adamws_second_moments():
    model = GivenGradients([(6, 10)])
    torchs = adamw(model, range(4))
    config = ZenFlowConfig(topk_ratio=0.3, block_elements=10_000, **TINY)
    with closing(ZenFlowAdamW(model.parameters(), config=config)) as ours:
        ours.load_state_dict(torchs.state_dict())
        chosen = ours.state_dict()["state"][0]["important_columns"]
    energies = torchs.state_dict()["state"][0]["exp_avg_sq"].sum(dim=0)
    assert chosen.tolist() == sorted(energies.topk(3).indices.tolist())


@pytest.mark.parametrize("is_used", [False, True], ids=["new", "used and clipped"])
@pytest.mark.parametrize("mode", MODES)
def test_weights_of_training_are_the_rules_with_adamws_moments(mode, is_used):
    """Also of an optimizer that has been used and has clipped, of which nothing stays."""
    first, last, max_norm = 5, 17, 0.3
    model = GivenGradients(SHAPES)
    config = ZenFlowConfig(
        topk_ratio=0.3, update_interval=3, select_interval=4, importance_decay=0.9,
        block_elements=20, **TINY,
    )  # fmt: skip
    reference = Reference([{"params": list(model.parameters()), **SETTINGS, "eps": 1e-8}], config)
    twin = GivenGradients(SHAPES)
    torchs = adamw(twin)
    take(twin, torchs, range(first), absent=0.0)
    for step in range(first):
        reference.step(twin.draw_gradients(step))
    release = {"offload_gradients": mode, "max_grad_norm": max_norm if mode == "release" else None}
    with closing(ZenFlowAdamW(model.parameters(), config=config, **release)) as ours:

        def step_of_ours(step, scale=1.0):
            model.backward([scale * grad for grad in model.draw_gradients(step)])
            if mode == "keep":
                ours.clip_grad_norm_(max_norm)
            ours.step()

        for step in range(50, 57) if is_used else ():
            step_of_ours(step, scale=7.0)
        model.load_state_dict(twin.state_dict())
        ours.load_state_dict(torchs.state_dict())
        take_up(reference, max_norm)
        for step in range(first, last):
            step_of_ours(step)
            reference.step(model.draw_gradients(step))
            assert_close(weights_of(model), reference.weights)


def take_up(reference, max_norm):
    """Let a reference that was fed from the start be as after taking up AdamW's state."""
    reference.max_norm, reference.clip = max_norm, 1.0
    for block in reference.blocks:
        beta2, steps = block.group["betas"][1], float(block.steps[0])
        block.score = block.exp_avg_sq.sum(dim=0) / (1 - beta2**steps)
        if block.is_split:
            chosen = block.score.argsort(descending=True, stable=True)[: block.count]
            block.important = torch.isin(torch.arange(len(block.score)), chosen)
        block.weight[:] = block.master
        block.n, block.start, block.land_step, block.pending = 0, reference.t, None, False
    reference.set_due_steps(reference.t, reference.rule.update_interval)


def test_windows_go_on_after_the_switch():
    model = TinyStack(num_layers=4)
    torchs = torch.optim.AdamW(model.parameters())
    for step in range(20):
        model.loss(step).backward()
        torchs.step()
        torchs.zero_grad()
    config = ZenFlowConfig(update_interval=3, block_elements=12, **TINY)
    with closing(ZenFlowAdamW(model.parameters(), config=config)) as ours:
        ours.load_state_dict(torchs.state_dict())
        moved = []
        for step in range(20, 28):
            model.loss(step).backward()
            ours.step()
            moved.append(ours.report.h2d_bytes)
        assert all(moved[1:])
        assert ours.report.staleness == 4  # S, and the lag


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_right_after_the_switch_resumes_bit_for_bit(mode):
    def run(interrupted):
        model = TinyStack(num_layers=4)
        torchs = torch.optim.AdamW(model.parameters(), **SETTINGS)
        for step in range(3):
            model.loss(step).backward()
            torchs.step()
            torchs.zero_grad()
        settings = {"config": config_of("between"), **MODES[mode]}
        ours = ZenFlowAdamW(model.parameters(), **settings)
        ours.load_state_dict(torchs.state_dict())
        if interrupted:
            saved = copy.deepcopy([model.state_dict(), ours.state_dict()])
            ours.close()
            model = TinyStack(num_layers=4, seed=9)
            ours = ZenFlowAdamW(model.parameters(), **settings)
            model.load_state_dict(saved[0])
            ours.load_state_dict(saved[1])
        with closing(ours):
            for step in range(3, 9):
                model.loss(step).backward()
                ours.step()
        return weights_of(model)

    assert_equal(run(True), run(False))


def test_low_precision_moments_are_taken_up():
    model = GivenGradients(SHAPES, dtype=torch.bfloat16)
    torchs = adamw(model, range(3))
    with closing(ZenFlowAdamW(model.parameters(), config=config_of("between"))) as ours:
        ours.load_state_dict(torchs.state_dict())
        back = ours.to_adamw_state_dict()["state"]
    for index, state in torchs.state_dict()["state"].items():
        assert torch.equal(back[index]["exp_avg"].to(torch.bfloat16), state["exp_avg"])


def test_an_unused_adamws_state_is_a_start():
    model, other = GivenGradients(SHAPES), GivenGradients(SHAPES)
    with (
        closing(ZenFlowAdamW(model.parameters(), config=config_of("between"))) as ours,
        closing(ZenFlowAdamW(other.parameters(), config=config_of("between"))) as expected,
    ):
        ours.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
        assert not ours.state_dict()["state"]
        take(model, ours, range(5))
        take(other, expected, range(5))
        assert_equal(truth(model, ours), truth(other, expected))


class Renamed(torch.optim.AdamW):
    """An AdamW that calls its moments something else."""

    def state_dict(self):
        state = super().state_dict()
        for entry in state["state"].values():
            entry["average"] = entry.pop("exp_avg")
        return state


FOREIGN = {
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "maximize": lambda p: torch.optim.AdamW(p, maximize=True),
    "coupled weight decay": lambda p: torch.optim.Adam(p, weight_decay=0.1),
    "without AdamW's settings": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "one without": torch.optim.RAdam,  # whose state looks like AdamW's
    "another optimizer": torch.optim.NAdam,
    "lacks exp_avg": Renamed,
}


@pytest.mark.parametrize("what", FOREIGN)
def test_another_optimizers_state_is_refused_and_changes_nothing(what):
    model = GivenGradients(SHAPES)
    other = FOREIGN[what](model.parameters())
    take(model, other, range(2), absent=0.0)
    with closing(ZenFlowAdamW(model.parameters(), config=config_of("between"))) as ours:
        take(model, ours, range(4))
        before = copy.deepcopy(ours.state_dict())
        with pytest.raises(CheckpointError, match=what):
            ours.load_state_dict(other.state_dict())
        assert_equal(tensors(ours.state_dict()), tensors(before))


def tensors(state):
    return [value for entry in state["state"].values() for value in entry.values()]


def test_another_models_state_is_refused():
    model = GivenGradients(SHAPES)
    torchs = adamw(GivenGradients([(7, 12), (5,), (4, 9), (2, 3, 4), (6, 9)]), range(1))
    with (
        closing(ZenFlowAdamW(model.parameters(), config=config_of("between"))) as ours,
        pytest.raises(CheckpointError, match=r"\(6, 9\) there and \(6, 8\) here"),
    ):
        ours.load_state_dict(torchs.state_dict())


def test_the_published_rule_has_no_state_for_adamw():
    model = GivenGradients(SHAPES)
    config = ZenFlowConfig(update_rule="published", **TINY)
    with closing(ZenFlowAdamW(model.parameters(), config=config)) as ours:
        take(model, ours, range(3))
        with pytest.raises(CheckpointError, match="published"):
            ours.to_adamw_state_dict()
