"""The softmax of scores at a temperature: how even its rows are, and how much gradient it lets through."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .analysis import SettingsError

Floats = NDArray[np.float64]

SWEEP: Mapping[str, str] = {
    "entropy": "entropy of softmax(q.k / tau), nats, 0 to ln(keys)",
    "entropy_share": "entropy / ln(keys), 0 to 1; empty with one key",
    "largest": "largest weight of a row, 1 / keys to 1",
    "jacobian": "Frobenius norm of d p / d s with s = q.k / tau, diag(p) - p p^T: the gradient that the softmax lets "
    "through, 0 (one key has all) to 1/2 (two share evenly)",
    "jacobian_raw": "the same by q.k itself, jacobian / tau: the gradient that is left for q and k",
}
"""Values of a row of weights p at a temperature tau."""
STEPS = range(-4, 5)
"""The grid: sqrt(dk) times these powers of two."""


def softmax_at(products: Floats, tau: float) -> Floats:
    """softmax(products / tau) of every row (..., key): each sums to 1.

    The largest is taken away before the division, so that no temperature overflows.

    >>> softmax_at(np.array([0.0, np.log(3.0) * 2]), 2.0).round(12).tolist()
    [0.25, 0.75]
    """
    rows = torch.from_numpy(products)
    return ((rows - rows.amax(dim=-1, keepdim=True)) / tau).softmax(dim=-1).numpy()


def jacobian_norm(weights: Floats) -> Floats:
    """Frobenius norm of the softmax's Jacobian diag(p) - p p^T at its own output p. Shape (..., key) to (...).

    |J|_F^2 = sum p^2 - 2 sum p^3 + (sum p^2)^2, at most 1/4. Summed as entries of J instead, sum p_i^2 (1 - p_i)^2 +
    sum_(i != j) p_i^2 p_j^2, with 1 - p of the largest as the sum of the others: near a one-hot row, where gradients
    vanish, the powers would cancel to nothing but rounding.

    >>> jacobian_norm(np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])).tolist()
    [0.5, 0.0]
    """
    largest, others = weights.max(axis=-1), _others(weights)
    squares = others**2
    second, fourth = (np.einsum("...i,...i->...", one, one) for one in (others, squares))
    diagonal = (largest * np.einsum("...i->...", others)) ** 2 + np.einsum("...i,...i->...", squares, (1 - others) ** 2)
    beside = 2 * largest**2 * second + np.maximum(second**2 - fourth, 0.0)
    return np.sqrt(diagonal + beside)


def _others(weights: Floats) -> Floats:
    """The weights with the largest of each row, or the first of several, set to 0."""
    others = weights.copy()
    np.put_along_axis(others, weights.argmax(axis=-1)[..., None], 0.0, axis=-1)
    return others


def entropy_at(products: Floats, weights: Floats, tau: float) -> Floats:
    """Entropy of weights = softmax(products / tau), nats, 0 to ln(keys). Shapes (..., key) twice to (...).

    sum p s - ln p_max with s = (largest product - product) / tau and p_max = 1 - the others: no term is negative, so
    none cancels where one key has nearly all, as it would in -sum p ln p.

    >>> row = np.array([100.0, 0.0])
    >>> float(entropy_at(row, softmax_at(row, 1.0), 1.0) / np.exp(-100.0)).__round__(9)
    101.0
    """
    with np.errstate(over="ignore"):
        below = (products.max(axis=-1, keepdims=True) - products) / tau
    spread = np.einsum("...i,...i->...", weights, np.where(weights > 0, below, 0.0))
    value = spread - np.log1p(-np.einsum("...i->...", _others(weights)))
    return np.minimum(value, np.log(products.shape[-1]))


def sweep_values(products: Floats, tau: float) -> Floats:
    """The values of SWEEP of every row of q.k at a temperature, on a last axis. Shape (..., key) to (..., 5)."""
    weights = softmax_at(products, tau)
    spread, norm, keys = entropy_at(products, weights, tau), jacobian_norm(weights), products.shape[-1]
    share = spread / np.log(keys) if keys > 1 else np.full_like(spread, np.nan)
    return np.stack([spread, share, weights.max(axis=-1), norm, norm / tau], axis=-1)


def temperatures(text: str, head_width: int) -> tuple[float, ...]:
    """The temperatures of a list of numbers, or of `grid`: sqrt(dk) times powers of two; 1 and sqrt(dk) are always in.

    In rising order, each once. Raises SettingsError for what is no positive number.

    >>> temperatures("4,8", 4)
    (1.0, 2.0, 4.0, 8.0)
    """
    own = math.sqrt(head_width)
    chosen = [own * 2.0**step for step in STEPS] if text.strip() == "grid" else numbers(text, "tau")
    if min(chosen) <= 0:
        raise SettingsError(f"--tau {text} has a temperature that is not above 0", "Give positive numbers, or grid.")
    return tuple(sorted({1.0, own, *chosen}))


def numbers(text: str, option: str) -> Sequence[float]:
    """The finite numbers of a comma-separated list. Raises SettingsError, which names the option.

    >>> numbers("5, 20,-1e-3", "scores")
    [5.0, 20.0, -0.001]
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise SettingsError(f"--{option} {text!r} is no list of numbers", f"Write them such as --{option} 5,20,5.")
    return found
