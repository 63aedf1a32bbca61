"""What all tests share: one compute thread, GPU tests skipped without a GPU, seeded hypothesis."""

import functools
import gc
import os
import pickle
import signal
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Small tensors run faster on one thread, and results don't depend on the machine's core count.
# Set before torch is first imported, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests ask no server. Read when huggingface_hub is first imported, here and in what tests start.
os.environ["HF_HUB_OFFLINE"] = "1"

# Without a GPU Triton's kernels are interpreted. Read when triton is first imported.
if not any(os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

try:
    from hypothesis import settings
except ModuleNotFoundError:  # a GPU machine may have pytest and nothing else
    pass
else:
    # No deadline: a busy machine is not a failure. In CI every run draws the same examples.
    settings.register_profile("default", deadline=None)
    settings.register_profile("ci", deadline=None, derandomize=True)
    settings.load_profile("ci" if os.environ.get("CI") else "default")


# Imports make millions of objects that stay. Looking through them is a tenth of collecting tests.
gc.set_threshold(100_000, 10, 10)
# A shell lets what it starts in the background ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_THREADS = int(os.environ["OMP_NUM_THREADS"])

collect_ignore = ["light"]
"""What replaces torch's compiler in processes that tests start must not be loaded in this one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let races be cut short, where a GPU is there for minutes only."""
    parser.addoption(
        "--race-steps", type=int, default=1000, help="steps of each race on a GPU (default: 1000)"
    )
    parser.addoption(
        "--kernels", choices=["triton", "torch"], help="kernels of all optimizers (default: auto)"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker of `--dist loadfile` run all files that start ranks.

    Each worker's first rank has to wait for a parent that loads torch and our packages.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def starts_ranks(file: str) -> bool:
        text = (config.rootpath / file).read_text(encoding="utf-8")
        return any(source in text for source in ("from tests.forks", "sharded.conftest"))

    class RanksTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "files that start ranks" if starts_ranks(file) else file

    return RanksTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where CUDA isn't available."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def lasting_objects_are_passed_over() -> None:
    """Let the garbage collector pass over objects of imports, caches and earlier files.

    Such objects stay to the end, and a trainer has garbage collected behind each training.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def kernels_that_were_asked_for(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let optimizers that leave the choice of kernels open have those of `--kernels`."""
    name = request.config.getoption("--kernels")
    if name is None:
        yield
        return
    from zenflow.surface import assembly

    chosen = assembly.kernels_for
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            assembly,
            "kernels_for",
            lambda choice, *rest: chosen(name if choice == "auto" else choice, *rest),
        )
        yield


@pytest.fixture(autouse=True)
def nothing_stays_switched_on() -> Iterator[None]:
    """Fail a test that leaves a mode or a tracer behind; put gradients and threads back.

    Every later call would be slower, and without gradients every later test would fail. Commands
    set the number of torch's threads for their process, which is this one.
    """
    before = _switched_on()
    yield
    after = _switched_on()
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.set_grad_enabled(True)
        torch.set_num_threads(_THREADS)
    assert after == before, (
        "left on: tracing, or a mode of torch, such as a default device or no_grad"
    )


def _switched_on() -> list[object]:
    found = [sys.gettrace(), sys.getprofile(), tracemalloc.is_tracing()]
    if "torch" not in sys.modules:
        return [*found, 0, True]
    import torch

    return [*found, torch._C._len_torch_function_stack(), torch.is_grad_enabled()]


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is called once for equal arguments, which pickle tells apart."""
    known: dict[bytes, Any] = {}

    def remembered(*inputs: Any, **settings: Any) -> Any:
        key = pickle.dumps((inputs, settings))
        if key not in known:
            known[key] = function(*inputs, **settings)
        return known[key]

    return remembered


@pytest.fixture(scope="module")
def simulated_once() -> Iterator[None]:
    """Let plans and twins of a module share simulations: equal inputs have equal times."""
    from autotune.model import twin
    from sim.planning import options

    with pytest.MonkeyPatch.context() as patch:
        remembered = remembering(options.steady)
        for module in (options, twin):
            patch.setattr(module, "steady", remembered)
        yield


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    """Return an empty folder that is on a drive, also where /tmp is in memory.

    The folder that it is in goes with it.
    """
    from zenflow.drive.disk import file_system

    for parent in (tmp_path, Path(__file__).parents[1]):
        if file_system(parent) not in ("tmpfs", "ramfs"):
            with tempfile.TemporaryDirectory(dir=parent, prefix=".states-") as folder:
                own = Path(folder, "states")
                own.mkdir()
                yield own
            return
    pytest.skip("no folder on a drive is known")
