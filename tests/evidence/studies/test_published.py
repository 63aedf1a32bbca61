"""Published measurements: predicted from set-ups alone, with one constant, and written down."""

import inspect
from collections import Counter
from dataclasses import asdict, replace
from statistics import median

import pytest

from evidence.published.memory import memory_cases
from evidence.published.runs import published
from evidence.studies.published import study
from evidence.studies.published.memory import (
    counts_of,
    memory_table,
    outcome_of,
    predict_memory,
    verdict_of,
)
from evidence.studies.published.study import (
    AIM,
    STUDY,
    coverage_of,
    errors_by_regime,
    predict_all,
)
from experiments.lab.finding import Verdict
from experiments.lab.record import needed
from experiments.paper import predictions
from experiments.paper.predictions import (
    SHARE,
    at_roofline,
    deepspeed_rate,
    elasticities,
    hardware_of,
    intervals,
    predict,
    regime_of,
    runs_deepspeed_step,
)
from experiments.paper.published import BREAKDOWN, RELEASED_RUNS
from experiments.paper.setups import HostPass, Measurement, Phases, Setup
from sim.fitting.left_out import BY_REGIME, TABLE
from sim.hardware.catalog import find_machine
from sim.hardware.components import DEEPSPEED_SHARE
from sim.memory.chance import SPREAD, chance_to_fit, fit_spread
from sim.schedules.systems.deepspeed_zero_offload import step_rate
from tests.conftest import remembering
from tests.test_layering import modules_after

GROUPS, MEASUREMENTS = published().groups, published().measurements
BY_LABEL = {item.label: item for item in MEASUREMENTS}
BLIND = [item for item in MEASUREMENTS if GROUPS[item.group].is_blind]
"""Rows that were entered before any of them was predicted."""


def of_page(name):
    """Return the rows of a page, whose file has this name."""
    _, groups = published().topics[name]
    return [item for item in MEASUREMENTS if item.group in groups]


COMMUNICATION, HOST_PASSES, SHARDED = map(
    of_page, ("communication", "host_passes", "sharded_runs")
)
SHARDED_GROUPS = {item.group for item in SHARDED}


@pytest.fixture(scope="module")
def rows():
    """Return the rows of the committed record, which a test compares with predictions."""
    return needed("published").rows[0]["rows"]


@pytest.fixture(scope="module", autouse=True)
def predicted_once():
    """Let tables predict each set-up once on a machine, and return what predicts it."""
    remembered = remembering(predict)
    with pytest.MonkeyPatch.context() as patch:
        for module in (predictions, study):
            patch.setattr(module, "predict", remembered)
        yield remembered


@pytest.fixture(scope="module")
def usual(predicted_once):
    """Return each row's prediction on its own machine, by label and source."""
    return {
        (item.label, item.source): predicted_once(item.setup, item.quantity)
        for item in MEASUREMENTS
    }


@pytest.fixture(scope="module")
def memory_rows():
    return predict_memory()


def test_the_papers_phases_give_its_steps_and_its_idle_times_within_a_per_cent(rows):
    found = [row for row in rows if row["group"] == "phases"]
    assert [row["measured_seconds"] for row in found] == [7.145, 5.1, 2.555, 2.045]
    assert all(abs(row["error"]) < 0.01 for row in found)


def test_predictions_take_set_ups_and_no_set_up_holds_a_measurement():
    for function in (predict, hardware_of, regime_of, intervals, elasticities):
        taken = inspect.signature(function, eval_str=True).parameters
        kinds = {str(parameter.annotation) for parameter in taken.values()}
        assert not any(Measurement.__name__ in kind for kind in kinds), function
    names = {"seconds", "measured", "error"}
    for kind in (Phases, HostPass, Setup):
        assert not names & set(kind.__dataclass_fields__)


def test_the_papers_figures_have_the_runs_that_they_share_from_the_same_source():
    assert BY_LABEL["ZeRO-Offload, step"].setup == BREAKDOWN
    runs = [(item.setup, item.seconds) for item in MEASUREMENTS]
    assert all(run in runs for run in RELEASED_RUNS)


def test_other_measured_values_change_no_prediction(rows):
    for some in (slice(0, 2), slice(-1, None)):
        doubled = [replace(item, seconds=2 * item.seconds) for item in MEASUREMENTS[some]]
        again = predict_all(doubled, draws=0, explains=False)
        assert [row["predicted_seconds"] for row in again] == pytest.approx(
            [row["predicted_seconds"] for row in rows[some]], rel=1e-9
        )
        assert [row["error"] for row in again] != [row["error"] for row in rows[some]]


