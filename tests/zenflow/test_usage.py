"""The optimizer in the training loops that people write, with the models that they have."""

import copy
import io
import itertools
import multiprocessing
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.models import (
    TINY,
    OddShapes,
    TinyStack,
    assert_equal,
    closing,
    relative_difference,
    two_groups,
    weights_of,
)
from tests.reference import Reference
from zenflow import LANES, ZenFlowAdamW, ZenFlowConfig

ADAMW = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
EVERY_STEP = ZenFlowConfig.preset("zero_offload", **TINY)
BETWEEN = ZenFlowConfig(
    topk_ratio=0.3, update_interval=3, select_interval=4, block_elements=30, **TINY
)
MODES = {"keep": {}, "release": {"offload_gradients": "release"}}


def train(model, optimizer, num_steps=20, loss=None):
    """Run the plainest loop and return the weights."""
    for step in range(num_steps):
        (loss or model.loss)(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def train_both(model, mode, config=EVERY_STEP, num_steps=20, **loss_settings):
    """Train twins with our optimizer and with torch's AdamW; return both results."""
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    adamw = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], **ADAMW)
    optimizer = ZenFlowAdamW(ours.parameters(), config=config, **ADAMW, **MODES[mode])
    with closing(optimizer):
        actual = train(ours, optimizer, num_steps, lambda t: ours.loss(t, **loss_settings))
    return actual, train(theirs, adamw, num_steps, lambda t: theirs.loss(t, **loss_settings))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("idle", [False, True], ids=["all used", "some without gradients"])
