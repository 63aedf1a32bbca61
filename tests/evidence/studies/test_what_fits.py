"""The largest models: more memory and more ways never make them smaller."""

from itertools import pairwise

import pytest

from evidence.studies import what_fits
from evidence.studies.what_fits import (
    ALL,
    BOTH,
    CARDS,
    DRIVE,
    FEWER,
    PLAIN,
    RAM,
    STUDY,
    VISITING,
)
from experiments.lab.study import Job, Scope

NAMES = (None, *reversed(what_fits.MODELS))  # from the smallest on
SMALL, LARGE = CARDS
ALIKE = pytest.mark.parametrize("card", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that makes a card's rows, by memory and way, once."""
    job, known = Job(folder=tmp_path_factory.mktemp("cells")), {}

    def of(card):
        if card not in known:
            known[card] = {
                (cell.settings["ram_gib"], cell.settings["way"]): STUDY.run(cell, job)
                for cell in STUDY.cells(Scope())
                if cell.settings["card"] == card
            }
        return known[card]

    return of


@pytest.fixture
def rows(made):
    return made(SMALL)


def rank(rows, *settings):
    return NAMES.index(rows[settings]["model"])


@ALIKE
def test_more_of_anything_is_never_less(made, card):
    rows = made(card)
    for ram, more in pairwise(RAM):
        assert all(rank(rows, ram, way) <= rank(rows, more, way) for way in
                   what_fits.WAYS)  # fmt: skip
    for ram in RAM:
        for fewer, wider in (
            *((PLAIN, FEWER), (PLAIN, VISITING), (FEWER, BOTH), (VISITING, BOTH)),
            *((VISITING, DRIVE), (BOTH, ALL), (DRIVE, ALL)),
        ):
            assert rank(rows, ram, fewer) <= rank(rows, ram, wider)


@ALIKE
def test_what_is_named_fits(made, card):
    for (ram, _), row in made(card).items():
        assert row["host_gib"] < ram
        assert row["device_gib"] < float(card.split()[0])
        assert row["tokens_per_second"] > 0


def test_streams_and_fewer_bytes_take_a_small_card_to_a_model_that_exceeds_it(rows):
    found = rows[128, BOTH]
    assert 2 * found["billions"] > 24
    assert found["visiting_layers"] > 0
    assert found["micro_batch_tokens"] > found["hiding_tokens"]


def test_a_drive_takes_float32_states_where_the_host_has_no_room(rows):
    """Two places of 12 bytes are on the drive, and a pass writes one of them."""
    found = rows[64, DRIVE]
    assert found["billions"] > rows[64, VISITING]["billions"]
    states = 12e9 * found["billions"]
    assert found["drive_gib"] * 2**30 == pytest.approx(2 * states, rel=0.02)
    passes = 1000 / int(found["setting"].split("queue_depth=")[1][0])
    assert found["written_tb"] * 1e12 == pytest.approx(passes * states, rel=0.02)
