"""The words of ``zenflow plan`` on other devices, other systems, and parts to buy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sim.memory_parts import gib
from sim.planning.instead import WAITS
from sim.simulate import busiest_lane

if TYPE_CHECKING:
    from sim.models.workload import Workload
    from sim.planning.improvements import Improvement
    from sim.planning.options import Option
    from sim.planning.plan import Plan
    from sim.simulate import Prediction

_DOUBTFUL = 1.5
"""Times one device's speed that several should reach to be worth their price."""
_FEW_HOSTS = 0.75
"""Share of so many times one host's speed below which several hosts are said to wait."""
_MOST_HELPS = 3
_ALIKE = 0.05
"""Difference of two speeds that nobody notices."""


def speed(option: Option) -> str:
    """Return tokens per second in words."""
    return f"{option.tokens_per_second:,.0f} tokens/s"


def slowness(times: float) -> str:
    """Return how many times slower a way is, in words.

    >>> slowness(3.456), slowness(1.02), slowness(0.8)
    ('3.5 times slower', 'about as fast', 'faster')
    """
    if abs(times - 1) < _ALIKE:
        return "about as fast"
    return f"{times:.2g} times slower" if times > 1 else "faster"


def tokens(work: Workload) -> str:
    """Return the tokens of a step in words."""
    return f"{work.batch_size * work.accumulation} x {work.sequence} tokens"


def waits_for(plan: Plan, done: Prediction) -> str:
    """Return the part of the machine that has most to do beside the device, in words."""
    hardware = plan.hardware
    lane = busiest_lane(done)
    if lane == "fabric" and hardware.network is not None:
        return f"collectives between hosts ({hardware.network.name})"
    names = {
        "fabric": f"collectives between devices ({hardware.fabric.name})"
        if hardware.fabric is not None
        else "collectives between devices",
        "host": f"the host's update ({hardware.host.name})",
        "d2h": f"gradients on the link ({hardware.link.name})",
        "h2d": f"weights on the link ({hardware.link.name})",
        "drive": f"the drive ({hardware.nvme.name})" if hardware.nvme is not None else "the drive",
    }
    return names.get(lane or "", "the host")


def devices(plan: Plan, chosen: Option) -> Iterator[str]:
    """Yield comparisons of all devices with fewer, and of whole weights with sharded ones."""
    count, used = plan.hardware.total_devices, chosen.need.num_devices
    if count == 1 or chosen.prediction is None:
        return
    yield from _sharing(plan, chosen)
    by_count = {option.need.num_devices: option for option in plan.per_devices}
    if count not in by_count:
        why = ": under DDP each holds all weights and all gradients"
        yield (
            f"{count} devices do not fit{why if plan.parallel == 'ddp' else ''}. "
            f"{'Use one' if used == 1 else f'{used} do'}."
        )
    lane = waits_for(plan, chosen.prediction)
    one = by_count.get(1)
    if used > 1 and one is not None:
        factor = chosen.tokens_per_second / one.tokens_per_second
        doubt = f": hardly worth their price, as they wait for {lane}"
        yield (
            f"One device makes {speed(one)}; {used} make {factor:.2g} times as many"
            f"{doubt if factor < _DOUBTFUL else ''}."
        )
    elif used == 1 and count in by_count:
        every = by_count[count]
        assert every.prediction is not None
        lane = waits_for(plan, every.prediction)
        yield f"{count} devices make no more ({speed(every)}): they wait for {lane}."
    yield from _hosts(plan, by_count)


def _hosts(plan: Plan, by_count: dict[int, Option]) -> Iterator[str]:
    """Yield a comparison of all hosts with one."""
    hardware = plan.hardware
    one, every = by_count.get(hardware.num_devices), by_count.get(hardware.total_devices)
    if hardware.num_hosts == 1 or every is None or every.prediction is None:
        return
    if one is None:
        yield f"One host does not fit; {hardware.num_hosts} do."
        return
    factor = every.tokens_per_second / one.tokens_per_second
    cause = ""
    if factor < _FEW_HOSTS * hardware.num_hosts:
        cause = f", as they wait for {waits_for(plan, every.prediction)}"
    yield (
        f"One host makes {speed(one)}; {hardware.num_hosts} make {factor:.2g} times as many"
        f"{cause}."
    )


def _sharing(plan: Plan, chosen: Option) -> Iterator[str]:
    """Yield the reason for sharded weights, or the speed that they would have."""
    other = plan.other_way
    if plan.parallel == "fsdp":
        why = "no copy of the model on each device fits surely"
        if other is not None and other.fits:
            why = f"whole weights on each (--parallel ddp) make {speed(other)}"
        yield f"Weights are sharded, as by fully_shard (--parallel fsdp): {why}."
    elif other is not None:
        fit = "" if other.fits else ", and may not fit"
        yield (
            f"Sharded weights (--parallel fsdp) make {speed(other)} on {other.need.num_devices} "
            f"devices{fit}."
        )


