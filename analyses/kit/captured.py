"""How few directions hold a matrix: captured variance, of W_Q, W_K and their products, head by head and together.

The published measure (Cordonnier, Loukas and Jaggi 2020, arXiv 2006.16362, figure 1) is the cumulative variance that
the principal components of these matrices capture, in BERT-base with 7.7, 105.5, 165.5 and 304.6 of 768 components to
.5, .9, .95 and .99 for W_Q W_K^T of all heads. Known of it: W_Q and W_K are width x channel, heads together stand side
by side, so that W_Q W_K^T (width x width) is the sum of the heads' products. Inferred: variance means squared singular
values, and the numbers are where the mean curve crosses. On MiniLM squares and the sum give the published proportions
of components (.025, .17, .25, .42 against .01, .14, .22, .40); unsquared values (.11, .43, .53, .71) and products side
by side (.07, .34, .44, .63) are far off. Not known: whether rows are centred, which there changes the proportions by
less than .002.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .spectra import singular_values_by_gram
from .subspaces import folded

Floats = NDArray[np.float64]
MATRICES = {"QK": "W_Q W_K^T", "K": "W_K", "Q": "W_Q"}
"""The three matrices, as tables and as figures name them."""
ROUNDING = 1e-9
"""A share counts as reached this far below it: cumulated sums round."""


def captured_variance(matrices: Floats) -> Floats:
    """Share of |A|_F^2 in the k strongest components: sum of the k largest sigma^2 over the sum of all, k from 1.

    Shape (..., row, column) to (..., min(row, column)); rising, 0 to 1, the last 1; NaN for a zero matrix. With rows
    centred before, it is the cumulative explained variance of a principal component analysis.

    >>> captured_variance(np.array([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])).round(6).tolist()
    [0.64, 1.0]
    """
    variances = singular_values_by_gram(matrices)[..., ::-1] ** 2
    total = variances.sum(axis=-1, keepdims=True)
    shares = np.cumsum(variances, axis=-1) / np.where(total > 0, total, 1.0)
    return np.where(total > 0, np.minimum(shares, 1.0), np.nan)


def captured_by_matrix(query: Floats, key: Floats, *, center: bool = False) -> dict[str, Floats]:
    """Captured variance of W_Q W_K^T, W_K and W_Q of every head, by the names of MATRICES.

    Shapes (head, width, channel) twice to (head, min(width, channel)) each. The product's singular values come from
    the thin factor W_Q R^T with W_K = Q R. `center` takes the mean row off each matrix; that of W_Q W_K^T is the mean
    row of W_Q times W_K^T, so centring W_Q centres the product.
    """
    q, k = (part - center * part.mean(axis=-2, keepdims=True) for part in (query, key))
    return {"QK": captured_variance(folded(q, key)), "K": captured_variance(k), "Q": captured_variance(q)}


def together(factors: Floats) -> Floats:
    """All heads side by side, (head, width, channel) to (1, width, head x channel).

    W_Q W_K^T of these is the sum of the heads' own products.

    >>> together(np.array([[[1.0], [2.0]], [[3.0], [4.0]]])).tolist()
    [[[1.0, 3.0], [2.0, 4.0]]]
    """
    heads, width, channels = factors.shape
    return factors.transpose(1, 0, 2).reshape(1, width, heads * channels)


def components_to_reach(captured: Floats, shares: Sequence[float]) -> Floats:
    """Least number of components that capture each share: (..., component) to (..., share); NaN where undefined.

    >>> components_to_reach(np.array([0.64, 0.9, 1.0]), [0.5, 0.9, 0.95]).tolist()
    [1.0, 2.0, 3.0]
    """
    reached = captured[..., None, :] >= np.asarray(shares)[:, None] - ROUNDING
    return np.where(reached.any(axis=-1), 1.0 + reached.argmax(axis=-1), np.nan)


def crossings(curve: Floats, shares: Sequence[float]) -> Floats:
    """Where a curve of captured variance crosses each share, interpolated linearly between components from (0, 0).

    Shape (component,) to (share,); NaN for a curve of NaN. What one reads off a drawn curve.

    >>> crossings(np.array([0.4, 0.8, 1.0]), [0.5, 0.9]).round(6).tolist()
    [1.25, 2.5]
    """
    if np.isnan(curve).any():
        return np.full(len(shares), np.nan)
    return np.interp(shares, np.concatenate([[0.0], curve]), np.arange(len(curve) + 1.0))
