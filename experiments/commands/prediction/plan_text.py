"""The words of ``zenflow plan``: what to run, how fast it is, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from experiments.commands.prediction.plan_accuracy import accuracy
from experiments.commands.prediction.plan_beside import (
    accumulation,
    changes,
    devices,
    helps,
    instead,
    offer,
    plain,
    riskier,
    speed,
    tokens,
    waits,
)
from experiments.commands.prediction.plan_chunks import chunks, likeliest
from experiments.commands.prediction.plan_drive import on_drive, wear
from experiments.commands.prediction.plan_run import Wishes, run_command, what_to_run
from sim.memory.chance import LIKELY
from sim.memory_parts import gib
from sim.planning.rules import rounds
from sim.timing.changed_uploads import CHANGED_AT, changed_share
from zenflow.host_state import state_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from sim.planning.options import Option
    from sim.planning.plan import Plan


def heading(plan: Plan, notes: list[str]) -> list[str]:
    """Return the question: model, machine and assumptions."""
    hardware, work = plan.hardware, plan.workload
    count = work.batch_size * work.accumulation
    each = "each device's step" if hardware.total_devices > 1 else "a step"
    hosts = f"{hardware.num_hosts} hosts, each " if hardware.num_hosts > 1 else ""
    network = f", {hardware.network.name}" if hardware.network is not None else ""
    active = ""
    if work.active_params != work.num_params:
        active = f" ({work.active_params / 1e9:.3g} of them active)"
    lines = [
        f"{work.name}, {work.num_params / 1e9:.3g} billion parameters{active} in {work.dtype}; "
        f"{each} takes {count} x {work.sequence} tokens",
        f"{hardware.name}: {hosts}{hardware.num_devices} x {hardware.device.name} with "
        f"{gib(hardware.device.memory.value)}, {hardware.host.name} with "
        f"{gib(hardware.host.dram_bytes.value)}, {hardware.link.name}{network}",
    ]
    return [*lines, *(f"({note})" for note in notes), ""]


def plan_table(plan: Plan) -> Table:
    """Return the presets, each as it does best, and other systems; a notebook shows it too."""
    from rich.table import Table

    table = Table()
    table.add_column("runs here")
    for name in ("step", "tokens/s", "stalled", "device", "host", "disk", "fits", "AdamW"):
        table.add_column(name, justify="right", no_wrap=True)
    is_first, shown = True, plan.shown
    rows = [*plan.options]
    if shown is not None and shown in (plan.streamed, plan.on_drive):
        rows.insert(0, shown)
    for option, after in zip(rows, [*rows[1:], None], strict=True):
        if is_first and not option.is_ours:
            is_first = False
            table.add_row("other systems, not run here", *[""] * 8, style="italic")
        done = option.prediction
        table.add_row(
            option.label,
            f"{option.step_seconds:.3g} s" if done else "-",
            f"{option.tokens_per_second:,.0f}" if done else "-",
            f"{done.stall_fraction:.1%}" if done else "-",
            gib(option.need.device_bytes),
            gib(option.need.host_bytes),
            gib(option.checkpoint_bytes) if option.checkpoint_bytes else "-",
            _fit(option),
            _likeness(option),
            end_section=after is not None and option.is_ours != after.is_ours,
            style="bold" if shown and option.label == shown.label else None,
        )
    return table


def _fit(option: Option) -> str:
    """Return whether an option fits, and how likely that is where it may."""
    if option.shortfalls:
        return "no"
    word = "yes" if option.fits else "may not"
    return word if option.chance is None else f"{word}, {option.chance:.0%}"


def _likeness(option: Option) -> str:
    """Return whether a rule is AdamW's, or trains something else than the weights."""
    if option.rule.startswith("AdamW exactly"):
        return "exactly"
    return "adapters" if "adapters" in option.rule else "no"


def answer(plan: Plan, wishes: Wishes) -> list[str]:
    """Return the advice, the most important first and the command last."""
    chosen = plan.shown
    if chosen is None:
        return [*_nothing(plan), *instead(plan), *changes(plan)]
    is_special = chosen in (plan.streamed, plan.on_drive)
    improved = changes(plan) if is_special or plan.recommended is None else helps(plan)
    return [
        *_headline(plan, chosen),
        *_special(plan, chosen, wishes),
        *_rounded(plan, chosen),
        *_changed(chosen),
        *([] if is_special else chunks(plan, chosen)),
        *devices(plan, chosen),
        *_costs(plan, chosen, wishes),
        f"Memory: {_used(plan, chosen)}; {gib(plan.reserve)} of each is held in reserve.",
        f"Disk: {gib(chosen.checkpoint_bytes or 0)} for a checkpoint, twice that while one is "
        "saved (none with --no-checkpoint).",
        *riskier(plan),
        *waits(plan, chosen),
        *accumulation(plan, chosen),
        *accuracy(plan, chosen, wishes),
        *plain(plan, chosen),
        *instead(plan),
        *improved,
        *([] if chosen is plan.streamed else _streamed(plan, wishes)),
        *([] if chosen is plan.on_drive else on_drive(plan, wishes)),
        *what_to_run(plan, wishes),
    ]


