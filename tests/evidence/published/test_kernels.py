"""Costs of single kernels, against others' measurements of them."""

from statistics import median

import numpy as np
import pytest

from evidence.published.tables import FOLDER, read_file
from sim.hardware.catalog import find_device
from sim.models.kernels import KERNELS, NOTHING, Passes
from sim.models.work import LayerWork
from sim.timing.costs import layer_seconds

MEASURED = read_file(FOLDER / "kernels.toml")
SIZES = {"bfloat16": 2, "float32": 4}


def seconds_of(device, dtype="bfloat16", **fields):
    work = {"matmul_flop": 0.0, "num_matmuls": 0, "attention_flop": 0.0, "weight_bytes": 0.0,
            "elementwise_bytes": NOTHING, "num_kernels": 0, **fields}  # fmt: skip
    return layer_seconds(LayerWork(**work), device, dtype)


def product_errors(*, adds=False):
    """Return relative errors of products, or of their FLOP and traffic one after the other."""
    device = find_device(MEASURED["products"]["device"])
    found = []
    for layout, m, k, n, share in MEASURED["products"]["rows"]:
        flop, outputs = 2.0 * m * k * n, m * n * (2 * 4 if layout == "NT" else 2)
        moved = outputs + 2 * (m * k + k * n)
        product = {"matmul_flop": flop, "num_matmuls": 1, "num_kernels": 1}
        if adds:
            predicted = seconds_of(device, **product, elementwise_bytes=Passes(moved, 0.0))[0]
        else:
            predicted = seconds_of(device, **product, product_bytes=moved)[0]
        measured = flop / (share * device.flops["bfloat16"].value)
        found.append(predicted / measured - 1.0)
    return found


def test_products_of_language_models_take_their_flop_at_the_sustained_rate():
    errors = product_errors()
    assert len(errors) == 183
    assert abs(median(errors)) < 0.01
    assert np.quantile(np.abs(errors), 0.9) < 0.125


def test_traffic_beside_the_flop_would_make_products_too_slow():
    assert median(product_errors(adds=True)) > 0.05


@pytest.mark.parametrize("row", MEASURED["elementwise"]["rows"], ids=str)
def test_elementwise_kernels_take_their_bytes_both_ways(row):
    moved = getattr(KERNELS[row["kernels"]], row["operation"]).of(SIZES[row["dtype"]])
    moved += Passes(*row.get("beside", (0.0, 0.0)))
    forward, backward = seconds_of(
        find_device(row["device"]), row["dtype"], elementwise_bytes=moved * row["elements"]
    )
    both = forward + backward
    tolerance = 0.04 if row["kernels"] == "eager" else 0.23  # times that no bandwidth binds
    assert both * 1e3 == pytest.approx(row["both"], rel=tolerance)
    assert forward * 1e3 == pytest.approx(row["forward"], rel=tolerance)
