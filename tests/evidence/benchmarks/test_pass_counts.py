"""Counts of the engine's own pass: launches by closed forms, bytes not under the least."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from evidence.benchmarks import pass_counts
from evidence.benchmarks.dispatched import bytes_of, num_launches
from evidence.benchmarks.interpreter import decoder_1b, order, turns
from zenflow.host.kernel import active_kernel

pytestmark = pytest.mark.skipif(
    not pass_counts.TritonKernels.is_interpreted(), reason="Triton's kernels are compiled here"
)
needs_kernel = pytest.mark.skipif(active_kernel() != "c", reason="needs the C kernel")
NUM_BANKS = 9


@needs_kernel
@pytest.mark.parametrize("kernels", pass_counts.IMPLEMENTATIONS)
def test_launches_of_a_step_are_those_of_its_matrices_blocks_and_buckets(kernels):
    counts = decoder_1b.real_counts()
    found = pass_counts.launches_of(kernels, turns.RELEASE)
    is_fused = kernels == "triton"
    landing = counts.blocks / decoder_1b.INTERVAL  # all that land in a window, over its steps
    if is_fused:  # two kernels a bucket, and a copy of its gradients' addresses where they differ
        assert 2 * counts.buckets <= found["norms"] <= 3 * counts.buckets
        assert found["factors"] == found["gather"] == counts.buckets
    else:
        assert found["norms"] == 2 * counts.splits + counts.buckets
        assert found["gather"] == counts.splits
        assert found["factors"] == 2 + 6 * counts.buckets + 2 * counts.splits
    assert found["land"] == landing * (1 if is_fused else 4)
    assert found["copies"] == counts.blocks + landing
    moved = 0 if is_fused else 2 * counts.splits
    cut = found["fresh step and pack"] - counts.blocks - moved
    assert 0 <= cut < counts.buckets + 10 if not is_fused else cut == 0
    of_columns = 25 * NUM_BANKS + counts.splits
    if is_fused:  # counts up, its table, 11 for the factors of each column, and the kernel
        of_columns = 1 + 1 + 11 + 1
    assert found["AdamW of columns"] == of_columns


def test_copies_and_launches_without_the_engine_do_not_count():
    launches = pass_counts.Launches()
    launches.is_on = True
    for kind in (turns.BARE, turns.COUNTED, turns.COUNTED):
        with launches.section(kind):
            torch.ones(3).mul_(2).view(3, 1)
    assert launches.counts == {pass_counts.REST: 2}  # a fill and a product, twice less once


def test_triton_asks_for_hardly_more_bytes_than_the_least_and_torch_for_more():
    shape = (256, 384)
    torchs, tritons = (pass_counts.bytes_of_parts(n, shape) for n in ("torch", "triton"))
    for part, own in tritons.items():
        if part != "factors":  # vectors, which weigh as much as anything in so small a matrix
            assert 1 <= own["counted"] / own["least"] < 1.3, part
    for part in ("norms", "fresh step", "fresh step and pack", "land", "AdamW of columns"):
        assert torchs[part]["counted"] > 1.5 * tritons[part]["counted"], part


def test_lists_of_one_shape_are_one_launch_and_others_are_as_many_as_they_have():
    launches = pass_counts.Launches()
    launches.is_on = True
    alike, scalars = [torch.ones(3), torch.ones(4)], [torch.ones(()), torch.ones(())]
    for others, expected in ((alike, 1), (scalars, 2)):
        launches.counts.clear()
        with launches.section(turns.COUNTED):
            torch._foreach_mul_(alike, others)
        assert launches.counts == {pass_counts.REST: expected}


class Bytes(TorchDispatchMode):
    """Adds up the bytes of operations."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        if num_launches(func, args):
            self.total += bytes_of(func, args, kwargs or {}, returned)
        return returned


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda a, i: a + a, 3 * 48),
        (lambda a, i: a.mul_(2.0), 2 * 48),
        (lambda a, i: a.zero_(), 48),
        (lambda a, i: a.t().expand(4, 3).sum(), 48 + 4),
        (lambda a, i: a[:1].expand(3, 4).clone(), 16 + 48),  # what is repeated is read once
        (lambda a, i: torch.sqrt(a, out=torch.empty(3, 4)), 2 * 48),
        (lambda a, i: a.index_select(0, i), 16 + 8 + 16),
        (lambda a, i: a.index_copy_(0, i, torch.empty(1, 4)), 16 + 8 + 16),
        (lambda a, i: torch._foreach_copy_([a], [torch.empty(3, 4)]), 2 * 48),
        (lambda a, i: torch.empty(3, 4), 0),
    ],
)
def test_an_operations_bytes_are_what_it_reads_and_writes(run, expected):
    with Bytes() as counted:
        given = torch.empty(3, 4), torch.empty(1, dtype=torch.int64)
        given[1].fill_(2)
        counted.total = 0
        run(*given)
    assert counted.total == expected


@needs_kernel
@pytest.mark.parametrize("kernels", pass_counts.IMPLEMENTATIONS)
def test_in_keep_mode_python_without_launches_comes_before_the_last_small_kernels(kernels):
    found = order.order_of(turns.KEEP, kernels)
    names = [(moment.name, moment.kind) for moment in found.moments]
    launches = [place for place, (_, kind) in enumerate(names) if kind == "launch"]
    adamw = names.index(("AdamW of columns", "launch"))
    assert names.index((order.SCHEDULING, "return")) < adamw
    assert names.index(("gradients come in", "return")) < launches[0] + len(launches) // 4
    behind = found.calls - found.moments[launches[-1]].calls
    assert behind < 0.05 * found.calls
    timeline = order.timeline_of(found)
    assert timeline.lanes == ("launches", "python")
    (scheduling,) = [span for span in timeline.spans if span.name == order.SCHEDULING]
    assert all(
        span.start >= scheduling.end for span in timeline.spans if span.name == "AdamW of columns"
    )
