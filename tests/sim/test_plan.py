"""Plans: what fits, what is recommended and why, what another machine would save."""

import json
from dataclasses import replace

import pytest

from sim.catalog import find_link, find_machine
from sim.models import find_model
from sim.options import RULES, Planner
from sim.plan import distance, plan, recommend
from sim.simulate import STRATEGIES, Strategy, simulate
from sim.workload import Workload
from zenflow.config import PRESETS
from zenflow.errors import ConfigError

GIB = 1 << 30


def workload(name="llama-2-7b", **settings):
    return Workload.of_config(*find_model(name), **{"batch_size": 4, **settings})


def a100(num_devices=1):
    """Return a machine whose host holds everything up: it updates far slower than devices do."""
    machine = find_machine("dgx-a100-80", num_devices)
    return machine.with_values({"host.dram": 60e9})


@pytest.fixture(scope="module")
def on_a100():
    return plan(workload(), a100())


def test_every_strategy_is_looked_at_the_engines_first(on_a100):
    names = [option.strategy.name for option in on_a100.options]
    assert list(dict.fromkeys(names)) == [*PRESETS, *(n for n in STRATEGIES if n not in PRESETS)]
    assert set(RULES) == set(STRATEGIES)


def test_only_what_fits_and_is_ours_is_recommended(on_a100):
    chosen = on_a100.recommended
    assert chosen.fits
    assert chosen.is_ours
    assert not on_a100.option("on_device").fits
    assert all(not option.is_ours for option in on_a100.options if option.strategy.config is None)
    theirs = [name for name in STRATEGIES if name not in PRESETS]
    assert plan(workload(), a100(), strategies=theirs).recommended is None


def test_figures_are_those_of_memory_and_simulation(on_a100):
    option = on_a100.option("zero_offload")
    costs = Planner(a100()).option(workload(), Strategy.of("zero_offload"))
    assert option.prediction == costs.prediction
    assert option.tokens_per_second == pytest.approx(4096 / option.step_seconds)
    four = plan(workload(), a100(4), strategies=["published_zero_offload"]).options[0]
    assert four.tokens_per_second == pytest.approx(4 * 4096 / four.step_seconds)


def test_what_stalls_is_tried_with_other_knobs_and_those_must_be_faster(on_a100):
    tried = [option for option in on_a100.options if option.strategy.name == "zenflow"]
    first, others = tried[0], tried[1:]
    assert first.prediction.stall_fraction > 0.02
    labels = {option.changes for option in others}
    assert labels >= {("update_interval=8",), ("update_interval=16",)}
    assert all(option.step_seconds < first.step_seconds for option in others)
    assert not [option for option in others if "lag=2" in option.changes], (
        "the host is at work all the time: a longer lag only puts its stall off"
    )


def test_checkpointing_and_smaller_micro_batches_are_tried_where_that_is_what_it_takes():
    desktop = find_machine("rtx4090-desktop")
    work = workload("qwen2.5-1.5b")
    found = plan(work, desktop, strategies=["zenflow", "zero_offload"])
    assert found.option("zero_offload").changes == ()
    option = found.option("zenflow")
    assert option.changes == ("checkpointing",)
    assert option.need.workload == replace(work, checkpointing=True)
    assert option.fits
    fixed = plan(work, desktop, strategies=["zenflow"], may_shrink=False)
    assert not fixed.option("zenflow").fits
    many = plan(replace(work, batch_size=16), desktop, strategies=["zero_offload"])
    (option,) = many.options
    smaller = option.need.workload
    assert smaller.batch_size < 16
    assert smaller.tokens_per_step == 16 * 1024
    assert option.changes == (
        "checkpointing", f"{smaller.accumulation} micro-batches of {smaller.batch_size}",
    )  # fmt: skip


def test_knobs_are_tried_that_make_it_fit():
    work = workload()
    machine = a100()
    least = Planner(machine).option(work, Strategy.of("zenflow")).need
    tight = machine.with_values({"host.dram_bytes": least.host_bytes - 1e9})
    found = plan(work, tight, strategies=["zenflow"])
    assert found.options[0].shortfalls
    fitting = {option.changes for option in found.options if option.fits}
    assert fitting >= {("update_interval=8",), ("topk_ratio=0.3",)}
    assert found.recommended.changes in fitting