def test_one_figure_from_the_papers_breakdown_is_behind_every_deepspeed_row(usual):
    ours = [item for item in MEASUREMENTS if runs_deepspeed_step(item.setup)]
    groups = {"qwen", "llama", "slideformer", "host", "gpt-neo", "desktop-vit", "a800", "falcon",
              "titan-rtx", "gemini", "jean-zay", "open-llama", "alps", "theta",
              "theta-hosts", "pangu-v100", "pangu-a100", "silver", "colossal-13b"}  # fmt: skip
    assert {item.group for item in ours} == groups
    shares = {hardware_of(item.setup).host.deepspeed_share for item in ours}
    # Only the host that it was measured on has it from measurement, and with less of a spread.
    # Desktops and Grace have one node of memory, and a share of their own.
    assert {(share.value, share.kind, share.sigma) for share in shares} == {
        (DEEPSPEED_SHARE.value, "measured", 0.15),
        (DEEPSPEED_SHARE.value, "estimated", 0.2),
        (0.71, "estimated", 0.15),
        (0.71, "estimated", 0.2),
    }
    (paper_source,) = {item.source for item in MEASUREMENTS if item.group == "phases"}
    assert all(item.source != paper_source for item in ours)
    paper = find_machine("a100-epyc-7742", 4).host
    assert step_rate(paper) == pytest.approx(deepspeed_rate(), rel=1e-3)
    assert step_rate(paper) >= deepspeed_rate()  # so that it never bounds the paper's own rate
    kinds = {
        (item.group, item.quantity, getattr(item.setup, "strategy", None)): item for item in ours
    }
    others = [item for item in MEASUREMENTS if item not in ours]
    for item in [*kinds.values(), *others[::40]]:
        less = hardware_of(item.setup)
        less = less.with_values({SHARE: less.host.deepspeed_share.value / 2})
        found = predict(item.setup, item.quantity, less)
        moved = found > 1.001 * usual[item.label, item.source]
        accumulates = item.quantity == "accumulating"  # the update is no part of these steps
        assert moved == (item in ours and not accumulates), item.label


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_constant_is_a_hosts_whatever_its_ranks(devices):
    # The step that it was measured on, on the machine that it was measured on.
    setup = HostPass(machine="a100-epyc-7742", devices=devices, num_params=BREAKDOWN.num_params)
    assert predict(setup, "host") == pytest.approx(BREAKDOWN.update, rel=1e-3)


def test_the_constant_leaves_copies_alone():
    setup = BY_LABEL["3B, ZenFlow, DeepSpeed's and its new"].setup
    machine = hardware_of(setup)
    slow, fast = machine.with_values({SHARE: 0.005}), at_roofline(machine)
    assert predict(setup, "accumulating", slow) == pytest.approx(
        predict(setup, "accumulating", fast)
    )
    assert predict(setup, "boundary", slow) > 2 * predict(setup, "boundary")


def test_a_set_up_whose_cores_are_not_bound_pays_the_hop_on_its_host_and_link():
    bound = BY_LABEL["3B, ZeRO-Offload, bound"].setup
    far = predict(replace(bound, binds_cores=False), "step")
    hop = hardware_of(bound).host.numa_hop.value
    near = predict(bound, "step")
    most = near / ((1 + hop) / 2)
    assert 0.97 * most < far < most  # all but its compute


