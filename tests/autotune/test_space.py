"""The search space: every setting once, and what an Optuna trial makes of it."""

from dataclasses import replace

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.space import SearchSpace
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

SPACE = SearchSpace()
DEFAULT = Knobs.of(ZenFlowConfig())
GRID = list(SPACE.grid())
TINY = SearchSpace(
    topk_ratios=(0.1, 0.2),
    update_intervals=(1, 2, 4),
    select_intervals=(50, 100),
)

settings_of_the_space = st.sampled_from(GRID)


def test_the_grid_has_every_setting_once():
    assert len(set(GRID)) == len(GRID) == 10 * 11 * 4
    assert max(knobs.update_interval for knobs in GRID) == 64


def test_every_setting_of_the_grid_is_one_that_the_engine_takes():
    for knobs in GRID:
        assert Knobs.of(knobs.applied_to(ZenFlowConfig())) == knobs


def test_the_default_setting_is_in_the_default_space():
    assert DEFAULT in SPACE


@given(settings_of_the_space)
def test_the_grid_is_what_the_space_contains(knobs):
    assert knobs in SPACE
    assert replace(knobs, topk_ratio=0.11) not in SPACE
    assert replace(knobs, update_interval=5) not in SPACE
    assert replace(knobs, select_interval=0) not in SPACE


@given(st.sampled_from(["suggest", "suggest_indices"]), settings_of_the_space)
def test_enqueued_parameters_give_the_setting_back(method, knobs):
    params = SPACE.params_of(knobs) if method == "suggest" else SPACE.indices_of(knobs)
    assert getattr(SPACE, method)(optuna.trial.FixedTrial(params)) == knobs


@given(settings_of_the_space)
def test_parameters_are_the_knobs_themselves_by_name(knobs):
    params = SPACE.params_of(knobs)
    read = Knobs(**params)
    assert read.applied_to(ZenFlowConfig()) == knobs.applied_to(ZenFlowConfig())


@pytest.mark.parametrize("method", ["suggest", "suggest_indices"])
def test_suggestions_reach_every_setting_and_nothing_else(method):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = {getattr(TINY, method)(study.ask()) for _ in range(600)}
    assert found == set(TINY.grid())
    names = set(study.trials[0].params)
    suffix = "" if method == "suggest" else "_index"
    knobs = ("topk_ratio", "update_interval", "select_interval")
    assert names == {f"{name}{suffix}" for name in knobs}


def test_neighbours_are_one_value_away_in_one_knob():
    around = SPACE.neighbours(DEFAULT)
    assert set(around) == {
        replace(DEFAULT, topk_ratio=0.07),
        replace(DEFAULT, topk_ratio=0.15),
        replace(DEFAULT, update_interval=2),
        replace(DEFAULT, update_interval=6),
        replace(DEFAULT, select_interval=50),
        replace(DEFAULT, select_interval=200),
    }


@given(settings_of_the_space)
def test_neighbours_are_other_settings_of_the_space_and_lead_back(knobs):
    around = SPACE.neighbours(knobs)
    assert len(set(around)) == len(around)
    assert knobs not in around
    assert all(near in SPACE for near in around)
    assert all(knobs in SPACE.neighbours(near) for near in around)


def test_every_setting_is_reached_from_neighbour_to_neighbour():
    start = next(TINY.grid())
    reached, edge = {start}, {start}
    while edge:
        edge = {near for knobs in edge for near in TINY.neighbours(knobs)} - reached
        reached |= edge
    assert reached == set(TINY.grid())


def test_a_setting_outside_has_its_nearest_values_for_neighbours():
    outside = replace(DEFAULT, topk_ratio=0.12)
    assert set(SPACE.neighbours(outside)) == {
        replace(DEFAULT, topk_ratio=0.1),
        replace(DEFAULT, topk_ratio=0.15),
    }


def test_what_is_not_in_the_space_can_not_be_enqueued():
    with pytest.raises(ConfigError, match=r"k=0.11 .* is not in .* add its values"):
        SPACE.params_of(replace(DEFAULT, topk_ratio=0.11))
    with pytest.raises(ConfigError, match="is not in"):
        SPACE.indices_of(replace(DEFAULT, update_interval=5))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"topk_ratios": ()}, "topk_ratios must be a tuple of at least one value"),
        ({"topk_ratios": [0.1]}, "topk_ratios must be a tuple"),
        ({"topk_ratios": (0.2, 0.1)}, "topk_ratios must ascend"),
        ({"topk_ratios": (0.1, 1.5)}, r"topk_ratios has 1.5, .* number in \[0, 1\]"),
        ({"update_intervals": (0, 1)}, "update_intervals has 0, .* integer >= 1"),
        ({"update_intervals": (2, 2)}, "update_intervals must not repeat"),
        ({"update_intervals": (None,)}, "update_intervals has None, .* integer >= 1"),
        ({"select_intervals": (-1,)}, "select_intervals has -1"),
    ],
)
def test_values_that_can_not_be_run_are_refused_with_the_rule(changes, rule):
    with pytest.raises(ConfigError, match=f"(?s){rule}"):
        SearchSpace(**changes)


def test_all_broken_rules_are_listed_together():
    with pytest.raises(ConfigError, match="breaks 2 rules"):
        SearchSpace(update_intervals=(2, 1), select_intervals=())
