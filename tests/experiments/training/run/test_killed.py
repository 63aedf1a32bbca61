"""A run that is killed loses nothing that was saved, and ends with the same bits."""

import pytest

from tests.experiments.deadly_runs import trial


def test_killed_inside_a_save_a_run_ends_with_the_bits_of_one_left_alone(tmp_path):
    deaths = trial(tmp_path, kills=1, inside=1, num_steps=60)
    assert deaths.inside_a_save == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_fifty_times_a_run_ends_with_the_bits_of_one_left_alone(tmp_path):
    deaths = trial(tmp_path, kills=50, inside=10, num_steps=3000)
    assert deaths.total >= 50
    assert deaths.inside_a_save >= 10
