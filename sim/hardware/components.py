"""Parts of a machine: device, links, host, drives, and the overheads of the engine's own work.

SI units: bytes/s, FLOP/s, seconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sim.hardware.quantity import Quantity

COUNTED = Quantity(value=1.0, kind="estimated", source="count of FLOP and bytes")
"""Factor on a count of FLOP or bytes where none has been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator; or a CPU in its role, which then shares the host's cores.

    Examples:
        Products in bfloat16 take the tensor cores' rate, less what real shapes lose.

        >>> from sim.hardware.catalog import find_device
        >>> device = find_device("h100")
        >>> device.name, round(device.product_rate("bfloat16") / 1e12)  # TFLOP/s
        ('h100-sxm', 720)
    """

    name: str
    is_cpu: bool = False
    """Whether it computes on the host's cores, beside the host worker."""
    memory: Quantity
    """Size of device memory, bytes."""
    flops: Mapping[str, Quantity]
    """Dense peak FLOP/s by dtype (bfloat16, float16, float32); never with sparsity."""
    matmul_efficiency: Quantity
    """Share of the peak that the best matrix product reaches: above 1 where the clock boosts."""
    float32_efficiency: Quantity | None = None
    """Share of the peak that plain float32 products reach, without tensor cores; None is
    ``matmul_efficiency``."""
    sustained_share: Quantity | None = None
    """Share of that rate which a model's products sustain: not all have the best shape. None is
    all of it, as of a rate that was fitted to a model's products."""
    matmul_latency: Quantity
    """Seconds that a matrix product takes beside its FLOP: tiles that are not full, its ends."""
    attention_efficiency: Quantity
    """Share of the peak that attention's own products reach over long sequences, by
    FlashAttention-2 and kernels like it."""
    attention_backward_efficiency: Quantity | None = None
    """Share of the peak that attention's products reach in backward; None is as in forward."""
    native_attention_efficiency: Quantity | None = None
    """Share of the peak that attention reaches by kernels written for the device's generation,
    such as FlashAttention-3; None is ``attention_efficiency``."""
    native_attention_backward_efficiency: Quantity | None = None
    """Share of the peak that those kernels reach in backward; None is as in forward."""
    attention_tokens: Quantity | None = None
    """Number of tokens of a causal sequence over which fused attention reaches half of its rate;
    None is no loss."""
    bandwidth: Quantity
    """Bandwidth of device memory, bytes/s."""
    bandwidth_efficiency: Quantity
    """Share of ``bandwidth`` that elementwise kernels and the optimizer reach."""
    cache: Quantity | None = None
    """Bytes of a last-level cache from which a tensor is read that was just written; None is none
    that counts."""
    launch: Quantity
    """Seconds from one small kernel's start to the next one's, with an interpreter between."""
    backward_factor: Quantity = COUNTED
    """Factor on what backward's FLOP and bytes would take at forward's rates."""
    backward_launch: Quantity | None = None
    """Seconds from one small kernel's start to the next one's in backward, where no interpreter
    runs between kernels; None is ``launch``."""
    compiled_launch: Quantity | None = None
    """Seconds from one small kernel's start to the next one's in compiled layers, in both passes;
    None is ``launch``."""
    collective_share: Quantity | None = None
    """Part of the device that a collective takes while compute goes on beside it: cores and
    memory's bandwidth. None is nothing."""
    gradient_bandwidth: Quantity | None = None
    """Bytes/s at which gradients' memory is taken and filled; None is no cost.

    On a CPU its pages are new in every step."""

    def cached(self, tensor_bytes: float) -> float:
        """Return the share of a kernel's reads that the cache serves, by one tensor's bytes.

        All where the cache holds what a kernel reads and what it writes, none where one of the two
        fills it.
        """
        if self.cache is None:
            return 0.0
        return min(1.0, max(0.0, 2.0 - 2.0 * tensor_bytes / self.cache.value))

    def attention_rate(
        self,
        dtype: str,
        *,
        is_backward: bool = False,
        is_native: bool = False,
        tokens: float = math.inf,
    ) -> float:
        """Return the FLOP/s that attention's own products reach.

        Args:
            dtype: Of queries, keys and values.
            is_backward: Whether backward's are meant.
            is_native: Whether kernels of the device's generation run.
            tokens: Length of a causal sequence that fused kernels go over; infinite is no loss.
        """
        shares = self.attention_efficiency, self.attention_backward_efficiency
        if is_native and self.native_attention_efficiency is not None:
            shares = self.native_attention_efficiency, self.native_attention_backward_efficiency
        share = shares[is_backward] or shares[0]
        assert share is not None  # forward's always is there
        half = 0.0 if self.attention_tokens is None else self.attention_tokens.value
        return self.flops[dtype].value * share.value / (1.0 + half / tokens)

    def product_rate(self, dtype: str) -> float:
        """Return the FLOP/s that a model's matrix products sustain in a dtype."""
        best = self.matmul_efficiency
        if dtype == "float32" and self.float32_efficiency is not None:
            best = self.float32_efficiency
        share = 1.0 if self.sustained_share is None else self.sustained_share.value
        return self.flops[dtype].value * best.value * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """PCIe or NVLink between one device and the host. See `sim.hardware.catalog.find_link`."""

    name: str
    d2h: Quantity
    """Bytes/s to the host from pinned memory, with nothing the other way."""
    h2d: Quantity
    """Bytes/s to the device from pinned memory, with nothing the other way."""
    duplex: Quantity
    """Both directions together as a share of d2h + h2d alone, in (0, 1]: 1 is full duplex."""
    pageable: Quantity
    """Factor on both with memory that is not pinned, in (0, 1]."""
    latency: Quantity
    """Seconds of one copy beside its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """NVLink or PCIe between the devices of one host. See `sim.hardware.catalog.find_fabric`."""

    name: str
    bandwidth: Quantity
    """Bytes/s of one device, one way, that collectives reach."""
    latency: Quantity
    """Seconds of a collective beside its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """InfiniBand or Ethernet between hosts that train together, all alike."""

    name: str
    adapters: int
    """Number of network adapters of one host."""
    bandwidth: Quantity
    """Bytes/s of one adapter, one way, that collectives reach."""
    latency: Quantity
    """Seconds that each further host adds to a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvme:
    """All drives of the host together. See `sim.hardware.catalog.find_nvme`."""

    name: str
    read: Quantity
    """Rate of reads from the drives, bytes/s."""
    write: Quantity
    """Rate of writes to the drives, bytes/s."""
    capacity: Quantity
    """Bytes that the drives hold."""
    duplex: Quantity | None = None
    """Reads and writes at once as a share of read + write alone, in (0, 1]; None is 1."""

    @property
    def most_both(self) -> float | None:
        """Rate of reads and writes at once, bytes/s; None where they don't share any."""
        if self.duplex is None:
            return None
        return self.duplex.value * (self.read.value + self.write.value)


