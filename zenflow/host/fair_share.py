"""Division of one machine's cores among ranks: each has its own, those near its GPU first.

A rank on its own cores keeps its data in the memory of these cores, and takes no time from
another. Linux only, which describes processors in `/sys`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")
_PCI = Path("/sys/bus/pci/devices")


def cpus_of_rank(
    nodes: Mapping[int, Sequence[int]], local_rank: int, near: Sequence[int | None]
) -> tuple[int, ...]:
    """Return the processors of one of several ranks on a machine.

    Ranks that ask with the same arguments get disjoint sets, together all processors, whose sizes
    differ by one at most. A rank's set is taken from its own node first, then from the others.

    Args:
        nodes: Processors that may be used, by NUMA node; neighbours in a sequence share most.
        local_rank: Number of the rank on its machine, from 0.
        near: Node of each rank's GPU, by local rank; None where it is not known.
    """
    count = len(near)
    total = sum(map(len, nodes.values()))
    quotas = [total * (rank + 1) // count - total * rank // count for rank in range(count)]
    free = {node: list(cpus) for node, cpus in sorted(nodes.items())}
    shares: list[list[int]] = [[] for _ in near]
    for node, cpus in free.items():
        at_home = [rank for rank, own in enumerate(near) if own == node]
        for place, rank in enumerate(at_home):
            most = -(-len(cpus) // (len(at_home) - place))
            number = min(most, quotas[rank])
            shares[rank] += cpus[:number]
            del cpus[:number]
    for rank, share in enumerate(shares):
        while len(share) < quotas[rank]:
            cpus = max(free.values(), key=len)
            number = min(len(cpus), quotas[rank] - len(share))
            share.extend(cpus[:number])
            del cpus[:number]
    return tuple(sorted(shares[local_rank]))


def numa_nodes(allowed: Collection[int], root: Path = Path("/")) -> dict[int, list[int]]:
    """Return the allowed processors by NUMA node, those of one core side by side.

    Args:
        allowed: Numbers of processors.
        root: Where the machine's `/sys` is mounted.
    """
    places = sorted((root / _NODES.relative_to("/")).glob("node[0-9]*"))
    found = {int(place.name.removeprefix("node")): _numbers(place / "cpulist") for place in places}
    known = {cpu for cpus in found.values() for cpu in cpus}
    if not set(allowed) <= known:  # no such tree, or one that lacks some
        found = {0: sorted(allowed)}

    def core(cpu: int) -> tuple[int, int]:
        siblings = root / _CPUS.relative_to("/") / f"cpu{cpu}" / "topology/thread_siblings_list"
        return min(_numbers(siblings), default=cpu), cpu

    kept = {node: sorted(set(cpus) & set(allowed), key=core) for node, cpus in found.items()}
    return {node: cpus for node, cpus in kept.items() if cpus}


def gpu_node(pci_address: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node that a GPU is on; None where the machine does not say.

    Args:
        pci_address: As in `0000:3b:00.0`.
        root: Where the machine's `/sys` is mounted.
    """
    place = root / _PCI.relative_to("/") / pci_address.lower() / "numa_node"
    try:
        node = int(place.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1 is Linux's word for no node


def bound_cores() -> tuple[int, ...]:
    """Return the processors that this thread, and those it starts, may run on.

    None where the system does not say.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    return tuple(sorted(affinity(0))) if affinity else ()


def bind_process(cpus: Collection[int]) -> bool:
    """Let all threads of this process, and those to come, run on these processors alone.

    Returns:
        Whether the system has done it.
    """
    set_affinity = getattr(os, "sched_setaffinity", None)
    if set_affinity is None or not cpus:
        return False
    try:
        for thread in os.listdir("/proc/self/task"):
            set_affinity(int(thread), cpus)
    except OSError:  # a thread has ended, or the system refuses
        return os.sched_getaffinity(0) == set(cpus)
    return True


def _numbers(path: Path) -> list[int]:
    """Return the numbers of a list such as `0-3,8`; none where there is no such file."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return []
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
