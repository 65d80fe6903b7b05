"""Covariances of a stream of vectors, and what two sets of vectors of the same tokens have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .maths import ratio
from .subspaces import FLOAT32_STEP

Floats = NDArray[np.float64]


@dataclass
class Covariance:
    """Number, mean and centred products sum (x - mean)^T (x - mean) of row vectors, a cell for each place.

    `mean` is (cell, width), `products` (cell, width, width). Divide by count - 1 for the sample covariance.

    >>> seen = Covariance.empty(1, 2)
    >>> seen.add(np.array([[[1.0, 0.0], [3.0, 4.0]]]))
    >>> seen.count, seen.mean.tolist(), seen.products.tolist()
    (2, [[2.0, 2.0]], [[[2.0, 4.0], [4.0, 8.0]]])
    """

    count: int
    mean: Floats
    products: Floats

    @classmethod
    def empty(cls, cells: int, width: int) -> Self:
        """Nothing seen yet: the identity of merge."""
        return cls(0, np.zeros((cells, width)), np.zeros((cells, width, width)))

    def add(self, vectors: Floats) -> None:
        """Add the vectors (cell, token, width) of one text: the same tokens in every cell."""
        tokens = vectors.shape[1]
        if not tokens:
            return
        total = self.count + tokens
        mean = vectors.mean(axis=1)
        step = mean - self.mean
        # The shift of the mean counts as one more row: then each cell takes a single symmetric product.
        rows = np.empty((len(vectors), tokens + 1, vectors.shape[-1]))
        np.subtract(vectors, mean[:, None], out=rows[:, :-1])
        np.multiply(step, np.sqrt(self.count * tokens / total), out=rows[:, -1])
        for products, own in zip(self.products, rows, strict=True):
            products += own.T @ own
        self.mean += step * (tokens / total)
        self.count = total

    def merge(self, other: Self) -> Self:
        """Chan's pairwise formula; an empty side leaves the other's bits untouched."""
        total = self.count + other.count
        share = other.count / max(total, 1)
        step = other.mean - self.mean
        mean = other.mean.copy() if self.count == 0 else self.mean + step * share
        between = step[:, :, None] * step[:, None, :] * (self.count * share)
        return type(self)(total, mean, self.products + other.products + between)


def linear_cka(first: Floats, between: Floats, second: Floats) -> Floats:
    """Linear centred kernel alignment |X^T Y|_F^2 / (|X^T X|_F |Y^T Y|_F), X and Y centred; 0 to 1.

    `first` is X^T X, `between` X^T Y, `second` Y^T Y, each (..., width, width), to (...). NaN where X or Y does not
    vary. The plain (biased) estimate of Kornblith et al. 2019: with fewer tokens than channels it is high by chance.

    >>> x = np.array([[1.0], [-1.0]]); y = np.array([[2.0, 1.0], [-2.0, -1.0]])
    >>> linear_cka(x.T @ x, x.T @ y, y.T @ y).round(12).item()
    1.0
    """
    shared, own, other = (np.einsum("...ij,...ij->...", part, part) for part in (between, first, second))
    scale = np.sqrt(own) * np.sqrt(other)
    return np.minimum(ratio(shared, scale), 1.0)


def principal_bases(products: Floats, rank: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Orthonormal bases (cell, width, rank) of the principal subspaces of centred products, and whether they exist.

    A subspace does not exist where the vectors vary in fewer than `rank` directions: a standard deviation counts as
    zero when it is at most width 2^-23 of the largest (vectors are recorded in float32).

    >>> bases, there = principal_bases(np.diag([1.0, 9.0, 4.0])[None], 2)
    >>> np.abs(bases[0]).tolist(), there.tolist()
    ([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [True])
    """
    variances, vectors = np.linalg.eigh(products)
    least = (products.shape[-1] * FLOAT32_STEP) ** 2 * variances[:, -1]
    there = (variances[:, -rank] > least) & (variances[:, -1] > 0)
    return np.ascontiguousarray(vectors[:, :, : -rank - 1 : -1]), there


def shared_directions(first: Floats, second: Floats) -> tuple[Floats, Floats]:
    """How much subspaces share: mean cos^2 of their principal angles, 0 to 1, and the largest angle in degrees.

    Orthonormal bases (pair, width, channel), where columns of zeros are none, to (pair,) twice; the mean runs over
    the smaller dimension. Mean cos^2 is the projection kernel |U^T U'|_F^2 over that dimension. NaN for empty bases.

    >>> plane, turned = np.eye(3)[:, :2], np.array([[1.0, 0.0], [0.0, 0.6], [0.0, 0.8]])
    >>> [value.round(4).item() for value in shared_directions(plane[None], turned[None])]
    [0.68, 53.1301]
    """
    inner = first.swapaxes(-1, -2) @ second
    sizes = [np.rint((bases**2).sum(axis=(-2, -1))).astype(int) for bases in (first, second)]
    smaller = np.minimum(*sizes)
    cosines = np.linalg.svd(inner, compute_uv=False)
    last = np.take_along_axis(cosines, np.maximum(smaller - 1, 0)[:, None], axis=-1)[:, 0]
    # The cosine of a small angle says little of it, its sine does: the part of one basis that lies outside the other.
    outside = np.where(
        sizes[1] <= sizes[0], _largest(second - first @ inner), _largest(first - second @ inner.swapaxes(-1, -2))
    )
    there = smaller > 0
    share = np.einsum("pij,pij->p", inner, inner) / np.maximum(smaller, 1)
    angle = np.degrees(np.arctan2(outside, last))
    return np.where(there, np.minimum(share, 1.0), np.nan), np.where(there, angle, np.nan)


def _largest(matrices: Floats) -> Floats:
    """Largest singular value of every matrix."""
    return np.sqrt(np.maximum(np.linalg.eigvalsh(matrices.swapaxes(-1, -2) @ matrices)[:, -1], 0.0))
