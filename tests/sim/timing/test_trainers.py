"""Seconds that a trainer adds to a step, by hand, and cases where nothing is to be added."""

from dataclasses import replace
from itertools import pairwise

import pytest

from sim.hardware.catalog import find_machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.schedules.systems import lora
from sim.simulate import Strategy
from sim.steady import steady
from sim.timing.costs import costs_of
from sim.timing.trainers import CODE, num_modules, trainer_seconds
from zenflow.errors import ConfigError

NAMES = sorted(CODE)


def work(model="llama-2-7b", **settings):
    return Workload.of_config(*find_model(model), **settings)


def step(workload, strategy="on_device"):
    costs = costs_of(workload, find_machine("hgx-h100", 1))
    return steady(costs, Strategy.of(strategy)).step_seconds


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_seconds_are_of_the_micro_batch_its_modules_and_a_part_of_the_step(name, accumulation):
    code = CODE[name]
    # 32 layers of seven matrices and six modules more, a table and an output layer.
    modules = 32 * 13 + 2
    by_hand = code.micro_batch + modules * code.module + code.step / accumulation
    own = work(trainer=name, accumulation=accumulation)
    assert trainer_seconds(own) == pytest.approx(by_hand)
    assert trainer_seconds(own, more_modules=7) == pytest.approx(by_hand + 7 * code.module)


@pytest.mark.parametrize("strategy", ["on_device", "zenflow", "fsdp2", "deepspeed_zero3"])
@pytest.mark.parametrize(
    ("model", "batch"), [("qwen2.5-0.5b", {"sequence": 16}), ("llama-2-7b", {"sequence": 4096})],
    ids=["bound by launches", "bound by the device"],
)  # fmt: skip
def test_the_device_waits_for_it_in_every_micro_batch(strategy, model, batch):
    plain = work(model, batch_size=1, accumulation=3, **batch)
    own = replace(plain, trainer="trl")
    more = step(own, strategy) - step(plain, strategy)
    waited = 3 * trainer_seconds(own)
    if strategy == "zenflow":  # whose host may be what a step waits for
        assert -1e-9 < more <= waited * (1 + 1e-6)
    else:
        assert more == pytest.approx(waited, rel=1e-6)


def test_a_loop_adds_nothing():
    plain = work(trainer="loop")
    assert trainer_seconds(plain) == 0.0
    assert (
        costs_of(plain, find_machine("hgx-h100", 1)).segments
        == costs_of(work(), find_machine("hgx-h100", 1)).segments
    )


def test_adapters_have_modules_of_their_own():
    plain = work("llama-2-7b", sequence=512)
    own = replace(plain, trainer="transformers")
    targets = 32 * 7
    waited = trainer_seconds(own, more_modules=10 * targets)
    assert step(own, "lora") - step(plain, "lora") == pytest.approx(waited, rel=1e-6)
    assert waited > 4 * trainer_seconds(own)


def test_an_unknown_trainer_is_refused_with_a_name():
    with pytest.raises(ConfigError, match=r"trainer 'sentence.*did you mean 'transformers'"):
        work(trainer="sentence-transformers")


@pytest.mark.parametrize("model", ["gpt2", "llama-2-7b", "opt-350m", "qwen2.5-0.5b"])
def test_modules_are_about_those_of_transformers_own_code(model):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    name, found = find_model(model)
    config = transformers.AutoConfig.for_model(**found)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(map(num_modules, Workload.of_config(name, found).layers))
    assert counted == pytest.approx(sum(1 for _ in made.modules()), rel=0.2)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_adds_as_many_modules_as_in_peft():
    peft = pytest.importorskip("peft")
    from evidence.benchmarks.module_launches import model_of

    sizes = []
    for count in (1, 2):
        model = model_of("llama", "eager", 1)
        targets = ["q_proj", "k_proj"][:count]
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets))
        sizes.append(sum(1 for _ in adapted.modules()))
    ((one, two),) = pairwise(sizes)
    assert two - one == lora._MODULES
