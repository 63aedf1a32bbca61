"""Trial rules: adopt, watch, keep or revert; notice drift; ask when there is something new.

The rules work on measurements alone. Searching is the work of `autotune.adviser`; settings reach
the engine by `autotune.online.controller`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from autotune.adviser.messages import SIGMAS_TO_BELIEVE, Advice, ForecastedSetting, Question
from autotune.efficiency import FITTED, EnergyCurve
from autotune.model.refit import Prior
from autotune.model.speed_noise import LEAST_NOISE, paired_gain
from autotune.model.stretch import Stretch
from autotune.model.twin import NEUTRAL, Constants
from autotune.online.drift import has_shifted, is_other_machine, mean_busy
from zenflow.knobs import Knobs

_DRIFT_SIGMAS = 4.0
_LEAST_DRIFT = 0.06
"""Least change of a step time's logarithm that is worth a new search."""
_SUDDEN = 0.3
"""Change that needs no second stretch to be believed."""
_DRIFTED_SIGMA = 0.35
"""Spread of the constants once they have been seen to move."""
_MOST_FAILURES = 6
"""Number of failed trials in a row after which only what promises more than its error is tried."""
_BARRED = 8
"""Number of stretches for which a setting that lost is barred; twice as many after each loss."""
_MOST_LOOKS = 3
"""Number of stretches after which a trial is judged whatever the noise."""
_MOST_COMPARED = 6
_KEPT = 24
"""Number of stretches that are remembered.

The oldest of the setting that has most of them goes first: a long rest at one setting must not
make the others strange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobChange:
    """A change of knobs and its reason. See `TrialRules`."""

    new: Knobs
    """Knobs in force from the next step on."""
    reason: str
    """Reason of the change, in words."""
    predicted_step_seconds: float | None = None
    """Predicted seconds of a step there."""
    gain: float | None = None
    """Predicted gain, relative to the goodput now."""
    error: float | None = None
    """Standard error of the gain."""


class TrialRules:
    """Decides after every stretch: try a setting, keep it, or go back.

    Attributes:
        here: Knobs in force; another hand may change S, within what is as good.
        home: Knobs to go back to, where the ones in force are on trial; else None.
        stretches: Stretches since the last drift.
        drifts: How often the machine or the work was seen to change.
        has_curve: Whether energy by ratio of columns has been measured.

    Examples:
        A machine that is suddenly half as slow again: evidence from before is forgotten.

        >>> from zenflow.config import ZenFlowConfig
        >>> rules = TrialRules(Knobs.of(ZenFlowConfig()), sigma=0.35)
        >>> for index, seconds in enumerate([0.10, 0.10, 0.15]):
        ...     change = rules.record(Stretch(
        ...         index=index, last_step=20 * index, knobs=rules.here, step_seconds=seconds,
        ...         noise=0.01, stall_seconds=0.0, rho=0.8))
        >>> rules.drifts, len(rules.stretches)
        (1, 1)
    """

    def __init__(self, start: Knobs, sigma: float) -> None:
        """Begin at ``start``.

        Args:
            start: The default, in force now.
            sigma: Log-normal spread of the twin's constants.
        """
        self.start = start
        self.here = start
        self.home: Knobs | None = None
        self.stretches: list[Stretch] = []
        self.drifts = 0
        self.has_curve = False
        self._prior = Prior(NEUTRAL, sigma)
        self._curve = EnergyCurve.default()
        self._constants: Constants = NEUTRAL
        self._asked_at = -2
        """Index of the newest stretch that the last question knew."""
        self._next_check = -1
        """Index of the stretch from which on it asks again once settled."""
        self._patience = 2
        self._is_predicted_better = False
        """Whether what is on trial was predicted to be better by more than the error."""
        self._foretold: Mapping[str, float] = {}
        """Seconds of work of each part that are predicted of the knobs on trial."""
        self._failures = 0
        """Number of trials in a row that ended with going back."""
        self._losses: dict[Knobs, tuple[int, int]] = {}
        """Lost trials of each setting, ``select_interval`` aside, and when its bar ends."""
        self._suspicious = False

    # ---- evidence ---------------------------------------------------------------------------

    def record(self, stretch: Stretch, curve: EnergyCurve | None = None) -> KnobChange | None:
        """Take a measured stretch at the knobs in force; return what follows at once, if anything.

        Args:
            stretch: The newest.
            curve: Energy by ratio of columns, where it was measured.
        """
        if curve is not None:
            self._curve, self.has_curve = curve, True
        former = [s for s in self.stretches if s.knobs == stretch.knobs]
        if has_shifted(stretch):
            self._forget([stretch])
        elif former and self._has_drifted(stretch, former):
            self._forget([*self._home_since(former[-1]), stretch])
        else:
            self.stretches = _bounded([*self.stretches, stretch])
        return self._judge() if self.home is not None else None

    def _home_since(self, stretch: Stretch) -> list[Stretch]:
        """Return the newest stretch of the setting to go back to, if it is from after this one."""
        found = [] if self.home is None else self._at(self.home)[-1:]
        return [home for home in found if home.index > stretch.index]

    def _judge(self) -> KnobChange | None:
        """Keep the setting on trial or go back, once the difference exceeds its noise.

        A setting that was predicted to be better stays unless it is worse. A setting tried without
        a prediction must show a gain: one of many equally good settings looks better by luck.
        """
        assert self.home is not None
        gain, error = paired_gain(self.stretches, self._worth, self.here, self.home)
        least = 0.0 if self._is_predicted_better else SIGMAS_TO_BELIEVE * error
        is_open = abs(gain) < error if self._is_predicted_better else 0.0 < gain < least
        if is_open and len(self._at(self.here)) < _MOST_LOOKS:
            return None
        home, self.home = self.home, None
        if gain >= least:
            self._failures = 0
            return None
        if is_other_machine(self.stretches[-1], self._foretold):
            self._forget([self.stretches[-1]])  # home was measured on another machine
            return None
        self._failures += 1
        self._bar(self.here)
        # The loss may be the machine's: home is measured again before anything else is tried.
        self._asked_at = self._newest
        loss = -math.expm1(gain)
        verdict = f"{loss:.1%} worse than before" if loss > 0 else "no better than its noise"
        return self._move(
            KnobChange(
                new=home,
                reason=f"measured {verdict}: back",
                predicted_step_seconds=fmean(s.step_seconds for s in self._at(home)),
                gain=math.expm1(-gain),
                error=error,
            )
        )

    def _bar(self, knobs: Knobs) -> None:
        """Leave a setting that has lost alone for a while: one stretch more would tell little."""
        setting = replace(knobs, select_interval=0)
        lost = self._losses.get(setting, (0, 0))[0]
        self._losses[setting] = (lost + 1, self._newest + _BARRED * 2**lost)

    def _at(self, knobs: Knobs) -> list[Stretch]:
        """Return the newest stretches with these knobs."""
        return [s for s in self.stretches if s.knobs == knobs][-_MOST_COMPARED:]

    def _worth(self, stretch: Stretch) -> float:
        """Return the log of goodput over the tokens of a step."""
        efficiency = FITTED.of(stretch.knobs, min(1.0, max(0.0, stretch.rho)))
        return math.log(efficiency / stretch.step_seconds)

    def _has_drifted(self, stretch: Stretch, former: list[Stretch]) -> bool:
        """Whether the same knobs take another time than they did, twice in a row or by a lot.

        A lane's work may do so too: a setting that hides it is no sign that others would.
        """
        change = math.log(stretch.step_seconds / fmean(s.step_seconds for s in former))
        noise = max(LEAST_NOISE, *(s.noise for s in former), stretch.noise)
        limit = max(_LEAST_DRIFT, _DRIFT_SIGMAS * noise)
        suspicious, self._suspicious = self._suspicious, abs(change) > limit
        is_sudden = abs(change) > max(_SUDDEN, limit)
        is_other = is_sudden or is_other_machine(stretch, mean_busy(former))
        return is_other or (suspicious and self._suspicious)

    @property
    def hopeless_seconds(self) -> float:
        """Seconds of a step from which on a trial needs no whole stretch to be lost."""
        home = [] if self.home is None else self._at(self.home)[-1:]
        return min((s.step_seconds * math.exp(_SUDDEN) for s in home), default=math.inf)

    def go_to(self, home: Knobs) -> KnobChange:
        """Return the change to a setting whose rival's trial the machine has cut short."""
        return self._move(KnobChange(new=home, reason="the machine has changed in a trial: back"))

    def is_strange(self, step_seconds: float) -> bool:
        """Whether a step took another time than in the last stretch with these knobs, by a lot.

        The next stretch then says whether the machine has changed, before anything is asked.
        """
        last = [s.step_seconds for s in self._at(self.here)[-1:]]
        self._suspicious |= any(abs(math.log(step_seconds / s)) > _SUDDEN for s in last)
        return self._suspicious

    def _forget(self, kept: list[Stretch]) -> None:
        """Start anew from the newest stretch, and from the one that it is on trial against."""
        self.drifts += 1
        self.stretches = kept
        self.home = self.home if len(kept) > 1 else None
        self._suspicious = False
        self._prior = Prior(self._constants, _DRIFTED_SIGMA)
        self._asked_at, self._next_check, self._patience = -1, kept[-1].index, 2
        self._failures = 0
        self._losses = {}

    # ---- advice -----------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether nothing is on trial and the last advice had nothing to try."""
        return self.home is None and self._asked_at >= 0 and not self.wants_advice

    @property
    def wants_advice(self) -> bool:
        """Whether something is known that the last question did not know."""
        newest = self._newest
        is_due = newest > self._asked_at and newest >= self._next_check
        return self.home is None and is_due and not self._suspicious

    @property
    def _newest(self) -> int:
        return self.stretches[-1].index if self.stretches else -1

    def question(self, **extras: Any) -> Question:
        """Return the next question, and note that it is asked.

        Args:
            extras: Further fields of the question: measured selections, trials, seed.
        """
        self._asked_at = self._newest
        curve = self._curve
        if self.stretches:
            last = self.stretches[-1]
            curve = curve.through(last.knobs.topk_ratio, 1.0 - last.rho)
        return Question(
            stretches=tuple(self.stretches),
            here=self.here,
            start=self.start,
            curve=curve,
            has_curve=self.has_curve,
            prior=self._prior,
            may_probe=self._failures < _MOST_FAILURES,
            barred=frozenset(k for k, (_, end) in self._losses.items() if end > self._newest),
            **extras,
        )

    def consider(self, advice: Advice) -> KnobChange | None:
        """Return the change that an answer leads to, if it is still about the knobs in force."""
        self._constants = advice.constants
        if self.home is not None or advice.here.knobs != self.here:
            return None
        if advice.best is None:
            self._next_check = self._newest + self._patience
            self._patience *= 2
            return None
        self._next_check, self._patience = 0, 2
        if advice.must_move:
            return self._move(_adoption(advice.best, "a constraint is broken here:"))
        if self._can_compare(advice.best.knobs):
            self.home, self._foretold = self.here, dict(advice.best.busy_seconds)
        self._is_predicted_better = advice.best.gain > advice.best.error
        why = "predicted" if self._is_predicted_better else "tried, as the prediction can't tell:"
        return self._move(_adoption(advice.best, why))

    def _can_compare(self, new: Knobs) -> bool:
        """Whether a stretch with this setting would say which is better, selections left out."""
        differs = replace(new, select_interval=self.here.select_interval) != self.here
        return differs and any(s.knobs == self.here for s in self.stretches)

    def _move(self, change: KnobChange) -> KnobChange:
        self.here = change.new
        return change

    # ---- state ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all evidence and decisions, JSON-ready."""
        return {
            "here": self.here.to_dict(),
            "home": None if self.home is None else self.home.to_dict(),
            "stretches": [s.to_dict() for s in self.stretches],
            "drifts": self.drifts,
            "has_curve": self.has_curve,
            "prior": {"centre": dict(self._prior.centre), "sigma": self._prior.sigma},
            "curve": [list(point) for point in self._curve.points],
            "constants": dict(self._constants),
            "asked_at": self._asked_at,
            "next_check": self._next_check,
            "patience": self._patience,
            "was_told": self._is_predicted_better,
            "foretold": dict(self._foretold),
            "failures": self._failures,
            "losses": [[k.to_dict(), *told] for k, told in self._losses.items()],
            "suspicious": self._suspicious,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned."""
        home = state["home"]
        self.here = Knobs.from_dict(state["here"])
        self.home = None if home is None else Knobs.from_dict(home)
        self.stretches = [Stretch.from_dict(item) for item in state["stretches"]]
        self.drifts = int(state["drifts"])
        self.has_curve = bool(state["has_curve"])
        known = self._constants  # a state of an earlier version may lack some
        prior = state["prior"]
        self._prior = Prior({**known, **prior["centre"]}, float(prior["sigma"]))
        self._curve = EnergyCurve(tuple((float(r), float(s)) for r, s in state["curve"]))
        self._constants = {**known, **state["constants"]}
        self._asked_at = int(state["asked_at"])
        self._next_check = int(state["next_check"])
        self._patience = int(state["patience"])
        self._is_predicted_better = bool(state["was_told"])
        self._foretold = dict(state.get("foretold", {}))  # an earlier version has none
        self._failures = int(state["failures"])
        self._losses = {
            Knobs.from_dict(knobs): (int(lost), int(end)) for knobs, lost, end in state["losses"]
        }
        self._suspicious = bool(state["suspicious"])


def _bounded(stretches: list[Stretch]) -> list[Stretch]:
    while len(stretches) > _KEPT:
        counts = Counter(s.knobs for s in stretches)
        most = max(counts.values())
        oldest = next(s for s in stretches if counts[s.knobs] == most)
        stretches = [s for s in stretches if s is not oldest]
    return stretches


def _adoption(best: ForecastedSetting, why: str) -> KnobChange:
    return KnobChange(
        new=best.knobs,
        reason=f"{why} {math.expm1(best.gain):+.1%} goodput, error {best.error:.1%}",
        predicted_step_seconds=best.step_seconds,
        gain=math.expm1(best.gain),
        error=best.error,
    )
