"""Engines of the benchmark, each with the settings that its own documentation advises."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evidence.benchmarks.gpu.baselines import FusedAdamW
from evidence.benchmarks.gpu.figures import FUSED, FUSED_MASTERS
from evidence.benchmarks.gpu.peers import deepspeed
from evidence.benchmarks.gpu.peers.engine import Engine, Peer, copies
from evidence.benchmarks.gpu.setup import Bench
from evidence.benchmarks.gpu.training import CLIP_NORM, LR
from zenflow import ZenFlowAdamW, ZenFlowConfig

_OURS = "float32 masters and moments, most of them on the host"


class _ZenFlow(Engine):
    """Ours, in release mode, whose optimizer clips."""

    def __init__(self, model: nn.Module, bench: Bench) -> None:
        config = ZenFlowConfig(**bench.options.knobs)
        optimizer = ZenFlowAdamW(
            model.named_parameters(), lr=LR, config=config, max_grad_norm=CLIP_NORM,
            offload_gradients="release",
        )  # fmt: skip
        super().__init__(model, optimizer, config.update_interval)

    def step(self) -> None:
        self.optimizer.step()

    def traffic(self) -> tuple[int, int] | None:
        report = self.optimizer.report
        return None if report is None else (report.d2h_bytes, report.h2d_bytes)

    def weights(self) -> list[Tensor]:
        with self.optimizer.true_weights():
            return copies(self.model.parameters())

    def close(self) -> None:
        self.optimizer.synchronize()
        self.optimizer.close()


class _Fused(Engine):
    """Torch's fused AdamW on the device."""

    def __init__(self, model: nn.Module, *, has_masters: bool) -> None:
        self._fused = FusedAdamW(model, LR, CLIP_NORM, has_masters=has_masters)
        super().__init__(model, self._fused.optimizer)

    def step(self) -> None:
        self._fused.step()

    def weights(self) -> list[Tensor]:
        return copies(self._fused.masters)

    def save(self, folder: Path) -> None:
        super().save(folder)
        torch.save(self._fused.masters, folder / "masters.pt")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        super().load(folder)
        saved = torch.load(folder / "masters.pt", map_location="cpu")
        for master, other in zip(self._fused.masters, saved, strict=True):
            master.copy_(other)


class _Fsdp2(Engine):
    """Shards over one rank, with float32 weights on the host that are stepped there."""

    def __init__(self, model: nn.Module, bench: Bench) -> None:
        from torch.distributed import init_process_group
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        on_gpu = bench.device.type == "cuda"
        self._folder = tempfile.mkdtemp()
        init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=f"file://{self._folder}/store",
            rank=0,
            world_size=1,
        )
        model.float()
        settings: dict[str, Any] = {
            "mesh": init_device_mesh(bench.device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu),
        }
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))

    def close(self) -> None:
        from torch.distributed import destroy_process_group

        destroy_process_group()
        shutil.rmtree(self._folder)


class _TorchAO(Engine):
    """AdamW on the host by torchao, whose gradients leave during backward."""

    def __init__(self, model: nn.Module) -> None:
        from torchao.optim import CPUOffloadOptimizer

        optimizer = CPUOffloadOptimizer(
            model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, lr=LR
        )
        super().__init__(model, optimizer)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        super().load(folder)
        # It copies weights to the host when it is made, so a script loads them before that.
        for param, copy in self.optimizer.param_d2h_map.items():
            copy.copy_(param)


def _bitsandbytes(model: nn.Module, bench: Bench) -> Engine:
    from bitsandbytes.optim import AdamW8bit

    return Engine(model, AdamW8bit(model.parameters(), lr=LR))


def _flashoptim(model: nn.Module, bench: Bench) -> Engine:
    from flashoptim import FlashAdamW

    return Engine(model, FlashAdamW(model.parameters(), lr=LR))


_ZENFLOW = Peer(make=_ZenFlow, state=_OURS, package="zenflow")
ENGINES: Mapping[str, Peer] = {
    "zenflow": _ZENFLOW,
    FUSED: Peer(
        make=lambda model, _: _Fused(model, has_masters=False),
        state="all in bfloat16, on the device",
    ),
    FUSED_MASTERS: Peer(
        make=lambda model, _: _Fused(model, has_masters=True),
        state="float32 masters and moments on the device",
    ),
    **deepspeed.ENGINES,
    "fsdp2, CPU offload": Peer(make=_Fsdp2, state="float32 on the host"),
    "torchao, CPU offload": Peer(
        make=lambda model, _: _TorchAO(model),
        state="bfloat16 on the host; can't clip",
        package="torchao",
        needs_gpu=True,
    ),
    "flashoptim": Peer(
        make=_flashoptim,
        state="masters of 24 bits, moments of 8 bits, on the device",
        package="flashoptim",
        needs_gpu=True,
    ),
    "bitsandbytes, 8 bits": Peer(
        make=_bitsandbytes,
        state="moments of 8 bits on the device, no masters",
        package="bitsandbytes",
    ),
    "zenflow again": _ZENFLOW,
}
"""Engines by name, ours first and last so that a drift of the machine shows."""
