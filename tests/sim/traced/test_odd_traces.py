"""Traces of uneven micro-batches, of no shapes, of other optimizers, and with an evaluation."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from experiments.cli import main
from sim.hardware.catalog import find_machine
from sim.models.shapes.parts import Layer, Mixer, Parameter
from sim.models.workload import Workload
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of
from sim.timing.traced import check_rate
from sim.traced.step import read_step
from tests.sim.traced.kineto import write_trace
from zenflow.errors import ConfigError

MACHINE = find_machine("dgx-a100-80", 1)
UNEVEN = ((4, 128), (4, 128), (4, 32), (4, 32), (4, 32), (4, 257))
"""Micro-batches of three steps; the first one's don't count."""


def of(step, **changes):
    layers = (
        Layer(name="first", parameters=(Parameter(name="table", shape=(10, 64)),)),
        Layer(name="second", parameters=(Parameter(name="weight", shape=(90, 64)),),
              mixer=Mixer(heads=1, queries=64, keys=64, values=64, outputs=64)),
    )  # fmt: skip
    known = {"name": "two", "layers": layers, "batch_size": step.batch_size,
             "sequence": step.sequence, "accumulation": 2, "traced": step}  # fmt: skip
    return Workload(**{**known, **changes})


def predicted(work):
    strategy = Strategy.of("published_on_device")
    return simulate(costs_of(work, MACHINE), strategy, keeps_spans=False).step_seconds


def test_tokens_a_second_are_those_of_the_timed_micro_batches(tmp_path):
    step = read_step(write_trace(tmp_path / "uneven.json", batches=UNEVEN))
    assert step.batches == UNEVEN[2:]
    work = of(step)
    right = 4 * (3 * 32 + 257) / (2 * step.step_seconds)
    assert work.tokens_per_step / predicted(work) == pytest.approx(right, rel=2e-3)


def test_batches_of_other_sizes_scale_from_the_mean_of_uneven_ones(tmp_path):
    uneven = read_step(write_trace(tmp_path / "uneven.json", batches=((4, 96), (4, 160))))
    even = read_step(write_trace(tmp_path / "even.json"))
    for sequence in (64, 128, 512):
        other, same = (predicted(of(step, sequence=sequence)) for step in (uneven, even))
        assert other == pytest.approx(same, rel=1e-12)


def test_even_micro_batches_are_taken_as_they_are(tmp_path):
    step = read_step(write_trace(tmp_path / "even.json"))
    assert step.rounding == 1.0
    assert step.of_batch(4, 128) == step


def test_a_traced_batch_of_uneven_ones_is_refused(tmp_path):
    step = read_step(write_trace(tmp_path / "uneven.json", batches=UNEVEN))
    with pytest.raises(ConfigError, match="from 4 x 32 to 4 x 257, by its shapes"):
        step.of_batch(4, 128)


def test_a_step_with_an_evaluation_is_left_out(tmp_path):
    plain = read_step(write_trace(tmp_path / "plain.json", steps=4))
    path = write_trace(tmp_path / "odd.json", steps=4, evaluates=(2,))
    found = json.loads(path.read_text())
    for event in found["traceEvents"]:  # the step that evaluates is long
        if event["ts"] >= 1_000_000 + 2 * 20_000 + 19_300:
            event["ts"] += 50_000
    path.write_text(json.dumps(found))
    step = read_step(path)
    assert (step.steps, step.evaluations) == (2, 1)
    assert step.step_seconds == pytest.approx(plain.step_seconds)


def test_a_forward_without_gradients_in_every_step_is_part_of_it(tmp_path):
    step = read_step(write_trace(tmp_path / "teacher.json", evaluates=(0, 1, 2)))
    assert (step.steps, step.evaluations) == (2, 0)


def test_another_optimizers_seconds_are_not_taken_for_adamws(tmp_path):
    adam, sgd = (
        read_step(write_trace(tmp_path / f"{name}.json", optimizer=name))
        for name in ("AdamW", "SGD")
    )
    assert (adam.is_adamw, sgd.is_adamw) == (True, False)
    (update, modelled), own = (
        (costs_of(of(step), MACHINE).hardware.overheads.device_update for step in (adam, sgd)),
        MACHINE.overheads.device_update,
    )
    assert modelled == own != update


def test_a_trace_without_shapes_is_told_by_its_number_of_tensors(tmp_path):
    blind = read_step(write_trace(tmp_path / "blind.json", shapes=False))
    blind.check("one", 6400, 1)
    blind.check("unknown", 6400, None)
    with pytest.raises(ConfigError, match=r"gradients of 1 tensors and two has 2.*record_shapes"):
        blind.check("two", 6400, 2)
    with_shapes = read_step(write_trace(tmp_path / "seen.json"))
    with_shapes.check("two", 6400, 2)  # written otherwise, with as many parameters


def test_a_batch_beyond_the_devices_peak_is_refused(tmp_path):
    blind = read_step(write_trace(tmp_path / "blind.json", shapes=False))
    check_rate(blind.of_batch(4, 128), of(blind.of_batch(4, 128)), MACHINE.device)
    many = blind.of_batch(64, 1 << 20)
    with pytest.raises(ConfigError, match=r"64 x 1048576 tokens of two would be .* times"):
        check_rate(many, of(many), MACHINE.device)
    seen = replace(many, batches=((64, 1 << 20),))
    check_rate(seen, of(seen), MACHINE.device)


@pytest.fixture
def say(tmp_path):
    """Run a simulation of a model of one tensor, whose parameters the trace has."""
    from experiments.request.request import Request
    from experiments.request.workload import notes_on, traced_of

    def run(*words, **trace):
        path = write_trace(tmp_path / f"{len(list(tmp_path.iterdir()))}.json", **trace)
        made = {"batch_size": 4, "sequence": 128}
        request = Request(model="two", gpu="a100-80-sxm", from_trace=path, **made)
        step = traced_of(replace(request, traced_batch=(4, 128) if words else None))
        return notes_on(of(step), MACHINE)

    return run


def test_notes_say_what_is_odd_about_a_trace(say):
    (plain,) = say()
    assert plain.startswith("compute as traced in")
    assert "4 x 32 to 4 x 257 tokens; predicted are 4 x 88" in say(batches=UNEVEN)[1]
    assert "the traced optimizer is SGD: AdamW's step is modelled" in say(optimizer="SGD")[1]
    assert "no shapes: that it is of two and of 4 x 128 tokens was not" in say(1, shapes=False)[1]
    assert "in the others: 1 of 2 steps" in say(evaluates=(2,))[1]


def test_an_interval_that_no_figure_moves_names_none(tmp_path):
    words = ["simulate", "--model", "gpt2", "--gpu", "h100", "--draws", "20", "--strategy",
             "published_on_device"]  # fmt: skip
    done = CliRunner().invoke(main, words)
    assert "; most moved by " in done.output
    from sim.fitting import uncertainty

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uncertainty, "_drivers", lambda *_: ())
        done = CliRunner().invoke(main, words)
    assert done.exit_code == 0
    assert "holds 80% of draws\n" in done.output
