"""A training run as a study has it: quiet, made once, gone on with after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.output.progress import Reporter
from experiments.training.run import run
from experiments.training.saved.checkpoint import CHECKPOINTS, latest_checkpoint
from experiments.training.settings import TrainSettings
from experiments.training.stop import StopRequest


def trained(settings: TrainSettings, folder: Path) -> dict[str, Any]:
    """Return the summary of a finished run, made now unless the folder has it.

    Raises:
        KeyboardInterrupt: A signal ended the run early.
    """
    finished = folder / "summary.json"
    if not finished.is_file():
        resume = latest_checkpoint(folder / CHECKPOINTS) is not None
        quiet = Reporter(Console(quiet=True))
        with StopRequest() as stop:
            outcome = run(settings, folder, reporter=quiet, stop=stop, resume=resume)
        if outcome.stopped:
            finished.unlink()
            raise KeyboardInterrupt
    summary: dict[str, Any] = json.loads(finished.read_text(encoding="utf-8"))
    return summary
