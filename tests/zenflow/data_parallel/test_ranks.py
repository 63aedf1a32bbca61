"""Ranks under DistributedDataParallel, whose hosts share the work, train as one process does."""

import re
import signal

import pytest
import torch
from torch import nn

from sim.memory.engine import engine_memory
from sim.timing.division import Division
from tests.models import assert_equal, closing, relative_difference, weights_of
from tests.zenflow.data_parallel.runs import (
    DELAYED,
    SAVED,
    SCENARIOS,
    TRAINED,
    wide_model,
    work_of_host,
)
from tests.zenflow.sharded.conftest import Ranks
from tests.zenflow.sharded.runs import (
    LAST,
    SAVED_AT,
    Uneven,
    alone,
    columns_of,
    load,
    optimizer_of,
    take_steps,
)
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.host.kernel import active_kernel

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.timeout(600),
]
ROUNDING = 1e-6
"""Largest difference of weights that comes of averaging in another order, of the largest."""
MODULE = "tests.zenflow.data_parallel"


def check_as_one_process(found, name):
    weights, columns = alone(SCENARIOS[name])
    for rank in found:
        assert relative_difference(rank["weights"], weights) < ROUNDING
        assert_equal(rank["columns"], columns, "important columns")
    for rank in found[1:]:
        assert_equal(rank["weights"], found[0]["weights"])


@pytest.fixture(scope="module")
def folder_of_two(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(folder_of_two):
    """What two ranks found."""
    tasks = (
        *("train", "share nothing", "ring", "save", "load", "delay", "export", "save by one"),
        *("weigh", "work", "other order", "misuse", "too many", "drop", "guide"),
        *("broken off", "apart"),
    )
    return Ranks(2, tasks, folder_of_two, module=MODULE).found()


@pytest.fixture(scope="module")
def four(two, folder_of_two, tmp_path_factory):
    """What four ranks found, who go on from what two have saved."""
    folder = tmp_path_factory.mktemp("four")
    (folder / SAVED[0]).symlink_to(folder_of_two / SAVED[0])
    return Ranks(4, ("load one", "weigh", "work"), folder, module=MODULE).found()


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_train_as_one_process(name, two):
    check_as_one_process([rank["train"][name] for rank in two], name)


def test_sharing_the_hosts_work_changes_no_bit(two):
    for rank in two:
        for name in DELAYED:
            assert_equal(rank["train"][name]["weights"], rank["share nothing"]["weights"])


def test_uneven_shares_go_through_the_ring_of_a_gpu_in_the_same_pieces(two):
    for rank in two:
        expected = rank["train"]["k = 0.1, S = 4, release"]
        assert_equal(rank["ring"]["weights"], expected["weights"])


@pytest.mark.parametrize("name", DELAYED)
def test_weights_do_not_depend_on_what_is_late_on_which_rank(name, two):
    for rank in two:
        assert_equal(rank["delay"][name], rank["train"][name]["weights"])


def test_averages_have_the_order_in_memory_that_their_parameters_have(two):
    for rank in two:
        keep, release = rank["other order"]
        assert_equal(release, keep)


def test_a_step_that_is_dropped_leaves_ranks_with_the_same_weights(two):
    assert_equal(two[1]["drop"]["weights"], two[0]["drop"]["weights"])
    for rank in two:
        assert re.match("GradientError: .* was released", rank["drop"]["refused"])


@pytest.mark.parametrize("name", SAVED)
def test_as_many_ranks_resume_bit_for_bit(name, two):
    for rank in two:
        assert_equal(rank["load"][name][0], rank["save"][name][0])


@pytest.mark.parametrize("name", SAVED)
def test_one_process_goes_on_from_what_two_ranks_saved(name, two, folder_of_two):
    check_resumed(SCENARIOS[name], folder_of_two / name, two[0]["save"][name])


def check_resumed(scenario, folder, expected, *, first=SAVED_AT, last=LAST):
    model = Uneven(seed=7)
    with closing(optimizer_of(model, scenario)) as optimizer:
        load(model, optimizer, folder)
        take_steps(model, optimizer, scenario, range(first, last))
        with optimizer.true_weights():
            assert relative_difference(weights_of(model), expected[0]) < ROUNDING
        assert_equal(columns_of(optimizer), expected[1])


def test_four_ranks_go_on_from_what_two_saved(two, four):
    """One of them has no row of a matrix. One process goes on in the other scenarios, too."""
    weights, columns = two[0]["save"][SAVED[0]]
    for rank in four:
        found = rank["load one"][SAVED[0]]
        assert relative_difference(found[0], weights) < ROUNDING
        assert_equal(found[1], columns)


def test_rank_0_gets_a_whole_state(two):
    scenario, model = SCENARIOS["k = 0.1, S = 4, release"], Uneven()
    with closing(optimizer_of(model, scenario)) as optimizer:
        take_steps(model, optimizer, scenario, range(SAVED_AT))
        state = optimizer.to_adamw_state_dict()["state"].values()
        expected = [entry["exp_avg"] for entry in state]
        exp_avg = optimizer._engine.layout.splits[0].host.state.exp_avg.clone()
    full = two[0]["export"]["full"]["state"]["embed.weight"]
    assert relative_difference([full["exp_avg"]], [exp_avg]) < ROUNDING
    for rank in two:
        assert relative_difference(rank["export"]["exp_avg"], expected) < ROUNDING


def test_what_one_rank_saved_alone_is_refused_by_all(two):
    for rank in two:
        told = rank["save by one"]
        assert re.match("CheckpointError: .* has rows of another rank only", told), told


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_has_its_share_of_memory_and_traffic(num_ranks, two, four):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))
    config = ZenFlowConfig(update_interval=1)
    with closing(ZenFlowAdamW(model.parameters(), config=config, host_threads=1)) as optimizer:
        for _ in range(2):
            model(torch.randn(4, 512)).square().mean().backward()
            optimizer.step()
        memory, report = optimizer.memory, optimizer.report
    shapes = [tuple(param.shape) for param in model.parameters()]
    division = Division.of("ddp", num_ranks)
    kept = engine_memory(shapes, config, 4).divided(division).plan(has_ring=False)
    sent = engine_memory(shapes, ZenFlowConfig(), 4).divided(division).plan(has_ring=True)
    compact = engine_memory(shapes, ZenFlowConfig(host_state="compact"), 4).divided(division)
    for rank in two if num_ranks == 2 else four:
        own = rank["weigh"]
        assert (own["memory"], own["ring"]) == (kept, sent), "not what the simulator says"
        assert own["compact"] == compact.plan(has_ring=False)
        assert own["memory"].host_bytes == pytest.approx(memory.host_bytes / num_ranks, rel=0.05)
        assert own["memory"].pinned_bytes * num_ranks == memory.pinned_bytes
        assert own["d2h_bytes"] * num_ranks == report.d2h_bytes > 0
        assert own["h2d_bytes"] * num_ranks == report.h2d_bytes > 0


