"""Vectors of some tokens of a corpus, drawn by hash: the same under any order of the texts and any cut."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .record import TokenizedText

Keys = NDArray[np.uint64]
Vectors = NDArray[Any]
GOLDEN, FIRST, SECOND = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""The constants of SplitMix64 (Steele, Lea and Flood 2014)."""


@lru_cache(maxsize=2**16)
def hashed(text: str, seed: int) -> int:
    """A whole number below 2^64 that looks random and depends on nothing else.

    >>> hashed("bank", 0) == hashed("bank", 0) != hashed("bank", 1)
    True
    """
    digest = hashlib.blake2b(f"{seed}\0{text}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def text_keys(texts: Sequence[TokenizedText], seed: int) -> Keys:
    """The texts' hashes, lines and parts: (text, 3)."""
    rows = [(hashed(f"{text.text}\0{text.pair or ''}", seed), text.line, text.part) for text in texts]
    return np.array(rows, np.uint64).reshape(-1, 3)


def token_keys(texts: Sequence[TokenizedText], positions: NDArray[np.intp], seed: int) -> Keys:
    """Of every text at each of the positions a hash of seed, text and position, its line, part and position.

    Shape (text, position, 4).
    """
    of_text = text_keys(texts, seed)
    mixed = of_text[:, :1] + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * SECOND
    keys = np.empty((*mixed.shape, 4), np.uint64)
    keys[..., 0], keys[..., 1:3], keys[..., 3] = mixed ^ (mixed >> np.uint64(31)), of_text[:, None, 1:], positions
    return keys


@dataclass
class VectorSample:
    """Vectors (row, ...) of the `groups` groups of smallest hash, at most `each` of every group, again by hash.

    A row's key is the hash of its group, its own hash, then what tells equal hashes apart.

    >>> sample = VectorSample.empty(1, 2, (3,))
    >>> sample.add(np.array([[0, 9, 1], [0, 2, 1], [0, 5, 1]], np.uint64), np.eye(3))
    >>> sample.settled().vectors.tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    groups: int
    each: int
    keys: Keys
    vectors: Vectors
    pending: list[tuple[Keys, Vectors]] = field(default_factory=list)

    @classmethod
    def empty(cls, groups: int, each: int, shape: tuple[int, ...], identity: int = 1) -> Self:
        """Nothing seen yet: the identity of merge. `identity` counts the columns after the two hashes."""
        return cls(groups, each, np.empty((0, 2 + identity), np.uint64), np.empty((0, *shape), np.float32))

    def wanted(self, keys: Keys) -> NDArray[np.bool_]:
        """Which rows (..., column) may still enter: what is left out by this could not be kept whatever follows."""
        held, start, count = np.unique(self.keys[:, 0], return_index=True, return_counts=True)
        may = np.ones(keys.shape[:-1], dtype=bool)
        if not len(held):
            return may
        if len(held) == self.groups:
            may &= keys[..., 0] <= held[-1]
        at = np.minimum(np.searchsorted(held, keys[..., 0]), len(held) - 1)
        full = (held[at] == keys[..., 0]) & (count[at] == self.each)
        return may & ~(full & (keys[..., 1] > self.keys[start + count - 1, 1][at]))

    def add(self, keys: Keys, vectors: Vectors) -> None:
        """Offer rows with their keys."""
        if not len(keys):
            return
        self.pending.append((keys, vectors))
        if sum(len(rows) for rows, _ in self.pending) >= max(self.groups * self.each // 4, 64):
            whole = self.settled()
            self.keys, self.vectors, self.pending = whole.keys, whole.vectors, []

    def settled(self) -> Self:
        """The kept rows alone, in the order of their keys."""
        keys = np.concatenate([self.keys, *(keys for keys, _ in self.pending)])
        order = np.lexsort(keys.T[::-1])
        group = keys[order, 0]
        new = np.concatenate([[True], group[1:] != group[:-1]])[: len(group)]
        number = np.cumsum(new) - 1
        place = np.arange(len(group)) - np.flatnonzero(new)[number]
        kept = order[(number < self.groups) & (place < self.each)]
        return type(self)(self.groups, self.each, keys[kept], self._vectors(kept))

    def merge(self, other: Self) -> Self:
        """The smallest hashes of both sides."""
        if (self.groups, self.each) != (other.groups, other.each):
            raise ValueError("samples of different sizes do not merge")
        first, second = self.settled(), other.settled()
        return type(self)(self.groups, self.each, first.keys, first.vectors, [(second.keys, second.vectors)]).settled()

    def _vectors(self, rows: NDArray[np.intp]) -> Vectors:
        """The vectors of some rows of what is kept and what is pending, without a copy of all that there are."""
        chosen = np.empty((len(rows), *self.vectors.shape[1:]), np.result_type(*self._parts))
        first = 0
        for part in self._parts:
            own = np.flatnonzero((rows >= first) & (rows < first + len(part)))
            chosen[own] = part[rows[own] - first]
            first += len(part)
        return chosen

    @property
    def _parts(self) -> list[Vectors]:
        return [self.vectors, *(vectors for _, vectors in self.pending)]
