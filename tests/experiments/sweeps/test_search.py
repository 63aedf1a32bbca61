"""A search finds what plans of the whole grid say, from a few of its points."""

import json
import math
from pathlib import Path

import pytest

from experiments.sweeps.planned import CHECKPOINTING, LOSS, STRATEGY, PlannedPoints
from experiments.sweeps.prices import COLUMN, parse_prices
from experiments.sweeps.search import cheapest
from sim.planning.plan import plan
from sim.simulate import Strategy
from tests.experiments.swept import run, sweep_of
from zenflow.config import PRESETS
from zenflow.errors import ConfigError

pytestmark = pytest.mark.usefixtures("simulated_once")
PRICES = parse_prices(["rtx3090=800", "rtx4090=1800", "rtx5090=2400", "l40s=7000"])
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "predict.md"
CARDS = "gpu=rtx3090,rtx4090,rtx5090,l40s"
MODEL = ("model=qwen2.5-1.5b", "sequence=512")


def planned(sweep, **more):
    """Return what to use at every point, by index."""
    plans = PlannedPoints(sweep, **more)
    return [plans.plan(point) for point in range(sweep.num_points)]


def speed(option):
    return 0.0 if option is None else option.tokens_per_second


def least(sweep, points, name, rate):
    """Return the least value of an axis with which a recommended setting is fast enough."""
    enough = [sweep.values(at)[name] for at, own in enumerate(points) if speed(own.option) >= rate]
    return min(enough, default=math.inf)