@pytest.mark.skipif(active_kernel() != "c", reason="counts the jobs of the C kernel")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_has_its_share_of_the_hosts_work(num_ranks, two, four):
    whole = work_of_host(wide_model())
    counts = [rank["work"] for rank in (two if num_ranks == 2 else four)]
    assert sum(counts) == whole > 0
    assert counts == pytest.approx([whole / num_ranks] * num_ranks, rel=0.05)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sharded", "ValueError: .* is sharded, and its ranks share the host's work already"),
        ("other settings", "ValueError: ranks make different optimizers: .* in config"),
        ("other rates", "ValueError: ranks make different optimizers: .* in parameter groups"),
        ("another mode", "ValueError: ranks make different optimizers: .* in offload_gradients"),
        ("no group", "ValueError: release mode takes gradients before .* give a process_group"),
        ("no member", "ValueError: process_group must be a group that has this rank, got -100"),
        ("keep mode", r"ValueError: release_from\(\) is for an optimizer .* with a process_group"),
        ("another model", "ValueError: .* is not among the parameters whose gradients the model"),
        ("other ranks", r"ValueError: the model averages over the ranks \[\d\] and .* \[0, 1\]"),
        ("unused", "ValueError: find_unused_parameters=True gives unused parameters"),
        ("twice", "RuntimeError: register_comm_hook .* can only be called once"),
        (
            "not released from",
            r"GradientError: release mode under .* optimizer.release_from\(model\)",
        ),
    ],
)
def test_bad_input_is_an_error_on_every_rank(what, message, two):
    for rank in two:
        assert re.match(message, rank["misuse"][what], re.DOTALL), rank["misuse"][what]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no_sync, keep", "GradientError: ranks have different gradients in step 6, .* no_sync"),
        (
            "module, keep",
            "GradientError: ranks have different gradients in step 6, .* .module",
        ),
        ("no_sync, release", "GradientError: the gradient of .* is this rank's own, .* no_sync"),
        (
            "module, release",
            "GradientError: the gradient of .* is this rank's own, .* .module",
        ),
        ("no_sync behind an average", "GradientError: the gradient of .* is this rank's own"),
        ("join, keep", r"RuntimeError: join\(\) lets a rank end before .* as many batches"),
        ("join, release", r"RuntimeError: join\(\) lets a rank end before .* as many batches"),
    ],
)
def test_ranks_that_do_not_do_the_same_all_get_an_error_at_once(what, message, two):
    for rank in two:
        error, seconds = rank["apart"][what]
        assert re.match(message, error, re.DOTALL), error
        assert seconds < 3, "waited for the other"


