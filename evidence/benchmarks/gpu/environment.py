"""Facts of a GPU machine: device, driver, link, host cores, memory bandwidth, host kernel.

    python -m evidence.benchmarks.gpu.environment [--out DIR]
    python -m evidence.benchmarks.gpu.environment --smoke    the same script on the CPU

Ends with code 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from evidence.benchmarks.record import copy_bandwidth, link_bandwidth, setting
from experiments.output.files import write_json, write_text
from zenflow.host import kernel
from zenflow.host.limits import usable_cores

_FIELDS = {
    "driver": "driver_version",
    "link_generation": "pcie.link.gen.current",
    "largest_link_generation": "pcie.link.gen.max",
    "link_lanes": "pcie.link.width.current",
    "power_limit_watts": "power.limit",
    "sm_clock_mhz": "clocks.max.sm",
}
"""Fields that nvidia-smi is asked for."""
_COPIED = 1 << 28


def driver_facts() -> dict[str, str]:
    """Return nvidia-smi's facts of the first device; nothing where it is not there."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = f"--query-gpu={','.join(_FIELDS.values())}"
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits", "--id=0"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(_FIELDS, values, strict=True)) if len(values) == len(_FIELDS) else {}


def _device_facts(device: torch.device) -> dict[str, Any]:
    """Return torch's and the driver's facts of a GPU; of a CPU that plays one, its memory."""
    if device.type == "cpu":
        memory = psutil.virtual_memory().total
        return {"name": "CPU in a GPU's place", "memory_bytes": memory, "cuda": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": list(torch.cuda.get_device_capability(device)),
        "cuda": torch.version.cuda,
        **driver_facts(),
    }


def environment(*, is_smoke: bool = False) -> dict[str, Any]:
    """Return everything measured and read."""
    device = torch.device("cpu" if is_smoke else "cuda:0")
    copied = 1 << 20 if is_smoke else _COPIED
    cores = usable_cores()
    torch.set_num_threads(cores)
    return setting(
        device=_device_facts(device),
        host={
            "usable_cores": cores,
            "memory_bytes": psutil.virtual_memory().total,
            "copy_bytes_per_second": copy_bandwidth(4 * copied),
            "kernel": kernel.active_kernel(),
        },
        link_bytes_per_second=link_bandwidth(device, copied),
    )


def table(found: Mapping[str, Any]) -> str:
    """Return one fact a line."""
    device, host, link = found["device"], found["host"], found["link_bytes_per_second"]
    lines = [
        ("device", f"{device['name']}, {device['memory_bytes'] / 2**30:.0f} GiB"),
        ("driver, CUDA", f"{device.get('driver', 'unknown')}, {device['cuda']}"),
        ("torch", found["versions"]["torch"]),
        (
            "link",
            f"PCIe {device.get('link_generation', '?')} (at most "
            f"{device.get('largest_link_generation', '?')}), "
            f"{device.get('link_lanes', '?')} lanes, "
            f"{link['d2h'] / 1e9:.1f} GB/s down, {link['h2d'] / 1e9:.1f} GB/s up, pinned",
        ),
        (
            "host",
            f"{found['hardware']['cpu']}, {host['usable_cores']} cores, "
            f"{host['memory_bytes'] / 2**30:.0f} GiB",
        ),
        ("host copies", f"{host['copy_bytes_per_second'] / 1e9:.1f} GB/s, read and written"),
        ("host kernel", host["kernel"]),
    ]
    return "\n".join(f"{name:<14}{value}" for name, value in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Look at the machine; return the process's exit code."""
    parser = argparse.ArgumentParser(description="What a GPU machine is.")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_environment"))
    parser.add_argument("--smoke", action="store_true", help="on the CPU: tests the script")
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        print("torch sees no CUDA device: install a CUDA build of torch", file=sys.stderr)
        return 2
    found = environment(is_smoke=options.smoke)
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "environment.json", found)
    write_text(options.out / "table.txt", table(found) + "\n")
    link, host = found["link_bytes_per_second"], found["host"]
    figures = {
        "link down, GB/s": link["d2h"] / 1e9,
        "link up, GB/s": link["h2d"] / 1e9,
        "host copies, GB/s": host["copy_bytes_per_second"] / 1e9,
    }
    write_json(options.out / "figures.json", figures)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
