"""Positions: learned ones end, rotary ones do not."""

import pytest

from sim.models.positions import check_sequence
from sim.models.table import find_model
from zenflow.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "most"), [("gpt2", 1024), ("bert-base", 512), ("opt-1.3b", 2048)]
)
def test_a_sequence_beyond_learned_positions_is_refused(name, most):
    asked = find_model(name)
    assert check_sequence(*asked, most) == []
    with pytest.raises(ConfigError, match=f"--sequence {most} or less"):
        check_sequence(*asked, most + 1)


def test_a_sequence_beyond_rotary_positions_is_noted():
    asked = find_model("llama-2-7b")
    assert check_sequence(*asked, 4096) == []
    (note,) = check_sequence(*asked, 4097)
    assert "4,096 positions" in note


def test_a_configuration_that_says_no_number_is_let_through():
    config = find_model("llama-2-7b")[1]
    del config["max_position_embeddings"]
    assert check_sequence("mine", config, 1 << 20) == []
