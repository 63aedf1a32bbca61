"""A GPU's trace with known answers: launches, gaps, streams, waits; and what is no such trace."""

import gzip
import json
import math
from dataclasses import replace

import pytest

from sim.hardware.catalog import find_machine
from sim.models.shapes.parts import Layer, Mixer, Parameter
from sim.models.workload import Workload
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of
from sim.timing.traced import scaling_spread
from sim.traced.step import read_step
from tests.sim.traced.kineto import write_trace
from zenflow.errors import ConfigError

MS = 1e-3


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    return read_step(write_trace(tmp_path_factory.mktemp("trace") / "gpu.json"))


def workload(step, **changes):
    """Return a model of 6,400 parameters in two layers, of the trace's batch."""
    layers = [
        Layer(name="first", parameters=(Parameter(name="table", shape=(10, 64)),)),
        Layer(name="second", parameters=(Parameter(name="weight", shape=(90, 64)),),
              mixer=Mixer(heads=1, queries=64, keys=64, values=64, outputs=64)),
    ]  # fmt: skip
    known = {"name": "two", "layers": tuple(layers), "batch_size": 4, "sequence": 128,
             "accumulation": 2, "traced": step}  # fmt: skip
    return Workload(**{**known, **changes})


def seconds(work, machine, strategy="published_on_device"):
    costs = costs_of(work, find_machine(machine, 1))
    return simulate(costs, Strategy.of(strategy), keeps_spans=False).step_seconds


def product_rate(device):
    share = device.matmul_efficiency.value * device.sustained_share.value
    return device.flops["bfloat16"].value * share


def byte_rate(device):
    return device.bandwidth.value * device.bandwidth_efficiency.value


def test_passes_have_their_walls_kinds_and_launches(step):
    assert (step.steps, step.micro_batches) == (2, 2)
    forward, backward, optimizer = step.forward, step.backward, step.optimizer
    assert forward.wall == pytest.approx(2 * MS)
    assert (forward.products, forward.attention, forward.other) == pytest.approx(
        (0.5 * MS, 0.25 * MS, 0.25 * MS)
    )
    assert forward.host == pytest.approx(2 * MS)
    assert (backward.wall, backward.products, backward.other) == pytest.approx(
        (5 * MS, 4 * MS, 1 * MS)
    )
    assert backward.host == pytest.approx(1 * MS)
    assert (optimizer.wall, optimizer.busy) == pytest.approx((4 * MS, 3 * MS))
    assert step.rest == pytest.approx(2 * MS)
    assert step.step_seconds == pytest.approx(20 * MS)


def test_shapes_say_parameters_type_and_batch(step, tmp_path):
    assert (step.num_params, step.dtype) == (6400, "bfloat16")
    assert (step.batch_size, step.sequence) == (4, 128)
    blind = read_step(write_trace(tmp_path / "blind.json", shapes=False))
    assert (blind.num_params, blind.dtype, blind.batch_size, blind.sequence) == (None,) * 4
    assert blind.forward == step.forward


def test_a_device_behind_its_host_gives_the_same_walls(tmp_path):
    """Kernels that run late move every part's end alike: a step is as long."""
    path = write_trace(tmp_path / "late.json", steps=4)
    found = json.loads(path.read_text())
    for event in found["traceEvents"]:
        if event["cat"] in ("kernel", "gpu_memcpy"):
            event["ts"] += 600
    path.write_text(json.dumps(found))
    late = read_step(path)
    assert late.backward.wall == pytest.approx(5 * MS)
    assert late.step_seconds == pytest.approx(20 * MS)


def test_what_runs_beside_the_part_before_counts_once(tmp_path):
    path = write_trace(tmp_path / "beside.json")
    found = json.loads(path.read_text())
    for event in found["traceEvents"]:
        if event["name"] == "flash_fwd_kernel":  # now beside 0.6 ms of backward's first product
            event["ts"] += 600
    path.write_text(json.dumps(found))
    step = read_step(path)
    assert (step.forward.wall, step.backward.wall) == pytest.approx((2.6 * MS, 4.4 * MS))
    assert (step.backward.products, step.backward.other) == pytest.approx((3.4 * MS, 1 * MS))


def test_simulated_without_offloading_it_takes_the_traced_step(step):
    for strategy in ("published_on_device", "on_device"):
        found = seconds(workload(step), "dgx-a100-80", strategy)
        assert math.isclose(found, step.step_seconds, rel_tol=1e-9)


def test_another_device_scales_what_it_does_faster_and_not_the_launches(step):
    work = workload(step)
    old, new = find_machine("dgx-a100-80", 1), find_machine("hgx-h200", 1)
    products, other = (rate(old.device) / rate(new.device) for rate in (product_rate, byte_rate))
    faster = costs_of(work, new)
    assert faster.forward_seconds == pytest.approx(2 * MS)  # launches bound it
    assert faster.backward_seconds == pytest.approx(4 * MS * products + 1 * MS * other)
    assert products < 0.5 > other
    assert scaling_spread(step, old) == 0
    assert 0.05 < scaling_spread(step, new) < 0.3