CORE_UPDATE = Quantity(
    value=1.4e9,
    kind="estimated",
    source="0.6 to 0.75 ns for a root and a division, on cores with AVX2 or AVX-512",
)
"""AdamW steps of an element, per second, of a core where none has been measured."""

ADAM_SHARE = Quantity(
    value=0.715,
    kind="measured",
    source="geometric mean of the largest size of four kernels: CPU-Adam on two Xeon 8168 0.78 "
    "(ZeRO-Offload, arXiv 2101.06840, table 4), GraceAdam 0.76 and CPU-Adam 0.60 on Grace "
    "(SuperOffload, arXiv 2509.21271), torch's fused Adam on 32 cores of Ice Lake 0.74 "
    "(zhuhaozhe/Misc)",
    sigma=0.13,
)
"""Share of ``dram`` that AdamW kernels reach on hosts where none has been measured: mean and
predictive spread."""

PAGE_BANDWIDTH = Quantity(
    value=2.9e9,
    kind="estimated",
    source="geometric mean of a page of 4 KiB in 2.0 us in a virtual machine (record "
    "2026-11-27_host-optimizers_amd-epyc) and in 1.0 us on a Core i7 (ddumbying.vercel.app, "
    "experiments/pagefault-latency)",
    sigma=0.5,
)
"""Bytes/s of fresh memory of one thread, where it has not been measured."""

