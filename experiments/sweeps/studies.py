"""Studies: shipped sweeps, each with a question, a picture, and an answer that its table gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from experiments.output.files import write_json
from experiments.output.provenance import results_folder
from experiments.sweeps import answers
from experiments.sweeps.axes import GIB, parse_axes
from experiments.sweeps.grid import Sweep
from experiments.sweeps.journal import NAME
from experiments.sweeps.requests import Request
from experiments.sweeps.run import Engine, run_sweep
from experiments.sweeps.table import PARQUET, PROVENANCE, table_of
from sim.names import fold, nearest
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

RECORD, PICTURE = "study.json", "picture.png"
ALL = "all"
_MODEL = "llama-2-7b"
_MICRO_BATCH = {"batch_size": 4, "sequence": 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A question, the sweep that answers it, and how its table is read."""

    name: str
    question: str
    sweep: Sweep
    answer: Callable[[pd.DataFrame], list[str]]
    draw: Callable[[pd.DataFrame, Sweep], Figure]
    caption: str
    """Caption of the picture."""


def _sweep(axes: Sequence[str], request: dict[str, Any], **knobs: Any) -> Sweep:
    return Sweep(
        axes=parse_axes(axes),
        request=Request(model=_MODEL, checkpointing=True, **request),
        knobs=knobs,
    )


# ---- pictures ---------------------------------------------------------------------------------


def _axis(sweep: Sweep, name: str) -> Any:
    return next(axis for axis in sweep.axes if axis.name == name)


def _draw_link_or_host(frame: pd.DataFrame, sweep: Sweep) -> Figure:
    from experiments.sweeps.plots import draw_heat_maps

    batch = _MICRO_BATCH["batch_size"]
    return draw_heat_maps(
        frame[frame["batch"] == batch], _axis(sweep, "host"), _axis(sweep, "link"),
        "step_seconds", panel=_axis(sweep, "strategy"), note=f", {batch} sequences",
    )  # fmt: skip


def _draw_break_even(frame: pd.DataFrame, sweep: Sweep) -> Figure:
    from experiments.sweeps.plots import draw_heat_maps

    return draw_heat_maps(
        answers.speedups(frame), _axis(sweep, "dram"), _axis(sweep, "grad_accum"), "speedup",
        note=" (zero_offload's step over zenflow's; red: break-even)",
        levels=[1 / answers.worth()],
    )  # fmt: skip


def _draw_dram(frame: pd.DataFrame, sweep: Sweep) -> Figure:
    from experiments.sweeps.plots import draw_bars

    least = answers.least_dram(frame)
    gpus = list(map(str, _axis(sweep, "gpu").values))
    bars = {
        f"{moments} moments": [least[str(moments), gpu] for gpu in gpus]
        for moments in _axis(sweep, "deferred_moments").values
    }
    return draw_bars(gpus, bars, title="least host DRAM for a step without stall", unit="GB/s")


def _draw_cores(frame: pd.DataFrame, sweep: Sweep) -> Figure:
    from experiments.sweeps.plots import draw_heat_maps

    waits = frame.assign(**{"share of a step waited": answers.waiting(frame)})
    return draw_heat_maps(
        waits, _axis(sweep, "S"), _axis(sweep, "cores"),
        "share of a step waited", panel=_axis(sweep, "deferred_moments"),
        note=" (selections aside; red: free of stall)",
        levels=[answers.STALL_FREE],
    )  # fmt: skip


# ---- all studies ------------------------------------------------------------------------------