def test_a_device_that_is_slower_than_launches_fills_the_gaps(step):
    slow = find_machine("dgx-a100-80", 1)
    slow = replace(slow, device=replace(slow.device, name="slow"))
    times = costs_of(workload(step), slow)  # same figures under another name: nothing is scaled
    assert times.forward_seconds == pytest.approx(2 * MS)
    figures = {"device.bandwidth": slow.device.bandwidth.value / 8}
    crawling = costs_of(workload(step), slow.with_values(figures))
    # 0.5 ms of products, 0.25 of attention and 8 times 0.25 of others are above 2 ms of launches.
    assert crawling.forward_seconds == pytest.approx(2.75 * MS)


def test_other_batches_scale_the_devices_work_alone(step):
    costs = costs_of(workload(step, batch_size=8), find_machine("dgx-a100-80", 1))
    assert costs.backward_seconds == pytest.approx(10 * MS, rel=0.01)
    assert costs.forward_seconds == pytest.approx(2 * MS, rel=0.01)


def test_recomputation_is_added_or_taken_away(step):
    machine = find_machine("dgx-a100-80", 1)
    again = costs_of(workload(step, checkpointing=True), machine)
    assert again.backward_seconds == pytest.approx(7 * MS)
    less = costs_of(workload(replace(step, recomputes=True)), machine)
    assert less.backward_seconds == pytest.approx(5 * MS * 2 / 3)
    for share in (0.0, 0.25, 1.0):
        some = costs_of(workload(step, checkpointing=share), machine)
        assert some.backward_seconds == pytest.approx((5 + 2 * share) * MS)
        some = costs_of(workload(replace(step, recomputes=True), checkpointing=share), machine)
        assert some.backward_seconds == pytest.approx(5 * MS * (2 + share) / 3)
    with pytest.raises(ConfigError, match="can't be told from a trace"):
        workload(step, checkpointing="op")


def test_compressed_files_are_read(step, tmp_path):
    plain = write_trace(tmp_path / "plain.json")
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert replace(read_step(packed), path=step.path) == step


def _cut(path):
    path.write_bytes(path.read_bytes()[:-500])


def _cut_gzip(path):
    path.write_bytes(gzip.compress(path.read_bytes())[:-500])


def _without(what):
    def change(path):
        found = json.loads(path.read_text())
        events = found["traceEvents"]
        found["traceEvents"] = [
            e for e in events if what not in (e["cat"], e["name"][: len(what)])
        ]
        path.write_text(json.dumps(found))

    return change


def _with(**odd):
    def change(path):
        found = json.loads(path.read_text())
        found["traceEvents"][0] |= odd
        path.write_text(json.dumps(found))

    return change


def _second_device(path):
    found = json.loads(path.read_text())
    next(e for e in found["traceEvents"] if e["cat"] == "kernel")["args"]["device"] = 1
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_cut, "no whole JSON"),
        (_cut_gzip, "no whole JSON"),
        (_without("ProfilerStep#"), "marks no steps"),
        (_without("ProfilerStep#4"), "marks one step only"),
        (_without("autograd::engine"), "has no backward"),
        (_without("cuda_runtime"), "does not say what launched"),
        (_second_device, "kernels of 2 GPUs"),
        (lambda path: path.write_text("{}"), "no traceEvents"),
        (lambda path: path.write_text('{"traceEvents": []}'), "no event of torch.profiler"),
        (lambda path: path.unlink(), "can't be read"),
        (lambda path: path.write_text("[" * 100_000), "no whole JSON"),
        (_with(ts="soon"), "does not write"),
        (_with(name=3), "name must be text"),
        (_with(args=[1]), "args an object"),
    ],
)
def test_what_is_no_trace_of_training_is_refused_with_a_remedy(change, message, tmp_path):
    path = write_trace(tmp_path / "bad.json", steps=2)
    change(path)
    with pytest.raises(ConfigError, match=message):
        read_step(path)


def test_another_model_and_an_offloading_run_are_refused(step, tmp_path):
    step.check("two", 6400)
    with pytest.raises(ConfigError, match=r"trains 6,400 parameters and other has 9,000"):
        step.check("other", 9000)
    moves = read_step(write_trace(tmp_path / "moves.json", copied=2 * 6400))
    with pytest.raises(ConfigError, match="so it offloads"):
        moves.check("two", 6400)


def test_a_batch_that_the_shapes_deny_is_refused(step):
    assert step.of_batch(4, 128) == step
    with pytest.raises(ConfigError, match=r"4 sequences, by its shapes, and not of 8"):
        step.of_batch(8, 128)


def test_a_gpus_trace_says_nothing_of_a_cpu(step):
    machine = find_machine("dgx-a100-80", 1)
    cpu = replace(machine, device=replace(machine.device, is_cpu=True))
    with pytest.raises(ConfigError, match="says nothing of"):
        costs_of(workload(step), cpu)
