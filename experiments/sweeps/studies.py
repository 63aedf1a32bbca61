"""Group whatif: sweeps with a question each, whose answer the record's page has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from experiments.lab import catalogue
from experiments.lab.columns import Column, Table
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study
from experiments.request.request import Request
from experiments.request.words import GIB
from experiments.sweeps import answers
from experiments.sweeps.axes.kinds import Axis
from experiments.sweeps.axes.parsing import parse_axes
from experiments.sweeps.columns import Batch
from experiments.sweeps.grid import Sweep, notes_of
from experiments.sweeps.points import rows_of
from experiments.sweeps.table import table_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_MODEL = "llama-2-7b"
_MICRO_BATCH = {"batch_size": 4, "sequence": 1024}


def _what_if(
    name: str,
    question: str,
    axes: Sequence[str],
    request: dict[str, Any],
    answer: Callable[[pd.DataFrame], list[str]],
    draw: Callable[[pd.DataFrame, Sweep], Figure],
    **knobs: Any,
) -> Study:
    """Return the study of a sweep, a cell for each point.

    Args:
        name: Name in the group.
        question: What is asked, the record's headline.
        axes: What is varied.
        request: Machine and workload where no axis says otherwise.
        answer: Sentences that the sweep's table says.
        draw: Picture of the table.
        knobs: Settings of the update rule that no axis varies.
    """
    whole = Sweep(
        axes=parse_axes(axes),
        request=Request(model=_MODEL, checkpointing=True, **request),
        knobs=knobs,
    )
    few = replace(whole, axes=tuple(map(_shortened, whole.axes)))

    def asked(smoke: bool) -> Sweep:
        return few if smoke else whole

    def cells(scope: Scope) -> Sequence[Cell]:
        sweep = asked(scope.smoke)
        return [
            Cell(settings=sweep.values(index), work=(sweep, index))
            for index in range(sweep.num_points)
        ]

    def table(data: Data) -> pd.DataFrame:
        return table_of(asked(data["smoke"]), Batch.of_rows(dict(enumerate(data["points"]))))

    return Study(
        name=name,
        group=catalogue.WHAT_IF,
        title=question,
        minutes=2,
        cells=cells,
        run=_predict,
        summarise=lambda rows, config: {"smoke": config["smoke"], "points": list(rows)},
        findings=lambda data: (),
        tables=lambda data: [
            Table(columns=[Column(head="answer", show=str)], rows=answer(table(data)))
        ],
        draw=lambda data: draw(table(data), asked(data["smoke"])),
        about=lambda data: _about(asked(data["smoke"])),
        settings=lambda scope: asked(scope.smoke).to_dict(),
        exact=True,
        revision=4,
    )


def _shortened(axis: Axis) -> Axis:
    """Return an axis of a smoke test: answers look up values that it keeps."""
    return replace(axis, values=axis.values[1:3] if axis.is_number else axis.values[-3:])


def _about(sweep: Sweep) -> str:
    said = (
        "Predicted: nothing was measured. `rows.jsonl` has a line for each point, a table for "
        "`pandas.read_json(..., lines=True)`; its columns are those of `zenflow sweep`."
    )
    return "\n".join([said, "", *(f"- {note}" for note in notes_of(sweep))]).rstrip()


def _predict(cell: Cell, job: Job) -> Row:
    sweep, index = cell.work
    ((_, row),) = rows_of(sweep, [index])
    return row


# ---- pictures ---------------------------------------------------------------------------------


def _axis(sweep: Sweep, name: str) -> Any:
    return next(axis for axis in sweep.axes if axis.name == name)


def _draw_link_or_host(frame: pd.DataFrame, sweep: Sweep) -> Figure:
    from experiments.sweeps.pictures.plots import draw_heat_maps

    batch = _MICRO_BATCH["batch_size"]
    return draw_heat_maps(
        frame[frame["batch"] == batch], _axis(sweep, "host"), _axis(sweep, "link"),
        "step_seconds", panel=_axis(sweep, "strategy"), note=f", {batch} sequences",
    )  # fmt: skip


def _draw_break_even(frame: pd.DataFrame, sweep: Sweep) -> Figure:
    from experiments.sweeps.pictures.plots import draw_heat_maps

    return draw_heat_maps(
        answers.speedups(frame), _axis(sweep, "dram"), _axis(sweep, "grad_accum"), "speedup",
        note=" (zero_offload's step over zenflow's; red: break-even)",
        levels=[1 / answers.worth()],
    )  # fmt: skip


def _draw_dram(frame: pd.DataFrame, sweep: Sweep) -> Figure:
    from experiments.sweeps.pictures.plots import draw_bars

    least = answers.least_dram(frame)
    gpus = list(map(str, _axis(sweep, "gpu").values))
    bars = {
        f"q = {depth}": [least[depth, gpu] for gpu in gpus]
        for depth in _axis(sweep, answers.DEPTH).values
    }
    return draw_bars(gpus, bars, title="least host DRAM for a step without stall", unit="GB/s")


def _draw_cores(frame: pd.DataFrame, sweep: Sweep) -> Figure:
    from experiments.sweeps.pictures.plots import draw_heat_maps

    waits = frame.assign(**{"share of a step waited": answers.waiting(frame)})
    return draw_heat_maps(
        waits, _axis(sweep, "S"), _axis(sweep, "cores"),
        "share of a step waited", panel=_axis(sweep, answers.DEPTH),
        note=" (selections aside; red: free of stall)",
        levels=[answers.STALL_FREE],
    )  # fmt: skip


# ---- all studies ------------------------------------------------------------------------------


STUDIES = (
    _what_if(
        "break_even",
        "Where does ZenFlow stop paying?",
        [
            "strategy=on_device,zero_offload,zenflow",
            "dram=25:400:x2",
            "grad_accum=1:128:x2",
        ],
        {"gpu": "a100-80-pcie", "host": "epyc-9654", "link": "pcie4-x16", **_MICRO_BATCH},
        partial(
            answers.break_even, tokens=_MICRO_BATCH["batch_size"] * _MICRO_BATCH["sequence"]
        ),
        _draw_break_even,
    ),
    _what_if(
        "cores_against_interval",
        "How many cores does the host need, and do longer windows save any?",
        [
            "queue_depth=1,8",
            "cores=2,4,6,8,10,12,14,16,20,24,32,64",
            "S=1:64:x2",
        ],
        {"gpu": "a100-80-pcie", "host": "epyc-7742", "link": "pcie4-x16", **_MICRO_BATCH},
        answers.cores_against_interval,
        _draw_cores,
    ),
    _what_if(
        "dram_for_gpu",
        "What host DRAM bandwidth does a GPU need for steps without stall?",
        [
            "queue_depth=1,8",
            "gpu=rtx3090,rtx4090,rtx5090,a100-80-sxm,h100-sxm,h200-sxm,b200-sxm",
            "dram=20:1500:x1.15",
        ],
        {"host": "2x-epyc-9654", **_MICRO_BATCH},
        answers.dram_for_gpu,
        _draw_dram,
        select_interval=0,
    ),
    _what_if(
        "pcie5_or_cpu",
        "Does PCIe 5 or a faster host help more for a 7B on a 24 GB card?",
        [
            "strategy=zero_offload,zenflow",
            "batch=1,2,4,8",
            "link=pcie3-x16,pcie4-x16,pcie5-x16",
            "host=desktop-ddr4,desktop-ddr5,epyc-7742,epyc-9654",
        ],
        {"gpu": "rtx4090", "host_ram": 128 * GIB},
        partial(
            answers.link_or_host, link="pcie4-x16", faster_link="pcie5-x16",
            host="desktop-ddr5", batch=_MICRO_BATCH["batch_size"],
        ),
        _draw_link_or_host,
    ),
)  # fmt: skip