def test_tied_embeddings_convolutions_and_frozen_parameters_equal_adamw(mode, idle):
    model = OddShapes()
    actual, expected = train_both(model, mode, idle=idle)
    assert relative_difference(actual, expected) <= 1e-6
    frozen = [p.detach() for p in model.frozen.parameters()]
    names = [name for name, _ in model.named_parameters()]
    after = dict(zip(names, actual, strict=True))
    assert_equal([after["frozen.weight"], after["frozen.bias"]], frozen)


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_without_a_gradient_is_left_alone(mode):
    model = OddShapes()
    with closing(ZenFlowAdamW(model.parameters(), config=BETWEEN, **MODES[mode])) as optimizer:
        for step in range(9):
            before = [p.clone() for p in model.branch.parameters()]
            logits = model(torch.arange(10).view(2, 5), with_branch=False)
            logits.square().mean().backward()
            optimizer.step()
            assert_equal(model.branch.parameters(), before, f"step {step}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("idle", [False, True], ids=["all used", "some without gradients"])
def test_real_gradients_follow_the_reference(mode, idle):
    """The reference gets the gradients that the engine's own trajectory makes."""
    model = OddShapes()
    params = [p for p in model.parameters() if p.requires_grad]
    reference = Reference(two_groups(model), BETWEEN)
    # Two groups put the matrices first: bring the reference's order back to the model's.
    order = [p for group in two_groups(model) for p in group["params"]]
    place = {id(p): index for index, p in enumerate(order)}
    with closing(ZenFlowAdamW(two_groups(model), config=BETWEEN, **MODES[mode])) as optimizer:
        for step in range(20):
            loss = model.loss(step, idle=idle)
            grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
            loss.backward()
            optimizer.step()
            by_place = [None] * len(order)
            for p, grad in zip(params, grads, strict=True):
                by_place[place[id(p)]] = grad
            reference.step(by_place)
            for p, expected in zip(order, reference.weights, strict=True):
                torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("mode", MODES)
def test_groups_have_their_own_settings_and_schedules(mode):
    model = OddShapes()
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    adamw = torch.optim.AdamW(two_groups(theirs))
    optimizer = ZenFlowAdamW(two_groups(ours), config=EVERY_STEP, **MODES[mode])
    with closing(optimizer):
        for each in (optimizer, adamw):
            run = ours if each is optimizer else theirs
            warm = torch.optim.lr_scheduler.LinearLR(each, 0.1, total_iters=5)
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(each, 10)
            schedule = torch.optim.lr_scheduler.SequentialLR(each, [warm, cosine], [5])
            for step in range(15):
                run.loss(step).backward()
                each.step()
                each.zero_grad()
                schedule.step()
                each.param_groups[1]["weight_decay"] = 0.01 * step  # changed by hand, too
    assert relative_difference(weights_of(ours), weights_of(theirs)) <= 1e-6


ODD_ORDERS = {
    "a transposed matrix": lambda dtype: torch.randn(6, 4).to(dtype).t(),
    "a kernel in channels-last order": lambda dtype: torch.randn(4, 3, 2, 2).to(
        dtype, memory_format=torch.channels_last
    ),
    "rows apart": lambda dtype: torch.randn(4, 12).to(dtype)[:, ::2],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ODD_ORDERS)
def test_gradients_set_in_another_order_of_memory_are_those_of_the_same_elements(order, dtype):
    """Backward's own gradients have their weights' order; torch's fused AdamW goes by memory."""
    torch.manual_seed(0)
    ours = nn.Parameter(ODD_ORDERS[order](dtype))
    theirs = nn.Parameter(ours.detach().float().contiguous())
    reference = torch.optim.AdamW([theirs], lr=1e-2)
    with closing(ZenFlowAdamW([ours], lr=1e-2)) as optimizer:
        for _ in range(5):
            grad = torch.randn(ours.shape, dtype=dtype)
            assert grad.stride() != ours.stride()
            ours.grad, theirs.grad = grad, grad.float()
            optimizer.step()
            reference.step()
        expected = theirs.detach().to(dtype)
        torch.testing.assert_close(ours.detach(), expected, rtol=1e-5, atol=1e-6)


class Checkpointed(TinyStack):
    """A stack whose layers are computed again during backward."""

    def __init__(self, use_reentrant, shared=False):
        super().__init__(num_layers=5)
        self.use_reentrant = use_reentrant
        if shared:
            self.layers[4].weight = self.layers[1].weight

    def forward(self, x):
        x = x.requires_grad_()  # the reentrant kind needs an input with a gradient
        for layer in self.layers:
            x = x + checkpoint(
                lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=self.use_reentrant
            )
        return x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_weights(use_reentrant, mode):
    checkpointed, plain = Checkpointed(use_reentrant), TinyStack(num_layers=5)
    results = []
    for model in (checkpointed, plain):
        optimizer = ZenFlowAdamW(model.parameters(), config=BETWEEN, **ADAMW, **MODES[mode])
        with closing(optimizer):
            results.append(train(model, optimizer))
    assert_equal(*results)


def test_a_weight_shared_between_checkpoints_is_right_or_refused():
    """Reentrant checkpoints finish a shared weight's gradient in parts: release must notice."""
    results = []
    for use_reentrant, mode in [(False, "keep"), (True, "keep"), (False, "release")]:
        model = Checkpointed(use_reentrant, shared=True)
        optimizer = ZenFlowAdamW(model.parameters(), config=BETWEEN, **ADAMW, **MODES[mode])
        with closing(optimizer):
            results.append(train(model, optimizer))
    assert_equal(results[0], results[2])
    assert relative_difference(results[0], results[1]) <= 1e-5
    model = Checkpointed(use_reentrant=True, shared=True)
    optimizer = ZenFlowAdamW(model.parameters(), config=BETWEEN, **ADAMW, **MODES["release"])
    with closing(optimizer), pytest.raises(Exception, match="released"):
        train(model, optimizer)


@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("eager", "keep"),
        ("aot_eager", "release"),
        *(pytest.param(*case, marks=pytest.mark.slow)
          for case in (("eager", "release"), ("aot_eager", "keep"))),
    ],
)  # fmt: skip
def test_a_compiled_model_trains_as_the_plain_one(backend, mode):
    results = []
    for compiled in (False, True):
        model = TinyStack(num_layers=4)
        run = torch.compile(model, backend=backend) if compiled else model

        def loss(step, run=run):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            return (run(x) - x.roll(1)).square().mean()

        optimizer = ZenFlowAdamW(model.parameters(), config=BETWEEN, **ADAMW, **MODES[mode])
        with closing(optimizer):
            results.append(train(model, optimizer, loss=loss))
    assert relative_difference(*results) <= 1e-6


