import ctypes
import itertools
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zenflow.host import kernel, library
from zenflow.host.jobs import AdamStep, CatchUpJob, SumJob, Upload

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SOURCES = sorted(Path(kernel.__file__).with_name("csrc").glob("*.c"))
FLUSHES = platform.machine().lower() in ("x86_64", "amd64", "aarch64")


def select(monkeypatch, name):
    monkeypatch.setenv("ZENFLOW_KERNEL", name)
    library._load.cache_clear()
    if name == "c" and not library._FILE.is_file():
        pytest.skip("the C kernel is not built here")
    assert kernel.active_kernel() == name


@pytest.fixture(autouse=True)
def own_backend(monkeypatch):
    yield
    monkeypatch.undo()
    library._load.cache_clear()


@pytest.fixture(params=["c", "torch"])
def backend(request, monkeypatch):
    select(monkeypatch, request.param)
    return request.param


def problem(
    rows, cols, *, num_steps=3, grad_dtype=torch.bfloat16, out_dtype=torch.bfloat16, seed=0,
    lead=1.0, repeats_last=True, beta1=0.9, is_factored=False,
):  # fmt: skip
    """Return a catch-up pass in the middle of a training, every row at its own step, some idle."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return torch.randn(rows, cols, generator=generator) * scale

    steps = [
        AdamStep(
            lr=1e-3 * (index + 1), beta1=beta1, beta2=0.999 - 0.01 * index, eps=1e-8 * index,
            decay=1.0 - 1e-4 * index, scale=0.3 + index, grad=normal(1e-2).to(grad_dtype),
        )
        for index in range(num_steps)
    ]  # fmt: skip
    other = AdamStep(lr=3e-3, beta1=0.8, beta2=0.95, eps=1e-7, decay=1.0)
    is_last = repeats_last and num_steps > 0
    kept = 0 if is_factored else cols
    return CatchUpJob(
        normal(0.1), normal(1e-2), normal(1e-2).square()[:, :kept], torch.arange(rows) // 2 + 1,
        torch.tensor([row % 3 != 1 for row in range(rows)], dtype=torch.uint8), steps,
        Upload(torch.full((rows, cols), math.nan, dtype=out_dtype), lead,
               steps[-1] if is_last else other, is_last),
    )  # fmt: skip


def clone(job):
    """Return the job on tensors of its own."""
    tensors = {name: getattr(job, name).clone() for name in (*STATE, "active")}
    steps = [replace(step, grad=step.grad.clone()) for step in job.steps]
    return CatchUpJob(
        **tensors, steps=steps, upload=replace(job.upload, out=job.upload.out.clone())
    )


STATE = ("master", "exp_avg", "exp_avg_sq", "step")


def results_of(job):
    return [*(getattr(job, name) for name in STATE), job.upload.out]


def run(job):
    """Run a job on a copy and return what it changed."""
    job = clone(job)
    kernel.run(job)
    return results_of(job)


def bits(tensor):
    """Return the tensor's bits, every NaN as one."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def assert_same_bits(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("beta1", [0.9, 0.3, 0.0])
def test_equals_torch_adamw_over_steps(backend, beta1):
    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(3, 37, generator=generator))
    optimizer = torch.optim.AdamW(
        [parameter], lr=1e-2, betas=(beta1, 0.99), eps=1e-6, weight_decay=0.1, foreach=False
    )
    master = parameter.detach().clone()
    exp_avg, exp_avg_sq, out = (torch.zeros_like(master) for _ in range(3))
    count, active, waiting = torch.zeros(3, dtype=torch.int64), torch.ones(3).byte(), []
    for step in range(1, 31):
        grad = torch.randn(3, 37, generator=generator)
        parameter.grad = grad.clone()
        optimizer.step()
        waiting.append(AdamStep(1e-2, beta1, 0.99, 1e-6, 1 - 1e-2 * 0.1, 1.0, grad))
        if len(waiting) == 1 + step % 4:  # one to four gradients at once
            upload = Upload(out, 0.0, waiting[-1], repeats_last=True)
            kernel.run(CatchUpJob(master, exp_avg, exp_avg_sq, count, active, waiting, upload))
            waiting = []
    upload = Upload(out, 0.0, AdamStep(0, 0, 0, 0, 1), repeats_last=False)
    kernel.run(CatchUpJob(master, exp_avg, exp_avg_sq, count, active, waiting, upload))
    state = optimizer.state[parameter]
    torch.testing.assert_close(master, parameter.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=1e-6, atol=1e-7)
    assert torch.equal(out, master)
    assert count.tolist() == [30] * 3


