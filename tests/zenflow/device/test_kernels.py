"""Triton's kernels against float64 and torch's, interpreted where there is no GPU."""

import contextlib
import dataclasses
import itertools
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings

from evidence.benchmarks.interpreter.played_gpu import played_gpu
from tests.interpreted import needs_triton
from tests.models import TINY, TinyStack, assert_equal, closing, weights_of
from tests.zenflow import test_reference as reference
from tests.zenflow import test_resume as resume
from tests.zenflow.decisions import decisions
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.device.kernels import choice
from zenflow.device.kernels.base import (
    ColumnState,
    ColumnStep,
    FreshMove,
    HostColumns,
    LateGradient,
    Member,
)
from zenflow.device.kernels.choice import kernels_for, reason_against_triton
from zenflow.device.kernels.torch_kernels import TorchKernels
from zenflow.host import e4m3
from zenflow.host_state import gradient_width
from zenflow.rule.adamw import Hyper
from zenflow.surface import assembly

pytestmark = [needs_triton, pytest.mark.gpu_too]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(1, 5), (5, 1), (7, 33), (65, 130)]
"""One row, one column, less than a tile, and more than one in both directions."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOW = pytest.mark.slow if DEVICE.type == "cpu" else ()
EVERY = pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        # The interpreter takes numbers of 16 bits alike: each shape meets one of both quickly.
        pytest.param(shape, dtype, marks=SLOW if place % 2 + 1 == index else (),
                     id=f"{shape}-{dtype}")
        for place, shape in enumerate(SHAPES)
        for index, dtype in enumerate(DTYPES)
    ],
)  # fmt: skip
MODES = [pytest.param("keep", marks=SLOW), "release"]
"""Modes of whole runs, for which the interpreter takes seconds each."""
UNIT = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Largest relative error of a result in this dtype; the interpreter cuts off, a GPU rounds."""


@pytest.fixture
def kernels():
    from zenflow.device.kernels.triton_kernels import TritonKernels

    return TritonKernels(DEVICE)


