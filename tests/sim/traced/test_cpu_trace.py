"""Traces that torch.profiler makes here, on the CPU: read as the profiler itself adds them up."""

import json

import pytest

pytest.importorskip("torch")

import torch
from click.testing import CliRunner
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

from experiments.cli import main
from sim.hardware.file import write_profile
from sim.hardware.unknown import generic_cpu
from sim.traced.events import read_events
from sim.traced.passes import pass_times
from sim.traced.step import read_step
from sim.traced.windows import windows_of
from sim.traced.work import work_of

STEPS, MICRO_BATCHES = 4, 2
VOCABULARY, WIDTH = 97, 32
CONFIG = {
    "model_type": "gpt2", "n_embd": WIDTH, "vocab_size": VOCABULARY, "n_positions": 16,
    "n_layer": 1, "n_head": 2, "tie_word_embeddings": False,
}  # fmt: skip


class Model(nn.Module):
    """A model with the parameters of `CONFIG`, one of whose layers may be recomputed."""

    def __init__(self, *, recomputes=False):
        super().__init__()
        self.recomputes = recomputes
        self.table, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def layer(self, hidden):
        queries = self.attend(self.norms[0](hidden))[..., :WIDTH]
        return self.down(self.up(self.norms[1](hidden + self.project(queries))))

    def forward(self, tokens):
        hidden = self.table(tokens) + self.positions(torch.arange(tokens.shape[1]))
        if self.recomputes:
            hidden = checkpoint(self.layer, hidden, use_reentrant=False)
        else:
            hidden = self.layer(hidden)
        return self.head(self.norms[2](hidden)).square().mean()


def traced(path, *, shapes=True, recomputes=False):
    """Profile some steps; return the profiler, and write its trace."""
    torch.manual_seed(0)
    model = Model(recomputes=recomputes)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = schedule(wait=1, warmup=1, active=STEPS)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=shapes
    ) as profiler:
        for _ in range(STEPS + 2):
            for _ in range(MICRO_BATCHES):
                model(torch.randint(VOCABULARY, (3, 16))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return profiler, sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "cpu.json"
    return path, *traced(path)


def totals(path):
    """Return the times of each part over all traced steps, the first one included."""
    trace = read_events(path)
    sums = {}
    for window, times in pass_times(windows_of(trace), work_of(trace), [], is_cpu=True):
        sums[window.part] = sums[window.part] + times if window.part in sums else times
    return sums


def test_parts_add_up_to_what_the_profiler_says_of_them(made):
    path, profiler, _ = made
    averages = profiler.key_averages()
    seconds = {each.key: each.cpu_time_total / 1e6 for each in averages}
    sums = totals(path)
    assert sums["optimizer"].wall == pytest.approx(seconds["Optimizer.step#AdamW.step"], rel=1e-6)
    products = sum(seconds[f"aten::{name}"] for name in ("addmm", "mm"))
    found = sums["forward"].products + sums["backward"].products
    # Linear layers and views around them are none of the products.
    assert products == pytest.approx(found, rel=1e-3)
    evaluated = sum(s for name, s in seconds.items() if name.startswith("autograd::engine"))
    assert sums["backward"].busy < evaluated < sums["backward"].wall
    # A step ends where the next one starts: the profiler's own turn between them is part of it.
    events = json.loads(path.read_text())["traceEvents"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep")]
    last = max(step["ts"] + step["dur"] for step in steps)
    whole = sum(times.wall for times in sums.values())
    assert whole == pytest.approx((last - min(step["ts"] for step in steps)) / 1e6, rel=1e-6)
    assert whole > sum(s for name, s in seconds.items() if name.startswith("ProfilerStep"))


def test_counts_shapes_and_recomputation_are_those_of_the_run(made, tmp_path):
    path, _, num_params = made
    step = read_step(path)
    assert (step.device, step.steps, step.micro_batches) == (None, STEPS - 1, MICRO_BATCHES)
    assert (step.num_params, step.dtype) == (num_params, "float32")
    assert (step.batch_size, step.sequence) == (3, 16)
    assert not step.recomputes
    traced(tmp_path / "blind.json.gz", shapes=False, recomputes=True)
    blind = read_step(tmp_path / "blind.json.gz")
    assert (blind.num_params, blind.batch_size, blind.sequence) == (None, None, None)
    assert (blind.micro_batches, blind.recomputes) == (MICRO_BATCHES, True)


@pytest.fixture
def machine(tmp_path):
    write_profile(generic_cpu(4, 16e9), tmp_path / "cpu.json")
    return ["--profile", str(tmp_path / "cpu.json")]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return ["--model", str(tmp_path / "config.json")]


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_command_takes_the_traced_step_with_its_batch(made, machine, model):
    path, step = made[0], read_step(made[0])
    done = run("simulate", *model, *machine, "--from-trace", path, "--strategy", "on_device",
               "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["step_seconds"] == pytest.approx(step.step_seconds, rel=1e-6)
    tokens = 3 * 16 * MICRO_BATCHES
    assert found["tokens_per_second"] == pytest.approx(tokens / step.step_seconds, rel=1e-6)
    assert str(path) in found["notes"][0]
    planned = run("plan", *model, *machine, "--from-trace", path, "--draws", "0")
    assert planned.exit_code == 0, planned.output
    assert "compute as traced in" in planned.output


def test_a_sweep_takes_the_traced_step_at_every_point(made, machine, model, tmp_path):
    import pandas

    out = tmp_path / "out"
    done = run("sweep", *model, *machine, "--from-trace", made[0], "--strategy", "on_device",
               "--vary", "grad_accum=1,2,4", "--workers", "1", "--out", out)  # fmt: skip
    assert done.exit_code == 0, done.output
    step, table = read_step(made[0]), pandas.read_csv(out / "table.csv")
    each = step.forward.wall + step.backward.wall
    expected = [step.step_seconds + (count - MICRO_BATCHES) * each for count in (1, 2, 4)]
    assert table["step_seconds"].tolist() == pytest.approx(expected, rel=1e-6)


def test_what_can_not_be_asked_of_a_trace_is_refused(made, machine, model, tmp_path):
    traced(tmp_path / "blind.json", shapes=False)
    blind = run("simulate", *model, *machine, "--from-trace", tmp_path / "blind.json")
    assert blind.exit_code == 2
    assert "--traced-batch 4x1024" in blind.output
    told = run("simulate", *model, *machine, "--from-trace", tmp_path / "blind.json",
               "--traced-batch", "3x16")  # fmt: skip
    assert told.exit_code == 0, told.output
    gpu = run("simulate", *model, "--gpu", "rtx4090", "--from-trace", made[0])
    assert "was traced on a CPU" in gpu.output
    other = run("simulate", "--model", "gpt2", *machine, "--from-trace", made[0])
    assert "trace full fine-tuning of the model" in other.output
    fused = run("simulate", *model, *machine, "--from-trace", made[0], "--kernels", "liger")
    assert "has the kernels that ran" in fused.output
    twice = run("simulate", *model, *machine, "--from-trace", made[0], "--trainer", "trl")
    assert twice.exit_code == 2
    assert "--trainer trl would count that twice" in twice.output
    alone = run("simulate", *model, *machine, "--traced-batch", "3x16")
    assert "give --from-trace" in alone.output
    wrong = run("simulate", *model, *machine, "--from-trace", made[0], "--traced-batch", "3,16")
    assert "as in 4x1024" in wrong.output
