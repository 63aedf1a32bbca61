"""From settings to the objects of a run: device, model, data, optimizer, schedule."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.optim.lr_scheduler import LambdaLR

from experiments.training.parts.data.batches import TrainingData, make_batches, read_source
from experiments.training.parts.data.fingerprint import fingerprint
from experiments.training.parts.data.tokens import TextTokenizer
from experiments.training.parts.memory_check import (
    check_device_memory,
    check_host_memory,
)
from experiments.training.parts.models.chunked_loss import output_layer
from experiments.training.parts.models.named import NamedModel, find_model
from experiments.training.parts.models.pretrained import (
    load_model,
    load_tokenizer,
    recompute_activations,
)
from experiments.training.parts.ranks.cores import Cores, share_cores, told
from experiments.training.parts.ranks.model import shard
from experiments.training.parts.ranks.ranks import ALONE, Ranks
from experiments.training.parts.streams import stream_arguments
from experiments.training.settings.rates import schedule_factor
from experiments.training.settings.training import DEFAULT_STEPS, TrainSettings
from sim.models.workload import Workload
from zenflow.config import ZenFlowConfig
from zenflow.controller import AbstractController
from zenflow.errors import ConfigError, NoRoomError
from zenflow.lanes.copies import PacedLink
from zenflow.optimizer import ZenFlowAdamW
from zenflow.streaming.stream import WeightStream
from zenflow.surface.arguments import default_host_threads
from zenflow.surface.stream_weights import stream_weights

if TYPE_CHECKING:
    from autotune.adviser.adviser import Adviser

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """Everything a run works with, before its optimizer is made."""

    settings: TrainSettings
    config: ZenFlowConfig
    device: torch.device
    found: NamedModel
    model: nn.Module
    tokenizer: TextTokenizer
    data: TrainingData
    fingerprint: Mapping[str, Any] | None
    """Fingerprint of the texts read; None where the data did not come from the settings."""
    steps_per_epoch: int
    total_steps: int
    ranks: Ranks = ALONE
    """Processes that share the run; of several, each has its share of every batch."""
    cores: tuple[Cores, ...] = ()
    """Cores of each rank; none where the run was put together otherwise."""
    stream: WeightStream | None = None
    """Stream of the layers' weights; None where all stay on the device."""
    adviser: Adviser | None = None
    """Source of a tuned run's first knobs; None where the defaults are within the bounds."""

    @property
    def model_bytes(self) -> int:
        """Bytes of the trainable parameters, tied ones counted once."""
        return sum(
            parameter.numel() * parameter.element_size()
            for parameter in self.model.parameters()
            if parameter.requires_grad
        )


def build_setup(
    settings: TrainSettings,
    make_data: Callable[[TextTokenizer], TrainingData] | None = None,
    model: nn.Module | None = None,
    ranks: Ranks = ALONE,
) -> RunSetup:
    """Return the run's device, model and data.

    Args:
        settings: What to do.
        make_data: Makes the batches, in place of those that the settings name.
        model: Model to train; None builds the one that the settings name.
        ranks: Processes that share the run.

    Raises:
        ConfigError: The settings name something that is not there or does not fit together.
    """
    device = choose_device(settings)
    cores = share_cores(ranks, device, binds=settings.bind_cores)
    found = find_model(settings.model)
    use_threads(settings, device, cores.count)
    tokenizer = load_tokenizer(found)
    data_fingerprint = None
    if make_data is None:
        source = read_source(settings)
        data_fingerprint = fingerprint(source)
        data = make_batches(source, tokenizer, settings, ranks)
    else:
        data = make_data(tokenizer)
    if model is None:
        # Our own sizes are initialised twice: by torch, which takes seconds on a CPU, and then by
        # drawing. On the device the first is fast.
        on_device = found.kind == "size" and ranks.parallel != "fsdp" and settings.stream == "no"
        with device if on_device else nullcontext():
            model = load_model(found, settings, tokenizer, data.num_classes)
    model.to(dtype=DTYPES[settings.dtype])
    model.train()
    if settings.chunked_loss:
        if data.task == "classification":
            raise ConfigError(
                "--chunked-loss is for language models, and these texts have classes: leave it out"
            )
        output_layer(model, settings.model)
    if settings.checkpointing:
        recompute_activations(model, settings.model)
    steps_per_epoch = max(1, math.ceil(data.train.per_epoch / settings.grad_accum))
    config, stream = settings.config(steps_per_epoch), None
    if ranks.parallel == "fsdp":
        shard(model, device, ranks)  # layer by layer: no device has to hold the whole model
    elif (streamed := stream_arguments(model, config, device, settings)) is not None:
        stream = _stream(model, device, streamed)
    else:
        model.to(device=device)
    return RunSetup(
        settings=settings,
        config=config,
        device=device,
        found=found,
        model=model,
        tokenizer=tokenizer,
        data=data,
        fingerprint=data_fingerprint,
        steps_per_epoch=steps_per_epoch,
        total_steps=count_steps(settings, steps_per_epoch),
        ranks=ranks,
        cores=tuple(ranks.collect(cores)),
        stream=stream,
    )


def _stream(model: nn.Module, device: torch.device, how: Mapping[str, Any]) -> WeightStream:
    """Let the layers' weights live on the host.

    Args:
        model: The model, on the CPU.
        device: Device that computes.
        how: Further arguments of `stream_weights`.

    Raises:
        ConfigError: The model is not made for that.
        NoRoomError: The machine has too little memory.
    """
    try:
        return stream_weights(model, device, **how)
    except MemoryError as error:
        raise NoRoomError(f"--stream: {error}") from error
    except ValueError as error:
        raise ConfigError(f"--stream: {error}") from error


