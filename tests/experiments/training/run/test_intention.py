"""A comparison says what it will do, and for how long, before anything is loaded."""

from dataclasses import replace

import click
import pytest
from click.testing import CliRunner

from experiments.cli import main
from experiments.training.run import intention as intended
from experiments.training.run import launch
from experiments.training.run.intention import intention
from experiments.training.settings.training import TrainSettings

SETTINGS = TrainSettings().for_comparison()


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(intended, "usable_cores", lambda: 2)


def test_it_names_all_steps_and_guesses_the_time_from_the_models_size():
    text = intention(SETTINGS)
    assert "300 steps on the device" in text
    assert "500 steps each under on_device, zero_offload, zenflow_paper and zenflow." in text
    assert "On 2 CPU cores that takes about 4 min" in text
    assert "about 13 min" in intention(replace(SETTINGS, batch_size=12))
    assert "about 7 min" in intention(replace(SETTINGS, grad_accum=2))


def test_it_does_not_guess_where_the_models_size_or_the_steps_are_not_known(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    of_a_file = replace(SETTINGS, model=str(tmp_path / "config.json"))
    assert intention(of_a_file).endswith("zenflow_paper and zenflow.")
    epochs = replace(SETTINGS, steps=None, epochs=2)
    assert intention(epochs).endswith("zenflow.")
    assert "2 epochs each" in intention(epochs)


def test_it_is_said_before_torch_is_asked_for_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "launch", lambda *inputs, **settings: click.echo("begun") or 0)
    result = CliRunner().invoke(main, ["train", "--compare", "--out", str(tmp_path / "run")])
    assert result.output.splitlines() == [intention(SETTINGS), "begun"]
