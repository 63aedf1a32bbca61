"""A tuned run's options: where its twin starts, which knobs it begins with, what it refuses."""

from dataclasses import replace

import pytest

from autotune.constraints import Constraints
from autotune.online.controller import SIGMAS
from autotune.online.tuner import TunedRun, Tuner
from sim.hardware.catalog import find_machine
from sim.hardware.file import write_profile
from sim.models.table import find_model
from sim.models.workload import Workload
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError


def run_of(**changes):
    """Return a run on a GPU of 80 GB."""
    given = {
        "config": ZenFlowConfig(),
        "workload": lambda: Workload.of_config(*find_model("gpt2"), batch_size=8),
        "total_steps": 1000,
        "settings": {},
        "gpu_bytes": 80e9,
        "releases": True,
    }
    return TunedRun(**{**given, **changes})


def test_the_twin_starts_from_the_profile_or_the_table_or_any_machine_of_the_kind(tmp_path):
    name = "hgx-h100"
    on_gpu = run_of(link=(2e9, 3e9))
    by_table, unknown = Tuner(hardware=name), Tuner()
    found = by_table.machine(on_gpu)
    assert found.device == find_machine(name).device
    assert found.num_devices == 1
    assert (found.link.d2h.value, found.link.h2d.value) == (2e9, 3e9)
    write_profile(find_machine(name), tmp_path / "profile.json")
    by_profile = Tuner(profile=tmp_path / "profile.json")
    assert by_profile.machine(run_of()) == find_machine(name)
    on_cpu = replace(on_gpu, gpu_bytes=None)
    some_cpu = unknown.machine(on_cpu)
    assert some_cpu.device.is_cpu
    assert some_cpu.link.d2h.value == 2e9
    assert not unknown.machine(on_gpu).device.is_cpu
    sources = [tuner.source for tuner in (by_profile, by_table, unknown)]
    assert sources == ["calibrated", "table", "generic"]
    assert SIGMAS[sources[0]] < SIGMAS[sources[1]] < SIGMAS[sources[2]]
    with pytest.raises(ConfigError, match=r"profile\.json is of a GPU, but .* is a CPU"):
        by_profile.machine(on_cpu)
    with pytest.raises(ConfigError, match="can't be read"):
        Tuner(profile="/absent.json").machine(on_gpu)


def test_a_run_starts_at_its_own_knobs_or_within_the_bounds():
    assert Tuner().starting(run_of()).config == ZenFlowConfig()
    no_memory = run_of(gpu_bytes=None)
    assert Tuner().starting(no_memory) == no_memory  # nothing to be simulated
    bounded = Tuner.of({"largest_staleness": 3}).starting(run_of())
    assert bounded.config.update_interval == 2
    with pytest.raises(ConfigError, match="can't be met by any setting"):
        Tuner.of({"device_bytes": 1e6}).starting(run_of())
    with pytest.raises(ConfigError, match="can't be met by any setting"):
        Tuner().starting(run_of(gpu_bytes=1e6))


@pytest.mark.parametrize(
    ("options", "config", "words"),
    [
        ({}, {"topk_ratio": 1.0}, "all columns are on the device for good"),
        ({}, {"topk_ratio": 0.0}, "all columns are on the host for good"),
        ({"controller": "zen-auto"}, {"topk_ratio": 1.0}, "nothing to choose"),
        ({"controller": "twin"}, {"update_rule": "published"}, "under the exact rule alone"),
    ],
)
def test_a_rule_that_leaves_nothing_to_choose_is_refused(options, config, words):
    with pytest.raises(ConfigError, match=words):
        Tuner.of(options).starting(run_of(config=ZenFlowConfig(**config)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"controler": "both"}, "did you mean 'controller'"),
        ({"controller": "oracle"}, "'oracle'"),
        ({"largest_staleness": 0}, "largest_staleness must be"),
        ({"profile": "a.json", "hardware": "b"}, "give the profile alone"),
        ({"controller": "zen-auto", "host_bytes": 1e9}, "bounds can't be had"),
    ],
)
def test_options_are_checked_when_they_are_given(options, words):
    with pytest.raises(ConfigError, match=words):
        Tuner.of(options)


def test_bounds_are_options_by_name():
    tuner = Tuner.of({"controller": "twin", "smallest_captured": 0.3})
    assert tuner == Tuner(controller="twin", constraints=Constraints(smallest_captured=0.3))
