"""Runs of a model whose ranks share the host's work."""

from tests.zenflow.sharded import runs as sharded

SCENARIOS = {
    f"k = {k:g}, S = {s}, {mode}": {
        "config": {"topk_ratio": k, "update_interval": s},
        "optimizer": {"offload_gradients": mode, "max_grad_norm": 0.5},
        "views": mode == "release",
    }
    for k in (0.0, 0.1, 1.0)
    for s in (1, 4)
    for mode in ("keep", "release")
} | {
    name: sharded.SCENARIOS[name]
    for name in (
        "published",
        "warm-up",
        "no overlap",
        "accumulated",
        "accumulated, release",
        "accumulated without sync",
        "clipped by a call",
        "k changes",
        "clipped by a call, keep",
    )
}
"""Settings of runs, by name."""
TRAINED = tuple(SCENARIOS)
