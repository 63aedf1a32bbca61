"""A backend with a known best setting, which says what it was asked and can be made to hang."""

import math
import os
import time
from dataclasses import asdict
from pathlib import Path

from autotune.constraints import Need, staleness_of
from autotune.offline.backends import AbstractBackend
from autotune.offline.objective import TrialMetrics
from autotune.space import SearchSpace
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

SPACE = SearchSpace(
    topk_ratios=(0.05, 0.07, 0.1, 0.15, 0.2, 0.3),
    update_intervals=(1, 2, 3, 4, 6, 8, 12, 16),
    select_intervals=(100,),
)
NUM_SETTINGS = 6 * 8


class Surface(AbstractBackend):
    """Step seconds are least at k = 0.2, S = 4."""

    kind = "simulated"

    def __init__(self, log=None, *, seconds=0.0, hang_at=None, refused=(), label="surface"):
        """Append each setting to ``log``; take ``seconds``; hang once at evaluation ``hang_at``.

        A setting with a ``topk_ratio`` among ``refused`` raises ConfigError.
        """
        self._log = log
        self._seconds = seconds
        self._hang_at = hang_at
        self._refused = refused
        self._label = label

    @property
    def default(self):
        return Knobs.of(ZenFlowConfig())

    def need(self, knobs):
        k = knobs.topk_ratio
        return Need(
            device_bytes=(1 + 10 * k) * 1e9,
            host_bytes=(10 - 10 * k) * 1e9,
            staleness=staleness_of(knobs),
            captured=math.sqrt(k),
        )

    def measure(self, knobs):
        if knobs.topk_ratio in self._refused:
            raise ConfigError(f"k={knobs.topk_ratio} can't be carried out: take another")
        if self._log is not None:
            with open(self._log, "a", encoding="utf-8") as file:
                file.write(f"{os.getpid()} {knobs}\n")
            self._hang_once(len(evaluated(self._log)))
        time.sleep(self._seconds)
        step = (
            1 + (math.log(knobs.topk_ratio / 0.2)) ** 2 + math.log2(knobs.update_interval / 4) ** 2
        )
        return TrialMetrics(
            step_seconds=step,
            stall_seconds=0.1 / knobs.update_interval,
            tokens_per_step=1000,
            **asdict(self.need(knobs)),
        )

    def _hang_once(self, num_evaluated):
        """Hang where there are enough evaluations; two workers may see the same number."""
        if self._hang_at is None or num_evaluated < self._hang_at:
            return
        hung = Path(f"{self._log}.hung")
        try:
            hung.touch(exist_ok=False)
        except FileExistsError:
            return
        hung.write_text(str(os.getpid()), encoding="utf-8")
        time.sleep(600)

    def describe(self):
        return {"backend": self.kind, "surface": self._label}


def evaluated(log):
    """Return the settings that were measured, as text, one for each time."""
    lines = Path(log).read_text(encoding="utf-8").splitlines() if Path(log).exists() else []
    return [line.partition(" ")[2] for line in lines]


def last_of(log, pid):
    """Return the last setting that a process began to measure, as text."""
    lines = Path(log).read_text(encoding="utf-8").splitlines()
    return [setting for own, _, setting in (line.partition(" ") for line in lines) if own == pid][
        -1
    ]
