"""Rows of a trainer's log from the reports of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zenflow.report import StepReport


class StepLog:
    """Gathers step reports, and sums them up when a row of the log is due."""

    def __init__(self, prefix: str = "zenflow/") -> None:
        """Start without any step.

        Args:
            prefix: Beginning of every name.
        """
        self._prefix = prefix
        self._last_step = 0
        self._reports: list[StepReport] = []

    def add(self, report: StepReport | None) -> None:
        """Take a step's report; None, and a report taken before, change nothing.

        On a GPU the newest report is of the step before, so a call may bring an old one again.
        """
        if report is not None and report.step != self._last_step:
            self._last_step = report.step
            self._reports.append(report)

    def take(self) -> dict[str, float]:
        """Return the row of the steps since the last one; empty if there was none.

        - `stall_seconds`: seconds in which the device waited, over these steps.
        - `stall_share`: the stalls' fraction of these steps' time.
        - `staleness`: largest age in steps of a gradient whose update landed.
        - `update_interval`, `topk_ratio`: S and k of the newest step.
        - `d2h_bytes_per_step`, `h2d_bytes_per_step`: mean bytes to the host and back.
        - `captured_energy`: mean fraction of the squared gradient norm in important columns.
        """
        reports, self._reports = self._reports, []
        if not reports:
            return {}
        count = len(reports)
        seconds = sum(report.seconds for report in reports)
        stalled = sum(report.stall_seconds for report in reports)
        row = {
            "stall_seconds": stalled,
            "stall_share": stalled / seconds if seconds > 0 else 0.0,
            "staleness": max(report.staleness for report in reports),
            "update_interval": reports[-1].update_interval,
            "topk_ratio": reports[-1].topk_ratio,
            "d2h_bytes_per_step": sum(report.d2h_bytes for report in reports) / count,
            "h2d_bytes_per_step": sum(report.h2d_bytes for report in reports) / count,
            "captured_energy": sum(report.captured_energy for report in reports) / count,
        }
        return {self._prefix + name: value for name, value in row.items()}
