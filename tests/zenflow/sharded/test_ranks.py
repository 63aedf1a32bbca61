"""Ranks that share the rows of a model under FSDP2 train as one process does."""

import re
import signal

import pytest
import torch
from torch import nn

from tests.models import assert_equal, closing, relative_difference, weights_of
from tests.zenflow.sharded.conftest import Ranks
from tests.zenflow.sharded.runs import (
    DELAYED,
    DROPPING,
    LAST,
    SAVED,
    SAVED_AT,
    SCENARIOS,
    TRAINED,
    Uneven,
    alone,
    columns_of,
    dropping_alone,
    load,
    optimizer_of,
    take_steps,
)
from zenflow import ZenFlowAdamW, ZenFlowConfig

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.timeout(600),
]
ROUNDING = 1e-6
"""Largest difference of weights that comes of adding up in another order, of the largest."""


def check_as_one_process(found, name):
    weights, columns = alone(SCENARIOS[name])
    for rank in found:
        assert relative_difference(rank["weights"], weights) < ROUNDING
        assert_equal(rank["columns"], columns, "important columns")
    for rank in found[1:]:
        assert_equal(rank["weights"], found[0]["weights"])


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_train_as_one_process(name, two):
    check_as_one_process([rank["train"][name] for rank in two], name)


@pytest.mark.parametrize("name", DELAYED)
def test_weights_do_not_depend_on_what_is_late_on_which_rank(name, two):
    for rank in two:
        assert_equal(rank["delay"][name], rank["train"][name]["weights"])


def test_all_columns_on_the_device_is_torchs_adamw_under_fsdp2(two):
    for rank in two:
        assert relative_difference(rank["adamw"]["ours"], rank["adamw"]["torch's"]) < ROUNDING


def test_an_overflow_in_one_ranks_rows_is_skipped_by_all(two):
    for rank in two:
        (_, first), (scale, second), (_, third) = rank["overflow"]
        assert scale == 1.0, "the scaler halves it"
        assert torch.equal(second, first)
        assert not torch.equal(third, second)
        assert torch.equal(third, two[0]["overflow"][-1][1])


@pytest.mark.parametrize("name", DROPPING)
def test_batches_that_are_dropped_leave_the_weights_that_one_process_has(name, two):
    alone = dropping_alone(DROPPING[name])
    for rank in two:
        assert relative_difference(rank["drop"][name], alone) < ROUNDING
        assert_equal(rank["drop"][name], two[0]["drop"][name])


@pytest.mark.parametrize("name", SAVED)
def test_as_many_ranks_resume_bit_for_bit(name, two):
    for rank in two:
        assert_equal(rank["load"][name][0], rank["save"][name][0])


def test_saving_in_the_background_holds_what_was_when_it_began(two):
    for rank in two:
        first, resumed = rank["save behind"]
        assert_equal(resumed, first)


@pytest.mark.parametrize("name", SAVED)
def test_one_process_goes_on_from_what_two_ranks_saved(name, two, folder_of_two):
    check_resumed(name, folder_of_two / name, two[0]["save"][name])


def check_resumed(name, folder, expected):
    model = Uneven(seed=7)
    with closing(optimizer_of(model, SCENARIOS[name])) as optimizer:
        load(model, optimizer, folder)
        take_steps(model, optimizer, SCENARIOS[name], range(SAVED_AT, LAST))
        with optimizer.true_weights():
            assert relative_difference(weights_of(model), expected[0]) < ROUNDING
        assert_equal(columns_of(optimizer), expected[1])


def test_rank_0_gets_a_whole_state(two):
    """As `get_optimizer_state_dict` with `full_state_dict` has it: the same as in one process."""
    scenario, model = SCENARIOS["k = 0.3, S = 4, release"], Uneven()
    with closing(optimizer_of(model, scenario)) as optimizer:
        take_steps(model, optimizer, scenario, range(SAVED_AT))
        moments = optimizer.to_adamw_state_dict()["state"]
        split = optimizer._engine.layout.splits[0]
        exp_avg = split.host.state.exp_avg.clone()
    full = two[0]["export"]["full"]["state"]["embed.weight"]
    assert relative_difference([full["exp_avg"]], [exp_avg]) < ROUNDING
    assert not two[1]["export"]["full"]
    for rank in two:
        for key, entry in rank["export"]["adamw"].items():
            expected = [moments[key][name] for name in entry]
            assert relative_difference(entry.values(), expected) < ROUNDING


def test_what_rank_0_alone_has_goes_back_to_all(two):
    for rank in two:
        expected, again = rank["export"]["ends"]
        assert_equal(again, expected)


