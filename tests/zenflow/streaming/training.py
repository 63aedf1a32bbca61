"""A layered model, trained with its weights on the device and with streamed ones."""

import copy
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models import TINY
from tests.zenflow.decisions import decisions
from zenflow import LoggedDecisions, ZenFlowAdamW, ZenFlowConfig, stream_weights

WIDTH = 12
LEAST = {"least_elements": 100}
"""Even the weights of tiny layers are streamed."""


class Block(nn.Module):
    """Two matrices and a norm; `also` is a matrix that another layer has too."""

    def __init__(self, width, also=None):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.also = also
        self.is_short = False

    def forward(self, x):
        h = self.norm(x)
        if self.is_short:
            return x + torch.tanh(self.up(h))[..., : x.shape[-1]]
        if self.also is not None:
            h = h + self.also(h)
        return x + self.down(torch.tanh(self.up(h)))


class Layered(nn.Module):
    """An embedding, layers that may be checkpointed, and a tied head."""

    def __init__(self, num_layers=5, *, recomputes=None, shares=False, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        also = nn.Linear(WIDTH, WIDTH, bias=False) if shares else None
        self.embed = nn.Embedding(17, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, also) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 17, bias=False)
        self.head.weight = self.embed.weight
        self.recomputes = recomputes
        self.order = list(range(num_layers))
        self.varies = False
        self.to(dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        for index in self.order:
            layer = self.layers[index]
            if self.recomputes is None or not torch.is_grad_enabled():
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.recomputes == "reentrant")
        return self.head(x)

    def loss(self, step, micro=0):
        self.layers[1].is_short = self.varies and (step + micro) % 3 == 1
        generator = torch.Generator().manual_seed(1000 * step + micro)
        tokens = torch.randint(17, (3, 7), generator=generator)
        logits = self(tokens[:, :-1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training; everything but `resident_layers` and `slots` may change its result."""

    config: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    recomputes: str | None = None
    shares: bool = False
    order: tuple[int, ...] = ()
    varies: bool = False
    """Whether a matrix is left out now and then."""
    frozen: tuple[int, ...] = ()
    accumulation: int = 1
    steps: int = 8
    evaluations: tuple[int, ...] = ()
    drops: dict[int, int] = field(default_factory=dict)
    """Number of backward passes of each step that is dropped."""
    knobs: tuple = ()
    resumes_at: int | None = None
    backend: str | None = None

    @property
    def settings(self):
        base = {"topk_ratio": 0.2, "update_interval": 3, "select_interval": 4}
        return ZenFlowConfig(**{**base, "block_elements": 40, **TINY, **self.config})

    def model(self):
        model = Layered(recomputes=self.recomputes, shares=self.shares, dtype=self.dtype)
        model.order, model.varies = list(self.order or model.order), self.varies
        for index in self.frozen:
            for param in model.layers[index].parameters():
                param.requires_grad_(param.ndim < 2)
        for layer in model.layers if self.backend else ():
            layer.compile(backend=self.backend)
        return model

    def optimizer(self, model, **settings):
        if self.knobs:
            logged = decisions(self.settings, list(self.knobs))
            settings["controller"] = LoggedDecisions(logged)
        return ZenFlowAdamW(
            [p for p in model.parameters() if p.requires_grad],
            **{"lr": 1e-2, "config": self.settings, "max_grad_norm": 0.3, "host_threads": 1,
               "offload_gradients": "release", "accumulation_steps": self.accumulation,
               **settings},
        )  # fmt: skip


@dataclass
class Outcome:
    """All that a training leaves, and its stream."""

    losses: list = field(default_factory=list)
    training: dict = field(default_factory=dict)
    true: dict = field(default_factory=dict)
    state: dict = field(default_factory=dict)
    stream: object = None

    def differs_from(self, other):
        """Return the names of what differs."""
        pairs = ((n, getattr(self, n), getattr(other, n)) for n in ("training", "true", "state"))
        differing = [n for n, own, its in pairs if not _equal(own, its)]
        return (["losses"] if self.losses != other.losses else []) + differing


def _equal(these, those):
    def bits(tensor):
        return tensor.reshape(-1).contiguous().view(torch.uint8) if tensor.dim() else tensor

    return these.keys() == those.keys() and all(
        torch.equal(bits(these[key]), bits(those[key])) for key in these
    )


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(case, streamed=None, **settings):
    """Train; with a dict of `stream_weights`' arguments the layers are streamed.

    Further settings are the optimizer's, and change no result.
    """
    model, outcome = case.model(), Outcome()
    if streamed is not None:
        outcome.stream = stream_weights(model, "cpu", **{**LEAST, **streamed})
    optimizer = case.optimizer(model, **settings)
    for step in range(case.steps):
        passes = case.drops.get(step, case.accumulation)
        for micro in range(passes):
            loss = model.loss(step, micro) / case.accumulation
            loss.backward()
            outcome.losses.append(loss.item())
        if step in case.drops:
            optimizer.zero_grad()
            continue
        optimizer.step()
        if step in case.evaluations:
            with optimizer.true_weights(), torch.no_grad():
                outcome.losses.append(model.loss(99).item())
        if step == case.resumes_at:
            optimizer = resumed(case, model, optimizer, **settings)
    outcome.training = weights(model)
    with optimizer.portable_states():
        saved = optimizer.state_dict()["state"]
    outcome.state = {
        (key, name): value.clone()
        for key, values in saved.items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    with optimizer.true_weights():
        outcome.true = weights(model)
    optimizer.close()
    if outcome.stream is not None:
        outcome.stream.close()
    return outcome


def resumed(case, model, optimizer, **settings):
    """Return a new optimizer that goes on from this one's state."""
    state, kept = copy.deepcopy(optimizer.state_dict()), weights(model)
    optimizer.close()
    optimizer = case.optimizer(model, **settings)
    model.load_state_dict(kept)
    optimizer.load_state_dict(state)
    return optimizer