def _nothing(plan: Plan) -> Iterator[str]:
    """Yield the bad news that nothing fits, and its reason."""
    yield "Nothing fits this machine, with fewer tokens to a step either."
    if plan.needs_sharding:
        yield _needs_sharding(plan)
        if plan.parallel == "ddp" and plan.hardware.total_devices > 1:
            yield "Weights may be sharded: leave --parallel out, or ask with --parallel fsdp."


def _needs_sharding(plan: Plan) -> str:
    work, device = plan.workload, plan.hardware.device
    each = "its share of the weights alone is" if plan.parallel == "fsdp" else (
        f"the weights of {work.name} alone are"
    )  # fmt: skip
    parts = plan.hardware.total_devices if plan.parallel == "fsdp" else 1
    return (
        f"For each {device.name}, with {gib(device.memory.value)}, {each} "
        f"{gib(work.model_bytes / parts)}."
    )


def _special(plan: Plan, chosen: Option, wishes: Wishes) -> Iterator[str]:
    """Yield the meaning of layers that visit the device, or of states on a drive."""
    if chosen is plan.streamed:
        if plan.needs_sharding:
            yield _needs_sharding(plan)
        yield from _visits(plan, chosen)
    elif chosen is plan.on_drive:
        yield from wear(plan, chosen, wishes)
    if plan.likeliest is not None and chosen is not plan.likeliest:
        other = plan.likeliest
        chance = "" if other.chance is None else f" with a chance of {other.chance:.0%}"
        yield (
            f"Otherwise the likeliest to fit is {other.label}, with "
            f"{tokens(other.need.workload)} to a step: {speed(other)}, it fits{chance}."
        )


def _visits(plan: Plan, option: Option) -> Iterator[str]:
    own = option.need.workload.batch_size * option.need.workload.sequence
    yield (
        f"Its layers visit the {plan.hardware.device.name}. Micro-batches of "
        f"{plan.hiding_tokens:,} tokens or more hide these visits; they have {own:,}. Predicted "
        "times of visits have been compared with those of one GPU, which was slower."
    )


def _streamed(plan: Plan, wishes: Wishes) -> Iterator[str]:
    """Yield the step of layers that visit the device, with its command."""
    option = plan.streamed
    if option is None or option.prediction is None:
        return
    need, done = option.need, option.prediction
    beside = ""
    if plan.shown is not None:
        beside = f", {option.tokens_per_second / plan.shown.tokens_per_second:.2g} times as many"
    yield (
        f"{_merit(plan, option)} its layers can visit the {plan.hardware.device.name}: "
        f"{option.label}. Predicted are {option.tokens_per_second:,.0f} tokens/s{beside}, "
        f"{option.step_seconds:.3g} s a step, stalled for {done.stall_fraction:.0%} of it, with "
        f"{gib(need.device_bytes)} of device memory and {gib(need.host_bytes)} of host memory."
    )
    yield from _visits(plan, option)
    command = run_command(plan, wishes, option)
    if command is not None:
        yield f"    {command}"


def _merit(plan: Plan, option: Option) -> str:
    """Return the reason to stream weights, as the beginning of a sentence."""
    if plan.has_fewer_tokens:
        return f"With all {tokens(option.need.workload)} to a step,"
    return "To be faster,"


def _headline(plan: Plan, chosen: Option) -> Iterator[str]:
    """Yield the setting to use, with a warning first where the fit is not likely."""
    told = plan.interval
    between = (
        f" ({told.coverage:.0%} interval: {told.low:,.0f} to {told.high:,.0f})" if told else ""
    )
    done = chosen.prediction
    assert done is not None
    where = f" on {chosen.need.num_devices} devices" if chosen.need.num_devices > 1 else ""
    text = (
        f"{chosen.label}{where}: {chosen.tokens_per_second:,.0f} tokens/s{between}, "
        f"{chosen.step_seconds:.3g} s a step, stalled for {done.stall_fraction:.0%} of it."
    )
    asked, given = tokens(plan.workload), tokens(chosen.need.workload)
    if plan.recommended is None:
        if chosen.chance is not None and chosen.chance < LIKELY:
            yield (
                "Warning: this may run out of memory. Nothing fits with a chance of "
                f"{LIKELY:.0%}; {likeliest(plan)} does with {chosen.chance:.0%}."
            )
        else:
            yield "Warning: this may run out of memory. Nothing leaves the reserve free."
        fewer = f" with {given} to a step (asked for: {asked})" if plan.has_fewer_tokens else ""
        yield f"Likeliest to fit{fewer}: {text}"
    elif plan.has_fewer_tokens:
        sure = "" if plan.hardware.device.is_cpu else f" with a chance of {LIKELY:.0%}"
        yield f"{asked} to a step do not fit{sure}; {given} do. Use {text}"
    else:
        yield f"Use {text}"