def test_regimes_hold_every_row_once_and_their_errors_are_the_rows_own(rows):
    found = {each["regime"]: each for each in errors_by_regime(rows)}
    counted = [GROUPS[row["group"]] for row in rows if row["group"] != "phases"]
    stated = [group for group in counted if not group.open]
    parts = {
        "of these, entered blind": sum(group.is_blind for group in counted),
        "of these, entered last": sum(group.entered == "last" for group in counted),
        "of these, entered third": sum(group.entered == "third" for group in counted),
        "of these, entered fourth": sum(group.entered == "fourth" for group in counted),
        "of these, entered fifth": sum(group.entered == "fifth" for group in counted),
        "of these, entered sixth": sum(group.entered == "sixth" for group in counted),
        "all stated": len(stated),
        "all stated and entered blind": sum(group.is_blind for group in stated),
        "the same with groups listed late": sum(
            group.is_blind and (not group.open or group.listed_late) for group in counted
        ),
        "all stated and entered last": sum(group.entered == "last" for group in stated),
    }
    assert {name: found[name]["rows"] for name in parts} == parts
    assert all(parts.values())
    # Phases count once, all others once more, once for each part that they are in, and once by
    # regime where all is stated.
    total = sum(each["rows"] for each in found.values())
    assert total == len(rows) + len(counted) + len(stated) + sum(parts.values())
    own = [r["error"] for r in rows if r["regime"] == "offload" and not GROUPS[r["group"]].open]
    assert found["all stated, offload"]["median"] == pytest.approx(median(map(abs, own)))
    alone = [abs(row["error"]) for row in rows if row["regime"] == "device alone"]
    assert found["device alone"]["median"] == pytest.approx(median(alone))
    assert len(alone) > 2
    sharded = [row for row in rows if row["group"] in SHARDED_GROUPS]
    assert {row["regime"] for row in sharded} == {"devices, no offload", "several hosts"}


def test_a_set_up_of_few_tokens_is_bound_by_launches_unless_it_is_compiled():
    setup = BY_LABEL["forward and backward, eager"].setup
    few = replace(setup, sequence=128)
    assert regime_of(setup) == "device alone"
    assert regime_of(few) == "launch-bound"
    assert regime_of(replace(few, kernels="compiled")) == "device alone"


def test_missed_rows_say_what_moves_them_and_met_ones_do_not(rows):
    some = {row["label"] for row in rows[::60]}
    some |= {row["label"] for row in [row for row in rows if abs(row["error"]) > AIM][::30]}
    found = predict_all([item for item in MEASUREMENTS if item.label in some], draws=0)
    for row in found:
        assert bool(row["elasticities"]) == (abs(row["error"]) > AIM)
        assert all(value > 0 for value in row["alternatives"].values())
    assert 0 < sum(bool(row["alternatives"]) for row in found) < len(found)


def test_an_elasticity_is_minus_one_for_the_only_figures_that_count():
    setup = BY_LABEL["DeepSpeed's CPU step, 72B on 32 A100 (about 10 s)"].setup
    found = elasticities(setup, "host")
    assert found.pop("host.dram") == pytest.approx(-1.0, abs=0.01)
    # A kernel that is slower leaves less of the one socket's step to what surrounds it.
    assert found.pop(SHARE) + found.pop("host.adam_share") == pytest.approx(-1.0, abs=0.02)
    assert not found


def test_an_interval_holds_the_prediction_and_is_the_same_again():
    setup = BY_LABEL["3B, ZeRO-Offload, bound"].setup
    figures, found = intervals(setup, "step", 20)
    # What the model leaves out makes such runs slower more than faster.
    assert figures.low / found.low < found.high / figures.high
    assert figures.low < figures.high < found.high
    assert found.low < predict(setup, "step") < found.high
    assert intervals(setup, "step", 20) == (figures, found)


def test_kernels_alone_are_predicted_without_the_sizes_that_gave_their_share(rows):
    seconds = [item.seconds for item in HOST_PASSES]
    assert len(seconds) > 10
    assert not {2.57, 0.608, 0.769, 31.7812e-3} & set(seconds)  # behind `host.adam_share`
    assert not any(runs_deepspeed_step(item.setup) for item in HOST_PASSES)
    for item in HOST_PASSES:
        moved = elasticities(item.setup, "host")
        for name in ("host.adam_share", "host.dram"):
            assert moved[name] == pytest.approx(-1.0, abs=0.01)


def test_a_group_that_is_far_off_is_held_by_no_other_groups_term(rows):
    def found(factor):
        about = [
            {
                **row,
                "figures_seconds": [share * row["predicted_seconds"] for share in (0.9, 1.1)],
                "measured_seconds": row["measured_seconds"]
                * (factor if row["group"] == "foundry-a100" else 1),
            }
            for row in rows
        ]
        return coverage_of(about)

    as_measured, far_off = found(1), found(9)
    assert 0 < as_measured["sigma"] <= far_off["sigma"]
    held = [each["held"]["foundry-a100"]["without_the_group"] for each in (as_measured, far_off)]
    assert held[0] > 5
    assert held[1] == 0


