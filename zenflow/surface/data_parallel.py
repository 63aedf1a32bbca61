"""Release mode under data parallelism: gradients leave as their averages come in.

`DistributedDataParallel` averages gradients over ranks bucket by bucket, while backward goes on. A
parameter's own hooks run before that. DDP's communication hook begins a bucket's average, and no
hook tells its end. So the optimizer takes a bucket when backward hands the next one over, and the
last one when DDP has ended its backward. Later compute is ordered after the average: it waits only
where averages take longer than backward.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zenflow.errors import GradientError
from zenflow.step.same_gradients import REMEDY
from zenflow.surface.gradient_hooks import GradientSource
from zenflow.surface.life import Life, Lifetime

if TYPE_CHECKING:
    from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel

    from zenflow.columns.device_rows import Resident
    from zenflow.columns.layout import SplitParam


class Averages:
    """Gradients as averages over data-parallel ranks, whose hosts share the work."""

    def __init__(
        self,
        group: ProcessGroup | None,
        source: GradientSource,
        places: Mapping[Tensor, SplitParam | Resident],
        life: Lifetime,
    ) -> None:
        """Start without a model.

        Args:
            group: The ranks; None where each host does all of its rank's work.
            source: Source of the gradients.
            places: Place of every trainable parameter, which the optimizer adds to.
            life: State of the optimizer.
        """
        self._group = group
        self._source = source
        self._places = places
        self._life = life
        self._hook: _AveragesHook | None = None
        self._models: Sequence[weakref.ref[DistributedDataParallel]] | None = None

    def release_from(
        self, model: DistributedDataParallel, check: weakref.WeakMethod[Callable[[], None]]
    ) -> None:
        """Take gradients in backward, as their averages over the model's ranks come in.

        Args:
            model: Module that averages the gradients of all parameters.
            check: Method that raises where no step can follow a backward.

        Raises:
            ValueError: The optimizer has another mode or no group, or the model has other ranks or
                leaves some parameters out.
            RuntimeError: The model has a communication hook already.
        """
        group = self._group
        if group is None or not self._source.releases:
            raise ValueError(
                "release_from() is for an optimizer that was made with a process_group and "
                'offload_gradients="release": with "keep", step() finds the averages in .grad'
            )
        ranks = torch.distributed.get_process_group_ranks
        if ranks(model.process_group) != ranks(group):
            raise ValueError(
                f"the model averages over the ranks {ranks(model.process_group)} and the "
                f"optimizer's process_group has {ranks(group)}: give it model.process_group"
            )
        if model.find_unused_parameters:
            raise ValueError(
                "find_unused_parameters=True gives unused parameters a gradient of zero until "
                'backward ends: leave it out, or use offload_gradients="keep"'
            )
        averaged = {
            param
            for name, param in model.module.named_parameters()
            if param.requires_grad and name not in model.parameters_to_ignore
        }
        for param, place in self._places.items():
            if param not in averaged:
                raise ValueError(
                    f"{place.name} is not among the parameters whose gradients the model "
                    "averages: wrap the module that has all of the optimizer's parameters"
                )
        hook = _AveragesHook(weakref.ref(self), weakref.ref(model), model.process_group, check)
        model.register_comm_hook(hook, lambda state, bucket: state.begin(bucket))
        self._hook, self._models = hook, [weakref.ref(model)]
        self._source.has_hooks = True
        self._source.note_arrivals(hook.own)

    @property
    def is_over(self) -> bool:
        """Whether the optimizer was closed."""
        return self._life.now is Life.CLOSED

    def came(self, param: Tensor, average: Tensor) -> SplitParam | Resident | None:
        """Take a parameter's average; return its place, None for another optimizer's."""
        place = self._places.get(param)
        if place is not None:
            self._source.average_came(place, average)
        return place

    def leave_placeholders(self) -> None:
        """Free the memory of the averages that were taken: DDP has done its last write."""
        self._source.leave_placeholders()

    def check(self) -> None:
        """Refuse gradients that are not the average of all ranks, before they are used.

        Raises:
            GradientError: A gradient has not been averaged.
            RuntimeError: A rank may end before the others.
        """
        if self._group is None:
            return
        if self._models is None:
            self._models = _modules_of(self._places)
        for model in self._models:
            _check_join(model())
        own = set() if self._hook is None else self._hook.own
        for place in self._places.values():
            if place in own and place.param.grad is not None:
                raise GradientError(
                    f"the gradient of {place.name} is this rank's own, not the ranks' average: "
                    f"{REMEDY}"
                )


class _AveragesHook:
    """Begins a bucket's average, and lets an optimizer take the one before."""

    def __init__(
        self,
        averages: weakref.ref[Averages],
        model: weakref.ref[DistributedDataParallel],
        process_group: ProcessGroup,
        check: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        """Start with no bucket; references are weak: the model and its hook outlive optimizers."""
        self._averages = averages
        self._model = model
        self._process_group = process_group
        self._check = check
        self.own: set[SplitParam | Resident] = set()
        """Parameters that have had a gradient since their last average."""
        self._begun: tuple[GradBucket, Future[Tensor]] | None = None

    def begin(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin the average of a bucket, take the one before, and return the average's future."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        _check_join(self._model())
        average = allreduce_hook(self._process_group, bucket)
        averages, check = self._averages(), self._check()
        if averages is None or check is None or averages.is_over:
            return average
        if bucket.index() == 0:
            self._begun = None  # of a backward that was broken off
            check()
        self._take(averages)
        self._begun = bucket, average
        if bucket.is_last():
            # DDP is yet to queue what ends its backward; what that queues comes behind.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._end))
        return average

    def _end(self) -> None:
        """Take the last bucket, and leave placeholders where DDP has put the averages."""
        averages = self._averages()
        if averages is not None:
            self._take(averages)
            averages.leave_placeholders()

    def _take(self, averages: Averages) -> None:
        if self._begun is None:
            return
        (bucket, average), self._begun = self._begun, None
        average.wait()
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            place = averages.came(param, _in_order_of(param, grad))
            if place is not None:
                self.own.discard(place)


def _modules_of(params: Collection[Tensor]) -> Sequence[weakref.ref[DistributedDataParallel]]:
    """Return the modules that average some of these gradients, which nothing else names."""
    from torch.nn.parallel import DistributedDataParallel

    found = (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
    return [weakref.ref(m) for m in found if any(p in params for p in m.module.parameters())]


def _check_join(model: DistributedDataParallel | None) -> None:
    """Refuse torch's context in which a rank may end before the others.

    Raises:
        RuntimeError: The model is in that context.
    """
    if model is not None and model._join_config.enable:
        raise RuntimeError(
            "join() lets a rank end before the others, and all ranks of a process_group have to "
            "take the same steps: leave it out, and give every rank as many batches "
            "(DistributedSampler pads or drops the last ones)"
        )


def _in_order_of(param: Tensor, grad: Tensor) -> Tensor:
    """Return a piece of a bucket as a gradient in its parameter's order in memory.

    A parameter with gaps in memory has its gradient contiguous, as `bucket.gradients()` has it.
    """
    has_gaps = torch.empty_like(param, device="meta").stride() != param.stride()
    if has_gaps or param.is_contiguous():
        return grad
    return grad.as_strided(param.shape, param.stride())
