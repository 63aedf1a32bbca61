"""ZenFlowAdamW: the engine as a torch optimizer.

This module is the surface: each method checks and hands on. docs/engine.md tells the life of a
gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.layout import SplitParam
from zenflow.columns.local import local_of
from zenflow.config import ZenFlowConfig
from zenflow.controller import AbstractController
from zenflow.device.kernels.choice import KernelChoice
from zenflow.errors import GradientError
from zenflow.host.signals import whole
from zenflow.knobs import Knobs
from zenflow.lanes.copies import PacedLink
from zenflow.report import MemoryPlan, StepReport
from zenflow.rule.adamw import Hyper
from zenflow.step.device_step import measure_in_place, resident_grads_of, squared_norm
from zenflow.step.engine import Engine
from zenflow.step.options import EngineOptions
from zenflow.surface.arguments import (
    check_gradients,
    check_group,
    check_norm,
    check_settings,
    checked_config,
    note_unused,
)
from zenflow.surface.assembly import add_residents, start_engine
from zenflow.surface.data_parallel import Averages
from zenflow.surface.drive import tell_of_wear
from zenflow.surface.gradient_hooks import GradientSource
from zenflow.surface.groups import Groups
from zenflow.surface.life import Life, Lifetime
from zenflow.surface.memory_plan import plan_memory, tell_of_memory
from zenflow.surface.state.checkpoints import Checkpoints
from zenflow.surface.state.checks import ENTRY
from zenflow.surface.weights import Weights
from zenflow.trace.timeline import Timeline

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel


class ZenFlowAdamW(torch.optim.Optimizer):
    """AdamW whose less important columns are updated by the host, behind the device's back.

    AdamW is that of Loshchilov and Hutter (arXiv 1711.05101), in torch's order of operations. What
    the host updates, and when, is the rule of ZenFlow (arXiv 2505.12242) as `config` has it.

    Use it as any torch optimizer, in one of two modes:

    - *keep* (`offload_gradients="keep"`, the default): gradients stay in `.grad` until `step()`;
      clip, unscale or change them as you like.
    - *release* (`offload_gradients="release"`): each gradient leaves for the host as backward
      finishes it, and its memory is free at once. Reading a released `.grad` raises
      `GradientError`; `max_grad_norm` clips.

    In both, `step()` consumes the gradients: afterwards `.grad` is None.

    Examples:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = ZenFlowAdamW(
        ...     model.parameters(), lr=1e-3, offload_gradients="release", max_grad_norm=1.0
        ... )
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.report.step
        1
        >>> optimizer.close()
    """

    config: ZenFlowConfig
    """Settings of the update rule."""
    releases_gradients: bool
    """Whether gradients leave during backward."""
    max_grad_norm: float | None
    """L2 norm that `step()` clips all gradients to together; None does not clip."""
    accumulation_steps: int
    """Number of backward passes per step."""
    memory: MemoryPlan
    """Bytes on host and device, known before the first step; planned anew when k changes."""

    @torch.inference_mode(False)
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        config: ZenFlowConfig | None = None,
        offload_gradients: Literal["keep", "release"] = "keep",
        max_grad_norm: float | None = None,
        accumulation_steps: int = 1,
        offload_sums: bool = False,
        process_group: ProcessGroup | None = None,
        controller: AbstractController | None = None,
        link: PacedLink | None = None,
        host_threads: int | None = None,
        kernels: KernelChoice = "auto",
        timeline_steps: int = 0,
        wait_timeout: float = 600.0,
        state_dir: str | PathLike[str] | None = None,
        drive_tbw: float | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        """Place the parameters, and allocate the host's and the device's state.

        Args:
            params: Parameters, named parameters, or groups of either, as in torch.
            lr: Learning rate, at least 0.
            betas: Decay of first and second moments, each in [0, 1).
            eps: Addend of the denominator, at least 0.
            weight_decay: Decoupled weight decay, at least 0.
            config: Settings of the update rule; None for the preset "zenflow".
            offload_gradients: The mode, "keep" or "release".
            max_grad_norm: L2 norm that `step()` clips all gradients to together, in both modes;
                None does not clip.
            accumulation_steps: Backward passes per step; release mode must know it, keep mode
                needs nothing.
            offload_sums: Whether sums of micro-batches' gradients wait on the host in release
                mode. Otherwise they take the device's memory, but for weights that are streamed.
            process_group: Data-parallel ranks, whose gradients `DistributedDataParallel` averages
                and whose hosts share the work: each has its part of the host's state. All of them
                make the optimizer, take its steps and show its weights together. None lets every
                rank's host do all of the work.
            controller: Chooses the knobs step by step; None keeps the config's.
            link: Emulated bandwidths, on a CPU only.
            host_threads: Number of threads that work on the host's rows; None leaves some cores
                to the other threads.
            kernels: Kernels of the device's pass over gradients and weights: "triton" or "torch".
                Results differ by rounding. "auto" takes Triton's on a GPU that runs them.
            timeline_steps: Number of last steps whose spans are kept; 0 for none.
            wait_timeout: Seconds after which a wait is an error.
            state_dir: Folder on a local drive for the host's states: AdamW's weights and moments.
                It is empty, or has the checkpoint that will be loaded. None keeps them in memory.
            drive_tbw: Terabytes that the drive's maker warrants to be written, for the wear in the
                log and in reports.
            foreach: Of no effect, like `fused`. Recipes for torch's AdamW have them, where they
                choose among its implementations.
            fused: Of no effect.

        Raises:
            TypeError: The config is no ``ZenFlowConfig``.
            ValueError: An argument breaks its rule.
            CheckpointError: The checkpoint in `state_dir` is damaged.
            MemoryError: The host has too little memory.
            RuntimeError: The system gives too few threads.
        """
        self.config = checked_config(config)
        note_unused(foreach=foreach, fused=fused)
        check_settings(lr, betas, eps, weight_decay)
        check_gradients(offload_gradients, max_grad_norm)
        self.releases_gradients = offload_gradients == "release"
        self.max_grad_norm = max_grad_norm
        options = EngineOptions(
            releases=self.releases_gradients,
            accumulation_steps=accumulation_steps,
            offload_sums=offload_sums,
            link=link,
            host_threads=host_threads,
            kernels=kernels,
            timeline_steps=timeline_steps,
            wait_timeout=wait_timeout,
            state_dir=state_dir,
            drive_tbw=drive_tbw,
        )
        self._engine: Engine | None = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        # Tools that rearrange states go by the keys of live groups; a saved one has a text here.
        self.param_groups[0][ENTRY] = ""
        self.accumulation_steps = accumulation_steps
        # A GradScaler then leaves unscaling to step(), so that float16 parameters work too. In
        # release mode it looks at gradients that have left, and these say what to do.
        self._step_supports_amp_scaling = True
        self._groups = Groups(self.param_groups)
        self._engine, places = start_engine(
            self._groups.taken,
            self.config,
            options=options,
            process_group=process_group,
            controller=controller,
            settings={
                "offload_gradients": self.releases_gradients,
                "max_grad_norm": self.max_grad_norm,
                "accumulation_steps": accumulation_steps,
            },
        )
        self._take_up(self._engine, places)
        if self.releases_gradients and process_group is None:
            self._source.register_hooks(weakref.WeakMethod(self._check_backward))

    def _take_up(self, engine: Engine, places: Sequence[SplitParam | Resident]) -> None:
        """Make the parts around a new engine, given every trainable parameter's place."""
        self._places = {place.param: place for place in places}
        frozen = [p for group in self._groups.given for p in group if not p.requires_grad]
        self._life = Lifetime(engine.process)
        self._source = GradientSource(engine, places, frozen=frozen)
        self._weights = Weights(engine, self._source, self._life)
        self._checkpoints = Checkpoints(
            engine, self._source, self._weights, self._places, self._life
        )
        group = engine.layout.shares.group
        self._averages = Averages(group, self._source, self._places, self._life)
        self._finalizer = weakref.finalize(self, _end, engine, self._source, self._life)
        self.register_state_dict_post_hook(_complete_state, prepend=True)
        self.memory = plan_memory(engine)
        tell_of_memory(self.memory, engine)
        tell_of_wear(engine)

    @property
    def _running(self) -> Engine:
        assert self._engine is not None
        self._engine.process.check()
        return self._engine

    @property
    def _is_here(self) -> bool:
        """Whether this is the process that has the engine's threads, and no fork of it."""
        return self._engine is None or self._engine.process.is_here

    def _check_no_gradients(self, call: str) -> None:
        """Refuse a call that the optimizer's life does not allow, or one in mid-step."""
        self._life.check(call)
        self._source.drop_missing()
        if self._running.has_gradients:
            raise GradientError(
                f"{call} between backward and step(): gradients have left for the host. Call "
                "step() or optimizer.zero_grad() first"
            )

    def _fail(self, error: BaseException) -> None:
        """Remember the failure of a step that was broken off half done: no call may follow."""
        self._source.abandon()
        self._life.fail(error)

    # ---- parameters -------------------------------------------------------------------------

    @whole
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, to unfreeze them in mid-run, say.

        Parameters added to a finished optimizer stay on the device with all their state: host
        memory is laid out once. Add the same groups before loading a checkpoint.

        Raises:
            GradientError: Called between backward and step() in release mode.
            ValueError: A setting or a parameter of the group breaks its rule.
        """
        engine = self._engine
        if engine is not None:
            self._check_no_gradients("add_param_group()")
            self._groups.follow(self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            added = [] if engine is None else add_residents(engine, self.param_groups)
        except BaseException:
            self.param_groups.pop()
            raise
        if engine is not None:
            self._groups.add(self.param_groups)
            self._places |= {place.param: place for place in added}
            self._source.add(added, [p for p in group["params"] if not p.requires_grad])
            self.memory = plan_memory(engine)

    # ---- gradients --------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, with those released since the last step."""
        if self._engine is not None:
            self._forget_gradients()
        super().zero_grad(set_to_none)

    @whole
    def _forget_gradients(self) -> None:
        self._life.check_process()
        self._max_norm_of_step = None
        self._source.forget()

    def restart_accumulation(self) -> None:
        """Count this step's backward passes anew, and keep the gradients of those so far.

        For data that end in mid-step and begin again, without a `step` for the rest.

        Raises:
            GradientError: All `accumulation_steps` passes are over, and gradients have left.
        """
        self._check_no_gradients("restart_accumulation()")
        self._source.restart_count()

    @whole
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Let `step()` clip this step's gradients to a global norm; return the norm before.

        `step()` applies the factor in float32, so that low-precision gradients are clipped without
        being rounded; `.grad` itself stays as it is. In this step `max_norm` replaces
        `max_grad_norm`. Of several calls the smallest norm counts.

        Args:
            max_norm: Largest L2 norm of the gradients without a loss scale: `step()` undoes the
                scale first, whether a `GradScaler` has unscaled `.grad` before or not.

        Returns:
            The L2 norm over all gradients as they are in `.grad`, shape (), float32.

        Raises:
            ValueError: The norm is no positive number.
        """
        check_norm(max_norm, "max_norm", "float('inf') returns the norm and does not clip")
        engine = self._running
        self._source.drop_missing()
        if self.releases_gradients:
            self._averages.check()
            engine.use([Hyper.of(group) for group in self.param_groups], 1.0)
            self._source.take_rest()
            grads = resident_grads_of(engine.layout, engine.complete_step().gradients)
        else:
            measure_in_place(engine.layout, engine.device)
            residents = [place.param.grad for place in engine.layout.residents]
            grads = [local_of(grad).float() for grad in residents if grad is not None]
        earlier = self._max_norm_of_step
        self._max_norm_of_step = max_norm if earlier is None else min(earlier, max_norm)
        return squared_norm(engine.layout, grads).sqrt()

    # ---- the step ---------------------------------------------------------------------------

    def _check_backward(self) -> None:
        self._check_can_step("backward")

    def _check_can_step(self, call: str) -> None:
        """Refuse a backward or a step where none can be taken; hooks ask for each parameter."""
        self._life.check(call)
        if self._life.now is not Life.TRAINING:
            self._settle()
        self._groups.follow(self.param_groups)  # before backward uses their settings

    @whole
    def _settle(self) -> None:
        self._weights.settle()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step of the update rule with the gradients of this backward.

        Raises:
            GradientError: A gradient is not finite, not of its parameter's kind, or not the
                average over the ranks of a process_group.
            WorkerError: A copy or the host's update failed; its cause is chained.
            DeadlineError: Something took longer than `wait_timeout`.
        """
        self._check_can_step("step()")
        self._checkpoints.check_state_is_there(self.state)
        self._groups.check_same_params(self.param_groups)
        self._source.check_untouched()
        self._source.check_hooks()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._averages.check()
        inverse_scale = self._inverse_scale()
        if inverse_scale is not None:  # else it overflowed: no step, as with torch's optimizers
            self._take_step(inverse_scale)
        return loss

    @whole
    @torch.inference_mode(False)  # memory that a step makes outlives a block of that mode
    def _take_step(self, inverse_scale: float) -> None:
        engine = self._running
        self._source.drop_missing()
        hypers = [Hyper.of(group) for group in self.param_groups]
        try:
            engine.use(hypers, inverse_scale)
            self._source.take_rest()
            self._source.warn_of_nothing()
            engine.finish_step(self._max_norm())
        except BaseException as error:
            if isinstance(error, GradientError) and not error.is_late:
                self._forget_gradients()
            else:
                self._fail(error)
            raise
        if not self._checkpoints.is_up_to_date:
            if self._checkpoints.is_filled:  # k has changed, and so have tensors
                self.memory = plan_memory(engine)
            self._checkpoints.fill(self.state)
        self._max_norm_of_step = None
        self._source.consume()
        self._source.count_change()

    _max_norm_of_step: float | None = None

    def _max_norm(self) -> float | None:
        of_step = self._max_norm_of_step
        return self.max_grad_norm if of_step is None else of_step

    def _inverse_scale(self) -> float | None:
        """Return 1 / loss scale, from the GradScaler; None if the scaler found an overflow."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:
            return None
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else 1.0 / float(scale)

    @whole
    def synchronize(self) -> None:
        """Wait until the host has done all its work so far; `report` is then of the last step.

        Raises:
            GradientError: The gradient norm of the last step is not finite, which a GPU tells only
                now; every later call says so too, until a checkpoint is loaded.
            WorkerError: A copy or the host's update failed.
        """
        self._life.check("synchronize()")
        self._running.drain()
        try:
            self._running.reporter.resolve()
        except GradientError as error:
            self._fail(error)
            raise

    # ---- several ranks ----------------------------------------------------------------------

    def release_from(self, model: DistributedDataParallel) -> None:
        """Take gradients in backward, as their averages over the model's ranks come in.

        For release mode with a `process_group`: every rank calls it before the first backward. The
        optimizer's hook takes the place of the model's communication hook.

        Args:
            model: Module that averages the gradients of all of this optimizer's parameters.

        Raises:
            ValueError: The optimizer has another mode or no group, or the model has other ranks or
                leaves some parameters out.
            RuntimeError: The model has a communication hook already.
        """
        self._life.check("release_from()")
        self._averages.release_from(model, weakref.WeakMethod(self._check_backward))

    # ---- weights ----------------------------------------------------------------------------

    @whole
    def eval(self) -> None:
        """Put the true weights on the device: for evaluation, saving and export.

        While training, deferred weights on the device are the host's of some steps ago, moved on
        by momentum and by the gradients since. `eval` uploads the host's masters; `train` restores
        the weights of training, bit for bit.

        Raises:
            GradientError: Called between backward and step() in release mode, or the gradient norm
                of the last step is not finite.
            RuntimeError: Somebody else has changed the weights, which `eval` would undo.
        """
        self._check_no_gradients("eval()")
        self._weights.settle()
        is_shown = self._life.now is Life.SHOWN
        if not is_shown:
            self._source.check_untouched()
        self.synchronize()
        if not is_shown:  # else they are, or an average is, that was swapped for them
            self._weights.show()

    @whole
    def train(self) -> None:
        """Put the weights of training back; without `eval` nothing changes.

        Raises:
            RuntimeError: Somebody has changed the weights since `eval`.
        """
        self._life.check_process()
        if self._life.now is Life.SHOWN:
            self._weights.hide()

    @contextmanager
    def true_weights(self) -> Iterator[None]:
        """Show the true weights in a `with` block: `eval` at its begin, `train` at its end.

        Inside another such block, or after `eval`, nothing changes.
        """
        were_shown = self._life.now is Life.SHOWN
        self.eval()
        try:
            yield
        finally:
            if not were_shown and self._is_here:  # a fork that ends inside of it has no say
                self.train()

    @whole
    def adopt_weights(self) -> None:
        """Take the model's present weights for the true ones, after others were loaded into it.

        Moments and step counts stay. Gradients that the host has taken in are applied to the
        moments. Updates in flight are dropped.

        Raises:
            GradientError: Called between backward and step() in release mode.
        """
        self._check_no_gradients("adopt_weights()")
        self._weights.check_states()
        self.synchronize()
        self._weights.adopt()

    # ---- states -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the exact state, at any step: mid-window, with updates in flight, in eval mode.

        It has torch's keys, and one more, "zenflow", in the first parameter group. Before the
        first step it has no tensors. Tensors are views of the live state, as in torch: save or
        copy them before the next backward. States in `state_dir` become a checkpoint there, which
        is whole until the next call, and to which the state refers: see `portable_states`.

        Raises:
            GradientError: Called between backward and step() in release mode, or the gradient norm
                of the last step is not finite: a state that may hold it is not given away.
            WorkerError: A step was broken off half done.
        """
        self._check_no_gradients("state_dict()")
        self.synchronize()
        self._checkpoints.fill(self.state)
        return super().state_dict()

    @contextmanager
    def compact_states(self) -> Iterator[None]:
        """Let `state_dict` leave out tensors that follow from others, for files loaded whole.

            with optimizer.compact_states():
                torch.save(optimizer.state_dict(), "optimizer.pt")

        `load_state_dict` takes up either kind, with the same bits. A compact state's tensors
        differ from step to step, so `torch.distributed.checkpoint`, which loads in place, needs
        full ones. Where ranks share parameters or the host's work, all states are full.
        """
        self._checkpoints.makes_compact = True
        try:
            yield
        finally:
            self._checkpoints.makes_compact = False

    @contextmanager
    def portable_states(self) -> Iterator[None]:
        """Let `state_dict` have the states that are in `state_dir`, for another place or machine.

            with optimizer.portable_states():
                torch.save(optimizer.state_dict(), "optimizer.pt")

        Otherwise it refers to them. The tensors are those of a state without a drive. They are
        mapped from an unnamed file in the folder, which takes room there, and no host memory that
        the system could not give to others. The room is free again when the tensors are gone.
        """
        self._checkpoints.makes_portable = True
        try:
            yield
        finally:
            self._checkpoints.makes_portable = False

    def forget_checkpoint(self) -> None:
        """Go back to the checkpoint in `state_dir` before the last one.

        For programs that go on though they could not save what `state_dict` returned: the state
        saved before then stays one that can be loaded. Call it before the next backward.

        Raises:
            OSError: The drive fails.
        """
        drive = self._running.drive
        if drive is not None:
            drive.folder.revert()

    @whole
    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state that `state_dict` returned; deferred weights on the device included.

        Also takes up a state of `torch.optim.AdamW`: the model's weights are then the true ones,
        and AdamW's moments and steps go on. Load the model's weights before the next step.

        An optimizer that stopped at a norm that was not finite goes on from the loaded state. Load
        the model's state too, whose resident parameters may hold such values.

        Raises:
            CheckpointError: The state is of another model, configuration or optimizer; nothing has
                been changed then.
        """
        self._check_no_gradients("load_state_dict()")
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():  # as torch calls them
            state_dict = before(self, state_dict) or state_dict
        self._checkpoints.load(state_dict, self.param_groups, self.state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @whole
    @torch.inference_mode(False)
    def prepare_to_load(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Give this optimizer's tensors the shapes of a state that will be loaded in place.

        `torch.distributed.checkpoint` loads into the tensors of a `state_dict()`. Where a
        controller has changed k since the start, those of a new optimizer are of other shapes.
        Load the parameter groups alone, hand them to this call, and take a `state_dict()` anew.

        Args:
            param_groups: Parameter groups of the saved state.

        Raises:
            CheckpointError: The groups are not of a state of this optimizer.
        """
        self._check_no_gradients("prepare_to_load()")
        self.synchronize()
        self._checkpoints.prepare_to_load(param_groups, self.state)

    def to_adamw_state_dict(self) -> dict[str, Any]:
        """Return a state with which `torch.optim.AdamW` over the same parameters can go on.

        The state has AdamW's moments of all gradients so far, in float32, copied to the CPU: 8
        bytes a parameter. Its weights are the true ones (`true_weights`).

        Raises:
            CheckpointError: The update rule is the published one, whose moments are of means of
                gradients.
            GradientError: As with `state_dict`.
            WorkerError: A step was broken off half done.
        """
        self._check_no_gradients("to_adamw_state_dict()")
        self.synchronize()
        return self._checkpoints.adamw_state(self.param_groups)

    # ---- observation ------------------------------------------------------------------------

    @property
    def report(self) -> StepReport | None:
        """Report of the last finished step; on a GPU of the one before, so that nothing waits."""
        return self._running.reporter.report

    @property
    def decision_log(self) -> list[tuple[int, Knobs]]:
        """Log of changes, (step, knobs), in force from the step after: replays a tuned run."""
        return list(self._running.decisions.log)

    @property
    def timeline(self) -> Timeline:
        """Spans of the last `timeline_steps` steps; on a GPU this waits for their events."""
        return self._running.timeline

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the `with` block as a span of the device lane: "forward", "backward"."""
        engine = self._running
        start = engine.device.timing_mark()
        try:
            yield
        finally:
            if self._is_here:  # a fork that ends inside of it has no say
                end = engine.device.timing_mark()
                engine.recorder.add("device", name, start, end, engine.step + 1)

    def change_link(self, link: PacedLink) -> None:
        """Give the emulated link other bandwidths from its next copy on, as a busy neighbour does.

        Raises:
            ValueError: The optimizer was made without an emulated link.
        """
        engine = self._running
        if engine.d2h.paced is None or engine.h2d.paced is None:
            raise ValueError("only an emulated link can be changed: make the optimizer with one")
        engine.d2h.paced.bytes_per_second = link.d2h_bytes_per_second
        engine.h2d.paced.bytes_per_second = link.h2d_bytes_per_second

    # ---- ending -----------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: Always; an optimizer's threads and buffers belong to it alone.
        """
        raise TypeError(
            "ZenFlowAdamW can't be copied or pickled: copy state_dict() and load it into a new one"
        )

    def close(self) -> None:
        """End the optimizer's threads; no other call may follow.

        In a forked process, where the optimizer can't be used at all, the call only frees the
        parameters for another optimizer.

        Raises:
            GradientError: The gradient norm of the last step is not finite and no call has said so
                yet. Threads have ended and memory is freed by then. The error comes here because
                the model outlives the optimizer and may be saved.
        """
        try:
            if self._life.now not in (Life.BROKEN, Life.CLOSED) and self._is_here:
                self._running.reporter.resolve()
        finally:
            self._finalizer()


def _end(engine: Engine, source: GradientSource, life: Lifetime) -> None:
    """End a closed or collected optimizer: hooks would keep its memory alive."""
    life.now = Life.CLOSED
    source.remove_hooks()
    engine.close()


def _complete_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Add the engine's part to torch's part of a state, before other hooks see the state."""
    assert isinstance(optimizer, ZenFlowAdamW)
    optimizer._checkpoints.complete(state, optimizer.param_groups)
