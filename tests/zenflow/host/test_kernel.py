import ctypes
import itertools
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from zenflow.host import kernel, library

HYPER = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.9999, "prediction": 1.0}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SOURCES = [Path(kernel.__file__).with_name(f"_host_{name}.c") for name in ("kernel", "pool")]
FLUSHES = platform.machine().lower() in ("x86_64", "amd64", "aarch64")


def select(monkeypatch, name):
    monkeypatch.setenv("ZENFLOW_KERNEL", name)
    library._load.cache_clear()
    if name == "c" and library.importlib.util.find_spec("zenflow.host._host_kernel") is None:
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


def problem(rows, cols, *, grad_dtype=torch.bfloat16, out_dtype=torch.bfloat16, seed=0):
    """Return keyword arguments of adamw in the middle of a training, every row at its own step."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return torch.randn(rows, cols, generator=generator) * scale

    steps = torch.arange(1, rows + 1, dtype=torch.float64)
    return {
        "master": normal(0.1),
        "exp_avg": normal(1e-2),
        "exp_avg_sq": normal(1e-2).square(),
        "out": torch.full((rows, cols), math.nan, dtype=out_dtype),
        "grad": normal(1e-2).to(grad_dtype),
        "grad_scale": 0.3,
        "acc": normal(1e-2),
        "count": 3,
        "step_size": (1e-3 / (1 - 0.9**steps)).float(),
        "denom_scale": (1 - 0.999**steps).sqrt().float(),
        "active": torch.tensor([row % 3 != 1 for row in range(rows)], dtype=torch.uint8),
        **HYPER,
    }


def clone(arguments):
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def rows_of(arguments, first, last):
    """Return views of a range of rows."""
    return {k: v[first:last] if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def run(arguments):
    """Run adamw on a copy and return what it changed."""
    arguments = clone(arguments)
    kernel.adamw(**arguments)
    return [arguments[name] for name in ("master", "exp_avg", "exp_avg_sq", "out")]


def bits(tensor):
    """Return the tensor's bits, every NaN as one."""
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


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
    for step in range(1, 31):
        grad = torch.randn(3, 37, generator=generator)
        parameter.grad = grad.clone()
        optimizer.step()
        kernel.adamw(
            master, exp_avg, exp_avg_sq, out, grad=grad, grad_scale=1.0, acc=None, count=1,
            step_size=torch.full((3,), 1e-2 / (1 - beta1**step)),
            denom_scale=torch.full((3,), math.sqrt(1 - 0.99**step)),
            active=torch.ones(3, dtype=torch.uint8),
            beta1=beta1, beta2=0.99, eps=1e-6, decay=1 - 1e-2 * 0.1, prediction=0.0,
        )  # fmt: skip
    state = optimizer.state[parameter]
    torch.testing.assert_close(master, parameter.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=1e-6, atol=1e-7)
    assert torch.equal(out, master)


@pytest.mark.parametrize("sources", ["grad", "acc", "both"])
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_c_and_torch_agree_bit_for_bit(monkeypatch, sources, grad_dtype, out_dtype):
    results = {}
    for name in ("c", "torch"):
        select(monkeypatch, name)
        results[name] = []
        for count, beta1, prediction in ((1, 0.9, 0.0), (3, 0.9, 1.0), (4, 0.25, 0.5)):
            arguments = problem(5, 331, grad_dtype=grad_dtype, out_dtype=out_dtype, seed=count)
            arguments |= {"count": count, "beta1": beta1, "prediction": prediction}
            if sources == "acc":
                arguments["grad"] = None
            elif sources == "grad":
                arguments["acc"] = None
            results[name] += run(arguments)
    assert_same_bits(results["c"], results["torch"])


def test_non_finite_gradients_end_the_same_in_c_and_torch(monkeypatch):
    results = []
    for name in ("c", "torch"):
        select(monkeypatch, name)
        arguments = problem(4, 40)
        arguments["grad"][0, 0], arguments["grad"][2, 7] = math.inf, math.nan
        arguments["exp_avg_sq"][3, 5] = -1.0
        results.append(run(arguments))
    assert results[0][0].isnan().sum() == 3
    assert_same_bits(*results)


def test_clones_agree_with_plain_c_bit_for_bit(tmp_path, monkeypatch):
    select(monkeypatch, "c")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    plain = tmp_path / "plain.so"
    include = f"-I{sysconfig.get_paths()['include']}"
    options = [
        "-std=c11",
        "-O1",
        "-DCLONES=",
        "-ffp-contract=off",
        "-fPIC",
        "-shared",
        "-pthread",
        include,
    ]
    linked = [*(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []), "-lm"]
    subprocess.run([compiler, *options, *map(str, SOURCES), "-o", str(plain), *linked], check=True)
    expected = [
        run(problem(6, 333, grad_dtype=grad, out_dtype=out)) for grad in DTYPES for out in DTYPES
    ]
    built = ctypes.CDLL(str(plain))
    monkeypatch.setattr(library, "_load", lambda: library.bound(built))
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
    arguments = problem(1, master.numel(), out_dtype=dtype)
    arguments |= {"master": master, "active": torch.zeros(1, dtype=torch.uint8)}
    *_, out = run(arguments)
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
    kernel.accumulate(acc, grad.unsqueeze(0), 1.0, first=True)
    assert_same_bits([acc], [expected.unsqueeze(0)])


