"""The largest model that one card trains: offload, fewer bytes, visiting layers, and a drive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from experiments.lab.columns import Column, Table, key
from experiments.lab.drawing import panels
from experiments.lab.finding import Finding
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study
from sim.hardware.catalog import find_machine
from sim.hardware.profile import HardwareProfile
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.planning.choice import Chooser
from sim.planning.drives import MANY_STEPS, with_drive, written_bytes
from sim.planning.options import Option
from sim.planning.streams import hiding_tokens, with_streams
from sim.timing.costs import costs_of

SEQUENCES, SEQUENCE = 4, 2048
"""Step that has to fit: so many sequences of so many tokens, in micro-batches of any size."""
CARDS = {"24 GB": "rtx4090-desktop", "80 GB": "hgx-h100"}
"""Machine of each card, of which one device is used."""
RAM = (64, 128, 256)
"""Host memory, GiB, in place of the machine's own."""
MODELS = (
    "qwen2.5-72b", "qwen3-32b", "mistral-small-24b", "qwen3-14b", "qwen3-8b", "qwen3-4b",
    "qwen3-1.7b", "qwen3-0.6b",
)  # fmt: skip
"""Dense models, the largest first."""
_FLOAT = {"host_state": "float32"}
_FEWER = {"host_state": "compact", "gradient_link": "e4m3"}
_COLOURS = ("#7f7f7f", "#7570b3", "#1b9e77", "#d95f02", "#66a61e", "#e6ab02")
_BILLION = 1e9


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to train with less memory."""

    knobs: Mapping[str, Any]
    visits: bool = False
    on_drive: bool = False


PLAIN, FEWER, VISITING, BOTH, DRIVE, ALL = (
    "offload", "compact state, 8-bit gradients", "streamed weights", "both",
    "streamed weights, states on a drive", "both, states on a drive",
)  # fmt: skip
WAYS = {
    PLAIN: _Way(_FLOAT),
    FEWER: _Way(_FEWER),
    VISITING: _Way(_FLOAT, visits=True),
    BOTH: _Way(_FEWER, visits=True),
    DRIVE: _Way(_FLOAT, visits=True, on_drive=True),
    ALL: _Way(_FEWER, visits=True, on_drive=True),
}
"""Ways to train. With streamed weights layers visit where that is faster, or nothing else fits."""


def _cells(scope: Scope) -> Sequence[Cell]:
    cards = list(CARDS)[:1] if scope.smoke else list(CARDS)
    models = MODELS[-1:] if scope.smoke else MODELS
    return [
        Cell(settings={"card": card, "ram_gib": ram, "way": way, "models": list(models)})
        for card in cards
        for ram in RAM[: 1 if scope.smoke else None]
        for way in WAYS
    ]


def _run(cell: Cell, job: Job) -> Row:
    """Return the largest model that fits, and its step; the model is None where none does."""
    card, ram, way, models = (cell.settings[name] for name in ("card", "ram_gib", "way", "models"))
    hardware = find_machine(CARDS[card], 1).with_values({"host.dram_bytes": ram * 2.0**30})
    for tried, name in enumerate(models):
        job.progress(tried / len(models), name)
        found = _best(name, hardware, WAYS[way])
        if found is not None:
            return _told(name, found, hardware)
    return {"model": None}


def _best(name: str, hardware: HardwareProfile, way: _Way) -> Option | None:
    """Return the fastest step of a model that is likely to fit; None if there is none."""
    workload = Workload.of_config(
        *find_model(name), batch_size=SEQUENCES, sequence=SEQUENCE, loss="chunks"
    )
    chooser = Chooser(workload, hardware, names=("zenflow",), knobs=way.knobs)
    if way.on_drive:
        return with_drive(chooser.planners[1], workload, is_asked=True, knobs=way.knobs)
    found = chooser.search(1, workload).best(names=("zenflow",)) if chooser.works else None
    if not way.visits:
        return found
    streamed = with_streams(chooser.planners[1], workload, before=found, knobs=way.knobs)
    return streamed or found


def _told(name: str, option: Option, hardware: HardwareProfile) -> Row:
    need, done = option.need, option.prediction
    assert done is not None
    work, streams = need.workload, need.strategy.streams
    row: Row = {
        "model": name,
        "billions": work.num_params / _BILLION,
        "setting": option.label,
        "tokens_per_second": option.tokens_per_second,
        "step_seconds": option.step_seconds,
        "stall_share": done.stall_fraction,
        "device_gib": need.device_bytes / 2**30,
        "host_gib": need.host_bytes / 2**30,
        "chance": option.chance,
        "micro_batch_tokens": work.batch_size * work.sequence,
    }
    if need.strategy.state_on_drive:
        row["drive_gib"] = need.nvme_bytes / 2**30
        row["written_tb"] = written_bytes(option) / 1e12
    if streams is not None:
        row["visiting_layers"] = len(streams.visiting(work.layers))
        row["hiding_tokens"] = hiding_tokens(need, costs_of(work, hardware))
    return row


def _about(data: Data) -> str:
    del data
    return (
        f"Simulated, and no GPU has confirmed it. A step has {SEQUENCES} sequences of "
        f"{SEQUENCE:,} tokens, in bf16, with a loss in chunks. The largest model of the list is "
        "named whose step is likely to fit the card and the host, with the setting of "
        "`zenflow plan`. The cards are an RTX 4090 in a desktop and one H100 of an HGX node, with "
        "host memory as given. With streamed weights layers visit the card only where that is "
        "faster by a twentieth, or nothing else fits. A drive is the machine's own in the table: "
        f"that of the desktop reads 7 GB/s and writes 1.5. TB are written in {MANY_STEPS:,} steps."
    )


def _shown(name: str, form: str, head: str, factor: float = 1.0) -> Column:
    def show(row: Mapping[str, Any]) -> str:
        value = row.get(name)
        return "" if value is None else format(factor * value, form)

    return Column(head=head, show=show)


def _tables(data: Data) -> Sequence[Table]:
    columns = [
        key("card"), key("ram_gib", head="host GiB"), key("way"), key("model"),
        _shown("tokens_per_second", ",.0f", "tokens/s"),
        _shown("stall_share", ".0f", "stalled %", 100.0),
        _shown("device_gib", ".1f", "card GiB"), _shown("host_gib", ".0f", "host GiB used"),
        _shown("drive_gib", ",.0f", "drive GiB used"), _shown("written_tb", ".0f", "TB written"),
        key("setting"), _shown("hiding_tokens", ",.0f", "tokens that hide visits"),
    ]  # fmt: skip
    return [Table(title="Largest models", columns=columns, rows=data["rows"])]


def _no_findings(data: Data) -> Sequence[Finding]:
    """Return none: nobody has published such a table, and a prediction is no proof."""
    del data
    return ()


def _draw(data: Data) -> Figure:
    """Return a panel for each card: a bar for each way and size of host memory."""
    rows = data["rows"]
    cards = list(dict.fromkeys(row["card"] for row in rows))
    sizes = list(dict.fromkeys(row["ram_gib"] for row in rows))
    figure, found = panels(15, 4.6, len(cards), sharey=True)
    for axes, card in zip(found, cards, strict=True):
        for place, (way, colour) in enumerate(zip(WAYS, _COLOURS, strict=True)):
            own = [row for row in rows if (row["card"], row["way"]) == (card, way)]
            for row in own:
                if row["model"] is None:
                    continue
                x = sizes.index(row["ram_gib"]) + 0.15 * (place - 2.5)
                is_first = row is next(one for one in own if one["model"] is not None)
                axes.bar(x, row["billions"], 0.14, color=colour, label=way if is_first else None)
                axes.annotate(
                    f"{row['billions']:.2g}B\n{row['tokens_per_second']:,.0f}/s",
                    (x, row["billions"]), ha="center", va="bottom", fontsize=5.5,
                )  # fmt: skip
        axes.set_yscale("log")
        axes.set_ylim(1, 100)
        axes.set_xticks(range(len(sizes)), [f"{size} GiB" for size in sizes])
        axes.set_xlabel("host memory")
        axes.set_title(f"a card of {card}", fontsize=10)
    found[0].set_ylabel("billions of parameters")
    found[0].legend(fontsize=8, frameon=False, loc="upper left")
    return figure


STUDY = Study(
    name="what_fits",
    title="The largest model that one card trains",
    cells=_cells,
    run=_run,
    summarise=lambda rows, _: {"rows": list(rows)},
    findings=_no_findings,
    about=_about,
    tables=_tables,
    draw=_draw,
    settings=lambda scope: {"num_models": len(MODELS), "tokens": SEQUENCES * SEQUENCE},
    minutes=1,
    exact=True,
)
