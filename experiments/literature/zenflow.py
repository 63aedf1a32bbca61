"""What the ZenFlow paper and its users published, each number with its source.

Only numbers that could be read are here. The bars of most of the paper's figures could not: those
stay absent. Numbers known from a summary of the paper alone say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.lab.finding import Finding, Range, Tolerance
from experiments.literature.measurements import BREAKDOWN

_PAPER = "ZenFlow paper (arXiv 2505.12242)"
_SECONDARY = f"{_PAPER}, per a secondary summary"
_BLOG = "DeepSpeed blog, deepspeed-zenflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published number."""

    value: Range | float
    unit: str
    source: str

    def beside(
        self,
        claim: str,
        tolerance: Tolerance,
        *,
        simulated: float | None = None,
        emulated: float | None = None,
        measured: float | None = None,
        note: str = "",
    ) -> Finding:
        """Return the claim with ours beside the published number."""
        return Finding(
            claim=claim,
            source=self.source,
            published=self.value,
            unit=self.unit,
            tolerance=tolerance,
            simulated=simulated,
            emulated=emulated,
            measured=measured,
            note=note,
        )


def _ms(value: float, source: str) -> Published:
    return Published(value=value, unit="ms", source=source)


_PHASES = f"{_BLOG}, figure 3; {_SECONDARY}"

FORWARD = _ms(45, _PHASES)
BACKWARD = _ms(2000, _PHASES)
D2H = _ms(500, _PHASES)
UPDATE = _ms(4600, _PHASES)
H2D = _ms(500, _PHASES)
OFFLOAD_IDLE = _ms(5100, _PHASES)
"""Idle seconds of a ZeRO-Offload step of Llama-2-7B on 4 A100, CPUAdam with 128 threads."""
PHASES = BREAKDOWN
"""Its phases, in seconds, as the simulator takes them."""
OFFLOAD_STEP = _ms(7145, f"{_PHASES}: 45 + 2000 + 5100")
IDLE_SHARE = Published(value=0.6, unit="", source=f"{_BLOG}: more than 60 % of a step")
SLOWDOWN = Published(value=14, unit="x", source=f"{_BLOG}: 0.5 s becomes more than 7 s")
PCIE4_RATE = Published(value=28, unit="GB/s", source=f"{_SECONDARY}: 14 GB in 500 ms")

UTILISATION_PERIOD = Published(
    value=7, unit="s", source=f"{_BLOG}, figure 2: a period of about 7 s"
)
UTILISATION_BUSY = Published(
    value=Range(low=2.5, high=3.0),
    unit="s",
    source=f"{_BLOG}, figure 2: 90 to 100 % so long",
)
UTILISATION_IDLE = Published(
    value=Range(low=4.0, high=4.5), unit="s", source=f"{_BLOG}, figure 2: 0 % for that long"
)

NAIVE_IDLE = _ms(2555, f"{_BLOG}, figure 4; {_SECONDARY}")
NAIVE_IDLE_SHARE = Published(
    value=0.56, unit="", source=f"{_BLOG}, figure 4; {_SECONDARY}: 56 % of a step"
)
NO_IDLE = _ms(0, f"{_BLOG}: zero-stall")
NO_IDLE_SHARE = Published(value=0.0, unit="", source=f"{_BLOG}: zero-stall")
STALL_FREE = Published(value=1.0, unit="", source=f"{_BLOG}: zero-stall")
STALL_FREE_STEP = _ms(2045, f"{_PHASES}: 45 + 2000, nothing waited for")
LEAST_INTERVAL_128 = Published(
    value=3, unit="steps", source=f"{_SECONDARY}: (4600 + 500) / 2045, rounded up"
)

