"""Rows of a trainer's log: what the reports since the last row add up to."""

from dataclasses import replace

from tests.models import TINY, GivenGradients
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.integrations.step_log import StepLog


def reports(count):
    """Return the reports of a run's steps."""
    model = GivenGradients([(8, 16), (4,)])
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(**TINY, update_interval=2))
    found = []
    for step in range(count):
        model.backward(model.draw_gradients(step))
        optimizer.step()
        found.append(optimizer.report)
    optimizer.close()
    return found


def test_a_row_sums_up_the_steps_since_the_last_row():
    log, steps = StepLog(), reports(7)
    for report in steps[:3]:
        log.add(report)
    log.take()
    for report in steps[3:]:
        log.add(report)
    rest = steps[3:]
    assert log.take() == {
        "zenflow/stall_seconds": sum(r.stall_seconds for r in rest),
        "zenflow/stall_share": sum(r.stall_seconds for r in rest) / sum(r.seconds for r in rest),
        "zenflow/staleness": 3,
        "zenflow/update_interval": 2,
        "zenflow/topk_ratio": rest[-1].topk_ratio,
        "zenflow/d2h_bytes_per_step": sum(r.d2h_bytes for r in rest) / 4,
        "zenflow/h2d_bytes_per_step": sum(r.h2d_bytes for r in rest) / 4,
        "zenflow/captured_energy": sum(r.captured_energy for r in rest) / 4,
    }


def test_a_report_counts_once():
    """On a GPU a step may find the report of the step before."""
    (first, second), log = reports(2), StepLog()
    first, second = replace(first, d2h_bytes=100), replace(second, d2h_bytes=200)
    for report in (None, first, first, second):
        log.add(report)
    assert log.take()["zenflow/d2h_bytes_per_step"] == 150


def test_without_a_step_there_is_no_row():
    log = StepLog()
    assert log.take() == {}
    log.add(reports(1)[0])
    assert log.take()
    assert log.take() == {}


def test_several_optimizers_go_by_names_of_their_own():
    log = StepLog("zenflow/1/")
    log.add(reports(1)[0])
    assert all(name.startswith("zenflow/1/") for name in log.take())