def waits(plan: Plan, chosen: Option) -> Iterator[str]:
    """Yield the part of the machine that the device waits for, and the meaning of k = 0."""
    config, done = chosen.strategy.config, chosen.prediction
    if config is not None and chosen.strategy.name == "zenflow" and config.topk_ratio == 0:
        yield (
            "k = 0 means that no column stays on the device: the host updates all weights, which "
            f"come back once in {config.update_interval} steps and are estimated meanwhile."
        )
    if done is not None and done.stall_fraction >= WAITS:
        yield (
            f"It works, but the GPU waits {done.stall_fraction:.0%} of the time, most of all for "
            f"{waits_for(plan, done)}."
        )


def plain(plan: Plan, chosen: Option) -> Iterator[str]:
    """Yield the cost of offloading where nothing needs it."""
    if chosen.strategy.name != "on_device":
        return
    ours = [option for option in plan.options if option.strategy.name == "zenflow"]
    for option in ours:
        if option.prediction is not None:
            beside = slowness(chosen.tokens_per_second / option.tokens_per_second)
            yield (
                "Do not offload here: AdamW's states fit the device, and zenflow would be "
                f"{beside} ({speed(option)})."
            )


def instead(plan: Plan) -> Iterator[str]:
    """Yield other systems that fit one device."""
    for option in plan.instead:
        what = "no weight but adapters is trained" if "adapters" in option.rule else option.rule
        work = option.need.workload
        fewer = ""
        if work.tokens_per_step < plan.workload.tokens_per_step:
            fewer = f" with {work.batch_size * work.accumulation} x {work.sequence} tokens a step"
        chance = "" if option.chance is None else f", fits with a chance of {option.chance:.0%}"
        yield (
            f"Instead, by other tools: {option.label}{fewer}: {speed(option)}, "
            f"{gib(option.need.device_bytes)} on the device{chance} ({what})."
        )


def changes(plan: Plan) -> Iterator[str]:
    """Yield the changes to try where no setting surely fits."""
    if plan.largest is not None:
        yield f"The largest model of the table that one such device trains: {plan.largest}."
    if not plan.improvements:
        if plan.shown is None:
            yield "No memory that is sold, and that this host takes, would make it fit."
        return
    first, *others = plan.improvements
    yield f"Change first: {first.change}. Then {offer(plan, first)}."
    if first.host_memory is not None:
        yield f"(Ask again with --host-ram {first.host_memory / 2**30:.0f} for the command.)"
    yield from (f"Or: {item.change}. Then {offer(plan, item)}." for item in others)


def helps(plan: Plan) -> Iterator[str]:
    """Yield the changes that would make the recommended setting faster."""
    useful = [item for item in plan.improvements if item.helps][:_MOST_HELPS]
    said = [
        f"{item.change}, {1 / (1 - (item.saved_share or 0.0)):.2g} times the speed"
        for item in useful
    ]
    if said:
        yield f"What would help: {'; '.join(said)}."


def offer(plan: Plan, item: Improvement) -> str:
    """Return the setting and the speed that a change of the machine brings, in words."""
    one = " on one device" if item.num_devices < plan.hardware.total_devices else ""
    text = f"{item.setting} fits{one}: {item.tokens_per_second:,.0f} tokens/s"
    if item.tokens < plan.workload.tokens_per_step:
        text += f", with {item.tokens:,} tokens to a step"
    return text


def riskier(plan: Plan) -> Iterator[str]:
    """Yield settings that are faster or take more tokens a step, and may not fit."""
    option, shown = plan.tight, plan.shown
    if option is None or shown is None:
        return
    need = option.need
    faster = option.tokens_per_second > shown.tokens_per_second
    where = f"on {need.num_devices} devices, " if need.num_devices > 1 else ""
    more = need.workload.tokens_per_step > shown.need.workload.tokens_per_step
    with_more = f" with {tokens(need.workload)} to a step" if more else ""
    chance = "" if option.chance is None else f", it fits with a chance of {option.chance:.0%}"
    better = "Faster" if faster else "More" if more else "Nearer to AdamW"
    yield (
        f"{better}, but riskier: {where}{option.label}{with_more}: "
        f"{speed(option)}, {gib(need.device_bytes)} on the device{chance}."
    )


def accumulation(plan: Plan, chosen: Option) -> Iterator[str]:
    """Yield the cost of accumulation and its cause, where it is used or seems to help."""
    work = plan.workload
    gradient = gib(work.model_bytes)
    if chosen.need.workload.accumulation > 1:
        if chosen.need.num_devices > 1 and plan.parallel == "fsdp":
            return  # a device adds up its own part of them
        yield (
            f"Its micro-batches cost a whole gradient, {gradient} on the device: autograd adds "
            "each to .grad, so that none leaves before the last one."
        )
    elif work.batch_size * work.accumulation > 1 and plan.has_fewer_tokens:
        yield (
            "Smaller micro-batches would not do: accumulation keeps a whole gradient, "
            f"{gradient}, on the device, since autograd adds each to .grad and none leaves before "
            "the last."
        )
