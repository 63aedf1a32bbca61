"""Bytes of a loss: counted as torch allocates them, and blocks that its allocator can't use."""

import pytest

from sim.hardware.catalog import find_machine
from sim.memory.need import memory_of
from sim.models.activations import LOSS_PARTS, Activations
from sim.models.table import find_model
from sim.models.workload import Workload

TOKENS, WORDS = 64, 4000


def workload(**settings):
    name, config = find_model("llama-3.2-1b")
    return Workload.of_config(name, config, **{"batch_size": 1, "sequence": 8192, **settings})


def peak_bytes_per_logit(step):
    """Return the most bytes that torch's CPU allocator has out during a step, for each logit."""
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    sizes = [e for e in events if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(sizes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most / (TOKENS * WORDS)


@pytest.mark.parametrize("is_held", [False, True])
def test_eager_cross_entropy_takes_what_torch_allocates(is_held):
    """Held logits are those of a script that still has its outputs in backward."""
    torch = pytest.importorskip("torch")
    leaf = torch.randn(TOKENS, WORDS, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(WORDS, (TOKENS,))

    def step():
        logits = leaf * 1
        wide = logits.float()
        held = (logits, wide) if is_held else None
        loss = torch.nn.functional.cross_entropy(wide, target)
        del logits, wide
        loss.backward()
        del held

    counts = Activations(workload())
    logits = workload().tokens * workload().vocabulary
    counted = (counts.kept_bytes()[-1] + counts.loss_bytes()) / logits
    assert counted == pytest.approx(12, rel=0.02)
    assert peak_bytes_per_logit(step) == pytest.approx(counted + 6 * is_held, rel=0.02)


def counted_per_logit(**settings):
    work = workload(**settings)
    counts = Activations(work)
    return (counts.kept_bytes()[-1] + counts.loss_bytes()) / (work.tokens * work.vocabulary)


def test_a_loss_in_parts_takes_what_torch_allocates():
    """All parts' logits are there in forward, and one part's float32 copy."""
    torch = pytest.importorskip("torch")
    leaf = torch.randn(TOKENS, WORDS, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(WORDS, (TOKENS,))

    def step():
        parts = [part * 1 for part in leaf.chunk(LOSS_PARTS)]
        wholes = zip(parts, target.chunk(LOSS_PARTS), strict=True)
        losses = [torch.nn.functional.cross_entropy(a.float(), b) for a, b in wholes]
        del parts
        sum(losses).backward()

    counted = counted_per_logit(loss="parts")
    assert counted == pytest.approx(6.5, rel=0.02)
    assert peak_bytes_per_logit(step) == pytest.approx(counted, rel=0.02)


@pytest.mark.slow  # it calls a C++ compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("returns", [True, False], ids=["a model's", "a loss alone"])
def test_a_compiled_model_makes_zeros_for_the_logits_that_it_returns(returns):
    torch = pytest.importorskip("torch")
    leaf = torch.randn(TOKENS, 32, dtype=torch.bfloat16, requires_grad=True)
    table = torch.randn(WORDS, 32, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(WORDS, (TOKENS,))

    @torch.compile
    def model():
        logits = leaf @ table.T
        loss = torch.nn.functional.cross_entropy(logits.float(), target)
        return (logits, loss) if returns else (None, loss)

    def step():
        _, loss = model()
        loss.backward()

    step()
    counted = counted_per_logit(kernels="compiled") - 2 * (not returns)
    assert counted == pytest.approx(6 - 2 * (not returns), rel=0.02)
    assert peak_bytes_per_logit(step) <= 1.05 * counted
    assert peak_bytes_per_logit(step) == pytest.approx(counted, rel=0.05) or not returns


def test_a_block_of_16_bit_logits_is_held_where_there_is_room_and_given_back_where_not():
    machine = find_machine("hgx-h100", 1)
    work = workload(checkpointing=True)
    need = memory_of(work, "published_on_device", machine)
    assert need.moment == "loss"
    assert need.cached_bytes == 2 * work.tokens * work.vocabulary
    assert need.reserved_bytes == pytest.approx(need.device_bytes - 0.8e9 + need.cached_bytes), (
        "a context is none of the allocator's"
    )
    tight = machine.with_values({"device.memory": need.device_bytes + 1})
    assert not need.short_of(tight)


@pytest.mark.parametrize(
    "settings", [{"loss": "chunks"}, {"kernels": "liger"}, {"kernels": "compiled"},
                 {"dtype": "float32"}],
    ids=str,
)  # fmt: skip
def test_no_block_is_idle_where_no_float32_tensor_follows_a_16_bit_one(settings):
    work = workload(**settings)
    assert memory_of(work, "published_on_device", find_machine("hgx-h100", 1)).cached_bytes == 0


def deepspeed(system, count=1, **config):
    name, own = find_model("llama-2-7b")
    work = Workload.of_config(name, {**own, **config}, sequence=512, checkpointing=True)
    return work, memory_of(work, system, find_machine("rtx4090-server", count))


def test_the_largest_gradient_is_copied_to_float64_for_its_norm_before_it_leaves():
    work, need = deepspeed("deepspeed_zero_offload", 2, vocab_size=102_400)
    parts = {part.name: part.num_bytes for part in need.parts if part.place == "device"}
    assert need.moment == "largest gradient leaves"
    layers = [layer for layer in work.layers if layer.is_inner]
    inner = max(p.numel for layer in layers for p in layer.parameters)
    assert parts["gradient's copy"] == 8 * (102_400 * 4096 - inner)
    # One that ran out of memory on two cards of 24 GB, at a request for the float32 copy.
    assert need.chance(find_machine("rtx4090-server", 2)) < 0.8


def test_stage_3_copies_its_part_of_a_gradient_by_pieces():
    _, one = deepspeed("zero3_offload", 1, vocab_size=256_000)
    _, four = deepspeed("zero3_offload", 4, vocab_size=256_000)
    copies = [
        sum(p.num_bytes for p in need.parts if p.name == "gradient's copy") for need in (one, four)
    ]
    numel, inner = 256_000 * 4096, 11008 * 4096
    assert copies[0] == max(8 * 250e6, 4 * numel) - 8 * inner
    assert copies[1] == 8 * 250e6 - 2 * inner, "a quarter of it is just above a piece"


def test_gradients_that_stay_on_the_device_are_not_copied():
    _, need = deepspeed("deepspeed_zero3", 4)
    assert "gradient's copy" not in {part.name for part in need.parts}
