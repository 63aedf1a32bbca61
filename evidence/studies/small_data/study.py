"""Small tasks, trained over and over: does a rule end where AdamW ends?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from evidence.studies.small_data.design import ADAMW, PLAIN, subject, variants
from evidence.studies.small_data.picture import draw
from experiments.lab.columns import Column, Table, key
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study

MOST_POINTS, MOST_LOSS = 0.3, 2.0
"""Points of accuracy, and percent of the test loss, that count as none lost."""
_JUDGED = ("zenflow, S = 4", "zenflow, S = 16")
_ENDS = ("accuracy", "test_loss", "train_loss")
_PERCENT = 100


def _cells(scope: Scope) -> Sequence[Cell]:
    return subject(scope).cells(scope.seeds or (0,), variants(scope))


def _run(cell: Cell, job: Job) -> Row:
    from evidence.studies.small_data.run import fine_tune  # loads torch

    training, sentences, variant = cell.work
    row = fine_tune(training, sentences, variant, job.progress)
    return {**row, "accuracy": row["score"]}


def _summarise(rows: Sequence[Row], config: Data) -> Data:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["variant"]), []).append(row)
    found = []
    for (task, variant), own in groups.items():
        base = {row["seed"]: row for row in groups.get((task, ADAMW), [])}
        pairs = [(row, base[row["seed"]]) for row in own if row["seed"] in base]
        found.append({
            "task": task,
            "variant": variant,
            "seeds": [row["seed"] for row in own],
            **{name: [row[name] for row in own] for name in _ENDS},
            "points": [round(_PERCENT * (a["accuracy"] - b["accuracy"]), 3) for a, b in pairs],
            "test_percent": [_excess(a["test_loss"], b["test_loss"]) for a, b in pairs],
            "train_percent": [_excess(a["train_loss"], b["train_loss"]) for a, b in pairs],
            "curve": [
                [fmean(column) for column in zip(*at, strict=True)]
                for at in zip(*(row["points"] for row in own), strict=True)
            ],
        })  # fmt: skip
    return {"study": dict(config), "groups": found}


def _excess(value: float, base: float) -> float:
    return round(_PERCENT * (value / base - 1), 3)


def _mean_over_tasks(groups: Iterable[Mapping[str, Any]], name: str) -> float:
    return fmean(fmean(group[name]) for group in groups)


def _findings(data: Data) -> Sequence[Finding]:
    found = []
    source = "the paper claims no loss of accuracy; the margin is ours, set beforehand"
    for variant in _JUDGED:
        own = [group for group in data["groups"] if group["variant"] == variant]
        if not own:
            continue
        names = ", ".join(f"{g['task']} {fmean(g['points']):+.2f}" for g in own)
        found += [
            Finding(
                claim=f"{variant}: accuracy is {MOST_POINTS:g} points below AdamW's at most, in "
                "the mean over the tasks",
                source=source, unit="points", published=-MOST_POINTS,
                tolerance=Tolerance.at_least(), measured=_mean_over_tasks(own, "points"),
                note=names,
            ),
            Finding(
                claim=f"{variant}: test loss is {MOST_LOSS:g}% above AdamW's at most, in the mean "
                "over the tasks",
                source=source, unit="%", published=MOST_LOSS, tolerance=Tolerance.at_most(),
                measured=_mean_over_tasks(own, "test_percent"),
                note=", ".join(f"{g['task']} {fmean(g['test_percent']):+.1f}%" for g in own),
            ),
        ]  # fmt: skip
        for group in own:
            spread = _spread(data["groups"], group["task"])
            if spread is not None:
                found.append(Finding(
                    claim=f"{variant}: on {group['task']} accuracy is below AdamW's by no more "
                    "than AdamW's own spread over the seeds",
                    source="own record: one standard deviation", unit="points", published=-spread,
                    tolerance=Tolerance.at_least(), measured=fmean(group["points"]),
                ))  # fmt: skip
    return found


def _spread(groups: Sequence[Mapping[str, Any]], task: str) -> float | None:
    """Return the standard deviation of AdamW's accuracy in points; None for one seed."""
    for group in groups:
        if (group["task"], group["variant"]) == (task, ADAMW) and len(group["accuracy"]) > 1:
            return _PERCENT * float(stdev(group["accuracy"]))
    return None


def _about(data: Data) -> str:
    study = data["study"]
    model = str(study["model"]).removeprefix("package:")
    tasks = ", ".join(
        f"{task['name']} ({task['num_train']} to learn, {task['num_test']} to test)"
        for task in study["tasks"]
    )
    return (
        f"{model} learns {tasks} in {study['epochs']:g} passes, by batches of "
        f"{study['batch_size']}. The learning rate is {study['lr']:g} with a warm-up over "
        f"{study['warmup']:.0%} of the steps and a linear decay; gradients are clipped at "
        f"{study['max_grad_norm']:g}. A seed gives all rules the same head, batches and dropout. "
        "Rules called zenflow are the engine's, AdamW is torch's, and all others are a plain loop "
        f"with logical delays. *{PLAIN.capitalize()}* is the rule without its delay and without "
        "bias correction in share and lead. Training loss is the mean since the test before, in "
        "the last half pass; tests use the true weights. Numbers beside a mean are the standard "
        "deviation over the seeds."
    )


def _tables(data: Data) -> Sequence[Table]:
    groups = data["groups"]
    columns = [
        key("variant", head="rule"),
        Column(head="seeds", show=lambda g: str(len(g["seeds"]))),
        Column(head="accuracy", show=lambda g: f"{fmean(g['accuracy']):.2%}"),
        _difference("points", "points"),
        Column(head="test loss", show=lambda g: f"{fmean(g['test_loss']):.4f}"),
        _difference("test_percent", "test loss, %"),
        Column(head="training loss", show=lambda g: f"{fmean(g['train_loss']):.4f}"),
        _difference("train_percent", "training loss, %"),
    ]
    return [
        Table(title=task, columns=columns, rows=[g for g in groups if g["task"] == task])
        for task in dict.fromkeys(group["task"] for group in groups)
    ]


def _difference(name: str, head: str) -> Column:
    """Return a column of differences to AdamW, with their spread."""

    def show(group: Mapping[str, Any]) -> str:
        values = group[name]
        if group["variant"] == ADAMW or not values:
            return ""
        spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
        return f"{fmean(values):+.1f}{spread}"

    return Column(head=f"{head}, beside AdamW", show=show)


STUDY = Study(
    name="small_data",
    title="Fine-tuning on few sentences",
    cells=_cells,
    run=_run,
    summarise=_summarise,
    findings=_findings,
    about=_about,
    tables=_tables,
    draw=draw,
    settings=lambda scope: subject(scope).header(),
    seeds=(0, 1, 2, 3, 4),
    minutes=240,
    uses=frozenset({"data_dir", "model"}),
)