def test_adamw_itself_is_recommended_unless_another_rule_is_faster_by_enough(on_a100):
    small = plan(workload("tinyllama-1.1b"), find_machine("rtx4090-desktop"))
    assert small.recommended.strategy.name == "on_device"
    assert "AdamW exactly" in small.reason
    options = {option.label: option for option in on_a100.options}
    slow, fast = options["zero_offload"], options["zenflow"]

    def as_fast(option, seconds):
        return replace(option, prediction=replace(option.prediction, step_seconds=seconds))

    assert recommend([as_fast(slow, 1.09), as_fast(fast, 1.0)]).strategy.name == "zero_offload"
    assert recommend([as_fast(slow, 1.11), as_fast(fast, 1.0)]).strategy.name == "zenflow"
    assert recommend([]) is None


def test_longer_windows_and_window_moments_are_farther_from_adamw(on_a100):
    planner = Planner(a100())

    def far(name, **knobs):
        return distance(planner.option(workload(), Strategy.of(name, **knobs)))

    assert far("zero_offload") == far("on_device") == 0
    assert far("zenflow") == far("zenflow", update_interval=3) == 1
    assert far("zenflow", update_interval=8) == far("zenflow", deferred_moments="window") == 2
    assert far("zenflow", update_interval=16) == 3
    assert far("zenflow_paper") == 4


def test_the_published_rule_is_a_baseline_that_is_recommended_only_alone(on_a100):
    options = {option.label: option for option in on_a100.options}
    paper, ours = options["zenflow_paper"], options["zenflow"]
    faster = replace(paper, prediction=replace(paper.prediction, step_seconds=0.01))
    assert recommend([faster, ours]) is ours
    assert recommend([faster]) is faster


def test_the_reason_says_what_the_rule_means_for_accuracy(on_a100):
    chosen = on_a100.recommended
    assert chosen.rule in on_a100.reason
    assert "decides accuracy" in on_a100.reason
    assert "zero_offload, whose rule is AdamW exactly" in on_a100.reason
    assert "--compare" in on_a100.reason


def test_a_faster_part_is_predicted_anew():
    machine = find_machine("rtx4090-desktop").with_values({"host.dram_bytes": 1e12})
    work = workload("qwen2.5-1.5b")
    found = plan(work, machine, strategies=["zero_offload"])
    now = found.recommended
    by_change = {item.change: item for item in found.improvements}
    item = by_change["pcie5-x16 in place of pcie4-x16"]
    faster = replace(machine, link=find_link("pcie5-x16"))
    costs = Planner(faster).option(now.need.workload, now.strategy)
    assert item.step_seconds == costs.step_seconds < now.step_seconds
    assert item.saved_seconds == pytest.approx(now.step_seconds - costs.step_seconds)
    assert item.saved_share == pytest.approx(item.saved_seconds / now.step_seconds)
    assert by_change["host memory twice as fast"].helps
    assert [item.saved_seconds for item in found.improvements] == sorted(
        (item.saved_seconds for item in found.improvements), reverse=True
    )


def test_cores_help_where_they_bind_and_memory_where_it_does():
    # One core moves 15 GB/s here, and DRAM 41: one core binds, eight do not.
    machine = find_machine("rtx3090-desktop")
    machine = machine.with_values({"host.dram_bytes": 1e12})
    one = replace(machine, host=replace(machine.host, cores=2))
    work = workload("qwen2.5-0.5b")
    bound = plan(work, one, strategies=["zero_offload"]).improvements
    free = plan(work, machine, strategies=["zero_offload"]).improvements
    helps = {item.change: item.helps for item in (*bound, *free)}
    assert helps["4 cores in place of 2"]
    assert not helps["16 cores in place of 8"]
    assert helps["host memory twice as fast"]


def test_a_faster_fabric_helps_several_devices():
    found = plan(workload("qwen2.5-0.5b"), find_machine("rtx4090-server", 4))
    assert found.recommended.strategy.name == "on_device"
    (item,) = [item for item in found.improvements if "fabric" in item.change]
    assert item.helps
    alone = plan(workload("qwen2.5-0.5b"), find_machine("rtx4090-server", 1))
    assert not [item for item in alone.improvements if "fabric" in item.change]


