"""Compile the kernels for GPUs that are not there, and print their PTX by kernel, as JSON."""

import json
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zenflow.device.kernels import triton_gathers as gathers
from zenflow.device.kernels import triton_kernels as launched
from zenflow.device.kernels import triton_norms as norms
from zenflow.device.kernels import triton_source as source
from zenflow.device.kernels.triton_launches import EXACT

FLOATS = ["column_factors", "stays", "row_factors", "parts", "shares", *source.VECTORS]
TABLES = ["addresses", "matrices", "sums"]
OF_STEPS = ["step_size", "denom_scale", "factor"]
NUMBERS = ["rate", "kept", "rest1", "beta2", "rest2", "eps"]
OF_MODEL = ["grad", "weight", "packed", "arrived", "late", "gathered"]
ONE = {"grad_column": 1, "weight_column": 1, "column_stride": 1, "late_row": 1}
"""Strides of the last dimension, as Triton takes them for constants."""
LANGUAGE = {"bf16": tl.bfloat16, "fp32": tl.float32}


def type_of(name, dtype, kernel):
    if name in OF_MODEL:
        return f"*{dtype}"
    if name in ("table", "columns"):
        return "*i64"
    if name in FLOATS + OF_STEPS:
        return "*fp32"
    if name in TABLES:
        return "*i64"
    return "*i32" if name in ("host_rows", "owners") else "fp32" if name in NUMBERS else "i32"


def ptx_of(kernel, tile, dtype, capability, **constants):
    """Return the PTX for matrices whose rows begin at multiples of 16 bytes."""
    constants = {"ROUNDS": False, "DTYPE": LANGUAGE[dtype], **constants}
    sizes = {name: size for name, size in tile.items() if name != "num_warps"}
    names = kernel.arg_names
    fixed = {name: value for name, value in {**ONE, **sizes, **constants}.items() if name in names}
    types = {
        name: "constexpr" if name in fixed else type_of(name, dtype, kernel) for name in names
    }
    if constants["ROUNDS"]:
        types["packed"] = "*u8"
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if types[name][0] in "*i" and name not in kernel.do_not_specialize
    }
    made = triton.compile(
        ASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.get("num_warps", 4), **EXACT},
    )
    return made.asm["ptx"]


WAYS = {
    "": {"ALONG": 1, "IS_WIDE": True},
    " of columns": {"ALONG": 0, "IS_WIDE": True},
    " of odd rows": {"ALONG": 1, "IS_WIDE": False},
    " of any": {"ALONG": -1, "IS_WIDE": False},
}
"""Ways of reading a matrix that a table has."""


def main():
    nothing = {"stays": None}
    found = {}
    for dtype, capability in (("bf16", 90), ("fp32", 80)):
        of_table = {"HAS_FACTOR": True, "IS_WIDE": True, "FIELDS": 6, "DTYPE": tl.dtype(dtype)}
        cases = {
            "move and pack": (source.move_and_pack, launched.TURNED,
                              {"MOVES": True, "STAYS": False, "PACKS": True, **nothing}),
            "move": (source.move_and_pack, launched.TURNED,
                     {"MOVES": True, "STAYS": True, "PACKS": False, "packed": None,
                      "host_rows": None}),
            "pack": (source.move_and_pack, launched.TURNED,
                     {"MOVES": False, "STAYS": False, "PACKS": True, "weight": None,
                      "column_factors": None, "row_factors": None, **nothing}),
            "move and pack in 8 bits": (
                source.move_and_pack, launched.ROUNDED,
                {"MOVES": True, "STAYS": False, "PACKS": True, "ROUNDS": True, **nothing}),
            "land": (source.land, launched.TURNED, {"IS_LATE": True, "IS_PACKED": True}),
            **{f"add squares{name}": (source.add_squares, norms.SQUARES,
                                      {"HAS_ROWS": True, "FIELDS": 10, **access})
               for name, access in WAYS.items()},
            "add parts": (source.add_parts, norms.PARTS, {"FIELDS": 5}),
            "fresh factors": (source.fresh_factors, launched.FACTORS, {"FIELDS": 5}),
            "gather": (source.gather, gathers.GATHERED,
                       {"FIELDS": 9, "IS_TALL": True, "ALONG": 1, "IS_WIDE": False}),
            "adamw": (source.adamw, launched.STEPPED, of_table),
        }  # fmt: skip
        for name, (kernel, tile, constants) in cases.items():
            ptx = ptx_of(kernel, tile, dtype, capability, **constants)
            found[f"{name}, {dtype}, sm_{capability}"] = ptx
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
