"""Streamed weights train the same bits, whatever stays and however many slots there are."""

import random
from dataclasses import replace

import pytest
import torch

from tests.zenflow.streaming.training import Case, train
from zenflow.presets import PRESET_CHANGES, PRESETS

REST = ((3, 1), (9, 0))
"""Slots and resident layers that are tried slowly, beside random ones."""
CASES = {
    "plain": Case(),
    "checkpointed": Case(recomputes="non-reentrant"),
    "checkpointed, reentrant": Case(recomputes="reentrant"),
    "bfloat16": Case(dtype=torch.bfloat16, recomputes="non-reentrant"),
    "k = 0": Case(config={"topk_ratio": 0.0}),
    "accumulation": Case(accumulation=3, recomputes="non-reentrant"),
    "accumulation, bfloat16": Case(accumulation=2, dtype=torch.bfloat16),
    "S = 1": Case(config={"update_interval": 1}),
    "no lag": Case(config={"overlap_step": False}),
    "warm-up": Case(config={"full_warm_up_rounds": 3}),
    "published rule": Case(config={"update_rule": "published"}),
    "a queue": Case(config={"queue_depth": 2, "update_interval": 4}),
    "compact state": Case(config={"host_state": "compact"}),
    "8-bit gradients": Case(config={"gradient_link": "e4m3"}, dtype=torch.bfloat16),
    "factored second moments": Case(config={"second_moment": "factored"}, dtype=torch.bfloat16),
    "evaluations": Case(evaluations=(0, 3, 4, 7), recomputes="non-reentrant"),
    "a state in mid-window": Case(resumes_at=5),
    "dropped batches": Case(accumulation=2, drops={3: 1, 4: 2, 6: 1}),
    "frozen layers": Case(frozen=(1, 3, 4), accumulation=2),
    "a matrix that all layers share": Case(shares=True),
    "layers that are used twice": Case(order=(0, 1, 2, 1, 2, 3, 4)),
    "a layer without a gradient": Case(order=(0, 1, 3, 4), accumulation=2),
    "a matrix without a gradient now and then": Case(varies=True, accumulation=3),
    "changes of the knobs": Case(
        knobs=((3, {"topk_ratio": 0.5}), (6, {"topk_ratio": 0.2, "update_interval": 4})),
    ),
    "compiled layers": Case(backend="aot_eager", steps=4),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    ("slots", "resident"), [(2, 0), *(pytest.param(*s, marks=pytest.mark.slow) for s in REST)]
)
@pytest.mark.parametrize("name", CASES)
def test_a_kind_of_training(name, slots, resident):
    streamed = train(CASES[name], {"slots": slots, "resident_layers": resident})
    assert streamed.differs_from(train(CASES[name])) == []
    assert streamed.stream.most_here <= slots
    away = [page.on_device.untyped_storage().nbytes() for page in streamed.stream.pages]
    assert not any(away)


def drawn(seed):
    """Return a case of random settings, and arguments of `stream_weights`."""
    draw = random.Random(seed)
    steps = 10
    interval = draw.choice([1, 2, 4, 5])
    config = {
        "topk_ratio": draw.choice([0.0, 0.1, 0.3]),
        "update_interval": interval,
        "select_interval": draw.choice([2, 3, 7]),
        "queue_depth": draw.choice([None, 1, 3]),
        "full_warm_up_rounds": draw.choice([0, 0, 2]),
        "overlap_step": interval == 1 or draw.random() < 0.7,
        "host_state": draw.choice(["float32", "float32", "compact"]),
        "block_elements": draw.choice([None, 30, 100]),
    }
    knobs = []
    if config["topk_ratio"] and draw.random() < 0.7:
        for step in sorted(draw.sample(range(2, steps), 2)):
            changes = {"topk_ratio": draw.choice([0.1, 0.5])}
            knobs.append((step, changes | {"update_interval": draw.choice([1, 3, 6])}))
    accumulation = draw.choice([1, 1, 2, 3])
    case = Case(
        config=config,
        knobs=tuple(knobs),
        dtype=draw.choice([torch.float32, torch.bfloat16]),
        recomputes=draw.choice([None, "reentrant", "non-reentrant"]),
        shares=draw.random() < 0.2,
        order=tuple(draw.choice([(), (), (0, 1, 2, 4), (0, 1, 1, 2, 3, 4)])),
        varies=draw.random() < 0.3,
        frozen=tuple(draw.choice([(), (), (2,), (0, 4)])),
        accumulation=accumulation,
        steps=steps,
        evaluations=tuple(draw.sample(range(steps), 2)),
        drops={step: draw.randint(1, accumulation) for step in draw.sample(range(1, steps), 2)},
        resumes_at=None if knobs else draw.choice([None, 4, 7]),
    )
    if case.recomputes == "reentrant":  # gradients of what is used twice come twice
        case = replace(case, shares=False, order=case.order if len(case.order) < 5 else ())
    if (
        case.varies or 0 < len(case.order) < 5
    ):  # what a dropped batch has moved depends on the buckets then
        case = replace(case, drops={})
    return case, {"slots": draw.choice([2, 3, 5]), "resident_layers": draw.choice([0, 1, 3])}


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(s, marks=pytest.mark.slow) for s in range(8, 200))]
)
def test_random_trainings(seed):
    case, streamed = drawn(seed)
    outcome = train(case, streamed)
    assert outcome.differs_from(train(case)) == []
    assert outcome.stream.most_here <= streamed["slots"]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "on_device"])
def test_presets(preset):
    case = Case(config={**PRESET_CHANGES[preset], "queue_depth": None})
    assert train(case, {}).differs_from(train(case)) == []
