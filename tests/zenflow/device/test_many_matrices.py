"""One launch over many matrices gives each the bits that it has alone; no fault stays unseen."""

import importlib.util
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.interpreted import needs_triton
from tests.models import assert_equal
from zenflow.device.kernels.base import FreshVectors, SecondMoments
from zenflow.device.kernels.torch_kernels import TorchKernels

pytestmark = [needs_triton, pytest.mark.gpu_too]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_INTERPRETED = DEVICE.type == "cpu"
EDGE = 2
"""Numbers around each output that nobody may write to."""


def made_kernels():
    from zenflow.device.kernels.triton_kernels import TritonKernels

    return TritonKernels(DEVICE)


@pytest.fixture
def kernels():
    return made_kernels()


def drawing(seed):
    return partial(torch.randn, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def gradients():
    """Return matrices of all dtypes and ways of reading: a bucket that is as bad as one can be."""
    normal = drawing(0)
    wide = normal(17, 32)
    return {
        "odd": normal(7, 33),
        "one row, halves": normal(1, 5).half(),
        "no row": normal(0, 9),
        "wide": wide,
        "wide, in a buffer": torch.cat([wide.new_zeros(1), wide.flatten()])[1:].view(17, 32),
        "a part of a wide one": normal(20, 48)[2:19, 16:48],
        "wide, turned": normal(48, 16).t(),
        "turned": normal(9, 34).t().bfloat16(),
        "any strides": normal(140, 40)[::2, ::2],
        "one column": normal(5, 1).bfloat16(),
    }


class Outputs:
    """Outputs by column and by row, each between edges; nobody asks for rows of `without`."""

    def __init__(self, grads, without=()):
        self.columns, self.rows = ({n: self._vector(g.shape[d]) for n, g in grads.items()}
                                   for d in (1, 0))  # fmt: skip
        self.measured = [
            (grad, self.columns[name][EDGE:-EDGE],
             self.rows[name][EDGE:-EDGE] if name not in without else grad.new_empty(0))
            for name, grad in grads.items()
        ]  # fmt: skip

    @staticmethod
    def _vector(count):
        return torch.full((count + 2 * EDGE,), -7.0, device=DEVICE)

    def all(self):
        return [*self.columns.values(), *self.rows.values()]


def check_norms(kernels, guard=lambda tensors: None):
    """Hold norms to float64, and outputs that nobody asks for to what they were."""
    grads = gradients()
    outputs = Outputs(grads, without=["odd", "turned"])
    guard([*grads.values(), *outputs.all()])
    kernels.energies(outputs.measured)
    for name, grad in grads.items():
        for vectors, dim in ((outputs.columns, 0), (outputs.rows, 1)):
            expected = Outputs._vector(grad.shape[1 - dim])
            if dim == 0 or name not in ("odd", "turned"):
                expected[EDGE:-EDGE] = grad.double().square().sum(dim)
            torch.testing.assert_close(vectors[name], expected, rtol=1e-6, atol=0.0, msg=name)


class Terms:
    """Terms of some matrices' factors; between those that move lies one that does not."""

    SHAPES = ((7, 33), (1, 5), (5, 1), (3, 4), (0, 9), (2, 70))
    IDLE = 3

    def __init__(self):
        normal = drawing(1)

        def moments(count):
            terms = (normal(count).square() + 0.1 for _ in range(5))
            return SecondMoments(*terms, torch.full((count,), -7.0, device=DEVICE))

        rows, columns = (sum(sizes) for sizes in zip(*self.SHAPES, strict=True))
        self.vectors = FreshVectors(moments(columns), normal(columns).abs(), moments(rows))
        sides = (self.vectors.columns.factors.split([shape[1] for shape in self.SHAPES]),
                 self.vectors.rows.factors.split([shape[0] for shape in self.SHAPES]))  # fmt: skip
        self.matrices = list(zip(*sides, strict=True))
        self.idle = self.matrices.pop(self.IDLE)

    def made(self, own, *, apart=False, part=slice(None)):
        """Return all factors, computed by some kernels; or all matrices' apart, or one part's."""
        own.begin_factors(self.vectors)
        asked = [[each] for each in self.matrices] if apart else [self.matrices[part]]
        for matrices in asked:
            own.make_factors(self.vectors, matrices)
        return self.factors

    @property
    def factors(self):
        return [vector for views in self.matrices for vector in views]

    def expected(self):
        """Return the factors by their formulas, in float64."""

        def moment(own):
            return (own.floor.double() + own.decay.double() * own.mean_squares.double()
                    + own.gain.double() * own.energies.double())  # fmt: skip

        columns, rows = (moment(own) for own in (self.vectors.columns, self.vectors.rows))
        widths, heights = ([shape[dim] for shape in self.SHAPES] for dim in (1, 0))
        triples = zip(*(vector.split(sizes) for vector, sizes in (
            (columns, widths), (self.vectors.shares.double(), widths), (rows, heights)
        )), strict=True)  # fmt: skip
        found = [(shares / c.sqrt(), (c.mean() / r).sqrt()) for c, shares, r in triples]
        del found[self.IDLE]
        return [vector for views in found for vector in views]


def check_factors(kernels, guard=lambda tensors: None):
    """Hold factors to float64, and those of a matrix that does not move to what they were."""
    terms = Terms()
    guard([])
    for ours, exact in zip(terms.made(kernels), terms.expected(), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=0.0)
    assert all((vector == -7.0).all() for vector in terms.idle)


def columns_of(grads):
    """Return (gradient, some of its columns in any order) each, of one all and of one none."""
    counts = {"wide": 0, "odd": 33}
    draw = torch.Generator(DEVICE).manual_seed(2)
    return [
        (grad, torch.randperm(width, generator=draw, device=DEVICE)[: counts.get(name, count)])
        for name, grad in grads.items()
        for width, count in [(grad.shape[1], 1 + grad.shape[1] // 2)]
    ]


def check_gathers(kernels, guard=lambda tensors: None):
    """Hold columns to those that torch selects."""
    asked = columns_of(gradients())
    guard([tensor for each in asked for tensor in each])
    gathered = kernels.important(asked)
    assert_equal(gathered, [grad.t()[columns] for grad, columns in asked])
    assert all(rows.is_contiguous() and rows.data_ptr() % 16 == 0 for rows in gathered)


@pytest.fixture
def narrow(monkeypatch):
    """Let small matrices need several programs, as large ones do."""
    if IS_INTERPRETED:
        from zenflow.device.kernels import triton_gathers, triton_kernels, triton_norms

        monkeypatch.setitem(triton_gathers.GATHERED, "ROWS", 4)
        monkeypatch.setitem(triton_gathers.GATHERED, "COLUMNS", 8)
        monkeypatch.setattr(triton_norms, "MOST_PROGRAMS", 4)
        monkeypatch.setitem(triton_norms.SQUARES, "ROWS", 16)
        monkeypatch.setitem(triton_norms.SQUARES, "COLUMNS", 16)
        monkeypatch.setitem(triton_norms.PARTS, "PARTS", 2)
        monkeypatch.setitem(triton_norms.PARTS, "WIDTH", 32)
        monkeypatch.setitem(triton_kernels.FACTORS, "WIDTH", 16)


CHECKS = {"norms": check_norms, "factors": check_factors, "gathers": check_gathers}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_many_matrices_get_what_the_formulas_say(kernels, narrow, check):
    check(kernels)


def test_norms_are_those_of_matrices_alone_and_of_any_others_beside_them(kernels, narrow):
    grads = gradients()
    together = Outputs(grads)
    kernels.energies(together.measured)
    for name, grad in grads.items():
        alone = Outputs({name: grad})
        kernels.energies(alone.measured)
        assert_equal([*alone.columns.values(), *alone.rows.values()],
                     [together.columns[name], together.rows[name]], name)  # fmt: skip
    turned = Outputs(dict(reversed(grads.items())))
    kernels.energies(turned.measured)
    assert_equal([turned.columns[n] for n in grads], [together.columns[n] for n in grads])
    assert_equal([together.columns["wide"]], [together.columns["wide, in a buffer"]])


def test_columns_are_those_of_matrices_alone_and_of_any_others_beside_them(kernels, narrow):
    asked = columns_of(gradients())
    together = kernels.important(asked)
    assert_equal([kernels.important([each])[0] for each in asked], together)
    turned = kernels.important(asked[::-1])
    assert_equal(turned[::-1], together)


def test_groups_of_bounded_size_change_no_bit(kernels, monkeypatch):
    from zenflow.device.kernels import triton_norms

    whole, cut = Outputs(gradients()), Outputs(gradients())
    kernels.energies(whole.measured)
    monkeypatch.setattr(triton_norms, "MOST_ELEMENTS", 600)
    groups = list(triton_norms._groups(cut.measured))
    assert len(groups) > 3
    assert {len(group) for group in groups} > {1}
    kernels.energies(cut.measured)
    assert_equal(cut.all(), whole.all())


def test_factors_are_those_of_matrices_alone_and_of_any_others_beside_them(kernels, narrow):
    together = Terms().made(kernels)
    assert_equal(Terms().made(kernels, apart=True), together, "one after another")
    some = Terms()
    some.made(kernels, part=slice(1, 3))
    assert_equal(some.factors[2:6], together[2:6], "some of them")


def test_torchs_operations_make_factors_together_or_apart(narrow):
    """Parts of a bucket come at once in keep mode, and all buckets one by one in release mode."""
    for ours, exact in zip(Terms().made(TorchKernels()), Terms().expected(), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=0.0)


def test_the_way_of_reading_is_that_of_the_shape_wherever_a_gradient_lies():
    from zenflow.device.kernels.triton_launches import ALIGNMENT, Access, readable

    ways = {}
    for name, grad in gradients().items():
        read = readable(grad)
        way = Access.of(read.shape, read.stride(), read.dtype)
        assert way == Access.of(grad.shape, grad.stride(), grad.dtype), name
        assert not way.is_wide or read.data_ptr() % ALIGNMENT == 0, name
        ways[name] = way.along, way.is_wide
    wide = {name for name, (_, is_wide) in ways.items() if is_wide}
    assert wide == {"wide", "wide, in a buffer", "a part of a wide one", "wide, turned"}
    assert [ways[n][0] for n in ("wide", "wide, turned", "any strides")] == [1, 0, -1]


def test_tables_are_sent_again_only_where_something_differs(kernels, monkeypatch):
    from zenflow.device.kernels import triton_launches

    sent = []
    send = triton_launches.Tables._sent

    def noted(self, host):
        sent.append(host)
        return send(self, host)

    monkeypatch.setattr(triton_launches.Tables, "_sent", noted)
    grads = gradients()
    grads = {name: grads[name] for name in ("wide", "a part of a wide one")}
    outputs = Outputs(grads)
    kernels.energies(outputs.measured)
    assert len(sent) == 5  # addresses, and two tables with an owner for each program
    kernels.energies(outputs.measured)
    assert len(sent) == 5
    (wide, *own), other = outputs.measured
    moved = [(wide.clone(), *own), other]
    for _ in range(2):
        kernels.energies(moved)
        assert len(sent) == 6
    kernels.energies(outputs.measured)
    assert len(sent) == 6  # both addresses are known
    columns = torch.arange(3, device=DEVICE)
    for number in (8, 8):  # a gather from the same matrices has another table alone
        kernels.important([(grad, columns) for grad, *_ in outputs.measured])
        assert len(sent) == number


def test_tables_that_were_forgotten_are_made_again(kernels, narrow, monkeypatch):
    from zenflow.device.kernels import triton_launches

    monkeypatch.setattr(triton_launches, "MOST_KNOWN", 3)
    for _ in range(2):
        for check in CHECKS.values():
            check(kernels)
            assert 0 < len(kernels._tables._known) <= 3


FAULTS = {
    "every program reads the first matrix's row": (
        "norms", "own = matrices + tl.load(owners + program)", "own = matrices + 0"),
    "a matrix is read at the first one's address": (
        "norms", "addresses + tl.load(own + FIELDS - 2)", "addresses"),
    "turned matrices are read as plain ones": (
        "norms", "        row_stride = 1", "        row_stride, column_stride = column_stride, 1"),
    "strides are exchanged": (
        "norms", "= tl.load(own + 2), tl.load(own + 3)", "= tl.load(own + 3), tl.load(own + 2)"),
    "the last row of a matrix is missing": ("norms", "row < num_rows", "row < num_rows - 1"),
    "the last column is missing": (
        "norms", "is_column = column < num_columns", "is_column = column < num_columns - 1"),
    "a row too many": ("norms", "row < num_rows", "row <= num_rows"),
    "the last tile of a strip is missing": ("norms", "range(num_tiles)", "range(num_tiles - 1)"),
    "strips overlap": ("norms", "strip * num_tiles + index", "strip + index"),
    "strips and tiles are exchanged": (
        "norms", "strip, tile = place // across, place % across",
        "tile, strip = place // across, place % across"),
    "tiles are counted from the launch's first": (
        "norms", "place = program - tl.load(own + FIELDS - 1).to(tl.int32)", "place = program"),
    "columns' parts lie where rows' do": ("norms", "tl.load(own + 7)", "tl.load(own + 6)"),
    "rows' parts of two tiles share a place": (
        "norms", "of_rows + tile.to(tl.int64) * num_rows", "of_rows"),
    "columns' parts of two strips share a place": (
        "norms", "of_columns + strip.to(tl.int64) * num_columns", "of_columns"),
    "the first matrix's parts are added up for all": (
        "norms", "own = sums + tl.load(owners + program)", "own = sums + 0"),
    "sums are written from the launch's first on": (
        "norms", "place = (program - tl.load(own + FIELDS - 1).to(tl.int32))", "place = program"),
    "a sum too many": ("norms", "place < length", "place <= length"),
    "the last sum is missing": ("norms", "place < length", "place < length - 1"),
    "the last part is missing": ("norms", "range(0, num_parts, PARTS)", "range(0, 1, PARTS)"),
    "a part of another matrix": ("norms", "number < num_parts", "number <= num_parts"),
    "a gather from the first matrix": (
        "gathers", "own = matrices + tl.load(owners + program)", "own = matrices + 0"),
    "a gather at the first matrix's address": (
        "gathers", "addresses + tl.load(own + FIELDS - 2)", "addresses"),
    "columns of another matrix": (
        "gathers", "columns = tl.load(own + 4)", "columns = tl.load(matrices + 4)"),
    "the first columns instead of those that are asked for": (
        "gathers", "column = tl.load(columns + place, mask=is_place, other=0)",
        "column = place.to(tl.int64)"),
    "gathered columns are written over another matrix's": (
        "gathers", "tl.multiple_of(tl.load(own + 6), 16)", "tl.load(own + 6) * 0"),
    "gathered tiles are counted from the launch's first": (
        "gathers", "tile = program - tl.load(own + FIELDS - 1).to(tl.int32)", "tile = program"),
    "tiles across and down are exchanged": (
        "gathers", "place = tile % across", "place = tile // across"),
    "the last row of a tile is missing": (
        "gathers", "row = tile // across * ROWS", "row = tile // across * (ROWS - 1)"),
    "the last asked column is missing": (
        "gathers", "place < num_columns", "place < num_columns - 1"),
    "a row too many of a column": ("gathers", "row < num_rows", "row <= num_rows"),
    "gathered rows have the matrix's width": (
        "gathers", "tl.load(own + 5).to(tl.int32)", "tl.load(own + 1).to(tl.int32)"),
    "the factors of the first matrix for all": (
        "factors", "own = matrices + tl.load(owners + program)", "own = matrices + 0"),
    "the mean of the first matrix": ("factors", "first + column, column <", "column, column <"),
    "the mean of less than all columns": (
        "factors", "range(0, num_columns, WIDTH)", "range(0, WIDTH, WIDTH)"),
    "the mean over a matrix's rows": (
        "factors", "num_columns.to(tl.float32)", "tl.load(own + 3).to(tl.float32)"),
    "the mean is not that of moments": ("factors", "tl.sqrt_rn(mean)", "mean"),
    "factors of rows without the mean": ("factors", "tl.sqrt_rn(mean)", "1.0"),
    "the last column's factor is missing": (
        "factors", "column < num_columns, first + column",
        "column < num_columns - 1, first + column"),
    "a row's factor too many": (
        "factors", "row < tl.load(own + 3).to(tl.int32)", "row <= tl.load(own + 3).to(tl.int32)"),
    "rows begin where columns do": (
        "factors", "tl.load(own + 2) + row", "tl.load(own) + row"),
    "chunks are counted from the launch's first": (
        "factors", "chunk = program - tl.load(own + FIELDS - 1).to(tl.int32)", "chunk = program"),
    "rows go by the terms of columns": (
        "factors", "decays_of_rows, floors_of_rows,\n            at",
        "decays, floors,\n            at"),
    "moments do not decay": ("factors", "* decay", ""),
    "this step's energies do not count": ("factors", "* gain", "* 0.0"),
    "no least moment": ("factors", "tl.load(floors + at,", "0.01 * tl.load(floors + at,"),
    "no share": ("factors", "share = tl.load(shares + at, mask=inside, other=0.0)", "share = 1.0"),
}  # fmt: skip
"""Faults of the kernels: the check that sees each, and the text that is put in another's place."""


class Guard:
    """Lets interpreted kernels access known memory alone: their arguments, and some tensors."""

    def __init__(self, tensors):
        self._tensors = list(tensors)
        self._first = self._last = np.zeros(0, np.uint64)

    def copy(self, old):
        """Return a function of a matrix whose result is known."""

        def noted(matrix):
            self._tensors.append(old(matrix))
            return self._tensors[-1]

        return noted

    def launch(self, old):
        """Return a launch that knows its arguments."""

        def call(own, *args, **kwargs):
            known = [*self._tensors, *(a for a in args if isinstance(a, torch.Tensor))]
            spans = sorted(
                (s.data_ptr(), s.data_ptr() + s.nbytes())
                for s in (tensor.untyped_storage() for tensor in known)
                if s.nbytes()
            )
            self._first, self._last = np.array(spans, np.uint64).T
            return old(own, *args, **kwargs)

        return call

    def access(self, old, place):
        """Return an access that is refused outside of what is known."""

        def checked(own, pointers, *rest):
            used = pointers.data[rest[place].data]
            at = np.searchsorted(self._first, used, side="right") - 1
            assert ((at >= 0) & (used < self._last[at])).all(), "an access outside of all memory"
            return old(own, pointers, *rest)

        return checked


@pytest.fixture
def guarded(monkeypatch):
    """Return a function that lets kernels access some tensors, and their arguments, alone."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    from zenflow.device.kernels import triton_norms

    def guard(tensors):
        own = Guard(tensors)
        monkeypatch.setattr(triton_norms, "readable", own.copy(triton_norms.readable))
        monkeypatch.setattr(GridExecutor, "__call__", own.launch(GridExecutor.__call__))
        for name, place in (("create_masked_load", 0), ("create_masked_store", 1)):
            old = getattr(InterpreterBuilder, name)
            monkeypatch.setattr(InterpreterBuilder, name, own.access(old, place))

    empty = torch.Tensor.new_empty  # new memory may have right results of an earlier launch
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(-7))
    return guard


def mutant(tmp_path, old, new):
    """Return the kernels' source with some text replaced, as a module."""
    from zenflow.device.kernels import triton_source

    text = Path(triton_source.__file__).read_text()
    assert old in text, "the source has changed: let the fault follow"
    path = tmp_path / "mutated_source.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutated_source", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_seen(check):
    """Whether a check fails, or an access that it leads to."""
    from triton.runtime.errors import InterpreterError

    try:
        check()
    except (AssertionError, InterpreterError) as error:
        cause = error
        while isinstance(cause, InterpreterError):
            cause = cause.__cause__
        return isinstance(cause, AssertionError)
    return False


@pytest.mark.skipif(not IS_INTERPRETED, reason="accesses are seen by the interpreter alone")
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_kernels_access_what_they_are_given_and_nothing_else(narrow, guarded, check):
    check(made_kernels(), guarded)


@pytest.mark.skipif(not IS_INTERPRETED, reason="faults may write anywhere")
@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_of_a_kernel_stays_unseen(narrow, guarded, monkeypatch, tmp_path, fault):
    from zenflow.device.kernels import triton_source

    name, old, new = FAULTS[fault]
    module = mutant(tmp_path, old, new)
    for kernel in ("add_squares", "add_parts", "fresh_factors", "gather"):
        monkeypatch.setattr(triton_source, kernel, getattr(module, kernel))
    assert is_seen(partial(CHECKS[name], made_kernels(), guarded))