def _changed(chosen: Option) -> Iterator[str]:
    """Yield the assumption on uploads of changed weights."""
    config = chosen.strategy.config
    if config is None or not config.uploads_changes:
        return
    share = changed_share(config.update_interval)
    yield (
        f"With uploads=changed it is assumed that {share:.0%} of the weights change between two "
        f"uploads, as at learning rates of {CHANGED_AT:.0e} of the weights' size. Other rates "
        "have other shares, and from a thousandth on all weights are uploaded. No GPU has run it."
    )


_LONG = 4096
"""Elements of a column by which bytes of a parameter are told."""


def _rounded(plan: Plan, chosen: Option) -> Iterator[str]:
    """Yield the meaning of formats of few bytes, and the change that float32 needs."""
    config = chosen.strategy.config
    if config is None:
        return
    if config.is_factored:
        yield (
            "With second_moment=factored the rule is another optimizer than AdamW, whoever owns "
            "a column. Small models kept AdamW's loss with it in fine-tuning; from random weights "
            "some ended several per cent above. No GPU has run it."
        )
    if not rounds(config):
        return
    if plan.without_compact is not None:
        plain, compact = (
            state_bytes(state, 1, _LONG, config.second_moment) / _LONG
            for state in ("float32", "compact")
        )
        yield (
            f"Nothing fits with float32 weights and moments on the host, {plain:.3g} bytes a "
            f"parameter. So host_state=compact was tried, {compact:.3g} bytes."
        )
    if config.is_compact:
        yield (
            "With host_state=compact the host's columns follow AdamW within rounding, not bit "
            "for bit. Small models kept their loss: in every run of fine-tuning, and in means of "
            "eight seeds from random weights. The time of its arithmetic goes by a ratio that was "
            "measured on one CPU."
        )
    if config.rounds_gradients:
        yield (
            "With gradient_link=e4m3 the host gets gradients of eight bits. Small models kept "
            "float32's loss with them, as far as runs of three seeds can tell."
        )
    for item in (plan.without_compact or ())[:1]:
        yield f"For float32 change first: {item.change}. Then {offer(plan, item)}."


def _costs(plan: Plan, chosen: Option, wishes: Wishes) -> Iterator[str]:
    """Yield time and cost of the tokens asked for, or the cost of a billion."""
    count = wishes.tokens
    if count is None and wishes.usd_per_hour is None:
        return
    count = 1e9 if count is None else count
    told = plan.interval
    rates = [chosen.tokens_per_second, *([told.high, told.low] if told else [])]
    times = [count / rate for rate in rates]
    text = f"{count:,.0f} tokens: {_duration(times[0])}"
    text += f" ({_duration(times[1])} to {_duration(times[2])})" if told else ""
    if wishes.usd_per_hour is not None:
        prices = [f"{seconds / 3600 * wishes.usd_per_hour:,.2f}" for seconds in times]
        text += f", {prices[0]} USD" + (f" ({prices[1]} to {prices[2]})" if told else "")
    yield f"{text}."


def _duration(seconds: float) -> str:
    """Return a time in words.

    >>> [_duration(s) for s in (42, 5400, 200_000)]
    ['42 s', '1.5 hours', '2.3 days']
    """
    if seconds >= 1.5 * 86400:
        return f"{seconds / 86400:,.1f} days"
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} hours"
    return f"{seconds / 60:.3g} minutes" if seconds >= 90 else f"{seconds:.3g} s"


def _used(plan: Plan, option: Option) -> str:
    need, hardware = option.need, plan.hardware
    host = f"{gib(need.host_bytes)} of {gib(hardware.host.dram_bytes.value)} on the host"
    if hardware.device.is_cpu:
        return host
    device = f"{gib(need.device_bytes)} of {gib(hardware.device.memory.value)} on the device"
    return f"{device} (it fits with a chance of {need.chance(hardware):.0%}), {host}"
