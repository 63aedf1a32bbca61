"""Training under the checker."""

import contextlib
import threading

import torch

from tests.models import TINY, TinyStack
from tests.zenflow.decisions import decisions
from tests.zenflow.races.checker import Checker, replaced
from tests.zenflow.races.edges import edges
from tests.zenflow.races.runtime import CheckedRuntime
from zenflow import LoggedDecisions, ZenFlowAdamW, ZenFlowConfig, stream_weights
from zenflow.device.cuda import CudaDevice
from zenflow.streaming.page import page_of
from zenflow.surface import assembly

COMMON = {
    "topk_ratio": 0.3,
    "select_interval": 4,
    "block_elements": 20,
    "importance_decay": 0.5,
    **TINY,
}
LIMIT = 0.3
_TRIES = 3


@contextlib.contextmanager
def checked():
    """Yield a checker that sees the calling thread and all that the engine starts."""
    checker = Checker()
    device = CheckedRuntime.device

    def bind(_, wait_timeout):
        return CudaDevice(device, wait_timeout, CheckedRuntime(checker))

    with edges(checker), replaced(assembly, "bind", bind), checker.watch():
        yield checker


def backward(checker, loss):
    """Run backward in a thread of its own, as autograd does for a GPU."""
    begun, ended = checker.thread.told(), {}

    def run():
        checker.thread.learn(begun)
        with checker.watch():
            loss.backward()
        ended.update(checker.thread.told())

    thread = threading.Thread(target=run, name="autograd")
    thread.start()
    thread.join()
    checker.thread.learn(ended)


class Training:
    """A model and its optimizer, whose steps a test takes one by one."""

    def __init__(
        self,
        checker,
        mode,
        changes,
        *,
        model=None,
        log=None,
        views=False,
        rewrites=False,
        streamed=None,
        **settings,
    ):
        self.checker, self.mode = checker, mode
        self.model = model or TinyStack(num_layers=3)
        self.stream = None
        if streamed is not None:
            self.stream = stream_weights(
                self.model, CheckedRuntime.device, least_elements=1, **streamed
            )
        for param in self.model.parameters():
            if page_of(param) is None:
                checker.on_device(param.data)
        config = ZenFlowConfig(**{**COMMON, **changes})
        if mode == "release":
            settings |= {"offload_gradients": mode, "max_grad_norm": LIMIT}
        if log is not None:
            settings["controller"] = LoggedDecisions(decisions(config, log))
        self.optimizer = ZenFlowAdamW(
            self.model.parameters(), lr=1e-2, config=config, host_threads=2, wait_timeout=30,
            **settings,
        )  # fmt: skip
        self.views = self._views() if views else None
        self.rewrites = rewrites

    def _views(self):
        """Return gradients that are parts of one buffer, as a reducer of DDP has them."""
        params = list(self.model.parameters())
        buffer = torch.zeros(sum(p.numel() for p in params), device=CheckedRuntime.device)
        parts = buffer.split([p.numel() for p in params])
        return [(p, part.view_as(p)) for p, part in zip(params, parts, strict=True)]

    def backward(self, step):
        for param, grad in self.views or ():
            param.grad = grad.zero_()
        backward(self.checker, self.loss(step))

    def loss(self, step):
        drawn = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        dtype = next(self.model.parameters()).dtype
        x = drawn if drawn.dtype == dtype else drawn.to(dtype=dtype)
        self.checker.on_device(x)
        return (self.model(x) - x).square().mean()

    def step(self, step):
        self.backward(step)
        if self.mode == "keep":
            self.optimizer.clip_grad_norm_(LIMIT)
        kept = [p.grad for p in self.model.parameters()] if self.rewrites else []
        self.optimizer.step()
        for grad in kept:
            grad.zero_()


def races(mode, changes, *, steps=12, then=lambda training, step: None, first=False, **settings):
    """Return the races of a training; ``then`` is called after every step.

    With ``first`` the training ends with the step in which a race is met.
    """
    with checked() as checker:
        training = Training(checker, mode, changes, **settings)
        try:
            for step in range(1, steps + 1):
                training.step(step)
                then(training, step)
                if first and checker.races:
                    break
        finally:
            training.optimizer.close()
            if training.stream is not None:
                training.stream.close()
    return checker.races


def any_races(run):
    """Return whether a few runs find a race: threads may order a run by chance."""
    return any(run() for _ in range(_TRIES))
