import itertools
import json

import pytest

from tests.models import TinyStack, closing
from zenflow import MemoryPlan, StepReport, WindowNorms, ZenFlowAdamW, ZenFlowConfig


def a_report(**changes):
    """Return a report of an unremarkable step, with changes."""
    values = {
        "step": 1,
        "seconds": 2.0,
        "stall_seconds": 0.5,
        "stalls": {"host": 0.5},
        "d2h_bytes": 100,
        "h2d_bytes": 25,
        "staleness": 4,
        "captured_energy": 0.75,
        "grad_norm": 3.0,
        "clip_factor": 1.0,
        "update_interval": 4,
        "lag": 1,
        "topk_ratio": 0.1,
        "select_interval": 100,
        "learning_rates": (1e-3, 1e-4),
    }
    return StepReport(**{**values, **changes})


def test_stall_fraction_is_the_waited_share():
    assert a_report().stall_fraction == 0.25
    assert a_report(seconds=0.0, stall_seconds=0.0).stall_fraction == 0


def test_a_report_is_a_line_of_json():
    record = json.loads(json.dumps(a_report().to_dict()))
    assert record["stall_fraction"] == 0.25
    assert record["stalls"] == {"host": 0.5}
    assert record["learning_rates"] == [1e-3, 1e-4]


def test_a_report_comes_back_from_json():
    report = a_report(windows=(WindowNorms(1, 2.0, 3.0),), energy_curve={0.1: 0.5, 0.2: 0.75})
    assert StepReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_a_report_from_before_devices_ran_dry_has_none_of_it():
    record = a_report(starved=3).to_dict()
    assert record.pop("starved") == 3
    assert StepReport.from_dict(record).starved == 0


@pytest.mark.parametrize("mode", ["release", "keep"])
def test_each_full_bucket_at_which_the_device_had_run_dry_counts(monkeypatch, mode):
    """In keep mode all buckets are measured together, so one question is enough."""
    model = TinyStack(num_layers=3, width=8)
    settings = {"max_grad_norm": 1.0} if mode == "release" else {}
    config = ZenFlowConfig(min_split_elements=1)
    with closing(
        ZenFlowAdamW(model.parameters(), config=config, offload_gradients=mode, **settings)
    ) as optimizer:
        engine = optimizer._engine
        answers, found = itertools.cycle([True, False, True]), []
        for is_asked in (False, True):
            if is_asked:
                monkeypatch.setattr(engine.device, "has_run_dry", lambda: next(answers))
            model.loss(0).backward()
            optimizer.step()
            found.append(optimizer.report.starved)
    buckets = len(engine.layout.buckets)
    in_release = sum(itertools.islice(itertools.cycle([True, False, True]), buckets))
    assert found == [0, in_release if mode == "release" else 1]


def a_plan(**changes):
    values = {
        "num_params": 1000,
        "split_params": 900,
        "model_bytes": 2000,
        "host_bytes": 16_000,
        "pinned_bytes": 1000,
        "device_extra_bytes": 1200,
        "device_ring_bytes": 64,
        "device_step_bytes": 320,
    }
    return MemoryPlan(**{"queue_depth": 4, **values, **changes})


def test_a_plan_says_bytes_per_parameter():
    plan = a_plan()
    assert (plan.host_bytes_per_param, plan.device_extra_bytes_per_param) == (16, 1.2)
    assert json.loads(json.dumps(plan.to_dict()))["host_bytes_per_param"] == 16


def test_a_plan_of_nothing_divides_by_nothing():
    plan = a_plan(num_params=0, split_params=0)
    assert (plan.host_bytes_per_param, plan.device_extra_bytes_per_param) == (0, 0)
    assert "0 parameters" in str(plan)


def test_a_plan_reads_as_a_table():
    assert str(a_plan(host_bytes=140_000_000_000, num_params=7_000_000_000)).splitlines() == [
        "device      3.58 kB   gradients and activations come on top",
        "  model        2 kB   7,000,000,000 parameters, 0.0% of them shared with the host",
        "  states     1.2 kB   0.00 B per parameter",
        "  copies       64 B   gradients on their way to the host",
        "  step        320 B   given back after every step",
        "host         140 GB   20.00 B per parameter",
        "  pinned       1 kB   part of it, up to 4 gradients wait there",
    ]


def test_the_device_s_sum_is_that_of_the_lines_below_it():
    assert a_plan().device_bytes == 2000 + 1200 + 64 + 320


def test_a_plan_that_runs_says_where_its_threads_are():
    apart = a_plan(host_threads=4, host_cores=(0, 1, 8), host_nodes=(0, 2))
    assert "  threads         4   on 3 cores of NUMA nodes 0, 2" in str(apart).splitlines()
    assert "on 1 core of NUMA node 0" in str(
        a_plan(host_threads=1, host_cores=(3,), host_nodes=(0,))
    )
    assert "  threads         2" in str(a_plan(host_threads=2)).splitlines()
    assert apart == a_plan(), "a prediction is compared by its bytes"