@pytest.mark.parametrize(
    "axes",
    [
        ("dram=20:160:x2", "batch=1,4"),
        ("link_rate=4:32:x2", "k=0.05,0.3"),
        ("cores=2:16:x2", "strategy=zenflow,zero_offload"),
        ("batch=1,2,4", "checkpointing=no,yes"),
    ],
    ids=" ".join,
)
def test_the_least_of_an_axis_is_the_grids(axes):
    sweep = sweep_of(*MODEL, *axes)
    points = planned(sweep)
    speeds = sorted(speed(own.option) for own in points)
    name = axes[0].split("=")[0]
    for rate in (speeds[len(speeds) // 2], speeds[-1], 1.02 * speeds[-1]):
        found = cheapest(sweep, name, rate).found
        assert (math.inf if found is None else found.cost) == least(sweep, points, name, rate)
        if found is not None:
            assert found.option.tokens_per_second == speed(points[found.point].option) >= rate


def test_the_cheapest_card_is_the_one_that_plan_recommends_to_who_asks_for_it():
    sweep = sweep_of(*MODEL, CARDS)
    plans = {}
    for point in range(sweep.num_points):
        case = sweep.case(point)
        plans[sweep.values(point)["gpu"]] = plan(
            case.workload, case.hardware, strategies=tuple(PRESETS), draws=0
        )
    for rate in {0.99 * speed(own.recommended) for own in plans.values()}:
        enough = [name for name, own in plans.items() if speed(own.recommended) >= rate]
        found = cheapest(sweep, COLUMN, rate, PRICES).found
        name = sweep.values(found.point)["gpu"]
        assert PRICES[name] == found.cost == min(PRICES[name] for name in enough)
        assert found.option.to_dict() == plans[name].recommended.to_dict()


def test_a_setting_that_is_given_or_varied_is_held():
    sweep = sweep_of(*MODEL, "S=2,8", knobs={"topk_ratio": 0.2})
    for point, own in enumerate(planned(sweep)):
        config = own.option.strategy.config
        assert own.option.strategy.name == "zenflow"
        assert (config.topk_ratio, config.update_interval) == (0.2, sweep.values(point)["S"])
    recomputed = sweep_of(*MODEL, "dram=80")
    (free,), (held,) = planned(recomputed), planned(recomputed, holds=(CHECKPOINTING,))
    assert not held.option.need.workload.checkpointing
    assert speed(free.option) >= speed(held.option)


LARGE = ("model=llama-3.1-8b", "batch=4", "sequence=1024", "host_ram=128", "gpu=rtx3090,rtx5090")


def test_logits_come_in_chunks_and_layers_visit_where_plan_offers_it():
    sweep = sweep_of(*LARGE)
    for point, own in enumerate(planned(sweep)):
        case = sweep.case(point)
        offered = plan(case.workload, case.hardware, strategies=tuple(PRESETS), draws=0)
        best = max(speed(offered.recommended), speed(offered.streamed))
        assert best > 0
        assert speed(own.option) == pytest.approx(best)
        assert own.option.need.workload.loss == "chunks"
    held = planned(sweep, holds=(LOSS, STRATEGY))
    assert all(own.riskier for own in held)
    for option in (option for own in held for option in (own.option, *own.riskier) if option):
        assert option.need.workload.loss == "tokens"
        assert option.strategy.streams is None


def test_a_point_that_only_visiting_layers_fit_is_not_left_out_unseen():
    sweep = sweep_of("model=qwen2.5-14b", "host_ram=256", "dram=60:90:10", "gpu=rtx4090")
    found = cheapest(sweep, "dram", 30.0)
    assert found.found.option.strategy.streams is not None
    assert PlannedPoints(sweep).most_tokens_per_second(0) >= found.found.option.tokens_per_second
    assert cheapest(sweep, "dram", 30.0, holds=(STRATEGY,)).found is None


def test_other_systems_are_found_where_they_are_asked_for():
    sweep = sweep_of("model=qwen2.5-0.5b", "strategy=adamw_8bit,lora", "dram=80")
    found = cheapest(sweep, "dram", 10.0).found
    assert found.option.strategy == Strategy.of(found.option.strategy.name)
    assert found.option.fits


def test_a_cheaper_card_that_may_not_fit_stands_behind_with_its_chance():
    words = ["sweep", "--model", "llama-3.1-8b", "--host-ram", "128", "--strategy", "zenflow",
             "--vary", "gpu=rtx3090,rtx5090", "--find", COLUMN, "--rate", "500",
             "--price", "rtx3090=800", "--price", "rtx5090=2400"]  # fmt: skip
    ran = run(*words)
    assert ran.exit_code == 0, ran.output
    assert f"```text\n{ran.stdout}```" in GUIDE.read_text(encoding="utf-8")
    first, answer, second, behind, *_ = ran.stdout.splitlines()
    assert first == "Least price_usd for 500 tokens/s: 2400"
    assert second == "Cheaper, but riskier (chance to fit below 90%): 800"
    for line, card, name in ((answer, "rtx5090", "recommended"), (behind, "rtx3090", "tight")):
        asked = ["plan", "--model", "llama-3.1-8b", "--host-ram", "128", "--gpu", card, "--json"]
        own = json.loads(run(*asked, "--draws", "0").stdout)[name]
        setting = ", ".join([own["strategy"], *own["changes"]])
        assert f"gpu={card}: {setting}, 4 x 1024 tokens to a step" in line
        assert f"{own['tokens_per_second']:,.0f} tokens/s" in line
        assert f"fits with a chance of {own['chance_to_fit']:.0%}" in line


def test_a_large_grid_is_searched_with_few_points():
    sweep = sweep_of(*MODEL, "strategy=zero_offload", CARDS, "dram=20:520:1", "cores=4:64:4")
    fastest = cheapest(sweep, "dram", 1e9).fastest
    assert fastest is None, "no bound is that high, so nothing is looked at"
    found = cheapest(sweep, "dram", 1000.0)
    assert 20 < found.found.cost < 520
    assert found.looked_at < 100 < sweep.num_points // 100


def test_a_part_without_a_price_is_named_before_anything_is_planned():
    words = ["sweep", "--model", "gpt2", "--vary", "gpu=h100,l40s", "--find", COLUMN]
    for price, missing in (("h100=9", "l40s"), ("l40s=3", "h100-sxm")):
        ran = run(*words, "--rate", "10", "--price", price)
        assert ran.exit_code == 2, ran.output
        assert f"--price {missing}=USD" in " ".join(ran.output.split())
    for price in ("nan", "inf", "-3", "0"):
        ran = run(*words, "--rate", "10", "--price", f"h100={price}", "--price", "l40s=3")
        assert ran.exit_code == 2, ran.output
    for rate in ("nan", "inf", "-1"):
        assert run(*words, "--rate", rate, "--price", "h100=9").exit_code == 2


def test_what_can_not_be_found_is_said():
    sweep = sweep_of("S=1,2")
    for column, said in (("drum", "unknown"), (COLUMN, "needs prices")):
        with pytest.raises(ConfigError, match=said):
            cheapest(sweep, column, 1.0)
    words = ["sweep", "--model", "tiny", "--gpu", "rtx4090", "--vary", "dram=20,40"]
    assert "belong together" in run(*words, "--find", "dram").output
    none = run(*words, "--find", "dram", "--rate", "1e12")
    assert none.exit_code == 3
    assert "No point reaches" in none.output
    some = run(*words, "--find", "dram", "--rate", "10")
    assert some.exit_code == 0, some.output
    assert "Least dram for 10 tokens/s: 20" in some.output
