"""ZenFlowAdamW: the engine as a torch optimizer.

This module is the surface. `zenflow.step.engine` begins with the life of a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from zenflow.columns.local import local_of
from zenflow.config import ZenFlowConfig
from zenflow.controller import AbstractController
from zenflow.errors import GradientError
from zenflow.host.signals import whole
from zenflow.lanes.copies import PacedLink
from zenflow.report import MemoryPlan
from zenflow.rule.adamw import Hyper
from zenflow.step.device_step import resident_grads_of, squared_norm
from zenflow.step.engine import Engine
from zenflow.surface.arguments import (
    check_arguments,
    check_gradients,
    check_group,
    check_norm,
    check_settings,
    checked_config,
    note_unused,
)
from zenflow.surface.assembly import add_residents, start_engine
from zenflow.surface.data_parallel import TakesAverages
from zenflow.surface.gradient_hooks import GradientSource
from zenflow.surface.groups import FollowsGroups, check_same_params
from zenflow.surface.memory_plan import plan_memory, tell_of_memory
from zenflow.surface.observed import Observed
from zenflow.surface.state.checkpoints import Checkpointed, complete_state
from zenflow.surface.state.checks import ENTRY
from zenflow.surface.true_weights import TrueWeights
from zenflow.surface.weights_shown import TrueWeightsShown

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ZenFlowAdamW(Observed, TrueWeightsShown, Checkpointed, TakesAverages, FollowsGroups):
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
        process_group: ProcessGroup | None = None,
        controller: AbstractController | None = None,
        link: PacedLink | None = None,
        host_threads: int | None = None,
        timeline_steps: int = 0,
        wait_timeout: float = 600.0,
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
            process_group: Data-parallel ranks, whose gradients `DistributedDataParallel` averages
                and whose hosts share the work: each has its part of the host's state. All of them
                make the optimizer, take its steps and show its weights together. None lets every
                rank's host do all of the work.
            controller: Chooses the knobs step by step; None keeps the config's.
            link: Emulated bandwidths, on a CPU only.
            host_threads: Number of threads that work on the host's rows; None leaves some cores
                to the other threads.
            timeline_steps: Number of last steps whose spans are kept; 0 for none.
            wait_timeout: Seconds after which a wait is an error.
            foreach: Of no effect, like `fused`. Recipes for torch's AdamW have them, where they
                choose among its implementations.
            fused: Of no effect.

        Raises:
            TypeError: The config is no ``ZenFlowConfig``.
            ValueError: An argument breaks its rule.
            MemoryError: The host has too little memory.
            RuntimeError: The system gives too few threads.
        """
        self.config = checked_config(config)
        note_unused(foreach=foreach, fused=fused)
        check_settings(lr, betas, eps, weight_decay)
        check_gradients(offload_gradients, max_grad_norm)
        self.releases_gradients = offload_gradients == "release"
        self.max_grad_norm = max_grad_norm
        check_arguments(
            self.releases_gradients, accumulation_steps, timeline_steps, host_threads, wait_timeout
        )
        self._engine = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        # Tools that rearrange states go by the keys of live groups; a saved one has a text here.
        self.param_groups[0][ENTRY] = ""
        self.accumulation_steps = accumulation_steps
        # A GradScaler then leaves unscaling to step(), so that float16 parameters work too. In
        # release mode it looks at gradients that have left, and these say what to do.
        self._step_supports_amp_scaling = True
        self._note_groups()
        self._engine, places = start_engine(
            self._groups_of_engine,
            self.config,
            process_group=process_group,
            controller=controller,
            link=link,
            host_threads=host_threads,
            timeline_steps=timeline_steps,
            wait_timeout=wait_timeout,
            releases=self.releases_gradients,
            settings={
                "offload_gradients": self.releases_gradients,
                "max_grad_norm": self.max_grad_norm,
                "accumulation_steps": accumulation_steps,
            },
        )
        self._places = {place.param: place for place in places}
        self._source = GradientSource(
            self._engine,
            places,
            frozen=[p for group in self._given for p in group if not p.requires_grad],
            releases=self.releases_gradients,
            accumulation_steps=accumulation_steps,
        )
        self._true_weights = TrueWeights(self._engine)
        self._failure = None
        self._takes_late_weights = True
        self._expects_weights = False
        self._finalizer = weakref.finalize(self, _end, self._engine, self._source)
        self._filled_version = None
        self.register_state_dict_post_hook(complete_state, prepend=True)
        if self.releases_gradients and process_group is None:
            self._source.register_hooks(weakref.WeakMethod(self._check_can_step))
        self.memory = plan_memory(self._engine)
        tell_of_memory(self.memory, self._engine)

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
            self._follow_groups()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            added = [] if engine is None else add_residents(engine, self.param_groups)
        except BaseException:
            self.param_groups.pop()
            raise
        if engine is not None:
            self._add_group()
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
        self._check_process()
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
            self._check_averages()
            engine.use([Hyper.of(group) for group in self.param_groups], 1.0)
            self._source.take_rest()
            grads = resident_grads_of(engine.layout, engine.complete_step().gradients)
        else:
            engine.measure_in_place()
            residents = [place.param.grad for place in engine.layout.residents]
            grads = [local_of(grad).float() for grad in residents if grad is not None]
        earlier = self._max_norm_of_step
        self._max_norm_of_step = max_norm if earlier is None else min(earlier, max_norm)
        return squared_norm(engine.layout, grads).sqrt()

    # ---- the step ---------------------------------------------------------------------------

    def _check_can_step(self) -> None:
        self._check_open()
        self._check_sound()
        if self._takes_late_weights or self._expects_weights:  # hooks come by for each parameter
            self._take_late_weights()
        self._follow_groups()  # before backward uses their settings
        if self._true_weights.are_shown:
            raise RuntimeError(
                "the true weights are on the device since optimizer.eval(): call "
                "optimizer.train() before the next backward"
            )

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
        self._check_can_step()
        self._check_state_is_there()
        check_same_params(self.param_groups, self._given)
        self._source.check_untouched()
        self._source.check_hooks()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_averages()
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
        if engine.layout.version != self._filled_version:
            if self._filled_version is not None:  # k has changed, and so have tensors
                self.memory = plan_memory(engine)
            self._fill_state()
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

    def change_link(self, link: PacedLink) -> None:
        """Give the emulated link other bandwidths from its next copy on, as a busy neighbour does.

        Raises:
            ValueError: The optimizer was made without an emulated link.
        """
        engine = self._running
        if engine.d2h.bytes_per_second is None:
            raise ValueError("only an emulated link can be changed: make the optimizer with one")
        engine.d2h.bytes_per_second = link.d2h_bytes_per_second
        engine.h2d.bytes_per_second = link.h2d_bytes_per_second

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
            if self._finalizer.alive and self._failure is None and self._is_here:
                self._running.reporter.resolve()
        finally:
            self._finalizer()


def _end(engine: Engine, source: GradientSource) -> None:
    """End a closed or collected optimizer: hooks would keep its memory alive."""
    source.remove_hooks()
    engine.close()
