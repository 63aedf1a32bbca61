"""Request: a machine, a workload and a strategy as a person names them.

Each field is a flag of the commands that predict, a key of a sweep's record and, unless it says
otherwise, an axis of a sweep. All three follow from the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from experiments.request import words
from experiments.training.settings.field import setting, settings_of
from experiments.training.settings.training import DTYPES, GRADIENT_MODES
from sim.models.kernels import KERNELS
from sim.models.recomputation import Recomputation
from sim.models.workload import ATTENTIONS, LOOP, LOSSES, TRAINERS
from sim.schedules.streams import Streams
from sim.schedules.systems.lora import TARGETS
from sim.simulate import STRATEGIES, Strategy
from sim.timing.division import PARALLELS
from zenflow.errors import ConfigError

MODEL, MACHINE, BATCH, COMPUTE, STRATEGY = "Model", "Machine", "Batch", "Compute", "Strategy"
"""Parts of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A machine, a workload and a strategy; None leaves a choice to what is predicted."""

    model: str = setting("", section=MODEL, parse=words.model)
    """Named model (llama-2-7b, Qwen/Qwen2.5-0.5B), size of `zenflow train`, config.json, or
    directory with one."""
    gpu: str | None = setting(None, section=MACHINE, parse=words.part("device"))
    """Device by name (rtx4090); the rest is as in its usual machine."""
    machine: str | None = setting(
        None, section=MACHINE, parse=words.machine, aliases=("hardware",)
    )
    """Whole machine by name, such as dgx-a100-80, or a profile's JSON file."""
    profile: Path | str | None = setting(None, section=MACHINE, is_axis=False)  # noqa: RUF009
    """File that `zenflow calibrate` wrote."""
    num_gpus: int | None = setting(None, section=MACHINE, parse=words.count)
    """Number of devices of a host that train together; None is all that the machine has."""
    num_hosts: int | None = setting(None, section=MACHINE, parse=words.count)
    """Number of hosts that train together, all alike; None is all that the machine has."""
    host: str | None = setting(None, section=MACHINE, parse=words.part("host"))
    """Host by name, such as 2x-epyc-7742, in place of the machine's own."""
    host_ram: float | None = setting(None, section=MACHINE, unit=words.GIB)
    """Memory of the host, in place of its own.

    The field has bytes, a flag and an axis GiB.
    """
    host_threads: int | None = setting(None, section=MACHINE, parse=words.count)
    """Number of threads of each device's process; None is its share of the cores. `torchrun`
    gives PyTorch and DeepSpeed 1, unless OMP_NUM_THREADS says more."""
    link: str | None = setting(None, section=MACHINE, parse=words.part("link"))
    """Link to the host by name, such as pcie4-x16."""
    fabric: str | None = setting(None, section=MACHINE, parse=words.part("fabric"))
    """Fabric between devices by name, such as nvlink4."""
    network: str | None = setting(None, section=MACHINE, parse=words.part("network"))
    """Network between hosts by name, such as 8x-infiniband-ndr."""
    nvme: str | None = setting(None, section=MACHINE, parse=words.part("nvme", "none"))
    """NVMe drives by name, such as 4x-gen4, or none."""
    batch_size: int = setting(4, section=BATCH)
    """Number of sequences in a micro-batch on each device."""
    sequence: int = setting(1024, section=BATCH)
    """Number of tokens in a sequence."""
    grad_accum: int = setting(1, section=BATCH)
    """Number of micro-batches in a step."""
    dtype: str | None = setting(None, section=COMPUTE, choices=DTYPES)
    """Precision of the parameters; None is bfloat16 where the device has it."""
    checkpointing: Recomputation = setting(  # noqa: RUF009
        False, section=COMPUTE, parse=words.recomputation, bare="yes", metavar="[SHARE|op]"
    )
    """Layers whose activations backward recomputes: yes, no, a share of them evenly spread (1/2,
    20/32), or op. The flag alone is yes. Every second layer is 1/2. Of each layer op is all but
    attention and every second product, as torchtitan's option."""
    attention: str = setting("native", section=COMPUTE, choices=ATTENTIONS)
    """Kernels of attention. Native ones are those that today's PyTorch picks: cuDNN's on Hopper
    and the B200, fused ones elsewhere. They are as fast as FlashAttention-3 and 4. Fused ones are
    FlashAttention-2, and PyTorch's with an older cuDNN. Eager ones keep scores for backward.
    The first FlashAttention (flash1), of before July 2023 and of PyTorch 2.0 and 2.1, is half as
    fast."""
    loss: str = setting("tokens", section=COMPUTE, choices=LOSSES)
    """Loss behind the last layer: cross entropy of every token's logits, of logits that are never
    whole (chunks: `zenflow train --chunked-loss`), their sum, or a few classes of a sequence with
    no output layer over the vocabulary."""
    offload_activations: bool = setting(False, section=COMPUTE)
    """Whether activations wait on the host for backward."""
    kernels: str | None = setting(None, section=COMPUTE, choices=tuple(KERNELS))
    """Kernels of norms, rotary positions, gates and loss: transformers' own, Liger's, or compiled
    ones; None is eager."""
    trainer: str = setting(LOOP, section=COMPUTE, choices=TRAINERS)
    """Code around the passes: a plain loop such as `zenflow train`'s, transformers' Trainer, or
    TRL's SFTTrainer as in `zenflow finetune`. Trainers take milliseconds of every micro-batch, and
    more with adapters: much of a short step."""
    from_trace: Path | str | None = setting(None, section=COMPUTE, is_axis=False)  # noqa: RUF009
    """Trace that torch.profiler exported of your own training without offloading (.gz too), from
    which compute is taken. Batch, micro-batches and checkpointing default to the trace's."""
    traced_batch: tuple[int, int] | None = setting(
        None, section=COMPUTE, parse=words.batch, metavar="SEQUENCESxTOKENS", is_axis=False
    )
    """Micro-batch of a trace without shapes: sequences, and tokens of each."""
    strategy: str = setting("zenflow", section=STRATEGY, known=STRATEGIES)
    """Strategy: a preset of ours, or another project's system."""
    gradients: str = setting("release", section=STRATEGY, choices=GRADIENT_MODES)
    """Moment at which gradients leave: in backward, or in step()."""
    parallel: str = setting("ddp", section=STRATEGY, choices=PARALLELS)
    """Way in which devices share a model: weights whole on each, or sharded as by FSDP2."""
    reshard_after_forward: bool = setting(True, section=STRATEGY)
    """Whether sharded weights are dropped behind forward, and gathered again."""
    stream: bool = setting(False, section=STRATEGY)
    """Whether the layers' weights live on the host and visit the device, as by zenflow train
    --stream."""
    resident_layers: int = setting(0, section=STRATEGY)
    """Number of layers that stay on the device under --stream."""
    state_on_drive: bool = setting(False, section=STRATEGY)
    """Whether the host's AdamW states are on the machine's drives, as by zenflow train
    --state-dir."""
    float32_master: bool | None = setting(None, section=STRATEGY)
    """Whether other systems' AdamW has float32 weights beside 16-bit ones; None is each system's
    own. Without them all of it has 16 bits, as in pure bfloat16 training. They are an option of
    ddp, fsdp2, fsdp2_offload, superoffload, adamw_8bit and adamw_4bit."""
    lora_rank: int | None = setting(None, section=STRATEGY, parse=words.count)
    """Rank of adapters, of lora and qlora; None is 16."""
    lora_targets: str | None = setting(None, section=STRATEGY, known=TARGETS)
    """Matrices that get adapters, of lora and qlora: all of a layer, or attention's; None is
    all."""

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> Request:
        """Return the request of a command's flags; None leaves a field at its default."""
        given = {item.name: flags.get(item.name) for item in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def options(self) -> dict[str, Any]:
        """Options of another project's system that are given."""
        given = {name: getattr(self, name) for name in SYSTEM_OPTIONS}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def work(self) -> Request:
        """Machine and workload alone, under the default strategy."""
        return replace(self, **DEFAULT_STRATEGY)

    def to_strategy(self, **knobs: Any) -> Strategy:
        """Return the strategy with settings of the update rule.

        Raises:
            ConfigError: There is no such strategy, or it lacks an option or a knob.
        """
        return Strategy.of(
            self.strategy,
            releases=self.gradients == "release",
            parallel=self.parallel,
            reshards=self.reshard_after_forward,
            streams=self._streams(),
            state_on_drive=self.state_on_drive,
            **{**self.options, **knobs},
        )

    def _streams(self) -> Streams | None:
        """Return how weights visit the device; None where all stay there.

        Raises:
            ConfigError: Layers are to stay where none is streamed, or fewer than none.
        """
        if self.stream:
            return Streams(resident_layers=self.resident_layers)
        if self.resident_layers:
            raise ConfigError(
                "resident_layers is of streamed models: give --stream too, or leave it out"
            )
        return None


SYSTEM_OPTIONS = ("float32_master", "lora_rank", "lora_targets")
"""Fields that are options of other systems, which are no settings of the update rule."""


DEFAULT_STRATEGY: Mapping[str, Any] = {
    item.name: item.default for item in settings_of(Request).values() if item.section == STRATEGY
}
"""Fields of the strategy with the values where nobody says one."""
