"""Memory plan of an engine: the memory that it has taken, and its uploads will take."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from zenflow.columns.host_rows import ROW_STATE
from zenflow.columns.placement import why_resident
from zenflow.host.fair_share import bound_cores, numa_nodes
from zenflow.report import MemoryPlan
from zenflow.rule.sizes import BANK_TEMPORARIES, GATHERED_BYTES, GATHERED_COPIES
from zenflow.step.host.exact import ExactTasks

if TYPE_CHECKING:
    from zenflow.columns.layout import Layout
    from zenflow.step.engine import Engine

_log = logging.getLogger(__name__)

LITTLE = 0.01
"""Fraction of the parameters below which a warning says that next to nothing is offloaded."""


def plan_memory(engine: Engine) -> MemoryPlan:
    """Return a new engine's plan: allocated memory, and the upload buffers to come."""
    layout = engine.layout
    params = [place.data for place in layout.places]
    split_params = sum(split.data.numel() for split in layout.splits)
    upload_bytes = engine.uploads.capacity * engine.uploads.num_buffers
    step_bytes = sum(split.slab_rows.step.nbytes for split in layout.splits)
    vectors = layout.columns
    on_device = [vectors.energies, vectors.scores, vectors.is_important]
    on_device += [vectors.mean_squares, vectors.fresh_factors, vectors.host_rows]
    rows = layout.rows
    on_device += [rows.energies, rows.mean_squares, rows.fresh_factors]
    on_device += [getattr(bank, name) for bank in layout.banks for name in ROW_STATE]
    for resident in layout.residents:
        on_device += resident.state().values()
    for split in layout.splits:
        on_device += [split.deferred_columns, split.important_columns]
    sketch_bytes = 0 if engine.probes.sketch is None else engine.probes.sketch.num_bytes
    fresh_bytes = 0 if engine.fresh is None else engine.fresh.num_bytes
    tasks = engine.schedule.tasks
    largest = max((s.slab_rows.staging.nbytes for s in layout.splits), default=0)
    ring_bytes = 2 * largest if engine.ring is None else engine.ring.num_bytes
    cores = bound_cores()
    on_host = [layout.slabs.num_bytes, tasks.host_bytes, upload_bytes, step_bytes]
    homes, visiting = _streamed_bytes(engine)
    buffers = 0 if engine.drive is None else engine.drive.num_bytes
    on_host += [engine.training.own_bytes, homes, buffers]
    return MemoryPlan(
        num_params=sum(param.numel() for param in params),
        split_params=split_params,
        model_bytes=sum(p.data.nbytes for p in layout.places if p.page is None) + visiting,
        host_bytes=sum(on_host),
        pinned_bytes=layout.slabs.pinned_bytes + tasks.pinned_bytes + upload_bytes + homes,
        queue_depth=tasks.depth if isinstance(tasks, ExactTasks) else 1,
        device_extra_bytes=sum(tensor.nbytes for tensor in on_device) + sketch_bytes + fresh_bytes,
        device_ring_bytes=ring_bytes + _gathered_bytes(engine),
        device_step_bytes=_step_bytes(layout),
        home_bytes=homes,
        buffer_bytes=buffers,
        drive_bytes=0 if engine.drive is None else engine.drive.folder.num_bytes,
        host_threads=engine.host_threads,
        host_cores=cores,
        host_nodes=tuple(numa_nodes(cores)),
    )


def _streamed_bytes(engine: Engine) -> tuple[int, int]:
    """Return the bytes of weights and sums that are at home, and of weights in the slots."""
    pages = [] if engine.stream is None else engine.stream.pages
    homes = sum(page.num_bytes for page in pages)
    if engine.options.accumulation_steps > 1:
        sends_all = engine.options.offload_sums
        splits = engine.layout.splits
        homes += sum(s.param.nbytes for s in splits if sends_all or s.page is not None)
    if engine.stream is None:
        return homes, 0
    largest = sorted((page.num_bytes for page in pages), reverse=True)
    return homes, sum(largest[: engine.stream.slots])


def _gathered_bytes(engine: Engine) -> int:
    """Return the bytes in which the uploads of several hosts become whole columns."""
    group = engine.layout.shares.group
    if group is None:
        return 0
    return GATHERED_COPIES * min(GATHERED_BYTES, engine.uploads.capacity * group.size())


def _step_bytes(layout: Layout) -> int:
    """Return the bytes that a step's update takes on the device while it runs."""
    important = sum(
        len(split.important_columns) * split.num_rows * split.param.itemsize
        for split in layout.splits
    )
    residents = sum(r.master.nbytes for r in layout.residents if r.has_master)
    bank = max((bank.master.nbytes for bank in layout.banks), default=0)
    return important + residents + BANK_TEMPORARIES * bank


def tell_of_memory(plan: MemoryPlan, engine: Engine) -> None:
    """Log the plan, and a warning where next to nothing is offloaded that should be."""
    _log.info("optimizer memory:\n%s", plan)
    share = plan.split_params / plan.num_params if plan.num_params else 0.0
    if engine.config.topk_ratio < 1 and share < LITTLE:
        reasons = Counter(why_resident(r.param, engine.config) for r in engine.layout.residents)
        _log.warning(
            "%.1f%% of the parameters are offloaded. On the device whole are: %s. "
            "torch.optim.AdamW may serve this model as well",
            100 * share,
            ", ".join(f"{count} with {reason}" for reason, count in reasons.most_common()),
        )
