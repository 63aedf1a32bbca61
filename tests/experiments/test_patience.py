"""Patience: a line where an answer takes long, none where it is quick."""

import time

from experiments.output.patience import Patience


def test_nothing_is_said_of_what_is_quick(capsys):
    with Patience("Counting", after=5.0):
        pass
    assert capsys.readouterr().err == ""


def test_what_is_done_so_far_is_said_where_it_takes_long(capsys):
    with Patience("Counting", after=0.02) as patience:
        patience.update("3 of 9")
        time.sleep(0.5)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("Counting: 3 of 9, 0 s so far ...\n")
    assert 2 <= len(said.err.splitlines()) <= 6, "each pause is twice as long as the one before"
