"""Traffic of a selection between devices: column norms against full gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.lab.finding import Finding, Range, Tolerance
from experiments.lab.study import Data, Job, computed
from experiments.paper import published as paper
from experiments.paper.canvas import canvas
from sim.models.table import find_model
from sim.models.workload import Workload
from zenflow.errors import ZenFlowError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RANKS = 2
_JUDGED = "llama-2-7b"
_DEADLINE = 120.0
"""Seconds that the ranks have."""
_GRADIENT_BYTES, _NORM_BYTES, _HALF_BYTES = 2, 4, 2
_NOTE = (
    "Gradients of 2 bytes an entry over one norm a column: as many as a matrix has rows, times 2 "
    "over the bytes of a norm. All matrices of the model, embedding and head among them."
)


def _make(job: Job) -> Data:
    models = [_model(name) for name in paper.MODELS]
    width, steps = (64, 4) if job.smoke else (1024, 6)
    job.progress(0.3, f"{_RANKS} processes over gloo")
    return {
        "models": models,
        "projection": {"gradient_bytes": 4096 * 4096 * _GRADIENT_BYTES,
                       "norm_bytes": 4096 * _NORM_BYTES},
        "counted": {"ranks": _RANKS, "width": width, **_counted(job.seed, width, steps)},
    }  # fmt: skip


def _model(name: str) -> dict[str, Any]:
    """Return the bytes of gradients and norms of a model's matrices."""
    workload = Workload.of_config(*find_model(name), batch_size=1, sequence=128)
    shapes = [parameter.shape for parameter in workload.parameters if len(parameter.shape) == 2]
    entries = sum(rows * columns for rows, columns in shapes)
    columns = sum(columns for _, columns in shapes)
    return {
        "model": name,
        "gradient_bytes": entries * _GRADIENT_BYTES,
        "norm_bytes": columns * _NORM_BYTES,
        "ratio_float32": entries * _GRADIENT_BYTES / (columns * _NORM_BYTES),
        "ratio_16_bit": entries * _GRADIENT_BYTES / (columns * _HALF_BYTES),
    }


def _counted(seed: int, width: int, steps: int) -> dict[str, Any]:
    """Run the ranks and return what the first of them counted; all count alike.

    Raises:
        ZenFlowError: A rank failed or took too long; with its last words.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "evidence.paper.importance.selection_ranks"]
        paths = [path for path in sys.path if path]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(_RANKS), f"{scratch}/meeting",
                 str(seed), str(width), str(steps)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                cwd=scratch,  # -m looks here first, and a project may have an experiments/
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(_RANKS)
        ]  # fmt: skip
        try:
            spoken = [rank.communicate(timeout=_DEADLINE) for rank in ranks]
        except subprocess.TimeoutExpired as error:
            raise ZenFlowError(
                f"{_RANKS} processes over gloo took more than {_DEADLINE:.0f} s: is the loopback "
                "interface up?"
            ) from error
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for rank, (_, errors) in zip(ranks, spoken, strict=True):
        if rank.returncode:
            raise ZenFlowError(f"a process over gloo failed: {errors.strip()[-400:]}")
    found: dict[str, Any] = json.loads(spoken[0][0].splitlines()[-1])
    # Matrices of width x width, 4 width x width and width x 4 width: columns times their rows.
    entries, columns = 9 * width * width, 6 * width
    found["closed_form"] = entries * _GRADIENT_BYTES / (columns * _NORM_BYTES)
    return found


def _findings(data: Data) -> Sequence[Finding]:
    counted, judged = data["counted"], data["models"][paper.MODELS.index(_JUDGED)]
    ratio = counted["gradient_bytes"] / counted["norm_bytes"]
    ran = (
        f"Counted in {counted['ranks']} processes over gloo that train under FSDP2, with matrices "
        f"{counted['width']} wide: in a step the optimizer adds up {ratio:.0f} times fewer bytes "
        f"than FSDP2 reduces. It chose {counted['chosen_alike']:.1%} of the columns that whole "
        "gradients choose."
    )
    return [
        *(
            paper.SELECTION_RATIO.beside(
                f"Norms of {size} bytes are 4,000 to 6,000 times less than gradients, {_JUDGED}",
                Tolerance.relative(0.15), simulated=judged[key], note=_NOTE,
            )
            for size, key in ((4, "ratio_float32"), (2, "ratio_16_bit"))
        ),
        paper.SELECTION_SHAPE.beside(
            "One norm replaces a column's whole gradient (exchanged bytes over those of the "
            "closed form)", Tolerance.absolute(0.0),
            measured=ratio / counted["closed_form"], note=ran,
        ),
        paper.PROJECTION_BYTES.beside(
            "The norms of a 4096 x 4096 projection are 16 KB", Tolerance.relative(0.01),
            simulated=data["projection"]["norm_bytes"],
            note="With 4 bytes a norm; the projection's gradient is 2,048 times as much.",
        ),
        paper.PROJECTION_GRADIENT.beside(
            "Its gradient is 33.6 MB", Tolerance.relative(0.01),
            simulated=data["projection"]["gradient_bytes"],
        ),
    ]  # fmt: skip


def _draw(data: Data) -> Figure:
    title = "What a selection of columns exchanges between devices"
    figure, (left, right) = canvas((10.5, 4.8), title, columns=2, width_ratios=[3, 1])
    names = [model["model"] for model in data["models"]]
    for shift, key, colour, label in (
        (-0.2, "ratio_float32", "#1b9e77", "norms of 4 bytes, as this engine's"),
        (0.2, "ratio_16_bit", "#a6d8c6", "norms of 2 bytes"),
    ):
        heights = [model[key] for model in data["models"]]
        places = [place + shift for place in range(len(names))]
        bars = left.bar(places, heights, width=0.38, color=colour, label=label)
        left.bar_label(bars, fmt="{:,.0f}", fontsize=7)
    assert isinstance(paper.SELECTION_RATIO.value, Range)
    left.axhspan(paper.SELECTION_RATIO.value.low, paper.SELECTION_RATIO.value.high,
                 color="#eeeeee", zorder=0, label="published: 4,000 to 6,000")  # fmt: skip
    left.set_xticks(range(len(names)), names, fontsize=8)
    left.set_ylabel("bytes of full gradients over bytes of norms")
    left.set_ylim(0, 8600)
    left.legend(fontsize=8, frameon=False, loc="upper left")
    left.set_title("computed from the models' shapes", loc="left", fontsize=10)
    counted = data["counted"]
    moved = [counted["gradient_bytes"], counted["norm_bytes"]]
    bars = right.bar(("gradients", "norms"), moved, color=("#f0a83c", "#1b9e77"), width=0.6)
    right.bar_label(bars, [f"{num_bytes / 1e3:,.0f} kB" for num_bytes in moved], fontsize=8)
    right.set_yscale("log")
    right.set_ylim(top=counted["gradient_bytes"] * 5)
    right.set_ylabel("bytes of one step, each rank")
    right.set_title(f"counted: {counted['ranks']} processes\nover gloo, {counted['width']} wide",
                    loc="left", fontsize=10)  # fmt: skip
    return figure


STUDY = computed(
    group="paper",
    name="selection_traffic",
    number=8,
    title="Selection traffic: column norms against full gradients",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=0.3,
    tolerance=0.05,
)
