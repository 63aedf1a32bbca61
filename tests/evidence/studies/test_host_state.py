"""The study of formats of few bytes: its runs, and float32 from another start."""

import pytest
import torch

from evidence.studies import host_state, regimes
from evidence.studies.host_state import FLOAT, NEAR, SETTINGS, START_NOISE, STUDY
from experiments.lab.study import Scope
from experiments.training.parts.models.named import find_model
from experiments.training.parts.models.pretrained import load_model, load_tokenizer
from experiments.training.settings.training import TrainSettings


def cells():
    return STUDY.cells(Scope(seeds=(0, 1)))


def weights_of(name):
    found = find_model(name)
    model = load_model(found, TrainSettings(model=name, seed=5), load_tokenizer(found), 0)
    return [param.detach() for _, param in sorted(model.named_parameters())]


def test_a_near_start_differs_by_a_thousandth_and_repeats(tmp_path):
    settings = TrainSettings(model="own:tiny", seed=5)
    for name in ("once", "again"):
        regimes._save_near(settings, START_NOISE, tmp_path / name)
    plain, once, again = (
        weights_of(str(name)) for name in ("own:tiny", tmp_path / "once", tmp_path / "again")
    )
    assert all(map(torch.equal, once, again))
    shares = torch.cat([(new / old - 1).flatten() for new, old in zip(once, plain, strict=True)])
    assert float(shares.std()) == pytest.approx(START_NOISE, rel=0.05)
    assert abs(float(shares.mean())) < START_NOISE / 20


def test_every_setting_but_the_largest_has_a_yardstick_that_differs_in_its_start_alone():
    found = {(c.settings["setting"], c.settings["seed"], c.labels["variant"]): c for c in cells()}
    for setting in SETTINGS[:-1]:
        near, plain = (found[setting.name, 0, variant] for variant in (NEAR, FLOAT))
        assert near.settings["start_noise"] == START_NOISE > plain.settings["start_noise"] == 0
        assert near.work == plain.work
    assert NEAR not in SETTINGS[-1].others


def test_the_model_of_fine_tuning_is_trained_from_its_own_start(monkeypatch):
    asked = []
    monkeypatch.setattr(host_state, "train", lambda *_, start_noise: asked.append(start_noise))
    tuned = next(cell for cell in cells() if cell.settings["setting"] == "fine-tuning")
    STUDY.run(tuned.needs[0], None)
    assert asked == [0.0]
