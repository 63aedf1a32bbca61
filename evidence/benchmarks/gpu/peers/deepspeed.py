"""DeepSpeed's engines: one rank, told by environment variables, and settings of its tutorials."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from evidence.benchmarks.gpu.peers.engine import Engine, Peer, copies
from evidence.benchmarks.gpu.setup import Bench
from evidence.benchmarks.gpu.training import CLIP_NORM, LR

_DECAY = 0.01
"""Weight decay of torch's AdamW, which DeepSpeed's does not default to."""
_WINDOW = 4
_ZERO2: Mapping[str, Any] = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True}
_SETTINGS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "deepspeed, ZeRO-2 Offload": (_ZERO2, {}),
    "deepspeed, ZenFlow": (
        {
            **_ZERO2,
            "zenflow": {
                "topk_ratio": 0.05,
                "select_strategy": "auto",
                "select_interval": "auto",
                "update_interval": _WINDOW,
                "full_warm_up_rounds": 0,
                "overlap_step": True,
            },
        },
        {},
    ),
    "deepspeed, SuperOffload": (
        {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
        {"ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9},
    ),
}
"""Settings of ZeRO, and those of its offload beside place and pinning."""


def enter() -> None:
    """Say that this process is the only rank, once, and start its communication."""
    import deepspeed

    if "MASTER_PORT" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        one = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {name: str(value) for name, value in {**one, "MASTER_PORT": port}.items()}
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")  # a later minor version of nvcc is as good
    deepspeed.init_distributed()


def compile_kernels() -> None:
    """Compile what DeepSpeed compiles at its first use, so that no engine's time has it."""
    enter()
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()


class _Logits(nn.Module):
    """The model with a tensor as its output: DeepSpeed puts hooks on outputs.

    It finds tensors in containers, but not in the object that our decoder returns. Without these
    hooks its ZenFlow never learns that a backward begins, and its weights become NaN.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits


class _DeepSpeed(Engine):
    """DeepSpeed's engine, which wraps the model, scales the loss and clips."""

    def __init__(self, model: nn.Module, bench: Bench, name: str) -> None:
        enter()
        import deepspeed

        zero, offload = _SETTINGS[name]
        on_gpu = bench.device.type == "cuda"
        place = {"device": "cpu", "pin_memory": on_gpu, **offload}
        adamw = {"type": "AdamW", "params": {"lr": LR, "weight_decay": _DECAY}}
        self._engine, *_ = deepspeed.initialize(
            model=_Logits(model),
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": bench.cell.batch,
                "bf16": {"enabled": True},
                "gradient_clipping": CLIP_NORM,
                "optimizer": adamw,
                "zero_optimization": {**zero, "offload_optimizer": place},
            },
        )
        window = _WINDOW if "zenflow" in zero else 1
        super().__init__(self._outputs, self._engine.optimizer, window)

    def _outputs(self, tokens: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self._engine(tokens))

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()

    def weights(self) -> list[Tensor]:
        import deepspeed

        params = list(self._engine.module.parameters())
        with deepspeed.zero.GatheredParameters(params):  # nothing to gather below stage 3
            return copies(params)

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        path, _ = self._engine.load_checkpoint(str(folder))
        if path is None:
            raise FileNotFoundError("DeepSpeed found no checkpoint where it wrote one")

    def close(self) -> None:
        self._engine.destroy()


def _peer(name: str, state: str, *, needs_gpu: bool = False) -> Peer:
    return Peer(
        make=lambda model, bench: _DeepSpeed(model, bench, name),
        state=state,
        package="deepspeed",
        needs_gpu=needs_gpu,
    )


ENGINES: Mapping[str, Peer] = {
    name: _peer(name, state, needs_gpu=needs_gpu)
    for name, state, needs_gpu in (
        ("deepspeed, ZeRO-2 Offload", "float32 on the host", False),
        ("deepspeed, ZenFlow", "float32 on the host, 5% of columns on the device", False),
        (
            "deepspeed, SuperOffload",
            "float32, nine tenths on the host; clipping ends its overlap",
            True,
        ),
    )
}