def test_first_gradient_overwrites_and_later_ones_add(backend):
    acc = torch.full((2, 2), math.nan)
    grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    kernel.accumulate(acc, grad, 0.5, first=True)
    assert acc.tolist() == [[0.5, 1.0], [1.5, 2.0]]
    kernel.accumulate(acc, grad.bfloat16(), 2.0, first=False)
    assert acc.tolist() == [[2.5, 5.0], [7.5, 10.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulation_rounds_the_product_before_the_sum(backend, dtype):
    generator = torch.Generator().manual_seed(3)
    acc = torch.randn(7, 1001, generator=generator)
    grad = torch.randn(7, 1001, generator=generator).to(dtype)
    expected = acc + (grad.float() * 0.3)
    kernel.accumulate(acc, grad, 0.3, first=False)
    assert_same_bits([acc], [expected])


def test_accumulating_the_last_gradient_in_the_update_changes_no_bit(backend):
    fused = problem(4, 90)
    split = clone(fused)
    kernel.accumulate(split["acc"], split["grad"], split["grad_scale"], first=False)
    assert_same_bits(run(fused), run(split | {"grad": None}))


@pytest.mark.parametrize("beta1", [0.9, 0.3, 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_moments_first_and_weights_later_change_no_bit(backend, dtype, beta1):
    fused = problem(5, 301, grad_dtype=dtype)
    fused |= {"acc": None, "count": 1, "active": torch.ones(5, dtype=torch.uint8), "beta1": beta1}
    apart = clone(fused)
    kernel.moments(
        apart["exp_avg"], apart["exp_avg_sq"], apart["grad"], 0.3, beta1=beta1, beta2=0.999
    )
    assert_same_bits([apart["exp_avg"], apart["exp_avg_sq"]], run(fused)[1:3])
    assert_same_bits(run(apart | {"grad": None}), run(fused))


def test_rows_step_by_their_own_constants(backend):
    together = run(problem(7, 50))
    for row in range(7):
        alone = run(rows_of(problem(7, 50), row, row + 1))
        assert_same_bits(alone, [tensor[row : row + 1] for tensor in together])


@pytest.mark.parametrize("cut", [range(12), [0, 1, 11], [0, 4, 5, 9, 11]])
def test_any_cut_of_the_rows_gives_the_same_bits(backend, cut):
    arguments = problem(11, 77)
    # Neighbours alike in both constants, in one, in none; all but the last rows active.
    arguments["step_size"] = arguments["step_size"][[0, 0, 0, 3, 4, 4, 6, 6, 6, 7, 7]]
    arguments["denom_scale"] = arguments["denom_scale"][[0, 0, 2, 2, 3, 4, 4, 4, 6, 6, 6]]
    arguments["active"] = (torch.arange(11) < 9).to(torch.uint8)
    whole = run(arguments)
    pieces = clone(arguments)
    for first, last in itertools.pairwise(cut):
        kernel.adamw(**rows_of(pieces, first, last))
    names = ("master", "exp_avg", "exp_avg_sq", "out")
    assert_same_bits([pieces[name] for name in names], whole)


def test_inactive_rows_keep_their_state_and_upload_their_weights(backend):
    arguments = problem(6, 45)
    results = run(arguments)
    idle = arguments["active"] == 0
    for name, result in zip(("master", "exp_avg", "exp_avg_sq"), results, strict=False):
        assert torch.equal(result[idle], arguments[name][idle])
        assert not torch.isclose(result[~idle], arguments[name][~idle], rtol=0, atol=0).any()
    assert torch.equal(results[3][idle], arguments["master"][idle].bfloat16())


@pytest.mark.parametrize(("prediction", "expected"), [(0.0, 0.5), (1.0, 0.0), (2.0, -0.5)])
def test_upload_runs_ahead_by_the_predicted_share(backend, prediction, expected):
    # First step, gradient 1: m-hat and v-hat are 1, so Adam moves by the learning rate, 0.5.
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    master, exp_avg, exp_avg_sq, out = run({
        "master": one, "exp_avg": zero, "exp_avg_sq": zero, "out": zero,
        "grad": one, "grad_scale": 4.0, "acc": one * 4, "count": 8,
        "step_size": torch.tensor([0.5 / 0.1]), "denom_scale": torch.tensor([0.001**0.5]),
        "active": torch.ones(1, dtype=torch.uint8), "beta1": 0.9, "beta2": 0.999, "eps": 0.0,
        "decay": 1.0, "prediction": prediction,
    })  # fmt: skip
    assert master.item() == pytest.approx(0.5, abs=1e-6)
    assert exp_avg.item() == pytest.approx(0.1)
    assert exp_avg_sq.item() == pytest.approx(0.001)
    assert out.item() == pytest.approx(expected, abs=1e-6)


def test_decay_shrinks_the_weight_but_is_not_predicted(backend):
    arguments = problem(2, 9, out_dtype=torch.float32)
    plain = run(arguments | {"decay": 1.0})
    decayed = run(arguments | {"decay": 0.5})
    lost = 0.5 * arguments["master"] * arguments["active"].unsqueeze(1)
    torch.testing.assert_close(plain[0] - decayed[0], lost, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(plain[3] - decayed[3], lost, rtol=1e-4, atol=1e-6)


def test_a_first_moment_does_not_linger_in_the_subnormals(monkeypatch):
    select(monkeypatch, "c")
    if not FLUSHES:
        pytest.skip("this processor's mode is left alone")
    arguments = problem(1, 64) | {"acc": None, "count": 1}
    arguments["grad"].zero_()
    arguments["exp_avg"].fill_(1e-39)
    assert torch.equal(run(arguments)[1], torch.zeros(1, 64))
    tiny = torch.full((1,), 1e-39)  # the caller's arithmetic keeps them
    assert (tiny * 1.0).item() == tiny.item() != 0


@pytest.mark.parametrize("sources", ["grad", "both"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_upload_may_take_the_place_of_the_gradient(backend, sources, dtype):
    arguments = problem(7, 300, grad_dtype=dtype, out_dtype=dtype)
    if sources == "grad":
        arguments |= {"acc": None, "count": 1}
    expected = run(arguments)
    shared = clone(arguments)
    shared["out"] = shared["grad"]
    kernel.adamw(**shared)
    names = ("master", "exp_avg", "exp_avg_sq", "out")
    assert_same_bits([shared[name] for name in names], expected)


def test_empty_row_ranges_are_no_work(backend):
    for rows, cols in ((0, 8), (3, 0)):
        kernel.accumulate(torch.empty(rows, cols), torch.empty(rows, cols), 1.0, first=True)
        assert run(problem(rows, cols))[0].shape == (rows, cols)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("master", torch.zeros(12)),
        ("master", torch.zeros(3, 4, dtype=torch.float64)),
        ("exp_avg", torch.zeros(4, 4)),
        ("exp_avg_sq", torch.zeros(4, 3).t()),
        ("acc", torch.zeros(3, 4, dtype=torch.bfloat16)),
        ("grad", torch.zeros(3, 4, dtype=torch.float64)),
        ("grad", torch.zeros(4, 3).t()),
        ("grad", torch.zeros(3, 5)),
        ("out", torch.zeros(3, 4, dtype=torch.int16)),
        ("out", torch.zeros(3, 4, device="meta")),
        ("step_size", torch.zeros(4)),
        ("step_size", torch.zeros(3, dtype=torch.float64)),
        ("denom_scale", torch.zeros(3, 1)),
        ("active", torch.zeros(3)),
        ("active", torch.zeros(6, dtype=torch.uint8)[::2]),
        ("count", 0),
    ],
)
def test_bad_arguments_are_refused_by_name(backend, name, value):
    arguments = problem(3, 4) | {name: value}
    with pytest.raises(ValueError, match=f"^{name}"):
        kernel.adamw(**arguments)


@pytest.mark.parametrize(
    ("acc", "grad", "name"),
    [
        (torch.zeros(4), torch.zeros(4), "acc"),
        (torch.zeros(2, 2, dtype=torch.float16), torch.zeros(2, 2), "acc"),
        (torch.zeros(2, 2), torch.zeros(2, 3), "grad"),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), "grad"),
    ],
)
def test_bad_arguments_of_accumulate_are_refused_by_name(backend, acc, grad, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        kernel.accumulate(acc, grad, 1.0, first=True)


def test_fallback_is_chosen_by_the_environment_and_says_so_once(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, logger="zenflow.host.library"):
        select(monkeypatch, "torch")
        for _ in range(3):
            run(problem(3, 4))
    assert library.c_library() is None
    assert len(caplog.records) == 1
    assert "ZENFLOW_KERNEL=torch" in caplog.text


def test_an_unknown_kernel_is_refused(monkeypatch):
    monkeypatch.setenv("ZENFLOW_KERNEL", "fortran")
    library._load.cache_clear()
    with pytest.raises(ValueError, match="fortran"):
        kernel.active_kernel()


@pytest.mark.parametrize("state", ["missing", "broken", "stranger"])
def test_a_library_that_is_no_use_gives_the_fallback(monkeypatch, caplog, tmp_path, state):
    origin = tmp_path / "library.so"
    origin.write_text("not a library")
    if state == "stranger":
        origin = torch._C.__file__  # loads, but is not ours
    spec = ModuleSpec("zenflow.host._host_kernel", None, origin=str(origin))
    found = None if state == "missing" else spec
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: found)
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
