"""Published times of AdamW kernels alone on a host: no gradients prepared, no weights copied."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.paper.setups import Alternative, HostPass, Measurement

HOST_PASS_GROUPS: Mapping[str, tuple[str, str]] = {
    "kernels": (
        "AdamW kernels alone, smaller sizes",
        "The largest size of each table is behind the share of STREAM that kernels reach "
        "(`host.adam_share`), so it is no row here. The smaller ones are of the same hosts and "
        "kernels: they test that time is in proportion to size. The tables do not say on which "
        "socket memory was. These rows are not counted above.",
    ),
    "kernels-apart": (
        "AdamW kernels alone, on hosts that gave no constant",
        "Nobody says how threads and memory of these runs lay on two sockets. The two rows of "
        "prime-rl differ in how threads were given to ranks, which is not modelled, so that one "
        "prediction stands for both. These rows are not counted above.",
    ),
}
"""Titles and doubts, by group."""

_MASTER_ALONE = 28.0
"""Bytes of DRAM a parameter: master and moments in and out, a float gradient in."""
_WITH_WEIGHT = 30.0
"""The same with a 16-bit weight out."""


def _row(
    label: str,
    seconds: float,
    setup: HostPass,
    *,
    source: str,
    assumption: str,
    group: str = "kernels",
    alternatives: tuple[Alternative, ...] = (),
) -> Measurement:
    return Measurement(
        label=label,
        seconds=seconds,
        quantity="host",
        setup=setup,
        group=group,
        source=source,
        assumption=assumption,
        alternatives=alternatives,
    )


def _zero_offload(billions: float, seconds: float) -> Measurement:
    return _row(
        f"CPU-Adam, {billions:g}B on two Xeon 8168",
        seconds,
        HostPass(machine="dgx-2", devices=1, num_params=billions * 1e9,
                 bytes_each=_WITH_WEIGHT, binds_cores=False),
        source="ZeRO-Offload (arXiv 2101.06840), table 4",
        assumption="one process on both sockets of a DGX-2, memory on either; 30 bytes of DRAM a "
        "parameter, with the 16-bit weight that is copied to the GPU",
    )  # fmt: skip


def _grace(kernel: str, billions: float, seconds: float) -> Measurement:
    return _row(
        f"{kernel}, {billions:g}B on Grace",
        seconds,
        HostPass(machine="gh200", devices=1, num_params=billions * 1e9,
                 bytes_each=_MASTER_ALONE),
        source="SuperOffload (arXiv 2509.21271), its table of Adam's latency",
        assumption="one Grace with the table's memory; 28 bytes of DRAM a parameter",
    )  # fmt: skip


def _torch(tensors: int, milliseconds: float) -> Measurement:
    return _row(
        f"torch's fused Adam, {tensors} tensors of 4.2M on Ice Lake",
        milliseconds / 1e3,
        HostPass(machine="a100-xeon-8358", devices=1, num_params=tensors * 2**22,
                 bytes_each=_MASTER_ALONE),
        source="zhuhaozhe/Misc, bench-fused-optimizer/bench-result.md",
        assumption="32 cores and memory of one socket of Ice Lake, as the README beside it says, "
        "with eight channels of DDR4-3200; 28 bytes of DRAM a parameter, without amsgrad's 8 more",
    )  # fmt: skip


def _elixir(processes: int, billions_per_second: float) -> Measurement:
    setup = HostPass(machine="dgx-a100-80", devices=processes, num_params=1e9,
                     bytes_each=_MASTER_ALONE, binds_cores=False)  # fmt: skip
    bound = HostPass(
        machine="dgx-a100-80", devices=processes, num_params=1e9, bytes_each=_MASTER_ALONE
    )
    return _row(
        f"ColossalAI's Adam, 1B in {processes} process{'es' if processes > 1 else ''}",
        1 / billions_per_second,
        setup,
        source="hpcaitech/Elixir, search/simulator.py: 5.15 + 1.66 ln n Gparam/s",
        assumption="a host like a DGX A100's, which is not named; threads of no process bound to "
        "a socket; 28 bytes of DRAM a parameter",
        group="kernels-apart",
        alternatives=(Alternative(text="each process on one socket", setup=bound),),
    )


HOST_PASSES: tuple[Measurement, ...] = (
    _zero_offload(1, 0.22),
    _zero_offload(2, 0.51),
    _zero_offload(4, 1.03),
    _zero_offload(8, 2.41),
    _grace("GraceAdam", 1, 0.082),
    _grace("GraceAdam", 2, 0.160),
    _grace("GraceAdam", 4, 0.316),
    _grace("CPU-Adam", 1, 0.098),
    _grace("CPU-Adam", 2, 0.198),
    _grace("CPU-Adam", 4, 0.393),
    _torch(8, 7.8321),
    _torch(16, 15.8077),
    _elixir(1, 5.15),
    _elixir(8, 8.60),
    _row(
        "prime-rl's AdamW before its threads were set, 171B on 8 H200 (17.6 s)",
        17.6,
        HostPass(machine="hgx-h200", devices=8, num_params=171e9, bytes_each=_WITH_WEIGHT),
        source="PrimeIntellect-ai/prime-rl #3248",
        assumption="28 threads a rank by an environment variable, where the later run has 30; 30 "
        "bytes of DRAM a parameter",
        group="kernels-apart",
    ),
)
"""Rows in the order of their sources, chosen before any was predicted."""