class HalfModel(nn.Module):
    """Float16 weights, computed with in float32: a CPU has few kernels for the former."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(
            nn.Parameter((torch.randn(8, 8) / 3).half()) for _ in range(3)
        )

    def forward(self, x):
        for weight in self.weights:
            x = x + torch.tanh(functional.linear(x, weight.float()))
        return x

    def loss(self, step):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        return (self(x) - x.roll(1)).square().mean()


def test_float16_with_a_grad_scaler_equals_adamw_on_float32_masters():
    """Overflows are skipped, steps counted without them; weights agree within rounding."""
    ours, masters = HalfModel(), HalfModel().float()
    optimizer = ZenFlowAdamW(ours.parameters(), config=EVERY_STEP, **ADAMW)
    adamw = torch.optim.AdamW(masters.parameters(), **ADAMW)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    scales = []
    with closing(optimizer):
        for step in range(24):
            half = HalfModel()  # AdamW's float32 weights rounded: what its forward sees
            half.load_state_dict(masters.state_dict())
            overflow = 1e30 if step in (5, 11) else 1.0
            theirs.scale(half.loss(step) * overflow).backward()
            for p, q in zip(masters.parameters(), half.parameters(), strict=True):
                p.grad = q.grad.float()
            theirs.step(adamw)
            theirs.update()
            adamw.zero_grad()
            scaler.scale(ours.loss(step) * overflow).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append((scaler.get_scale(), theirs.get_scale()))
        optimizer.synchronize()
        assert optimizer.report.step == 22
    assert all(a == b for a, b in scales)
    ours_only = [a for a, _ in scales]
    assert any(b < a for a, b in itertools.pairwise(ours_only)), "no overflow was forced"
    assert relative_difference(weights_of(ours), weights_of(masters)) <= 2e-3


@pytest.mark.parametrize("order", ["unscale, clip, step", "step"])
def test_unscaling_and_clipping_in_either_place_gives_the_same_weights(order):
    model, plain = TinyStack(num_layers=4), TinyStack(num_layers=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    optimizer = ZenFlowAdamW(model.parameters(), config=BETWEEN, **ADAMW)
    expected = ZenFlowAdamW(plain.parameters(), config=BETWEEN, **ADAMW)
    clips = order != "step"
    with closing(optimizer), closing(expected):
        for step in range(15):
            scaler.scale(model.loss(step)).backward()
            plain.loss(step).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
            expected.step()
    assert_equal(weights_of(model), weights_of(plain))  # a power of two scales without rounding


@pytest.mark.parametrize("mode", MODES)
def test_a_step_takes_a_closure(mode):
    model, plain = TinyStack(num_layers=3), TinyStack(num_layers=3)
    optimizer = ZenFlowAdamW(model.parameters(), config=BETWEEN, **MODES[mode])
    expected = ZenFlowAdamW(plain.parameters(), config=BETWEEN, **MODES[mode])
    with closing(optimizer), closing(expected):
        for step in range(8):

            def closure(step=step):
                optimizer.zero_grad()
                loss = model.loss(step)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            assert float(loss.detach()) == float(plain.loss(step).detach())
            plain.loss(step).backward()
            expected.step()
    assert_equal(weights_of(model), weights_of(plain))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_accumulated_over_micro_batches(mode):
    model, whole = TinyStack(num_layers=3), TinyStack(num_layers=3)
    accumulating = {
        "keep": {},
        "release": {"offload_gradients": "release", "max_grad_norm": 0.3, "accumulation_steps": 3},
    }
    optimizer = ZenFlowAdamW(model.parameters(), config=BETWEEN, **accumulating[mode])
    expected = ZenFlowAdamW(whole.parameters(), config=BETWEEN)
    with closing(optimizer), closing(expected):
        for step in range(12):
            for micro in range(3):
                model.loss(3 * step + micro).backward()
                whole.loss(3 * step + micro).backward()
            if mode == "keep":
                optimizer.clip_grad_norm_(0.3)
            optimizer.step()
            expected.clip_grad_norm_(0.3)
            expected.step()
    assert_equal(weights_of(model), weights_of(whole))


def test_a_parameter_missing_from_some_micro_batches_still_counts():
    """In release mode its gradient never completes by counting: step() must take it."""
    results = []
    for mode in ({}, {"offload_gradients": "release", "accumulation_steps": 3}):
        model = OddShapes()
        with closing(ZenFlowAdamW(model.parameters(), config=BETWEEN, **mode)) as optimizer:
            for step in range(6):
                for micro in range(3):  # the branch is idle in one micro-batch of three
                    model.loss(3 * step + micro, idle=True).backward()
                optimizer.step()
        results.append(weights_of(model))
    assert_equal(*results)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "moved"])
def test_a_state_survives_every_way_of_copying_it(how):
    """As accelerate and others do: copied, pickled, moved tensor by tensor, and loaded."""
    ways = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda state: pickle.loads(pickle.dumps(state)),
        "torch.save": save_and_load,
        "moved": lambda state: map_tensors(copy.deepcopy(state), lambda t: t.to("cpu").clone()),
    }
    model, other = TinyStack(num_layers=3), TinyStack(num_layers=3, seed=5)
    optimizer = ZenFlowAdamW(model.parameters(), config=BETWEEN)
    loaded = ZenFlowAdamW(other.parameters(), config=BETWEEN)
    with closing(optimizer), closing(loaded):
        train(model, optimizer, 5)
        other.load_state_dict(model.state_dict())
        loaded.load_state_dict(ways[how](optimizer.state_dict()))
        assert_equal(train(other, loaded), train(model, optimizer))


def save_and_load(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def map_tensors(value, function):
    """Apply a function to every tensor of nested containers."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    return value


