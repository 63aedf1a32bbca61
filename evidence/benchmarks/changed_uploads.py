"""Bytes on the link of a fine-tuning whose uploads have changed weights alone.

    python -m evidence.benchmarks.changed_uploads --model FOLDER [--rates R ...] [--out FILE]

A pretrained model in bfloat16 is trained on a CPU in the role of the device, with gradients of
eight bits. After some windows each step's bytes are counted. Beside them is what marks and changed
values take, by weights that are compared before and after the step. Which weights change goes by
the learning rate over the size of the weights, so the rates are given in sizes too.
"""

from __future__ import annotations

import argparse
import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from evidence.benchmarks.record import setting
from experiments.output.files import write_json
from experiments.training.parts.setup import build_setup
from experiments.training.run.evaluation import cross_entropy, forward
from experiments.training.settings.training import TrainSettings
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.columns.layout import Block, SplitParam
from zenflow.host_state import HostState, mark_bytes

MOST_LINK, MOST_OFF = 0.55, 0.01
"""Bytes of a step that the link may carry, in bfloat16 copies of the model, and the share by which
uploads may be off what marks and values take."""
MOST_LINK_AT = 6e-5
"""Largest learning rate, in sizes of the weights, at which `MOST_LINK` is asked."""


def measure(settings: TrainSettings, interval: int, host_state: HostState) -> dict[str, Any]:
    """Return the bytes of a step in the mean, after two windows."""
    setup = build_setup(settings)
    model = setup.model.to(torch.bfloat16).train()
    config = ZenFlowConfig(
        uploads="changed", gradient_link="e4m3", host_state=host_state,
        update_interval=interval, queue_depth=interval, **settings.knobs,
    )  # fmt: skip
    first = 2 * interval + 2
    rows = []
    with closing(
        ZenFlowAdamW(
            model.parameters(), lr=settings.lr, betas=settings.betas, eps=settings.eps,
            weight_decay=settings.weight_decay, config=config, offload_gradients="release",
            max_grad_norm=1.0,
        )
    ) as optimizer:  # fmt: skip
        engine = optimizer._running  # owners of columns, which no public name has
        for step in range(setup.total_steps):
            landing = [(u.block, u.marks, _columns(u.block)) for u in engine.in_flight]
            batch = setup.data.train.batch(step)
            cross_entropy(forward(model, batch), batch).backward()
            optimizer.step()
            if step >= first:
                report = optimizer.report
                assert report is not None
                rows.append((report.d2h_bytes, report.h2d_bytes, *_counted(landing)))
        num_params = sum(p.numel() for p in model.parameters())
        sizes = [_size(split) for split in engine.layout.splits]
    down, up, formula, changed, whole, landed = (
        sum(column) / len(rows) for column in zip(*rows, strict=True)
    )
    return {
        "rate": settings.lr,
        "rate_in_sizes": settings.lr / math.sqrt(sum(s * s for s in sizes) / len(sizes)),
        "interval": interval,
        "host_state": host_state,
        "changed_share": changed / landed,
        "whole_share": whole / landed,
        "upload_bytes_per_weight": up / landed,
        "formula_bytes_per_weight": formula / landed,
        "down_copies": down / (2 * num_params),
        "up_copies": up / (2 * num_params),
        "link_copies": (down + up) / (2 * num_params),
        "steps": len(rows),
        "params": num_params,
    }


def _columns(block: Block) -> Tensor:
    return block.split.weight().detach()[:, block.deferred_columns].view(torch.int16)


def _counted(landing: list[tuple[Block, Tensor | None, Tensor]]) -> tuple[int, int, int, int]:
    """Return the bytes of some uploads by the formula, and counts of their weights.

    The counts are of changed weights, of those of blocks that came whole, and of all.
    """
    num_bytes = changed = whole = total = 0
    for block, marks, before in landing:
        count = int((before != _columns(block)).sum())
        num_rows, num_columns = before.shape
        num_bytes += before.nbytes if marks is None else num_columns * mark_bytes(num_rows)
        num_bytes += 0 if marks is None else 2 * count
        changed += count
        whole += before.numel() if marks is None else 0
        total += before.numel()
    return num_bytes, changed, whole, total


def _size(split: SplitParam) -> float:
    """Return the root mean square of a parameter's weights."""
    return float(split.weight().detach().float().square().mean().sqrt())


def verdicts(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return the demands on all rows, and whether each holds."""
    off = max(
        abs(row["upload_bytes_per_weight"] / row["formula_bytes_per_weight"] - 1) for row in rows
    )
    small = [row["link_copies"] for row in rows if row["rate_in_sizes"] <= MOST_LINK_AT]
    found = {f"uploads are within {MOST_OFF:.0%} of marks and values": off <= MOST_OFF}
    if small:
        found[f"the link carries at most {MOST_LINK} copies at small rates"] = (
            max(small) <= MOST_LINK
        )
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    heads = ("rate", "in sizes", "S", "state", "changed", "whole", "B/weight", "formula", "link")
    lines = ["{:>8}{:>10}{:>4}{:>10}{:>9}{:>7}{:>10}{:>9}{:>7}".format(*heads)]
    lines += [
        f"{row['rate']:>8.0e}{row['rate_in_sizes']:>10.1e}{row['interval']:>4}"
        f"{row['host_state']:>10}{row['changed_share']:>9.1%}{row['whole_share']:>7.1%}"
        f"{row['upload_bytes_per_weight']:>10.3f}{row['formula_bytes_per_weight']:>9.3f}"
        f"{row['link_copies']:>7.3f}"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure all rates, print a table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a pretrained model")
    parser.add_argument("--data", help="texts; default: this Python's standard library")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--intervals", type=int, nargs="+", default=[4])
    states = get_args(HostState)
    parser.add_argument("--host-states", nargs="+", default=["compact"], choices=states)
    parser.add_argument("--steps", type=int, default=8, help="steps that are counted")
    parser.add_argument("--out", type=Path, help="JSON file for the record")
    options = parser.parse_args()
    whole = setting(model=Path(options.model).name, rows=[])
    for interval in options.intervals:
        for host_state in options.host_states:
            for rate in options.rates:
                settings = TrainSettings(
                    model=options.model, data=options.data, batch_size=1, sequence=128,
                    lr=rate, steps=2 * interval + 2 + options.steps,
                )  # fmt: skip
                whole["rows"].append(measure(settings, interval, host_state))
                print(json.dumps(whole["rows"][-1]), flush=True)
    whole["verdicts"] = verdicts(whole["rows"])
    print(table(whole["rows"]))
    for text, holds in whole["verdicts"].items():
        print(f"{text}: {'holds' if holds else 'DOES NOT HOLD'}")
    if options.out is not None:
        write_json(options.out, whole)


if __name__ == "__main__":
    main()
