"""PCIe bytes per step by k and S: the closed form, the simulator and the engine's counters."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Data, Job, computed
from experiments.paper import published as paper
from experiments.paper.canvas import canvas
from experiments.paper.speed.phases import table_costs
from sim.simulate import Strategy
from sim.steady import steady
from zenflow.config import ZenFlowConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RATIOS = (0.05, 0.1, 0.3, 0.5)
_INTERVALS = (1, 2, 4, 8, 16)
_WIDTH, _LAYERS = 256, 4
_SETTLING, _COUNTED = 2, 2
"""Numbers of windows that settle, and that are counted."""
_NOTE = (
    "In model copies M of 2 bytes a parameter, both ways together. Simulated: Llama-2-7B on an "
    f"A100. Measured: the engine's counters in a run of {_LAYERS} matrices of {_WIDTH} x "
    f"{_WIDTH} on a CPU, which moves what it would move on a GPU; only this project's engine is "
    "counted, not the released code."
)


def closed_form(ratio: float, interval: int) -> float:
    """Return (S + 1) (1 - k) / S: bytes per step over those of the model."""
    return (interval + 1) * (1 - ratio) / interval


def _make(job: Job) -> Data:
    points = [(k, s) for k in _RATIOS for s in _INTERVALS]
    if job.smoke:
        points = [(paper.TOPK_RATIO, 2), (paper.TOPK_RATIO, paper.UPDATE_INTERVAL)]
    rows = []
    for number, (ratio, interval) in enumerate(points):
        job.progress(number / len(points), f"k {ratio:g}, S {interval}")
        rows.append(_row(ratio, interval, job.seed))
    return {"rows": rows, "zero_offload": _offload(job.seed)}


def _row(ratio: float, interval: int, seed: int) -> dict[str, Any]:
    knobs = {"topk_ratio": ratio, "update_interval": interval, "select_interval": 0}
    return {
        "k": ratio,
        "S": interval,
        "closed_form": closed_form(ratio, interval),
        "simulated": _simulated("zenflow", **knobs),
        "measured": _counted(ZenFlowConfig(**knobs), seed),  # type: ignore[arg-type]
    }


def _offload(seed: int) -> dict[str, float]:
    return {
        "closed_form": 2.0,
        "simulated": _simulated("zero_offload"),
        "measured": _counted(ZenFlowConfig.preset("zero_offload"), seed),
    }


def _simulated(strategy: str, **knobs: Any) -> float:
    costs = table_costs()
    found = steady(costs, Strategy.of(strategy, **knobs))
    return (found.d2h_bytes + found.h2d_bytes) / (costs.num_params * costs.dtype_bytes)


def _counted(config: ZenFlowConfig, seed: int) -> float:
    """Return the mean bytes of a step over the model's, by the engine's reports."""
    import torch

    from zenflow import ZenFlowAdamW

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)]
        model = torch.nn.Sequential(*layers).to(torch.bfloat16)
    source = torch.Generator().manual_seed(seed)
    optimizer = ZenFlowAdamW(
        model.parameters(), config=config, offload_gradients="release", max_grad_norm=1.0
    )
    moved = []
    try:
        for _ in range((_SETTLING + _COUNTED) * config.update_interval):
            x = torch.randn(4, _WIDTH, generator=source).to(torch.bfloat16)
            (model(x) - x).float().square().mean().backward()
            optimizer.step()
            optimizer.synchronize()
            report = optimizer.report
            assert report is not None
            moved.append(report.d2h_bytes + report.h2d_bytes)
    finally:
        optimizer.close()
    counted = moved[_SETTLING * config.update_interval :]
    return fmean(counted) / sum(p.nbytes for p in model.parameters())


def _findings(data: Data) -> Sequence[Finding]:
    at = next(row for row in data["rows"] if (row["k"], row["S"]) == (0.1, 4))
    offload, near = data["zero_offload"], Tolerance.relative(0.02)
    worst = max(
        abs(row[way] / row["closed_form"] - 1)
        for row in data["rows"]
        for way in ("simulated", "measured")
    )
    note = f"{_NOTE} The closed form is off by {worst:.1%} at most, over all k and S here."
    return [
        paper.ZENFLOW_BYTES.beside(
            "ZenFlow moves 1.125 M a step at k = 0.1, S = 4", near,
            simulated=at["simulated"], measured=at["measured"], note=note,
        ),
        paper.OFFLOAD_BYTES.beside(
            "ZeRO-Offload moves 2 M a step", near, simulated=offload["simulated"],
            measured=offload["measured"], note=note,
        ),
        paper.BYTES_CUT.beside(
            "That is 44 % less", near,
            simulated=1 - at["simulated"] / offload["simulated"],
            measured=1 - at["measured"] / offload["measured"], note=note,
        ),
    ]  # fmt: skip


def _draw(data: Data) -> Figure:
    figure, axes = canvas((8.5, 5), "PCIe bytes per step by k and S")
    colours = ("#1b9e77", "#7570b3", "#d95f02", "#e7298a")
    for ratio, colour in zip(_RATIOS, colours, strict=True):
        rows = [row for row in data["rows"] if row["k"] == ratio]
        at = [row["S"] for row in rows]
        axes.plot(at, [row["closed_form"] for row in rows], color=colour, label=f"k = {ratio:g}")
        axes.scatter(at, [row["simulated"] for row in rows], marker="s", s=64, facecolor="none",
                     edgecolor=colour)  # fmt: skip
        axes.scatter(at, [row["measured"] for row in rows], marker="x", s=36, color=colour)
    axes.axhline(data["zero_offload"]["measured"], color="#444444", linestyle="--", linewidth=1)
    axes.text(16, 1.97, "ZeRO-Offload, measured", ha="right", va="top", fontsize=9)
    axes.annotate("published: 1.125 M", (4, 1.125), (5.2, 1.42), fontsize=9,
                  arrowprops={"arrowstyle": "-", "color": "#555555"})  # fmt: skip
    axes.plot([], [], color="#555555", label="closed form (S + 1)(1 - k)/S")
    axes.scatter([], [], marker="s", s=64, facecolor="none", edgecolor="#555555",
                 label="simulated: Llama-2-7B on an A100")  # fmt: skip
    axes.scatter([], [], marker="x", s=36, color="#555555",
                 label="measured: the engine's counters, small model")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(_INTERVALS, [str(interval) for interval in _INTERVALS])
    axes.set_ylim(0, 2.15)
    axes.set_xlabel("steps of a window, S")
    axes.set_ylabel("bytes of a step over the model's, both ways")
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="lower left")
    return figure


STUDY = computed(
    group="paper",
    name="pcie_bytes",
    number=7,
    title="PCIe bytes per step by k and S",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=0.3,
    exact=True,
)
