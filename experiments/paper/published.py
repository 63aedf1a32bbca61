"""Published numbers of the ZenFlow paper and its users, each with its source.

Only numbers that could be read are here. The bars of most of the paper's figures could not: those
stay absent. Numbers known from a summary of the paper alone say so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from experiments.lab.finding import Finding, Range, Tolerance
from experiments.paper.setups import Phases, Setup

_PAPER = "ZenFlow paper (arXiv 2505.12242)"
_SECONDARY = f"{_PAPER}, per a secondary summary"
_BLOG = "DeepSpeed blog, deepspeed-zenflow"


@dataclass(frozen=True, slots=True)
class Published:
    """A published number."""

    value: Range | float
    unit: str
    source: str

    def beside(self, claim: str, tolerance: Tolerance, **ours: Any) -> Finding:
        """Return the claim with ours beside the published number.

        Args:
            claim: What was published, in words.
            tolerance: Which distance from it counts as the same.
            ours: Our numbers by their basis, and the note.
        """
        return Finding(
            claim=claim,
            source=self.source,
            published=self.value,
            unit=self.unit,
            tolerance=tolerance,
            **ours,
        )


def _ms(value: float, source: str) -> Published:
    return Published(value, "ms", source)


_PHASES = f"{_BLOG}, figure 3; {_SECONDARY}"

D2H = _ms(500, _PHASES)
UPDATE = _ms(4600, _PHASES)
H2D = _ms(500, _PHASES)
OFFLOAD_IDLE = _ms(5100, _PHASES)
"""Idle seconds of a ZeRO-Offload step of Llama-2-7B on 4 A100, CPUAdam with 128 threads."""
BREAKDOWN = Phases(
    strategy="published_zero_offload",
    num_params=6_738_415_616,
    forward=0.045,
    backward=2.0,
    d2h=0.5,
    update=4.6,
    h2d=0.5,
)
"""Llama-2-7B on 4 A100 with one EPYC 7742, CPU-Adam with 128 threads. Its update is also the one
measured constant of all DeepSpeed rows."""
OFFLOAD_STEP = _ms(7145, f"{_PHASES}: 45 + 2000 + 5100")
IDLE_SHARE = Published(0.6, "", f"{_BLOG}: more than 60 % of a step")

UTILISATION_PERIOD = Published(7, "s", f"{_BLOG}, figure 2: a period of about 7 s")
UTILISATION_BUSY = Published(
    Range(low=2.5, high=3.0), "s", f"{_BLOG}, figure 2: 90 to 100 % so long"
)
UTILISATION_IDLE = Published(
    Range(low=4.0, high=4.5), "s", f"{_BLOG}, figure 2: 0 % for that long"
)

NAIVE_IDLE = _ms(2555, f"{_BLOG}, figure 4; {_SECONDARY}")
NAIVE_IDLE_SHARE = Published(0.56, "", f"{_BLOG}, figure 4; {_SECONDARY}: 56 % of a step")
NO_IDLE = _ms(0, f"{_BLOG}: zero-stall")
NO_IDLE_SHARE = Published(0.0, "", f"{_BLOG}: zero-stall")
STALL_FREE = Published(1.0, "", f"{_BLOG}: zero-stall")
STALL_FREE_STEP = _ms(2045, f"{_PHASES}: 45 + 2000, nothing waited for")
LEAST_INTERVAL_128 = Published(3, "steps", f"{_SECONDARY}: (4600 + 500) / 2045, rounded up")

SMALLEST_CUT = Published(2.9, "x", f"{_SECONDARY}: per machine and model")
LARGEST_CUT = Published(5.0, "x", f"{_SECONDARY}: per machine and model")
MEAN_OVER_OFFLOAD = Published(4.3, "x", f"{_SECONDARY}, figures 11 to 13")
MEAN_OVER_INFINITY = Published(6.3, "x", f"{_SECONDARY}, figures 11 to 13")
QWEN_3B = Setup(
    model="qwen2.5-3b",
    machine="dgx-a100-40",
    devices=2,
    strategy="deepspeed_zero_offload",
    batch_size=4,
    sequence=512,
)
"""Fine-tuning of Qwen2.5-3B by ZeRO-Offload, as the blog on core binding measured it."""
DEEPSPEED_ZENFLOW = {"topk_ratio": 0.1, "update_interval": 4}
"""Settings of ZenFlow in DeepSpeed's own runs."""
RELEASED_RUNS = (
    (QWEN_3B, 2.497),
    (replace(QWEN_3B, strategy="deepspeed_zenflow", options=DEEPSPEED_ZENFLOW), 1.116),
)
"""The blog's runs with cores bound, and the seconds of a step: ZeRO-Offload, and ZenFlow."""
RELEASED_3B = Published(
    2497 / 1116, "x", "DeepSpeed blog zenflow-corebinding: 2497 and 1116 ms with cores bound"
)
STALL_REDUCTION = Published(0.85, "", f"{_BLOG}: more than 85 %")

ZENFLOW_BYTES = Published(1.125, "M", f"{_SECONDARY}: (S + 1) (1 - k) / S at k = 0.1, S = 4")
OFFLOAD_BYTES = Published(2.0, "M", f"{_BLOG}; {_SECONDARY}")
BYTES_CUT = Published(0.44, "", f"{_SECONDARY}: 44 % less")

SELECTION_RATIO = Published(
    Range(low=4000, high=6000), "x", f"{_BLOG}: 4,000 and 6,000 times less"
)
SELECTION_SHAPE = Published(
    1.0, "", f"{_SECONDARY}: column norms, O(m), in place of gradients, O(n m)"
)
PROJECTION_BYTES = Published(
    16_384, "B", f"{_SECONDARY}: norms of one 4096 x 4096 projection, 16 KB"
)
PROJECTION_GRADIENT = Published(33.6e6, "B", f"{_SECONDARY}: its gradient in float16")


LARGEST_MODEL = Published(
    1.0, "x", f"{_SECONDARY}: ZenFlow's largest model is about ZeRO-Offload's, no number readable"
)

MODELS = ("opt-350m", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "llama-2-7b", "llama-2-13b")
MACHINES = ("a100-epyc-7742", "h100-xeon-8462y")
"""The paper's models and machines, per a secondary summary, by their names in the simulator."""
TOPK_RATIO = 0.1
UPDATE_INTERVAL = 4
SET_UPS = {"qwen2.5-3b": (1, 64), "llama-2-7b": (2, 64), "llama-2-13b": (4, 48)}
"""Devices and global batch of its throughput runs, where known; the sequence length is not."""

CONCENTRATION_ENTRIES = Published(
    0.889, "", f"{_BLOG}, figure 5; {_SECONDARY}: the top 1 % of entries"
)
CONCENTRATION_COLUMNS = Published(
    0.85, "", f"{_BLOG}, caption of figure 5: the top 1 % of channels"
)
LOCALITY_10 = Published(
    0.95,
    "",
    f"{_SECONDARY}: the top 10 % of channels keep the top 1 % of gradients over iterations",
)
LOCALITY_5 = Published(0.90, "", f"{_SECONDARY}: the top 5 % of channels")
AUTO_EARLY = Published(Range(low=1, high=2), "steps", f"{_SECONDARY}: Zen-auto's S early on")
AUTO_LATE = Published(Range(low=4, high=5), "steps", f"{_SECONDARY}: Zen-auto's S once stable")
INTERVAL_LOSS = Published(0.02, "accuracy", f"{_SECONDARY}: what S = 16 loses in 3 epochs")