def choose_device(settings: TrainSettings) -> torch.device:
    """Return the device the settings ask for; ``auto`` is CUDA where there is one.

    Raises:
        ConfigError: The device is not there, or an emulated link is asked for on a real one.
    """
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if name == "cuda" and distributed.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())  # each rank has its own
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {name} needs a CUDA GPU and a torch built for it, and torch "
            f"{torch.__version__} sees none: use --device cpu"
        )
    if device.type == "cuda" and settings.link is not None:
        raise ConfigError(
            "an emulated link stands in for PCIe on a CPU; a GPU has a real one: leave out "
            "--link-gbps, or use --device cpu"
        )
    return device


def use_threads(settings: TrainSettings, device: torch.device, cores: int) -> None:
    """Set torch's threads; a CPU that plays the device leaves one of its cores to the host side.

    An ``OMP_NUM_THREADS`` of fewer threads is respected.
    """
    wanted = settings.device_threads
    if wanted is None and device.type == "cpu":
        wanted = max(1, cores - 1)
        limit = os.environ.get("OMP_NUM_THREADS", "")
        if limit.isdigit() and int(limit) > 0:
            wanted = min(wanted, int(limit))
    if wanted is not None:
        torch.set_num_threads(wanted)


def count_steps(settings: TrainSettings, steps_per_epoch: int) -> int:
    """Return how many optimizer steps the run takes."""
    if settings.epochs is not None:
        return max(1, round(settings.epochs * steps_per_epoch))
    return DEFAULT_STEPS if settings.steps is None else settings.steps


def workload_of(setup: RunSetup) -> Workload:
    """Return the simulator's workload of a run's model and batch.

    Raises:
        ConfigError: The simulator does not know the model's family.
    """
    config: Any = setup.model.config
    of_run = setup.settings.workload({"model_type": "llama", **config.to_dict()})
    return replace(of_run, batch_size=of_run.batch_size // setup.ranks.count)


def make_optimizer(setup: RunSetup, controller: AbstractController | None = None) -> ZenFlowAdamW:
    """Return the optimizer: matrices decay, vectors (norms, biases) don't.

    Args:
        setup: The run.
        controller: Changes the knobs while the run goes on; it may ask for spans of more steps.

    Raises:
        ConfigError: Host or device have not as much memory.
    """
    settings = setup.settings
    if settings.memory_check:
        on_cpu = setup.device.type == "cpu"
        go_home = settings.grad_accum > 1 and (setup.stream is not None or settings.offload_sums)
        check_host_memory(
            setup.model,
            setup.config,
            on_cpu=on_cpu,
            on_drive=settings.state_dir is not None,
            ranks=setup.ranks,
            beside=setup.model_bytes if go_home else 0,
        )
        if not on_cpu:
            check_device_memory(setup.model, setup.config, setup.device, setup.ranks)
    trainable = [item for item in setup.model.named_parameters() if item[1].requires_grad]
    groups = [
        {
            "params": [p for _, p in trainable if p.ndim >= 2],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for _, p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    release, is_ddp = settings.gradients == "release", setup.ranks.parallel == "ddp"
    wanted = 0 if controller is None else controller.timeline_steps
    with _naming_folder(settings.state_dir):
        return ZenFlowAdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            config=setup.config,
            offload_gradients="release" if release else "keep",
            max_grad_norm=settings.max_grad_norm,
            # Under DDP the last pass alone averages gradients.
            accumulation_steps=settings.grad_accum if release and not is_ddp else 1,
            offload_sums=settings.offload_sums,
            process_group=distributed.group.WORLD if is_ddp else None,
            link=None if settings.link is None else PacedLink(*settings.link),
            host_threads=settings.host_threads or _host_threads(setup),
            controller=controller,
            timeline_steps=max(settings.timeline_steps, wanted),
            state_dir=settings.state_dir,
            drive_tbw=settings.drive_tbw,
        )


@contextmanager
def _naming_folder(state_dir: str | None) -> Iterator[None]:
    """Let a folder that can't have the states be a mistake in the command."""
    try:
        yield
    except ValueError as error:
        if state_dir is None or isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--state-dir: {error}") from error


def _host_threads(setup: RunSetup) -> int | None:
    """Return the threads that suit this rank's cores; None leaves them to the optimizer."""
    return default_host_threads(setup.cores[setup.ranks.rank].count) if setup.cores else None


def make_schedule(
    optimizer: torch.optim.Optimizer,
    settings: TrainSettings,
    total_steps: int,
    rising: int | None = None,
) -> LambdaLR:
    """Return the scheduler of a run's learning rate."""
    return LambdaLR(optimizer, lambda done: schedule_factor(settings, total_steps, done, rising))


def describe(setup: RunSetup) -> str:
    """Return the line on the model and data of the training that begins."""
    settings = setup.settings
    name = Path(settings.model).name if setup.found.kind != "hub" else settings.model
    made_by = "experiments.training.parts.models.decoder" if setup.found.own else "transformers"
    about = (
        f"model {name} ({made_by}, {settings.dtype}) on {setup.data.name}, "
        f"{setup.total_steps} steps of {settings.batch_size * settings.grad_accum} x "
        f"{settings.sequence} tokens on {setup.device}"
    )
    if setup.config.is_compact:
        about += ", with compact host state: AdamW within rounding"
    ranks = setup.ranks
    if ranks.are_several:
        about += f", shared by {ranks.count} ranks ({ranks.parallel})\n{told(setup.cores)}"
    return about
