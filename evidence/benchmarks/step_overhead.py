"""Overhead of the engine itself per step, as a share of torch's AdamW step.

    python -m evidence.benchmarks.step_overhead [--tensors 30,300,1000] [--side 32,128,256]

Hooks, packing, selection and bookkeeping, with the host's side idle: its arithmetic is replaced by
nothing, so that on a CPU in the device's role no update competes with the training thread. Lanes
and worker run as ever; wall time includes copies by this machine's cores that a GPU's copy engines
would make, the training thread's time does not.

All contenders take turns in one process, on tensors of the same shapes: torch's foreach and fused
AdamW, ours with gradients kept until step(), and ours releasing them in backward (that backward
and step, less a backward without optimizer). The default settings keep small matrices on the
device; `--min-split-elements` has them split, to see what that would cost.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from evidence.benchmarks.engine_parts import breakdown
from evidence.benchmarks.ready_gradients import loss_of
from evidence.benchmarks.record import copy_bandwidth, setting, spread, take_turns
from experiments.output.files import write_json
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.host import kernel
from zenflow.host.pool import HostPool

FOREACH, FUSED, KEEP, RELEASE = "torch foreach", "torch fused", "ours, keep", "ours, release"
AIM = 2.0  # times the foreach step
WARM_ROUNDS = 5  # a window and the first selection


@dataclass(frozen=True)
class Cost:
    """Wall seconds of a step, and CPU seconds of the training thread."""

    wall: float
    cpu: float
    """Seconds of the training thread alone; its torch operations run on it too."""

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.wall - other.wall, self.cpu - other.cpu)


def timed(run: Callable[[], Any]) -> Cost:
    """Return the seconds of a call."""
    wall, cpu = time.perf_counter(), time.thread_time()
    run()
    return Cost(time.perf_counter() - wall, time.thread_time() - cpu)


@contextmanager
def idle_host() -> Iterator[None]:
    """Let the host's arithmetic do nothing."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    with (
        mock.patch.object(HostPool, "run", nothing),
        mock.patch.object(kernel, "run", nothing),
    ):
        yield


