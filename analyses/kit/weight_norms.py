"""Norms of attention weights, as theorems on rank collapse speak of them.

Matrices act on row vectors, as there: W_Q, W_K and W_V are (width, channel), W_O (channel, width), the transposes of
what torch stores. |W|_1 is the largest sum of a column's absolute values, |W|_inf that of a row's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .record import HeadWeights
from .spectra import composite_norm

Floats = NDArray[np.float64]
MATRICES: Mapping[str, str] = {"q": "W_Q", "k": "W_K", "v": "W_V", "o": "W_O"}


@dataclass(frozen=True)
class HeadMatrices:
    """The weights of some heads of a layer, without biases: (head, width, channel), and `o` (head, channel, width)."""

    q: Floats
    k: Floats
    v: Floats
    o: Floats

    @classmethod
    def of(cls, weights: HeadWeights, at: int, heads: Sequence[int]) -> HeadMatrices:
        """Of the checkpoint's layer `at`."""
        held = (weights.query, weights.key, weights.value, weights.output)
        return cls(*(matrix[at][list(heads)].mT.double().cpu().numpy() for matrix in held))

    def side_by_side(self) -> dict[str, Floats]:
        """The whole layer's matrices: (width, head x channel), and for `o` (head x channel, width)."""
        beside = {name: np.concatenate(list(getattr(self, name)), axis=1) for name in ("q", "k", "v")}
        return beside | {"o": np.concatenate(list(self.o), axis=0)}

    def beta(self, through: str) -> Floats:
        """|W_Q W_K^T|_1 |W|_{1,inf} of each head, W being W_V (`through` V) or W_V W_O (VO)."""
        pairs = zip(self.q, self.k, strict=True)
        scores = np.array([column_sum(q @ k.T) for q, k in pairs])
        written = self.v if through == "V" else (v @ o for v, o in zip(self.v, self.o, strict=True))
        return scores * np.array([composite_norm(matrix) for matrix in written])


def column_sum(matrices: Floats) -> Floats:
    """|W|_1: (..., row, column) to (...).

    >>> column_sum(np.array([[1.0, -2.0], [3.0, 1.0]])).item()
    4.0
    """
    return np.abs(matrices).sum(axis=-2).max(axis=-1)


def row_sum(matrices: Floats) -> Floats:
    """|W|_inf: (..., row, column) to (...).

    >>> row_sum(np.array([[1.0, -2.5], [3.0, 0.0]])).item()
    3.5
    """
    return np.abs(matrices).sum(axis=-1).max(axis=-1)


def largest_entry(matrices: Floats) -> Floats:
    """max |W|: (..., row, column) to (...)."""
    return np.abs(matrices).max(axis=(-2, -1))


NORMS = {"max": largest_entry, "one": column_sum, "inf": row_sum}
"""By the ending of a column's name."""


def contraction(beta: float, heads: int, head_width: int) -> float:
    """The factor c = 4 beta H / sqrt(dk) of the bound |res SAN(X)| <= c |res X|^3 for one layer of H heads.

    >>> contraction(0.5, heads=2, head_width=16)
    1.0
    """
    return 4 * beta * heads / float(np.sqrt(head_width))


def log_bound(factor: float, residual: Floats, layers: int) -> Floats:
    """log10 of c^((3^L - 1) / 2) r^(3^L) after L layers, from the residual r that goes in; NaN for r = 0.

    >>> log_bound(10.0, np.array(0.1), layers=2).item()
    -5.0
    """
    power = 3**layers
    logs = np.log10(np.where(residual > 0, residual, 1.0))
    return np.where(residual > 0, (power - 1) / 2 * np.log10(factor) + power * logs, np.nan)
