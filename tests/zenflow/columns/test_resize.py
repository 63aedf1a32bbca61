"""Changes of k in mid-run: what stays where it is, what is refused, and what repeats."""

import copy

import pytest
import torch
from torch import nn

from tests.models import TINY, OddShapes, TinyStack, assert_equal, closing, weights_of
from tests.zenflow.decisions import decisions
from tests.zenflow.surface.test_memory_plan import (
    bytes_since,
    live_storages,
    make_model,
    take_step,
)
from tests.zenflow.test_controller import Chooser
from tests.zenflow.test_resume import Run, config_of, uninterrupted
from zenflow import (
    CheckpointError,
    ConfigError,
    FixedInterval,
    LoggedDecisions,
    ZenFlowAdamW,
    ZenFlowConfig,
)
from zenflow.columns.upload_pool import UploadPool

CHANGES = {
    3: {"topk_ratio": 0.6},
    5: {"topk_ratio": 0.05, "update_interval": 2},
    9: {"select_interval": 3},
    10: {"topk_ratio": 0.45},
}


def controlled(changes=CHANGES, least=0.05):
    controller = Chooser(changes)
    controller.least_topk_ratio = least
    return controller


def train(controller, mode="keep", *, rule="exact", model=OddShapes, num_steps=14):
    """Return the weights after every step, the reports, and the optimizer's log."""
    model = model()
    settings = {"max_grad_norm": 0.3, "offload_gradients": mode} if mode == "release" else {}
    optimizer = ZenFlowAdamW(
        model.parameters(), lr=1e-2, config=config_of(rule), controller=controller, **settings
    )
    weights, reports = [], []
    with closing(optimizer):
        for step in range(num_steps):
            model.loss(step).backward()
            if mode == "keep":
                optimizer.clip_grad_norm_(0.3)
            optimizer.step()
            weights.append(weights_of(model))
            reports.append(optimizer.report)
    return weights, reports, optimizer.decision_log


@pytest.mark.parametrize(
    "rule", ["exact", "published", pytest.param("exact, q = 1", marks=pytest.mark.slow)]
)
def test_a_run_and_its_replay_in_the_other_mode_are_equal_bit_for_bit(rule):
    weights, _, log = train(controlled(), "keep", rule=rule)
    assert log == decisions(config_of(rule), sorted(CHANGES.items()))
    replayed, _, again = train(LoggedDecisions(log), "release", rule=rule)
    assert again == log
    for step, (ours, theirs) in enumerate(zip(replayed, weights, strict=True), start=1):
        assert_equal(ours, theirs, f"step {step}")


def test_columns_move_at_the_end_of_the_first_step_of_the_new_k():
    _, reports, _ = train(controlled())
    assert [r.topk_ratio for r in reports] == [0.3] * 4 + [0.6] * 2 + [0.05] * 5 + [0.45] * 3
    selecting = [r.step for r in reports if "select" in r.stalls]
    assert {4, 6, 11} <= set(selecting)


def test_every_block_has_its_number_of_columns_and_every_row_its_place():
    model = OddShapes()
    config = config_of("exact")
    optimizer = ZenFlowAdamW(model.parameters(), config=config, controller=controlled())
    with closing(optimizer):
        layout = optimizer._engine.layout
        slabs = {split.host.state.master.data_ptr() for split in layout.splits}
        numbers = set()
        for step in range(14):
            model.loss(step).backward()
            optimizer.step()
            for split in layout.splits:
                both = torch.cat([split.deferred_columns, split.important_columns])
                assert sorted(both.tolist()) == list(range(split.num_columns))
                assert split.columns.is_important.nonzero().squeeze(1).tolist() == sorted(
                    split.important_columns.tolist()
                )
                assert optimizer.state[split.param]["exp_avg"] is split.host.state.exp_avg
                rows = slice(split.bank_first, split.bank_last)
                shown = split.weight()[:, split.important_columns].t()
                assert torch.equal(split.bank.master[rows], shown)
            numbers.add(tuple(len(split.important_columns) for split in layout.splits))
        assert len(numbers) == 3
        assert {split.host.state.master.data_ptr() for split in layout.splits} == slabs


def test_memory_is_what_was_planned_at_every_k():
    model = make_model(torch.bfloat16)
    before = live_storages()
    changes = {2: {"topk_ratio": 0.5}, 5: {"topk_ratio": 0.02}, 8: {"topk_ratio": 0.1}}
    optimizer = ZenFlowAdamW(model.parameters(), controller=controlled(changes, least=0.02))
    with closing(optimizer):
        plans = [optimizer.memory]
        for step in range(40):
            take_step(model, optimizer, step)
            if optimizer.memory is not plans[-1]:
                plans.append(optimizer.memory)
        optimizer.synchronize()
        actual = bytes_since(before)
    assert len(plans) == 4
    assert plans[1].device_extra_bytes > 4 * plans[0].device_extra_bytes
    assert plans[0].pinned_bytes <= plans[2].pinned_bytes
    planned = plans[-1].host_bytes + plans[-1].device_extra_bytes
    assert actual <= 1.05 * (planned + plans[-1].device_ring_bytes)
    assert actual >= 0.85 * planned
    with closing(ZenFlowAdamW(model.parameters())) as fixed:
        # Room for k = 0.02 where a fixed k of 0.1 leaves a tenth to the device.
        rooms = plans[0].host_bytes / fixed.memory.host_bytes
    assert 1.05 < rooms < 1.11


