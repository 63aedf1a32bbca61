"""Where tests step in between the host's threads and their work, whichever kernel runs it."""

from zenflow.columns import host_update
from zenflow.host import jobs, kernel
from zenflow.host import pool as host_pool

_JOBS = {"sum": jobs.SumJob, "catch_up": jobs.CatchUpJob, "compact": jobs.CompactJob}


def host_work(*kinds):
    """Return (owner, attribute) of what the host's threads call for each job of these kinds."""
    if kernel.active_kernel() == "c":
        return [(_JOBS[kind], "encode") for kind in kinds]
    return [(kernel, "run")]


def cut_finely(monkeypatch, num_elements):
    """Let pieces of the host's work have so few elements that even a tiny block is shared out."""
    monkeypatch.setattr(host_update, "PART_ELEMENTS", num_elements)
    monkeypatch.setattr(host_update, "POOL_ELEMENTS", 2 * num_elements)
    monkeypatch.setattr(host_pool, "PIECE_ELEMENTS", num_elements)