class Contenders:
    """The optimizers over tensors of one shape, and a timed turn of each.

    Copies end between turns, as they do behind a forward and backward of any length.
    """

    def __init__(self, num_tensors: int, side: int, config: ZenFlowConfig) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (side, side)
        self.grads = [torch.randn(shape, generator=generator) * 1e-3 for _ in range(num_tensors)]
        self.params, self.hooked, kept = (
            [nn.Parameter(torch.randn(shape)) for _ in range(num_tensors)] for _ in range(3)
        )
        foreach = torch.optim.AdamW(self.params, foreach=True)
        fused = torch.optim.AdamW(self.params, fused=True)
        self.keep = ZenFlowAdamW(kept, config=config, host_threads=1)
        self.release = ZenFlowAdamW(
            self.hooked, config=config, host_threads=1, offload_gradients="release"
        )
        self.turns: dict[str, Callable[[], Cost]] = {
            FOREACH: lambda: self._step_of(foreach, self.params),
            FUSED: lambda: self._step_of(fused, self.params),
            KEEP: lambda: self._step_of(self.keep, kept),
            RELEASE: self._release_turn,
        }

    def _step_of(self, optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> Cost:
        for param, grad in zip(params, self.grads, strict=True):
            param.grad = grad
        cost = timed(optimizer.step)
        if isinstance(optimizer, ZenFlowAdamW):
            optimizer.synchronize()
        return cost

    def _release_turn(self) -> Cost:
        """Return backward and step with our hooks, less a backward without any."""
        for param in self.params:
            param.grad = None
        bare = timed(loss_of(self.params, self.grads).backward)
        loss = loss_of(self.hooked, self.grads)

        def run() -> None:
            loss.backward()
            self.release.step()

        cost = timed(run) - bare
        self.release.synchronize()
        return cost

    def close(self) -> None:
        self.keep.close()
        self.release.close()


def floor_bytes(config: ZenFlowConfig, num_params: int, size: int = 4) -> dict[str, float]:
    """Return the bytes that a step must read and write on the device's side.

    Per parameter: its gradient is read for the columns' norms; an important one is gathered
    (read, written) and updated (gradient read, master and moments read and written, weight
    written); a deferred one is packed (read, written) every step and, once a window, unpacked.
    Until an update has landed it takes a fresh step (gradient read, weight read and written).
    Columns are strided: memory moves whole lines for them, more than these bytes.
    """
    k, window = config.topk_ratio, config.update_interval
    is_late = config.is_exact and (config.overlap_step or window > 1)
    thread = size + k * (2 * size + 4 + 24 + size) + is_late * (1 - k) * 3 * size
    lanes = (1 - k) * 2 * size * (1 + 1 / window)
    return {"training thread": num_params * thread, "copy lanes": num_params * lanes}


def summary(costs: dict[str, list[Cost]]) -> dict[str, Any]:
    """Return spreads, and the ratio of each contender's medians to foreach's."""
    rows: dict[str, Any] = {
        name: {
            "wall": spread([cost.wall for cost in found]),
            "cpu": spread([cost.cpu for cost in found]),
        }
        for name, found in costs.items()
    }
    for row in rows.values():
        for clock in ("wall", "cpu"):
            row[f"{clock}_ratio"] = row[clock]["median"] / rows[FOREACH][clock]["median"]
        row["reached"] = {clock: row[f"{clock}_ratio"] <= AIM for clock in ("cpu", "wall")}
    return rows


def measure(
    num_tensors: int, side: int, repeats: int, bandwidth: float, config: ZenFlowConfig
) -> dict[str, Any]:
    """Return the record of one number and size of tensors."""
    contenders = Contenders(num_tensors, side, config)
    try:
        with idle_host():
            rows = summary(take_turns(contenders.turns, repeats, WARM_ROUNDS))
            parts = {
                KEEP: breakdown(contenders.keep, contenders.turns[KEEP], repeats),
                RELEASE: breakdown(contenders.release, contenders.turns[RELEASE], repeats),
            }
    finally:
        contenders.close()
    report = contenders.keep.report
    assert report is not None
    num_bytes = floor_bytes(config, num_tensors * side * side)
    return {
        "tensors": num_tensors,
        "side": side,
        "contenders": rows,
        "parts": parts,
        "floor_bytes": num_bytes,
        "floor_seconds": {part: count / bandwidth for part, count in num_bytes.items()},
        "blocks": len(contenders.keep._running.layout.blocks),
        "buckets": len(contenders.keep._running.layout.buckets),
    }


def show(record: dict[str, Any]) -> None:
    """Print one size: contenders, the floor, and where our time goes."""
    print(
        f"\n{record['tensors']} tensors of {record['side']} x {record['side']} "
        f"({record['blocks']} blocks, {record['buckets']} buckets)"
    )
    print(
        f"{'':<16}{'wall ms (quartiles)':>26}{'x foreach':>11}{'thread ms':>12}{'x foreach':>11}"
    )
    for name, row in record["contenders"].items():
        low, middle, high = (1e3 * value for value in row["wall"]["quartiles"])
        verdict = ""
        if name in record["parts"]:
            words = {True: "reached", False: "NOT reached"}
            verdict = f"  at most {AIM:g} x foreach: thread {words[row['reached']['cpu']]}, "
            verdict += f"wall {words[row['reached']['wall']]}"
        print(
            f"{name:<16}{f'{middle:.2f} ({low:.2f}..{high:.2f})':>26}{row['wall_ratio']:>11.2f}"
            f"{1e3 * row['cpu']['median']:>12.2f}{row['cpu_ratio']:>11.2f}{verdict}"
        )
    floors = ", ".join(f"{part} {1e3 * s:.2f}" for part, s in record["floor_seconds"].items())
    print(f"floor by bytes, ms: {floors}")
    for name, parts in record["parts"].items():
        total = sum(parts.values())
        listed = ", ".join(f"{part} {1e3 * s:.2f}" for part, s in parts.items())
        print(f"{name}, thread ms by part: {listed}; together {1e3 * total:.2f}")


def numbers(text: str) -> list[int]:
    """Return whole numbers from a list such as 30,300."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=numbers, default=[30, 300, 1000])
    parser.add_argument("--side", type=numbers, default=[32, 128, 256])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--min-split-elements", type=int, default=ZenFlowConfig().min_split_elements
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's, for every contender")
    parser.add_argument("--out", type=Path, help="JSON file for the whole record")
    options = parser.parse_args()
    config = ZenFlowConfig(min_split_elements=options.min_split_elements)
    torch.set_num_threads(options.threads)
    bandwidth = copy_bandwidth()
    whole = setting(
        threads=options.threads,
        config=config.to_dict(),
        repeats=options.repeats,
        aim=AIM,
        copy_bytes_per_second=bandwidth,
        measurements=[],
    )
    print(
        f"{whole['hardware']['cpu']}, commit {whole['commit']}, load average "
        f"{whole['load_average']:.2f}, {options.threads} torch thread(s), copy "
        f"{bandwidth / 1e9:.1f} GB/s; device emulated on the CPU"
    )
    for side in options.side:
        for num_tensors in options.tensors:
            record = measure(num_tensors, side, options.repeats, bandwidth, config)
            whole["measurements"].append(record)
            show(record)
            gc.collect()  # the next size needs the memory
    if options.out is not None:
        write_json(options.out, whole)
        print(f"\nrecord: {options.out}")


if __name__ == "__main__":
    main()
