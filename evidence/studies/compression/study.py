"""Formats of few bytes on the tensors of a training: error, bytes and speed.

Gradients cross the link, moments and weights wait on the host, weights are saved. Each may have a
format of its own: floats of few bits with a common exponent, integers with a common scale, a
compressor whose error is bounded (zfp), one without error (zstd). A tensor of each kind and of
each place in a model goes through all of them.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.lab.columns import Table, key
from experiments.lab.finding import Finding, Tolerance, aim
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study
from experiments.training.settings.training import TrainSettings

REPEATS = 3
_TRAINING = TrainSettings(strategy="on_device", steps=30, sequence=128, batch_size=2, lr=2e-5)
_OWN = replace(_TRAINING, steps=200, lr=1e-3, batch_size=16)
"""Training of the study's own small model, from random weights."""
_COLOURS = {"embedding": "#d95f02", "attention": "#7570b3", "feed-forward": "#1b9e77"}
_MARKERS = "osv^D*XP<"
_NO_ERROR = 1e-7
MOST_BIAS = 0.02


def _cells(scope: Scope) -> Sequence[Cell]:
    training = _OWN if scope.model is None else replace(_TRAINING, model=scope.model)
    if scope.smoke:
        training = replace(training, model="own:tiny", steps=3, batch_size=2, sequence=32)
    named = "a decoder of 0.8M" if scope.model is None else scope.model.rstrip("/").split("/")[-1]
    settings = {"model": named, "steps": training.steps, "lr": training.lr}
    return [Cell(settings=settings, work=training)]


def _run(cell: Cell, job: Job) -> Row:
    from evidence.studies.compression.codecs import CODECS  # load torch
    from evidence.studies.compression.tensors import KINDS, samples

    found = samples(cell.work)
    rows, missing = [], set()
    for codec in CODECS:
        if codec.package is not None and importlib.util.find_spec(codec.package) is None:
            missing.add(codec.package)
            continue
        rows += [
            {"codec": codec.name, "kind": kind, "place": place,
             **_measured(codec, sample, kind)}
            for kind in KINDS if kind in codec.kinds
            for place, sample in found.items()
        ]  # fmt: skip
        job.progress(len(rows) / (12 * len(CODECS)), codec.name)
    return {"measured": rows, "missing": sorted(missing)}


def _measured(codec: Any, sample: Any, kind: str) -> Row:
    """Return bytes, errors and speeds of a codec on one tensor."""
    values = sample.tensors[kind]
    coding, decoding = [], []
    for _ in range(REPEATS):
        started = time.perf_counter()
        coded, num_bytes = codec.encode(values)
        between = time.perf_counter()
        back = codec.decode(coded, values)
        coding.append(between - started)
        decoding.append(time.perf_counter() - between)
    error = (back - values).double()
    whole = values.double()
    there = whole != 0
    slope, apart = _update(sample, kind, back)
    return {
        "bytes": num_bytes / values.numel(),
        "error": float(error.norm() / whole.norm()),
        "worst": float(error.abs().max() / whole.square().mean().sqrt()),
        "lost": float((there & (back == 0)).sum() / there.sum().clamp_min(1)),
        "slope": slope,
        "apart": apart,
        "encode": values.numel() / median(coding),
        "decode": values.numel() / median(decoding),
    }


def _update(sample: Any, kind: str, back: Any) -> tuple[float, float]:
    """Return how an update changes by this: its slope on AdamW's, and its relative error.

    A gradient is taken for all that the moments have seen: by itself it makes both of them.
    """
    tensors = dict(sample.tensors)
    if kind == "weight":
        return 1.0, 0.0
    if kind == "gradient":
        grad = tensors["gradient"]
        tensors |= {"first moment": grad, "second moment": grad.square()}
        changed = {"first moment": back, "second moment": back.square()}
    else:
        changed = {kind: back}

    def update(own: dict[str, Any]) -> Any:
        root = own["second moment"].double().clamp_min(0).sqrt()
        floor = 1e-8 + 1e-3 * tensors["second moment"].double().mean().sqrt()
        return own["first moment"].double() / (root + floor)

    plain, other = update(tensors), update({**tensors, **changed})
    square = plain.square().sum()
    return float((other * plain).sum() / square), float((other - plain).norm() / square.sqrt())


