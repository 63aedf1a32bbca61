"""Tasks of GLUE under several rules: is a rule equivalent to AdamW, by two one-sided tests?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from evidence.studies.glue.design import DECODER, JUDGED, METRICS, subject
from evidence.studies.glue.picture import draw
from evidence.studies.small_data.design import ADAMW
from evidence.studies.sst2.model import PACKAGED as ENCODER
from experiments.lab.columns import Column, Table, key
from experiments.lab.finding import Finding, Range, Tolerance
from experiments.lab.intervals import CONFIDENCE, UNKNOWN, Equivalence
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study

_POINTS = 100


def _run(cell: Cell, job: Job, *, default: str) -> Row:
    from evidence.studies.language_model.model import in_folder  # these load torch
    from evidence.studies.small_data.run import fine_tune

    model, task, variant = cell.work
    scope = Scope(smoke=job.smoke, seeds=job.seeds, data_dir=job.data_dir, model=job.model)
    own = subject(scope, default)
    settings = replace(model.kind.protocol, seed=cell.settings["seed"])
    if model.path is not None:
        folder = in_folder(model.path, job.folder.parent / f"model-{model.digest}")
        settings = replace(settings, model=str(folder))
    return fine_tune(
        settings, own.sentences_for(model, task), variant, job.progress,
        score=METRICS[task.metric], tests_per_epoch=1,
    )  # fmt: skip


def _summarise(rows: Sequence[Row], config: Data) -> Data:
    """Return a group for each model, task and rule, with its differences to AdamW by seed."""
    groups: dict[tuple[str, str, str], dict[int, Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["task"], row["variant"]), {})[row["seed"]] = row
    found = []
    for (model, task, variant), own in groups.items():
        base = groups.get((model, task, ADAMW), {})
        pairs = [(own[seed], base[seed]) for seed in own if seed in base]
        found.append({
            "model": model, "task": task, "variant": variant, "seeds": list(own),
            "metric": config["tasks"][task]["metric"], "margin": config["tasks"][task]["margin"],
            "scores": [_POINTS * row["score"] for row in own.values()],
            "test_losses": [row["test_loss"] for row in own.values()],
            "points": [round(_POINTS * (a["score"] - b["score"]), 4) for a, b in pairs],
        })  # fmt: skip
    return {"study": dict(config), "groups": found}


def tested(group: Mapping[str, Any]) -> Equivalence | None:
    """Return the test of a group beside AdamW; None of AdamW itself, and without pairs."""
    if group["variant"] == ADAMW or not group["points"]:
        return None
    return Equivalence.of(group["points"], group["margin"])


def _findings(data: Data) -> Sequence[Finding]:
    """Return whether rules are equivalent; there is no number where the seeds can't tell."""
    found = []
    for group in data["groups"]:
        test = tested(group)
        if test is None or group["variant"] not in JUDGED:
            continue
        margin, undecided = group["margin"], test.verdict == UNKNOWN
        found.append(Finding(
            claim=f"{_model(group)} on {group['task']}: {group['metric']} of {group['variant']} "
            f"is AdamW's within {margin:g} point{'s' if margin != 1 else ''}",
            source="the aim of this project; the margin was set before anything ran",
            unit="points", published=Range(low=-margin, high=margin),
            tolerance=Tolerance.absolute(0.0),
            measured=None if undecided else test.difference,
            note=_told(test, len(group["points"])),
        ))  # fmt: skip
    return found


def _told(test: Equivalence, num_seeds: int) -> str:
    """Return a test's result in words."""
    if num_seeds == 1:
        return f"{test.difference:+.2f} points with one seed, which can't tell"
    undecided = "; the seeds can't tell" if test.verdict == UNKNOWN else ""
    return (
        f"{test.difference:+.2f} points, {CONFIDENCE:.0%} interval {test.span}, two one-sided "
        f"t-tests p = {test.p_value:.3f}, {num_seeds} seeds{undecided}"
    )


def _model(group: Mapping[str, Any]) -> str:
    return str(group["model"]).removeprefix("package:")


def _about(data: Data) -> str:
    study = data["study"]
    models = "; ".join(
        f"{_model({'model': m['name']})} learns {m['num_train']} sentences at most in "
        f"{m['epochs']:g} passes, by batches of {m['batch_size']} at a rate of {m['lr']:g}"
        for m in study["models"]
    )
    tests = ", ".join(f"{name} {task['num_test']}" for name, task in study["tasks"].items())
    return (
        f"{models}. The rate rises over the first steps and falls linearly; gradients are "
        "clipped. A head of two classes reads an encoder's first token, or a decoder's last one. "
        f"Tests are GLUE's validation sets ({tests} lines), whose test labels are hidden; a "
        "run's score is that of its last step. A seed gives all rules the same head, batches and "
        "dropout. A rule is *equivalent* to AdamW where two one-sided t-tests over the seeds, "
        "each at 5%, reject a difference of the margin or more either way. A decoder's weights "
        "may come from a GGUF file of four bits each."
    )


def _tables(data: Data) -> Sequence[Table]:
    def test(show: Any) -> Any:
        return lambda group: "" if tested(group) is None else show(tested(group))

    columns = [
        key("task"),
        key("variant", head="rule"),
        Column(head="seeds", show=lambda g: str(len(g["seeds"]))),
        key("metric"),
        Column(head="score, points", show=lambda g: f"{fmean(g['scores']):.2f}"),
        Column(head="test loss", show=lambda g: f"{fmean(g['test_losses']):.4f}"),
        Column(head="beside AdamW", show=test(lambda t: f"{t.difference:+.2f}")),
        Column(head=f"{CONFIDENCE:.0%} interval", show=test(lambda t: t.span)),
        Column(head="margin", show=lambda g: f"{g['margin']:g}"),
        Column(head="p", show=test(lambda t: f"{t.p_value:.3f}" if t.span else "")),
        Column(head="equivalent", show=test(lambda t: t.verdict)),
    ]  # fmt: skip
    models = dict.fromkeys(group["model"] for group in data["groups"])
    return [
        Table(
            title=name.removeprefix("package:"),
            columns=columns,
            rows=[group for group in data["groups"] if group["model"] == name],
        )
        for name in models
    ]


def _study(name: str, title: str, default: str) -> Study:
    """Return the study of a model, where ``--model`` names no other."""
    return Study(
        name=name,
        title=title,
        cells=lambda scope: subject(scope, default).cells(scope.seeds or (0,)),
        run=partial(_run, default=default),
        summarise=_summarise,
        findings=_findings,
        about=_about,
        tables=_tables,
        draw=lambda data: draw(data["groups"], tested),
        settings=lambda scope: subject(scope, default).header(),
        seeds=(0, 1, 2, 3, 4),
        minutes=600,
        uses=frozenset({"data_dir", "model"}),
    )


STUDIES = (
    _study("glue", "Tasks of GLUE: an encoder beside AdamW", ENCODER),
    _study("glue_decoder", "Tasks of GLUE: a decoder beside AdamW", DECODER),
)
