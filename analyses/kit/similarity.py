"""How alike two representations of the same tokens are: debiased CKA and SVCCA, from centred vectors and products."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .spectra import FLOAT32_EPSILON, singular_values_by_gram

Floats = NDArray[np.float64]


def unbiased_hsic(first: Floats, second: Floats, between: Floats) -> float:
    """n (n - 3) times the unbiased HSIC of linear kernels (Song et al. 2012), of vectors X and Y (token, width).

    `between` is X^T Y. With K = X X^T and L = Y Y^T, their diagonals set to 0:
    tr(K L) + (1'K1)(1'L1) / ((n - 1)(n - 2)) - 2 (1'KL1) / (n - 2). No n x n kernel is formed:
    tr(K L) = |X^T Y|_F^2 - sum |x|^2 |y|^2 and (K 1)_i = x_i S - |x_i|^2 with S the sum of all x.
    NaN below four tokens. May be negative.

    >>> x = np.array([[3.0], [-1.0], [-1.0], [-1.0]])
    >>> unbiased_hsic(x, x, x.T @ x)
    0.0
    """
    n = len(first)
    if n < 4:
        return float("nan")
    squares = [np.einsum("nw,nw->n", vectors, vectors) for vectors in (first, second)]
    rows = [x @ x.sum(axis=0) - own for x, own in zip((first, second), squares, strict=True)]
    trace = (between**2).sum() - squares[0] @ squares[1]
    return float(trace + rows[0].sum() * rows[1].sum() / ((n - 1) * (n - 2)) - 2 * (rows[0] @ rows[1]) / (n - 2))


def debiased_cka(between: float, first: float, second: float) -> float:
    """HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)) of unbiased estimates: 0 on average for unrelated X and Y, at most
    about 1. NaN where an estimate of X or Y with itself is not positive.

    >>> debiased_cka(1.0, 4.0, 1.0)
    0.5
    """
    known = first > 0 and second > 0
    return float(between / np.sqrt(first * second)) if known else float("nan")


def whitening(products: Floats, share: float) -> Floats:
    """W (width, kept) with W^T C W = 1 for the centred products C: the principal directions that hold `share` of the
    variance, each divided by its length. Directions that float32 rounding alone may have made are left out.

    >>> whitening(np.diag([1.0, 99.0]), 0.9).round(4).tolist()
    [[0.0], [0.1005]]
    """
    variances, vectors = (part[..., ::-1] for part in np.linalg.eigh(products))
    held = np.cumsum(np.maximum(variances, 0.0))
    real = variances > (len(products) * FLOAT32_EPSILON) ** 2 * max(variances[0], 0.0)
    # A share that sums only reach within rounding counts as reached.
    count = min(int(np.searchsorted(held, share * held[-1] * (1 - 1e-12))) + 1, int(real.sum()))
    kept = vectors[:, :count] / np.sqrt(variances[:count])
    largest = np.take_along_axis(kept, np.abs(kept).argmax(axis=0)[None], axis=0)
    return kept * np.sign(largest)  # an eigenvector has no sign of its own


def svcca(first: Floats, between: Floats, second: Floats) -> float:
    """Mean canonical correlation of the directions that two whitenings keep (Raghu et al. 2017), 0 to 1.

    `first` (width, p), `between` X^T Y of centred vectors, `second` (width, q); the mean runs over min(p, q). NaN where
    nothing is kept.

    >>> svcca(np.array([[0.5]]), np.array([[1.0]]), np.array([[0.25]]))
    0.125
    """
    count = min(first.shape[1], second.shape[1])
    if not count:
        return float("nan")
    return float(np.minimum(singular_values_by_gram(first.T @ between @ second), 1.0).mean())