def test_more_memory_is_offered_in_sizes_that_are_sold(on_a100):
    (item,) = [item for item in on_a100.improvements if "a device with" in item.change]
    assert item.change.startswith("a device with 141 GiB (it needs ")
    assert item.strategy == "on_device"


def test_where_nothing_fits_the_plan_says_what_would():
    desktop = find_machine("rtx4090-desktop")
    found = plan(workload("llama-3.1-8b"), desktop)
    assert found.recommended is None
    assert "No preset of the engine fits" in found.reason
    assert "too little" in found.reason
    offers = [item for item in found.improvements if item.is_ours]
    assert offers
    assert all(item.saved_seconds is None and item.helps for item in offers)
    assert any("of host memory" in item.change for item in offers)
    # With what is offered it does fit.
    item = next(item for item in offers if item.strategy == "zenflow, checkpointing")
    assert item.change.startswith("a device with 40 GiB")
    larger = desktop.with_values({"device.memory": 40 * GIB, "host.dram_bytes": 128 * GIB})
    assert plan(workload("llama-3.1-8b"), larger, strategies=["zenflow"]).recommended is not None


def test_drives_are_offered_for_the_one_system_that_uses_them():
    machine = replace(a100(), nvme=None)
    found = plan(workload(), machine, strategies=["zenflow", "zero_infinity"])
    option = found.option("zero_infinity")
    assert option.prediction is None
    assert not option.fits
    assert option.tokens_per_second == 0
    (item,) = [item for item in found.improvements if "NVMe" in item.change]
    assert not item.is_ours
    assert not item.helps


def test_knobs_are_tried_only_while_there_is_a_stall_to_save_and_kept_only_if_they_save():
    """Over hosts from slow to fast: every case occurs, wherever exactly it does."""
    work = workload("tinyllama-1.1b")
    seen = set()
    for dram in (*range(100, 200, 8), 400):
        planner = Planner(find_machine("dgx-a100-80", 1).with_values({"host.dram": dram * 1e9}))
        first, *others = planner.options(work, "zenflow")
        predicted = {config.update_interval: p for (_, _, config), p in planner._known.items()}
        left = {
            interval: (p.stall_seconds - p.selection_seconds) / p.step_seconds
            for interval, p in predicted.items()
            if interval != 4
        }
        done = first.prediction
        if done.stall_seconds - done.selection_seconds <= 0.02 * done.step_seconds:
            assert not others
            assert len(planner._known) == 1
            seen.add("no stall but of selections")
            continue
        assert (left[8] <= 0.02) == (16 not in predicted)
        seen.add("enough at 8" if left[8] <= 0.02 else "more than 8")
        kept = {option.strategy.config.update_interval for option in others}
        for interval in left:
            saves = predicted[interval].step_seconds < 0.995 * first.step_seconds
            assert saves == (interval in kept)
            seen.add("kept" if saves else "dropped")
    assert seen == {"no stall but of selections", "enough at 8", "more than 8", "kept", "dropped"}


def test_other_systems_that_do_not_fit_are_not_predicted_and_presets_are(on_a100):
    assert on_a100.option("published_on_device").prediction is None
    assert on_a100.option("on_device").prediction is not None


def test_a_plan_is_json():
    machine = replace(a100(), nvme=None)
    record = plan(workload(), machine, strategies=["zenflow", "zero_infinity"]).to_dict()
    text = json.dumps(record, allow_nan=False)
    again = json.loads(text)
    assert again["recommended"]["strategy"] == "zenflow"
    assert again["options"][-1]["prediction"] is None
    assert again["options"][-1]["shortfalls"][0]["place"] == "nvme"


def test_unknown_strategies_and_dtypes_without_a_peak_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'zenflow'"):
        plan(workload(), a100(), strategies=["zenflwo"])
    with pytest.raises(ConfigError, match="no peak for bfloat16"):
        plan(workload("gpt2"), find_machine("v100-server", 1))


def test_a_plans_options_are_what_simulate_says(on_a100):
    from sim.costs import costs_of

    for name in ("on_device", "published_delayed"):
        alone = simulate(costs_of(workload(), a100()), Strategy.of(name), keeps_spans=False)
        assert on_a100.option(name).step_seconds == pytest.approx(alone.step_seconds, rel=1e-6)
