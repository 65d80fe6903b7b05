"""How far token vectors are from being equal, and the ranks of their matrix: what rank collapse measures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from .maths import ratio
from .spectra import (
    composite_norm,
    effective_rank,
    frobenius_norm,
    numerical_rank,
    singular_values_by_gram,
    stable_rank,
)

Floats = NDArray[np.float64]
RANKS = {
    "effective_rank": "exp of the entropy of sigma / sum sigma, 1 to n; empty for a zero matrix",
    "stable_rank": "|A|_F^2 / |A|_2^2, 1 to n; empty for a zero matrix",
    "numerical_rank": "singular values above n 2^-23 sigma_1, 0 to n",
}
VALUES = {
    "n": "token vectors of a text",
    "residual_composite": "|X - 1 mean| / |X| in the norm sqrt(|.|_1 |.|_inf); 0 for equal tokens, may exceed 1; "
    "what is not above n 2^-23 may be rounding to float32",
    "residual_frobenius": "|X - 1 mean|_F / |X|_F, 0 to 1; rounding as above",
    **RANKS,
    **{f"{name}_share": f"{name} / n, 0 to 1" for name in RANKS},
}


@dataclass(frozen=True)
class TokenMatrices:
    """Token vectors (..., token, width), and the values of VALUES (...), each made when it is first asked for."""

    states: Floats

    def value(self, name: str) -> Floats:
        """One of VALUES. NaN for no tokens, but for their number.

        >>> TokenMatrices(np.array([[2.0, 0.0], [0.0, 2.0]])).value("stable_rank_share").item()
        1.0
        """
        if self.states.shape[-2] == 0 and name != "n":
            return np.full_like(self.n, np.nan)
        own: Floats = getattr(self, name.removesuffix("_share"))
        return own / self.n if name.endswith("_share") else own

    @cached_property
    def n(self) -> Floats:
        """Number of tokens."""
        return np.full(self.states.shape[:-2], float(self.states.shape[-2]))

    @cached_property
    def residual_composite(self) -> Floats:
        """|X - 1 mean| / |X| in the norm sqrt(|.|_1 |.|_inf)."""
        rest = self._rest()
        return ratio(composite_norm(rest, out=rest), composite_norm(self.states, out=rest))

    @cached_property
    def residual_frobenius(self) -> Floats:
        """|X - 1 mean|_F / |X|_F."""
        # |X|^2 = |X - 1 mean|^2 + n |mean|^2: another pass over X is not needed.
        part, middle = frobenius_norm(self._rest()), frobenius_norm(self._mean)
        return ratio(part, np.sqrt(part**2 + self.n * middle**2))

    @cached_property
    def effective_rank(self) -> Floats:
        """exp of the entropy of sigma / sum sigma."""
        return effective_rank(self._singular)

    @cached_property
    def stable_rank(self) -> Floats:
        """|X|_F^2 / |X|_2^2."""
        return stable_rank(self._singular)

    @cached_property
    def numerical_rank(self) -> Floats:
        """Singular values above n 2^-23 sigma_1."""
        return numerical_rank(self._singular, self.states.shape[-2])

    @cached_property
    def _singular(self) -> Floats:
        return singular_values_by_gram(self.states)

    @cached_property
    def _mean(self) -> Floats:
        """The mean token, (..., 1, width)."""
        tokens = self.states.shape[-2]
        return (np.ones((1, tokens)) @ self.states) / tokens  # a product: sums over tokens take twice as long

    def _rest(self) -> Floats:
        """X - 1 mean, made anew: what has not left the cache is faster than what was kept."""
        return torch.from_numpy(self.states).sub(torch.from_numpy(self._mean)).numpy()


def residuals(states: Floats) -> Floats:
    """Relative residuals |X - 1 mean| / |X| in composite and Frobenius norm, on a last axis; NaN for zero or no tokens.

    Shape (..., token, width) to (..., 2).

    >>> residuals(np.array([[2.0, 0.0], [0.0, 1.0]])).round(6).tolist()
    [0.866025, 0.707107]
    """
    tokens = TokenMatrices(states)
    return np.stack([tokens.value(f"residual_{norm}") for norm in ("composite", "frobenius")], axis=-1)
