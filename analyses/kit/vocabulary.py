"""The vocabulary entries that lie nearest to directions of the residual space."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .maths import largest_of_rows
from .record import Vocabulary

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
ROWS = 4096
"""Rows of the embedding at a time: a few megabytes for each hundred directions."""


@dataclass(frozen=True)
class Nearest:
    """The nearest entries of every direction, by falling cosine: ids and cosines, both (direction, entry)."""

    ids: Whole
    cosines: Floats


def nearest_entries(vocabulary: Vocabulary, directions: Floats, count: int) -> Nearest:
    """The `count` entries of largest cosine with each direction (direction, width), in blocks of the embedding.

    Rows without a token and zero rows are passed over; of equal cosines the smaller id comes first. Where the
    vocabulary has fewer entries, all of them.
    """
    units = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    named = np.array([token is not None for token in vocabulary.tokens], dtype=bool)
    best = Nearest(np.empty((len(units), 0), np.int64), np.empty((len(units), 0)))
    for start, rows in vocabulary.blocks(ROWS):
        lengths = np.linalg.norm(rows, axis=1)
        kept = np.flatnonzero((lengths > 0) & named[start : start + len(rows)])
        cosines = np.clip(units @ (rows[kept] / lengths[kept, None]).T, -1.0, 1.0)
        ids = np.broadcast_to(kept + start, cosines.shape)
        both = np.hstack([best.ids, ids]), np.hstack([best.cosines, cosines])
        best = Nearest(*largest_of_rows(*both, count))
    return best