SMALLEST_CUT = Published(value=2.9, unit="x", source=f"{_SECONDARY}: per machine and model")
LARGEST_CUT = Published(value=5.0, unit="x", source=f"{_SECONDARY}: per machine and model")
MEAN_OVER_OFFLOAD = Published(value=4.3, unit="x", source=f"{_SECONDARY}, figures 11 to 13")
MEAN_OVER_INFINITY = Published(value=6.3, unit="x", source=f"{_SECONDARY}, figures 11 to 13")
RELEASED_3B = Published(
    value=2497 / 1116,
    unit="x",
    source="DeepSpeed blog zenflow-corebinding: 2497 and 1116 ms with cores bound",
)
STALL_REDUCTION = Published(value=0.85, unit="", source=f"{_BLOG}: more than 85 %")

ZENFLOW_BYTES = Published(
    value=1.125, unit="M", source=f"{_SECONDARY}: (S + 1) (1 - k) / S at k = 0.1, S = 4"
)
OFFLOAD_BYTES = Published(value=2.0, unit="M", source=f"{_BLOG}; {_SECONDARY}")
BYTES_CUT = Published(value=0.44, unit="", source=f"{_SECONDARY}: 44 % less")

SELECTION_RATIO = Published(
    value=Range(low=4000, high=6000), unit="x", source=f"{_BLOG}: 4,000 and 6,000 times less"
)
SELECTION_SHAPE = Published(
    value=1.0, unit="", source=f"{_SECONDARY}: column norms, O(m), in place of gradients, O(n m)"
)
PROJECTION_BYTES = Published(
    value=16_384, unit="B", source=f"{_SECONDARY}: norms of one 4096 x 4096 projection, 16 KB"
)
PROJECTION_GRADIENT = Published(
    value=33.6e6, unit="B", source=f"{_SECONDARY}: its gradient in float16"
)

MEMORY_7B = Published(
    value=56e9, unit="B",
    source=f"{_SECONDARY}: weights 14 + gradients 14 + optimizer 28 GB of Llama-2-7B",
)  # fmt: skip
"""The largest trainable models are known in words alone: ZenFlow's is about ZeRO-Offload's."""
LARGEST_MODEL = Published(
    value=1.0, unit="x",
    source=f"{_SECONDARY}: ZenFlow's largest model is about ZeRO-Offload's, no number readable",
)  # fmt: skip

MODELS = ("opt-350m", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "llama-2-7b", "llama-2-13b")
MACHINES = ("a100-epyc-7742", "h100-xeon-8462y")
"""The paper's models and machines, per a secondary summary, by their names in the simulator."""
TOPK_RATIO = 0.1
UPDATE_INTERVAL = 4
SET_UPS = {"qwen2.5-3b": (1, 64), "llama-2-7b": (2, 64), "llama-2-13b": (4, 48)}
"""Devices and global batch of its throughput runs, where known; the sequence length is not."""

CONCENTRATION_ENTRIES = Published(
    value=0.889, unit="", source=f"{_BLOG}, figure 5; {_SECONDARY}: the top 1 % of entries"
)
CONCENTRATION_COLUMNS = Published(
    value=0.85, unit="", source=f"{_BLOG}, caption of figure 5: the top 1 % of channels"
)
LOCALITY_10 = Published(
    value=0.95, unit="",
    source=f"{_SECONDARY}: the top 10 % of channels keep the top 1 % of gradients over iterations",
)  # fmt: skip
LOCALITY_5 = Published(value=0.90, unit="", source=f"{_SECONDARY}: the top 5 % of channels")
AUTO_EARLY = Published(
    value=Range(low=1, high=2), unit="steps", source=f"{_SECONDARY}: Zen-auto's S early on"
)
AUTO_LATE = Published(
    value=Range(low=4, high=5), unit="steps", source=f"{_SECONDARY}: Zen-auto's S once stable"
)
OVERLAP_GAIN = Published(
    value=Range(low=0.09, high=0.12), unit="",
    source="deepspeedai/DeepSpeed #7478: 1344 to 1217 ms, 1564 to 1381 ms",
)  # fmt: skip
"""Gain of overlap alone in the released code, by one of its authors."""
INTERVAL_LOSS = Published(
    value=0.02, unit="accuracy", source=f"{_SECONDARY}: what S = 16 loses in 3 epochs"
)
