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

BOTH_MODES = ("zenflow", "zenflow_paper")
"""Presets that are tried in both modes of float32. The others are limits of the first: slow."""

CASES = [
    pytest.param(
        name,
        preset,
        dtype,
        mode,
        id=f"{name}-{preset}-{str(dtype).removeprefix('torch.')}-{mode}",
        marks=() if preset in BOTH_MODES else pytest.mark.slow,
    )
    for name, loop in LOOPS.items()
    for preset in PRESETS
    for dtype in loop.dtypes
    for mode in MODES[dtype]
    # Rules differ in float32 already; the other dtypes are tried where most of the engine runs.
    if preset == "zenflow"
    or (dtype == torch.float32 and (mode == "release" or preset in BOTH_MODES))
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
