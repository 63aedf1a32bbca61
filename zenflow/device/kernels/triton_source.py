"""The kernels in Triton's language: each reads and writes what it has to, once.

Matrices are given by a pointer and two strides, so that a transposed view costs nothing. A tile is
ROWS x COLUMNS elements of one program. Sums are added up in an order that the shape alone decides,
without atomics. So equal inputs give equal bits.

Triton compiles a kernel anew where a number is 1 or begins to be divisible by 16. Numbers by which
no access gets wider are left out of that.
"""

# ruff: noqa: ANN001, ANN201 - Triton's own signatures

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tiles"])
def add_squares(
    matrix, of_columns, of_rows, num_rows, num_columns, row_stride, column_stride, num_tiles,
    HAS_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up squares: by column over a strip of `num_tiles` tiles, by row over one tile's width.

    `of_columns` is (strips, I), `of_rows` (tiles across, O), float32.
    """
    strip, tile = tl.program_id(0), tl.program_id(1)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    places = column.to(tl.int64)[None, :] * column_stride
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for index in range(num_tiles):
        row = (strip * num_tiles + index) * ROWS + tl.arange(0, ROWS)
        is_row = row < num_rows
        at = matrix + row.to(tl.int64)[:, None] * row_stride + places
        values = tl.load(at, mask=is_row[:, None] & is_column[None, :], other=0.0)
        values = values.to(tl.float32)
        squares = values * values
        total += tl.sum(squares, axis=0)
        if HAS_ROWS:
            tl.store(of_rows + tile * num_rows + row, tl.sum(squares, axis=1), mask=is_row)
    tl.store(of_columns + strip.to(tl.int64) * num_columns + column, total, mask=is_column)


@triton.jit(do_not_specialize=["num_strips", "num_across", "num_first"])
def add_parts(
    of_columns, of_rows, columns, rows, num_columns, num_rows, num_strips, num_across, num_first,
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add up the parts that `add_squares` has left: columns by the first programs, then rows."""
    program = tl.program_id(0)
    if program < num_first:
        source, target, length, num_parts = of_columns, columns, num_columns, num_strips
        first = program * WIDTH
    else:
        source, target, length, num_parts = of_rows, rows, num_rows, num_across
        first = (program - num_first) * WIDTH
    place = first + tl.arange(0, WIDTH)
    is_place = place < length
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for part in range(0, num_parts, PARTS):
        number = part + tl.arange(0, PARTS)
        inside = (number < num_parts)[:, None] & is_place[None, :]
        at = source + number.to(tl.int64)[:, None] * length + place[None, :]
        total += tl.sum(tl.load(at, mask=inside, other=0.0), axis=0)
    tl.store(target + place, total, mask=is_place)


@triton.jit(do_not_specialize=["num_columns"])
def gather(
    matrix, columns, rows, num_columns, num_rows, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write some columns of a matrix as rows, (K, O)."""
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_place, is_row = place < num_columns, row < num_rows
    inside = is_row[:, None] & is_place[None, :]
    column = tl.load(columns + place, mask=is_place, other=0)
    at = matrix + row.to(tl.int64)[:, None] * row_stride + column[None, :] * column_stride
    values = tl.load(at, mask=inside, other=0.0)
    tl.store(rows + place.to(tl.int64)[None, :] * num_rows + row[:, None], values, mask=inside)


@triton.jit
def e4m3_of(values):
    """Return the codes of a tile whose columns are a group each, and the groups' exponent bytes.

    See `zenflow.host.e4m3`.
    """
    bits = values.to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    largest = tl.minimum(tl.max(size, axis=0), 0x7F800000)
    exponent = tl.maximum((largest + 0x7FFFF + ((largest >> 20) & 1) >> 23) - 15, 2)
    base = exponent[None, :] * 8
    code = (size + 0x7FFFF + ((size >> 20) & 1) >> 20) - base
    lifted = (size > (base + 1 << 20) - (1 << 23)).to(tl.int32)
    code = tl.minimum(tl.maximum(code, lifted), 127) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8), exponent.to(tl.uint8)


@triton.jit(do_not_specialize=["first_row", "last_row"])
def move_and_pack(
    grad, weight, packed, host_rows, column_factors, stays, row_factors, rate,
    first_row, last_row, first_column, last_column, num_rows,
    grad_row, grad_column, weight_row, weight_column, MOVES: tl.constexpr, STAYS: tl.constexpr,
    PACKS: tl.constexpr, ROUNDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Read neighbouring columns of a gradient once: move their weights, pack some, or both.

    Columns are packed, and moved, whose host row is in first_row..last_row-1; without packing all
    of them are moved. A column among them that is not moved gets the weight that it has, so that
    accesses are of whole memory lines. With `ROUNDS` the packed columns are those of
    `zenflow.host.e4m3`, and a tile has as many rows as a group.
    """
    column = first_column + tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_column, is_row = column < last_column, row < num_rows
    inside = is_row[:, None] & is_column[None, :]
    rows, columns = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
    chosen = is_column
    if PACKS:
        place = tl.load(host_rows + column, mask=is_column, other=-1)
        chosen = (place >= first_row) & (place < last_row)
    if tl.max(chosen.to(tl.int32), axis=0) > 0:  # a matrix in several pieces is read about once
        values = tl.load(grad + rows * grad_row + columns * grad_column, mask=inside, other=0.0)
        if PACKS:
            of_place = (place - first_row).to(tl.int64)
            sent = is_row[:, None] & chosen[None, :]
            if ROUNDS:
                width = num_rows + tl.cdiv(num_rows, ROWS)
                codes, exponent = e4m3_of(values)
                tl.store(packed + of_place[None, :] * width + row[:, None], codes, mask=sent)
                at = packed + of_place * width + num_rows + tl.program_id(1)
                tl.store(at, exponent, mask=chosen)
            else:
                at = packed + of_place[None, :] * num_rows + row[:, None]
                tl.store(at, values, mask=sent)
        if MOVES:
            of_columns = tl.load(column_factors + column, mask=chosen, other=0.0)
            if STAYS:
                of_columns = of_columns * tl.load(stays + column, mask=chosen, other=0.0)
            of_rows = tl.load(row_factors + row, mask=is_row, other=0.0)
            at = weight + rows * weight_row + columns * weight_column
            old = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            motion = rate * (values.to(tl.float32) * of_columns[None, :]) * of_rows[:, None]
            tl.store(at, (old - motion).to(weight.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_row", "last_row"])
def land(
    arrived, weight, late, host_rows, column_factors, row_factors, rate,
    first_row, last_row, first_column, last_column, num_rows,
    weight_row, weight_column, late_place, late_row,
    IS_LATE: tl.constexpr, IS_PACKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write rows into a weight's columns, the fresh step of a late gradient applied.

    `late` is (D, O) or (I, O), by `IS_PACKED`; its strides are those of its two dimensions. Other
    columns than those that arrive are not touched: another stream may write to them.
    """
    column = first_column + tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_column, is_row = column < last_column, row < num_rows
    place = tl.load(host_rows + column, mask=is_column, other=-1)
    arrives = (place >= first_row) & (place < last_row)
    inside = is_row[:, None] & arrives[None, :]
    rows, columns = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
    places = (place - first_row).to(tl.int64)[None, :]
    values = tl.load(arrived + places * num_rows + rows, mask=inside, other=0.0)
    if IS_LATE:
        source = places if IS_PACKED else columns
        newer = tl.load(late + source * late_place + rows * late_row, mask=inside, other=0.0)
        of_columns = tl.load(column_factors + column, mask=is_column, other=0.0)
        of_rows = tl.load(row_factors + row, mask=is_row, other=0.0)
        motion = rate * (newer.to(tl.float32) * of_columns[None, :]) * of_rows[:, None]
        values = (values.to(tl.float32) - motion).to(weight.dtype.element_ty)
    tl.store(weight + rows * weight_row + columns * weight_column, values, mask=inside)


STEPPED = tl.constexpr(11)
"""Number of a matrix's numbers in the table of `adamw`."""


@triton.jit
def at_address(address, dtype: tl.constexpr, IS_WIDE: tl.constexpr):
    """Return the address of a table as a pointer; with `IS_WIDE` it is a multiple of 16 bytes."""
    pointer = tl.load(address).to(tl.pointer_type(dtype))
    if IS_WIDE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def adamw(
    table, step_size, denom_scale, factor, kept, rest1, beta2, rest2, eps,
    HAS_FACTOR: tl.constexpr, IS_WIDE: tl.constexpr, DTYPE: tl.constexpr, MATRICES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Step columns that lie as rows (K, O), by torch.optim.AdamW's formulas; write the weights.

    A program has one tile of one matrix. `table` has the number of each matrix's first tile,
    (MATRICES,), and then `STEPPED` numbers a matrix, all int64. Numbers beyond the last matrix's
    are larger than any tile's. A weight at address 0 is not written.
    """
    tile = tl.program_id(0)
    first_tiles = tl.load(table + tl.arange(0, MATRICES))
    matrix = tl.sum((first_tiles <= tile).to(tl.int32), axis=0) - 1
    tile -= tl.load(table + matrix).to(tl.int32)
    own = table + MATRICES + matrix * STEPPED
    num_columns, num_rows = tl.load(own).to(tl.int32), tl.load(own + 1).to(tl.int32)
    if IS_WIDE:
        num_rows = tl.multiple_of(num_rows, 16)
    across = tl.cdiv(num_columns, COLUMNS)
    place = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    row = tile // across * ROWS + tl.arange(0, ROWS)
    is_place, is_row = place < num_columns, row < num_rows
    inside = is_place[:, None] & is_row[None, :]
    at = place.to(tl.int64)[:, None] * num_rows + row[None, :]
    new = tl.load(at_address(own + 2, DTYPE, IS_WIDE) + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        new = new * tl.load(factor)
    master = at_address(own + 3, tl.float32, IS_WIDE) + at
    exp_avg = at_address(own + 4, tl.float32, IS_WIDE) + at
    exp_avg_sq = at_address(own + 5, tl.float32, IS_WIDE) + at
    mean = tl.load(exp_avg, mask=inside, other=0.0)
    square = tl.load(exp_avg_sq, mask=inside, other=0.0)
    value = tl.load(master, mask=inside, other=0.0)
    of_place = tl.load(own + 6) + place
    size = tl.load(step_size + of_place, mask=is_place, other=0.0)[:, None]
    scale = tl.load(denom_scale + of_place, mask=is_place, other=1.0)[:, None]
    mean = mean + rest1 * (new - mean)
    square = square * beta2 + rest2 * (new * new)
    denom = tl.div_rn(tl.sqrt_rn(square), scale) + eps
    value = value * kept - tl.div_rn(mean * size, denom)
    tl.store(exp_avg, mean, mask=inside)
    tl.store(exp_avg_sq, square, mask=inside)
    tl.store(master, value, mask=inside)
    if tl.load(own + 7) != 0:
        columns = at_address(own + 8, tl.int64, False)
        column = tl.load(columns + place, mask=is_place, other=0)
        at = row.to(tl.int64)[None, :] * tl.load(own + 9) + column[:, None] * tl.load(own + 10)
        tl.store(at_address(own + 7, DTYPE, False) + at, value.to(DTYPE), mask=inside)
