"""A decoder of 1B parameters, shrunk until its arithmetic takes no time; its counts stay.

The shapes are Llama 3.2 1B's. Rows and columns are divided by a number each, and so is every limit
in elements or bytes by which the engine decides how many blocks, buckets, banks, pieces and parts
there are. `check_counts` compares the outcome with the real shapes under the real limits, which
takes arithmetic only.

Tensors on torch's device "meta" would have the real shapes. But the host's rows, the lanes and the
ring need memory that is there, and the device's operations would go a way of their own.

Names of modules differ between versions of the engine: a limit is looked up wherever one of them
has it.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

LAYERS, HIDDEN, FEED_FORWARD, KEY_VALUE, VOCABULARY = 16, 2048, 8192, 512, 128256
TOPK_RATIO, INTERVAL = 0.1, 4
ROWS, COLUMNS = 512, 8
"""Divisors of a matrix's rows and columns. Few rows, since blocks are cut by columns."""

BLOCKS = ("zenflow.rule.blocks", "zenflow.blocks")
SIZES = "zenflow.rule.sizes"
LIMITS = {
    "MAX_BUCKET_ELEMENTS": BLOCKS,
    "MAX_COHORT_ELEMENTS": BLOCKS,
    "LEAST_FULL": BLOCKS,
    "MIN_BUCKET_ELEMENTS": BLOCKS,
    "PART_ELEMENTS": ("zenflow.columns.host_update", "zenflow.host_update"),
    "POOL_ELEMENTS": ("zenflow.columns.host_update",),
    "BANK_ELEMENTS": ("zenflow.columns.placement", "zenflow.placement"),
    "FRESH_ELEMENTS": ("zenflow.step.fresh.steps",),
    "MOST_ELEMENTS": ("zenflow.step.fresh.steps", "zenflow.step.fresh_steps"),
    "RING_BYTES": (SIZES, "zenflow.step.gradients.ring_size", "zenflow.step.ring_size"),
    "ALIGNMENT": (
        SIZES,
        "zenflow.step.gradients.ring_size",
        "zenflow.step.ring_size",
        "zenflow.columns.host_rows",
        "zenflow.host_store",
        "zenflow.device.kernels.column_table",
    ),
}
"""Limits to shrink, by the modules that may have them."""


@dataclass(frozen=True)
class Counts:
    """Counts that decide how often the engine's code runs in a step."""

    splits: int
    residents: int
    blocks: int
    buckets: int
    due: tuple[int, ...]
    """Number of blocks whose windows end, of the steps of a window; the fewest first."""


def matrices() -> list[tuple[int, int]]:
    """Return (rows, columns) of the model's matrices, in the order in which it registers them.

    >>> sum(rows * columns for rows, columns in matrices())
    1235746816
    """
    layer = [
        *[(HIDDEN, HIDDEN), (KEY_VALUE, HIDDEN), (KEY_VALUE, HIDDEN), (HIDDEN, HIDDEN)],
        *[(FEED_FORWARD, HIDDEN), (FEED_FORWARD, HIDDEN), (HIDDEN, FEED_FORWARD)],
    ]
    return [(VOCABULARY, HIDDEN), *layer * LAYERS]


NORMS = 2 * LAYERS + 1
"""Number of vectors: two norms a layer, and the last one. They stay on the device."""
NORM_SIZE = HIDDEN // COLUMNS


def shrunk() -> list[tuple[int, int]]:
    """Return the matrices as they are measured."""
    return [(math.ceil(rows / ROWS), columns // COLUMNS) for rows, columns in matrices()]


def settings() -> dict[str, Any]:
    """Return the update rule's settings that every version knows.

    Columns are selected once: a step with a selection is another thing to measure.
    """
    fair = sum(rows * columns for rows, columns in shrunk()) / (8 * INTERVAL)
    return {
        "topk_ratio": TOPK_RATIO,
        "update_interval": INTERVAL,
        "select_interval": 0,
        "min_split_elements": (1 << 16) // (ROWS * COLUMNS),
        "block_elements": math.ceil(fair),  # what None stands for, but for its least number
    }


def _found(names: Sequence[str]) -> list[ModuleType]:
    """Return the modules of these names that the measured version has.

    An editable installation of another version would lend it what it lacks.
    """
    home = Path(str(importlib.import_module("zenflow").__file__)).parent
    found = []
    for name in names:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:  # another version's name
            continue
        if home in Path(str(module.__file__)).parents:
            found.append(module)
    return found


@contextmanager
def shrunk_limits() -> Iterator[None]:
    """Divide the engine's limits as matrices are divided; all of the run must be inside."""
    with ExitStack() as stack:
        for name, owners in LIMITS.items():
            for module in _found(owners):
                real = vars(module).get(name)
                if real is not None:
                    limit = max(1, real // (ROWS * COLUMNS))
                    stack.enter_context(mock.patch.object(module, name, limit))
        yield


def _counts(blocks: Sequence[Any], num_splits: int, num_residents: int) -> Counts:
    rule = _found(BLOCKS)[0]
    loads = [block.deferred_elements for block in blocks]
    buckets = [block.bucket for block in blocks]
    # In earlier versions the buckets were the cohorts.
    cohorts = [getattr(block, "cohort", block.bucket) for block in blocks]
    phases = rule.assign_phases(loads, cohorts, INTERVAL)
    due = tuple(sorted(Counter(phases).values()))
    return Counts(num_splits, num_residents, len(blocks), len(set(buckets)), due)


def real_counts() -> Counts:
    """Return the real model's counts; call it outside of `shrunk_limits`."""
    shapes = matrices()
    rule = _found(BLOCKS)[0]
    blocks = rule.partition(
        shapes, topk_ratio=TOPK_RATIO, update_interval=INTERVAL, block_elements=None
    )
    return _counts(blocks, len(shapes), NORMS)


def counts_of(layout: Any) -> Counts:
    """Return the counts of a layout that was made inside `shrunk_limits`."""
    shapes = [block.shape for block in layout.blocks]
    return _counts(shapes, len(layout.splits), len(layout.residents))


def check_counts(found: Counts, real: Counts) -> None:
    """Refuse to measure something else than what is said.

    Raises:
        AssertionError: A count differs.
    """
    differing = {
        name: (value, asdict(real)[name])
        for name, value in asdict(found).items()
        if value != asdict(real)[name]
    }
    assert not differing, f"(found, real) counts differ: {differing}"
