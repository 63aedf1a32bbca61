"""A pretrained language model under every rule: does a run end where AdamW's ends?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from evidence.studies.language_model.design import (
    CLAIMED,
    DEFAULT,
    FEW_BYTES,
    RATE,
    RULES,
    SMOKE,
    subject,
)
from evidence.studies.language_model.picture import draw
from experiments.lab.columns import Column, Table, key
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.intervals import CONFIDENCE, half_width_over_seeds
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study

MARGIN = 0.5
"""Percent of AdamW's held-out loss that counts as none lost, set before anything ran."""
BYTES_MARGIN = 0.2
"""Percent of the held-out loss that fewer bytes may cost, set before anything ran."""
FIRST = 20
"""Number of steps, from the first, whose training losses are laid over one another."""
_PERCENT = 100
_ENDS = ("before", "held_out", "seen")


def _cells(scope: Scope) -> Sequence[Cell]:
    return subject(scope).cells(scope.seeds or (0,), smoke=scope.smoke)


def _run(cell: Cell, job: Job) -> Row:
    from evidence.studies.language_model.run import fine_tune  # loads torch

    training, task, rule = cell.work
    own = subject(Scope(smoke=job.smoke, seeds=job.seeds, data_dir=job.data_dir, model=job.model))
    return fine_tune(training, own.texts, task, rule, own.path, job.progress)


def _summarise(rows: Sequence[Row], config: Data) -> Data:
    """Return a group for each task, rate and rule, with differences to AdamW's at equal seeds."""
    groups: dict[tuple[str, float, str], dict[int, Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["lr"], row["rule"]), {})[row["seed"]] = row
    found, places = [], {rule: place for place, rule in enumerate(RULES)}
    for (task, lr, rule), own in sorted(groups.items(), key=lambda item: places[item[0][2]]):
        base = groups.get((task, lr, RULES[rule].beside), {})
        whole = groups.get((task, lr, DEFAULT), {}) if rule in FEW_BYTES else {}
        pairs = [(own[seed], base[seed]) for seed in own if seed in base]
        found.append({
            "task": task, "lr": lr, "rule": rule, "beside": RULES[rule].beside,
            "seeds": list(own),
            **{name: [row[name] for row in own.values()] for name in _ENDS},
            "percent": [_above(a["held_out"], b["held_out"]) for a, b in pairs],
            "bytes_percent": [
                _above(own[seed]["held_out"], whole[seed]["held_out"])
                for seed in own if seed in whole
            ],
            "seen_percent": [_above(a["seen"], b["held_out"]) for a, b in pairs],
            "first_percent": [
                _above(fmean(a["losses"][:FIRST]), fmean(b["losses"][:FIRST])) for a, b in pairs
            ],
            "curve": own[min(own)]["losses"][:FIRST],
        })  # fmt: skip
    return {"study": dict(config), "groups": found}


def _above(value: float, base: float) -> float:
    return round(_PERCENT * (value / base - 1), 4)


def interval(percents: Sequence[float]) -> tuple[float, float]:
    """Return the paired interval of a mean difference; of one seed it has no ends."""
    half = half_width_over_seeds(percents)
    return fmean(percents) - half, fmean(percents) + half


def _findings(data: Data) -> Sequence[Finding]:
    """Return whether the held-out loss is kept; there is no number where the seeds can't tell.

    Claims are of the study's own rate. Other rates have fewer seeds, and stand in the tables.
    """
    own = [group for group in data["groups"] if group["lr"] == _rate(data)]
    claims = (
        (CLAIMED, "percent", MARGIN, "AdamW's"),
        (FEW_BYTES, "bytes_percent", BYTES_MARGIN, f"that of {DEFAULT}"),
    )
    return [
        _kept(group, group[name], margin, base)
        for rules, name, margin, base in claims
        for group in own
        if group["rule"] in rules and group[name]
    ]


