"""What Triton's compiler makes of the kernels, for GPUs that need not be there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreted import needs_triton

pytestmark = needs_triton
WIDE = ("move and pack", "move", "pack", "add squares", "add squares of columns", "adamw")
"""Kernels whose loads and stores of matrices go by 16 bytes."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """PTX by kernel, dtype and architecture; compiled in a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.zenflow.device.compiled"]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_kernel_compiles_for_two_architectures(compiled):
    assert len(compiled) == 13 * 2
    assert all(".entry" in ptx for ptx in compiled.values())


def test_matrices_are_read_and_written_by_whole_lines(compiled):
    for name, ptx in compiled.items():
        kernel = name.partition(",")[0]
        if kernel in WIDE:
            assert re.search(r"ld\.global[.a-z0-9:_]*\.v4\.b32", ptx), name
        if kernel in ("move and pack", "move", "pack", "gather", "adamw"):
            assert re.search(r"st\.global[.a-z0-9:_]*\.v4\.b32", ptx), name


def test_results_are_those_of_the_formulas_on_every_architecture(compiled):
    """Neither multiply-adds that round once, nor divisions and roots that are approximate."""
    for name, ptx in compiled.items():
        assert not re.search(r"\bfma\.", ptx), name
        assert not re.search(r"\b(div\.full|div\.approx|sqrt\.approx|rcp\.approx)", ptx), name
