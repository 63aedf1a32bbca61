"""Compact host state has the same bits whatever number of ranks works on it."""

import pytest
import torch

from tests.models import assert_equal
from tests.zenflow.sharded.compact_runs import OPTIONS, all_modes
from tests.zenflow.sharded.conftest import Ranks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compact")


@pytest.fixture(scope="module")
def alone(folder):
    (folder / "alone").mkdir()
    return all_modes(lambda model: model, folder / "alone")


@pytest.fixture(scope="module", params=["sharded", "data_parallel"])
def ranks(request, folder):
    """What two ranks found, and four who went on from there."""
    module, own = f"tests.zenflow.{request.param}", folder / request.param
    own.mkdir()
    two = Ranks(2, ("compact", "refuse compact"), own, module=module).found()
    four = Ranks(4, ("go on compact",), own, module=module).found()
    return two, four


@pytest.mark.parametrize("mode", OPTIONS)
def test_two_ranks_and_four_that_go_on_have_the_bits_of_one_process(mode, ranks, alone):
    two, four = ranks
    weights, columns = alone[mode]
    for found in [rank["compact"] for rank in two] + [rank["go on compact"] for rank in four]:
        assert_equal(found[mode][0], weights)
        assert_equal(found[mode][1], columns, "important columns")


def test_one_process_goes_on_from_what_two_ranks_saved(ranks, folder, alone, request):
    own = folder / request.node.callspec.params["ranks"]
    for mode, (weights, columns) in all_modes(lambda model: model, own, loads=True).items():
        assert_equal(weights, alone[mode][0])
        assert_equal(columns, alone[mode][1])


def test_rows_that_ranks_would_cut_within_a_group_are_refused_by_all(ranks):
    two, _ = ranks
    for rank in two:
        assert "multiple of 64 rows of a parameter on each of 2 ranks" in rank["refuse compact"]
