import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zenflow import PRESETS, ConfigError, ZenFlowConfig, ZenFlowError


def test_the_defaults_are_the_preset_zenflow():
    assert ZenFlowConfig() == ZenFlowConfig.preset("zenflow")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_survives_json(name):
    config = ZenFlowConfig.preset(name)
    assert ZenFlowConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_presets_are_the_rules_they_are_named_for():
    assert ZenFlowConfig.preset("on_device").topk_ratio == 1
    zero_offload = ZenFlowConfig.preset("zero_offload")
    assert (zero_offload.topk_ratio, zero_offload.effective_lag()) == (0, 0)
    delayed = ZenFlowConfig.preset("delayed")
    assert (delayed.topk_ratio, delayed.update_interval, delayed.effective_lag()) == (0, 1, 1)
    paper = ZenFlowConfig.preset("zenflow_paper")
    assert (paper.topk_ratio, paper.update_interval, paper.effective_lag()) == (0.1, 4, 4)
    assert [config.is_exact for config in (zero_offload, delayed, paper)] == [True, False, False]


def test_a_preset_takes_changes():
    assert ZenFlowConfig.preset("zenflow_paper", update_interval=8).effective_lag() == 8


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="'zero_ofload' is unknown; did you mean 'zero_offload'"):
        ZenFlowConfig.preset("zero_ofload")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("topk", "topk_ratio"),
        ("update_intervall", "update_interval"),
        ("update_rul", "update_rule"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, nearest):
    with pytest.raises(ConfigError, match=f"{key!r} is unknown; did you mean {nearest!r}"):
        ZenFlowConfig.from_dict({key: 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("topk_ratio", -0.1),
        ("topk_ratio", 1.1),
        ("topk_ratio", True),
        ("topk_ratio", float("nan")),
        ("topk_ratio", "auto"),
        ("select_strategy", "auto"),
        ("select_interval", -1),
        ("select_interval", 1.5),
        ("steps_per_epoch", 0),
        ("update_interval", 0),
        ("update_interval", "auto"),
        ("update_interval", True),
        ("update_interval", None),
        ("overlap_step", 1),
        ("forward_delay", "no"),
        ("update_rule", "approximate"),
        ("queue_depth", 0),
        ("hysteresis", float("inf")),
        ("full_warm_up_rounds", -1),
        ("importance_decay", 1),
        ("hysteresis", -0.1),
        ("min_split_elements", -1),
        ("block_elements", 0),
    ],
)
def test_a_broken_rule_names_key_and_value(key, value):
    with pytest.raises(ConfigError, match=key) as caught:
        ZenFlowConfig(**{key: value})
    assert repr(value) in str(caught.value)


def test_all_broken_rules_are_listed_at_once():
    with pytest.raises(ConfigError, match="breaks 3 rules") as caught:
        ZenFlowConfig(topk_ratio=2, update_interval=0, overlap_step=None)
    keys = ("topk_ratio", "update_interval", "overlap_step")
    assert all(key in str(caught.value) for key in keys)


def test_rules_across_keys():
    with pytest.raises(ConfigError, match="steps_per_epoch must be given"):
        ZenFlowConfig(select_strategy="epoch")
    assert ZenFlowConfig(overlap_step=False).effective_lag() == 0


@pytest.mark.parametrize("key", ["lag", "rolling", "prediction", "deferred_moments"])
def test_settings_of_the_former_rule_are_refused_with_what_replaces_them(key):
    with pytest.raises(ConfigError, match=f"{key!r} is no longer a setting: .*update_rule"):
        ZenFlowConfig.from_dict({key: 1})


def test_config_error_is_a_value_error_and_one_of_ours():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, ZenFlowError)


def test_a_config_can_not_be_changed_but_replaced():
    config = ZenFlowConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.queue_depth = 2  # type: ignore[misc]
    assert dataclasses.replace(config, queue_depth=2).queue_depth == 2
    with pytest.raises(ConfigError):
        dataclasses.replace(config, queue_depth=0)


def test_numbers_become_plain_so_that_json_takes_them():
    numpy = pytest.importorskip("numpy")
    config = ZenFlowConfig(topk_ratio=numpy.float32(0.5), update_interval=numpy.int64(8))
    assert json.loads(json.dumps(config.to_dict()))["topk_ratio"] == 0.5
    assert type(ZenFlowConfig(topk_ratio=1).topk_ratio) is float


@given(interval=st.integers(1, 50), now=st.integers(1, 50), overlaps=st.booleans())
def test_effective_lag_is_within_the_window_in_force(interval, now, overlaps):
    common = {"update_interval": interval, "overlap_step": overlaps}
    exact = ZenFlowConfig(**common)
    published = ZenFlowConfig(update_rule="published", **common)
    assert (exact.effective_lag(now), exact.rolling) == (int(overlaps), True)
    assert (published.effective_lag(now), published.rolling) == (now if overlaps else 0, False)


def test_select_interval_in_epochs_is_in_steps():
    config = ZenFlowConfig(select_strategy="epoch", select_interval=2, steps_per_epoch=50)
    assert config.select_interval_steps == 100
    assert ZenFlowConfig(select_interval=7).select_interval_steps == 7
