"""What the search ranks by: bytes per lane, in proportion; and what it looks at first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.adviser.adviser import Adviser
from autotune.adviser.search import lane_loads, update_share
from autotune.model.twin import Twin
from tests.autotune.adviser.test_adviser import question
from tests.autotune.worlds import CONFIG, HERE, SPACE, Truth, machine, twin, workload


def a_twin(dtype, **changes):
    return Twin(workload(dtype=dtype), machine(), replace(CONFIG, **changes))


@pytest.mark.parametrize(
    ("interval", "dtype", "depth", "update", "intake"),
    [
        # Master and moments read and written, the weight for upload, the gradients that wait.
        (1, "bfloat16", 1, 24 + 2 + 2, 0),
        (1, "float32", 1, 24 + 4 + 4, 0),
        (4, "bfloat16", 4, 24 + 4 * 2 + 2, 0),
        # The same without an upload in each of the other steps.
        (4, "bfloat16", 1, 24 + 2 + 2, 3 * (24 + 2)),
        (4, "float32", 1, 24 + 4 + 4, 3 * (24 + 4)),
    ],
)
def test_the_hosts_load_counts_the_bytes_of_the_models_dtype(
    interval, dtype, depth, update, intake
):
    knobs = replace(HERE, update_interval=interval)
    own = a_twin(dtype, queue_depth=depth)
    assert update_share(knobs, own) == pytest.approx(update / (update + intake))
    per_step = 0.9 * (update + intake) / interval
    assert lane_loads(own)["host"](knobs) == pytest.approx(per_step)


def test_a_search_ends_when_its_cpu_time_is_spent():
    truth = Truth(h2d=2.0)
    asked = question([truth.stretch(0, HERE)], HERE, num_trials=12)
    whole = Adviser(twin(), SPACE).advise(asked)
    cut = Adviser(twin(), SPACE).advise(replace(asked, most_seconds=0.0))
    assert 0 < cut.num_simulated < whole.num_simulated
    assert cut.here.knobs == whole.here.knobs
