"""axolotl's plug-in, beside a stand-in of what axolotl 0.19 asks of one."""

import sys
from types import ModuleType

import pytest

pytest.importorskip("transformers", reason='needs transformers: pip install -e ".[hf]"')
pytest.importorskip("pydantic", reason='needs pydantic: pip install -e ".[dev-all]"')

from transformers import Trainer, TrainingArguments

from tests.models import weights_of
from tests.zenflow.integrations.hf import arguments
from tests.zenflow.integrations.tiny import CONFIG, are_equal, decoder, texts
from zenflow.errors import ConfigError
from zenflow.integrations.transformers import ZenFlowTrainer

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours

KEYS = {"min_split_elements": CONFIG.min_split_elements, "topk_ratio": CONFIG.topk_ratio}


class AxolotlTrainer(Trainer):
    """Takes further arguments, and groups parameters itself for an optimizer that it is given."""

    def __init__(self, *args, bench_data_collator=None, **kwargs):
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model=None):
        kind, given = self.optimizer_cls_and_kwargs
        embedding = (model or self.model).get_input_embeddings().weight
        others = [p for p in self.model.parameters() if p is not embedding]
        rate = getattr(self.args, "embedding_lr", given["lr"])
        self.optimizer = kind([{"params": others}, {"params": [embedding], "lr": rate}], **given)
        return self.optimizer


@pytest.fixture
def axolotl(monkeypatch):
    """Return the plug-in's module, imported beside the stand-in."""
    for name, content in {
        "axolotl": {},
        "axolotl.integrations": {},
        "axolotl.integrations.base": {"BasePlugin": type("BasePlugin", (), {})},
        "axolotl.core": {},
        "axolotl.core.trainers": {"AxolotlTrainer": AxolotlTrainer},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "zenflow.integrations.axolotl", raising=False)
    import zenflow.integrations.axolotl as plugin

    yield plugin
    sys.modules.pop("zenflow.integrations.axolotl", None)


class Settings(dict):
    """A YAML file's settings as axolotl hands them to a plug-in: an absent key is None."""

    def __missing__(self, key):
        return None


def trained(kind, folder, **given):
    model = decoder()
    args = arguments(TrainingArguments, folder, gradient_accumulation_steps=2)
    trainer = kind(model=model, args=args, train_dataset=texts(), **given)
    trainer.train()
    trainer.zenflow_optimizer.close()
    return weights_of(model)


@pytest.mark.parametrize("release", [True, False])
def test_the_plugin_s_trainer_trains_by_the_bits_of_our_own(axolotl, tmp_path, release):
    settings = Settings(zenflow=Settings(**KEYS, release=release))
    kind = axolotl.ZenFlowPlugin().get_trainer_cls(settings)
    assert issubclass(kind, AxolotlTrainer)
    found = trained(kind, tmp_path / "plugin", bench_data_collator=None)
    assert are_equal(found, trained(ZenFlowTrainer, tmp_path, zenflow=CONFIG, release=release))


def test_parameters_with_learning_rates_of_their_own_are_grouped_by_axolotl(axolotl, tmp_path):
    kind = axolotl.ZenFlowPlugin().get_trainer_cls(Settings(zenflow=Settings(**KEYS)))
    args = arguments(TrainingArguments, tmp_path)
    args.embedding_lr = 0.25
    trainer = kind(model=decoder(), args=args, train_dataset=texts())
    groups = trainer.create_optimizer().param_groups
    assert [group["lr"] for group in groups] == [args.learning_rate, 0.25]
    trainer.zenflow_optimizer.close()


def test_settings_come_from_a_preset_and_from_single_keys(axolotl):
    found = axolotl._arguments_of({"preset": "zero_offload", "state_dir": "/drive"})
    assert found["zenflow"].topk_ratio == 0.0
    assert found["state_dir"] == "/drive"


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({"topk_ratoi": 0.1}, "did you mean 'topk_ratio'"),
        ({"state_dri": "x"}, "did you mean 'state_dir'"),
        ({"topk_ratio": 2}, "topk_ratio"),
        ({"preset": "zenflo"}, "did you mean 'zenflow'"),
    ],
)
def test_bad_keys_are_refused_while_the_file_is_read(axolotl, mapping, said):
    with pytest.raises(ValueError, match=said):
        axolotl.ZenFlowArgs(zenflow=mapping)


@pytest.mark.parametrize("key", ["rl", "reward_model", "process_reward_model", "trainer_cls"])
def test_trainings_with_another_trainer_are_refused_before_the_model_is_loaded(axolotl, key):
    with pytest.raises(ConfigError, match=key):
        axolotl.ZenFlowPlugin().pre_model_load(Settings({key: "dpo"}))


@pytest.mark.parametrize(
    ("stream", "loaded_on"),
    [(False, "auto"), (True, {"": "cpu"}), ({"resident_layers": 8}, {"": "cpu"})],
)
def test_streamed_weights_are_loaded_on_the_host(axolotl, stream, loaded_on):
    settings = Settings(device_map="auto", zenflow=Settings(stream=stream))
    axolotl.ZenFlowPlugin().pre_model_load(settings)
    assert settings["device_map"] == loaded_on


def test_the_file_s_key_is_described_where_axolotl_looks_for_it(axolotl):
    place, _, name = axolotl.ZenFlowPlugin().get_input_args().rpartition(".")
    assert getattr(sys.modules[place], name) is axolotl.ZenFlowArgs
    assert axolotl.ZenFlowArgs().zenflow is None
