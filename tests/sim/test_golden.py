"""What every strategy does when, in a model of two layers: event logs to be read.

A layer takes 1 s of forward and 2 s of backward. Its gradients or weights take 1 s to copy in 16
bits, its CPU update 2.8 s: 0.1 s for each of the 28 bytes that an element moves. The device would
update it in 1 s. Of elementwise operations it does 20 bytes an element in 1 s: it measures the
rows of a layer's gradients in 0.1 s, moves its weights by them in 0.7 s, and updates it with 8-bit
moments in 0.5 s: gradient 2, weight twice 2, moments and scales twice 2.03 bytes. The drives read
or write a layer's state in 4 s; a ring of two devices reduces or gathers it in 1 s.

A line is start and end in seconds from the end of the step before, lane, name, and the step that
caused it.
"""

from dataclasses import replace

import pytest

from sim.hardware.components import Fabric, Nvme
from sim.hardware.quantity import Quantity
from sim.machine import Machine
from sim.schedules.parallel import ddp
from sim.simulate import STRATEGIES, Strategy
from sim.timing.phases import costs_of_phases

PARAMS = 20_000
LANES = ("device", "fabric", "d2h", "h2d", "host", "main", "nvme read", "nvme write")


def two_layers(devices=1, accumulation=1):
    found = costs_of_phases(
        forward=2.0, backward=4.0, d2h=2.0, update=5.6, h2d=2.0, num_params=PARAMS, num_layers=2
    )
    hardware = replace(
        found.hardware.with_values(
            {"overheads.device_update": PARAMS / 2.0, "device.bandwidth": 20.0 * PARAMS / 2}
        ),
        num_devices=devices,
        fabric=Fabric(name="ring", bandwidth=figure(PARAMS / 2), latency=figure(1e-12)),
        nvme=Nvme(
            name="drives",
            read=figure(12 * PARAMS / 8.0),
            write=figure(12 * PARAMS / 8.0),
            capacity=figure(1e12),
        ),
    )
    return replace(found, hardware=hardware, intake_factor=1.0, accumulation=accumulation)


def figure(value):
    return Quantity(value=value)


def log(strategy, first, last, devices=1, accumulation=1):
    """Return what begins in these steps, a line each."""
    costs = two_layers(devices, accumulation)
    machine = Machine(costs.hardware)
    schedule = strategy.schedule(machine, costs)
    machine.run(schedule.run(last + 1))
    start = schedule.step_ends[first - 2] if first > 1 else 0.0
    length = schedule.step_ends[last - 1] - start
    rows = [
        (round(span.start - start, 6) + 0.0, LANES.index(span.lane), span)
        for span in machine.recording.timeline({}).spans
        if span.seconds > 1e-6
    ]
    return "\n".join(
        f"{begin:5.1f}-{span.end - start:5.1f} {span.lane} {span.name} {span.step}"
        for begin, _, span in sorted(rows, key=lambda row: (row[0], row[1], row[2].name))
        if 0 <= begin < round(length, 6)
    )


HALF_DEFERRED = {
    "topk_ratio": 0.5,
    "update_interval": 2,
    "select_interval": 0,
    "min_split_elements": 0,
    "block_elements": PARAMS,
}


