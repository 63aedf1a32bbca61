"""Uploads of changed weights in the simulator: bytes, the host's time, and refusals."""

import pytest

from sim.hardware.catalog import find_machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.planning.plan import plan
from sim.simulate import Strategy, simulate
from sim.timing.changed_uploads import changed_share
from sim.timing.costs import costs_of
from sim.timing.host_passes import ended
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError

CARD = find_machine("hgx-h100", 1)


def predicted(machine=CARD, **settings):
    workload = Workload.of_config(*find_model("gpt2"), batch_size=1, sequence=128)
    return simulate(costs_of(workload, machine), Strategy.of("zenflow", **settings))


@pytest.mark.parametrize("interval", [1, 4, 8])
def test_bytes_are_those_of_marks_and_changed_values(interval):
    settings = {"update_interval": interval, "queue_depth": interval}
    whole = predicted(**settings).h2d_bytes
    changed = predicted(uploads="changed", **settings).h2d_bytes
    assert changed == pytest.approx(whole * (1 / 8 + 2 * changed_share(interval)) / 2, rel=1e-6)


def test_uploads_are_whole_where_a_window_has_several_passes():
    whole, changed = (predicted(uploads=how, queue_depth=2) for how in ("all", "changed"))
    assert changed.h2d_bytes == whole.h2d_bytes


def test_marks_take_the_host_time():
    for host_state in ("float32", "compact"):
        whole, changed = (
            ended(
                ZenFlowConfig(uploads=how, host_state=host_state),
                2,
                waiting=4,
                is_direct=False,
                coding=0.75,
            )
            for how in ("all", "changed")
        )
        assert changed.num_bytes == whole.num_bytes
        assert changed.steps > whole.steps + 1


def test_hosts_that_share_a_state_are_refused():
    with pytest.raises(ConfigError, match="uploads='changed' is for one process"):
        predicted(find_machine("hgx-h100", 2), uploads="changed")


def test_a_plan_holds_to_changed_weights():
    workload = Workload.of_config(*find_model("gpt2"), batch_size=1, sequence=128)
    found = plan(workload, CARD, strategies=("zenflow",), uploads="changed", draws=0)
    assert found.shown.strategy.config.uploads_changes