def test_factored_steps_average_quotients(backend):
    """By the formulas, in float64: the displacement is lr times the mean of the gradients."""
    master, exp_avg = torch.ones(2, 30), torch.zeros(2, 30)
    grads = torch.randn(4, 2, 30, generator=torch.Generator().manual_seed(2))
    steps = [AdamStep(1e-2, 0.9, 0.99, 1e-3, 1 - 1e-3, 2.0, grad) for grad in grads]
    out, count = torch.zeros(2, 30), torch.zeros(2, dtype=torch.int64)
    upload = Upload(out, 0.5, steps[-1], repeats_last=True)
    active = torch.ones(2, dtype=torch.uint8)
    kernel.run(CatchUpJob(master, exp_avg, torch.empty(2, 0), count, active, steps, upload))
    w, m = torch.ones(2, 30).double(), 0.0
    for t, grad in enumerate(grads.double(), 1):
        m = 0.9 * m + 0.1 * 2.0 * grad
        moved = 1e-2 * m / (1 - 0.9**t)
        w = w * (1 - 1e-3) - moved
    torch.testing.assert_close(master.double(), w, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(exp_avg.double(), m, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.double(), w - 0.5 * moved, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_steps", [0, 1, 3, 70])
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("is_factored", [False, True])
def test_c_and_torch_agree_bit_for_bit(monkeypatch, num_steps, grad_dtype, out_dtype, is_factored):
    results = {}
    for name in ("c", "torch"):
        select(monkeypatch, name)
        results[name] = []
        for lead, repeats_last, beta1 in ((0.0, True, 0.9), (1.3, True, 0.9), (2.0, False, 0.25)):
            results[name] += run(
                problem(5, 331, num_steps=num_steps, grad_dtype=grad_dtype, out_dtype=out_dtype,
                        lead=lead, repeats_last=repeats_last, beta1=beta1,
                        is_factored=is_factored)
            )  # fmt: skip
    assert_same_bits(results["c"], results["torch"])


def test_non_finite_gradients_end_the_same_in_c_and_torch(monkeypatch):
    results = []
    for name in ("c", "torch"):
        select(monkeypatch, name)
        job = problem(4, 40)
        job.steps[0].grad[0, 0], job.steps[1].grad[2, 7] = math.inf, math.nan
        job.exp_avg_sq[3, 5] = -1.0
        results.append(run(job))
    assert results[0][0].isnan().sum() == 3
    assert_same_bits(*results)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 65, 130])
