"""Stalls are counted once, whoever waits inside of whom."""

import time

import pytest
import torch

from zenflow.device.cpu import CpuDevice
from zenflow.device.stalls import StallClock
from zenflow.trace.recorder import Recorder


def test_a_wait_inside_of_another_counts_once():
    device = CpuDevice(torch.device("cpu"))
    clock = StallClock(device, Recorder(1, device.seconds_of))
    with clock.waiting("select"):
        with clock.waiting("weights"):
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="late"), clock.waiting("weights"):
            raise RuntimeError("late")
    with clock.waiting("host"):
        pass
    found = clock.resolve(clock.take(), 1)
    assert set(found) == {"select", "host"}
    assert found["select"] >= 0.01
