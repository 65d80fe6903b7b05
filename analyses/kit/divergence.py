"""How differently heads attend over one text: every head against every other, row by row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BLOCK = 2**17
"""Entries to a block of pairs: what fits into a core's cache (1 MiB)."""
CONSTANT = 1e-6
"""A row whose entries differ by less than this share of the largest is uniform to float32: it has no correlation."""


def jensen_shannon(attention: Floats) -> Floats:
    """Jensen-Shannon divergence of every two heads, H((p + q) / 2) - (H(p) + H(q)) / 2, averaged over query rows.

    Shape (head, query, key), rows that sum to 1, to (head, other head). Nats, 0 to ln 2; no smoothing, no root.
    Clark et al. 2019 sum over rows and smooth. Costs heads^2 / 2 times query x key logarithms.

    >>> jensen_shannon(np.array([[[1.0, 0.0]], [[0.0, 1.0]], [[0.5, 0.5]]])).round(4).tolist()
    [[0.0, 0.6931, 0.2158], [0.6931, 0.0, 0.2158], [0.2158, 0.2158, 0.0]]
    """
    heads, rows, keys = attention.shape
    flat = attention.reshape(heads, rows * keys)
    own = _sum_x_log_x(flat)
    divergence = np.zeros((heads, heads))
    step = max(1, BLOCK // max(rows * keys, 1))
    for head in range(heads):
        for start in range(head + 1, heads, step):
            others = slice(start, min(start + step, heads))
            # With s = p + q, H(s / 2) = ln 2 - sum s ln s / 2.
            mixed = _sum_x_log_x(flat[head] + flat[others])
            divergence[head, others] = np.log(2.0) - (mixed - own[head] - own[others]) / (2 * rows)
    divergence += divergence.T
    return np.clip(divergence, 0.0, np.log(2.0))


def divergence_of_rows(first: Floats, second: Floats) -> Floats:
    """Jensen-Shannon divergence of the rows of one attention matrix and another, averaged over them.

    Shapes (..., query, key) twice to (...). Nats, 0 to ln 2, as `jensen_shannon`; exactly 0 for equal rows.

    >>> divergence_of_rows(np.array([[1.0, 0.0]]), np.array([[0.5, 0.5]])).round(4).item()
    0.2158
    """
    middle = (first + second) / 2
    there = middle > 0
    # p ln(p / m) = p ln(1 + (p - m) / m), which keeps the digits of small differences; 0 ln 0 = 0.
    shift = np.where(there, (first - second) / 2, 0.0) / np.where(there, middle, 1.0)
    own, other = (np.log1p(np.maximum(sign * shift, np.nextafter(-1.0, 0.0))) for sign in (1.0, -1.0))
    total = np.einsum("...k,...k->...", first, own) + np.einsum("...k,...k->...", second, other)
    return np.clip(total.mean(axis=-1) / 2, 0.0, np.log(2.0))


def _sum_x_log_x(values: Floats) -> Floats:
    """Sum of x ln x along the last axis, with 0 ln 0 = 0."""
    logarithms = np.maximum(values, np.finfo(np.float64).tiny)
    np.log(logarithms, out=logarithms)
    return np.einsum("...i,...i->...", values, logarithms)


def row_correlation(attention: Floats) -> Floats:
    """Pearson correlation of every two heads' rows over the keys, averaged over the rows that vary in both.

    Shape (head, query, key) to (head, other head); -1 to 1, NaN where no row varies in both. Row by row, because rows
    are what the softmax normalises: correlating whole maps would mix in how rows differ. Our own choice.

    >>> row_correlation(np.array([[[0.2, 0.8], [0.5, 0.5]], [[0.1, 0.9], [0.3, 0.7]]])).round(6).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    centred = attention - attention.mean(axis=-1, keepdims=True)
    varies = np.ptp(attention, axis=-1) > CONSTANT * attention.max(axis=-1)
    length = np.linalg.norm(centred, axis=-1)
    scores = centred * (varies / np.where(varies, length, 1.0))[..., None]
    flat, seen = scores.reshape(len(scores), -1), varies.astype(np.float64)
    rows = seen @ seen.T
    mean = (flat @ flat.T) / np.maximum(rows, 1.0)
    return np.where(rows > 0, np.clip(mean, -1.0, 1.0), np.nan)
