"""Types of a run's files: a row of steps.jsonl, and summary.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from zenflow.provenance import Provenance


class Evaluation(TypedDict, total=False):
    """Quality of a model on held-out data."""

    eval_loss: float | None
    eval_accuracy: float
    """Share of texts whose class was told; in classification only."""
    correct: str
    """Packed bits: which texts were told rightly, where a study asks for each."""


class StepRow(Evaluation, total=False):
    """One step of a run; what the optimizer reports of it stands in the row too."""

    step: int
    """Number of the step, from 1."""
    loss: float | None
    """Training loss of the step, the mean of its micro-batches; None if it was not finite."""
    lr: float
    """Learning rate of the step."""
    tokens: int
    seconds: float
    save_seconds: float
    """Time of the save before the step, a part of no ``seconds``; where there was one."""
    stall_seconds: float
    stall_fraction: float
    skipped: bool
    """Whether the loss scale overflowed, so that no update was made."""
    d2h_bytes: int
    h2d_bytes: int
    staleness: int
    captured_energy: float
    update_interval: int
    rank_stall_seconds: list[float]
    """Stall of each rank, of which ``stall_seconds`` is the largest; of several ranks only."""


class TimedSummary(TypedDict):
    """Facts in the title of a run's timeline."""

    strategy: str
    mean_step_seconds: float
    stall_fraction: float | None
    config: Mapping[str, Any]
    """Fields of ``ZenFlowConfig`` and their values."""
    emulated_link: Mapping[str, float] | None
    """Rates in bytes/s by direction; None on a real link."""


class StepFigures(TypedDict):
    """Statistics over a run's rows."""

    steps: int
    run_seconds: float
    mean_step_seconds: float
    median_step_seconds: float
    p95_step_seconds: float
    stall_seconds: float
    stall_fraction: float | None
    """Share of the run stalled; NaN without rows, which a file has as null."""
    d2h_bytes_per_step: float
    h2d_bytes_per_step: float
    bytes_over_steps: list[int] | None
    """First and last step over which bytes are counted."""
    captured_energy: float
    max_staleness: int
    skipped_steps: int
    final_train_loss: float
    """Mean loss of the last ten steps, or of all where there are fewer."""
    tokens_per_second: float


class RunSummary(Evaluation, StepFigures, Provenance):
    """Content of summary.json."""

    strategy: str
    config: Mapping[str, Any]
    """Fields of ``ZenFlowConfig`` and their values."""
    emulated_link: Mapping[str, float] | None
    """Rates in bytes/s by direction; None on a real link."""
    num_params: int
    model_bytes: int
    tuning: Mapping[str, Any] | None
    """Summary of a tuned run's controller; None where none changed knobs."""
    host_bytes_per_param: float
    device_bytes_extra: int
    planned_steps: int
    model: str
    data: str
    device: str
    dtype: str
    seed: int
    ranks: int
    """Processes that shared the run."""
