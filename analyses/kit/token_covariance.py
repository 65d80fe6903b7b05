"""Covariances over the tokens of a corpus, a few hundred tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .covariance import Covariance

Floats = NDArray[np.float64]
BLOCK = 512
"""Tokens to a product: text by text most time would go to reading and writing the sums."""


@dataclass
class TokenCovariance:
    """Count, mean and centred products of vectors (place, token, width); of `sums` of width 1, the diagonals alone.

    Texts wait until they have BLOCK tokens together. What waits depends on the texts' order, not on their batches.

    >>> seen = TokenCovariance(Covariance.empty(1, 2)), TokenCovariance(Covariance.empty(2, 1))
    >>> for sums in seen:
    ...     sums.add(np.array([[[1.0, 0.0], [3.0, 4.0]]]))
    >>> [sums.whole().products.tolist() for sums in seen]
    [[[[2.0, 4.0], [4.0, 8.0]]], [[[2.0]], [[8.0]]]]
    """

    sums: Covariance
    waiting: list[Floats] = field(default_factory=list)

    def add(self, vectors: Floats) -> None:
        """Add one text."""
        self.waiting.append(vectors)
        if sum(text.shape[1] for text in self.waiting) >= BLOCK:
            self.sums.add(self._block())
            self.waiting = []

    def whole(self) -> Covariance:
        """All that was added, as a copy."""
        sums = Covariance(self.sums.count, self.sums.mean.copy(), self.sums.products.copy())
        if self.waiting:
            sums.add(self._block())
        return sums

    def merge(self, other: Self) -> Self:
        """Chan's pairwise formula; nothing waits afterwards."""
        return type(self)(self.whole().merge(other.whole()))

    def _block(self) -> Floats:
        block = np.concatenate(self.waiting, axis=1)
        places, tokens, width = block.shape
        whole = self.sums.products.shape[-1] == width
        return block if whole else block.swapaxes(1, 2).reshape(places * width, tokens, 1)
