"""A search finds what the whole grid says, from a few of its points."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.sweeps.prices import COLUMN, add_prices, parse_prices
from experiments.sweeps.search import ANOMALY, cheapest
from tests.experiments.swept import run, sweep_of, table_of_all
from zenflow.errors import ConfigError

PRICES = parse_prices(["rtx4090=1600", "rtx5090=2500", "l40s=7000", "epyc-9654=9000",
                       "epyc-7742=4000"])  # fmt: skip
MACHINES = ("gpu=rtx4090,rtx5090,l40s", "host=epyc-7742,epyc-9654")
BATCH = ("model=qwen2.5-0.5b", "sequence=512")


def least(table, column, rate):
    enough = table[(table["status"] == "ok") & (table["tokens_per_second"] >= rate)]
    return float(enough[column].min()) if len(enough) else math.inf


@given(
    axes=st.sampled_from([
        ("dram=20:400:x2", "S=1,4", "batch=1,4"),
        ("dram=10:320:x2", "cores=2,6,16", "strategy=zenflow,zero_offload"),
        ("link_rate=4:64:x2", "tflops=40,160", "k=0.05,0.3"),
        ("cores=1:32:x2", "dram=20,200", "queue_depth=1,4", "duplex=0.6,1"),
        ("core_rate=2:16:x2", "S=2,8", "d2h=5,20", "h2d=5,20"),
    ]),
    share=st.floats(0.0, 1.02),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_the_least_of_an_axis_is_the_grids(axes, share):
    sweep = sweep_of(*BATCH, *axes)
    table = table_of_all(sweep)
    speeds = table["tokens_per_second"].dropna().sort_values()
    rate = float(speeds.quantile(share)) if share <= 1 else float(speeds.max()) * share
    for axis in sweep.axes:
        if axis.is_number and len(axis.values) > 1:
            found = cheapest(sweep, axis.name, rate)
            margin = rate * (1 + ANOMALY)
            assert least(table, axis.name, rate) <= found.cost <= least(table, axis.name, margin)
            assert (found.point is None) == math.isinf(found.cost)
            if found.point is not None:
                row = table.iloc[found.point]
                assert row["tokens_per_second"] == found.row["tokens_per_second"] >= rate
                assert row[axis.name] == found.cost


@given(share=st.floats(0.0, 1.0))
@settings(max_examples=8, deadline=None)
def test_the_cheapest_machine_is_the_grids(share):
    sweep = sweep_of(*BATCH, *MACHINES, "S=2,8", "batch=1,8", "link_rate=8,25,50")
    table = add_prices(table_of_all(sweep), PRICES)
    rate = float(table["tokens_per_second"].quantile(share))
    found = cheapest(sweep, COLUMN, rate, PRICES)
    margin = rate * (1 + ANOMALY)
    assert least(table, COLUMN, rate) <= found.cost <= least(table, COLUMN, margin)
    assert table[COLUMN].iloc[found.point] == found.cost
    assert found.looked_at <= len(table) / 3


def test_a_faster_link_may_make_a_step_longer_but_not_by_more_than_a_search_says():
    sweep = sweep_of(*BATCH, "core_rate=2:16:x2", "S=2,8", "d2h=5,20", "h2d=5,20")
    table = table_of_all(sweep)
    same = table[(table["S"] == 2) & (table["core_rate"] == 4) & (table["d2h"] == 20)]
    slow, fast = (same[same["h2d"] == each]["tokens_per_second"].item() for each in (5, 20))
    assert fast < slow < fast * (1 + ANOMALY)
    assert cheapest(sweep, "core_rate", fast).cost == least(table, "core_rate", fast)


def test_a_large_grid_is_searched_with_few_points():
    sweep = sweep_of(*BATCH, *MACHINES, "S=1:16:x2", "dram=20:520:1", "cores=4:64:4")
    found = cheapest(sweep, "dram", 8000.0)
    assert 20 < found.cost < 520
    assert found.looked_at < 100 < sweep.num_points // 1000


def test_where_the_most_of_an_axis_makes_no_sense_the_rest_is_looked_at():
    sweep = sweep_of(*BATCH, "machine=dgx-a100-80", "num_gpus=1", "cores=16,32,33")
    table = table_of_all(sweep)
    assert list(table["status"]) == ["ok", "ok", "invalid"]
    rate = float(table["tokens_per_second"].max())
    assert cheapest(sweep, "cores", rate).cost == least(table, "cores", rate)


def test_what_can_not_be_found_is_said():
    sweep = sweep_of("S=1,2")
    for column, said in (("drum", "unknown"), (COLUMN, "needs prices")):
        with pytest.raises(ConfigError, match=said):
            cheapest(sweep, column, 1.0)
    words = ["sweep", "--model", "tiny", "--gpu", "rtx4090", "--vary", "dram=20,40"]
    assert "belong together" in run(*words, "--find", "dram").output
    none = run(*words, "--find", "dram", "--rate", "1e12")
    assert none.exit_code == 1
    assert "No point reaches" in none.output
    some = run(*words, "--find", "dram", "--rate", "10")
    assert some.exit_code == 0, some.output
    assert "Least dram for 10 tokens/s: 20" in some.output