def test_a_rank_waits_no_longer_than_its_timeout_for_another(two):
    error, seconds = two[0]["apart"]["none comes"]
    assert re.match("DeadlineError: .* All ranks have to take the same steps", error), error
    assert 2.5 < seconds < 20


def test_a_backward_that_was_broken_off_leaves_nothing_to_the_next(two):
    for rank in two:
        undisturbed, disturbed = rank["broken off"]
        assert_equal(disturbed, undisturbed)


def test_what_the_guide_shows_learns(two):
    for rank in two:
        before, after = rank["guide"]
        assert after < 0.9 * before


def test_a_backward_too_many_is_told_of(two):
    for rank in two:
        assert re.match(r"GradientError: the gradient of .* was released", rank["too many"])


def test_no_rank_waits_for_one_whose_host_has_failed(tmp_path):
    first, second = Ranks(2, ("fail",), tmp_path, module=MODULE).found()
    assert "ZeroDivisionError" in second["fail"]
    assert re.match("(WorkerError|DeadlineError|RuntimeError): ", first["fail"])


def test_ranks_end_when_one_is_killed_and_its_last_checkpoint_loads(tmp_path):
    codes = Ranks(2, ("kill",), tmp_path, module=MODULE).wait(seconds=120)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] > 0
    scenario, model = SCENARIOS["k = 0.1, S = 4, release"], Uneven()
    with closing(optimizer_of(model, scenario)) as optimizer:
        take_steps(model, optimizer, scenario, range(10))
        with optimizer.true_weights():
            expected = weights_of(model), columns_of(optimizer)
    check_resumed(scenario, tmp_path / "step-6", expected, first=6, last=10)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_any_number_of_ranks_trains_every_scenario_as_one_process(num_ranks, tmp_path):
    found = Ranks(num_ranks, ("train more",), tmp_path, module=MODULE).found()
    for name in SCENARIOS:
        check_as_one_process([rank["train more"][name] for rank in found], name)


@pytest.mark.slow
def test_two_ranks_go_on_from_what_four_saved(tmp_path):
    saved = Ranks(4, ("save", "delay"), tmp_path, module=MODULE).found()
    found = Ranks(2, ("load",), tmp_path, module=MODULE).found()
    for name in SAVED:
        expected, columns = saved[0]["save"][name]
        assert relative_difference(found[0]["load"][name][0], expected) < ROUNDING
        assert_equal(found[0]["load"][name][1], columns)
    for name in DELAYED:
        weights, _ = alone(SCENARIOS[name])
        assert relative_difference(saved[3]["delay"][name], weights) < ROUNDING


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_train_as_one_process_on_a_cpu_and_resume_bit_for_bit(tmp_path):
    tasks = ("train", "delay", "save", "load")
    found = Ranks(2, tasks, tmp_path, device="cuda", module=MODULE).found()
    for name in TRAINED:
        weights, _ = alone(SCENARIOS[name])
        assert relative_difference(found[0]["train"][name]["weights"], weights) < 1e-3
        assert_equal(found[1]["train"][name]["weights"], found[0]["train"][name]["weights"])
    for name in DELAYED:
        assert_equal(found[1]["delay"][name], found[0]["train"][name]["weights"])
    for name in SAVED:
        assert_equal(found[0]["load"][name][0], found[0]["save"][name][0])
