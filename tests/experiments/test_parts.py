"""Parts of a long record: made once, and never of two commits."""

from __future__ import annotations

import pytest

from experiments.lab import cell_cache as parts
from experiments.lab.cell_cache import Parts
from zenflow.errors import ConfigError


def test_a_part_is_made_once_and_a_failed_one_again(tmp_path):
    made = []

    def make(value):
        made.append(value)
        if len(made) == 1:
            raise KeyboardInterrupt
        return {"value": value}

    with pytest.raises(KeyboardInterrupt):
        Parts(tmp_path).get("one", make, 1)
    assert Parts(tmp_path).get("one", make, 2) == {"value": 2}
    assert Parts(tmp_path).get("one", make, 3) == {"value": 2}
    assert made == [1, 2]


@pytest.mark.parametrize("name", ["commit", "hardware"])
def test_parts_of_another_commit_or_machine_are_refused(tmp_path, monkeypatch, name):
    Parts(tmp_path)
    monkeypatch.setattr(parts, "provenance", lambda: {"commit": None, "hardware": None, name: "x"})
    with pytest.raises(ConfigError, match=r"must hold parts of this (commit|hardware)"):
        Parts(tmp_path)