LOGS = [
    # All on the device.
    (
        "published_on_device", {}, 1, 2, 1,
        """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.0 device backward 1
  4.0-  6.0 device backward 1
  6.0-  8.0 device step 1
  8.0-  9.0 device forward 2
  9.0- 10.0 device forward 2
 10.0- 12.0 device backward 2
 12.0- 14.0 device backward 2
 14.0- 16.0 device step 2
""",
    ),
    # The preset, which is the same.
    (
        "on_device", {}, 1, 2, 1,
        """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.0 device backward 1
  4.0-  6.0 device backward 1
  6.0-  8.0 device step 1
  8.0-  9.0 device forward 2
  9.0- 10.0 device forward 2
 10.0- 12.0 device backward 2
 12.0- 14.0 device backward 2
 14.0- 16.0 device step 2
""",
    ),
    # Two devices: each updates its half.
    (
        "published_on_device", {}, 1, 2, 2,
        """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.0 device backward 1
  4.0-  6.0 device backward 1
  4.0-  5.0 fabric reduce 1
  6.0-  7.0 device stall:reduce 1
  6.0-  7.0 fabric reduce 1
  7.0-  8.0 device step 1
  8.0- 10.0 device stall:gather 1
  8.0- 10.0 fabric all-gather 1
 10.0- 11.0 device forward 2
 11.0- 12.0 device forward 2
 12.0- 14.0 device backward 2
 14.0- 16.0 device backward 2
 14.0- 15.0 fabric reduce 2
 16.0- 17.0 device stall:reduce 2
 16.0- 17.0 fabric reduce 2
 17.0- 18.0 device step 2
 18.0- 20.0 device stall:gather 2
 18.0- 20.0 fabric all-gather 2
""",
    ),
    # Gradients leave inside backward; then one phase after the other.
    (
        "published_zero_offload", {}, 1, 2, 1,
        """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.0 device backward 1
  4.0-  6.0 device backward 1
  4.0-  5.0 d2h grads 1
  6.0-  7.0 device stall:d2h 1
  6.0-  7.0 d2h grads 1
  7.0- 12.6 device stall:host 1
  7.0- 12.6 host adam 1
 12.6- 14.6 device stall:h2d 1
 12.6- 14.6 h2d params 1
 14.6- 15.6 device forward 2
 15.6- 16.6 device forward 2
 16.6- 18.6 device backward 2
 18.6- 20.6 device backward 2
 18.6- 19.6 d2h grads 2
 20.6- 21.6 device stall:d2h 2
 20.6- 21.6 d2h grads 2
 21.6- 27.2 device stall:host 2
 21.6- 27.2 host adam 2
 27.2- 29.2 device stall:h2d 2
 27.2- 29.2 h2d params 2
""",
    ),
    # Float gradients take twice as long, and backward waits for them; 8 bytes an element are
    # passed over before the update of 28 (1.6 s), and 6 between it and the upload (1.2 s).
    (
        "deepspeed_zero_offload", {}, 1, 2, 1,
        """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.0 device backward 1
  4.0-  6.0 device stall:d2h 1
  4.0-  6.0 d2h grads 1
  6.0-  8.0 device backward 1
  8.0- 10.0 device stall:d2h 1
  8.0- 10.0 d2h grads 1
 10.0- 18.4 device stall:host 1
 10.0- 11.6 host accumulate 1
 11.6- 17.2 host adam 1
 17.2- 18.4 host cast 1
 18.4- 20.4 device stall:h2d 1
 18.4- 20.4 h2d params 1
 20.4- 21.4 device forward 2
 21.4- 22.4 device forward 2
 22.4- 24.4 device backward 2
 24.4- 26.4 device stall:d2h 2
 24.4- 26.4 d2h grads 2
 26.4- 28.4 device backward 2
 28.4- 30.4 device stall:d2h 2
 28.4- 30.4 d2h grads 2
 30.4- 38.8 device stall:host 2
 30.4- 32.0 host accumulate 2
 32.0- 37.6 host adam 2
 37.6- 38.8 host cast 2
 38.8- 40.8 device stall:h2d 2
 38.8- 40.8 h2d params 2
""",
    ),
    # The engine's: a layer's update begins when its gradient is there, one copy takes all up.
    (
        "zero_offload", {"min_split_elements": 0}, 1, 2, 1,
        """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.1 device backward 1
  4.1-  6.2 device backward 1
  4.1-  5.1 d2h grads 1
  6.2-  7.2 device stall:d2h 1
  6.2-  7.2 d2h grads 1
  6.2-  9.0 host adam 1
  7.2- 11.8 device stall:host 1
  9.0- 11.8 host adam 1
 11.8- 13.8 device stall:h2d 1
 11.8- 13.8 h2d params 1
 13.8- 14.8 device forward 2
 14.8- 15.8 device forward 2
 15.8- 17.9 device backward 2
 17.9- 20.0 device backward 2
 17.9- 18.9 d2h grads 2
 20.0- 21.0 device stall:d2h 2
 20.0- 21.0 d2h grads 2
 20.0- 22.8 host adam 2
 21.0- 25.6 device stall:host 2
 22.8- 25.6 host adam 2
 25.6- 27.6 device stall:h2d 2
 25.6- 27.6 h2d params 2
""",
    ),
    # Step 1's update runs behind step 2.
    (
        "published_delayed", {}, 2, 3, 1,
        """
  0.0-  1.0 device forward 2
  0.0-  1.0 d2h grads 1
  0.0-  2.8 host adam 1
  1.0-  2.0 device forward 2
  2.0-  4.0 device backward 2
  2.8-  3.8 h2d params 1
  2.8-  5.6 host adam 1
  4.0-  6.0 device backward 2
  4.0-  5.0 d2h grads 2
  5.6-  6.6 h2d params 1
  6.0-  6.6 device stall:host 2
  6.0-  7.0 d2h grads 2
  6.6-  7.6 device forward 3
  6.6-  9.4 host adam 2
  7.6-  8.6 device forward 3
  8.6- 10.6 device backward 3
  9.4- 10.4 h2d params 2
  9.4- 12.2 host adam 2
 10.6- 12.6 device backward 3
 10.6- 11.6 d2h grads 3
 12.2- 13.2 h2d params 2
 12.6- 13.2 device stall:host 3
 12.6- 13.6 d2h grads 3
""",
    ),
    # The engine's: weights go up behind the layer's own backward, not before.
    (
        "delayed", {"min_split_elements": 0}, 2, 3, 1,
        """
  0.0-  1.0 device forward 2
  0.0-  1.0 d2h grads 1
  0.0-  2.8 host adam 1
  1.0-  2.0 device forward 2
  2.0-  4.0 device backward 2
  2.8-  5.6 host adam 1
  4.0-  6.0 device backward 2
  4.0-  5.0 d2h grads 2
  4.0-  5.0 h2d params 2
  6.0-  7.0 device stall:h2d 2
  6.0-  7.0 d2h grads 2
  6.0-  7.0 h2d params 2
  6.0-  8.8 host adam 2
  7.0-  8.0 device forward 3
  8.0-  9.0 device forward 3
  8.8- 11.6 host adam 2
  9.0- 11.0 device backward 3
 11.0- 13.0 device backward 3
 11.0- 12.0 d2h grads 3
 11.0- 12.0 h2d params 3
 13.0- 14.0 device stall:h2d 3
 13.0- 14.0 d2h grads 3
 13.0- 14.0 h2d params 3
 13.0- 15.8 host adam 3
""",
    ),
    # S = 2: one layer's window ends in odd steps, the other's in even ones. Half of the columns
    # are deferred, so that all that is theirs takes half: copies 0.5 s, moving them on by the
    # gradient that came since 0.35 s more, an update of two gradients (24 bytes, 4, and an
    # upload's 2) 1.5 s.
    (
        "zenflow", HALF_DEFERRED, 3, 4, 1,
        """
  0.0-  1.0 device forward 3
  0.0-  1.5 host adam 2
  1.0-  2.0 device forward 3
  2.0-  4.8 device backward 3
  4.8-  7.6 device backward 3
  4.8-  5.3 d2h grads 3
  7.6-  8.6 device step 3
  7.6-  8.1 d2h grads 3
  7.6-  8.5 h2d params 3
  8.6-  9.6 device forward 4
  8.6- 10.1 host adam 3
  9.6- 10.6 device forward 4
 10.6- 13.4 device backward 4
 13.4- 16.2 device backward 4
 13.4- 13.9 d2h grads 4
 13.4- 14.3 h2d params 4
 16.2- 17.2 device step 4
 16.2- 16.7 d2h grads 4
""",
    ),
    # No gradient waits: a pass in mid-window (26 bytes) takes 1.3 s, a window's end (28) 1.4 s.
    (
        "zenflow", {**HALF_DEFERRED, "queue_depth": 1}, 3, 4, 1,
        """
  0.0-  1.0 device forward 3
  0.0-  1.3 host adam 2
  1.0-  2.0 device forward 3
  1.3-  2.7 host adam 2
  2.0-  4.8 device backward 3
  4.8-  7.6 device backward 3
  4.8-  5.3 d2h grads 3
  7.6-  8.6 device step 3
  7.6-  8.1 d2h grads 3
  7.6-  8.5 h2d params 3
  8.6-  9.6 device forward 4
  8.6- 10.0 host adam 3
  9.6- 10.6 device forward 4
 10.0- 11.3 host adam 3
 10.6- 13.4 device backward 4
 13.4- 16.2 device backward 4
 13.4- 13.9 d2h grads 4
 13.4- 14.3 h2d params 4
 16.2- 17.2 device step 4
 16.2- 16.7 d2h grads 4
""",
    ),
    # Without overlap the device moves the other layer's weights only: these land in this step.
    (
        "zenflow", {**HALF_DEFERRED, "overlap_step": False}, 3, 4, 1,
        """
  0.0-  1.0 device forward 3
  1.0-  2.0 device forward 3
  2.0-  4.1 device backward 3
  4.1-  6.9 device backward 3
  4.1-  4.6 d2h grads 3
  6.9-  7.9 device step 3
  6.9-  7.4 d2h grads 3
  7.9-  9.4 device stall:host 3
  7.9-  9.4 host adam 3
  9.4-  9.9 device stall:h2d 3
  9.4-  9.9 h2d params 3
  9.9- 10.9 device forward 4
 10.9- 11.9 device forward 4
 11.9- 14.7 device backward 4
 14.7- 16.8 device backward 4
 14.7- 15.2 d2h grads 4
 16.8- 17.8 device step 4
 16.8- 17.3 d2h grads 4
 17.8- 19.3 device stall:host 4
 17.8- 19.3 host adam 4
 19.3- 19.8 device stall:h2d 4
 19.3- 19.8 h2d params 4
""",
    ),
    # S = 2, aligned: windows end in even steps and land two later. First gradients of a window are
    # written (2 + 4 bytes, 0.3 s), second ones added (2 + 8, 0.5 s), updates read the sum (30, 1.5
    # s).
    (
        "zenflow_paper", HALF_DEFERRED, 3, 6, 1,
        """
  0.0-  1.0 device forward 3
  0.0-  1.5 host adam 2
  1.0-  2.0 device forward 3
  1.5-  3.0 host adam 2
  2.0-  4.0 device backward 3
  4.0-  6.0 device backward 3
  4.0-  4.5 d2h grads 3
  6.0-  7.0 device step 3
  6.0-  6.5 d2h grads 3
  7.0-  8.0 device forward 4
  7.0-  7.3 host accumulate 3
  7.3-  7.6 host accumulate 3
  8.0-  9.0 device forward 4
  9.0- 11.0 device backward 4
 11.0- 13.0 device backward 4
 11.0- 11.5 d2h grads 4
 11.0- 11.5 h2d params 4
 13.0- 14.0 device step 4
 13.0- 13.5 d2h grads 4
 13.0- 13.5 h2d params 4
 14.0- 15.0 device forward 5
 14.0- 14.5 host accumulate 4
 14.5- 15.0 host accumulate 4
 15.0- 16.0 device forward 5
 15.0- 16.5 host adam 4
 16.0- 18.0 device backward 5
 16.5- 18.0 host adam 4
 18.0- 20.0 device backward 5
 18.0- 18.5 d2h grads 5
 20.0- 21.0 device step 5
 20.0- 20.5 d2h grads 5
 21.0- 22.0 device forward 6
 21.0- 21.3 host accumulate 5
 21.3- 21.6 host accumulate 5
 22.0- 23.0 device forward 6
 23.0- 25.0 device backward 6
 25.0- 27.0 device backward 6
 25.0- 25.5 d2h grads 6
 25.0- 25.5 h2d params 6
 27.0- 28.0 device step 6
 27.0- 27.5 d2h grads 6
 27.0- 27.5 h2d params 6
""",
    ),
    # S = 2: gradients go down whole, and backward waits for them; their sum so far comes up first
    # in the second step, and goes down as floats as well. Both processes have half of the host:
    # cast 6 bytes, clip 8, update 32, each taking twice as long.
    (
        "deepspeed_zenflow", {"topk_ratio": 0.5, "update_interval": 2}, 3, 4, 1,
        """
  0.0-  1.0 device forward 3
  1.0-  2.0 device forward 3
  2.0-  4.0 device backward 3
  4.0-  4.5 device step 3
  4.5-  5.5 device stall:d2h 3
  4.5-  5.5 d2h grads 3
  5.5-  7.5 device backward 3
  7.5-  8.0 device step 3
  8.0-  9.0 device stall:d2h 3
  8.0-  9.0 d2h grads 3
  9.0- 10.0 device forward 4
 10.0- 11.0 device forward 4
 11.0- 13.0 device backward 4
 13.0- 17.0 device stall:d2h 4
 13.0- 14.0 h2d accumulator 4
 14.0- 15.0 d2h grads 4
 15.0- 17.0 d2h grads 4
 17.0- 19.0 device backward 4
 19.0- 23.0 device stall:d2h 4
 19.0- 20.0 h2d accumulator 4
 20.0- 21.0 d2h grads 4
 21.0- 23.0 d2h grads 4
 23.0- 25.4 device stall:host 4
 23.0- 25.4 main cast 4
 25.4- 27.4 device stall:h2d 4
 25.4- 27.4 h2d params 4
 27.4- 30.6 device stall:host 4
 27.4- 30.6 main accumulate 4
 30.6- 31.6 device step 4
 30.6- 43.4 host adam 4
""",
    ),
    # Without overlap the update (28 bytes) is one more thing in turn, on all of the host.
    (
        "deepspeed_zenflow", {"topk_ratio": 0.5, "update_interval": 2, "overlap": False}, 3, 4, 1,
        """
  0.0-  1.0 device forward 3
  1.0-  2.0 device forward 3
  2.0-  4.0 device backward 3
  4.0-  4.5 device step 3
  4.5-  5.5 device stall:d2h 3
  4.5-  5.5 d2h grads 3
  5.5-  7.5 device backward 3
  7.5-  8.0 device step 3
  8.0-  9.0 device stall:d2h 3
  8.0-  9.0 d2h grads 3
  9.0- 10.0 device forward 4
 10.0- 11.0 device forward 4
 11.0- 13.0 device backward 4
 13.0- 17.0 device stall:d2h 4
 13.0- 14.0 h2d accumulator 4
 14.0- 15.0 d2h grads 4
 15.0- 17.0 d2h grads 4
 17.0- 19.0 device backward 4
 19.0- 23.0 device stall:d2h 4
 19.0- 20.0 h2d accumulator 4
 20.0- 21.0 d2h grads 4
 21.0- 23.0 d2h grads 4
 23.0- 24.6 device stall:host 4
 23.0- 24.6 host accumulate 4
 24.6- 30.2 device stall:host 4
 24.6- 30.2 host adam 4
 30.2- 31.4 device stall:host 4
 30.2- 31.4 host cast 4
 31.4- 33.4 device stall:h2d 4
 31.4- 33.4 h2d params 4
 33.4- 34.4 device step 4
""",
    ),
    # Four tiles, three at once: reading, updating, writing.
    (
        "zero_infinity", {"tile": PARAMS // 4}, 1, 2, 1,
        """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.0 device backward 1
  4.0-  6.0 device backward 1
  4.0-  5.0 d2h grads 1
  6.0-  7.0 device stall:d2h 1
  6.0-  7.0 d2h grads 1
  7.0-  9.0 device stall:nvme 1
  7.0-  9.0 nvme read state 1
  9.0- 10.4 device stall:host 1
  9.0- 10.4 host adam 1
  9.0- 11.0 nvme read state 1
 10.4- 11.0 device stall:nvme 1
 10.4- 10.9 h2d params 1
 10.4- 12.4 nvme write state 1
 11.0- 12.4 device stall:host 1
 11.0- 12.4 host adam 1
 11.0- 13.0 nvme read state 1
 12.4- 13.0 device stall:nvme 1
 12.4- 12.9 h2d params 1
 12.4- 14.4 nvme write state 1
 13.0- 14.4 device stall:host 1
 13.0- 14.4 host adam 1
 13.0- 15.0 nvme read state 1
 14.4- 15.0 device stall:nvme 1
 14.4- 14.9 h2d params 1
 14.4- 16.4 nvme write state 1
 15.0- 16.4 device stall:host 1
 15.0- 16.4 host adam 1
 16.4- 16.9 device stall:h2d 1
 16.4- 16.9 h2d params 1
 16.4- 18.4 nvme write state 1
 16.9- 17.9 device forward 2
 17.9- 18.9 device forward 2
 18.9- 20.9 device backward 2
 20.9- 22.9 device backward 2
 20.9- 21.9 d2h grads 2
 22.9- 23.9 device stall:d2h 2
 22.9- 23.9 d2h grads 2
 23.9- 25.9 device stall:nvme 2
 23.9- 25.9 nvme read state 2
 25.9- 27.3 device stall:host 2
 25.9- 27.3 host adam 2
 25.9- 27.9 nvme read state 2
 27.3- 27.9 device stall:nvme 2
 27.3- 27.8 h2d params 2
 27.3- 29.3 nvme write state 2
 27.9- 29.3 device stall:host 2
 27.9- 29.3 host adam 2
 27.9- 29.9 nvme read state 2
 29.3- 29.9 device stall:nvme 2
 29.3- 29.8 h2d params 2
 29.3- 31.3 nvme write state 2
 29.9- 31.3 device stall:host 2
 29.9- 31.3 host adam 2
 29.9- 31.9 nvme read state 2
 31.3- 31.9 device stall:nvme 2
 31.3- 31.8 h2d params 2
 31.3- 33.3 nvme write state 2
 31.9- 33.3 device stall:host 2
 31.9- 33.3 host adam 2
 33.3- 33.8 device stall:h2d 2
 33.3- 33.8 h2d params 2
 33.3- 35.3 nvme write state 2
""",
    ),
    # Four sub-groups, every second one updated on the device: its state goes up (3 s) before the
    # host's weights (0.5 s), and comes back.
    (
        "deep_optimizer_states", {"subgroup": PARAMS // 4, "stride": 2}, 1, 2, 1,
        """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.0 device backward 1
  4.0-  6.0 device backward 1
  4.0-  4.5 d2h grads 1
  6.0-  6.5 device stall:d2h 1
  6.0-  6.5 d2h grads 1
  6.5-  9.5 device stall:h2d 1
  6.5-  9.5 h2d state 1
  6.5-  7.9 host adam 1
  7.9-  9.3 host adam 1
  9.5- 10.0 device step 1
  9.5- 10.0 h2d params 1
 10.0- 13.0 device stall:h2d 1
 10.0- 13.0 d2h state 1
 10.0- 13.0 h2d state 1
 13.0- 13.5 device step 1
 13.0- 13.5 h2d params 1
 13.5- 14.5 device forward 2
 13.5- 16.5 d2h state 1
 14.5- 15.5 device forward 2
 15.5- 17.5 device backward 2
 17.5- 19.5 device backward 2
 17.5- 18.0 d2h grads 2
 19.5- 20.0 device stall:d2h 2
 19.5- 20.0 d2h grads 2
 20.0- 23.0 device stall:h2d 2
 20.0- 23.0 h2d state 2
 20.0- 21.4 host adam 2
 21.4- 22.8 host adam 2
 23.0- 23.5 device step 2
 23.0- 23.5 h2d params 2
 23.5- 26.5 device stall:h2d 2
 23.5- 26.5 d2h state 2
 23.5- 26.5 h2d state 2
 26.5- 27.0 device step 2
 26.5- 27.0 h2d params 2
""",
    ),
    # The last layer's update begins inside backward; forward waits for the first layer's weights.
    (
        "layer_overlapped", {}, 2, 3, 1,
        """
  0.0-  4.6 device stall:host 2
  0.0-  1.0 d2h grads 1
  1.8-  2.8 h2d params 1
  1.8-  4.6 host adam 1
  4.6-  5.6 device stall:h2d 2
  4.6-  5.6 h2d params 1
  5.6-  6.6 device forward 2
  6.6-  7.6 device forward 2
  7.6-  9.6 device backward 2
  9.6- 11.6 device backward 2
  9.6- 10.6 d2h grads 2
 10.6- 13.4 host adam 2
 11.6- 16.2 device stall:host 3
 11.6- 12.6 d2h grads 2
 13.4- 14.4 h2d params 2
 13.4- 16.2 host adam 2
 16.2- 17.2 device stall:h2d 3
 16.2- 17.2 h2d params 2
 17.2- 18.2 device forward 3
 18.2- 19.2 device forward 3
 19.2- 21.2 device backward 3
 21.2- 23.2 device backward 3
 21.2- 22.2 d2h grads 3
 22.2- 25.0 host adam 3
""",
    ),
    # Floats both ways, 2 s a layer. The device updates half of the first layer.
    (
        "superoffload", {"ratio": 0.75}, 1, 2, 1,
        """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.0 device backward 1
  4.0-  6.0 device backward 1
  4.0-  6.0 d2h grads 1
  6.0-  6.5 device step 1
  6.0-  7.0 d2h grads 1
  6.0-  8.8 host adam 1
  6.5- 10.2 device stall:host 1
  8.8- 10.8 h2d params 1
  8.8- 10.2 host adam 1
 10.2- 11.8 device stall:h2d 1
 10.8- 11.8 h2d params 1
 11.8- 12.8 device forward 2
 12.8- 13.8 device forward 2
 13.8- 15.8 device backward 2
 15.8- 17.8 device backward 2
 15.8- 17.8 d2h grads 2
 17.8- 18.3 device step 2
 17.8- 18.8 d2h grads 2
 17.8- 20.6 host adam 2
 18.3- 22.0 device stall:host 2
 20.6- 22.6 h2d params 2
 20.6- 22.0 host adam 2
 22.0- 23.6 device stall:h2d 2
 22.6- 23.6 h2d params 2
""",
    ),
    # 16 bits both ways, and 14 bytes of DRAM for each of the host's elements. Copies up stand
    # behind the last copy down.
    (
        "torchao_offload", {}, 1, 1, 1,
        """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.0 device backward 1
  4.0-  6.0 device backward 1
  4.0-  5.0 d2h grads 1
  5.0-  6.4 host adam 1
  6.0-  8.4 device stall:host 1
  6.0-  7.0 d2h grads 1
  7.0-  8.0 h2d params 1
  7.0-  8.4 host adam 1
  8.4-  9.4 device stall:h2d 1
  8.4-  9.4 h2d params 1
""",
    ),
    # With clipping nothing starts before backward has ended, and the buckets go in turn.
    (
        "superoffload", {"ratio": 0.75, "clipping": True}, 1, 2, 1,
        """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.0 device backward 1
  4.0-  6.0 device backward 1
  4.0-  6.0 d2h grads 1
  6.0-  6.5 device step 1
  6.0-  7.0 d2h grads 1
  6.0-  8.8 host adam 1
  6.5- 12.2 device stall:host 1
  8.8- 10.8 h2d params 1
 10.8- 12.2 host adam 1
 12.2- 13.2 device stall:h2d 1
 12.2- 13.2 h2d params 1
 13.2- 14.2 device forward 2
 14.2- 15.2 device forward 2
 15.2- 17.2 device backward 2
 17.2- 19.2 device backward 2
 17.2- 19.2 d2h grads 2
 19.2- 19.7 device step 2
 19.2- 20.2 d2h grads 2
 19.2- 22.0 host adam 2
 19.7- 25.4 device stall:host 2
 22.0- 24.0 h2d params 2
 24.0- 25.4 host adam 2
 25.4- 26.4 device stall:h2d 2
 25.4- 26.4 h2d params 2
""",
    ),
    (
        "adamw_8bit", {}, 2, 2, 1,
        """
  0.0-  1.0 device forward 2
  1.0-  2.0 device forward 2
  2.0-  4.0 device backward 2
  4.0-  6.0 device backward 2
  6.0-  7.0 device step 2
""",
    ),
    (
        "adamw_8bit", {"float32_master": True}, 2, 2, 1,
        """
  0.0-  1.0 device forward 2
  1.0-  2.0 device forward 2
  2.0-  4.0 device backward 2
  4.0-  6.0 device backward 2
  6.0-  7.6 device step 2
""",
    ),
    (
        "adamw_4bit", {}, 2, 2, 1,
        """
  0.0-  1.0 device forward 2
  1.0-  2.0 device forward 2
  2.0-  4.0 device backward 2
  4.0-  6.0 device backward 2
  6.0-  6.8 device step 2
""",
    ),
    (
        "lora", {}, 2, 2, 1,
        """
  0.0-  1.0 device forward 2
  1.0-  2.0 device forward 2
  2.0-  4.0 device backward 2
  4.0-  6.0 device backward 2
  6.0-  6.6 device step 2
""",
    ),
    (
        "qlora", {}, 2, 2, 1,
        """
  0.0-  1.0 device forward 2
  1.0-  2.0 device forward 2
  2.0-  4.0 device backward 2
  4.0-  6.0 device backward 2
  6.0-  6.6 device step 2
""",
    ),
    (
        "megatrain", {"checkpoint_interval": 2}, 2, 2, 1,
        """
  0.0-  1.0 device stall:h2d 2
  0.0-  1.0 h2d weights 2
  1.0-  2.0 device forward 2
  1.0-  2.0 h2d weights 2
  2.0-  3.0 device forward 2
  3.0-  4.0 device stall:h2d 2
  3.0-  4.0 h2d weights 2
  4.0-  5.0 device backward 2
  5.0-  6.0 device stall:h2d 2
  5.0-  6.0 h2d weights 2
  6.0-  7.0 device backward 2
  7.0-  8.0 device stall:h2d 2
  7.0-  8.0 h2d weights 2
  8.0- 10.0 device backward 2
 10.0- 11.0 device stall:h2d 2
 10.0- 11.0 d2h grads 2
 10.0- 11.0 h2d weights 2
 11.0- 13.0 device backward 2
 13.0- 14.0 device stall:d2h 2
 13.0- 14.0 d2h grads 2
 14.0- 19.2 device stall:host 2
 14.0- 19.2 host adam 2
""",
    ),
    (
        "slideformer", {}, 2, 2, 1,
        """
  0.0-  6.6 device stall:host 2
  0.0-  1.0 d2h grads 1
  2.8-  6.6 host adam 1
  6.6-  7.6 device stall:h2d 2
  6.6-  7.6 h2d weights 2
  7.6-  8.6 device forward 2
  7.6-  8.6 h2d weights 2
  8.6-  9.6 device forward 2
  8.6-  9.6 h2d weights 2
  9.6- 11.6 device backward 2
  9.6- 10.6 h2d weights 2
 11.6- 13.6 device backward 2
 11.6- 12.6 d2h grads 2
 12.6- 16.4 host adam 2
""",
    ),
    (
        "roundpipe", {}, 2, 2, 1,
        """
  0.0-  1.0 device stall:h2d 2
  0.0-  1.0 d2h grads 1
  0.0-  1.0 h2d weights 2
  1.0-  2.0 device forward 2
  1.0-  2.0 h2d weights 2
  1.0-  9.0 host adam 1
  2.0-  3.0 device forward 2
  2.0-  3.0 h2d weights 2
  3.0-  5.0 device backward 2
  3.0-  4.0 h2d weights 2
  5.0-  7.0 device backward 2
  5.0-  6.0 d2h grads 2
  7.0-  9.0 device stall:host 2
  7.0-  8.0 d2h grads 2
""",
    ),
    # Whole weights: one all-reduce of both small layers passes the model through twice, in 4 s.
    # Each device updates all of it.
    (
        "ddp", {}, 1, 1, 2,
        """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.0 device backward 1
  4.0-  6.0 device backward 1
  6.0- 10.0 device stall:reduce 1
  6.0- 10.0 fabric reduce 1
 10.0- 12.0 device step 1
""",
    ),
    # ZeRO-2 as released: a full bucket is reduced before backward goes on, to both devices. Each
    # updates its half, and all weights are gathered.
    (
        "deepspeed_zero2", {"bucket_elements": 10}, 1, 1, 2,
        """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.0 device backward 1
  4.0-  6.0 device stall:reduce 1
  4.0-  6.0 fabric reduce 1
  6.0-  8.0 device backward 1
  8.0- 10.0 device stall:reduce 1
  8.0- 10.0 fabric reduce 1
 10.0- 11.0 device step 1
 11.0- 13.0 device stall:gather 1
 11.0- 13.0 fabric all-gather 1
""",
    ),
    # Behind backward, where the first bucket's hides.
    (
        "deepspeed_zero2", {"bucket_elements": 10, "overlap_comm": True}, 1, 1, 2,
        """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.0 device backward 1
  4.0-  6.0 device backward 1
  4.0-  6.0 fabric reduce 1
  6.0-  8.0 device stall:reduce 1
  6.0-  8.0 fabric reduce 1
  8.0-  9.0 device step 1
  9.0- 11.0 device stall:gather 1
  9.0- 11.0 fabric all-gather 1
""",
    ),
    # Sharded: the first all-gather and the last reduce-scatter show. The last layer stays
    # gathered; the other one's weights come behind its backward. Each device updates its half.
    (
        "fsdp2", {}, 1, 1, 2,
        """
  0.0-  1.0 device stall:gather 1
  0.0-  1.0 fabric all-gather 1
  1.0-  2.0 device forward 1
  1.0-  2.0 fabric all-gather 1
  2.0-  3.0 device forward 1
  3.0-  5.0 device backward 1
  3.0-  4.0 fabric all-gather 1
  5.0-  7.0 device backward 1
  5.0-  6.0 fabric reduce 1
  7.0-  8.0 device stall:reduce 1
  7.0-  8.0 fabric reduce 1
  8.0-  9.0 device step 1
""",
    ),
    # The same passes as released by DeepSpeed.
    (
        "deepspeed_zero3", {}, 1, 1, 2,
        """
  0.0-  1.0 device stall:gather 1
  0.0-  1.0 fabric all-gather 1
  1.0-  2.0 device forward 1
  1.0-  2.0 fabric all-gather 1
  2.0-  3.0 device forward 1
  3.0-  5.0 device backward 1
  3.0-  4.0 fabric all-gather 1
  5.0-  7.0 device backward 1
  5.0-  6.0 fabric reduce 1
  7.0-  8.0 device stall:reduce 1
  7.0-  8.0 fabric reduce 1
  8.0-  9.0 device step 1
""",
    ),
    # Nothing is gathered for backward.
    (
        "fsdp2", {"reshard_after_forward": False}, 1, 1, 2,
        """
  0.0-  1.0 device stall:gather 1
  0.0-  1.0 fabric all-gather 1
  1.0-  2.0 device forward 1
  1.0-  2.0 fabric all-gather 1
  2.0-  3.0 device forward 1
  3.0-  5.0 device backward 1
  5.0-  7.0 device backward 1
  5.0-  6.0 fabric reduce 1
  7.0-  8.0 device stall:reduce 1
  7.0-  8.0 fabric reduce 1
  8.0-  9.0 device step 1
""",
    ),
    # Without prefetch every all-gather shows, behind the reduce-scatter before it.
    (
        "fsdp2", {"prefetch": 0}, 1, 1, 2,
        """
  0.0-  1.0 device stall:gather 1
  0.0-  1.0 fabric all-gather 1
  1.0-  2.0 device forward 1
  2.0-  3.0 device stall:gather 1
  2.0-  3.0 fabric all-gather 1
  3.0-  4.0 device forward 1
  4.0-  6.0 device backward 1
  6.0-  8.0 device stall:gather 1
  6.0-  7.0 fabric reduce 1
  7.0-  8.0 fabric all-gather 1
  8.0- 10.0 device backward 1
 10.0- 11.0 device stall:reduce 1
 10.0- 11.0 fabric reduce 1
 11.0- 12.0 device step 1
""",
    ),
    # Halves of layers come up before they are gathered, and gradients' halves go down. The host's
    # half of the update takes 1.4 s, in 16 bits.
    (
        "fsdp2_offload", {"float32_master": False, "optimizer": "fused"}, 1, 1, 2,
        """
  0.0-  1.5 device stall:gather 1
  0.0-  0.5 h2d params 1
  0.5-  1.5 fabric all-gather 1
  0.5-  1.0 h2d params 1
  1.5-  2.5 device forward 1
  1.5-  2.5 fabric all-gather 1
  2.5-  3.5 device forward 1
  3.5-  5.5 device backward 1
  3.5-  4.0 h2d params 1
  4.0-  5.0 fabric all-gather 1
  5.5-  7.5 device backward 1
  5.5-  6.5 fabric reduce 1
  6.5-  7.0 d2h grads 1
  7.5-  8.5 device stall:reduce 1
  7.5-  8.5 fabric reduce 1
  8.5-  9.0 device stall:d2h 1
  8.5-  9.0 d2h grads 1
  9.0- 10.4 device stall:host 1
  9.0- 10.4 host adam 1
""",
    ),
    # Weights' halves stay on the device, and new ones come up behind the update. Gradients' halves
    # go down and up as sums, and down again in float32.
    (
        "zero3_offload", {}, 1, 1, 2,
        """
  0.0-  1.0 device stall:gather 1
  0.0-  1.0 fabric all-gather 1
  1.0-  2.0 device forward 1
  1.0-  2.0 fabric all-gather 1
  2.0-  3.0 device forward 1
  3.0-  5.0 device backward 1
  3.0-  4.0 fabric all-gather 1
  5.0-  7.0 device backward 1
  5.0-  6.0 fabric reduce 1
  6.0-  6.5 d2h grads 1
  6.5-  7.0 h2d accumulator 1
  7.0-  8.0 device stall:reduce 1
  7.0-  8.0 fabric reduce 1
  7.0-  8.0 d2h grads 1
  8.0- 10.0 device stall:d2h 1
  8.0-  8.5 d2h grads 1
  8.5-  9.0 h2d accumulator 1
  9.0- 10.0 d2h grads 1
 10.0- 10.8 device stall:host 1
 10.0- 10.8 host accumulate 1
 10.8- 13.6 device stall:host 1
 10.8- 13.6 host adam 1
 13.6- 14.2 device stall:host 1
 13.6- 14.2 host cast 1
 14.2- 15.2 device stall:h2d 1
 14.2- 15.2 h2d params 1
""",
    ),
    # DDP: each rank's host has half of the deferred elements, whose new weights are gathered from
    # both. The model is one bucket, averaged when backward ends. In keep mode the device then
    # measures all of it in 0.2 s and moves each layer in 0.7 s. Gradients leave, and updates land,
    # before it updates its own columns.
    (
        "zenflow", {"parallel": "ddp", "releases": False, **HALF_DEFERRED}, 3, 4, 2,
        """
  0.0-  1.0 device forward 3
  0.0-  0.8 host adam 2
  1.0-  2.0 device forward 3
  2.0-  4.0 device backward 3
  4.0-  6.0 device backward 3
  6.0- 10.0 device stall:reduce 3
  6.0- 10.0 fabric reduce 3
 10.0- 10.2 device step 3
 10.2- 10.9 device step 3
 10.9- 11.6 device step 3
 10.9- 11.2 d2h grads 3
 11.6- 12.6 device step 3
 11.6- 11.9 d2h grads 3
 11.6- 12.1 h2d params 3
 12.1- 12.6 h2d all-gather 3
 12.6- 13.6 device forward 4
 12.6- 13.4 host adam 3
 13.6- 14.6 device forward 4
 14.6- 16.6 device backward 4
 16.6- 18.6 device backward 4
 18.6- 22.6 device stall:reduce 4
 18.6- 22.6 fabric reduce 4
 22.6- 22.8 device step 4
 22.8- 23.5 device step 4
 23.5- 24.2 device step 4
 23.5- 23.8 d2h grads 4
 23.5- 24.0 h2d params 4
 24.0- 24.5 h2d all-gather 4
 24.2- 25.2 device step 4
 24.2- 24.5 d2h grads 4
""",
    ),
    # In release mode a layer leaves when it has been measured and moved, in 0.8 s.
    (
        "zenflow", {"parallel": "ddp", **HALF_DEFERRED}, 3, 4, 2,
        """
  0.0-  1.0 device forward 3
  0.0-  0.8 host adam 2
  1.0-  2.0 device forward 3
  2.0-  4.0 device backward 3
  4.0-  6.0 device backward 3
  6.0- 10.0 device stall:reduce 3
  6.0- 10.0 fabric reduce 3
 10.0- 10.8 device backward 3
 10.8- 11.6 device backward 3
 10.8- 11.1 d2h grads 3
 11.6- 12.6 device step 3
 11.6- 11.9 d2h grads 3
 11.6- 12.0 h2d params 3
 12.0- 12.5 h2d all-gather 3
 12.6- 13.6 device forward 4
 12.6- 13.4 host adam 3
 13.6- 14.6 device forward 4
 14.6- 16.6 device backward 4
 16.6- 18.6 device backward 4
 18.6- 22.6 device stall:reduce 4
 18.6- 22.6 fabric reduce 4
 22.6- 23.4 device backward 4
 23.4- 24.2 device backward 4
 23.4- 23.7 d2h grads 4
 23.4- 23.8 h2d params 4
 23.8- 24.3 h2d all-gather 4
 24.2- 25.2 device step 4
 24.2- 24.5 d2h grads 4
""",
    ),
    # FSDP2: half of everything. Norms of 100 columns are added up in 0.04 s. A layer leaves when
    # the next one's reduce-scatter has ended, and the last one when backward has.
    (
        "zenflow", {"parallel": "fsdp", **HALF_DEFERRED}, 3, 4, 2,
        """
  0.0-  1.0 device stall:gather 3
  0.0-  1.0 fabric all-gather 3
  0.0-  0.8 host adam 2
  1.0-  2.0 device forward 3
  1.0-  2.0 fabric all-gather 3
  2.0-  3.0 device forward 3
  3.0-  5.4 device backward 3
  3.0-  4.0 fabric all-gather 3
  5.4-  7.8 device backward 3
  5.4-  6.4 fabric reduce 3
  6.4-  6.4 fabric norms 3
  7.8-  8.8 device stall:reduce 3
  7.8-  8.8 fabric reduce 3
  8.8-  8.8 fabric norms 3
  8.8-  9.1 d2h grads 3
  8.8-  9.3 device step 3
  8.8-  9.3 h2d params 3
  9.1-  9.3 d2h grads 3
  9.3- 10.3 device stall:gather 4
  9.3- 10.3 fabric all-gather 4
  9.3- 10.1 host adam 3
 10.3- 11.3 device forward 4
 10.3- 11.3 fabric all-gather 4
 11.3- 12.3 device forward 4
 12.3- 14.7 device backward 4
 12.3- 13.3 fabric all-gather 4
 14.7- 17.1 device backward 4
 14.7- 15.7 fabric reduce 4
 15.7- 15.8 fabric norms 4
 17.1- 18.2 device stall:reduce 4
 17.1- 18.1 fabric reduce 4
 18.1- 18.2 fabric norms 4
 18.1- 18.4 d2h grads 4
 18.1- 18.6 h2d params 4
 18.2- 18.7 device step 4
 18.4- 18.6 d2h grads 4
""",
    ),
]  # fmt: skip


TWO_MICRO_BATCHES = """
  0.0-  1.0 device forward 1
  1.0-  2.0 device forward 1
  2.0-  4.0 device backward 1
  4.0-  5.0 device stall:d2h 1
  4.0-  5.0 d2h grads 1
  5.0-  7.0 device backward 1
  7.0-  8.0 device stall:d2h 1
  7.0-  8.0 d2h grads 1
  8.0-  9.0 device forward 1
  9.0- 10.0 device forward 1
 10.0- 12.0 device backward 1
 12.0- 16.0 device stall:d2h 1
 12.0- 13.0 h2d accumulator 1
 13.0- 14.0 d2h grads 1
 14.0- 16.0 d2h grads 1
 16.0- 18.0 device backward 1
 18.0- 22.0 device stall:d2h 1
 18.0- 19.0 h2d accumulator 1
 19.0- 20.0 d2h grads 1
 20.0- 22.0 d2h grads 1
 22.0- 30.4 device stall:host 1
 22.0- 23.6 host accumulate 1
 23.6- 29.2 host adam 1
 29.2- 30.4 host cast 1
 30.4- 32.4 device stall:h2d 1
 30.4- 32.4 h2d params 1
"""


A_BUCKET_FOR_EACH_LAYER = """
  0.0-  1.0 device forward 3
  0.0-  0.8 host adam 2
  1.0-  2.0 device forward 3
  2.0-  4.0 device backward 3
  4.0-  6.0 device backward 3
  4.0-  6.0 fabric reduce 3
  6.0-  6.8 device backward 3
  6.0-  8.0 fabric reduce 3
  6.8-  8.0 device stall:reduce 3
  6.8-  7.1 d2h grads 3
  8.0-  8.8 device backward 3
  8.8-  9.8 device step 3
  8.8-  9.1 d2h grads 3
  8.8-  9.2 h2d params 3
  9.2-  9.7 h2d all-gather 3
  9.8- 10.8 device forward 4
  9.8- 10.6 host adam 3
 10.8- 11.8 device forward 4
 11.8- 13.8 device backward 4
 13.8- 15.8 device backward 4
 13.8- 15.8 fabric reduce 4
 15.8- 16.6 device backward 4
 15.8- 18.3 fabric reduce 4
 16.6- 18.3 device stall:reduce 4
 16.6- 16.9 d2h grads 4
 16.6- 17.0 h2d params 4
 17.0- 18.0 h2d all-gather 4
 18.3- 19.1 device backward 4
 19.1- 20.1 device step 4
 19.1- 19.4 d2h grads 4
"""


@pytest.mark.parametrize(("name", "options", "first", "last", "devices", "expected"), LOGS)
def test_what_happens_when(name, options, first, last, devices, expected):
    found = log(Strategy.of(name, **options), first, last, devices)
    assert found.splitlines() == expected.strip("\n").splitlines()


def test_deepspeed_adds_gradients_up_on_the_device_and_keeps_the_sum_on_the_host():
    found = log(Strategy.of("deepspeed_zero_offload"), 1, 1, accumulation=2)
    assert found.splitlines() == TWO_MICRO_BATCHES.strip("\n").splitlines()


def test_under_ddp_a_bucket_leaves_when_backward_has_handed_the_next_one_over(monkeypatch):
    # In step 4 what lands is gathered while the last bucket is averaged: each at half its pace.
    monkeypatch.setattr(ddp, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(ddp, "BUCKET_BYTES", 1)
    found = log(Strategy.of("zenflow", parallel="ddp", **HALF_DEFERRED), 3, 4, devices=2)
    assert found.splitlines() == A_BUCKET_FOR_EACH_LAYER.strip("\n").splitlines()


def test_every_strategy_has_a_log():
    assert {name for name, *_ in LOGS} == set(STRATEGIES)
