"""Studies: they find the best setting, keep constraints, survive, and measure nothing twice."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from autotune.constraints import Constraints
from autotune.interrupts import Interrupts
from autotune.offline import trial_loop
from autotune.offline.result import outcome_of
from autotune.offline.samplers import SAMPLERS
from autotune.offline.storage import open_storage
from autotune.offline.study import tune
from autotune.offline.trial_loop import TrialLoop, TuningTask, open_study
from tests.autotune.surfaces import NUM_SETTINGS, SPACE, Surface, evaluated, last_of
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

DEFAULT = Knobs.of(ZenFlowConfig())
BEST = replace(DEFAULT, topk_ratio=0.2)
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(60)


def task(**changes):
    values = {
        "backend": Surface(),
        "space": SPACE,
        "objectives": ("step_seconds",),
        "sampler": "random",
        "num_trials": 12,
    }
    return TuningTask(**{**values, **changes})


def needs(sampler):
    packages = {"gp": "scipy", "cmaes": "cmaes", "qmc": "scipy"}
    if sampler in packages:
        pytest.importorskip(packages[sampler])


def storage_of(kind, folder):
    return str(folder / "study.journal") if kind == "journal" else f"sqlite:///{folder}/study.db"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_measures_the_default_first_and_as_many_settings_as_asked(sampler):
    needs(sampler)
    result = tune(task(sampler=sampler, num_trials=15))
    assert result.is_complete
    assert len(result.candidates) == 15
    assert result.candidates[0].knobs == DEFAULT
    assert result.default == result.candidates[0]
    settings = [candidate.knobs for candidate in result.candidates]
    assert len(set(settings)) == 15, "a setting is measured once"
    assert all(knobs in SPACE for knobs in settings)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_gives_the_same_trials(sampler):
    needs(sampler)

    def settings(seed):
        found = tune(task(sampler=sampler, seed=seed)).candidates
        return [(candidate.knobs, candidate.values) for candidate in found]

    assert settings(3) == settings(3)
    assert settings(3) != settings(4)


def test_brute_force_measures_every_setting_once_and_finds_the_best():
    result = tune(task(sampler="grid", num_trials=1000))
    assert {candidate.knobs for candidate in result.candidates} == set(SPACE.grid())
    assert result.num_trials == {"measured": NUM_SETTINGS}
    assert [candidate.knobs for candidate in result.best] == [BEST]


@pytest.mark.parametrize("sampler", ["random", "tpe", "nsgaii"])
def test_a_study_ends_when_no_setting_is_left(sampler):
    result = tune(task(sampler=sampler, num_trials=1000))
    assert len(result.candidates) == NUM_SETTINGS
    assert not result.is_complete


def test_a_setting_without_figures_is_left_out_and_does_not_stop_the_study():
    class Silent(Surface):
        def measure(self, knobs):
            done = super().measure(knobs)
            return replace(done, step_seconds=float("nan")) if knobs == DEFAULT else done

    result = tune(task(backend=Silent()))
    assert result.is_complete
    assert result.default is None
    assert result.num_trials["error"] == 1


def test_the_same_setting_again_and_again_leads_to_its_neighbours(monkeypatch):
    class Stubborn(optuna.samplers.BaseSampler):
        def infer_relative_search_space(self, study, trial):
            return {}

        def sample_relative(self, study, trial, search_space):
            return {}

        def sample_independent(self, study, trial, param_name, param_distribution):
            return SPACE.params_of(BEST)[param_name]

    monkeypatch.setattr(trial_loop, "make_sampler", lambda *args, **kwargs: Stubborn())
    result = tune(task(num_trials=5))
    first, wish, *others = [candidate.knobs for candidate in result.candidates]
    assert (first, wish) == (DEFAULT, BEST)
    assert set(others) <= set(SPACE.neighbours(BEST))


def test_tpe_beats_random_on_the_known_surface():
    def mean_of(sampler):
        results = [tune(task(sampler=sampler, seed=seed, num_trials=25)) for seed in range(6)]
        late = [c.values["step_seconds"] for result in results for c in result.candidates[15:]]
        return sum(late) / len(late)

    assert mean_of("tpe") < 0.9 * mean_of("random")


def test_several_objectives_give_the_front_and_nothing_that_is_dominated():
    result = tune(
        task(objectives=("step_seconds", "device_bytes"), sampler="grid", num_trials=1000)
    )
    assert [c.knobs.topk_ratio for c in result.best] == [0.2, 0.15, 0.1, 0.07, 0.05]
    assert all(replace(c.knobs, topk_ratio=0.2) == BEST for c in result.best)
    for objectives in (("goodput",), ("goodput", "staleness", "host_bytes")):
        best = tune(task(objectives=objectives, sampler="nsgaii")).best
        assert best
        assert set(best[0].values) == set(objectives)
        rates = [candidate.values["goodput"] for candidate in best]
        assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_breaks_a_constraint_is_not_measured_and_never_the_best(sampler, tmp_path):
    needs(sampler)
    limits = Constraints(device_bytes=2.1e9, largest_staleness=4)
    log = tmp_path / "log"
    result = tune(task(backend=Surface(log), constraints=limits, sampler=sampler, num_trials=8))
    assert len(evaluated(log)) == len(result.candidates) == 8
    for candidate in result.candidates:
        assert candidate.knobs.topk_ratio <= 0.11
        assert candidate.measurement.staleness <= 4
        assert candidate.allowed
    assert result.default is None, "k = 0.1, S = 4 is 5 steps late"
    assert result.num_trials["infeasible"] >= 1


def test_what_breaks_a_constraint_only_when_measured_is_not_the_best():
    class Optimist(Surface):
        def need(self, knobs):
            return replace(super().need(knobs), captured=None)

        def measure(self, knobs):
            return replace(super().measure(knobs), captured=super().need(knobs).captured)

    limits = Constraints(smallest_captured=0.5)
    result = tune(task(backend=Optimist(), constraints=limits, sampler="grid", num_trials=1000))
    assert [candidate.knobs.topk_ratio for candidate in result.best] == [0.3]
    assert not result.default.allowed


def test_constraints_that_contradict_each_other_are_refused_before_anything_runs(tmp_path):
    limits = Constraints(device_bytes=1.6e9, smallest_captured=0.5)
    log = tmp_path / "log"
    with pytest.raises(ConfigError, match=r"needs topk_ratio >= 0\.3.*allows topk_ratio <= 0\.05"):
        tune(task(backend=Surface(log), constraints=limits))
    assert not evaluated(log)


def test_a_setting_that_can_not_be_carried_out_is_left_out_with_its_reason(tmp_path):
    storage = storage_of("journal", tmp_path)
    result = tune(
        task(backend=Surface(refused=(0.3,)), sampler="grid", num_trials=1000, storage=storage)
    )
    assert len(result.candidates) == NUM_SETTINGS * 5 // 6
    assert result.num_trials["error"] == NUM_SETTINGS // 6
    study = optuna.load_study(study_name="zenflow", storage=open_storage(storage))
    failed = [trial for trial in study.trials if trial.state is optuna.trial.TrialState.FAIL]
    assert all("can't be carried out" in trial.user_attrs["message"] for trial in failed)


def test_a_study_in_which_nothing_can_be_carried_out_says_why():
    refused = Surface(refused=SPACE.topk_ratios)
    with pytest.raises(ConfigError, match=r"3 settings were tried .* can't be carried out"):
        tune(task(backend=refused))


@pytest.mark.parametrize(("kind", "sampler"), [("journal", "tpe"), ("sqlite", "grid")])
def test_a_continued_study_takes_what_is_missing_and_repeats_nothing(kind, sampler, tmp_path):
    log = tmp_path / "log"
    part = task(
        backend=Surface(log), storage=storage_of(kind, tmp_path), sampler=sampler, num_trials=5
    )
    assert len(tune(part).candidates) == 5
    whole = tune(replace(part, num_trials=12))
    assert len(whole.candidates) == 12
    assert len(evaluated(log)) == len(set(evaluated(log))) == 12
    assert len(tune(part).candidates) == 12, "nothing is missing"


def test_a_study_is_not_continued_as_another_one(tmp_path):
    first = task(storage=storage_of("journal", tmp_path), num_trials=2)
    tune(first)
    changed = {
        "surface": replace(first, backend=Surface(label="other")),
        "objectives": replace(first, objectives=("goodput",)),
        "constraints": replace(first, constraints=Constraints(largest_staleness=5)),
        "space": replace(first, space=replace(SPACE, update_intervals=(4,))),
    }
    for name, other in changed.items():
        with pytest.raises(ConfigError, match=f"differs in .*{name}.*another study name"):
            tune(other)
    tune(replace(first, sampler="tpe", seed=1, num_trials=4))
    tune(replace(changed["objectives"], study_name="two"))


def test_what_is_stored_can_be_read_with_optuna_alone(tmp_path):
    storage = storage_of("sqlite", tmp_path)
    tune(task(storage=storage, num_trials=3))
    code = (
        "import optuna, sys\n"
        f"study = optuna.load_study(study_name='zenflow', storage={storage!r})\n"
        "print(study.trials[0].params, study.trials[0].value, len(study.trials))\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    assert "'topk_ratio': 0.1, 'update_interval': 4" in printed
    assert Knobs(**eval(printed[: printed.index("}") + 1])) == DEFAULT


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["journal", pytest.param("sqlite", marks=pytest.mark.slow)])
def test_workers_that_start_at_the_same_time_never_share_a_trial(kind, tmp_path, capfd):
    log, few = tmp_path / "log", replace(SPACE, topk_ratios=(0.1, 0.2))
    number = len(list(few.grid()))
    result = tune(
        task(
            backend=Surface(log),
            space=few,
            storage=storage_of(kind, tmp_path),
            sampler="grid",
            num_trials=1000,
        ),
        num_workers=2,
    )
    assert len(evaluated(log)) == len(set(evaluated(log))) == number
    assert len(result.candidates) == number
    assert set(result.num_trials) <= {"measured", "repeated"}
    assert "Traceback" not in capfd.readouterr().err, "no worker died"


@pytest.mark.parametrize("kind", ["journal", pytest.param("sqlite", marks=pytest.mark.slow)])
def test_a_killed_worker_loses_one_trial_and_the_others_finish_the_study(kind, tmp_path):
    log, hung = tmp_path / "log", tmp_path / "log.hung"
    shared = task(
        backend=Surface(log, seconds=0.05, hang_at=4),
        storage=storage_of(kind, tmp_path),
        sampler="grid",
        num_trials=10,
    )

    def kill():
        wait_for(lambda: hung.exists() and hung.read_text(encoding="utf-8"))
        os.kill(int(hung.read_text(encoding="utf-8")), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    result = tune(shared, num_workers=2)
    killer.join()
    assert result.is_complete
    assert len(result.candidates) == 10
    assert result.num_trials["lost"] == 1
    assert "running" not in result.num_trials
    assert len({candidate.knobs for candidate in result.candidates}) == 10
    lost = last_of(log, hung.read_text(encoding="utf-8"))
    counts = {setting: evaluated(log).count(setting) for setting in evaluated(log)}
    assert all(count == 1 for setting, count in counts.items() if setting != lost)
    assert counts[lost] <= 2


def test_a_killed_study_goes_on_with_the_setting_that_was_lost(tmp_path):
    log, hung = tmp_path / "log", tmp_path / "log.hung"
    code = (
        "from tests.autotune.offline.test_study import *\n"
        f"tune(task(backend=Surface({str(log)!r}, hang_at=3), sampler='grid', num_trials=1000,"
        f" storage={storage_of('journal', tmp_path)!r}))\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_for(hung.exists)
    killed.kill()
    killed.wait()
    again = tune(
        task(
            backend=Surface(log),
            sampler="grid",
            num_trials=1000,
            storage=storage_of("journal", tmp_path),
        )
    )
    assert again.num_trials == {"measured": NUM_SETTINGS, "lost": 1}
    lost = evaluated(log)[2]
    assert evaluated(log).count(lost) == 2
    assert len(evaluated(log)) == NUM_SETTINGS + 1


@pytest.mark.parametrize("num_workers", [1, 2])
def test_ctrl_c_ends_with_what_there_is_and_leaves_nothing_running(num_workers, tmp_path):
    log, hung = tmp_path / "log", tmp_path / "log.hung"
    main = threading.main_thread()

    def interrupt():
        wait_for(hung.exists)
        time.sleep(0.1)
        signal.pthread_kill(main.ident, signal.SIGINT)

    clicker = threading.Thread(target=interrupt)
    clicker.start()
    shared = task(backend=Surface(log, hang_at=3), storage=storage_of("journal", tmp_path))
    result = tune(shared, num_workers=num_workers)
    clicker.join()
    assert result.interrupted
    assert "running" not in result.num_trials
    assert result.num_trials["interrupted"] >= 1
    assert len(result.candidates) >= 1
    assert tune(shared).is_complete, "the same call goes on"


def test_workers_started_by_hand_share_one_count(tmp_path):
    log = tmp_path / "log"
    shared = task(
        backend=Surface(log, seconds=0.02), storage=storage_of("journal", tmp_path), num_trials=15
    )
    code = (
        "from tests.autotune.offline.test_study import *\n"
        f"tune(task(backend=Surface({str(log)!r}, seconds=0.02), num_trials=15, seed=9,"
        f" storage={storage_of('journal', tmp_path)!r}))\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    result = tune(shared)
    assert other.wait() == 0
    assert len(tune(shared).candidates) == len(result.candidates) == 15
    assert len(evaluated(log)) == len(set(evaluated(log))) == 15


def test_a_trial_that_another_worker_has_begun_is_not_begun_again(tmp_path):
    """The default is running elsewhere: this worker leaves it alone, and leaves room for it."""
    shared = task(storage=storage_of("journal", tmp_path), num_trials=3)
    study = open_study(shared)
    study.enqueue_trial(SPACE.params_of(DEFAULT))
    theirs = study.ask()
    SPACE.suggest(theirs)
    theirs.set_user_attr("knobs", DEFAULT.to_dict())
    theirs.set_user_attr("worker", {"host": "elsewhere", "pid": 1, "started": 0.0})
    TrialLoop(study, shared, Interrupts()).run(1.0, lambda: None)
    outcomes = [outcome_of(trial) for trial in study.trials]
    assert len(outcomes) == 3, "it waits, and begins nothing that it would have to give up"
    assert outcomes.count("running") == 1
    assert outcomes.count("measured") == 2, "the third is the one that is running"


def test_of_two_workers_that_begin_the_last_trial_at_once_the_later_gives_way():
    last = task(num_trials=1)
    study = open_study(last)
    loop = TrialLoop(study, last, Interrupts())
    study.sampler = loop._sampler  # seeded, so that the two choose differently
    theirs, ours = study.ask(), study.ask()
    assert theirs.number < ours.number
    with pytest.raises(optuna.TrialPruned, match="surplus"):
        loop._evaluate(ours)
    assert len(loop._evaluate(theirs)) == 1


def test_time_that_is_up_ends_a_study():
    result = tune(task(backend=Surface(seconds=0.1)), timeout=0.25)
    assert 1 <= len(result.candidates) <= 4
    assert not result.interrupted


@pytest.mark.parametrize(
    ("changes", "workers", "rule"),
    [
        ({"sampler": "tpa"}, 1, "'tpa' is unknown; did you mean 'tpe'"),
        ({"objectives": ("stepseconds",)}, 1, "did you mean 'step_seconds'"),
        ({"objectives": ()}, 1, "needs an objective"),
        ({"storage": "study.txt"}, 1, r"\.log or \.journal, or a database's URL"),
        ({"storage": "sqlite:////nowhere/at/all.db"}, 1, "can't be opened .* check the URL"),
        ({"storage": "nosql://host/db"}, 1, "can't be opened .* driver"),
        ({"storage": "/proc/study.journal"}, 1, "can't be opened .* check the path"),
        ({"num_trials": 0}, 1, "at least one trial"),
        ({}, 2, "2 workers need a storage"),
    ],
)
def test_mistakes_are_refused_with_a_way_out(changes, workers, rule):
    with pytest.raises(ConfigError, match=rule):
        tune(task(**changes), num_workers=workers)


def test_a_sampler_for_one_objective_or_without_its_package_is_refused(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'gp' needs scipy and torch.*pip install"):
        tune(task(sampler="gp"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="'cmaes' takes one objective, got 2: take nsgaii"):
        tune(task(sampler="cmaes", objectives=("goodput", "staleness")))
