"""A GPU's constants are found again from passes that follow from them, within what is known."""

from dataclasses import fields, replace

import numpy as np
import pytest

from sim.fitting.device import ComputeTimes, fit_device, pass_seconds
from sim.fitting.marquardt import least_errors
from sim.hardware.catalog import find_device
from sim.hardware.quantity import Quantity
from sim.hardware.unknown import SIGMA, generic_cpu, gpu_like
from sim.models.table import find_model
from sim.models.workload import Workload
from zenflow.errors import ConfigError

H100 = find_device("h100")
SHAPES = (("gpt2", 1, 64), ("gpt2", 4, 512), ("qwen2.5-1.5b", 2, 512), ("qwen2.5-1.5b", 8, 2048))
"""Models and batches: launches bound the first two, and work bounds the others."""


def workload(model, batch, sequence):
    return Workload.of_config(*find_model(model), batch_size=batch, sequence=sequence)


def changed(device, **factors):
    """Return a device some of whose constants are other than the table's by a factor."""
    others = {
        name: replace(quantity, value=factor * quantity.value)
        for name, factor in factors.items()
        if (quantity := getattr(device, name))
    }
    return replace(device, **others)


def times_on(device, shapes=SHAPES, noise=0.0):
    generator = np.random.default_rng(0)
    found = []
    for shape in shapes:
        own = workload(*shape)
        forward, backward = pass_seconds(device, own) * np.exp(noise * generator.normal(size=2))
        found.append(
            ComputeTimes(label=str(shape), workload=own, forward=forward, backward=backward)
        )
    return found


def test_constants_are_found_again():
    truth = changed(H100, launch=1.5, backward_launch=0.8, sustained_share=0.9)
    fit = fit_device(H100, times_on(truth))
    assert fit.worst_error < 0.03
    for name, factor in (("launch", 1.5), ("backward_launch", 0.8)):
        assert fit.factors[name] == pytest.approx(factor, rel=0.03), name
    # Others slow the same passes, and are no better known than this one.
    assert 0.9 <= fit.factors["sustained_share"] < 0.98


def test_noise_of_a_measurement_moves_no_constant_far():
    fit = fit_device(H100, times_on(H100, noise=0.05))
    assert all(0.85 < factor < 1.15 for factor in fit.factors.values())


def test_a_constant_that_no_pass_shows_keeps_its_value_and_its_uncertainty():
    fit = fit_device(H100, times_on(changed(H100, launch=2.0), SHAPES[:1]))
    assert fit.factors["launch"] == pytest.approx(2.0, rel=0.02)
    assert fit.device.launch.uncertainty < 0.2 * H100.launch.uncertainty
    for name in ("sustained_share", "bandwidth_efficiency"):
        assert fit.factors[name] == pytest.approx(1.0, abs=0.01)
        kept = getattr(H100, name).uncertainty
        assert getattr(fit.device, name).uncertainty == pytest.approx(kept, rel=0.05)


def test_no_card_is_faster_than_its_peak():
    quick = [
        replace(own, forward=own.forward / 3, backward=own.backward / 3)
        for own in times_on(H100, SHAPES[2:])
    ]
    fit = fit_device(H100, quick)
    assert fit.device.sustained_share.value == 1.0
    assert fit.device.bandwidth_efficiency.value <= 1.0
    assert fit.device.product_rate("bfloat16") <= fit.device.flops["bfloat16"].value


def test_passes_that_say_nothing_are_refused():
    with pytest.raises(ConfigError, match="measure longer"):
        fit_device(H100, [])
    (time,) = times_on(H100, SHAPES[:1])
    for nothing in ({"forward": 0.0}, {"backward": 0.0}):
        with pytest.raises(ConfigError, match="measure longer"):
            fit_device(H100, [replace(time, **nothing)])
    with pytest.raises(ConfigError, match="is a CPU"):
        fit_device(generic_cpu(2, 1e9).device, [time])


def test_a_card_that_the_table_lacks_starts_from_one_of_its_architecture():
    assert gpu_like("NVIDIA H100 80GB HBM3", (9, 0)) == H100
    for name, capability, like in (
        ("NVIDIA RTX 5000 Ada Generation", (8, 9), "rtx4090"),
        ("NVIDIA Orin", (8, 7), "rtx3090"),
        ("NVIDIA Rubin", (13, 0), "rtx5090"),
        ("Tesla P100", (6, 0), "v100-sxm2"),
    ):
        found = gpu_like(name, capability)
        assert found.name == like
        own = [getattr(found, field.name) for field in fields(found)]
        assert all(q.uncertainty == SIGMA for q in own if isinstance(q, Quantity))
        assert all(peak.uncertainty == SIGMA for peak in found.flops.values())
    start = gpu_like("NVIDIA RTX 5000 Ada Generation", (8, 9))
    truth = changed(start, sustained_share=0.35, bandwidth_efficiency=0.3)
    fit = fit_device(start, times_on(truth, SHAPES[2:]))
    assert fit.worst_error < 0.02


def test_the_least_errors_are_found_within_bounds():
    """Sums of two factors are told; where one may not grow, the other stands for both."""

    def errors(at):
        first, second = np.exp(at)
        return np.array([first + second - 5.0, first + 2.0 * second - 7.0])

    endless = np.full(2, np.inf)
    found = least_errors(errors, -endless, endless)
    assert np.exp(found.at) == pytest.approx([3.0, 2.0], rel=1e-3)
    assert found.before == pytest.approx(5.0)
    bounded = least_errors(errors, -endless, np.array([0.0, np.inf]))
    assert np.exp(bounded.at) == pytest.approx([1.0, 3.2], rel=1e-2)
