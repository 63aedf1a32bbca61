"""From a request to its workload, and what is odd about model and trace."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experiments.request.request import Request
from experiments.training.settings.sizes import MODEL_SIZES
from experiments.training.settings.training import DTYPES
from sim.models.workload import LOOP, MOST_MICRO_BATCHES
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from sim.hardware.profile import HardwareProfile
    from sim.models.workload import Workload
    from sim.traced.step import TracedStep


def traced_of(request: Request) -> TracedStep | None:
    """Return the traced step that times are taken from; None where shapes alone say them.

    Raises:
        ConfigError: The trace can't be read, does not say of which batch it is, or other kernels
            or another trainer are asked for.
    """
    if request.from_trace is None:
        if request.traced_batch is not None:
            raise ConfigError("--traced-batch says of which batch a trace is: give --from-trace")
        return None
    if request.kernels not in (None, "eager"):
        raise ConfigError(
            f"{request.from_trace} has the kernels that ran, so --kernels {request.kernels} would "
            "change nothing: leave it out, or trace with those kernels"
        )
    if request.trainer != LOOP:
        raise ConfigError(
            f"{request.from_trace} has the time of the code around its passes, so --trainer "
            f"{request.trainer} would count that twice: leave it out, or trace with that trainer"
        )
    from sim.traced.step import read_step

    step = read_step(str(request.from_trace))
    if request.traced_batch is not None:
        return step.of_batch(*request.traced_batch)
    if step.batch_size is None or step.sequence is None:
        raise ConfigError(
            f"{request.from_trace} has no shapes of token ids: profile with record_shapes=True, "
            "or give --traced-batch 4x1024, say, for micro-batches of 4 sequences of 1024 tokens"
        )
    return step


def as_traced(request: Request, given: Collection[str]) -> Request:
    """Return a request for the traced step's own work, but for what was given otherwise.

    Raises:
        ConfigError: As `traced_of`.
    """
    step = traced_of(request)
    if step is None:
        return request
    own: dict[str, Any] = {
        "batch_size": step.batch_size, "sequence": step.sequence,
        "grad_accum": step.micro_batches, "checkpointing": step.recomputes,
        "dtype": step.dtype,
    }  # fmt: skip
    return replace(request, **{k: v for k, v in own.items() if k not in given})


def notes_on(workload: Workload, hardware: HardwareProfile) -> list[str]:
    """Return sentences on a model's file, and on facts that a prediction takes from a trace."""
    notes = [f"{workload.name}: {note}" for note in workload.notes]
    if workload.stored_as is not None:
        notes.append(
            f"the file of {workload.name} has {workload.stored_as} weights "
            f"(quantization_config); predicted with all of them in {workload.dtype}, as "
            "full fine-tuning trains them: dequantised"
        )
    step = workload.traced
    if step is None:
        return notes
    from sim.timing.traced import is_of, peak_share

    of = f"{step.path} ({step.steps} steps of {step.step_seconds * 1e3:.1f} ms)"
    if is_of(step, hardware.device):
        first = f"compute as traced in {of}"
    else:
        first = (
            f"compute from {of}, scaled from {step.device} to {hardware.device.name} by the "
            "table's rates, so its range is wider"
        )
    share = peak_share(step, workload, hardware.device)
    return [*notes, first, *_notes_on_step(step, workload, share)]


def _notes_on_step(step: TracedStep, workload: Workload, share: float | None) -> Iterator[str]:
    """Yield warnings about a traced step."""
    if step.num_params is None:
        makes = "" if share is None else f"; if so, it reaches {share:.0%} of the device's peak"
        yield (
            f"the trace has no shapes: that it is of {workload.name} and of {step.batch_size} x "
            f"{step.sequence} tokens was not checked{makes}"
        )
    if len(set(step.batches)) > 1:
        least, most = (f"{b} x {t}" for b, t in step.extremes)
        yield (
            f"traced micro-batches have {least} to {most} tokens; predicted are "
            f"{workload.batch_size} x {workload.sequence}, memory too"
        )
    if not step.is_adamw:
        yield (
            f"the traced optimizer is {' and '.join(step.optimizers)}: AdamW's step is modelled "
            "in its place"
        )
    if step.evaluations:
        yield (
            f"left out of the trace, for a forward more than in the others: {step.evaluations} of "
            f"{step.evaluations + step.steps} steps"
        )


def notes_on_positions(request: Request) -> list[str]:
    """Return in a sentence where sequences are longer than the model was made for.

    Raises:
        ConfigError: Its learned positions are fewer.
    """
    from sim.models.positions import check_sequence

    return check_sequence(*_model(request.model), request.sequence)


def workload_of(request: Request, hardware: HardwareProfile) -> Workload:
    """Return the workload.

    Raises:
        ConfigError: The model is unknown or lacks a field, a number breaks its rule, sequences
            are longer than its learned positions, or the trace is of something else.
    """
    from sim.models.workload import Workload

    name, config = _model(request.model)
    notes_on_positions(request)
    _check_size(request)
    peaks = hardware.device.flops
    usable = next(
        (name for name in ("bfloat16", "float16", "float32") if name in peaks), DTYPES[0]
    )
    workload = Workload.of_config(
        name,
        config,
        batch_size=request.batch_size,
        sequence=request.sequence,
        accumulation=request.grad_accum,
        dtype=request.dtype or usable,
        checkpointing=request.checkpointing,
        attention=request.attention,
        loss=request.loss,
        offloads_activations=request.offload_activations,
        kernels=request.kernels or "eager",
        trainer=request.trainer,
        traced=traced_of(request),
    )
    if workload.traced is not None:
        from sim.timing.traced import check_rate

        is_plain = workload.loss != "classes" and all(p.active == 1 for p in workload.parameters)
        tensors = len(workload.parameters) if is_plain else None
        workload.traced.check(name, workload.num_params, tensors)
        check_rate(workload.traced, workload, hardware.device)
    return workload


_MOST = {"batch_size": 65_536, "sequence": 16_777_216, "grad_accum": MOST_MICRO_BATCHES}
"""Values beyond which nobody trains, and a prediction would take minutes."""


def _check_size(request: Request) -> None:
    """Refuse a step that is larger than any.

    Raises:
        ConfigError: A value is beyond `_MOST`.
    """
    for name, most in _MOST.items():
        value = getattr(request, name)
        if value > most:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} must be at most {most:,}, got {value:,}: lower it")


def _model(name: str) -> tuple[str, dict[str, Any]]:
    from sim.models.table import find_model

    size = MODEL_SIZES.get(name)
    if size is not None:
        return name, size.config()
    return find_model(name)
