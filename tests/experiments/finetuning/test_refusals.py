"""What can't be trained is refused in one line, before anything is trained."""

import json

import pytest

pytest.importorskip("trl", reason='needs the extra: pip install "zenflow-offload[finetune]"')

from experiments.finetuning import memory, settings, trainer
from tests.experiments.finetuning.small import FAST, chat, finetune, save_model, write_rows

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with models and rows of which each but two has a fault."""
    folder = tmp_path_factory.mktemp("refused")
    save_model(folder / "model")
    save_model(folder / "plain", template=None)
    for name, change in (
        ("unknown", {"model_type": "marvellous"}),
        ("quantized", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ):
        save_model(folder / name)
        config = folder / name / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    save_model(folder / "adapter")
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    save_model(folder / "bare")
    (folder / "bare" / "model.safetensors").unlink()
    (folder / "llama.cpp").mkdir()
    (folder / "llama.cpp" / "model-Q4_1.gguf").write_bytes(b"GGUF")
    (folder / "hollow").mkdir()
    write_rows(folder / "chats.jsonl", map(chat, range(4)))
    write_rows(folder / "texts.jsonl", [{"text": "w5 w6"}])
    write_rows(folder / "columns.jsonl", [{"a": "w5", "b": "w6"}])
    write_rows(folder / "pairs.jsonl", [{"prompt": "w5", "chosen": "w6", "rejected": "w7"}])
    write_rows(folder / "gap.jsonl", [{"prompt": "w5", "completion": "w6"},
                                      {"prompt": "w5", "completion": None}])  # fmt: skip
    write_rows(folder / "asked.jsonl", [{"messages": [{"role": "user", "content": "w5"}]}])
    for name, content in (
        ("image", [{"type": "image", "image": "a.png"}]),
        ("number", 5),
        ("hollow", [{"type": "text"}]),
    ):
        answer = {"role": "assistant", "content": content}
        write_rows(folder / f"{name}.jsonl", [{"messages": [*chat()["messages"], answer]}])
    halves = {"prompt": "w5", "completion": [{"role": "assistant", "content": "w6"}]}
    write_rows(folder / "halves.jsonl", [halves])
    (folder / "broken.jinja").write_text("{% for m in messages %}{{ m.content }}")
    (folder / "broken.jsonl").write_text('{"text": "w5"\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "rows.xlsx").write_text("rows")
    (folder / "mixed").mkdir()
    (folder / "mixed" / "a.csv").write_text("text\nw5\n")
    (folder / "mixed" / "b.txt").write_text("w5")
    (folder / "taken").mkdir()
    (folder / "taken" / "file").write_text("mine")
    return folder


CASES = {
    "a missing column": (["--data", "columns.jsonl"], "must have a column messages"),
    "preference pairs": (["--data", "pairs.jsonl"], "DPOTrainer"),
    "an empty file": (["--data", "empty.jsonl"], "is empty"),
    "a broken file": (["--data", "broken.jsonl"], "can't be read"),
    "an unknown file": (["--data", "rows.xlsx"], "must end in .jsonl"),
    "a wrong path": (["--data", "chats.json"], "did you mean"),
    "a folder of several kinds": (["--data", "mixed"], "files of one kind"),
    "rows of several forms": (["--data", "chats.jsonl", "--data", "texts.jsonl"], "of one form"),
    "a row without an answer": (["--data", "asked.jsonl"], "row 1 has no answer"),
    "a row without a completion": (["--data", "gap.jsonl"], "row 2 must have a text"),
    "an image": (["--data", "image.jsonl"], "row 1, message 5 must have a text as content"),
    "an answer that is no text": (["--data", "number.jsonl"], "but has 5: write one"),
    "a part without its text": (["--data", "hollow.jsonl"], "row 1, message 5 must have a text"),
    "a text before messages": (["--data", "halves.jsonl"], "row 1 must have messages"),
    "a broken template": (["--chat-template", "broken.jinja"], "Unexpected end of template"),
    "no chat template": (["--model", "plain"], "--chat-template FILE"),
    "no such template": (["--chat-template", "chat.jinja"], "--chat-template"),
    "LoRA": (["--lora"], "SFTTrainer with peft_config and plain AdamW"),
    "an adapter": (["--model", "adapter"], "merge_and_unload"),
    "quantized weights": (["--model", "quantized"], "are quantized"),
    "no weights": (["--model", "bare"], "has no weights"),
    "a GGUF file": (["--model", "llama.cpp/model-Q4_1.gguf"], "gguf is a GGUF file"),
    "a folder with a GGUF file": (["--model", "llama.cpp"], "llama.cpp holds a GGUF file"),
    "a folder without a model": (["--model", "hollow"], "must hold a config.json"),
    "an unknown model type": (["--model", "unknown"], "marvellous"),
    "a folder that is taken": (["--out", "taken"], "must be new or empty"),
    "a file in the folder's place": (["--out", "chats.jsonl"], "must be a folder"),
    "prompts longer than a sequence": (["--sequence", "4"], "raise it"),
    "saves beside the best": (
        ["--keep-best", "--eval-every", "2", "--save-every", "4"],
        "leave --save-every 4 out",
    ),
    "the best of few rows": (
        ["--keep-best", "--eval-every", "2", "--eval-share", "0.5"],
        "of 4 rows none are held out",
    ),
    "the best of no evaluation": (["--keep-best"], "give --eval-every"),
    "a share that is none": (["--eval-share", "1.5"], "is a share of the rows"),
    "float16": (["--dtype", "float16", "--gradients", "keep"], "take bfloat16"),
    "a tracker that is unknown": (["--report-to", "paper"], "must be of tensorboard, wandb"),
    "a setting of the rule": (["--topk-ratio", "2"], "topk_ratio must be a number in [0, 1]"),
    "a stream without layers": (["--stream"], "have no weight to stream"),
    "no hub": (["--push-to-hub", "me/mine"], "can't be pushed there"),
}


@pytest.fixture
def untrained(monkeypatch):
    """Let no run train."""

    def refuse(*_, **__):
        raise AssertionError("it trains")

    monkeypatch.setattr(trainer.ZenFlowSFTTrainer, "train", refuse)


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_with_its_remedy(folder, untrained, monkeypatch, case):
    flags, said = CASES[case]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = {"--model": "model", "--data": "chats.jsonl", "--out": "new"}
    left = [part for pair in base.items() if pair[0] not in flags for part in pair]
    ran = finetune(*FAST, *left, *flags)
    assert ran.exit_code == 2, ran.output
    assert said in " ".join(ran.output.split())
    assert not (folder / "new" / "checkpoint-1").exists()
    assert not (folder / "new").exists()


def test_settings_of_a_run_that_goes_on_are_its_own(folder, untrained):
    ran = finetune("--resume", folder / "taken", "--lr", "1e-3")
    assert (ran.exit_code, "leave out --lr" in ran.output) == (2, True)
    ran = finetune("--resume", folder / "taken")
    assert (ran.exit_code, "finetune.json can't be read" in ran.output) == (2, True)


def test_packages_that_are_missing_are_named_with_the_line_to_install_them(folder, monkeypatch):
    monkeypatch.setattr(settings, "_PACKAGES", ("torch", "not_a_package"))
    ran = finetune("--model", folder / "model", "--data", folder / "chats.jsonl", "--out",
                   folder / "new")  # fmt: skip
    assert ran.exit_code == 2
    assert "needs not_a_package: pip install 'zenflow-offload[finetune]'" in " ".join(
        ran.output.split()
    )


def test_memory_that_is_not_there_is_refused_before_weights_are_loaded(
    folder, untrained, monkeypatch, tmp_path
):
    monkeypatch.setattr("experiments.training.parts.memory_check.free_bytes",
                        lambda: (1e5, "a limit"))  # fmt: skip
    monkeypatch.setattr(trainer, "load_model", None)
    flags = ("--model", folder / "model", "--data", folder / "chats.jsonl")
    ran = finetune(*FAST, *flags, "--out", tmp_path / "new")
    assert ran.exit_code == 3
    assert "of host memory, and a limit leaves" in " ".join(ran.output.split())


def test_the_tables_sums_are_those_of_the_optimizers_plan(folder, tmp_path):
    import torch

    found = settings.settle(str(folder / "model"), ("rows",), {"device": "cpu"},
                            {"min_split_elements": 1024}, {})  # fmt: skip
    model = trainer.shape_of(found)
    assert all(param.is_meta for param in model.parameters())
    device = torch.device("cuda")  # which is not touched
    placed = memory.Placed.of(found, model, device, found.config)
    expected = memory.expect(placed, tmp_path, has_one=False)
    plan = memory.memory_of_engine(model, found.config).plan(has_ring=True)
    sizes = {part.name: part.num_bytes for part in expected.parts if part.place == "device"}
    assert sizes["weights"] == plan.model_bytes
    host = [part for part in expected.parts if part.place != "device" and part.name != "processes"]
    assert sum(part.num_bytes for part in host) == pytest.approx(plan.host_bytes, rel=1e-3)
    assert expected.device == sum(sizes.values())
    lines = memory.table(expected, device).splitlines()
    assert any(line.split()[0] == "device" and "in sum" in line for line in lines)
