"""Whether a head selects the same columns in every text, or others in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from .accumulators import Sample
from .record import TokenizedText
from .units import Units

Floats = NDArray[np.float64]
COMPARED = 200
"""Texts that are compared pair by pair."""


@dataclass
class Selected:
    """The columns that each head selects in a sample of texts, by what stands there and by where that is.

    Columns of different texts are no columns of one matrix: the same is either the same vocabulary entry (or word, as
    the vocabulary cuts it) or the same position, counted from the start of the text.
    """

    sample: Sample

    @classmethod
    def empty(cls, seed: int) -> Self:
        """Nothing seen yet: the identity of merge."""
        return cls(Sample.empty(COMPARED, seed))

    def add(self, texts: Sequence[TokenizedText], units: Sequence[Units], columns: Floats) -> None:
        """Add texts with the places of their columns among their units: (text, layer, head, column)."""
        places = columns.astype(int)
        entries = [_entries(text, one)[own] for text, one, own in zip(texts, units, places, strict=True)]
        self.sample.add(texts, np.stack([np.stack(entries), columns], axis=1))

    def merge(self, other: Self) -> Self:
        """Both samples together."""
        return type(self)(self.sample.merge(other.sample))

    @property
    def texts(self) -> int:
        """How many texts are compared."""
        return len(self.sample.rows())

    def likeness(self, layers: int, heads: int) -> Floats:
        """Mean Jaccard index of two texts' columns, as tokens and as positions: (layer, head, 2); NaN below two texts.

        0 where no two texts share a column, 1 where all have the same.
        """
        values = [item.values for item in self.sample.rows()]
        found = np.full((layers, heads, 2), np.nan)
        if len(values) < 2:
            return found
        for layer, head, kind in np.ndindex(layers, heads, 2):
            found[layer, head, kind] = mean_jaccard([value[kind, layer, head] for value in values])
        return found


def mean_jaccard(sets: Sequence[Floats]) -> float:
    """Mean of |A and B| / |A or B| over all pairs of two sets or more, none empty.

    >>> mean_jaccard([np.array([1.0, 2.0]), np.array([2.0]), np.array([2.0, 1.0])]).__round__(6)
    0.666667
    """
    sizes = [len(members) for members in sets]
    _, member = np.unique(np.concatenate(list(sets)), return_inverse=True)
    holds = np.zeros((len(sets), member.max() + 1))
    holds[np.repeat(np.arange(len(sets)), sizes), member] = 1.0
    shared, count = holds @ holds.T, holds.sum(axis=1)
    jaccard = shared / (count[:, None] + count[None, :] - shared)
    return float(jaccard[np.triu_indices(len(sets), 1)].mean())


def _entries(text: TokenizedText, units: Units) -> Floats:
    """A number for what stands at each unit: the token's id, or one made of those of a word's pieces."""
    pieces: list[list[int]] = [[] for _ in range(len(units))]
    for token, unit in zip(text.ids, units.of_token, strict=True):
        pieces[unit].append(token)
    return np.array([own[0] if len(own) == 1 else 2**32 + crc32(repr(own).encode()) for own in pieces], dtype=float)
