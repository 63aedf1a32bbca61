"""The largest model that each strategy can train, by the memory of the GPU and of the host."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Data, Job, computed
from experiments.paper import published as paper
from experiments.paper.canvas import canvas
from sim.hardware.catalog import find_machine
from sim.hardware.profile import HardwareProfile
from sim.memory.need import memory_of
from sim.models.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STRATEGIES = {
    "on_device": ("AdamW on the GPU", "on_device", "-"),
    "zero_offload": ("ZeRO-Offload (this engine)", "zero_offload", "-"),
    "deepspeed_zero_offload": ("ZeRO-Offload (DeepSpeed)", "zero_offload", "--"),
    "zero_infinity": ("state on NVMe (ZeRO-Infinity's update)", "delayed", ":"),
    "deepspeed_zenflow": ("ZenFlow (released code)", "zenflow", "--"),
    "zenflow": ("ZenFlow (this engine)", "zenflow", "-"),
}
"""Name of each in the picture, the strategy whose colour it has there, and its line."""
_RENAMED = {"zero_infinity": "published_zero_infinity"}
"""Names by now of systems whose earlier names are those of the record."""
_DEVICES = (16, 24, 32, 48, 80, 141)
"""Sizes of devices' memory, GiB."""
_HOSTS = (32, 64, 128, 256, 512, 1024, 2048)
_ENOUGH_HOST, _ENOUGH_DEVICE = 4096, 80
"""Memory of the side that is not varied."""
_MACHINE = "dgx-a100-80"
_SEQUENCE = 1024
_LARGEST = 96
"""Heads of the largest model that is looked at, about 120 G parameters."""
_NOTE = (
    "The memory model of `zenflow plan`, computed and not measured: one GPU, one sequence of "
    f"{_SEQUENCE} tokens, every layer recomputed, bfloat16. Models have the shape of Llama-2-7B "
    "and -13B: 128 columns a head, as many layers as heads. The paper's numbers could not be "
    "read; that ZenFlow's largest model is about ZeRO-Offload's is known in words, and judged on "
    "the paper's A100 80 GB with 1 TB."
)


def _make(job: Job) -> Data:
    machine = find_machine(_MACHINE, 1)
    devices = _DEVICES[:1] if job.smoke else _DEVICES
    hosts = _HOSTS[:1] if job.smoke else _HOSTS
    found: Data = {"by_device": {}, "by_host": {}, "paper": {}}
    for number, name in enumerate(_STRATEGIES):
        job.progress(number / len(_STRATEGIES), name)
        own = _RENAMED.get(name, name)
        found["by_device"][name] = {
            str(size): _largest(own, _with_memory(machine, size, _ENOUGH_HOST)) for size in devices
        }
        found["by_host"][name] = {
            str(size): _largest(own, _with_memory(machine, _ENOUGH_DEVICE, size)) for size in hosts
        }
        found["paper"][name] = _largest(own, _with_memory(machine, 80, 1024))
    return found


def _with_memory(machine: HardwareProfile, device: float, host: float) -> HardwareProfile:
    """Return the machine with so many GiB."""
    values = {"device.memory": device * 2.0**30, "host.dram_bytes": host * 2.0**30}
    return machine.with_values(values)


def _largest(strategy: str, machine: HardwareProfile) -> float:
    """Return the parameters of the largest model that fits; 0 if none does."""

    def is_short(heads: int) -> bool:
        return bool(memory_of(_workload(heads), strategy, machine).short_of(machine))

    heads = bisect(range(1, _LARGEST + 1), False, key=is_short)
    return float(_workload(heads).num_params) if heads else 0.0


def _workload(heads: int) -> Workload:
    hidden = 128 * heads
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": -(-8 * hidden // 3 // 256) * 256,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": heads,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return Workload.of_config(
        f"llama-{heads}", config, batch_size=1, sequence=_SEQUENCE, checkpointing=True
    )


def _findings(data: Data) -> Sequence[Finding]:
    at = data["paper"]
    return [
        paper.LARGEST_MODEL.beside(
            f"ZenFlow's largest model is about ZeRO-Offload's: {whose}",
            Tolerance.relative(0.1),
            simulated=at[f"{code}zenflow"] / at[f"{code}zero_offload"],
            note=_NOTE,
        )
        for whose, code in (("this engine's", ""), ("the released code's", "deepspeed_"))
    ]


def _draw(data: Data) -> Figure:
    from matplotlib.ticker import NullFormatter

    from experiments.output.plots import STRATEGY_COLOURS

    title = "Largest model that fits one GPU: computed by the memory model, not measured"
    figure, panels = canvas((12, 5.2), title, columns=2, sharey=True)
    sides = (
        ("by_device", "GPU memory, GiB", f"host with {_ENOUGH_HOST} GiB"),
        ("by_host", "host memory, GiB", f"GPU with {_ENOUGH_DEVICE} GiB"),
    )
    for axes, (key, label, title) in zip(panels, sides, strict=True):
        for name, (called, like, style) in _STRATEGIES.items():
            sizes = data[key][name]
            # Where nothing fits there is no point.
            points = [(float(size), count / 1e9) for size, count in sizes.items() if count]
            axes.plot(
                [x for x, _ in points], [y for _, y in points], linestyle=style, marker="o",
                markersize=4, color=STRATEGY_COLOURS[like], label=called,
            )  # fmt: skip
        ticks = [float(size) for size in data[key]["zenflow"]]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [f"{size:g}" for size in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label)
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(axis="y", color="#eeeeee")
    panels[0].set_ylabel("largest model, billion parameters")
    panels[0].legend(fontsize=8, frameon=False)
    return figure


STUDY = computed(
    group="paper",
    name="largest_model",
    number=14,
    title="Largest trainable model per GPU and host memory",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=0.5,
    exact=True,
)
