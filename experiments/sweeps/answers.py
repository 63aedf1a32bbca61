"""Answers: what the shipped studies' tables say, in sentences whose every number is looked up.

Each function takes a study's table and returns two or three sentences.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autotune.efficiency import FITTED, EnergyCurve
from experiments.sweeps.columns import NO_ROOM, OK
from experiments.sweeps.table import predicted_rows
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs

if TYPE_CHECKING:
    import pandas as pd

DEPTH = "queue_depth"
"""Axis of how many gradients wait on the host for one pass over its state."""
STALL_FREE = 0.02
"""Share of a step, selections aside, up to which it counts as free of stall."""


def waiting(frame: pd.DataFrame) -> pd.Series[float]:
    """Return the share of each step that the device waits, selections aside."""
    waits: pd.Series[float] = (frame["stall_seconds"] - frame["selection_seconds"]) / frame[
        "step_seconds"
    ]
    return waits


def _listed(words: list[str]) -> str:
    """Return words with commas, and an "and" before the last."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# ---- PCIe 5 or a faster host? -----------------------------------------------------------------


def link_or_host(
    frame: pd.DataFrame, *, link: str, faster_link: str, host: str, batch: int
) -> list[str]:
    """Say how much of a step a faster link and faster hosts save.

    Args:
        frame: The table.
        link: Of the machine as it is.
        faster_link: In its place.
        host: As it is; the others of the table are tried.
        batch: At which machines are compared.
    """
    sentences = []
    own = predicted_rows(frame)[lambda table: table["batch"] == batch]
    for strategy, part in own.groupby("strategy", sort=False):
        steps = part.set_index(["host", "link"])["step_seconds"]
        now = steps[host, link]
        by_link = 1 - steps[host, faster_link] / now
        others = {name: 1 - steps[name, link] / now for name in part["host"].unique()}
        others = {name: saved for name, saved in others.items() if saved > 0}
        best = max(others, key=others.__getitem__)
        winner = "the host" if others[best] > by_link else "the link"
        listed = _listed([f"{name} {saved:.1%}" for name, saved in others.items()])
        sentences.append(
            f"{strategy}: {now:.2f} s a step on {host} with {link} and {batch} sequences; "
            f"{faster_link} saves {by_link:.1%}, a faster host {listed}: {winner} helps more."
        )
    sentences.append(_what_fits(frame))
    return sentences


def _what_fits(frame: pd.DataFrame) -> str:
    """Say which links a batch needs to fit at all."""
    short = frame[frame["status"] == NO_ROOM]
    parts = []
    for (strategy, batch), part in short.groupby(["strategy", "batch"], sort=True):
        every = frame[(frame["strategy"] == strategy) & (frame["batch"] == batch)]
        links = [name for name in every["link"].unique() if name not in set(part["link"])]
        fits = f"with {_listed(links)} only" if links else "with some hosts only"
        count = f"{int(batch)} sequence{'s' if batch > 1 else ''}"
        parts.append(f"{strategy} {count} {'nowhere' if len(part) == len(every) else fits}")
    if not parts:
        return "Every batch fits the device with every link."
    return f"Device memory holds {', '.join(parts)}; all else fits."


# ---- where ZenFlow stops paying ---------------------------------------------------------------


def worth() -> float:
    """Return the worth of a step of the default preset in steps of AdamW, in (0, 1].

    By the tuner's model of what late updates cost, which is of a small model at AdamW's best rate,
    and by that model's energy in a tenth of the columns: other models will have another.
    """
    config = ZenFlowConfig()
    deferred = 1.0 - EnergyCurve.default().captured(config.topk_ratio)
    return FITTED.of(Knobs.of(config), deferred)


def speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """Return zero_offload's step over zenflow's by (dram, grad_accum), as a table of its own."""
    own = predicted_rows(frame).pivot_table(
        index=["dram", "grad_accum"], columns="strategy", values="step_seconds", sort=False
    )
    found = (own["zero_offload"] / own["zenflow"]).rename("speedup").reset_index()
    return found.assign(status=OK)


def break_even(frame: pd.DataFrame, *, tokens: int) -> list[str]:
    """Say up to how many tokens a step zenflow is worth its staleness.

    Args:
        frame: The table.
        tokens: Of a micro-batch.
    """
    ratios = speedups(frame)
    needed = 1.0 / worth()
    parts = []
    for dram, part in ratios.groupby("dram"):
        by_size = part.sort_values("grad_accum")
        size = crossing(list(by_size["grad_accum"]), list(by_size["speedup"]), needed)
        last = int(by_size["grad_accum"].iloc[-1])
        parts.append(
            f"{_tokens(size * tokens)} at {dram:g} GB/s"
            if size is not None
            else f"beyond {_tokens(last * tokens)} at {dram:g} GB/s"
        )
    most = ratios.loc[ratios["speedup"].idxmax()]
    alone = frame[frame["strategy"] == "on_device"]
    fits = (alone["status"] == OK).any()
    reason = "" if fits else f" ({alone['reason'].iloc[0]})"
    return [
        f"zenflow is at most {most['speedup']:.2f} times as fast as zero_offload, with "
        f"{_tokens(most['grad_accum'] * tokens)} tokens a step and {most['dram']:g} GB/s of host "
        "memory; with more tokens the device's own work hides what zero_offload waits for.",
        f"A step of zenflow is worth {worth():.3f} of AdamW's by the tuner's model of that, so "
        f"it pays while it is {needed:.3f} times as fast: up to {_listed(parts)} of host memory, "
        "in tokens a step.",
        "On the device alone "
        + ("it fits too, and needs neither." if fits else f"it does not fit{reason}."),
    ]


