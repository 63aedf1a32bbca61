"""The published measurements' section of docs/validation.md, and the pages of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from evidence.published.runs import published
from evidence.studies.published.memory import MEMORY_COLUMNS, about
from evidence.studies.published.study import (
    AIM,
    COLUMNS,
    REGIMES,
    errors_by_regime,
    milliseconds,
)
from experiments.lab.columns import Column, Table, key, markdown
from experiments.lab.record import Record
from sim.hardware.components import ADAM_SHARE

_STATED = """\
*All stated* are rows whose source says all that a prediction needs, as whoever predicts a run of \
their own knows it: device, host where it counts, network, batch, what is recomputed, and what \
the figure is of. What other sources leave open stands with their group. What the model leaves \
out is no such reason. Two groups were *listed late*, when their errors had been seen: their \
sources do not say what slot the devices are in."""
_PEAKS = """\
Peaks of one device, and what ran or failed, beside what is predicted: in GB, of PyTorch's \
tensors, of its allocator's blocks, or of the whole device."""


def section(found: Record | None) -> list[str]:
    """Return the lines of a record of `evidence.studies.published`, or why there are none."""
    if found is None:
        return ["No record yet: `zenflow study published` makes one."]
    (record,) = found.rows
    rows = record["rows"]
    lines = _introduction(record, found.folder.name)
    lines += ["", "### Absolute errors by regime", ""]
    lines += markdown(Table(columns=REGIMES, rows=errors_by_regime(rows)))
    lines += ["", _STATED, "", "### Every row", ""]
    lines += ["Each page has its rows, their sources, what was assumed, and how misses move.", ""]
    lines += markdown(Table(columns=_TOPIC_COLUMNS, rows=_topics(rows)))
    if "memory" in record:
        lines += ["", "### Memory", "", f"{_PEAKS} {about(record['memory'])}", ""]
        lines += [
            "[Every case](validation/memory.md) has its source and what it takes for granted."
        ]
    lines += ["", "### Not predicted", ""]
    return lines + [f"- {text}" for text in published().not_predicted]


def pages(found: Record | None) -> dict[str, list[str]]:
    """Return the lines of the pages beside the section, by name: rows by topic, ranges, memory."""
    if found is None:
        return {}
    (record,) = found.rows
    made = {
        name: _topic(title, groups, record["rows"])
        for name, (title, groups) in published().topics.items()
    }
    if record["left_out"]:
        made["ranges"] = ["# What the ranges hold", "", *_left_out(record["left_out"])]
    if "memory" in record:
        made["memory"] = ["# Memory", "", *_memory(record["memory"])]
    return {name: lines for name, lines in made.items() if lines}


def _topics(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each page of rows."""
    found = []
    for name, (title, groups) in published().topics.items():
        errors = [abs(row["error"]) for row in rows if row["group"] in groups]
        if errors:
            met = sum(error <= AIM for error in errors)
            found.append({"page": f"[{title}](validation/{name}.md)", "rows": len(errors),
                          "median": median(errors), "within": met})  # fmt: skip
    return found


_TOPIC_COLUMNS = (
    key("page"),
    key("rows"),
    Column(head="median error", show=lambda row: f"{row['median']:.1%}"),
    Column(head=f"within {AIM:.0%}", show=lambda row: str(row["within"])),
)