def _kept(group: Data, percents: Sequence[float], margin: float, base: str) -> Finding:
    """Return whether a rule's held-out loss is no more than a margin above another's."""
    low, high = interval(percents)
    mean, seeds = fmean(percents), len(percents)
    undecided = low <= margin < high
    return Finding(
        claim=f"{group['task']}, rate {group['lr']:g}: held-out loss of {group['rule']} is "
        f"no more than {margin:g}% above {base}",
        source="the aim of this project; the margin was set before anything ran",
        unit="%", published=margin, tolerance=Tolerance.at_most(),
        measured=None if undecided else mean,
        note=f"{mean:+.3f}% in the mean of {seeds} seed{'s' if seeds > 1 else ''}"
        + (f", {CONFIDENCE:.0%} interval {low:+.3f} to {high:+.3f}" if seeds > 1 else
           ", which allow no interval")
        + ("; the interval holds the margin: can't tell" if undecided and seeds > 1 else ""),
    )  # fmt: skip


def _rate(data: Data) -> float:
    """Return the learning rate that has all rules and seeds."""
    return SMOKE.lr if data["study"].get("smoke") else RATE


def _about(data: Data) -> str:
    study, groups = data["study"], data["groups"]
    num_runs = sum(len(group["seeds"]) for group in groups)
    model = str(study["model"]).removeprefix("package:")
    return (
        f"{num_runs} runs of {model}, whose weights are rounded to bfloat16 before the first "
        "step; those of a GGUF file have four bits each, and are made plain numbers again. "
        f"A run has {study['steps']} steps: of {study['batch_size']} rows of {study['sequence']} "
        f"tokens for plain text, or of {study['batch_size'] * study['chat_rows']} chats of that "
        f"length at most. The learning rate rises over {study['warmup']:.0%} of the steps and "
        f"falls linearly; gradients are clipped at {study['max_grad_norm']:g}. Losses of chats "
        "are those of the answers. A seed gives all rules the same batches in the same order. "
        "Held-out losses are of true weights: those that AdamW on the host has. *Seen* weights "
        "are those that the next forward would have met. Rules with bfloat16 weights are "
        "compared with AdamW on such weights, whose masters are float32."
    )


def _tables(data: Data) -> Sequence[Table]:
    groups = data["groups"]
    columns = [
        key("rule"),
        key("lr", "g", head="rate"),
        Column(head="seeds", show=lambda g: str(len(g["seeds"]))),
        Column(head="held-out loss before", show=lambda g: f"{fmean(g['before']):.4f}"),
        Column(head="and after", show=lambda g: f"{fmean(g['held_out']):.4f}"),
        _difference("percent", "beside AdamW, %"),
        _difference("bytes_percent", f"beside {DEFAULT}, %"),
        _difference("seen_percent", "of seen weights, %"),
        _difference("first_percent", f"training loss of the first {FIRST} steps, %"),
    ]
    return [
        Table(title=task, columns=columns, rows=[g for g in groups if g["task"] == task])
        for task in dict.fromkeys(group["task"] for group in groups)
    ]


def _difference(name: str, head: str) -> Column:
    """Return a column of mean differences to AdamW, with half of the paired interval."""

    def show(group: Mapping[str, Any]) -> str:
        values = group[name]
        if group["rule"] == group["beside"] or not values:
            return ""
        half = half_width_over_seeds(values)
        return f"{fmean(values):+.3f}" + (f" ± {half:.3f}" if len(values) > 1 else "")

    return Column(head=head, show=show)


STUDY = Study(
    name="language_model",
    title="A pretrained language model, fine-tuned",
    cells=_cells,
    run=_run,
    summarise=_summarise,
    findings=_findings,
    about=_about,
    tables=_tables,
    draw=lambda data: draw(data, _rate(data), MARGIN),
    settings=lambda scope: subject(scope).header,
    seeds=tuple(range(8)),
    minutes=320,
    uses=frozenset({"data_dir", "model"}),
)
