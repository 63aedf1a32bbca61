"""The scripts that people copy: they learn under torchrun, and go on with other ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available() or torch.cuda.is_available(), reason="gloo, on a CPU"
)
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def losses_of(script, num_ranks, folder, steps):
    text = folder / "text"
    text.write_text("all work and no play makes a dull day. " * 40)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    small = ["--width", "16", "--layers", "1", "--length", "16", "--min_split_elements", "64"]
    paths = ["--text", text, "--checkpoint", folder / "saved"]
    ranks, rest = ["--nproc-per-node", str(num_ranks)], ["--lr", "1e-2", "--steps", str(steps)]
    found = subprocess.run(
        [*torchrun, *ranks, EXAMPLES / script, *paths, *rest, *small],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    return {
        int(line.split()[1][:-1]): float(line.split()[-1])
        for line in found.stdout.splitlines()
        if line.startswith("step")
    }


@pytest.mark.parametrize("script", ["fsdp2.py", "ddp.py"])
def test_two_ranks_learn_and_one_goes_on(script, tmp_path):
    first = losses_of(script, 2, tmp_path, 30)
    second = losses_of(script, 1, tmp_path, 10)
    assert list(first) == list(range(30))
    assert list(second) == list(range(30, 40))
    assert first[29] < 0.7 * first[0]
    assert second[30] < 0.8 * first[0]