def test_no_source_has_more_than_an_eighth_of_the_rows_that_were_entered_blind():
    counts = Counter(item.source for item in BLIND)
    assert len(counts) > 25
    assert max(counts.values()) <= len(BLIND) / 8


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ("Falcon-7B, ZeRO-3, all offloaded", "Falcon-7B, ZeRO-3"),
        ("Falcon-7B, ZeRO-2, optimizer offloaded", "Falcon-7B, ZeRO-3"),
        ("ViT, DeepSpeed's ZeRO-Offload", "ViT, no offload"),
        ("LLaMA-7B, ZeRO-3, recomputed, all offloaded", "LLaMA-7B, ZeRO-3, recomputed"),
        ("LLaMA-7B, ZeRO-3, recomputed, optimizer offloaded", "LLaMA-7B, ZeRO-3, recomputed"),
        ("Llama-2-7B, LoRA, 2 RTX 3090", "Llama-2-7B, LoRA, 2 RTX 4090"),
    ],
)
def test_of_two_rows_of_a_source_the_slower_one_is_predicted_slower(slower, faster):
    for seconds in (
        lambda item: item.seconds / tokens_of(item),
        lambda item: predict(item.setup, "step") / tokens_of(item),
    ):
        assert seconds(BY_LABEL[slower]) > seconds(BY_LABEL[faster])


def tokens_of(item):
    setup = item.setup
    return setup.batch_size * setup.sequence * setup.accumulation


WITH_ALTERNATIVES = [item for item in BLIND if item.alternatives]


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(item, marks=pytest.mark.slow if place % 3 else (), id=item.label)
        for place, item in enumerate(WITH_ALTERNATIVES)
    ],
)
def test_an_alternative_is_another_set_up_and_moves_the_prediction(item, usual):
    for alternative in item.alternatives:
        setup = alternative.setup or item.setup
        assert setup != item.setup or alternative.values
        machine = hardware_of(setup).with_values(dict(alternative.values))
        found = predict(setup, item.quantity, machine)
        assert found != usual[item.label, item.source]


def test_published_runs_on_several_hosts_are_predicted_on_as_many():
    setups = [item.setup for item in SHARDED]
    machines = [hardware_of(setup) for setup in setups]
    assert {machine.num_hosts for machine in machines} == {1, 2, 4, 8, 16}
    for setup, machine in zip(setups, machines, strict=True):
        assert machine.total_devices == setup.devices * setup.hosts
        assert (machine.network is None) == (setup.hosts == 1)
    # What they say of collectives: with an endless fabric and network a step is hardly shorter.
    slow = BY_LABEL["13B on 64 H100"].setup
    endless = {"fabric.bandwidth": 1e18, "network.bandwidth": 1e18}
    fast = predict(slow, "step", hardware_of(slow).with_values(endless))
    assert 0.97 < fast / predict(slow, "step") < 1


@pytest.mark.parametrize(
    "item",
    [i for i in COMMUNICATION if i.setup.devices == 2 and i.setup.sequence == 128],
    ids=lambda item: item.label,
)
def test_the_rows_of_communication_show_how_long_collectives_take(item):
    endless = hardware_of(item.setup).with_values({"fabric.bandwidth": 1e18})
    assert predict(item.setup, "step", endless) < 0.95 * predict(item.setup, "step")


def test_memory_knows_what_ran_out_of_it(memory_rows):
    found = counts_of(memory_rows)
    assert len(memory_rows) == sum(found.values()) >= 70
    failed = [row for row in memory_rows if not row["ran"]]
    assert len(failed) >= 25
    assert found[False, "fits"] == 0
    assert found[False, "does not fit"] > len(failed) / 2
    assert found[True, "does not fit"] == 0
    assert found[True, "fits"] > found[True, "may fit"]
    names = ("LitGPT", "torchtitan", "torchao")  # whose code says what they keep
    errors = [
        abs(row["error"])
        for row in memory_rows
        if row["error"] is not None and row["label"].startswith(names)
    ]
    assert len(errors) >= 10
    assert max(errors) < 0.16


def test_the_spread_of_memory_is_what_the_published_cases_give(memory_rows):
    assert fit_spread(outcome_of(row) for row in memory_rows) == SPREAD


