"""Layers of Megatron Core's own modules, on a CPU.

Written for `megatron-core` 0.16, from the package index. These modules ask a GPU for three things
that a host's time does not depend on: a state of random numbers for dropout, a buffer for scores,
and the number of the current device. Each is answered here without a GPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore


class MegatronModel(nn.Module):
    """A tiny GPT of Megatron's own modules without dropout; one process, float32.

    Norms are PyTorch's, and bias with GELU and bias with residual are fused by `torch.compile`, as
    Megatron Core does where Apex and Transformer Engine are not installed.
    """

    def __init__(self, width: int, heads: int, inner: int, num_layers: int) -> None:
        """Begin a group of this process alone, where none is there, and make the layers."""
        super().__init__()
        _begin()
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(
            num_layers=num_layers, hidden_size=width, num_attention_heads=heads,
            ffn_hidden_size=inner, use_cpu_initialization=True, bias_activation_fusion=True,
            bias_dropout_fusion=True, masked_softmax_fusion=False, hidden_dropout=0.0,
            attention_dropout=0.0, gradient_accumulation_fusion=False,
        )  # fmt: skip
        self.model = GPTModel(
            config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=64,
            position_embedding_type="learned_absolute", share_embeddings_and_output_weights=True,
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (batch, sequence, 64), of tokens, (batch, sequence)."""
        length = tokens.shape[1]
        hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        logits: Tensor = self.model(tokens, torch.arange(length)[None], hidden)
        return logits


def _begin() -> None:
    from megatron.core import parallel_state

    importlib.import_module("megatron.core.models.gpt")  # and every module that is changed below
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    buffer = SimpleNamespace(get_tensor=_buffer)
    parallel_state.get_global_memory_buffer = lambda: buffer
    state = SimpleNamespace(fork=_same_state)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda: state  # type: ignore[attr-defined]


def _buffer(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    del name
    return torch.empty(shape, dtype=dtype)


@contextmanager
def _same_state(*_: Any) -> Iterator[None]:
    yield
