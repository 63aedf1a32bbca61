"""What must start fast, or run without torch, does not load it."""

import subprocess
import sys

import pytest

from experiments.cli import main

TORCH_FREE = [
    "zenflow",
    "zenflow.config",
    "zenflow.controller",
    "zenflow.deepspeed.read",
    "zenflow.errors",
    "zenflow.report",
    "zenflow.trace.timeline",
    "sim",
]


def modules_after(statements):
    """Return the top-level names of the modules that a fresh interpreter has loaded."""
    code = f"{statements}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", TORCH_FREE)
def test_importing_it_does_not_load_torch(module):
    loaded = modules_after(f"import {module}")
    assert module.split(".")[0] in loaded
    assert "torch" not in loaded


def test_using_settings_and_timelines_from_the_package_does_not_load_torch():
    assert "torch" not in modules_after(
        "from zenflow import ZenFlowConfig, Timeline, StepReport, FixedInterval, read_deepspeed\n"
        "ZenFlowConfig.preset('zenflow'); Timeline().to_chrome_trace()"
    )


HELP = """
import sys
from experiments.cli import main
for arguments in {lines}:
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code, arguments
    heavy = {{"torch", "matplotlib"}} & sys.modules.keys()
    assert not heavy, f"{{arguments}} has loaded {{heavy}}"
"""


def test_the_command_lines_help_loads_neither_torch_nor_matplotlib():
    lines = [["--help"], *([name, "--help"] for name in main.commands), ["figures", "--list"]]
    assert "experiments" in modules_after(HELP.format(lines=lines))


def test_every_public_name_of_the_package_exists():
    import zenflow

    for name in zenflow.__all__:
        assert getattr(zenflow, name) is not None
    assert set(dir(zenflow)) == set(zenflow.__all__)
    with pytest.raises(AttributeError, match="no attribute 'ZenFlowAdam'"):
        _ = zenflow.ZenFlowAdam