def test_a_predicted_peak_counts_what_the_published_one_counts():
    case = next(case for case in memory_cases() if case.scope == "device" and case.peak)
    scopes = ("allocated", "reserved", "device")
    found = predict_memory([replace(case, scope=scope) for scope in scopes])
    allocated, reserved, device = (row["predicted_bytes"] for row in found)
    assert allocated < reserved < device
    assert len({row["need_bytes"] for row in found}) == 1


@pytest.mark.parametrize("ran", [True, False])
def test_other_published_outcomes_change_no_predicted_need(ran, memory_rows):
    cases = memory_cases()[::4]
    again = predict_memory([replace(case, fits=ran, peak=None) for case in cases])
    needs = [[row["need_bytes"] for row in rows] for rows in (again, memory_rows[::4])]
    assert needs[0] == needs[1]
    assert sum(n for (has, _), n in counts_of(again).items() if has is ran) == len(again)


def test_what_surely_fits_fits_and_what_nearly_does_may(memory_rows):
    row = memory_rows[0]
    room = row["device_bytes"]
    cases = [
        {**row, "ran": ran, "need_bytes": share * room, "chance": chance_to_fit(share, 1.0)}
        for ran in (True, False)
        for share in (0.5, 0.95, 1.05)
    ]
    verdicts = ["fits", "may fit", "does not fit"]
    assert [verdict_of(case) for case in cases] == 2 * verdicts
    said = [texts[-1] for texts in memory_table(cases).texts]
    assert said == ["fits", "may fit", "**false refusal**", "**false fit**", *verdicts[1:]]


def test_the_tables_have_every_row_and_the_page_the_count_within_the_aim(rows):
    (data,) = needed("published").rows
    _, *groups, memory = STUDY.tables(data)
    labels = [texts[0] for table in groups for texts in table.texts]
    assert sorted(labels) == sorted(item.label for item in MEASUREMENTS)
    assert [texts[0] for texts in memory.texts] == [case.label for case in memory_cases()]
    met = sum(abs(row["error"]) <= AIM for row in rows)
    assert f"{met} of {len(rows)} within 15%" in STUDY.about(data)
    assert sum(f.verdict is Verdict.HOLDS for f in STUDY.findings(data)) == met


def test_the_committed_record_is_what_this_version_predicts(rows, usual):
    (record,) = needed("published").rows
    assert record["deepspeed_share"] == DEEPSPEED_SHARE.value
    assert [row["label"] for row in rows] == [item.label for item in MEASUREMENTS]
    for row, item in zip(rows, MEASUREMENTS, strict=True):
        assert row["source"] == item.source
        assert row["measured_seconds"] == item.seconds
        assert row["error"] == row["predicted_seconds"] / row["measured_seconds"] - 1
        predicted = usual[item.label, item.source]
        assert row["error"] == pytest.approx(predicted / item.seconds - 1, abs=1e-3)
    some = slice(None, None, 6)
    for new, old in zip(
        predict_all(MEASUREMENTS[some], draws=0, explains=False), rows[some], strict=True
    ):
        assert new["regime"] == old["regime"]
        rooflines = [row["roofline_seconds"] or 0.0 for row in (new, old)]
        assert rooflines[0] == pytest.approx(rooflines[1], rel=1e-3)


def test_predicting_does_not_load_torch():
    assert "torch" not in modules_after(
        "from evidence.studies.published.study import *\n"
        "predict_all(published().measurements[:6], draws=0)"
    )


def test_the_term_for_what_is_left_out_is_the_committed_rows_own():
    (record,) = needed("published").rows
    found = coverage_of(record["rows"])
    assert round(found["sigma"], 2) == TABLE
    assert found["terms"].keys() == BY_REGIME.keys()
    for regime, term in found["terms"].items():
        assert asdict(BY_REGIME[regime]) == pytest.approx(term, abs=0.011)


def test_rows_of_modules_that_the_simulator_lacks_have_no_say_in_ranges():
    (record,) = needed("published").rows
    lacking = {name for name, group in GROUPS.items() if "modules" in group.open}
    rows = [row for row in record["rows"] if row["group"] not in lacking]
    assert lacking
    assert len(rows) < len(record["rows"])
    assert coverage_of(record["rows"]) == coverage_of(rows)


def test_ranges_hold_the_wanted_share_of_sources_that_had_no_say_in_every_regime():
    (record,) = needed("published").rows
    for regime, counts in coverage_of(record["rows"])["regimes"].items():
        assert 0.7 <= counts["without_the_group"] / counts["rows"] <= 0.9, regime
