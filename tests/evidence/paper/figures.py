"""Figures for tests of the frame."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from matplotlib.figure import Figure

from experiments.lab import catalogue
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Data, Job, Study, computed


@dataclass
class Counting:
    """A figure that counts how often it is made and what for."""

    name: str = "plain"
    value: float = 2.0
    jobs: list[Job] = field(default_factory=list)
    error: BaseException | None = None

    def make(self, job: Job) -> Data:
        assert job.folder.is_dir()
        self.jobs.append(job)
        if self.error is not None:
            raise self.error
        return {"value": self.value, "seconds": float(len(self.jobs))}

    def figure(self, **changes: Any) -> Study:
        """Return it as the frame takes it."""
        made = computed(
            group="paper",
            name=self.name,
            title=f"the {self.name} one",
            make=self.make,
            findings=findings,
            draw=draw,
            minutes=0.0,
            tolerance=0.1,
            unchecked=frozenset({"seconds"}),
        )
        return replace(made, **changes)


def findings(data: Data) -> list[Finding]:
    """Claim that the value is 2."""
    return [
        Finding(
            claim="the value is 2",
            source="a test",
            published=2.0,
            unit="",
            tolerance=Tolerance.relative(0.05),
            measured=data["value"],
        )
    ]


def draw(data: Data) -> Figure:
    """Return a picture of nothing."""
    del data
    return Figure(figsize=(1, 1))


def use(monkeypatch: Any, *figures: Study) -> None:
    """Let these be all figures."""
    by_key = {figure.key: figure for figure in figures}
    monkeypatch.setattr(catalogue, "_MODULES", dict.fromkeys(by_key, ""))
    monkeypatch.setattr(catalogue, "load", by_key.__getitem__)