def crossing(sizes: list[float], ratios: list[float], level: float) -> float | None:
    """Return where falling ratios pass a level for good, by log-linear interpolation.

    None where the last is above it; the first size where even that is not.

    >>> crossing([1, 4], [3.0, 1.0], 2.0)
    2.0
    """
    if ratios[-1] > level:
        return None
    for place in range(len(sizes) - 1, 0, -1):
        before, after = ratios[place - 1], ratios[place]
        if before > level >= after:
            share = (before - level) / (before - after)
            low, high = math.log(sizes[place - 1]), math.log(sizes[place])
            return float(f"{math.exp(low + share * (high - low)):.6g}")
    return float(sizes[0])


def _tokens(count: float) -> str:
    return f"{count / 1000:,.0f}k"


# ---- DRAM for a GPU ---------------------------------------------------------------------------


def least_dram(frame: pd.DataFrame) -> dict[tuple[int, str], float | None]:
    """Return the least DRAM bandwidth, GB/s, from which on steps are free of stall.

    By (queue_depth, gpu), interpolated; None where the largest of the table is not enough.
    """
    found: dict[tuple[int, str], float | None] = {}
    for (depth, gpu), part in frame.groupby([DEPTH, "gpu"], sort=False):
        by_rate = predicted_rows(part).sort_values("dram")
        rates, waits = list(by_rate["dram"]), list(waiting(by_rate))
        is_enough = bool(rates) and waits[-1] <= STALL_FREE
        found[int(depth), str(gpu)] = crossing(rates, waits, STALL_FREE) if is_enough else None
    return found


def dram_for_gpu(frame: pd.DataFrame) -> list[str]:
    """Say how much host memory each GPU needs."""
    least = least_dram(frame)
    largest = frame["dram"].max()
    sentences = []
    depths = sorted({depth for depth, _ in least})
    for depth in depths:
        own = {gpu: rate for (other, gpu), rate in least.items() if other == depth}
        enough = [f"{gpu} {rate:.0f}" for gpu, rate in own.items() if rate is not None]
        short = [gpu for gpu, rate in own.items() if rate is None]
        said = f"With q = {depth} a step is free of stall from"
        said += f" these GB/s of host memory on: {_listed(enough)}" if enough else " none"
        if short:
            said += f"; up to {largest:.0f} is not enough on {_listed(short)}"
        sentences.append(said + ".")
    sentences += _not_the_memory(frame, {gpu for (_, gpu), rate in least.items() if rate is None})
    low, high = depths[0], depths[-1]
    shares = sorted(
        deep / flat
        for depth, gpu in least
        if depth == low and (flat := least[low, gpu]) and (deep := least[high, gpu])
    )
    if shares and low < high:
        sentences.append(
            f"Where both are known, q = {high} needs {shares[0]:.0%} to {shares[-1]:.0%} of the "
            f"bandwidth of q = {low}: one pass over the host's state takes more gradients in."
        )
    return sentences


def _not_the_memory(frame: pd.DataFrame, gpus: set[str]) -> list[str]:
    """Say which GPUs still wait where twice the bandwidth has stopped to help."""
    known = predicted_rows(frame).assign(waits=waiting)
    found = []
    for gpu, part in known[known["gpu"].isin(gpus)].groupby("gpu", sort=False):
        fastest = part[part["dram"] == part["dram"].max()]["waits"].min()
        slower = part[part["dram"] <= part["dram"].max() / 2]
        before = slower[slower["dram"] == slower["dram"].max()]["waits"].min()
        if fastest > 0.95 * before:
            found.append(
                f"{gpu} ({part['link_name'].iloc[0]}) still waits {fastest:.0%} of a step"
            )
    if not found:
        return []
    return [f"{_listed(found)} where more bandwidth has stopped to help: not for host memory."]


# ---- cores against S --------------------------------------------------------------------------


def cores_against_interval(frame: pd.DataFrame) -> list[str]:
    """Say how many cores each window needs, and whether longer windows save cores."""
    known = predicted_rows(frame).assign(waits=waiting)
    sentences = []
    for depth, own in known.groupby(DEPTH, sort=False):
        parts = []
        for interval, part in own.groupby("S"):
            free = _least_cores(part)
            parts.append(f"{'no number here' if free is None else free} at S={int(interval)}")
        sentences.append(f"Cores for a step without stall, with q = {depth}: {_listed(parts)}.")
    best = known.loc[known["step_seconds"].idxmin()]
    least = known[known["cores"] == known["cores"].min()]
    fewest = least.loc[least["step_seconds"].idxmin()]
    sentences.append(
        f"The fastest step, {best['step_seconds']:.2f} s, has S={int(best['S'])} and "
        f"q = {int(best[DEPTH])} on {int(best['cores'])} cores; with "
        f"{int(fewest['cores'])} cores the best is {fewest['step_seconds']:.2f} s, at "
        f"S={int(fewest['S'])} and q = {int(fewest[DEPTH])}."
    )
    return sentences


def _least_cores(part: pd.DataFrame) -> int | None:
    """Return the fewest cores from which on every number of them is free of stall."""
    least = None
    for cores, waits in part.sort_values("cores", ascending=False)[["cores", "waits"]].to_numpy():
        if waits > STALL_FREE:
            break
        least = int(cores)
    return least