COMPACT_CODING = Quantity(
    value=1.0,
    kind="estimated",
    source="the engine's kernel with AVX2, from the cache of a core of Zen 4: 0.86 and 0.99 "
    "(record 2026-11-28_benchmarks_amd-epyc)",
    sigma=0.3,
)
"""AdamW steps of an element in which compact state is coded, without AVX-512."""

DEEPSPEED_SHARE = Quantity(
    value=0.3256,
    kind="estimated",
    source="as on the EPYC 7742, the only host that it is known for; kernels alone differ by 0.13 "
    "between hosts",
    sigma=0.2,
)
"""Share of ``dram`` that DeepSpeed's CPU step reaches where none has been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """CPU sockets and their memory. See `sim.hardware.catalog.find_host`."""

    name: str
    sockets: int
    """Number of CPU sockets."""
    cores: int
    """Number of cores of one socket."""
    dram: Quantity
    """Bytes/s of one socket's memory that a STREAM-like loop reaches."""
    dram_bytes: Quantity
    """Bytes of memory, all sockets together."""
    core_bandwidth: Quantity
    """Bytes/s that the optimizer's loop moves on one core: threads add up until DRAM is full."""
    numa_hop: Quantity
    """Factor on links and DRAM for memory of another socket, in (0, 1]."""
    core_sharing: Quantity
    """Work of two busy hardware threads of one core as a multiple of one's, in [1, 2]."""
    core_update: Quantity = CORE_UPDATE
    """AdamW steps of an element, per second, that one core takes on data in its caches: the
    bound of a pass over many gradients. Its bytes bound a pass over few."""
    compact_coding: Quantity = COMPACT_CODING
    """Time in which compact state is decoded and encoded once, in AdamW steps of an element."""
    adam_share: Quantity = ADAM_SHARE
    """Bytes/s that an AdamW kernel alone moves on all its threads, as a share of ``dram``: seven
    streams suit memory less than STREAM's three do. 1 where ``dram`` is from the kernel itself."""
    page_bandwidth: Quantity = PAGE_BANDWIDTH
    """Bytes/s of memory that is new to its process, as one thread touches it first."""
    deepspeed_share: Quantity = DEEPSPEED_SHARE
    """Bytes/s that DeepSpeed's CPU step moves on one socket, as a share of ``dram``: its AdamW
    kernel and the slower passes around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOverheads:
    """Costs of the engine's own parts beside bytes over bandwidth."""

    host_task: Quantity
    """Seconds of a host task beside its bytes: queue, hand-over between threads."""
    copy: Quantity
    """Seconds of a bucket's copy beside its bytes: launching it, or a lane thread's work."""
    bucket: Quantity
    """Seconds of one matrix on the training thread: its hook, and what it launches or computes."""
    step: Quantity
    """Seconds of an optimizer step beside its elements."""
    select: Quantity
    """Seconds of one block's selection and hand-over."""
    intake_bandwidth: Quantity
    """Bytes/s of gradients that are measured and gathered on the device."""
    pack_bandwidth: Quantity
    """Bytes/s of gradients that one lane thread (a CPU) or the copy stream (a GPU) packs."""
    unpack_bandwidth: Quantity | None = None
    """Bytes/s of weights that the other lane writes into their columns; None is as packing."""
    device_update: Quantity
    """Parameters/s that AdamW on the device updates where they are whole."""
    column_update: Quantity | None = None
    """Parameters/s of important columns: AdamW on them, and writing them into the weights. None is
    as ``device_update``."""
