"""Whether studies made again are the committed ones, and which claims hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from experiments.lab.finding import Finding, Verdict
from experiments.lab.page import page
from experiments.lab.record import README, Record
from experiments.lab.study import Study

_EXACT = 1e-6
"""Relative: another version of a library may sum in another order."""
_NOTHING = 1e-12
"""Absolute: what is left of a difference that should be 0."""


def differences(study: Study, fresh: Record, kept: Record) -> list[str]:
    """Return in what a fresh record differs from the committed one, beyond the tolerance."""
    found = list(changed_verdicts(fresh.findings, kept.findings))
    allowed = _EXACT if study.exact else study.tolerance
    if allowed is not None:
        found += _compared(fresh.data(study), kept.data(study), "data", allowed, study.unchecked)
    return found


def changed_verdicts(fresh: Iterable[Finding], kept: Iterable[Finding]) -> Iterator[str]:
    """Yield each claim whose verdict is not the committed one."""
    before = {finding.claim: finding for finding in kept}
    after = {finding.claim: finding for finding in fresh}
    for claim in dict.fromkeys((*before, *after)):
        old, new = before.get(claim), after.get(claim)
        if old is None or new is None:
            yield f"claim {'is new' if old is None else 'is gone'}: {claim}"
        elif old.verdict != new.verdict:
            yield f"{claim}: {new.verdict.value}, committed: {old.verdict.value}"


def rederived(study: Study, kept: Record) -> list[str]:
    """Return where today's findings and page of committed rows differ from what is committed."""
    data = kept.data(study)
    findings = study.findings(data)
    fresh = [finding.to_dict() for finding in findings]
    before = [finding.to_dict() for finding in kept.findings]
    found = list(_compared(fresh, before, "findings", _EXACT, frozenset()))
    written = (kept.folder / README).read_text(encoding="utf-8")
    if page(study, data, findings, kept.header) != written:
        found.append(f"{README}: not what its rows say")
    return found


def claims(findings: Iterable[Finding]) -> list[str]:
    """Return a line for each claim, those that hold first, then others, then unknown ones."""
    ordered = sorted(findings, key=lambda finding: list(Verdict).index(finding.verdict))
    return [f"{f.verdict.value:<14} {f.claim}{_shown(f)}" for f in ordered]


def _shown(finding: Finding) -> str:
    if finding.ours is None:
        return ""
    unit = f" {finding.unit}" if finding.unit else ""
    return f" ({finding.basis}: {finding.ours:.4g}{unit})"


def _compared(
    fresh: Any, kept: Any, place: str, allowed: float, unchecked: frozenset[str]
) -> Iterator[str]:
    if isinstance(fresh, dict) and isinstance(kept, dict):
        for key in dict.fromkeys((*kept, *fresh)):
            if key in unchecked:
                continue
            if key not in fresh or key not in kept:
                yield f"{place}.{key}: only {'committed' if key in kept else 'in the fresh one'}"
            else:
                yield from _compared(fresh[key], kept[key], f"{place}.{key}", allowed, unchecked)
    elif isinstance(fresh, list) and isinstance(kept, list):
        if len(fresh) != len(kept):
            yield f"{place}: {len(fresh)} entries, committed: {len(kept)}"
            return
        for number, (one, other) in enumerate(zip(fresh, kept, strict=True)):
            yield from _compared(one, other, f"{place}[{number}]", allowed, unchecked)
    elif _is_number(fresh) and _is_number(kept):
        if not math.isclose(fresh, kept, rel_tol=allowed, abs_tol=_NOTHING):
            yield f"{place}: {fresh:.6g}, committed: {kept:.6g} (allowed: {allowed:.2%})"
    elif fresh != kept:
        yield f"{place}: {fresh!r}, committed: {kept!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
