"""The numbers of the README, from committed records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evidence.studies.published.study import errors_by_regime
from experiments.lab.columns import Column, Table, key, markdown
from experiments.lab.intervals import compare
from experiments.lab.losses import excess
from experiments.lab.record import needed
from experiments.output.provenance import RESULTS, newest_record
from experiments.validation.study import STUDY, newest

ROOT = RESULTS.parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One line of the table."""

    what: str
    number: str
    kind: str
    """*Measured*, *emulated* or *simulated*."""
    record: Path
    """Folder of the record, or a file in it."""


def headlines() -> list[Headline]:
    """Return the headlines, what today's code has shown first."""
    return [_stall(), _sst2(), _validation(), _published(), _tuner(), _speedup(), _gpu()]


def table(found: Sequence[Headline], root: str = "") -> list[str]:
    """Return the headlines as a table in Markdown.

    Args:
        found: The headlines.
        root: Way to the repository's root from where the table stands, as in ``../``.
    """

    def link(row: Mapping[str, Any]) -> str:
        return f"[record]({root}{row['record'].relative_to(ROOT)})"

    columns = [key("what"), key("number"), key("kind"), Column(head="record", show=link)]
    return markdown(Table(columns=columns, rows=[asdict(line) for line in found]))


def _gpu() -> Headline:
    folder = newest_record("gpu", "presets-1b/record.json")
    cell = json.loads((folder / "record.json").read_text(encoding="utf-8"))["cells"][0]
    runs = {run["name"]: run for run in cell["runs"]}
    rates = {name: run["tokens_per_second"] for name, run in runs.items()}
    ours, theirs = (rates[name] / rates["on_device"] for name in ("zenflow", "zero_offload"))
    above = excess(runs["zenflow"]["losses"], runs["on_device"]["losses"])
    former = "" if "update_rule" in runs["zenflow"]["config"] else ", under the former update rule"
    return Headline(
        what="Speed of a 1B decoder on one H100, of the speed with all states on the device"
        + former,
        number=f"{ours:.0%} (`zero_offload`: {theirs:.0%}); its loss ended {above:.0%} higher",
        kind="measured",
        record=folder.parent,
    )


def _stall() -> Headline:
    record = needed("stall_and_loss")
    removed = [
        finding.emulated or 0.0
        for finding in record.findings
        if finding.claim.endswith("that zenflow is without")
    ]
    return Headline(
        what="Stall seconds of `zero_offload` that are gone, worst of three seeds, two CPU cores",
        number=f"{min(removed):.1%}",
        kind="emulated",
        record=record.folder,
    )


def _sst2() -> Headline:
    record = needed("sst2")
    compared = compare(record.rows, record.config["num_test"])
    means = {comparison.variant: comparison.mean for comparison in compared}
    return Headline(
        what="Accuracy on SST-2 after fine-tuning an encoder, mean of three seeds",
        number=f"{means['zenflow']:.2%} (AdamW: {means['on_device']:.2%}, the published rule: "
        f"{means['zenflow_paper']:.2%})",
        kind="measured",
        record=record.folder,
    )


def _validation() -> Headline:
    record = newest(is_cpu=True)
    assert record is not None
    data = record.data(STUDY)
    errors, count = data["errors"], len(data["runs"])
    return Headline(
        what=f"Error of predicted step times, {count} runs that calibrated nothing, on a CPU",
        number=f"{errors['median']:.1%} (median), {errors['p90']:.1%} (90th percentile)",
        kind="emulated",
        record=record.folder,
    )


def _published() -> Headline:
    record = needed("published")
    (data,) = record.rows
    errors = {each["regime"]: each for each in errors_by_regime(data["rows"])}
    whole, blind = errors["all but the first"], errors["all stated and entered blind"]
    return Headline(
        what=f"Error on {blind['rows']} published runs of other systems (complete set-ups, "
        "entered before prediction; the model was corrected after some of them)",
        number=f"{blind['median']:.1%} (median), {blind['p90']:.1%} (90th percentile); all "
        f"{whole['rows']} published: {whole['median']:.1%}, {whole['p90']:.1%}",
        kind="simulated",
        record=record.folder,
    )


def _tuner() -> Headline:
    record = needed("tuned_goodput")
    return Headline(
        what="Goodput of a tuned run, of the best fixed setting's, worst of three links",
        number=f"{record.findings[0].emulated:.1%}",
        kind="emulated",
        record=record.folder,
    )


def _speedup() -> Headline:
    record = needed("paper/speedup")
    least, most = record.findings[:2]
    return Headline(
        what="Speed-up over ZeRO-Offload on the paper's machines and models",
        number=f"{least.simulated:.1f} to {most.simulated:.1f} times "
        f"(published: {least.published:g} to {most.published:g})",
        kind="simulated",
        record=record.folder / "record.json",
    )
