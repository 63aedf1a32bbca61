"""The scripts that people copy: they learn under torchrun, and go on with other ranks."""

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import run as torchrun

from tests.forks import FORKS, exit_codes, send_output

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available() or torch.cuda.is_available(), reason="gloo, on a CPU"
)
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run_alone(*command):
    """Run a script as torchrun does for one rank."""
    sys.argv = list(command)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    runpy.run_path(command[0], run_name="__main__")


def run_two(*command):
    """Run a script under torchrun, whose ranks are forks: each would load torch anew."""
    forks = ["--run-path", "--start-method", "fork"]
    torchrun.main(["--standalone", "--nproc-per-node", "2", *forks, *command])


def tell(folder, run, *command):
    """Run a script in a process whose output goes to files."""
    send_output(output=folder / "output", errors=folder / "errors")
    run(*command)


def losses_of(script, run, folder, steps):
    text = folder / "text"
    text.write_text("all work and no play makes a dull day. " * 40)
    small = ["--width", "16", "--layers", "1", "--length", "16", "--min_split_elements", "64"]
    paths = ["--text", text, "--checkpoint", folder / "saved"]
    command = map(str, [EXAMPLES / script, *paths, "--lr", "1e-2", "--steps", steps, *small])
    process = FORKS.Process(target=tell, args=(folder, run, *command))
    process.start()
    assert exit_codes([process], 200) == [0], (folder / "errors").read_text()
    return {
        int(line.split()[1][:-1]): float(line.split()[-1])
        for line in (folder / "output").read_text().splitlines()
        if line.startswith("step")
    }


@pytest.mark.parametrize("script", ["fsdp2.py", "ddp.py"])
def test_two_ranks_learn_and_one_goes_on(script, tmp_path):
    first = losses_of(script, run_two, tmp_path, 30)
    second = losses_of(script, run_alone, tmp_path, 10)
    assert list(first) == list(range(30))
    assert list(second) == list(range(30, 40))
    assert first[29] < 0.7 * first[0]
    assert second[30] < 0.8 * first[0]