STUDIES = {
    study.name: study
    for study in (
        Study(
            name="pcie5-or-cpu",
            question="Does PCIe 5 or a faster host help more for a 7B on a 24 GB card?",
            sweep=_sweep(
                [
                    "strategy=zero_offload,zenflow",
                    "batch=1,2,4,8",
                    "link=pcie3-x16,pcie4-x16,pcie5-x16",
                    "host=desktop-ddr4,desktop-ddr5,epyc-7742,epyc-9654",
                ],
                {"gpu": "rtx4090", "host_ram": 256 * GIB},
            ),
            answer=partial(
                answers.link_or_host, link="pcie4-x16", faster_link="pcie5-x16",
                host="desktop-ddr5", batch=_MICRO_BATCH["batch_size"],
            ),
            draw=_draw_link_or_host,
            caption="Predicted seconds of a step by host and link.",
        ),
        Study(
            name="break-even",
            question="Where does ZenFlow stop paying?",
            sweep=_sweep(
                [
                    "strategy=on_device,zero_offload,zenflow",
                    "dram=25:400:x2",
                    "grad_accum=1:128:x2",
                ],
                {"gpu": "a100-80-pcie", "host": "epyc-9654", "link": "pcie4-x16", **_MICRO_BATCH},
            ),
            answer=partial(
                answers.break_even,
                tokens=_MICRO_BATCH["batch_size"] * _MICRO_BATCH["sequence"],
            ),
            draw=_draw_break_even,
            caption="How much faster zenflow's step is, by host DRAM and micro-batches of a step.",
        ),
        Study(
            name="dram-for-gpu",
            question="What host DRAM bandwidth does a GPU need for steps without stall?",
            sweep=_sweep(
                [
                    "deferred_moments=step,window",
                    "gpu=rtx3090,rtx4090,rtx5090,a100-80-sxm,h100-sxm,h200-sxm,b200-sxm",
                    "dram=20:1500:x1.15",
                ],
                {"host": "2x-epyc-9654", **_MICRO_BATCH},
                select_interval=0,
            ),
            answer=answers.dram_for_gpu,
            draw=_draw_dram,
            caption="Least DRAM bandwidth of the socket that the GPU hangs on.",
        ),
        Study(
            name="cores-against-interval",
            question="How many cores does the host need, and do longer windows save any?",
            sweep=_sweep(
                [
                    "deferred_moments=step,window",
                    "cores=2,4,6,8,10,12,14,16,20,24,32,64",
                    "S=1:32:x2",
                ],
                {"gpu": "a100-80-pcie", "host": "epyc-7742", "link": "pcie4-x16", **_MICRO_BATCH},
            ),
            answer=answers.cores_against_interval,
            draw=_draw_cores,
            caption="Share of a step that the device waits, by cores of the host and S.",
        ),
    )
}  # fmt: skip


def chosen(name: str) -> list[Study]:
    """Return the study of this name, or all.

    Raises:
        ConfigError: There is none; the nearest names are given.
    """
    if name == ALL:
        return list(STUDIES.values())
    if name not in STUDIES:
        known = {fold(known): known for known in (*STUDIES, ALL)}
        raise ConfigError(f"there is no study {name!r}: {nearest(name, known)}")
    return [STUDIES[name]]


def run_study(
    study: Study, out: Path | None, engine: Engine, console: Console | None = None
) -> int:
    """Make a study's record in its own folder below ``out``; return the exit code.

    A record that is there is not made again: its sentences are printed.

    Raises:
        ConfigError: The folder holds another sweep.
        ZenFlowError: Workers can't be kept alive.
    """
    console = console or Console(highlight=False)
    folder = (out or results_folder("whatif")) / study.name
    console.print(f"[bold]{study.name}[/]: {study.question}")
    record = _read(folder, study)
    if record is None:
        outcome = run_sweep(study.sweep, folder, engine, console)
        if outcome.exit_code:
            console.print(
                f"stopped with {len(outcome.rows)} of {study.sweep.num_points} points, which are "
                "kept: the same command goes on"
            )
            return outcome.exit_code
        provenance = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        table = table_of(study.sweep, outcome.rows)
        record = _finish(study, table, folder, provenance)
    for sentence in record["answer"]:
        console.print(f"  {sentence}", markup=False, soft_wrap=True)
    console.print(f"  ({folder})", style="dim", soft_wrap=True)
    return 0


def _read(folder: Path, study: Study) -> dict[str, Any] | None:
    """Return the record in a folder; None where there is none of all points.

    Raises:
        ConfigError: It is of another sweep.
    """
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if json.dumps(record.get("sweep")) != json.dumps(study.sweep.to_dict()):
        raise ConfigError(
            f"{folder} holds a study with other axes or settings, of an earlier version: remove "
            "it, or choose another --out"
        )
    return record


def _finish(
    study: Study, table: pd.DataFrame, folder: Path, provenance: dict[str, Any]
) -> dict[str, Any]:
    """Draw the picture and write the record; the journal has then served."""
    from experiments.output.plots import save_figure

    save_figure(study.draw(table, study.sweep), folder / PICTURE)
    record = {
        "study": study.name,
        "question": study.question,
        "answer": study.answer(table),
        "picture": study.caption,
        **provenance,
    }
    write_json(folder / RECORD, record)
    for name in (NAME, PROVENANCE, PARQUET):
        (folder / name).unlink(missing_ok=True)
    return record
