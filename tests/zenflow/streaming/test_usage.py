"""Streamed weights in use: what may be asked of the model, and what is refused."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from tests.zenflow.streaming.training import LEAST, Case, Layered, train, weights
from zenflow import GradientError, PacedLink, ZenFlowAdamW, ZenFlowConfig, stream_weights
from zenflow.step.gradients.released import ReleasedGradient

CASE = Case()


@pytest.fixture
def streamed():
    model = CASE.model()
    stream = stream_weights(model, "cpu", slots=2, **LEAST)
    yield model, stream
    if stream.has_optimizer:
        stream.stop_training()
    stream.close()


def take_steps(model, optimizer, steps):
    for step in steps:
        model.loss(step).backward()
        optimizer.step()


# ---- without an optimizer -------------------------------------------------------------------


def test_a_forward_alone_gives_pages_up_at_once(streamed):
    model, stream = streamed
    with torch.no_grad():
        expected, found = CASE.model().loss(0), model.loss(0)
    assert torch.equal(expected, found)
    assert stream.num_fetches == len(stream.pages) == 5
    assert not any(page.is_here for page in stream.pages)


def test_frozen_layers_let_others_learn(streamed):
    model, _ = streamed
    plain = CASE.model()
    for one in (model, plain):
        one.layers.requires_grad_(False)
        one.loss(0).backward()
    assert torch.equal(model.embed.weight.grad, plain.embed.weight.grad)


def test_another_optimizer_is_refused(streamed):
    model, _ = streamed
    torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match="trained by ZenFlowAdamW alone"):
        model.loss(0).backward()


def test_weights_that_are_away_can_be_read(streamed):
    model, _ = streamed
    for own, other in zip(model.parameters(), CASE.model().parameters(), strict=True):
        assert torch.equal(own, other)


def test_closing_leaves_a_plain_model(streamed):
    model, stream = streamed
    expected = CASE.model().loss(0)
    stream.close()
    assert torch.equal(model.loss(0), expected)
    assert torch.equal(model.to(torch.float64).loss(0), CASE.model().double().loss(0))


def test_a_model_that_is_gone_leaves_no_thread():
    before = set(threading.enumerate())
    model = CASE.model()
    stream_weights(model, "cpu", **LEAST)
    gone = weakref.ref(model)
    assert set(threading.enumerate()) - before
    del model
    gc.collect()
    assert gone() is None
    assert not set(threading.enumerate()) - before


# ---- moving, copying, loading ---------------------------------------------------------------


def test_moving_to_the_same_place_changes_nothing(streamed):
    model, _ = streamed
    expected = weights(model)
    model.to("cpu").float()
    assert all(torch.equal(value, expected[name]) for name, value in weights(model).items())


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to("meta"), nn.Module.double])
def test_another_place_or_dtype_is_refused_before_anything_has_moved(streamed, move):
    model, _ = streamed
    with pytest.raises(RuntimeError, match="can't be moved to"):
        move(model)
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}


def test_a_copy_is_refused(streamed):
    model, _ = streamed
    with pytest.raises(RuntimeError, match="copy the model before"):
        copy.deepcopy(model).loss(0)


def test_weights_are_loaded_at_home(streamed):
    model, _ = streamed
    optimizer = CASE.optimizer(model)
    take_steps(model, optimizer, range(2))
    other = Layered()
    torch.nn.init.normal_(other.layers[1].up.weight)
    model.load_state_dict(other.state_dict())
    optimizer.adopt_weights()
    assert torch.equal(model.loss(5), other.loss(5))
    optimizer.close()


def test_an_average_may_be_swapped_in_while_the_true_weights_are_shown(streamed):
    model, _ = streamed
    optimizer = CASE.optimizer(model)
    take_steps(model, optimizer, range(3))
    average = CASE.model()
    with optimizer.true_weights():
        kept = weights(model)
        with torch.no_grad():
            for own, other in zip(model.parameters(), average.parameters(), strict=True):
                own.data.copy_(other)
            assert torch.equal(model.loss(7), average.loss(7))
            assert torch.equal(model.loss(8), average.loss(8))
            for name, own in model.state_dict(keep_vars=True).items():
                own.data.copy_(kept[name])
    take_steps(model, optimizer, range(3, 6))
    plain = CASE.model()
    other = CASE.optimizer(plain)
    take_steps(plain, other, range(6))
    expected = weights(plain)
    assert all(torch.equal(value, expected[name]) for name, value in weights(model).items())
    optimizer.close()
    other.close()


# ---- training -------------------------------------------------------------------------------


def test_a_forward_that_breaks_off_does_no_harm(streamed):
    model, stream = streamed
    optimizer = CASE.optimizer(model)
    breaks = model.layers[2].register_forward_hook(_raise)
    with pytest.raises(torch.OutOfMemoryError):
        model.loss(99)
    breaks.remove()
    optimizer.zero_grad()
    losses = []
    for step in range(CASE.steps):
        loss = model.loss(step)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses == train(CASE).losses
    assert stream.most_here == 2
    optimizer.close()


def _raise(*_):
    raise torch.OutOfMemoryError("no memory for an activation")


def test_bytes_are_those_of_the_formula(streamed):
    """Two visits a step, but for the layers that are here at the turns; one way home."""
    model, stream = streamed
    optimizer = Case(config={"topk_ratio": 0.0}).optimizer(model)
    page, layers, slots = sum(p.nbytes for p in stream.pages[0].params), 5, 2
    for step in range(4):
        take_steps(model, optimizer, [step])
        report = optimizer.report
        assert report.weights_d2h_bytes == layers * page
        if step:
            assert report.weights_h2d_bytes == 2 * (layers - slots) * page
    assert report.h2d_bytes >= report.weights_h2d_bytes > 0
    optimizer.close()


def test_sums_go_home_and_come_back(streamed):
    model, stream = streamed
    optimizer = Case(config={"topk_ratio": 0.0}, accumulation=3).optimizer(model)
    page = grads = sum(p.nbytes for p in stream.pages[0].params)
    layers, slots = 5, 2
    for step in range(2):
        for micro in range(3):
            model.loss(step, micro).backward()
            for one in stream.pages:  # at home, or on its way to the host
                assert all(isinstance(p.grad, ReleasedGradient) for p in one.params)
        optimizer.step()
    report = optimizer.report
    assert report.weights_d2h_bytes == layers * (page + 2 * grads)
    assert report.weights_h2d_bytes == 6 * (layers - slots) * page + 2 * layers * grads
    optimizer.close()


def test_gradients_of_a_layer_are_not_read_between_micro_batches(streamed):
    model, _ = streamed
    optimizer = Case(accumulation=2).optimizer(model)
    model.loss(0).backward()
    with pytest.raises(GradientError, match="left for the host"):
        model.layers[1].up.weight.grad.norm()
    optimizer.close()


def test_the_timeline_and_the_report_have_the_weights(streamed):
    model, stream = streamed
    optimizer = CASE.optimizer(model, timeline_steps=2, link=PacedLink(1e6, 1e6))
    take_steps(model, optimizer, range(3))
    optimizer.synchronize()
    lanes = optimizer.timeline.lanes
    assert {"weights d2h", "weights h2d"} <= set(lanes)
    moved = sum(s.num_bytes for s in optimizer.timeline.spans if s.lane == "weights h2d")
    assert moved >= 2 * optimizer.report.weights_h2d_bytes
    assert optimizer.report.stalls["weights"] > 0
    assert optimizer.memory.home_bytes == sum(page.num_bytes for page in stream.pages)
    assert "streamed" in str(optimizer.memory)
    optimizer.close()


def test_both_lanes_of_a_direction_share_an_emulated_link(streamed):
    model, stream = streamed
    optimizer = CASE.optimizer(model, link=PacedLink(1e6, 1e6))
    assert stream.transfers.up.paced is optimizer._engine.h2d.paced
    optimizer.change_link(PacedLink(2e6, 3e6))
    assert (
        stream.transfers.down.paced.bytes_per_second,
        stream.transfers.up.paced.bytes_per_second,
    ) == (2e6, 3e6)
    optimizer.close()
    assert stream.transfers.up.paced is None


def test_weights_are_home_after_an_optimizer_that_failed(streamed):
    model, stream = streamed
    optimizer = CASE.optimizer(model)
    take_steps(model, optimizer, range(2))
    model.loss(2).backward()
    optimizer._engine.worker.close()
    optimizer.close()
    assert not any(page.is_here for page in stream.pages)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("steps", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_grows_step_by_step(streamed, steps):
    model, stream = streamed
    optimizer = Case(config={"topk_ratio": 0.0}).optimizer(model, timeline_steps=2)
    take_steps(model, optimizer, range(40))
    gc.collect()
    before = len(gc.get_objects())
    take_steps(model, optimizer, range(40, steps))
    gc.collect()
    assert len(gc.get_objects()) < before + 200
    assert stream.most_here == 2
    assert all(len(page.lease.users) <= 1 for page in stream.pages)
    optimizer.close()


# ---- refusals -------------------------------------------------------------------------------

REFUSALS = {
    "no layers": (lambda: nn.Linear(2, 2), {}, ValueError, "no list of equal layers"),
    "no module": (lambda: [1], {}, TypeError, "must be a torch.nn.Module"),
    "too many residents": (Layered, {"resident_layers": 6}, ValueError, r"in 0\.\.5"),
    "negative residents": (Layered, {"resident_layers": -1}, ValueError, r"in 0\.\.5"),
    "nothing to stream": (
        lambda: nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(3))),
        {},
        ValueError,
        "no weight to stream",
    ),
    "one slot": (Layered, {"slots": 1}, ValueError, "at least 2"),
    "a strange layer": (Layered, {"layers": [nn.Linear(2, 2)]}, ValueError, "no part of"),
    "meta": (lambda: Layered().to("meta"), {}, ValueError, "without values"),
    "parallel": (lambda: nn.DataParallel(Layered()), {}, ValueError, "for one process"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_arguments_are_checked(name):
    make, arguments, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        stream_weights(make(), "cpu", **arguments)


def test_layers_that_overlap_are_refused():
    model = Layered()
    with pytest.raises(ValueError, match="layers overlap"):
        stream_weights(model, "cpu", layers=[model.layers[0], model.layers[0].up])


def test_quantized_weights_are_refused():
    model = Layered()
    model.layers[0].up.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.int8), False)
    with pytest.raises(ValueError, match="quantized"):
        stream_weights(model, "cpu", **LEAST)


def test_a_model_is_streamed_once(streamed):
    with pytest.raises(ValueError, match="streamed already"):
        stream_weights(streamed[0], "cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload_gradients": "keep"}, 'offload_gradients="release"'),
        ({"config": ZenFlowConfig.preset("on_device")}, "k = 1"),
        ({"config": ZenFlowConfig(min_split_elements=10**6)}, "min_split_elements"),
    ],
)
def test_settings_that_do_not_go_with_streams(streamed, settings, message):
    with pytest.raises(ValueError, match=message):
        CASE.optimizer(streamed[0], **settings)
    CASE.optimizer(streamed[0]).close()  # nothing is left of the attempt


def test_a_second_optimizer_is_refused(streamed):
    model, stream = streamed
    optimizer = CASE.optimizer(model)
    with pytest.raises(ValueError, match="another ZenFlowAdamW"):
        CASE.optimizer(model)
    with pytest.raises(RuntimeError, match="an optimizer trains"):
        stream.close()
    optimizer.close()


@pytest.mark.parametrize("mode", ["keep", "release"])
def test_an_optimizer_that_was_made_first(mode):
    model = CASE.model()
    optimizer = CASE.optimizer(model, offload_gradients=mode)
    stream = stream_weights(model, "cpu", **LEAST)
    with pytest.raises(RuntimeError, match="make it after stream_weights"):
        take_steps(model, optimizer, [0])
    optimizer.close()
    stream.close()


def test_models_that_are_streamed_apart_have_optimizers_apart():
    models = [CASE.model(), CASE.model()]
    streams = [stream_weights(model, "cpu", **LEAST) for model in models]
    with pytest.raises(ValueError, match="2 streamed models"):
        ZenFlowAdamW(
            [p for model in models for p in model.parameters()],
            config=CASE.settings, offload_gradients="release",
        )  # fmt: skip
    for stream in streams:
        stream.close()
