"""The words of ``zenflow plan`` on AdamW's states on a drive: speed, wear, and the command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from experiments.commands.prediction.plan_run import STATE_DIR, Wishes, run_command
from sim.memory_parts import gib
from sim.planning.drives import MANY_STEPS, written_bytes

if TYPE_CHECKING:
    from sim.planning.options import Option
    from sim.planning.plan import Plan


def on_drive(plan: Plan, wishes: Wishes) -> Iterator[str]:
    """Yield the step with states on a drive, its wear, and its command."""
    option = plan.on_drive
    if option is None or option.prediction is None:
        return
    need, done, drives = option.need, option.prediction, plan.hardware.nvme
    assert drives is not None
    beside = ""
    if plan.shown is not None:
        beside = f", {option.tokens_per_second / plan.shown.tokens_per_second:.2g} times as many"
    yield (
        f"AdamW's states can be on a drive ({drives.name}): {option.label}. Predicted are "
        f"{option.tokens_per_second:,.0f} tokens/s{beside}, {option.step_seconds:.3g} s a step, "
        f"stalled for {done.stall_fraction:.0%} of it, with {gib(need.host_bytes)} of host memory "
        f"and {gib(need.nvme_bytes)} of the drive."
    )
    yield from wear(plan, option, wishes)
    command = run_command(plan, wishes, option)
    if command is not None:
        yield f"In a folder of yours in place of {STATE_DIR}:"
        yield f"    {command}"


def wear(plan: Plan, option: Option, wishes: Wishes) -> Iterator[str]:
    """Yield the bytes that an option writes to the drives."""
    baseline = plan.zero_infinity
    if baseline is not None and baseline.prediction is not None:
        yield (
            f"ZeRO-Infinity, whose weights visit too (--strategy zero_infinity), would make "
            f"{baseline.tokens_per_second:,.0f} tokens/s there: this is "
            f"{option.tokens_per_second / baseline.tokens_per_second:.2g} times as fast."
        )
    written = written_bytes(option)
    share = "; with --drive-tbw a plan says which share of the drive's warranty that is"
    if wishes.drive_tbw is not None:
        share = f", {written / (wishes.drive_tbw * 1e12):.2%} of the warranted"
        share += f" {wishes.drive_tbw:g} TB"
    yield (
        f"{MANY_STEPS:,} steps write {written / 1e12:.3g} TB to the drive{share}. States on a "
        "drive have not run with a GPU yet."
    )