@pytest.mark.parametrize("repeats_last", [True, False])
@pytest.mark.parametrize("is_factored", [False, True])
def test_any_cut_of_the_steps_gives_the_same_bits(backend, num_steps, repeats_last, is_factored):
    job = problem(5, 150, num_steps=num_steps, repeats_last=repeats_last, is_factored=is_factored)
    expected = run(job)
    for cut in {0, 1, num_steps // 2, num_steps}:
        parts = clone(job)
        kernel.run(replace(parts, steps=parts.steps[:cut], upload=None))
        # The last step's displacement is not known any more where none is left to take.
        upload = replace(parts.upload, repeats_last=repeats_last and cut < num_steps)
        kernel.run(replace(parts, steps=parts.steps[cut:], upload=upload))
        assert_same_bits(results_of(parts), expected)


PLAIN, NARROW = "-DCLONES=", "-DWIDEST=256"
"""Builds without instructions that only some processors have, and without AVX-512 alone."""


def library_with(folder, choice):
    """Return the kernel built with `PLAIN` or `NARROW`."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    built = folder / f"{choice.strip('-=')}.so"
    options = ["-std=c11", "-O1", choice, "-ffp-contract=off", "-fPIC", "-shared", "-pthread"]
    subprocess.run([compiler, *options, *map(str, SOURCES), "-o", str(built), "-lm"], check=True)
    return library.bound(ctypes.CDLL(str(built)))


def test_clones_agree_with_plain_c_bit_for_bit(tmp_path, monkeypatch):
    select(monkeypatch, "c")
    built = library_with(tmp_path, PLAIN)
    expected = [
        run(problem(6, 333, grad_dtype=grad, out_dtype=out)) for grad in DTYPES for out in DTYPES
    ]
    monkeypatch.setattr(library, "_load", lambda: built)
    actual = [
        run(problem(6, 333, grad_dtype=grad, out_dtype=out)) for grad in DTYPES for out in DTYPES
    ]
    monkeypatch.undo()
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one, other)


def rounding_cases(dtype):
    """Return float32 values around every value of a 16-bit dtype, and arbitrary bit patterns."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    patterns = halves.view(torch.int32)
    shifts = (0, 1, -1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001)
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(-(2**31), 2**31 - 1, (1 << 18,), generator=generator)
    return torch.cat([*(patterns + shift for shift in shifts), drawn.int()]).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_rounds_as_torch_casts(backend, dtype):
    master = rounding_cases(dtype).unsqueeze(0)
    job = replace(
        problem(1, master.numel(), num_steps=0, out_dtype=dtype, lead=0.0), master=master
    )
    *_, out = run(job)
    assert_same_bits([out], [master.to(dtype)])
    assert torch.equal(out.isnan(), master.isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient_is_read_exactly(backend, dtype):
    grad = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = grad.float()
    if backend == "c" and FLUSHES:
        tiny = expected.abs() < torch.finfo(torch.float32).tiny
        expected = torch.where(tiny, expected * 0.0, expected)
    acc = torch.empty(1, grad.numel())
    kernel.run(SumJob(acc, grad.unsqueeze(0), 1.0, is_first=True))
    assert_same_bits([acc], [expected.unsqueeze(0)])


def test_first_gradient_overwrites_and_later_ones_add(backend):
    acc = torch.full((2, 2), math.nan)
    grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    kernel.run(SumJob(acc, grad, 0.5, is_first=True))
    assert acc.tolist() == [[0.5, 1.0], [1.5, 2.0]]
    kernel.run(SumJob(acc, grad.bfloat16(), 2.0, is_first=False))
    assert acc.tolist() == [[2.5, 5.0], [7.5, 10.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulation_rounds_the_product_before_the_sum(backend, dtype):
    generator = torch.Generator().manual_seed(3)
    acc = torch.randn(7, 1001, generator=generator)
    grad = torch.randn(7, 1001, generator=generator).to(dtype)
    expected = acc + (grad.float() * 0.3)
    kernel.run(SumJob(acc, grad, 0.3, is_first=False))
    assert_same_bits([acc], [expected])


def test_rows_step_by_their_own_constants(backend):
    together = run(problem(7, 50))
    for row in range(7):
        alone = run(problem(7, 50).rows(row, row + 1))
        assert_same_bits(alone, [tensor[row : row + 1] for tensor in together])


@pytest.mark.parametrize("cut", [range(12), [0, 1, 11], [0, 4, 5, 9, 11]])
def test_any_cut_of_the_rows_gives_the_same_bits(backend, cut):
    job = problem(11, 77)
    whole, pieces = run(job), clone(job)
    for first, last in itertools.pairwise(cut):
        kernel.run(pieces.rows(first, last))
    assert_same_bits(results_of(pieces), whole)


def test_inactive_rows_keep_their_state_and_are_uploaded_by_it(backend):
    job = problem(6, 45, lead=1.5)
    results = run(job)
    idle = job.active == 0
    for name, result in zip(STATE, results, strict=False):
        assert torch.equal(result[idle], getattr(job, name)[idle])
        assert not torch.isclose(
            result[~idle].float(), getattr(job, name)[~idle].float(), rtol=0, atol=0
        ).any()
    alone = replace(job, steps=[], upload=replace(job.upload, repeats_last=False))
    assert torch.equal(results[-1][idle], run(alone)[-1][idle])


@pytest.mark.parametrize(("lead", "expected"), [(0.0, 0.5), (1.0, 0.0), (2.0, -0.5)])
@pytest.mark.parametrize("repeats_last", [True, False])
def test_upload_runs_ahead_along_the_last_displacement(backend, lead, expected, repeats_last):
    # First step, gradient 1: m-hat and v-hat are 1, so Adam moves by the learning rate, 0.5.
    step = AdamStep(0.5, 0.9, 0.999, 0.0, 1.0, scale=4.0, grad=torch.full((1, 1), 0.25))
    master, exp_avg, exp_avg_sq, count, out = run(CatchUpJob(
        torch.ones(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1).long(),
        torch.ones(1).byte(), [step], Upload(torch.zeros(1, 1), lead, step, repeats_last),
    ))  # fmt: skip
    assert master.item() == pytest.approx(0.5, abs=1e-6)
    assert exp_avg.item() == pytest.approx(0.1)
    assert exp_avg_sq.item() == pytest.approx(0.001)
    assert count.item() == 1
    assert out.item() == pytest.approx(expected, abs=1e-6)


def test_rows_that_have_taken_no_step_are_uploaded_as_they_are(backend):
    job = problem(2, 9, num_steps=0, out_dtype=torch.float32)
    job.step.zero_()
    assert torch.equal(run(job)[-1], job.master)


def test_decay_shrinks_the_weight_but_does_not_lead(backend):
    job = problem(2, 9, num_steps=1, out_dtype=torch.float32)
    plain = run(job)
    decayed = run(replace(job, steps=[replace(job.steps[0], decay=0.5)]))
    lost = 0.5 * job.master * job.active.unsqueeze(1)
    torch.testing.assert_close(plain[0] - decayed[0], lost, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(plain[-1] - decayed[-1], lost, rtol=1e-4, atol=1e-6)


def test_a_first_moment_does_not_linger_in_the_subnormals(monkeypatch):
    select(monkeypatch, "c")
    if not FLUSHES:
        pytest.skip("this processor's mode is left alone")
    job = problem(1, 64, num_steps=1)
    job.steps[0].grad.zero_()
    job.exp_avg.fill_(1e-39)
    assert torch.equal(run(job)[1], torch.zeros(1, 64))
    tiny = torch.full((1,), 1e-39)  # the caller's arithmetic keeps them
    assert (tiny * 1.0).item() == tiny.item() != 0


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_upload_may_take_the_place_of_the_first_gradient(backend, num_steps, dtype):
    job = problem(7, 300, num_steps=num_steps, grad_dtype=dtype, out_dtype=dtype)
    expected, shared = run(job), clone(job)
    shared = replace(shared, upload=replace(shared.upload, out=shared.steps[0].grad))
    kernel.run(shared)
    assert_same_bits(results_of(shared), expected)


def test_empty_row_ranges_are_no_work(backend):
    for rows, cols in ((0, 8), (3, 0)):
        kernel.run(SumJob(torch.empty(rows, cols), torch.empty(rows, cols), 1.0, is_first=True))
        assert run(problem(rows, cols))[0].shape == (rows, cols)


def bad_grad(value):
    return [AdamStep(1e-3, 0.9, 0.999, 1e-8, 1.0, 1.0, value)]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("master", {"master": torch.zeros(12)}),
        ("master", {"master": torch.zeros(3, 4, dtype=torch.float64)}),
        ("exp_avg", {"exp_avg": torch.zeros(4, 4)}),
        ("exp_avg_sq", {"exp_avg_sq": torch.zeros(4, 3).t()}),
        ("step", {"step": torch.zeros(3, dtype=torch.int32)}),
        ("step", {"step": torch.zeros(4, dtype=torch.int64)}),
        ("active", {"active": torch.zeros(3)}),
        ("active", {"active": torch.zeros(6, dtype=torch.uint8)[::2]}),
        ("the gradient of step 0", {"steps": bad_grad(torch.zeros(3, 4, dtype=torch.float64))}),
        ("the gradient of step 0", {"steps": bad_grad(torch.zeros(4, 3).t())}),
        ("the gradient of step 0", {"steps": bad_grad(torch.zeros(3, 5))}),
        ("the gradient of step 1",
         {"steps": bad_grad(torch.zeros(3, 4)) + bad_grad(torch.zeros(3, 4).half())}),
        ("step 0 has no gradient", {"steps": bad_grad(None)}),
        ("out", {"out": torch.zeros(3, 4, dtype=torch.int16)}),
        ("out", {"out": torch.zeros(3, 4, device="meta")}),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name(backend, name, changes):
    job = problem(3, 4)
    if "out" in changes:
        changes = {"upload": replace(job.upload, **changes)}
    with pytest.raises(ValueError, match=f"^{name}"):
        kernel.run(replace(job, **changes))


@pytest.mark.parametrize(
    ("total", "grad", "name"),
    [
        (torch.zeros(4), torch.zeros(4), "total"),
        (torch.zeros(2, 2, dtype=torch.float16), torch.zeros(2, 2), "total"),
        (torch.zeros(2, 2), torch.zeros(2, 3), "grad"),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), "grad"),
    ],
)
def test_bad_arguments_of_a_sum_are_refused_by_name(backend, total, grad, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        kernel.run(SumJob(total, grad, 1.0, is_first=True))


def test_fallback_is_chosen_by_the_environment_and_says_so_once(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, logger="zenflow.host.library"):
        select(monkeypatch, "torch")
        for _ in range(3):
            run(problem(3, 4))
    assert library.c_library() is None
    assert len(caplog.records) == 1
    assert "ZENFLOW_KERNEL=torch" in caplog.text


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="needs Linux")
def test_loops_use_the_best_instructions_that_the_processor_has(monkeypatch):
    select(monkeypatch, "c")
    known = {"avx512f": "AVX-512", "avx2": "AVX2", "sse2": "SSE2", "asimd": "NEON"}
    flags = Path("/proc/cpuinfo").read_text().split()
    best = next((name for flag, name in known.items() if flag in flags), "scalar")
    assert library.description() == f"C ({best})"


def test_an_unknown_kernel_is_refused(monkeypatch):
    monkeypatch.setenv("ZENFLOW_KERNEL", "fortran")
    library._load.cache_clear()
    with pytest.raises(ValueError, match="fortran"):
        kernel.active_kernel()


@pytest.mark.parametrize("state", ["missing", "broken", "stranger"])
def test_a_library_that_is_no_use_gives_the_fallback(monkeypatch, caplog, tmp_path, state):
    path = tmp_path / "library.so"
    if state == "broken":
        path.write_text("not a library")
    elif state == "stranger":
        path = Path(torch._C.__file__)  # loads, but is not ours
    monkeypatch.setattr(library, "_FILE", path)
    monkeypatch.delenv("ZENFLOW_KERNEL", raising=False)
    library._load.cache_clear()
    assert kernel.active_kernel() == "torch"
    assert "reinstall" in caplog.text
    run(problem(3, 4))


def test_a_library_of_another_interface_is_not_called(monkeypatch, caplog):
    select(monkeypatch, "c")
    monkeypatch.setattr(library, "_INTERFACE", library._INTERFACE + 1)
    library._load.cache_clear()
    assert kernel.active_kernel() == "torch"
    assert "built from other sources" in caplog.text


def test_importing_loads_no_library_and_logs_nothing():
    program = (
        "from zenflow.host import kernel, library\nassert not library._load.cache_info().currsize"
    )
    environment = os.environ | {"ZENFLOW_KERNEL": "torch"}
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, env=environment, capture_output=True
    )
    assert done.stderr == b""
