"""The six numbers of the README, read from committed records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.output.provenance import RESULTS
from experiments.pages.evidence import folder_of, json_of, numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One line of the table."""

    what: str
    number: str
    kind: str
    """*Measured*, *emulated* or *simulated*."""
    record: Path
    """Path of the record, from the repository's root."""


def headlines(results: Path = RESULTS) -> list[Headline]:
    """Return the six headlines."""
    return [
        _gpu(results),
        _stall(results),
        _sst2(results),
        _validation(results),
        _tuner(results),
        _speedup(results),
    ]


def table(found: list[Headline]) -> Iterator[str]:
    """Yield the headlines as a table in Markdown, with links from the repository's root."""
    yield "| what | number | kind | record |"
    yield "|---|---|---|---|"
    for line in found:
        yield f"| {line.what} | {line.number} | {line.kind} | [record]({line.record}) |"


def _path(folder: Path) -> Path:
    return Path("experiments", "results", *folder.parts[folder.parts.index("results") + 1 :])


def _gpu(results: Path) -> Headline:
    folder = folder_of("gpu", "presets-1b/record.json", results)
    cell = json_of(folder / "presets-1b" / "record.json")["cells"][0]
    rates = {run["name"]: run["tokens_per_second"] for run in cell["runs"]}
    ours, theirs = (rates[name] / rates["on_device"] for name in ("zenflow", "zero_offload"))
    return Headline(
        what="Speed of a 1B decoder on one H100, of the speed with all states on the device",
        number=f"{ours:.0%} (`zero_offload`: {theirs:.0%})",
        kind="measured",
        record=_path(folder),
    )


def _stall(results: Path) -> Headline:
    folder = folder_of("stall_and_loss", results=results)
    found = numbers(folder, r"stall seconds that zenflow is without \(at least\) \| ([\d.]+)")
    return Headline(
        what="Stall seconds of `zero_offload` that are gone, worst of three seeds, two CPU cores",
        number=f"{min(share for (share,) in found):.1%}",
        kind="emulated",
        record=_path(folder),
    )


def _sst2(results: Path) -> Headline:
    folder = folder_of("sst2", results=results)
    row = r"\n\| {} \| \d+ \| ([\d.]+)% \|"
    own, paper, device = (
        numbers(folder, row.format(name))[0][0]
        for name in ("zenflow", "zenflow_paper", "on_device")
    )
    return Headline(
        what="Accuracy on SST-2 after fine-tuning an encoder, mean of three seeds",
        number=f"{own:.2f}% (AdamW: {device:.2f}%, the published rule: {paper:.2f}%)",
        kind="measured",
        record=_path(folder),
    )


def _validation(results: Path) -> Headline:
    folder = folder_of("validation", "table.txt", results)
    ((runs, median, p90),) = numbers(
        folder, r"(\d+) runs: step time off by ([\d.]+)% \(median\), ([\d.]+)% \(90th"
    )
    return Headline(
        what=f"Error of predicted step times, {runs:.0f} runs that calibrated nothing, on a CPU",
        number=f"{median:.1f}% (median), {p90:.1f}% (90th percentile)",
        kind="emulated",
        record=_path(folder),
    )


def _tuner(results: Path) -> Headline:
    folder = folder_of("tuning", "tuning.json", results)
    ((share,),) = numbers(folder, r"fixed settings on every link: \w+ \(([\d.]+)\)")
    return Headline(
        what="Goodput of a tuned run, of the best of 70 fixed settings', worst of three links",
        number=f"{share:.1%}",
        kind="emulated",
        record=_path(folder),
    )


def _speedup(results: Path) -> Headline:
    folder = folder_of("figures", "speedup/record.json", results) / "speedup"
    least, most = json_of(folder / "record.json")["findings"][:2]
    return Headline(
        what="Speed-up over ZeRO-Offload on the paper's machines and models",
        number=f"{least['simulated']:.1f} to {most['simulated']:.1f} times "
        f"(published: {least['published']:g} to {most['published']:g})",
        kind="simulated",
        record=_path(folder) / "record.json",
    )
