"""Small models for the tests: shapes that provoke races, odd parameters, and given gradients."""

import contextlib
import copy

import torch
from torch import nn
from torch.nn import functional

TINY = {"min_split_elements": 16}
"""Configuration under which even the models here have split parameters."""


class GivenGradients(nn.Module):
    """Parameters of any shapes, with a loss whose gradients are exactly those asked for."""

    def __init__(self, shapes, dtype=torch.float32, seed=0, scale=1.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(shape, generator=generator) * scale for shape in shapes]
        self.weights = nn.ParameterList(nn.Parameter(w.to(dtype)) for w in weights)

    def forward(self, grads):
        """Return sum(p * g): a parameter whose gradient is None takes no part."""
        pairs = [(p, g) for p, g in zip(self.weights, grads, strict=True) if g is not None]
        return sum((p * g).sum() for p, g in pairs)

    def backward(self, grads):
        """Run the backward pass that makes these gradients."""
        if any(g is not None for g in grads):
            self(grads).backward()

    def draw_gradients(self, step, seed=0, absent=0.0):
        """Return reproducible gradients of a step, in the parameters' dtype; some may be None."""
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        grads = []
        for p in self.weights:
            spread = torch.rand(p.shape[1:], generator=generator) * 2  # columns that differ
            grad = torch.randn(p.shape, generator=generator) * spread
            missing = torch.rand((), generator=generator) < absent
            grads.append(None if missing else grad.to(p))
        return grads


class TinyStack(nn.Module):
    """Many tiny layers: nearly no arithmetic between copies, so a missing wait shows at once."""

    def __init__(self, num_layers=12, width=6, dtype=torch.float32, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.to(dtype)

    def forward(self, x, num_layers=None):
        for layer in self.layers[:num_layers]:
            x = x + torch.tanh(layer(x))
        return x

    def loss(self, step, *, idle=False):
        """Return this step's loss; with `idle`, every third step leaves the last layer unused.

        The batch depends on nothing but the step.
        """
        p = next(self.parameters())
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, p.shape[1], generator=generator).to(p)
        target = torch.randn(4, p.shape[1], generator=generator).to(p)
        out = self(x, len(self.layers) - 1) if idle and step % 3 == 2 else self(x)
        return (out - target).float().square().mean()


class OddShapes(nn.Module):
    """Tied embedding, 1-D and 2-D convolutions, a norm, a scalar, a frozen and an idle branch."""

    def __init__(self, vocab=11, width=8, dtype=torch.float32, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocab, width)
        self.conv1d = nn.Conv1d(width, width, 3, padding=1)
        self.conv2d = nn.Conv2d(width, width, (1, 3), padding=(0, 1), bias=False)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.branch = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.vocab = vocab
        self.to(dtype)

    def forward(self, tokens, *, with_branch=True):
        x = self.embed(tokens)
        x = x + self.conv1d(x.mT).mT
        x = x + self.conv2d(x.mT.unsqueeze(2)).squeeze(2).mT
        x = x + torch.tanh(self.frozen(x))
        if with_branch:
            x = x + torch.tanh(self.branch(x))
        return self.head(self.norm(x) * self.scale)

    def loss(self, step, *, idle=False):
        """Return this step's loss; with `idle`, every third step leaves the branch unused."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(self.vocab, (3, 6), generator=generator).to(self.scale.device)
        logits = self(tokens[:, :-1], with_branch=not (idle and step % 3 == 2))
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def weights_of(model):
    """Return a copy of the model's parameters as they are now, on the CPU."""
    return [p.detach().cpu().clone() for p in model.parameters()]


def twins(model, device="cpu"):
    """Return two copies of a model with equal weights."""
    return copy.deepcopy(model).to(device), copy.deepcopy(model).to(device)


def two_groups(model, **changes):
    """Return matrices and the other parameters as two groups with settings of their own."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {
            "params": [p for p in params if p.ndim > 1],
            "lr": 3e-3,
            "betas": (0.9, 0.98),
            "eps": 1e-8,
            "weight_decay": 0.1,
            **changes,
        },
        {
            "params": [p for p in params if p.ndim <= 1],
            "lr": 1e-3,
            "betas": (0.8, 0.95),
            "eps": 1e-6,
            "weight_decay": 0.0,
            **changes,
        },
    ]


def assert_equal(actual, expected, what=""):
    """Compare lists of tensors bit for bit."""
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), (
            f"{what}: tensor {i} differs in {(a != b).sum()} of {a.numel()} elements, "
            f"at most by {(a.float() - b.float()).abs().max():.3g}"
        )


def relative_difference(actual, expected):
    """Return the largest difference of a tensor's elements over its largest element."""
    pairs = zip(actual, expected, strict=True)
    return max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs
    )


@contextlib.contextmanager
def closing(optimizer):
    """Close the optimizer at the end, whatever happens: its threads must not outlive a test."""
    try:
        yield optimizer
    finally:
        optimizer.close()
