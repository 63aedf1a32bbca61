"""The largest curvature that an optimizer's steps meet: power iteration's better sibling, Lanczos.

Learning rate times the largest eigenvalue of the Hessian, preconditioned by AdamW's second moment:
what stability limits are about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from evidence.studies.late_updates.optimizer import LateOptimizer
from experiments.training.parts.data.batches import Batch
from experiments.training.parts.setup import RunSetup
from experiments.training.run.evaluation import cross_entropy, forward

_BATCHES = 2
"""Number of held-out batches whose mean loss is looked at."""
_ITERATIONS = 16
"""Number of products with the Hessian. The top eigenvalue lies far outside the others."""


def largest_eigenvalue(
    product: Callable[[Tensor], Tensor], size: int, iterations: int = _ITERATIONS, seed: int = 0
) -> float:
    """Return the largest eigenvalue, not the largest in size, of a symmetric matrix.

    Args:
        product: The matrix times a vector.
        size: Number of rows.
        iterations: Number of products at most.
        seed: Seed of the first vector.
    """
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(size, generator=generator)
    basis: list[Tensor] = [vector / vector.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(iterations, size)):
        image = product(basis[-1])
        diagonal.append(float(image @ basis[-1]))
        for other in basis:  # against rounding, which would bring found vectors back
            image = image - (image @ other) * other
        length = float(image.norm())
        if length < 1e-10:
            break
        beside.append(length)
        basis.append(image / length)
    size = len(diagonal)
    small = torch.diag(torch.tensor(diagonal))
    for index, value in enumerate(beside[: size - 1]):
        small[index, index + 1] = small[index + 1, index] = value
    return float(torch.linalg.eigvalsh(small)[-1])


def preconditioned_curvature(setup: RunSetup, optimizer: LateOptimizer) -> float:
    """Return the largest eigenvalue of c P H P at the weights that forward sees.

    H is the Hessian with respect to the split matrices, P^2 the reciprocal of AdamW's denominator,
    c the last step's clip factor.
    """
    found = {id(param): scale for param, scale in optimizer.scales()}
    params = [param for param in setup.model.parameters() if id(param) in found]
    scales = [found[id(param)] for param in params]
    batches = [setup.data.held_out.batch(index) for index in range(_BATCHES)]
    sizes = [param.numel() for param in params]

    def product(vector: Tensor) -> Tensor:
        parts = vector.split(sizes)
        given = [part.view_as(scale) * scale for part, scale in zip(parts, scales, strict=True)]
        image = hessian_product(setup.model, params, batches, given)
        return torch.cat(
            [(part * scale).flatten() for part, scale in zip(image, scales, strict=True)]
        )

    return optimizer.clip * largest_eigenvalue(product, sum(sizes))


def hessian_product(
    model: nn.Module,
    params: Sequence[nn.Parameter],
    batches: Sequence[Batch],
    vectors: Sequence[Tensor],
) -> list[Tensor]:
    """Return the Hessian of the mean loss times a vector, parameter by parameter."""
    total = [torch.zeros_like(vector) for vector in vectors]
    for batch in batches:
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            loss = cross_entropy(forward(model, batch), batch)
            grads = torch.autograd.grad(loss, params, create_graph=True)
            along = sum(
                ((grad * vector).sum() for grad, vector in zip(grads, vectors, strict=True)),
                torch.zeros(()),
            )
            found = torch.autograd.grad(along, params)
        total = [one + other / len(batches) for one, other in zip(total, found, strict=True)]
    return total
