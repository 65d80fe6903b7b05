"""Ranks and norms of stacks of matrices, from Gram matrices in float64."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FLOAT32_EPSILON = 2.0**-23
"""Recorded values are float32: what lies this far below the largest singular value is rounding."""
SMALLEST = float(np.finfo(np.float64).tiny)


def singular_values_by_gram(matrices: Floats) -> Floats:
    """Singular values of every matrix (..., row, column), rising, from the eigenvalues of the smaller Gram matrix.

    Shape (..., min(row, column)). Squaring loses what lies below 1e-8 of the largest, far under the numerical rank's
    threshold; a dense SVD would cost several times as much.

    >>> singular_values_by_gram(np.array([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])).tolist()
    [3.0, 4.0]
    """
    rows = torch.from_numpy(matrices)
    gram = rows @ rows.mT if rows.shape[-1] >= rows.shape[-2] else rows.mT @ rows
    return torch.linalg.eigvalsh(gram).clamp_(min=0.0).sqrt_().numpy()


def effective_rank(singular: Floats) -> Floats:
    """exp of the entropy of p = sigma / sum sigma (Roy and Vetterli 2007): 1 to the number of values; NaN for zero.

    Shape (..., value) to (...).

    >>> effective_rank(np.array([2.0, 2.0, 0.0])).round(12).item()
    2.0
    """
    total = singular.sum(axis=-1, keepdims=True)
    shares = singular / np.where(total > 0, total, 1.0)
    spread = -np.einsum("...i,...i->...", shares, np.log(np.maximum(shares, SMALLEST)))
    return np.where(total[..., 0] > 0, np.exp(spread), np.nan)


def stable_rank(singular: Floats) -> Floats:
    """|A|_F^2 / |A|_2^2: 1 to the rank; NaN for zero. Shape (..., value) to (...).

    >>> stable_rank(np.array([1.0, 2.0])).item()
    1.25
    """
    largest = singular.max(axis=-1, keepdims=True, initial=0.0)
    shares = singular / np.where(largest > 0, largest, 1.0)
    return np.where(largest[..., 0] > 0, np.einsum("...i,...i->...", shares, shares), np.nan)


def numerical_rank(singular: Floats, tokens: int) -> Floats:
    """How many singular values exceed tokens 2^-23 sigma_1. Shape (..., value) to (...); 0 for zero.

    >>> numerical_rank(np.array([1e-7, 1.0, 2.0]), tokens=3).item()
    2.0
    """
    largest = singular.max(axis=-1, initial=0.0)
    return (singular > tokens * FLOAT32_EPSILON * largest[..., None]).sum(axis=-1).astype(float)


def von_neumann_entropy(singular: Floats) -> Floats:
    """-sum p ln p with p = sigma^2 / sum sigma^2, in nats: 0 (rank one) to ln n (all alike); NaN for zero.

    That of the density matrix A A^T / tr(A A^T). Shape (..., value) to (...).

    >>> von_neumann_entropy(np.array([[3.0, 3.0], [0.0, 2.0]])).round(6).tolist()
    [0.693147, 0.0]
    """
    largest = singular.max(axis=-1, keepdims=True, initial=0.0)
    squares = (singular / np.where(largest > 0, largest, 1.0)) ** 2
    shares = squares / np.maximum(squares.sum(axis=-1, keepdims=True), SMALLEST)
    spread = -np.einsum("...i,...i->...", shares, np.log(np.maximum(shares, SMALLEST)))
    bounded = np.clip(spread, 0.0, np.log(max(singular.shape[-1], 1)))
    return np.where(largest[..., 0] > 0, bounded + 0.0, np.nan)


def composite_norm(matrices: Floats, *, out: Floats | None = None) -> Floats:
    """sqrt(|X|_1 |X|_inf): largest column sum and largest row sum of absolute values (Dong et al. 2021).

    Shape (..., row, column) to (...). `out`, which may be the matrices themselves, is overwritten by absolute values:
    memory at hand is faster than new.

    >>> composite_norm(np.array([[1.0, -2.0], [3.0, 0.0]])).round(6).item()
    3.464102
    """
    absolute = torch.abs(torch.from_numpy(matrices), out=None if out is None else torch.from_numpy(out))
    columns, rows = (absolute.sum(dim=axis).numpy().max(axis=-1, initial=0.0) for axis in (-2, -1))
    return np.sqrt(columns * rows)


def frobenius_norm(matrices: Floats) -> Floats:
    """Root of the sum of squares. Shape (..., row, column) to (...).

    >>> frobenius_norm(np.array([[3.0, 0.0], [0.0, 4.0]])).item()
    5.0
    """
    entries = matrices.reshape(*matrices.shape[:-2], matrices.shape[-2] * matrices.shape[-1])
    return np.sqrt(np.vecdot(entries, entries))


def ranks(matrices: Floats, tokens: int) -> Floats:
    """Effective, stable and numerical rank on a last axis. Shape (..., row, column) to (..., 3); NaN without rows."""
    if 0 in matrices.shape[-2:]:
        return np.full((*matrices.shape[:-2], 3), np.nan)
    singular = singular_values_by_gram(matrices)
    return np.stack([effective_rank(singular), stable_rank(singular), numerical_rank(singular, tokens)], axis=-1)
