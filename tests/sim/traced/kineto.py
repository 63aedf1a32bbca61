"""A trace of a GPU, written by hand: two steps of two micro-batches, and more of the same."""

from __future__ import annotations

import json

GPU = "NVIDIA A100-SXM4-80GB"
STEP = 20_000
"""Microseconds from one step to the next."""
_LAUNCH = 10


class Writer:
    """Events of one process with one GPU; times are microseconds."""

    def __init__(self):
        self.events = []
        self._calls = 0

    def host(self, name, start, seconds, *, category="cpu_op", tid=1, **arguments):
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid}
        self.events.append({**event, "ts": start, "dur": seconds, "args": arguments})

    def kernel(self, name, launched, start, seconds, *, stream=7, tid=1, device=0, **arguments):
        """Launch something from the host, and let it run."""
        self._calls += 1
        about = {"correlation": self._calls, "device": device, "stream": stream, **arguments}
        self.host("cudaLaunchKernel", launched, _LAUNCH, category="cuda_runtime", tid=tid,
                  correlation=self._calls)  # fmt: skip
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream}
        self.events.append({**event, "ts": start, "dur": seconds, "args": about})

    def write(self, path, **top):
        devices = [{"id": 0, "name": GPU}]
        found = {"deviceProperties": devices, "traceEvents": self.events, **top}
        path.write_text(json.dumps(found))
        return path


def write_trace(
    path, *, steps=3, copied=0, shapes=True, device=0, optimizer="AdamW", batches=((4, 128),),
    evaluates=(),
):  # fmt: skip
    """Write steps that each take 20 ms of one GPU.

    - 0 to 1 ms: rest, the device idle.
    - Twice, from 1 and 8 ms on: a forward of 2 ms that launches bound (0.5 ms of a product,
      0.25 of attention, 0.25 of other kernels), then a backward of 5 ms that the device bounds
      (4 of products, 1 of others; the host has launched it after 1 ms and waits).
    - 15 to 19 ms: the optimizer's step, on the device for 3 ms.
    - 19 to 20 ms: rest, with a forward without gradients in the steps that evaluate.

    Micro-batches have the sizes of ``batches`` in turn.
    """
    writer = Writer()
    for index in range(steps):
        begin = 1_000_000 + index * STEP
        writer.host(f"ProfilerStep#{index + 3}", begin, STEP, category="user_annotation")
        for micro_batch in range(2):
            batch = batches[(2 * index + micro_batch) % len(batches)] if shapes else None
            _micro_batch(writer, begin + 1_000 + micro_batch * 7_000, batch=batch, device=device)
        if index in evaluates:
            writer.host("aten::embedding", begin + 19_300, 100)
        writer.host(f"Optimizer.step#{optimizer}.step", begin + 15_000, 4_000,
                    category="user_annotation")  # fmt: skip
        writer.kernel("multi_tensor_apply", begin + 15_500, begin + 15_500, 3_000, device=device)
        writer.kernel("Memcpy DtoH (Device -> Pinned)", begin + 19_100, begin + 19_200, 10,
                      bytes=copied, device=device)  # fmt: skip
    return writer.write(path)


def _micro_batch(writer, begin, *, batch, device):
    dims = {"Input Dims": [[1000, 64], [*batch]]} if batch else {}
    writer.host("aten::embedding", begin, 100, **{"Sequence number": 1}, **dims)
    writer.kernel("indexSelectLargeIndex", begin, begin + 100, 250, device=device)
    writer.host("aten::linear", begin + 500, 100, **{"Sequence number": 2})
    writer.kernel("ampere_bf16_s16816gemm_bf16", begin + 500, begin + 600, 500, device=device)
    writer.kernel("flash_fwd_kernel", begin + 1_700, begin + 1_750, 250, device=device)
    middle = begin + 2_000
    writer.host("autograd::engine::evaluate_function: MmBackward0", middle, 5_000, tid=2)
    # Two streams at once: the second product adds nothing.
    writer.kernel("ampere_bf16_s16816gemm_bf16", middle, middle, 4_000, tid=2, device=device)
    writer.kernel("ampere_bf16_s16816gemm_bf16", middle + 100, middle + 1_000, 2_000, tid=2,
                  stream=9, device=device)  # fmt: skip
    writer.kernel("vectorized_elementwise_kernel", middle + 300, middle + 4_000, 1_000, tid=2,
                  device=device)  # fmt: skip
    about = {"Input Dims": [[100, 64]], "Input type": ["c10::BFloat16"]} if batch else {}
    writer.host("torch::autograd::AccumulateGrad", middle + 900, 10, tid=2, **about)
    writer.host("cudaStreamSynchronize", middle + 1_000, 4_000, category="cuda_runtime", tid=2)