def test_a_rank_has_its_share_of_memory_and_traffic_and_adds_up_one_number_a_column(two):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(), host_threads=1)
    with closing(optimizer):
        model(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()
    for rank in two:
        own = rank["weigh"]
        assert own["memory"].host_bytes == pytest.approx(optimizer.memory.host_bytes / 2, rel=0.05)
        assert own["d2h_bytes"] == optimizer.report.d2h_bytes / 2
        assert own["added_up"] == 4 * 1024
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    assert gradient_bytes / two[0]["weigh"]["added_up"] == 512  # the length of a column


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("mixed", "ValueError: .* is sharded and .* is not: call fully_shard on the root"),
        ("by columns", r"ValueError: .* has the placements .*Shard\(dim=1\)"),
        ("two meshes", "ValueError: .* is on another mesh than"),
        ("other settings", "ValueError: ranks make different optimizers: .* in config"),
        ("other rates", "ValueError: ranks make different optimizers: .* in parameter groups"),
    ],
)
def test_bad_input_is_an_error_on_every_rank(what, message, two):
    for rank in two:
        assert re.match(message, rank["misuse"][what], re.DOTALL), rank["misuse"][what]


def test_a_rank_waits_no_longer_than_its_timeout_for_another(two):
    """Though the mesh's group would wait for half an hour."""
    error, seconds = two[0]["await"]
    assert re.match("DeadlineError: .* All ranks have to take the same steps", error), error
    assert 0.9 < seconds < 30


def test_what_the_guide_shows_learns(two):
    for rank in two:
        before, after = rank["guide"]
        assert after < 0.9 * before


def test_a_backward_too_many_is_told_of(two):
    for rank in two:
        assert re.match(r"GradientError: the gradient of .* was released", rank["too many"])


@pytest.fixture(scope="module")
def four(two, folder_of_two, folder_of_four):
    """What four ranks found, who go on from what two have saved."""
    (folder_of_four / SAVED[0]).symlink_to(folder_of_two / SAVED[0])
    return Ranks(4, ("load one", "replicas"), folder_of_four).found()


def test_four_ranks_go_on_from_what_two_saved(two, four):
    """One of them has no row of a matrix. One process goes on in the other scenarios, too."""
    weights, columns = two[0]["save"][SAVED[0]]
    for rank in four:
        found = rank["load one"][SAVED[0]]
        assert relative_difference(found[0], weights) < ROUNDING
        assert_equal(found[1], columns)


def test_replicas_of_shards_train_as_one_process(four):
    check_as_one_process([rank["replicas"] for rank in four], "k = 0.3, S = 4, release")


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_any_number_of_ranks_trains_every_scenario_as_one_process(num_ranks, tmp_path):
    found = Ranks(num_ranks, ("train more",), tmp_path).found()
    for name in SCENARIOS:
        check_as_one_process([rank["train more"][name] for rank in found], name)


@pytest.mark.slow
def test_two_ranks_go_on_from_what_four_saved(tmp_path):
    saved = Ranks(4, ("save",), tmp_path).found()
    found = Ranks(2, ("load",), tmp_path).found()
    for name in SAVED:
        expected, columns = saved[0]["save"][name]
        assert relative_difference(found[0]["load"][name][0], expected) < ROUNDING
        assert_equal(found[0]["load"][name][1], columns)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_train_as_one_process_on_a_cpu_and_resume_bit_for_bit(tmp_path):
    found = Ranks(2, ("train", "save", "load"), tmp_path, device="cuda").found()
    for name in TRAINED:
        weights, _ = alone(SCENARIOS[name])
        assert relative_difference(found[0]["train"][name]["weights"], weights) < 1e-3
        assert_equal(found[1]["train"][name]["weights"], found[0]["train"][name]["weights"])
    for name in SAVED:
        assert_equal(found[0]["load"][name][0], found[0]["save"][name][0])


def test_ranks_end_when_one_is_killed_and_its_last_checkpoint_loads(tmp_path):
    codes = Ranks(2, ("kill",), tmp_path).wait(seconds=120)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] > 0
    scenario = SCENARIOS["k = 0.3, S = 4, release"]
    ends = []
    for start in (None, tmp_path / "step-6"):
        model = Uneven(seed=0 if start is None else 7)
        with closing(optimizer_of(model, scenario)) as optimizer:
            if start is not None:
                load(model, optimizer, start)
            take_steps(model, optimizer, scenario, range(0 if start is None else 6, 10))
            with optimizer.true_weights():
                ends.append(weights_of(model))
    assert relative_difference(*ends) < ROUNDING
