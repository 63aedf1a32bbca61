"""Study: tunes knobs offline, alone or with worker processes, and can be continued.

The same call continues a study that its storage has. Workers may also be started by hand, with
the same storage and name: they share one count of trials, and a worker that is killed loses the
trial it was at and nothing else.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from optuna.trial import FrozenTrial

from autotune.constraints import Feasibility
from autotune.interrupts import Interrupts
from autotune.offline.result import TuneResult, result_of
from autotune.offline.samplers import check_sampler
from autotune.offline.storage import fail_lost_trials, quiet_optuna
from autotune.offline.trial_loop import TrialLoop, TuningTask, open_study
from autotune.offline.workers import work_apart
from zenflow.errors import ConfigError

OnProgress = Callable[[Sequence[FrozenTrial]], None]
"""Hears of all trials, each time that some have changed."""


def tune(
    task: TuningTask,
    *,
    num_workers: int = 1,
    timeout: float | None = None,
    on_progress: OnProgress = lambda trials: None,
) -> TuneResult:
    """Return the best settings, after as many trials as are missing.

    Args:
        task: What is tuned, and how.
        num_workers: Processes that take trials; 1 is this one.
        timeout: Seconds after which no trial is begun; None is no limit.
        on_progress: Called with all trials as they come.

    Raises:
        ConfigError: Nothing in the space meets the constraints, a name is unknown, the storage
            can't be opened or holds another study of this name, or no setting can be carried out.
    """
    check_sampler(task.sampler, len(task.goals))
    if task.num_trials < 1 or num_workers < 1:
        raise ConfigError(
            f"a study needs at least one trial and one worker, got {task.num_trials} and "
            f"{num_workers}"
        )
    if num_workers > 1 and task.storage is None:
        raise ConfigError(
            f"{num_workers} workers need a storage that they share: give a path such as "
            "study.journal, or sqlite:///study.db"
        )
    Feasibility(task.constraints, task.backend.need, task.space).check()
    with quiet_optuna(), Interrupts(signal.SIGINT, signal.SIGTERM) as interrupts:
        study = open_study(task)
        num_before = len(study.get_trials(deepcopy=False))
        interrupted = False

        def report() -> None:
            on_progress(study.get_trials(deepcopy=False))
            interrupts.check()

        try:
            if num_workers == 1:
                loop = TrialLoop(study, task, interrupts, num_before=num_before)
                loop.run(timeout, report)
            else:
                work_apart(task, num_workers, num_before, timeout, report)
        except KeyboardInterrupt:
            interrupted = True
        fail_lost_trials(study, study.get_trials(deepcopy=False))
        return result_of(study, task, interrupted=interrupted)
