"""How matrices are cut, put into buckets and shared out to the steps of a window."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zenflow.rule.blocks import (
    FULL_STEP,
    MAX_BUCKET_ELEMENTS,
    MAX_COHORT_ELEMENTS,
    assign_phases,
    filled_in_order,
    partition,
)

SIZES = st.lists(st.integers(min_value=1, max_value=1 << 19), min_size=1, max_size=60)


@st.composite
def loads_in_cohorts(draw):
    """Return blocks' loads and cohorts, as neighbours."""
    held = draw(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), max_size=30))
    loads = [load for cohort in held for load in cohort]
    return loads, [index for index, cohort in enumerate(held) for _ in cohort]


@given(SIZES, st.sampled_from([MAX_BUCKET_ELEMENTS, MAX_COHORT_ELEMENTS]))
def test_buckets_follow_backward_and_each_is_filled_before_the_next(sizes, most):
    buckets = filled_in_order(sizes, most)
    enough = min(most, max(1 << 14, sum(sizes) // 32))
    held = {bucket: [] for bucket in buckets}
    for bucket, size in zip(buckets, sizes, strict=True):
        held[bucket].append(size)
    assert buckets == sorted(buckets, reverse=True)
    assert set(buckets) == set(range(max(buckets) + 1))
    for bucket, own in held.items():
        assert sum(own[1:]) < enough  # the last to come, first in order, was still wanted
        assert sum(own) >= enough or bucket == max(buckets)


@settings(max_examples=200)
@given(loads_in_cohorts(), st.integers(min_value=1, max_value=9))
def test_every_steps_load_is_near_its_fair_share(blocks, interval):
    loads, cohorts = blocks
    filled = [0] * interval
    for load, phase in zip(loads, assign_phases(loads, cohorts, interval), strict=True):
        filled[phase - 1] += load
    fair = sum(loads) / interval
    assert max(filled) <= fair + max((FULL_STEP - 1) * fair, max(loads, default=0)) + 1e-9


def test_small_cohorts_stay_whole_and_follow_one_another_through_the_phases():
    loads, cohorts = [1] * 48, [index // 3 for index in range(48)]
    phases = assign_phases(loads, cohorts, 4)
    assert phases == [1 + cohort % 4 for cohort in cohorts]


def test_a_cohort_that_would_tip_the_balance_goes_block_by_block():
    cohorts = [0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert assign_phases([10] * 9, cohorts, 2) == [1, 1, 2, 2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("load", "expected"), [(1 << 16, [1, 1, 1, 1, 2, 2, 2, 2] * 2), (1 << 17, [1, 2] * 8)]
)
def test_only_small_cohorts_stay_whole(load, expected):
    """Of large ones a task costs nothing by itself, and the finer balance is worth more."""
    cohorts = [index // 4 for index in range(16)]
    assert assign_phases([load] * 16, cohorts, 2) == expected


@pytest.mark.parametrize("interval", [2, 3, 4, 8])
def test_a_small_transformers_steps_take_few_more_tasks_than_buckets(interval):
    layer = [(256, 256)] * 4 + [(704, 256), (704, 256), (256, 704)]
    blocks = partition(
        [(512, 256)] + layer * 4, topk_ratio=0.1, update_interval=16, block_elements=None
    )
    loads, buckets = [b.deferred_elements for b in blocks], [b.bucket for b in blocks]
    assert len(blocks) > 4 * len(set(buckets))
    cohorts = [b.cohort for b in blocks]
    tasks = set(zip(buckets, assign_phases(loads, cohorts, interval), strict=True))
    assert len(tasks) <= len(set(buckets)) + 2 * interval


def test_a_large_models_matrices_share_buckets_but_end_their_windows_by_themselves():
    """The thread that launches backward pays for every bucket; the load of a step stays even."""
    layer = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048)]
    layer += [(8192, 2048), (8192, 2048), (2048, 8192)]
    blocks = partition(
        [(128256, 2048)] + layer * 16, topk_ratio=0.1, update_interval=4, block_elements=None
    )
    assert len({block.cohort for block in blocks}) == len({block.matrix for block in blocks})
    sizes = Counter()
    for block in blocks:
        sizes[block.bucket] += block.num_columns * block.num_rows
    assert len(sizes) == 25
    *filled, _ = sizes.values()  # the last has the embedding
    assert max(filled) < MAX_BUCKET_ELEMENTS + 8192 * 2048
    loads = [block.deferred_elements for block in blocks]
    phases = assign_phases(loads, [block.cohort for block in blocks], 4)
    assert sorted(Counter(phases).values()) == [29, 30, 30, 30]


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=8),
    st.integers(min_value=1, max_value=32),
)
def test_blocks_of_matrices_cover_them_and_none_is_too_small_to_be_worth_a_task(shapes, interval):
    blocks = partition(shapes, topk_ratio=0.1, update_interval=interval, block_elements=None)
    for matrix, (rows, columns) in enumerate(shapes):
        own = [block for block in blocks if block.matrix == matrix]
        assert [b.first for b in own[1:]] == [b.first + b.num_columns for b in own[:-1]]
        assert sum(b.num_columns for b in own) == columns
        if len(own) > 1:
            assert min(b.num_columns for b in own) >= 64
            assert min(b.num_columns for b in own) * rows > (1 << 15) - rows  # whole columns