class Matrix:
    """A weight and a gradient with odd strides, and columns that are deferred or important."""

    def __init__(self, shape, dtype, *, seed=0):
        draw = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*size):
            return torch.randn(*size, generator=draw, device=DEVICE).to(dtype)

        rows, columns = shape
        self.weight = normal(rows, columns + 3)[:, 1:-2]
        self.grad = normal(columns, rows).t()
        order = torch.randperm(columns, generator=draw, device=DEVICE)
        self.important, self.deferred = order.split([columns // 3, columns - columns // 3])
        self.on_host = HostColumns.of(self.deferred, columns)
        factors = (torch.rand(n, generator=draw, device=DEVICE) for n in ((columns,), (rows, 1)))
        stays = torch.ones(columns, device=DEVICE)
        stays[self.important] = 0.0
        self.move = FreshMove(*factors, rate=0.3, stays=stays)
        self.arrived = normal(len(self.deferred), rows)

    def moved(self, values, grad, columns, rate):
        """Return values (D, O) with the fresh step by a gradient (D, O), in float64."""
        of_columns = self.move.column_factors[columns].double()[:, None]
        return (
            values.double()
            - rate * grad.double() * of_columns * self.move.row_factors.t().double()
        )


def assert_near(actual, expected, dtype, terms=1.0):
    """Compare with a result in float64, of terms that are this large."""
    error = (actual.double() - expected).abs()
    limit = UNIT[dtype] * (expected.abs() + terms) + 4 * UNIT[torch.float32] * terms
    assert (error <= limit).all(), error.max()


@EVERY
def test_squares_add_up_by_column_and_by_row(kernels, shape, dtype):
    grad = Matrix(shape, dtype).grad
    columns, rows = (torch.full((n,), -1.0, device=DEVICE) for n in reversed(shape))
    kernels.energies([(grad, columns, rows)])
    for found, dim in ((columns, 0), (rows, 1)):
        torch.testing.assert_close(found.double(), grad.double().square().sum(dim), rtol=1e-6,
                                   atol=0.0)  # fmt: skip
    alone = torch.full_like(columns, -1.0)
    kernels.energies([(grad, alone, rows[:0])])
    assert_equal([alone], [columns], "without rows")


def test_strips_of_many_tiles_add_up_too(kernels, monkeypatch):
    from zenflow.device.kernels import triton_norms

    monkeypatch.setattr(triton_norms, "MOST_PROGRAMS", 6)
    grad = Matrix((700, 130), torch.float32).grad
    columns, rows = torch.zeros(130, device=DEVICE), torch.zeros(700, device=DEVICE)
    kernels.energies([(grad, columns, rows)])
    torch.testing.assert_close(columns.double(), grad.double().square().sum(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(rows.double(), grad.double().square().sum(1), rtol=1e-6, atol=0)


@EVERY
def test_gradients_are_divided_by_the_roots_of_their_second_moments(kernels, shape, dtype):
    m = Matrix(shape, dtype)
    found = kernels.divide(m.grad, FreshMove(m.move.column_factors, m.move.row_factors, 0.3))
    assert (found.dtype, found.shape) == (dtype, m.grad.shape)
    expected = 0.3 * m.grad.double() * m.move.column_factors.double() * m.move.row_factors.double()
    error = (found.double() - expected).abs()
    assert (error <= (UNIT[dtype] + 4 * UNIT[torch.float32]) * expected.abs()).all()


@EVERY
@pytest.mark.parametrize("way", ["packs", "moves", "both"])
def test_columns_are_packed_and_their_weights_moved(kernels, shape, dtype, way):
    m = Matrix(shape, dtype)
    before, deferred = m.weight.clone(), m.deferred
    packed = torch.full((len(deferred), shape[0]), 7.0, dtype=dtype, device=DEVICE)
    if way == "packs":
        kernels.pack(m.grad, m.on_host, packed)
    elif way == "moves":
        kernels.move(m.weight, m.grad, m.move)
    else:
        kernels.pack(m.grad, m.on_host, packed, m.weight, m.move)
    rows = m.grad.t()[deferred]
    assert_equal([packed], [torch.full_like(rows, 7.0) if way == "moves" else rows])
    assert_equal([m.weight[:, m.important]], [before[:, m.important]], "important columns")
    expected = before.t()[deferred].double()
    if way != "packs":
        expected = m.moved(expected, rows, deferred, m.move.rate)
    assert_near(m.weight.t()[deferred], expected, dtype)
    assert_equal(kernels.important([(m.grad, m.important)]), [m.grad.t()[m.important]])


@EVERY
@pytest.mark.parametrize("moves", [False, True])
def test_columns_are_packed_in_eight_bits_and_moved_by_all_of_theirs(kernels, shape, dtype, moves):
    m, plain = Matrix(shape, dtype), Matrix(shape, dtype)
    m.grad[: shape[0] // 2] *= 2**-9  # small numbers of a group
    count, width = len(m.deferred), gradient_width("e4m3", shape[0])
    packed, expected = (
        torch.full((count, width), 7, dtype=torch.uint8, device=DEVICE) for _ in range(2)
    )
    further = (m.weight, m.move) if moves else ()
    kernels.pack(m.grad, m.on_host, packed, *further)
    e4m3.encode(m.grad.t()[m.deferred], expected)
    assert_equal([packed], [expected])
    if moves:
        kernels.move(plain.weight, m.grad, m.move)
    assert_equal([m.weight], [plain.weight])
    TorchKernels().pack(m.grad, m.on_host, packed.zero_())
    assert_equal([packed], [expected], "torch's operations")


@pytest.mark.parametrize("value", [0.0, 1e-40, 3e38, float("inf"), float("nan")])
def test_numbers_at_the_ends_of_the_range_are_packed_as_torch_does(kernels, value):
    m = Matrix((65, 33), torch.float32)
    m.grad[3, ::2] = value
    packed, expected = (
        torch.zeros(len(m.deferred), 67, dtype=torch.uint8, device=DEVICE) for _ in range(2)
    )
    kernels.pack(m.grad, m.on_host, packed)
    TorchKernels().pack(m.grad, m.on_host, expected)
    assert_equal([packed & 0x7F], [expected & 0x7F])  # a NaN's sign says nothing


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_of_a_matrix_are_packed_and_moved_each_once(kernels, shape):
    """The ring may cut a matrix anywhere, and selections leave columns in any order."""
    m, whole = Matrix(shape, torch.float32), Matrix(shape, torch.float32)
    count, rows = len(m.deferred), m.grad.t()[m.deferred]
    move = FreshMove(m.move.column_factors * m.move.stays, m.move.row_factors, m.move.rate)
    packed = torch.full_like(rows, 7.0)
    for low, high in itertools.pairwise(sorted({0, 1, count // 2, count - 1, count})):
        part = HostColumns(m.deferred[low:high], m.on_host.rows, low, high, 0, shape[1])
        kernels.pack(m.grad, part, packed[low:high], m.weight, move)
    kernels.move(whole.weight, m.grad, move)
    assert_equal([packed, m.weight], [rows, whole.weight])


@EVERY
@pytest.mark.parametrize("newer", ["none", "packed", "whole"])
def test_rows_land_with_the_fresh_step_of_a_late_gradient(kernels, shape, dtype, newer):
    m = Matrix(shape, dtype)
    before, deferred, rows = m.weight.clone(), m.deferred, m.grad.t()[m.deferred]
    late = {
        "none": None,
        "packed": LateGradient(rows, is_packed=True, move=m.move),
        "whole": LateGradient(m.grad.t(), is_packed=False, move=m.move),
    }[newer]
    kernels.land(m.arrived.clone(), m.on_host, m.weight, late)
    rate = 0.0 if late is None else m.move.rate
    assert_near(m.weight.t()[deferred], m.moved(m.arrived, rows, deferred, rate), dtype)
    assert_equal([m.weight[:, m.important]], [before[:, m.important]], "other columns")


@EVERY
@pytest.mark.parametrize("newer", ["packed", "whole", "rounded"])
def test_rows_that_move_on_before_they_land_land_alike(kernels, shape, dtype, newer):
    """Ranks that share the host's work bring their rows together in between."""
    for own in (kernels, TorchKernels()):
        m, apart = Matrix(shape, dtype), Matrix(shape, dtype)
        is_packed = newer == "packed"
        rows = m.grad.t()[m.deferred] if is_packed else m.grad.t()
        late = LateGradient(rows, is_packed, m.move, is_rounded=newer == "rounded")
        own.land(m.arrived.clone(), m.on_host, m.weight, late)
        arrived = m.arrived.clone()
        own.move_on(arrived, m.on_host, late)
        own.land(arrived, m.on_host, apart.weight, None)
        assert_equal([apart.weight], [m.weight])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_land_alike_with_a_rounded_gradient_that_was_packed_or_not(kernels, dtype):
    for own in (kernels, TorchKernels()):
        m, whole = Matrix((65, 130), dtype), Matrix((65, 130), dtype)
        packed = torch.zeros(len(m.deferred), 67, dtype=torch.uint8, device=DEVICE)
        own.pack(m.grad, m.on_host, packed)
        late = LateGradient(packed, is_packed=True, move=m.move, is_rounded=True)
        own.land(m.arrived.clone(), m.on_host, m.weight, late)
        late = LateGradient(m.grad.t(), is_packed=False, move=m.move, is_rounded=True)
        own.land(m.arrived.clone(), m.on_host, whole.weight, late)
        assert_equal([m.weight], [whole.weight])
        rows = e4m3.decode(packed)
        expected = m.moved(m.arrived, rows, m.deferred, m.move.rate)
        assert_near(m.weight.t()[m.deferred], expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_important_columns_take_torchs_step_at_counts_of_their_own(kernels, dtype, scaled):
    """Two matrices share a bank; what is left of them and of it stays as it is."""
    matrices = [Matrix((65, 130), dtype, seed=1), Matrix((65, 7), dtype, seed=2)]
    of_torch, hyper = TorchKernels(), Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1)
    factor = torch.tensor(0.7, device=DEVICE) if scaled else None
    results = []
    for own in (kernels, of_torch):
        count = sum(len(m.important) for m in matrices)
        draw = torch.Generator(DEVICE).manual_seed(3)
        master, mean, square = (
            torch.rand(count, 65, generator=draw, device=DEVICE) for _ in range(3)
        )
        step = torch.arange(count, device=DEVICE) % 5
        weights = [m.weight.clone() for m in matrices]
        members = [
            Member(weight, m.important, gradient)
            for weight, m, gradient in zip(
                weights, matrices, own.important([(m.grad, m.important) for m in matrices]),
                strict=True,
            )
        ]  # fmt: skip
        state = ColumnState(master, mean, square, step)
        own.update([ColumnStep(state, members, hyper)], factor)
        results.append(([master, mean, square], [step], weights))
    (state, step, weights), (state_of_torch, step_of_torch, weights_of_torch) = results
    for ours, theirs in zip(state, state_of_torch, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert_equal(step, step_of_torch)
    for m, ours, theirs in zip(matrices, weights, weights_of_torch, strict=True):
        assert_near(ours, theirs.double(), dtype)
        assert_equal([ours[:, m.deferred]], [m.weight[:, m.deferred]])


def column_steps(kernels, kinds):
    """Return steps of banks: shapes and dtype of the matrices, settings, whether weights are here.

    Columns have taken 0 to 4 steps.
    """
    steps = []
    for seed, (shapes, dtype, hyper, is_here) in enumerate(kinds):
        matrices = [Matrix(shape, dtype, seed=seed + 10 * i) for i, shape in enumerate(shapes)]
        draw = torch.Generator(DEVICE).manual_seed(seed)
        members = [
            Member(
                m.weight if is_here else None,
                m.important,
                *kernels.important([(m.grad, m.important)]),
            )
            for m in matrices
        ]
        size = sum(len(m.important) for m in matrices), shapes[0][0]
        state = [torch.rand(size, generator=draw, device=DEVICE) for _ in range(3)]
        counts = (torch.arange(size[0], device=DEVICE) + seed) % 5
        steps.append(ColumnStep(ColumnState(*state, counts), members, hyper))
    return steps


def tensors_of(steps):
    states = [(s.state.master, s.state.exp_avg, s.state.exp_avg_sq, s.state.step) for s in steps]
    weights = [member.weight for step in steps for member in step.members]
    return [tensor for state in states for tensor in state] + [w for w in weights if w is not None]


SLOWLY, QUICKLY = Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1), Hyper(3e-3, 0.7, 0.99, 1e-6, 0.0)
BANKS = [
    ([(65, 40), (65, 7), (65, 2)], torch.bfloat16, SLOWLY, True),
    ([(48, 33)], torch.bfloat16, SLOWLY, True),
    ([(48, 33), (48, 110)], torch.bfloat16, QUICKLY, True),
    ([(1, 40)], torch.bfloat16, QUICKLY, False),
    ([(65, 9)], torch.float32, SLOWLY, True),
]
"""Columns of any length, matrices without an important column, and every pair of settings."""


@pytest.mark.parametrize("scaled", [False, True])
def test_columns_of_all_matrices_step_together_as_those_of_each_by_themselves(kernels, scaled):
    factor = torch.tensor(0.7, device=DEVICE) if scaled else None
    together, alone = column_steps(kernels, BANKS), column_steps(kernels, BANKS)
    kernels.update(together, factor)
    for step in alone:
        first = 0
        for member in step.members:
            own = slice(first, first + len(member.columns))
            names = ("master", "exp_avg", "exp_avg_sq", "step")
            state = ColumnState(*(getattr(step.state, name)[own] for name in names))
            kernels.update([ColumnStep(state, [member], step.hyper)], factor)
            first = own.stop
    assert_equal(tensors_of(together), tensors_of(alone))
    assert not torch.equal(tensors_of(together)[0], tensors_of(column_steps(kernels, BANKS))[0])


def test_columns_of_equal_settings_and_type_are_one_launch(kernels, monkeypatch):
    from zenflow.device.kernels import triton_source

    launches = Launches()
    monkeypatch.setattr(triton_source, "adamw", launches)
    kernels.update(column_steps(kernels, BANKS), None)
    of_slow, of_quick, of_float = [(4,), (1,)], [(3,), (1,)], [(2,)]  # the second are aligned
    assert launches.grids == [*of_slow, *of_quick, *of_float]


def test_addresses_are_sent_again_only_where_one_is_another(kernels):
    steps = column_steps(kernels, BANKS[:2])
    sent, addresses = [], kernels._tables.addresses
    kernels._tables.addresses = lambda numbers: sent.append(addresses(numbers)) or sent[-1]
    for _ in range(2):
        kernels.update(steps, None)
    other = Member(*(getattr(steps[0].members[0], n) for n in ("weight", "columns")),
                   steps[0].members[0].gradient.clone())  # fmt: skip
    moved = dataclasses.replace(steps[0], members=[other, *steps[0].members[1:]])
    kernels.update([moved, *steps[1:]], None)
    # Each update has two launches.
    places = [table.data_ptr() for table in sent]
    first, again, moved = places[:2], places[2:4], places[4:]
    assert first == again
    assert [a == b for a, b in zip(first, moved, strict=True)] == [False, True]


SMALL, LARGE = 0, 2
OF_ROWS = [SMALL, SMALL, SMALL, SMALL, SMALL]
OF_ADDRESSES = [LARGE, LARGE, LARGE, LARGE, LARGE, LARGE]
"""Matrix from which another one has a number of its table, so that no access is out of bounds."""


@pytest.mark.parametrize("number", range(len(OF_ROWS) + len(OF_ADDRESSES)))
def test_a_wrong_number_in_the_tables_of_columns_is_noticed(kernels, monkeypatch, number):
    """As a test of the tests above: each of a matrix's numbers has a part in the result."""
    kinds = [([shape], torch.float32, SLOWLY, True) for shape in ((33, 10), (65, 40), (130, 40))]
    right, wrong = column_steps(kernels, kinds), column_steps(kernels, kinds)
    wrong[SMALL].members[0] = dataclasses.replace(
        wrong[SMALL].members[0], weight=torch.zeros(33, 1, device=DEVICE).expand(33, 10)
    )
    kernels.update(right, None)
    tables = kernels._tables
    table, addresses = tables.table, tables.addresses
    tables._known.clear()

    def spoilt_table(rows, programs):
        rows = [list(row) for row in rows]
        if number < len(OF_ROWS):
            rows[1][number] = rows[OF_ROWS[number]][number]
        return table(rows, programs)

    def spoilt_addresses(numbers):
        numbers, fields = list(numbers), len(OF_ADDRESSES)
        place = number - len(OF_ROWS)
        if place >= 0:
            numbers[fields + place] = numbers[OF_ADDRESSES[place] * fields + place]
        return addresses(tuple(numbers))

    monkeypatch.setattr(tables, "table", spoilt_table)
    monkeypatch.setattr(tables, "addresses", spoilt_addresses)
    kernels.update(wrong, None)
    same = [torch.equal(*pair) for pair in zip(tensors_of(right), tensors_of(wrong), strict=True)]
    assert not all(same[:-3] + same[-2:])  # the small matrix's weight is another one


class Launches:
    """Stands for a kernel: notes the grids that it is launched with."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **settings: None


def test_a_rank_without_a_row_of_a_matrix_launches_nothing(kernels, monkeypatch):
    from zenflow.device.kernels import triton_source

    launches = Launches()
    for name in ("add_squares", "add_parts", "gather", "move_and_pack", "land", "adamw"):
        monkeypatch.setattr(triton_source, name, launches)
    m = Matrix((0, 9), torch.float32)
    columns, rows = torch.ones(9, device=DEVICE), torch.ones(0, device=DEVICE)
    kernels.energies([(m.grad, columns, rows)])
    assert not columns.any()
    (gradient,) = kernels.important([(m.grad, m.important)])
    kernels.move(m.weight, m.grad, m.move)
    kernels.pack(m.grad, m.on_host, m.arrived, m.weight, m.move)
    kernels.land(m.arrived, m.on_host, m.weight, None)
    count = torch.zeros(len(m.important), dtype=torch.int64, device=DEVICE)
    state = ColumnState(*(gradient.clone() for _ in range(3)), count)
    hyper = Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1)
    step = ColumnStep(state, [Member(m.weight, m.important, gradient)], hyper)
    kernels.update([step], None)
    assert launches.grids == []
    assert (count == 1).all()


@contextlib.contextmanager
def on_triton():
    """Let all optimizers take a GPU's way, with Triton's kernels."""

    def chosen(_, device, of_torch):
        return kernels_for("triton", device, of_torch)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(assembly, "kernels_for", chosen))
        if DEVICE.type == "cpu":
            stack.enter_context(played_gpu())
        yield


@pytest.mark.parametrize("mode", ["keep", "release"])
@settings(max_examples=4, deadline=None)
@given(scenario=reference.scenarios())
def test_an_engine_with_these_kernels_follows_the_reference(mode, scenario):
    with on_triton():
        reference.check_scenario(scenario, mode, device=DEVICE.type)


@on_triton()
@pytest.mark.parametrize("mode", MODES)
def test_columns_that_change_their_owner_are_known_to_the_kernels(mode):
    """By selections and by changes of k."""
    config = ZenFlowConfig(
        topk_ratio=0.25, update_interval=2, select_interval=2, block_elements=30, **TINY
    )
    log = decisions(config, [(4, {"topk_ratio": 0.6}), (8, {"topk_ratio": 0.4})])
    scenario = reference.Scenario(config, [(6, 16), (3, 8)], num_steps=12, log=log)
    reference.check_scenario(scenario, mode, device=DEVICE.type)


@on_triton()
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_eight_bits_follow_their_reference(mode):
    from tests.zenflow.step.test_gradient_link import check

    config = ZenFlowConfig(
        topk_ratio=0.25, update_interval=2, select_interval=2, block_elements=700,
        gradient_link="e4m3", **TINY,
    )  # fmt: skip
    check(reference.Scenario(config, [(6, 16), (70, 9)], num_steps=8), mode, device=DEVICE.type)


@on_triton()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("few", [{}, {"gradient_link": "e4m3", "host_state": "compact"}], ids=str)
def test_factored_second_moments_follow_their_reference(mode, few):
    from tests.factored_reference import FactoredCompactReference
    from tests.zenflow.step.test_compact_rule import check
    from tests.zenflow.step.test_factored import FLIPPED

    config = ZenFlowConfig(
        topk_ratio=0.25, update_interval=2, select_interval=2, block_elements=700,
        second_moment="factored", **few, **TINY,
    )  # fmt: skip
    log = decisions(config, [(4, {"topk_ratio": 0.6})])
    scenario = reference.Scenario(config, [(6, 16), (70, 9)], num_steps=8, log=log)
    if few:
        check(scenario, mode, is_random=False, kind=FactoredCompactReference, most=FLIPPED)
    else:
        reference.check_scenario(scenario, mode, device=DEVICE.type)


@on_triton()
def test_a_run_that_is_loaded_goes_on_bit_for_bit():
    model, settings = partial(TinyStack, num_layers=2), {"config": resume.config_of("exact")}
    resume.check_resume(
        {**settings, "mode": "release", "model": model, "device": DEVICE.type,
         "log": resume.SCHEDULES["k"]}, (4, 7)
    )  # fmt: skip


@on_triton()
def test_equal_runs_give_equal_bits_in_either_mode(monkeypatch):
    """Where columns fill whole lines, blocks lie side by side in the ring and share a kernel."""
    from zenflow.device.kernels.triton_kernels import TritonKernels

    pack, packed, results = TritonKernels.pack, set(), []

    def noted(self, grad, columns, *rest):
        packed.add(len(columns))
        pack(self, grad, columns, *rest)

    monkeypatch.setattr(TritonKernels, "pack", noted)
    config = ZenFlowConfig(
        topk_ratio=0.25, update_interval=3, select_interval=2, block_elements=96 * 32, **TINY
    )
    for mode in ("keep", "release", "release"):
        model = TinyStack(num_layers=2, width=96).to(DEVICE)
        clips = {"offload_gradients": mode, "max_grad_norm": 0.3}
        with closing(ZenFlowAdamW(model.parameters(), config=config, **clips)) as optimizer:
            for step in range(5):
                model.loss(step).backward()
                optimizer.step()
            optimizer.eval()
            results.append(weights_of(model))
    assert packed > {24, 72}  # a block, a whole matrix, and some of its blocks
    assert_equal(results[1], results[0], "release mode")
    assert_equal(results[2], results[1], "again")


def test_kernels_are_chosen_by_device_and_what_can_not_run_says_why(monkeypatch):
    of_torch, cpu = TorchKernels(), torch.device("cpu")
    assert kernels_for("auto", cpu, of_torch) is kernels_for("torch", cpu, of_torch) is of_torch
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
    reason_against_triton.cache_clear()
    try:
        with pytest.raises(ValueError, match="package triton is not installed"):
            kernels_for("triton", cpu, of_torch)
    finally:
        monkeypatch.undo()
        reason_against_triton.cache_clear()


def test_a_name_of_no_kernels_is_refused():
    with pytest.raises(ValueError, match="kernels must be one of auto, triton, torch, got 'fast'"):
        ZenFlowAdamW(TinyStack().parameters(), kernels="fast")
