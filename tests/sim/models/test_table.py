"""Named models: their published sizes, what they may be called, and files in their stead."""

import json

import pytest

from sim.models.families import num_params
from sim.models.table import find_model, hub_name, model_names
from zenflow.errors import ConfigError

PUBLISHED = {
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "gemma-2-27b": 27_227_128_320,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2b": 2_506_172_416,
    "gemma-3-1b": 999_885_952,
    "gemma-7b": 8_537_680_896,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-large-123b": 122_610_069_504,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    "opt-1.3b": 1_315_758_080,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-350m": 331_196_416,
    "opt-6.7b": 6_658_473_984,
    "phi-3-medium": 13_960_238_080,
    "phi-3-mini": 3_821_079_552,
    "phi-3.5-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "qwen1.5-14b": 14_167_290_880,
    "qwen1.5-7b": 7_721_324_544,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "tinyllama-1.1b": 1_100_048_384,
}
"""Parameters of the checkpoints on Hugging Face; BERT as a masked language model."""


def test_every_named_model_has_its_published_size():
    assert {name: num_params(find_model(name)[1]) for name in model_names()} == PUBLISHED


@pytest.mark.parametrize("name", model_names())
def test_every_named_model_states_its_length_and_dtype(name):
    config = find_model(name)[1]
    assert config.get("max_position_embeddings", config.get("n_positions")) >= 512
    assert config["torch_dtype"] in ("float16", "bfloat16", "float32")
    heads = config.get("num_attention_heads", config.get("n_head"))
    assert "head_dim" in config or config.get("hidden_size", config.get("n_embd")) % heads == 0
    assert heads % config.get("num_key_value_heads", heads) == 0


@pytest.mark.parametrize(
    ("spoken", "name"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("llama-3.1-8b-instruct", "llama-3.1-8b"),
        ("qwen2.5-0.5b", "qwen2.5-0.5b"),
        ("Qwen/Qwen2.5-0.5B", "qwen2.5-0.5b"),
        ("Qwen2.5 0.5B", "qwen2.5-0.5b"),
        ("Llama-2-7b-hf", "llama-2-7b"),
        ("LLAMA_2_7B", "llama-2-7b"),
        ("facebook/opt-350m", "opt-350m"),
    ],
)
def test_models_are_found_by_the_names_that_people_and_the_hub_give_them(spoken, name):
    assert find_model(spoken)[0] == name


def test_no_two_models_share_a_name():
    from sim.models.table import _known, _named

    spellings = _known()
    for name, text in _named().items():
        repository = json.loads(text)["_name_or_path"]
        for spoken in (name, repository, repository.rsplit("/", 1)[-1]):
            assert find_model(spoken)[0] == name, spoken
        for same in json.loads(text).get("same_shapes", ()):
            assert find_model(same)[0] == name, same
            assert hub_name(same) == same
        assert hub_name(name) == repository
    assert set(spellings.values()) == set(model_names())


def test_an_unknown_name_gets_the_nearest_ones():
    with pytest.raises(
        ConfigError, match=r"no model 'qwen2\.5-8b', .* are qwen2\.5-.*config\.json"
    ):
        find_model("qwen2.5-8b")
    with pytest.raises(ConfigError, match=r"known are bert-base, .*tinyllama"):
        find_model("###")


def test_a_found_config_is_the_callers_own():
    find_model("gpt2")[1]["n_layer"] = 1
    assert find_model("gpt2")[1]["n_layer"] == 12


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(find_model("gpt2")[1]))
    return folder


def test_a_folder_and_a_file_are_models_too(folder, monkeypatch):
    expected = ("my-model", find_model("gpt2")[1])
    assert find_model(folder) == expected
    assert find_model(str(folder)) == expected
    assert find_model(folder / "config.json") == expected
    monkeypatch.chdir(folder)
    assert find_model(".") == expected
    (folder / "tiny.json").write_text((folder / "config.json").read_text())
    assert find_model("tiny.json")[0] == "tiny"


def test_a_name_comes_before_a_path(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (folder.parent / "gpt2").mkdir()
    assert find_model("gpt2")[0] == "gpt2"
    with pytest.raises(ConfigError, match="can't be read"):
        find_model("./gpt2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json is not JSON .*: give the config\.json beside"),
        ("[]", r"must hold an object, got \[\]"),
        ("{}", r"lacks model_type, a family's name"),
        ('{"model_type": 7}', r"lacks model_type"),
        ('{"model_type": "lama"}', r"config\.json: model_type 'lama' is unknown; known are"),
        (
            '{"model_type": "gpt2"}',
            r"config\.json: the gpt2 config breaks 5 rules:\n- lacks",
        ),
    ],
)
def test_a_file_that_is_no_models_config_is_refused(text, message, folder):
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_model(folder)
