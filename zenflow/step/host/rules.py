"""Update rules: the host's tasks of each, with the memory that its gradients wait in."""

from __future__ import annotations

import math

from zenflow.columns.gradient_queue import RoomPool
from zenflow.columns.in_flight import UpdatesInFlight
from zenflow.columns.layout import Layout
from zenflow.columns.upload_pool import UploadPool
from zenflow.config import ZenFlowConfig
from zenflow.device.base import AbstractDevice
from zenflow.host.limits import free_bytes
from zenflow.host.pool import HostPool
from zenflow.host.ranks import ranks_on_this_machine
from zenflow.lanes.host_worker import HostWorker
from zenflow.rule.calendar import WindowCalendar
from zenflow.rule.sizes import pool_bytes, queue_depth
from zenflow.step.host.changed import ChangedUploads
from zenflow.step.host.exact import ExactTasks
from zenflow.step.host.published import PublishedTasks, make_sums
from zenflow.step.host.tasks import AbstractHostTasks, Window

Parts = tuple[
    Layout,
    WindowCalendar,
    HostWorker,
    HostPool | None,
    UploadPool,
    UpdatesInFlight,
    list[Window],
]
"""Fields that the tasks of every rule have."""

SPARE_SHARE = 0.5
"""Share of the memory that the host's state leaves free which may go to waiting gradients."""


def make_tasks(
    parts: Parts,
    *,
    config: ZenFlowConfig,
    device: AbstractDevice,
    largest_interval: int,
    changed: ChangedUploads | None = None,
) -> AbstractHostTasks:
    """Return the tasks of the configuration's update rule, and allocate their memory.

    Args:
        parts: Fields of `AbstractHostTasks`, in their order.
        config: Settings of the update rule.
        device: Owner of pinned memory.
        largest_interval: Largest S to allocate for.
        changed: Memory of the last uploads; None where all weights are uploaded.
    """
    layout = parts[0]
    if not config.is_exact:
        return PublishedTasks(*parts, make_sums(layout, config, largest_interval))
    staging_bytes = layout.slabs.pinned_bytes
    spare = math.inf if config.is_compact else _spare_pools(layout)  # there q is in the result
    depth = queue_depth(config.queue_depth, largest_interval, spare)
    rooms = RoomPool(device, pool_bytes(staging_bytes, depth))
    return ExactTasks(*parts, rooms, depth, config.is_compact, config.is_factored, changed)


def _spare_pools(layout: Layout) -> float:
    """Return the host memory that may be used, in steps' deferred gradients."""
    staging_bytes = layout.slabs.pinned_bytes
    # The state's pages may not have been touched yet: they count as taken.
    # Other ranks of this machine have as much, and take as much.
    free = max(0.0, free_bytes()[0] / ranks_on_this_machine() - layout.slabs.num_bytes)
    return SPARE_SHARE * free / staging_bytes if staging_bytes else 0.0
