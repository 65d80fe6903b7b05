"""Covariances over the tokens of a corpus, a few hundred tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .covariance import Covariance

Floats = NDArray[np.float64]
BLOCK = 512
"""Tokens to a product: text by text most time would go to reading and writing the sums."""


@dataclass
class TokenCovariance:
    """Count, mean and centred products of vectors (place, token, width); of `sums` of width 1, the diagonals alone.

    Tokens wait as they were recorded until there are BLOCK of them: sums depend on their order, not on their batches.

    >>> seen = TokenCovariance(Covariance.empty(1, 2)), TokenCovariance(Covariance.empty(2, 1))
    >>> for sums in seen:
    ...     sums.add([np.array([[1.0, 0.0], [3.0, 4.0]])])
    >>> [sums.whole().products.tolist() for sums in seen]
    [[[[2.0, 4.0], [4.0, 8.0]]], [[[2.0]], [[8.0]]]]
    """

    sums: Covariance
    waiting: list[NDArray[Any]] = field(default_factory=list)

    def add(self, vectors: Sequence[NDArray[Any]]) -> None:
        """Add some tokens: their vectors (token, width) at every place."""
        self.waiting.append(np.stack(vectors))
        while sum(tokens.shape[1] for tokens in self.waiting) >= BLOCK:
            every = np.concatenate(self.waiting, axis=1)
            self._sum(every[:, :BLOCK])
            self.waiting = [every[:, BLOCK:].copy()]

    def whole(self) -> Covariance:
        """All that was added, as a copy."""
        held = Covariance(self.sums.count, self.sums.mean.copy(), self.sums.products.copy())
        rest = type(self)(held)
        if self.waiting:
            rest._sum(np.concatenate(self.waiting, axis=1))
        return held

    def merge(self, other: Self) -> Self:
        """Chan's pairwise formula; nothing waits afterwards."""
        return type(self)(self.whole().merge(other.whole()))

    def _sum(self, block: NDArray[Any]) -> None:
        places, tokens, width = block.shape
        vectors = block.astype(np.float64)
        whole = self.sums.products.shape[-1] == width
        self.sums.add(vectors if whole else vectors.swapaxes(1, 2).reshape(places * width, tokens, 1))
