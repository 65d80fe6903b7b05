"""The Jacobian of a recorded step, by products with vectors: its gain, its norm, and how much of it is the identity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]


def random_units(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Random directions, one for each entry of the first axis: normal entries divided by their length.

    Drawn one by one, on the CPU and in float64: every device, arithmetic and batch follows the same directions.
    """
    drawn = [torch.randn(shape[1:], generator=generator, dtype=torch.float64) for _ in range(shape[0])]
    return torch.stack([direction / direction.norm() for direction in drawn]).to(like)


def random_signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """+1 and -1 in float64 on the CPU, drawn one entry of the first axis after the other."""
    drawn = [torch.randint(0, 2, shape[1:], generator=generator, dtype=torch.float64) for _ in range(shape[0])]
    return torch.stack(drawn) * 2 - 1


def gradient_norms(depths: Sequence[Tensor], directions: Tensor) -> Floats:
    """|d <r, h_last> / d h_depth| for every direction r: (depth, direction).

    `depths` are (direction, token, width): copies of one pass, each of which follows its own direction. At the last
    depth it is |r|.
    """
    gradients = torch.autograd.grad(depths[-1], list(depths[:-1]), directions, retain_graph=True)
    norms = [lengths_of(part) for part in (*gradients, directions)]
    return torch.stack(norms).numpy()


def lengths_of(vectors: Tensor) -> Tensor:
    """Euclidean length of every entry of the first axis, in float64 on the CPU."""
    return torch.linalg.vector_norm(vectors.detach().flatten(1).cpu().double(), dim=1)


@dataclass(frozen=True)
class Step:
    """A differentiable step: what went in and what came out, of one shape (copy, token, width), on one graph."""

    entering: Tensor
    leaving: Tensor

    @property
    def size(self) -> int:
        """Tokens x width: rows of the Jacobian of one copy."""
        return self.entering[0].numel()

    def transposed(self, vectors: Tensor) -> Tensor:
        """J^T u for every copy."""
        return torch.autograd.grad(self.leaving, self.entering, vectors, retain_graph=True)[0]

    def forward(self) -> Forward:
        """The way to J v."""
        dual = torch.zeros_like(self.leaving, requires_grad=True)
        return Forward(dual, torch.autograd.grad(self.leaving, self.entering, dual, create_graph=True)[0])

    def matrix(self) -> Floats:
        """J itself (leaving entry, entering entry) of the first copy: one product for each row."""
        unit, rows = torch.zeros_like(self.leaving), []
        for entry in range(self.size):
            unit[0].view(-1)[entry] = 1.0
            rows.append(self.transposed(unit)[0].flatten().cpu().double())
            unit[0].view(-1)[entry] = 0.0
        return torch.stack(rows).numpy()


@dataclass(frozen=True)
class Forward:
    """J v, as the derivative of J^T u, which is linear in u, by u."""

    dual: Tensor
    product: Tensor

    def __call__(self, vectors: Tensor) -> Tensor:
        return torch.autograd.grad(self.product, self.dual, vectors, retain_graph=True)[0]


@dataclass(frozen=True)
class Shares:
    """What is known of a Jacobian J of n rows: estimates with their standard errors; 0 where they are exact.

    `identity` is tr J / (|J|_F sqrt(n)), the cosine of J with the identity, -1 to 1 (this project's own definition);
    `diagonal` tr J / n, the mean of its diagonal; `gain` |J|_F / sqrt(n), the root mean square of |J^T r| over unit r;
    `spectral` its largest singular value.
    """

    identity: float
    identity_error: float
    diagonal: float
    diagonal_error: float
    gain: float
    gain_error: float
    spectral: float


def exact_shares(matrix: Floats) -> Shares:
    """Those of a matrix.

    >>> found = exact_shares(np.array([[1.0, 0.0], [0.0, 3.0]]))
    >>> round(found.identity, 4), found.diagonal, round(found.gain, 4), found.spectral
    (0.8944, 2.0, 2.2361, 3.0)
    """
    n, square = len(matrix), float((matrix**2).sum())
    trace, spectral = float(np.trace(matrix)), float(np.linalg.norm(matrix, 2))
    identity = trace / math.sqrt(square * n) if square else math.nan
    return Shares(identity, 0.0, trace / n, 0.0, math.sqrt(square / n), 0.0, spectral)


def estimated_shares(traces: Floats, squares: Floats, size: int, spectral: float) -> Shares:
    """Those that random signs z estimate (Hutchinson 1989): `traces` z^T J z and `squares` |J^T z|^2, one a probe.

    Their means estimate tr J and |J|_F^2 without bias. The errors of what is made of both follow by linearising it in
    the means (delta method); NaN with one probe.

    >>> estimated_shares(np.array([4.0, 4.0]), np.array([10.0, 10.0]), 2, 3.0).diagonal
    2.0
    """
    trace, square = float(traces.mean()), float(squares.mean())
    if square == 0:
        return Shares(math.nan, math.nan, 0.0, 0.0, 0.0, 0.0, spectral)
    identity, gain = trace / math.sqrt(square * size), math.sqrt(square / size)
    moves = traces / math.sqrt(square * size) - identity * squares / (2 * square)
    errors = [standard_error(part) for part in (moves, traces / size, gain * squares / (2 * square))]
    return Shares(identity, errors[0], trace / size, errors[1], gain, errors[2], spectral)


def standard_error(values: Floats) -> float:
    """That of a mean: standard deviation (n - 1) / sqrt(n); NaN for one value.

    >>> standard_error(np.array([1.0, 3.0]))
    1.0
    """
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def probes(step: Step, generator: torch.Generator) -> tuple[Floats, Floats]:
    """z^T J z and |J^T z|^2 for random signs z, one a copy."""
    signs = random_signs(tuple(step.leaving.shape), generator)
    products = step.transposed(signs.to(step.leaving)).detach()
    traces = (products.cpu().double() * signs).flatten(1).sum(dim=1)
    return traces.numpy(), (lengths_of(products) ** 2).numpy()


def spectral_norm(step: Step, iterations: int, tolerance: float, generator: torch.Generator) -> tuple[float, bool]:
    """The largest singular value by power iteration on J^T J, from below, and whether it settled.

    It ends when a step changes the value by no more than `tolerance` of it, or after `iterations`.
    """
    forward, value = step.forward(), 0.0
    vector = random_units(tuple(step.entering.shape), step.entering, generator)
    for _ in range(iterations):
        image = forward(vector)
        before, value = value, float(lengths_of(image)[0])
        if value == 0 or abs(value - before) <= tolerance * value:
            return value, True
        back = step.transposed(image / value)
        vector = back / back.norm()
    return value, False
