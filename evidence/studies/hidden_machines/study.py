"""Ways to tune a run, against machines whose truth is known: how much is lost until it is tuned.

Every method tunes the same hidden machines (`evidence.studies.hidden_machines.machine`), with
and without a link that becomes slower in mid-run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from autotune.offline.samplers import check_sampler
from autotune.space import SearchSpace
from evidence.studies.hidden_machines import results
from evidence.studies.hidden_machines.machine import HiddenMachine, case_of
from evidence.studies.hidden_machines.methods import METHODS, START, AbstractMethod, Problem
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study
from zenflow.knobs import Knobs

DRIFTING = ("twin", "default")
"""Methods that are also shown a machine that changes; the others have no answer to it."""
_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Rules that are the same for every machine."""

    num_windows: int = 20
    """Stretches measured, each at one setting."""
    num_trials: int = 25
    """Number of trials of the twin's search, for each question."""
    drift_at: int = 10
    """Stretches after which both directions of the link become slower; some come before."""
    drift: float = 4.0
    """Factor by which the link becomes slower."""
    space: SearchSpace = field(
        default_factory=lambda: SearchSpace(
            topk_ratios=(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
            update_intervals=(1, 2, 4, 8, 16, 32, 64),
            select_intervals=(START.select_interval,),
        )
    )


def _contest(scope: Scope) -> Contest:
    """Return the rules of a scope, or of a cell's job."""
    if not scope.smoke:
        return Contest()
    space = SearchSpace(
        topk_ratios=(0.05, 0.1, 0.5),
        update_intervals=(1, 4),
        select_intervals=(START.select_interval,),
    )
    return Contest(num_windows=4, num_trials=4, drift_at=2, space=space)


def _settings(scope: Scope) -> Data:
    """Return the rules, and what the values of a setting in the rows are called."""
    return {"knobs": list(START.to_dict()), **asdict(_contest(scope))}


def _cells(scope: Scope) -> Sequence[Cell]:
    return [
        Cell(labels={"case": str(case_of(seed))}, settings={"seed": seed})
        for seed in scope.seeds or ()
    ]


def _run(cell: Cell, job: Job) -> Row:
    # The Gaussian process of a smoke test would load torch and need more trials than there are.
    methods = [name for name in METHODS if name != "GP" or not job.smoke]
    if "GP" in methods:
        check_sampler("gp", 1)
    return {"played": rows_of(_contest(job), cell.settings["seed"], methods)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Course of a method on one machine."""

    knobs: Sequence[Knobs]
    """Settings of every stretch."""
    final: Knobs
    search_seconds: float
    """CPU time of choosing."""


def play(
    method: AbstractMethod, world: HiddenMachine, contest: Contest, *, drifts: bool
) -> Played:
    """Let a method tune a machine to the end."""
    knobs, seconds = [], 0.0
    for window in range(contest.num_windows):
        if drifts and window == contest.drift_at:
            world.drift = contest.drift
        started = time.process_time()
        knobs.append(method.next_knobs())
        seconds += time.process_time() - started
        stretch = world.measure(knobs[-1])
        started = time.process_time()
        method.record(stretch)
        seconds += time.process_time() - started
    return Played(knobs=knobs, final=method.final_knobs(), search_seconds=seconds)


def rows_of(
    contest: Contest, seed: int, steady: Sequence[str], drifting: Sequence[str] = DRIFTING
) -> list[Row]:
    """Return a row for each method: what it played, and what that cost beside the truth.

    Args:
        contest: Rules.
        seed: Seed of the machine.
        steady: Methods that tune the machine as it is.
        drifting: Methods that tune it while its link becomes slower.
    """
    problem = Problem.of(seed, contest.space, contest.num_windows, contest.num_trials)
    world = HiddenMachine(seed)
    before = world.truth(problem.settings)
    after = before
    if drifting:
        world.drift = contest.drift
        after = world.truth(problem.settings)
    rows = []
    for drifts, names in ((False, steady), (True, drifting)):
        late = after if drifts else before
        truths = [before] * contest.drift_at + [late] * (contest.num_windows - contest.drift_at)
        for name in names:
            played = play(METHODS[name](problem), world.afresh(), contest, drifts=drifts)
            rows.append(_row(seed, name, played, truths, drifts=drifts))
    return rows


def _row(
    seed: int, name: str, played: Played, truths: Sequence[Mapping[Knobs, float]], *, drifts: bool
) -> Row:
    pairs = list(zip(played.knobs, truths, strict=True))
    last = truths[-1]
    best = max(last, key=last.__getitem__)
    return {
        "seed": seed,
        "case": str(case_of(seed)),
        "method": name,
        "drifts": drifts,
        "knobs": [list(knobs.to_dict().values()) for knobs in played.knobs],
        "regrets": [
            round(max(truth.values()) / truth[knobs] - 1, _DIGITS) for knobs, truth in pairs
        ],
        "over_default": [round(truth[START] / truth[knobs], _DIGITS) for knobs, truth in pairs],
        "final": list(played.final.to_dict().values()),
        "final_regret": round(last[best] / last[played.final] - 1, _DIGITS),
        "best": list(best.to_dict().values()),
        "search_seconds": round(played.search_seconds, _DIGITS),
    }


def summarise(rows: Sequence[Row], config: Data) -> Data:
    """Return all methods' rows, steady ones first, with the rules."""
    played = [one for row in rows for one in row["played"]]
    return {**config, "rows": sorted(played, key=lambda one: one["drifts"])}


STUDY = Study(
    name="hidden_machines",
    title="Tuning against a simulated truth",
    cells=_cells,
    run=_run,
    summarise=summarise,
    findings=results.findings,
    about=results.about,
    tables=results.tables,
    draw=results.draw,
    settings=_settings,
    seeds=tuple(range(30)),
    minutes=50,
)