def _summarise(rows: Sequence[Row], config: Data) -> Data:
    del config
    (row,) = rows
    return {name: row[name] for name in ("model", "steps", "lr", "measured", "missing")}


def _findings(data: Data) -> Sequence[Finding]:
    formats = {
        "gradient": "E4M3, exponents of 64",
        "first moment": "E4M3 at random",
        "second moment": "E5M3 at random",
    }
    return [
        aim(
            f"The format of the {kind} keeps the update's length, in every place",
            MOST_BIAS, Tolerance.at_most(),
            measured=max(
                abs(row["slope"] - 1)
                for row in data["measured"]
                if (row["kind"], row["codec"]) == (kind, codec)
            ),
        )
        for kind, codec in formats.items()
    ]  # fmt: skip


def _about(data: Data) -> str:
    missing = f" Not installed: {', '.join(data['missing'])}." if data["missing"] else ""
    return (
        f"Tensors of {data['model']} after {data['steps']} steps of AdamW at a rate of "
        f"{data['lr']:g}: the embedding, and two matrices of the layer in the middle. Error is "
        "that of all numbers together over their length; slope is the length of AdamW's update "
        "with the numbers that come back, along the update that it was; lost are numbers that "
        "become 0. Speeds are of one tensor at a time, torch's own threads included; zenflow's "
        f"formats are made by its torch operations here, not by its compiled kernel.{missing}"
    )


def _tables(data: Data) -> Sequence[Table]:
    numbers = [
        key("codec"), key("place"), key("bytes", ".2f", "bytes a number"),
        key("error", ".2%"), key("lost", ".1%"),
    ]  # fmt: skip
    updates = [key("slope", ".3f", "slope of the update"), key("apart", ".1%", "its error")]
    speeds = [
        key("encode", ".2f", "G numbers/s in"), key("decode", ".2f", "G numbers/s out")
    ]  # fmt: skip
    tables = []
    for kind in dict.fromkeys(row["kind"] for row in data["measured"]):
        rows = [
            {**row, "encode": row["encode"] / 1e9, "decode": row["decode"] / 1e9}
            for row in data["measured"]
            if row["kind"] == kind
        ]
        moves = [] if kind == "weight" else updates
        columns = [*numbers, *moves, *speeds]
        tables.append(Table(title=kind.capitalize(), columns=columns, rows=rows))
    return tables


def _draw(data: Data) -> Figure:
    """Return a panel for each kind: error of the update, or of the weight, over bytes."""
    rows = data["measured"]
    codecs = list(dict.fromkeys(row["codec"] for row in rows))
    markers = dict(zip(codecs, _MARKERS, strict=False))
    figure = Figure(figsize=(11.5, 6.4), layout="constrained")
    kinds = dict.fromkeys(row["kind"] for row in rows)
    for axes, kind in zip(figure.subplots(2, 2).flat, kinds, strict=True):
        is_weight = kind == "weight"
        for row in rows:
            if row["kind"] == kind:
                error = max(row["error" if is_weight else "apart"], _NO_ERROR)
                axes.plot(row["bytes"], error, markers[row["codec"]], markersize=6, alpha=0.8,
                          color=_COLOURS[row["place"]])  # fmt: skip
        axes.set_yscale("log")
        axes.set_title(kind, fontsize=10)
        axes.set_xlabel("bytes a number", fontsize=8)
        what = "error of the weight" if is_weight else "error of AdamW's update"
        axes.set_ylabel(f"{what} (1e-7: none)", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    shown = [Line2D([], [], marker=m, color="#444444", linestyle="", label=codec)
             for codec, m in markers.items()]  # fmt: skip
    shown += [Line2D([], [], marker="s", color=colour, linestyle="", label=place)
              for place, colour in _COLOURS.items()]  # fmt: skip
    figure.legend(handles=shown, loc="outside right upper", fontsize=8, frameon=False)
    return figure


STUDY = Study(
    name="compression",
    title="Formats of few bytes on a training's tensors",
    cells=_cells,
    run=_run,
    summarise=_summarise,
    findings=_findings,
    about=_about,
    tables=_tables,
    draw=_draw,
    uses=frozenset({"model"}),
    one_at_a_time=True,
    minutes=5,
)
