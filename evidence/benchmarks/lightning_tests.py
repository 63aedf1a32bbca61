"""Lightning's own tests of optimizers, with this optimizer in the place of torch's.

``python -m evidence.benchmarks.lightning_tests CHECKOUT --out FOLDER`` runs those tests of a
checkout of Lightning's repository that are about optimizers: first as they are, then with every
SGD, Adam and AdamW being ours. FOLDER gets record.json. The checkout has to be of the version that
is installed, and its tests need pytest-timeout. This module is also the pytest plugin that puts
ours in place.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from evidence.benchmarks.record import setting
from experiments.output.files import write_json
from zenflow import ZenFlowAdamW, ZenFlowConfig

TESTS = (
    "tests_pytorch/core/test_lightning_optimizer.py",
    "tests_pytorch/trainer/optimization",
    "tests_pytorch/loops/optimization",
)
REPLACED = ("SGD", "Adam", "AdamW")
AS_IT_IS = "torch"
RUNS = (AS_IT_IS, "on_device", "zenflow")
"""Optimizers that step: torch's own, or ours under a preset."""

ROOT = Path(__file__).resolve().parents[2]


# ---- the plugin ---------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--preset", choices=RUNS, default=AS_IT_IS)


def pytest_configure(config: pytest.Config) -> None:
    preset = config.getoption("--preset")
    if preset != AS_IT_IS:
        for name in REPLACED:
            setattr(torch.optim, name, standing_in(name, preset))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """End optimizers that only cycles hold: Lightning looks for threads that outlive a test."""
    gc.collect()


def standing_in(name: str, preset: str) -> type[ZenFlowAdamW]:
    """Return a class for one of torch's, so that tests can patch the one and not the other."""
    config = ZenFlowConfig.preset(preset, min_split_elements=1)  # their layers are small

    def make(self: ZenFlowAdamW, params: Any, lr: float = 1e-3, **_: Any) -> None:
        ZenFlowAdamW.__init__(self, params, lr=lr, config=config)

    return type(name, (ZenFlowAdamW,), {"__init__": make})


# ---- the command --------------------------------------------------------------------------------


def run(checkout: Path, preset: str) -> dict[str, Any]:
    """Run the tests in a process of their own; return what came out."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        path = os.pathsep.join([str(ROOT), str(checkout / "tests"), os.getenv("PYTHONPATH", "")])
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", *TESTS, "-q", "-c", os.devnull, "-W", "ignore"),
                *(
                    "--rootdir",
                    ".",
                    "-p",
                    "no:cacheprovider",
                    "-p",
                    "evidence.benchmarks.lightning_tests",
                ),
                *("--preset", preset, "--timeout", "300", "--tb=no", f"--junitxml={report}"),
            ],
            cwd=checkout / "tests",
            env={**os.environ, "PYTHONPATH": path},
            check=False,  # tests that fail are a result
        )
        return outcome(report.read_text(encoding="utf-8"))


def outcome(report: str) -> dict[str, Any]:
    """Return how many tests of a JUnit report passed, and why others failed.

    A test that fails keeps its optimizer alive through its traceback: errors behind it are left
    out.
    """
    counts = {"passed": 0, "skipped": 0}
    failed: dict[str, str] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        broken = case.find("failure")
        broken = case.find("error") if broken is None else broken
        if broken is not None:
            failed.setdefault(name, str(broken.get("message")).splitlines()[0])
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return {**counts, "failed": failed}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all and write the record."""
    parser = argparse.ArgumentParser(description="Lightning's own tests of optimizers, with ours.")
    parser.add_argument("checkout", type=Path, help="clone of Lightning's repository")
    parser.add_argument("--out", type=Path, required=True, help="folder for record.json")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    record = setting(lightning=importlib.metadata.version("lightning"), tests=TESTS)
    record["runs"] = {preset: run(options.checkout.resolve(), preset) for preset in RUNS}
    write_json(options.out / "record.json", record)
    for preset, found in record["runs"].items():
        print(f"{preset}: {found['passed']} passed, {len(found['failed'])} failed")
        for name, why in found["failed"].items():
            print(f"  {name}: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
