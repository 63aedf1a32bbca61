"""Settings of runs whose ranks share the host's work."""

from tests.zenflow.sharded import runs as sharded

SCENARIOS = {
    f"k = {k:g}, S = {s}, {mode}": {
        "config": {"topk_ratio": k, "update_interval": s},
        "optimizer": {"offload_gradients": mode, "max_grad_norm": 0.5},
        "views": s == 4,
        "static": k == 1,
    }
    for k in (0.0, 0.1, 1.0)
    for s in (1, 4)
    for mode in ("keep", "release")
} | {
    name: sharded.SCENARIOS[name]
    for name in (
        *("published", "warm-up", "no overlap", "accumulated", "accumulated, release"),
        *("accumulated without sync", "clipped by a call", "clipped by a call, keep", "k changes"),
    )
}
"""Settings of runs, by name; "views" and "static" are settings of DDP."""
TRAINED = (
    "k = 0, S = 1, keep",
    "k = 0.1, S = 4, keep",
    "k = 0.1, S = 4, release",
    "k = 1, S = 1, release",
    "no overlap",
    "accumulated",
    "accumulated, release",
    "accumulated without sync",
    "clipped by a call",
    "k changes",
)
"""Those that every test run trains; the others are slow tests."""
DELAYED = ("k = 0.1, S = 4, keep", "k = 0.1, S = 4, release")
"""Those whose copies and host work are made late."""
SAVED = ("k = 0.1, S = 4, release", "published", "k = 1, S = 4, keep")
"""Those that are saved and resumed."""
