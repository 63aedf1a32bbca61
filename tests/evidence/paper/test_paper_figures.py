"""Each figure in its smoke mode, and what its numbers must obey."""

import itertools
from pathlib import Path

import pytest
from matplotlib.image import imread

from evidence.paper.importance import selection_traffic
from experiments.lab import catalogue
from experiments.lab import record as records
from experiments.lab.finding import Verdict
from experiments.lab.runner import Runner
from experiments.lab.study import Scope
from experiments.paper import published as paper
from experiments.paper.speed.pcie_bytes import closed_form
from experiments.paper.speed.phases import packed, simulated, unpacked

OWN = (
    "breakdown", "utilisation", "naive_overlap", "pipeline", "speedup", "stall_reduction",
    "pcie_bytes", "selection_traffic", "largest_model",
)  # fmt: skip


@pytest.fixture(scope="module")
def counted():
    """Let no ranks be started for a figure: a slow test starts them, others have ranks too."""

    def as_expected(seed, width, steps):
        entries, columns = 9 * width * width * 2, 6 * width * 4
        ratio = entries / columns
        counts = {"gradient_bytes": entries, "norm_bytes": columns}
        return {**counts, "chosen_alike": 1.0, "closed_form": ratio}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection_traffic, "_counted", as_expected)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory, counted):
    """Return a function that makes a figure in smoke mode, once."""
    known = {}

    def make(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            known[name] = Runner(
                study=catalogue.load(f"paper/{name}"), scope=Scope(smoke=True, seeds=(0,)),
                folder=folder / "out", kept=folder / "kept",
            ).run()  # fmt: skip
        return known[name]

    return make


def data_of(made, name):
    return made(name).data(catalogue.load(f"paper/{name}"))


@pytest.mark.parametrize("name", OWN)
def test_a_figure_makes_a_record_and_a_picture(made, name):
    record, figure = made(name), catalogue.load(f"paper/{name}")
    assert record.findings
    claims = [finding.claim for finding in record.findings]
    assert len(set(claims)) == len(claims)
    assert all(f.source and f.published is not None for f in record.findings)
    assert all(f.verdict is not Verdict.UNKNOWN for f in record.findings)
    picture = imread(record.folder / records.PICTURE)
    assert picture.shape[0] > 300
    assert picture.std() > 0.05, "nothing is drawn"
    # Verdicts and picture are functions of what was written, as read back.
    assert tuple(figure.findings(record.data(figure))) == record.findings


def test_figures_come_in_the_order_of_their_numbers():
    numbers = [catalogue.load(name).number for name in catalogue.names("paper")]
    numbered = [number for number in numbers if number is not None]
    assert numbered == sorted(set(numbered))
    assert {f"paper/{name}" for name in OWN} <= set(catalogue.names())


def test_the_breakdowns_step_is_the_sum_of_its_phases(made):
    ours = data_of(made, "breakdown")["from_phases"]
    parts = sum(ours[name] for name in ("forward", "backward", "host", "h2d"))
    assert ours["step_seconds"] == pytest.approx(parts, rel=0.01)
    assert ours["idle_seconds"] == pytest.approx(ours["host"] + ours["h2d"], rel=0.01)


def test_utilisation_is_the_busy_share_of_the_step(made):
    offload = data_of(made, "utilisation")["published_zero_offload"]
    shares = offload["utilisation"]
    assert len(shares) == 120
    assert all(0 <= share <= 1 for share in shares)
    # 30 seconds end within a step, in its busy part.
    busy = 1 - offload["idle_seconds"] / offload["step_seconds"]
    assert sum(shares) / len(shares) == pytest.approx(busy, abs=0.06)


def test_joined_spans_keep_what_each_lane_is_busy_with():
    timeline = simulated("published_zero_offload", num_steps=4).timeline
    again = unpacked(packed(timeline))
    for lane in ("device", "host", "h2d"):
        assert again.busy(lane) == pytest.approx(timeline.busy(lane), rel=0.01)
    assert len(again.spans) < len(timeline.spans)


def test_a_longer_window_stalls_less(made):
    """Under the exact rule but for S = 5, where a window takes a second pass over the state."""
    for name, stalls in data_of(made, "pipeline")["stall_share"].items():
        shares = [stalls[key] for key in sorted(stalls, key=int)]
        assert shares[0] > 0.3
        assert max(shares[2:]) < 0.02
        if name == "zenflow_paper":
            assert all(b <= a + 1e-3 for a, b in itertools.pairwise(shares))


def test_speed_ups_fall_with_the_gpus_own_work_where_it_hides_the_host(made):
    rows = data_of(made, "speedup")["rows"]
    assert {row["machine"] for row in rows} == set(paper.MACHINES)
    for machine in paper.MACHINES:
        own = [row for row in rows if row["machine"] == machine]
        ratios = [row["zero_offload"]["step_seconds"] / row["zenflow"]["step_seconds"]
                  for row in own]  # fmt: skip
        assert ratios == sorted(ratios, reverse=True)
        assert all(ratio > 1 for ratio in ratios)
        for row in own:
            # A step is what the device computes and what it waits for, and the launch of either.
            for name in ("zero_offload", "zenflow"):
                run = row[name]
                computed = run["step_seconds"] - run["stall_seconds"]
                times = max(1, len([c for c in row["changes"] if "micro-batches" in c]))
                assert computed >= 0.99 * row["compute_seconds"] * times


def test_stall_removed_is_a_share(made):
    data = data_of(made, "stall_reduction")
    for row in data["rows"]:
        assert 0 <= row["zenflow"]["stall_seconds"] <= row["zero_offload"]["stall_seconds"]
    assert all(0.5 < share <= 1 for share in data["emulated"]["removed"].values())


def test_bytes_are_the_closed_forms_simulated_and_counted(made):
    data = data_of(made, "pcie_bytes")
    assert closed_form(0.1, 4) == pytest.approx(1.125)
    for row in data["rows"]:
        assert row["simulated"] == pytest.approx(row["closed_form"], rel=0.02)
        assert row["measured"] == pytest.approx(row["closed_form"], rel=0.02)
    assert data["zero_offload"]["measured"] == pytest.approx(2.0, rel=0.02)


@pytest.mark.slow
def test_ranks_exchange_as_many_bytes_as_columns_and_entries_say():
    width = 64
    counted = selection_traffic._counted(seed=0, width=width, steps=4)
    assert counted["gradient_bytes"] == 9 * width * width * 2
    assert counted["norm_bytes"] == 6 * width * 4
    assert counted["chosen_alike"] > 0.99  # columns whose norms are the same to the bit are ties


def test_a_projections_norms_are_a_twothousandth_of_its_gradient(made):
    projection = data_of(made, "selection_traffic")["projection"]
    assert projection["gradient_bytes"] / projection["norm_bytes"] == 2048


def test_more_memory_never_trains_a_smaller_model(made):
    from experiments.paper.speed.largest_model import _largest, _with_memory
    from sim.hardware.catalog import find_machine

    machine = find_machine("dgx-a100-80", 1)
    sizes = [_largest("zenflow", _with_memory(machine, size, 4096)) for size in (16, 80)]
    assert sizes[0] < sizes[1]
    less_host = _largest("zenflow", _with_memory(machine, 80, 64))
    assert less_host < sizes[1]
    smoke = data_of(made, "largest_model")["by_device"]
    assert smoke["on_device"]["16"] < smoke["zenflow"]["16"]


def test_every_published_number_has_a_source_and_a_unit_of_its_own():
    published = [v for v in vars(paper).values() if isinstance(v, paper.Published)]
    assert len(published) > 25
    assert all(number.source for number in published)
    text = Path(paper.__file__).read_text(encoding="utf-8")
    assert "secondary summary" in text