def _topic(title: str, groups: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of one page of rows; none where it would have no row."""
    own = [row for row in rows if row["group"] in groups]
    if not own:
        return []
    sources = list(dict.fromkeys(row["source"] for row in own))
    lines = [f"# {title}", "", "Predicted beside published times; [validation](../validation.md) "
             "has the errors of all rows, and says how to read them."]  # fmt: skip
    for group in groups:
        chosen = [row for row in own if row["group"] == group]
        if chosen:
            about = published().groups[group]
            lines += ["", f"## {about.title}", "", *_group(chosen, sources), "", about.doubts]
            lines += _open(group)
            lines += _missed([row for row in chosen if abs(row["error"]) > AIM])
    lines += ["", "## Sources", ""]
    return lines + [f"{number}. {text}" for number, text in enumerate(sources, 1)]


def _introduction(record: Mapping[str, Any], folder: str) -> list[str]:
    """Return the text on how predictions are made, how rows were chosen, and what ranges hold."""
    rows = record["rows"]
    met = sum(abs(row["error"]) <= AIM for row in rows)
    share, each = record["deepspeed_share"], record["deepspeed_bytes_per_parameter"]
    return [
        "Others' measurements on others' machines, predicted from the table in `sim/data` and the "
        f"models' configurations. The aim is {AIM:.0%}: {met} of {len(rows)} are within it. "
        f"Record: [{folder}](../evidence/results/{folder}/README.md), by "
        "`zenflow study published`.",
        "",
        "Nothing is fitted to a row, and no figure differs between rows of one machine. "
        "DeepSpeed's CPU step is far below DRAM bandwidth. The ZenFlow paper's breakdown has "
        "4.6 s for 6.74 G "
        f"parameters on one host. At the {each:g} bytes that the simulated CPU phases move for "
        f"each, that is {share:.3f} of one socket's STREAM. It comes from the source of the "
        "phases, and from none of the rows below those. AdamW kernels alone reach "
        f"{ADAM_SHARE.value:g} of STREAM, by four published ones that are no rows. So on two "
        "sockets DeepSpeed's kernel is faster, and the passes around it are not. *Roofline* is "
        "what the table's DRAM bandwidth would have said instead.",
        "",
        "What a launch costs the host is from decoding, profiles and counted kernels, not from a "
        "row. Which kernels ran is as the source says. What FSDP2, DDP and DeepSpeed do around a "
        "layer is from a microbenchmark and from their code.",
        "",
        "82 rows, of 28 sources, were entered before any of them was predicted. Commit 5d170d7 "
        "predicted them as they were entered: their median error was 25%, and 28 were within 15%. "
        "They showed what was mended since: DeepSpeed's step on hosts with one node of memory and "
        "under ZeRO-3, PyTorch's own AdamW on the host. They also decided for counting large "
        "caches, with the rows on an L40S and an RTX 4090. No constant comes from their times. "
        "Ten rows joined two of their sources later, before they were predicted as well: commits "
        "b639c11 and b1d9496 entered them.",
        "",
        "71 rows more, of 28 sources, were *entered last*: commits b55187d and df27ec8. They test "
        "all that was mended before. Predicted as they were entered, their median error was 9.5% "
        "and its 90th percentile 41.8%; of the 30 whose sources say all that a prediction needs "
        "these were 7.5% and 21.7%. What was changed since, and on what grounds: products on "
        "Hopper, measured on Llama's shapes and not estimated; attention by kernel and length, "
        "from timed kernels; compiled eager attention, counted; DeepSpeed's step on Grace, which "
        "is one node of memory. The last two the rows showed. No constant comes from their times.",
        "",
        "*Range* holds 80 % of the predictions when all figures are drawn by their uncertainty, "
        "times what the model leaves out. Times are in milliseconds.",
        "",
        *(_spread(record["left_out"]) if record["left_out"] else []),
        "",
        "Cores that are not bound reach memory of both sockets: half of all accesses take the "
        "table's hop, copies included. DeepSpeed's ZeRO-Offload and ZenFlow are simulated as "
        "released: copies on the stream that computes, and for ZenFlow float gradients in "
        "pageable memory, all of a boundary in turn. "
        "The code read is version 0.19; the rows were measured on older ones. A first comparison, "
        "in which copies ran beside backward and all memory was pinned, missed ZenFlow's rows by "
        "27 to 40 %; that is what the code was read again for. No figure was changed.",
    ]


def _open(group: str) -> list[str]:
    """Return the text on facts that a group's sources leave open, if there are any."""
    names = published().groups[group].open
    return ["", f"Open: {', '.join(names)}."] if names else []


def _memory(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the cases of memory, their sources and what they take for granted."""
    lines = [
        f"{_PEAKS} {about(rows)}",
        "",
        *markdown(Table(columns=MEMORY_COLUMNS, rows=rows)),
    ]
    taken: dict[str, list[str]] = {}
    for row in rows:
        taken.setdefault(row["source"], []).append(row["assumption"])
    texts = {source: "; ".join(dict.fromkeys(found)) for source, found in taken.items()}
    return [*lines, "", *(f"- {source}: {text}." for source, text in texts.items())]


def _spread(found: Mapping[str, Any]) -> list[str]:
    return [f"{_held(found)} [By group](validation/ranges.md)."]


def _left_out(found: Mapping[str, Any]) -> list[str]:
    """Return how the term for what the model leaves out was fitted, and what it holds."""

    def held(key: str, head: str) -> Column:
        return Column(head=head, show=lambda row: f"{row[key]} of {row['rows']}")

    columns = [
        Column(head="group", show=lambda row: published().groups[row["group"]].title),
        held("figures", "figures alone"),
        held("without_the_row", "without the row"),
        held("without_the_group", "without the group"),
    ]
    return [_held(found), "", *markdown(Table(columns=columns, rows=_rows_held(found)))]


def _rows_held(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"group": group, **counts} for group, counts in found["held"].items()]


def _held(found: Mapping[str, Any]) -> str:
    """Return the text on the factor for the model's own error, and on what the ranges hold."""
    rows = _rows_held(found)
    names = ("rows", "figures", "without_the_row", "without_the_group")
    count, alone, single, others = (sum(row[name] for row in rows) for name in names)
    return (
        f"What the model leaves out is a log-normal factor with a spread of {found['sigma']:.2f}: "
        "the least with which the ranges hold 80 % of these rows. Ranges "
        f"of figures alone hold {alone} of these {count}. With the factor that all other rows "
        f"give they hold {single}, and {others} with the one that all other groups give."
    )


def _group(rows: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> list[str]:
    def source(row: Mapping[str, Any]) -> str:
        return str(sources.index(row["source"]) + 1)

    def error(row: Mapping[str, Any]) -> str:
        return f"{row['error']:+.1%}" + (" **missed**" if abs(row["error"]) > AIM else "")

    set_up, measured, predicted, _, *others = COLUMNS
    columns = (set_up, Column(head="source", show=source), measured, predicted,
               Column(head="error", show=error), *others)  # fmt: skip
    lines = markdown(Table(columns=columns, rows=rows))
    assumptions = "; ".join(dict.fromkeys(row["assumption"] for row in rows))
    return [*lines, "", f"Assumed: {assumptions}."]


def _missed(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return how missed predictions move with what is unknown, once for each set-up."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        parts = [f"{name} {share:+.2f}" for name, share in list(row["elasticities"].items())[:4]]
        ends = [f"{text}: {milliseconds(s)}" for text, s in row["alternatives"].items()]
        moves = f"a per cent of a figure moves it by {', '.join(parts)} per cent"
        text = "; ".join([moves, *ends])
        predicted = f"{milliseconds(row['predicted_seconds'])} predicted: {text}."
        lines.setdefault(predicted, []).append(row["label"])
    found = [f"- {', '.join(labels)}. {text}" for text, labels in lines.items()]
    return ["", "How the missed ones move with what is not known:", "", *found] if found else []
