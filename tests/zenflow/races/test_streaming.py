"""Streamed weights: no access without an order, and every order that is taken out is missed."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.models import TinyStack
from tests.zenflow.races.checker import replaced
from tests.zenflow.races.harness import any_races, races
from tests.zenflow.races.runtime import CheckedRuntime
from tests.zenflow.races.test_mutants import Mutant, NoOrder, needing_nothing, nothing
from tests.zenflow.races.test_races import KNOBS, S2, S3, drop, look, save_and_load
from zenflow.device.cuda import CudaDevice
from zenflow.lanes.copies import CopyLane
from zenflow.lanes.lease import Lease
from zenflow.streaming.activations import LayerInputs
from zenflow.streaming.stream import WeightStream
from zenflow.streaming.transfers import DOWN, UP, Transfers


class Recomputed(TinyStack):
    """Layers of which autograd keeps the input alone, the output of the layer before."""

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def streamed_races(
    changes, slots=2, resident=0, layers=4, dtype=torch.float32, inputs=False, **settings
):
    model = (Recomputed if inputs else TinyStack)(num_layers=layers, dtype=dtype)
    streamed = {"slots": slots, "resident_layers": resident, "offload_activations": inputs}
    return races("release", changes, model=model, streamed=streamed, **settings)


@pytest.mark.parametrize(
    "changes",
    [
        S2,
        S3,
        {"topk_ratio": 0.0, **S3},
        {"overlap_step": False, **S2},
        {"update_rule": "published", **S2},
        {"host_state": "compact", **S2},
    ],
    ids=str,
)
@pytest.mark.parametrize("slots", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rule(changes, slots):
    assert streamed_races(changes, slots, steps=6) == []


def test_a_resident_layer_and_bfloat16():
    assert streamed_races(S2, 3, 1, 5, torch.bfloat16, steps=6) == []


@pytest.mark.parametrize("then", [look, drop, save_and_load])
def test_what_happens_between_steps(then):
    assert streamed_races(S2, then=then, steps=6) == []


def test_changes_of_the_knobs():
    assert streamed_races(S2, log=KNOBS, steps=11) == []


def test_sums_of_micro_batches():
    assert streamed_races(S2, accumulation_steps=2, steps=8) == []


def test_sums_of_weights_that_stay():
    sums = {"accumulation_steps": 2, "offload_sums": True}
    assert races("release", S2, model=TinyStack(num_layers=3), steps=8, **sums) == []


def test_inputs_of_layers():
    """All layers stay, so that nothing else orders anything."""
    assert streamed_races(S2, resident=5, layers=5, inputs=True, steps=6) == []
    assert streamed_races(S2, inputs=True, steps=6) == []


def test_layers_that_stay_where_there_is_room(monkeypatch):
    monkeypatch.setattr(CheckedRuntime, "used", (0, 10**4))
    assert streamed_races(S2, resident=None, then=look, steps=8) == []


def resized_at_once(old):
    return lambda self, memory, num_bytes, lane, after: old(
        self, memory, num_bytes, lane, NoOrder()
    )


def without_waits(old):
    def evict(self, page):
        page.lease = Lease()
        old(self, page)

    return evict


def sent_at_once(lane):
    def make(old):
        def transfer(self, name, jobs, after):
            old(self, name, jobs, NoOrder() if name == lane else after)

        return transfer

    return make


def forgetting(_):
    return lambda self, most: self._leaving.clear()


INPUTS = {"inputs": True, "resident": 5, "layers": 5}
MUTANTS = {
    "a page's memory is given up at once": Mutant(CudaDevice, "resize", resized_at_once),
    "compute does not wait for a page": Mutant(CudaDevice, "order_after", nothing),
    "weights go home at once": Mutant(CopyLane, "submit", needing_nothing(DOWN)),
    "weights go home before compute has moved them": Mutant(
        CudaDevice, "transfer", sent_at_once(DOWN)
    ),
    "writes do not wait for the way home": Mutant(
        Transfers, "order_after_users", nothing, changes={"topk_ratio": 0.3}
    ),
    "nothing is waited for when a page is given up": Mutant(WeightStream, "evict", without_waits),
    "the allocator is not told of sums that leave": Mutant(
        CheckedRuntime, "keep", nothing, training={"accumulation_steps": 2}
    ),
    "sums come back at once": Mutant(
        CudaDevice, "transfer", sent_at_once(UP), training={"accumulation_steps": 2}
    ),
    "inputs are not waited for": Mutant(CudaDevice, "order_after", nothing, training=INPUTS),
    "inputs leave before they are computed": Mutant(
        CudaDevice, "transfer", sent_at_once(DOWN), training=INPUTS
    ),
    "inputs come back at once": Mutant(CudaDevice, "transfer", sent_at_once(UP), training=INPUTS),
    "memory of inputs is used again at once": Mutant(
        LayerInputs, "_forget_sent", forgetting, training=INPUTS
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_synchronisation_is_found(name):
    mutant = MUTANTS[name]
    old = vars(mutant.owner)[mutant.name]
    changes = {"update_interval": 2, **mutant.changes}
    with replaced(mutant.owner, mutant.name, mutant.make(old)):
        assert any_races(
            lambda: streamed_races(changes, 3, first=True, steps=8, **mutant.training)
        )