def test_upload_buffers_are_planned_for_the_windows_in_force():
    """After decisions, resizings and a checkpoint of other knobs, with nobody told of them."""

    def planned():
        engine = optimizer._engine
        return UploadPool(engine.device, engine.config, engine.layout.blocks, engine.calendar, 1.0)

    model, capacities, states = OddShapes(), [], []
    optimizer = ZenFlowAdamW(
        model.parameters(), config=config_of("exact"), controller=controlled()
    )
    with closing(optimizer):
        for step in range(12):
            model.loss(step).backward()
            optimizer.step()
            capacities.append(optimizer._engine.uploads.capacity)
            assert capacities[-1] == planned().capacity
            states.append(copy.deepcopy(optimizer.state_dict()))
        for index in (4, 3):  # the same k, another S
            optimizer.load_state_dict(states[index])
            assert optimizer._engine.uploads.capacity == planned().capacity == capacities[index]
    assert capacities[4] != capacities[3]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_controller_can_not_ask_for_all_or_nothing(ratio):
    with pytest.raises(ConfigError, match=r"must stay between 0 and 1, got . after 0\.3"):
        train(controlled({3: {"topk_ratio": ratio}}))


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_run_that_starts_with_all_or_nothing_keeps_its_k(ratio):
    config = ZenFlowConfig(topk_ratio=ratio, **TINY)
    with pytest.raises(ConfigError, match="start above 0 and below 1"):
        ZenFlowAdamW(TinyStack().parameters(), config=config, controller=controlled())
    rule = "only important" if ratio else "only deferred"
    with pytest.raises(ConfigError, match="must stay between 0 and 1"):
        train(controlled({3: {"topk_ratio": 0.5}}, least=None), rule=rule)


def test_a_k_without_host_memory_is_refused():
    with pytest.raises(ConfigError, match=r"at least 0\.2, .*got 0\.1"):
        train(controlled({3: {"topk_ratio": 0.1}}, least=0.2))
    with pytest.raises(ConfigError, match=r"at least 0\.3, .*got 0\.1"):
        train(controlled({3: {"topk_ratio": 0.1}}, least=None))


def test_a_checkpoint_with_a_smaller_k_needs_memory_for_it():
    config, log = config_of("exact"), [(2, {"topk_ratio": 0.1})]
    _, saved = uninterrupted(6, saves=(5,), config=config, mode="keep", log=log)
    with closing(Run(config, "keep", log=[(2, {"topk_ratio": 0.5})])) as run:
        before = weights_of(run.model)
        with pytest.raises(CheckpointError, match=r"topk_ratio of 0\.1 .* least_topk_ratio"):
            run.optimizer.load_state_dict(saved[5][1])
        assert_equal(weights_of(run.model), before)


@pytest.mark.parametrize(
    "rule",
    ["no overlap", "published", pytest.param("published, no overlap", marks=pytest.mark.slow)],
)
def test_a_run_whose_k_changed_resumes_bit_for_bit_under_other_rules(rule):
    log = [(2, {"topk_ratio": 0.6}), (3, {"topk_ratio": 0.1}), (6, {"topk_ratio": 0.2})]
    settings = {"config": config_of(rule), "mode": "keep", "log": log, "dtype": torch.bfloat16}
    steps = (2, 3, 4, 5, 7)
    weights, saved = uninterrupted(saves=steps, **settings)
    for first in steps:
        with closing(Run(**settings, seed=7)) as run:
            run.load(saved[first])
            for step in range(first, len(weights)):
                assert_equal(run.step(step), weights[step], f"resumed at {first}, step {step}")


def test_going_back_to_a_checkpoint_goes_back_to_its_k():
    settings = {"config": config_of("exact"), "mode": "keep"}
    settings["log"] = [(3, {"topk_ratio": 0.6}), (7, {"topk_ratio": 0.1})]
    steps = (10, 5, 0, 7)
    weights, saved = uninterrupted(saves=steps, **settings)
    with closing(Run(**settings)) as run:
        for first in steps:
            run.load(saved[first])
            for step in range(first, len(weights)):
                assert_equal(run.step(step), weights[step], f"back to {first}, step {step}")


def test_a_controller_that_never_changes_k_costs_no_memory():
    model = nn.Linear(512, 512)
    plans = []
    for controller in (None, FixedInterval(4)):
        with closing(ZenFlowAdamW(model.parameters(), controller=controller)) as optimizer:
            plans.append(optimizer.memory)
    assert plans[0] == plans[1]
