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


@triton.jit
def located(
    addresses, own, DTYPE: tl.constexpr, ALONG: tl.constexpr, IS_WIDE: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """Return a matrix of a table: its pointer, its numbers of rows and columns, and its strides.

    `own` is the matrix's row of the table, which begins with these four numbers. Its last but one
    is the address's place in `addresses`, and its last one the first program. See `Access` and
    `Launch` in `zenflow.device.kernels.triton_launches`.
    """
    address = addresses + tl.load(own + FIELDS - 2)
    matrix = tl.load(address).to(tl.pointer_type(DTYPE))
    num_rows, num_columns = tl.load(own).to(tl.int32), tl.load(own + 1).to(tl.int32)
    row_stride, column_stride = tl.load(own + 2), tl.load(own + 3)
    if IS_WIDE:
        matrix = tl.multiple_of(matrix, 16)
    if ALONG == 1:
        column_stride = 1
        if IS_WIDE:
            num_columns = tl.multiple_of(num_columns, 16)
            row_stride = tl.multiple_of(row_stride, 16)
    elif ALONG == 0:
        row_stride = 1
        if IS_WIDE:
            num_rows = tl.multiple_of(num_rows, 16)
            column_stride = tl.multiple_of(column_stride, 16)
    return matrix, num_rows, num_columns, row_stride, column_stride


@triton.jit
def add_squares(
    addresses, matrices, owners, parts, DTYPE: tl.constexpr, ALONG: tl.constexpr,
    IS_WIDE: tl.constexpr, HAS_ROWS: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up squares: by column over a strip of some tiles, by row over one tile's width.

    Each matrix has a row of the table `matrices`: (O, I, strides, tiles of a strip, tiles across,
    place of its columns' parts, place of its rows' parts, place of its address, first program). Of
    the float32 `parts` those of its columns are (strips, I), and those of its rows (tiles across,
    O).
    """
    program = tl.program_id(0)
    own = matrices + tl.load(owners + program) * FIELDS
    matrix, num_rows, num_columns, row_stride, column_stride = located(
        addresses, own, DTYPE, ALONG, IS_WIDE, FIELDS
    )
    num_tiles, across = tl.load(own + 4).to(tl.int32), tl.load(own + 5).to(tl.int32)
    of_columns, of_rows = parts + tl.load(own + 6), parts + tl.load(own + 7)
    place = program - tl.load(own + FIELDS - 1).to(tl.int32)
    strip, tile = place // across, place % across
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
            at = of_rows + tile.to(tl.int64) * num_rows + row
            tl.store(at, tl.sum(squares, axis=1), mask=is_row)
    tl.store(of_columns + strip.to(tl.int64) * num_columns + column, total, mask=is_column)


@triton.jit
def add_parts(
    parts, sums, owners, FIELDS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Add up the parts that `add_squares` has left.

    Each vector of sums has a row of the table `sums`: (place of its parts, its address, its
    length, number of parts of each sum, first program).
    """
    program = tl.program_id(0)
    own = sums + tl.load(owners + program) * FIELDS
    source = parts + tl.load(own)
    target = tl.load(own + 1).to(tl.pointer_type(tl.float32))
    length, num_parts = tl.load(own + 2).to(tl.int32), tl.load(own + 3).to(tl.int32)
    place = (program - tl.load(own + FIELDS - 1).to(tl.int32)) * WIDTH + tl.arange(0, WIDTH)
    is_place = place < length
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for part in range(0, num_parts, PARTS):
        number = part + tl.arange(0, PARTS)
        inside = (number < num_parts)[:, None] & is_place[None, :]
        at = source + number.to(tl.int64)[:, None] * length + place[None, :]
        total += tl.sum(tl.load(at, mask=inside, other=0.0), axis=0)
    tl.store(target + place, total, mask=is_place)


@triton.jit
def second_moments(energies, gains, mean_squares, decays, floors, at, inside, outside):
    """Return the second moments of some columns or rows, with this step's energies in them."""
    moment = tl.load(floors + at, mask=inside, other=outside)
    decay = tl.load(decays + at, mask=inside, other=0.0)
    moment += tl.load(mean_squares + at, mask=inside, other=0.0) * decay
    gain = tl.load(gains + at, mask=inside, other=0.0)
    return moment + tl.load(energies + at, mask=inside, other=0.0) * gain


VECTORS = [
    f"{name}{end}"
    for end in ("", "_of_rows")
    for name in ("energies", "gains", "mean_squares", "decays", "floors", "factors")
]


@triton.jit(do_not_specialize=[*VECTORS, "shares"])
def fresh_factors(
    energies, gains, mean_squares, decays, floors, factors, shares,
    energies_of_rows, gains_of_rows, mean_squares_of_rows, decays_of_rows, floors_of_rows,
    factors_of_rows, matrices, owners, FIELDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the factors of fresh steps: a matrix's columns by its first programs, then its rows.

    Each matrix has a row of the table `matrices`: (first column, I, first row, O, first program).
    A program of rows adds up the columns' second moments by itself, which takes no launch more.
    """
    program = tl.program_id(0)
    own = matrices + tl.load(owners + program) * FIELDS
    first, num_columns = tl.load(own), tl.load(own + 1).to(tl.int32)
    chunk = program - tl.load(own + FIELDS - 1).to(tl.int32)
    num_chunks = tl.cdiv(num_columns, WIDTH)
    if chunk < num_chunks:
        column = chunk * WIDTH + tl.arange(0, WIDTH)
        inside, at = column < num_columns, first + column
        moment = second_moments(energies, gains, mean_squares, decays, floors, at, inside, 1.0)
        share = tl.load(shares + at, mask=inside, other=0.0)
        tl.store(factors + at, tl.div_rn(share, tl.sqrt_rn(moment)), mask=inside)
    else:
        total = tl.zeros([WIDTH], dtype=tl.float32)
        for start in range(0, num_columns, WIDTH):
            column = start + tl.arange(0, WIDTH)
            total += second_moments(
                energies, gains, mean_squares, decays, floors,
                first + column, column < num_columns, 0.0,
            )  # fmt: skip
        mean = tl.div_rn(tl.sum(total, axis=0), num_columns.to(tl.float32))
        row = (chunk - num_chunks) * WIDTH + tl.arange(0, WIDTH)
        inside, at = row < tl.load(own + 3).to(tl.int32), tl.load(own + 2) + row
        moment = second_moments(
            energies_of_rows, gains_of_rows, mean_squares_of_rows, decays_of_rows, floors_of_rows,
            at, inside, 1.0,
        )  # fmt: skip
        root = tl.div_rn(tl.sqrt_rn(mean), tl.sqrt_rn(moment))
        tl.store(factors_of_rows + at, root, mask=inside)


@triton.jit
def gather(
    addresses, matrices, owners, gathered, DTYPE: tl.constexpr, ALONG: tl.constexpr,
    IS_WIDE: tl.constexpr, IS_TALL: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write some columns of each matrix as rows, (K, O).

    Each matrix has a row of the table `matrices`: (O, I, strides, address of the columns' indices,
    K, place of its rows, place of its address, first program). With `IS_TALL` O is divisible by
    16.
    """
    program = tl.program_id(0)
    own = matrices + tl.load(owners + program) * FIELDS
    matrix, num_rows, _, row_stride, column_stride = located(
        addresses, own, DTYPE, ALONG, IS_WIDE, FIELDS
    )
    columns = tl.load(own + 4).to(tl.pointer_type(tl.int64))
    num_columns = tl.load(own + 5).to(tl.int32)
    rows = gathered + tl.multiple_of(tl.load(own + 6), 16)
    if IS_TALL:  # a number that a function has returned can't be told so
        num_rows = tl.multiple_of(tl.load(own).to(tl.int32), 16)
    across = tl.cdiv(num_columns, COLUMNS)
    tile = program - tl.load(own + FIELDS - 1).to(tl.int32)
    place = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    row = tile // across * ROWS + tl.arange(0, ROWS)
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
    weight_row, weight_column, late_place, late_row, IS_LATE: tl.constexpr,
    IS_PACKED: tl.constexpr, LANDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write rows into a weight's columns, the fresh step of a late gradient applied.

    Without `LANDS` they stay where they are, and the step alone is applied. `late` is (D, O) or
    (I, O), by `IS_PACKED`; its strides are those of its two dimensions. Other columns than those
    that arrive are not touched: another stream may write to them.
    """
    column = first_column + tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_column, is_row = column < last_column, row < num_rows
    place = tl.load(host_rows + column, mask=is_column, other=-1)
    arrives = (place >= first_row) & (place < last_row)
    inside = is_row[:, None] & arrives[None, :]
    rows, columns = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
    places = (place - first_row).to(tl.int64)[None, :]
    there = arrived + places * num_rows + rows
    values = tl.load(there, mask=inside, other=0.0)
    if IS_LATE:
        source = places if IS_PACKED else columns
        newer = tl.load(late + source * late_place + rows * late_row, mask=inside, other=0.0)
        of_columns = tl.load(column_factors + column, mask=is_column, other=0.0)
        of_rows = tl.load(row_factors + row, mask=is_row, other=0.0)
        motion = rate * (newer.to(tl.float32) * of_columns[None, :]) * of_rows[:, None]
        values = (values.to(tl.float32) - motion).to(arrived.dtype.element_ty)
    if LANDS:
        there = weight + rows * weight_row + columns * weight_column
    tl.store(there, values, mask=inside)


@triton.jit
def divide(
    grad, divided, column_factors, row_factors, rate, num_rows, num_columns,
    grad_row, grad_column, divided_row, divided_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write rate g_ij column_j row_i of a whole matrix."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_column, is_row = column < num_columns, row < num_rows
    inside = is_row[:, None] & is_column[None, :]
    rows, columns = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
    values = tl.load(grad + rows * grad_row + columns * grad_column, mask=inside, other=0.0)
    of_columns = tl.load(column_factors + column, mask=is_column, other=0.0)
    of_rows = tl.load(row_factors + row, mask=is_row, other=0.0)
    values = values.to(tl.float32) * of_columns[None, :] * of_rows[:, None] * rate
    at = divided + rows * divided_row + columns * divided_column
    tl.store(at, values.to(divided.dtype.element_ty), mask=inside)


ADDRESSES = tl.constexpr(6)
"""Number of a matrix's addresses for `adamw`."""


@triton.jit
def at_address(address, DTYPE: tl.constexpr, IS_WIDE: tl.constexpr):
    """Return an address of a table as a pointer; with `IS_WIDE` it is a multiple of 16 bytes."""
    pointer = tl.load(address).to(tl.pointer_type(DTYPE))
    if IS_WIDE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def adamw(
    addresses, matrices, owners, step_size, denom_scale, factor, kept, rest1, beta2, rest2, eps,
    HAS_FACTOR: tl.constexpr, HAS_SECOND: tl.constexpr, DTYPE: tl.constexpr,
    IS_WIDE: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Step columns that lie as rows (K, O), by torch.optim.AdamW's formulas; write the weights.

    Each matrix has `ADDRESSES`: of its gradient, master, first and second moments, columns'
    indices and weight. A weight at address 0 is not written. Its row of the table `matrices` is
    (K, O, place of its first column in `step_size` and `denom_scale`, the weight's strides, first
    program). A program has one tile. Without `HAS_SECOND` gradients come divided by the roots of
    their second moments.
    """
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    own, places = matrices + owner * FIELDS, addresses + owner * ADDRESSES
    num_columns, num_rows = tl.load(own).to(tl.int32), tl.load(own + 1).to(tl.int32)
    if IS_WIDE:
        num_rows = tl.multiple_of(num_rows, 16)
    tile = program - tl.load(own + 5).to(tl.int32)
    across = tl.cdiv(num_columns, COLUMNS)
    place = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    row = tile // across * ROWS + tl.arange(0, ROWS)
    is_place, is_row = place < num_columns, row < num_rows
    inside = is_place[:, None] & is_row[None, :]
    at = place.to(tl.int64)[:, None] * num_rows + row[None, :]
    new = tl.load(at_address(places, DTYPE, IS_WIDE) + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        new = new * tl.load(factor)
    master = at_address(places + 1, tl.float32, IS_WIDE) + at
    exp_avg = at_address(places + 2, tl.float32, IS_WIDE) + at
    mean = tl.load(exp_avg, mask=inside, other=0.0)
    value = tl.load(master, mask=inside, other=0.0)
    of_place = tl.load(own + 2) + place
    size = tl.load(step_size + of_place, mask=is_place, other=0.0)[:, None]
    scale = tl.load(denom_scale + of_place, mask=is_place, other=1.0)[:, None]
    mean = mean + rest1 * (new - mean)
    delta = mean * size
    if HAS_SECOND:
        exp_avg_sq = at_address(places + 3, tl.float32, IS_WIDE) + at
        square = tl.load(exp_avg_sq, mask=inside, other=0.0)
        square = square * beta2 + rest2 * (new * new)
        delta = tl.div_rn(delta, tl.div_rn(tl.sqrt_rn(square), scale) + eps)
        tl.store(exp_avg_sq, square, mask=inside)
    value = value * kept - delta
    tl.store(exp_avg, mean, mask=inside)
    tl.store(master, value, mask=inside)
    if tl.load(places + 5) != 0:
        columns = at_address(places + 4, tl.int64, False)
        column = tl.load(columns + place, mask=is_place, other=0)
        at = row.to(tl.int64)[None, :] * tl.load(own + 3) + column[:, None] * tl.load(own + 4)
        tl.store(at_address(places + 5, DTYPE, False) + at, value.to(DTYPE), mask=inside)