def test_it_is_a_torch_optimizer_with_its_usual_surface():
    model = OddShapes()
    with closing(ZenFlowAdamW(model.named_parameters(), lr=2e-3, config=BETWEEN)) as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.defaults["lr"] == 2e-3
        assert {"lr", "betas", "eps", "weight_decay"} <= optimizer.param_groups[0].keys()
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        train(model, optimizer, 2)
        assert calls == ["before", "after"] * 2
        state = optimizer.state_dict()
        assert {"state", "param_groups"} <= state.keys()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert set(optimizer.state) == set(trained)
        assert all("exp_avg" in optimizer.state[p] for p in trained)
        assert all(p.grad is None for p in trained)
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("mode", MODES)
def test_the_timeline_has_four_lanes_and_the_users_spans(mode):
    model = TinyStack(num_layers=6, width=24)
    config = ZenFlowConfig(min_split_elements=16, update_interval=2)
    threads = threading.active_count()
    optimizer = ZenFlowAdamW(model.parameters(), config=config, timeline_steps=4, **MODES[mode])
    with closing(optimizer):
        for step in range(9):
            with optimizer.span("forward"):
                loss = model.loss(step)
            with optimizer.span("backward"):
                loss.backward()
            optimizer.step()
        optimizer.synchronize()
        timeline = optimizer.timeline
    assert threading.active_count() == threads
    names = {(span.lane, span.name) for span in timeline.spans}
    assert {span.lane for span in timeline.spans} == set(LANES)
    assert {
        ("device", "forward"),
        ("device", "backward"),
        ("device", "step"),
        ("d2h", "grads"),
        ("h2d", "params"),
        ("host", "adam"),
    } <= names
    assert {span.step for span in timeline.spans} == {6, 7, 8, 9}
    for span in timeline.spans:
        assert span.end >= span.start >= 0
        assert (span.num_bytes > 0) or span.lane in ("device", "host")
    trace = timeline.to_chrome_trace()
    assert any(event.get("ph") == "X" for event in trace["traceEvents"])


def test_without_timeline_steps_nothing_is_recorded():
    model = TinyStack(num_layers=3)
    with closing(ZenFlowAdamW(model.parameters(), config=BETWEEN)) as optimizer:
        with optimizer.span("forward"):
            model.loss(0).backward()
        optimizer.step()
        optimizer.synchronize()
        assert optimizer.timeline.spans == ()


def test_the_plainest_loop_learns():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
    x = torch.randn(256, 32)
    target = x.flip(1) * 0.5
    optimizer = ZenFlowAdamW(
        model.parameters(), lr=3e-3, offload_gradients="release", max_grad_norm=1.0
    )
    with closing(optimizer):
        losses = []
        for _ in range(120):
            loss = functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        optimizer.eval()
        with torch.no_grad():
            final = float(functional.mse_loss(model(x), target))
    assert final < 0.2 * losses[0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_data_loader_forks_its_workers_beside_the_optimizers_threads():
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork on this platform")
    results = []
    for settings in ({"num_workers": 2, "multiprocessing_context": "fork"}, {"num_workers": 0}):
        model = TinyStack(num_layers=4)
        with closing(ZenFlowAdamW(model.parameters(), config=BETWEEN)) as optimizer:
            for _ in range(2):  # workers are forked anew in every epoch, with work in flight
                loader = torch.utils.data.DataLoader(range(6), batch_size=None, **settings)
                for step in loader:
                    model.loss(step).backward()
                    optimizer.step()
        results.append(weights_of(model))
    assert_equal(*results)


def test_two_optimizers_live_side_by_side():
    generator, critic = TinyStack(num_layers=3), TinyStack(num_layers=3, seed=1)
    alone = []
    for model in (copy.deepcopy(generator), copy.deepcopy(critic)):
        with closing(ZenFlowAdamW(model.parameters(), config=BETWEEN)) as optimizer:
            alone.append(train(model, optimizer, 8))
    first = ZenFlowAdamW(generator.parameters(), config=BETWEEN)
    second = ZenFlowAdamW(critic.parameters(), config=BETWEEN)
    with closing(first), closing(second):
        for step in range(8):
            for model, optimizer in ((generator, first), (critic, second)):
                model.loss(step).backward()
                optimizer.step()
    assert_equal(weights_of(generator), alone[0])
    assert_equal(weights_of(critic), alone[1])
