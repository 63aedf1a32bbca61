"""Whatever loop people write ends with AdamW's weights, or with an error that says what to do."""

import pytest
import torch

from tests.conformance.loops import LOOPS
from tests.conformance.runs import PRESETS, TOLERANCES, expected, ours
from tests.models import relative_difference
from zenflow import GradientError

MODES = {
    torch.float32: ("keep", "release"),
    torch.bfloat16: ("release",),
    torch.float16: ("keep",),
}
"""Modes by dtype: numbers of 16 bits take one path, whichever they are."""

QUICK = {
    ("zenflow", torch.float32, "keep"),
    ("zenflow", torch.float32, "release"),
    ("zenflow_paper", torch.float32, "release"),
}
"""Cases of each loop that are tried every time. Other presets are limits of the first."""
IN_TURN = {("zenflow", torch.bfloat16, "release")}
"""Cases of every other loop: what a loop asks of the engine does not depend on the dtype."""

LONG = {("zenflow", torch.float32, "release")}
"""The case of a long loop."""


def quick_of(place, loop):
    """Return the cases of a loop that are tried every time."""
    if loop.is_long:
        return LONG
    return QUICK if place % 2 else QUICK | IN_TURN


CASES = [
    pytest.param(
        name,
        preset,
        dtype,
        mode,
        id=f"{name}-{preset}-{str(dtype).removeprefix('torch.')}-{mode}",
        marks=() if (preset, dtype, mode) in quick_of(place, loop) else pytest.mark.slow,
    )
    for place, (name, loop) in enumerate(LOOPS.items())
    for preset in PRESETS
    for dtype in loop.dtypes
    for mode in MODES[dtype]
    # Rules differ in float32 already; the other dtypes are tried where most of the engine runs.
    if preset == "zenflow"
    or (dtype == torch.float32 and (mode == "release" or preset == "zenflow_paper"))
]


@pytest.mark.parametrize(("name", "preset", "dtype", "mode"), CASES)
def test_a_loop_ends_with_adamws_weights_or_with_its_remedy(name, preset, dtype, mode):
    loop = LOOPS[name]
    if (pattern := loop.refusal(mode)) is not None:
        with pytest.raises(GradientError, match=pattern):
            ours(loop, preset, dtype, mode)
        return
    actual = ours(loop, preset, dtype, mode)
    right = expected(loop, preset, dtype)
    assert relative_difference(actual, right) <= TOLERANCES[dtype]
