"""Cores of a rank: its part of the machine's, and how the rank is bound to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from experiments.training.parts.ranks.ranks import Ranks
from zenflow.host.fair_share import bind_process, bound_cores, cpus_of_rank, gpu_node, numa_nodes
from zenflow.host.limits import usable_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """The cores of one rank."""

    count: int
    """Number of cores that it may keep busy, by affinity and the control groups' quotas."""
    cpus: tuple[int, ...]
    """Processors that it is bound to; none where it is not bound."""
    nodes: tuple[int, ...] = ()
    """NUMA nodes that these are on."""
    node_of_gpu: int | None = None
    """NUMA node of its GPU, where that is known."""

    def __str__(self) -> str:
        """Return them in a few words."""
        count = f"{self.count} core{'' if self.count == 1 else 's'}"
        if not self.cpus:
            return f"{count}, bound to none"
        near = "" if self.node_of_gpu is None else f", its GPU on node {self.node_of_gpu}"
        nodes = ",".join(map(str, self.nodes))
        return f"{count} ({_ranges(self.cpus)} of NUMA node {nodes}{near})"


def share_cores(ranks: Ranks, device: torch.device, *, binds: bool) -> Cores:
    """Bind this rank to its share of the machine's cores, and return it; all ranks call it.

    Ranks that something else has bound, such as torchrun's ``--numa-binding`` or the batch
    system, have different processors already, and keep them.

    Args:
        ranks: Processes that share the run.
        device: Of this rank.
        binds: Whether to bind it; if not, it still keeps no more than its share busy.
    """
    local_rank, local_count = ranks.place.local_rank, ranks.place.local_count
    most = usable_cores()
    allowed = bound_cores() or tuple(range(most))
    first = ranks.rank - local_rank
    near = _node_of(device)
    told = ranks.collect((allowed, near))[first : first + local_count]
    if any(others != allowed for others, _ in told):
        return Cores(count=most, cpus=allowed, nodes=_nodes_of(allowed), node_of_gpu=near)
    fair = max(1, most // local_count)
    if not binds or local_count == 1:
        return Cores(count=fair, cpus=())
    cpus = cpus_of_rank(numa_nodes(allowed), local_rank, [node for _, node in told])
    if not bind_process(cpus):
        return Cores(count=fair, cpus=())
    count = len(cpus) if most == len(allowed) else min(len(cpus), fair)  # a quota is shared too
    return Cores(count=count, cpus=cpus, nodes=_nodes_of(cpus), node_of_gpu=near)


def told(cores: Sequence[Cores]) -> str:
    """Return every rank's cores, a line each."""
    return "\n".join(f"rank {rank}: {found}" for rank, found in enumerate(cores))


def _node_of(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(found, name) for name in names):
        return None  # an older torch, or another maker's GPU
    domain, bus, number = (int(getattr(found, name)) for name in names)
    return gpu_node(f"{domain:04x}:{bus:02x}:{number:02x}.0")


def _nodes_of(cpus: Sequence[int]) -> tuple[int, ...]:
    return tuple(numa_nodes(cpus))


def _ranges(cpus: Sequence[int]) -> str:
    """Return numbers as Linux writes them, as in 0-3,8."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
