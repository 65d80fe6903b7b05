"""What a state is made of: each accumulator has an empty one, adds and merges.

Values are added text by text in the order given, so how texts were batched leaves no trace in the bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .maths import largest_of_rows

if TYPE_CHECKING:
    from .record import TokenizedText

Floats = NDArray[np.float64]


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of every cell of an array; NaN cells are left out of their count.

    >>> moments = Moments.empty(2)
    >>> moments.add([[1.0, 5.0], [3.0, float("nan")]])
    >>> moments.mean, moments.std, moments.count
    (array([2., 5.]), array([1.41421356,        nan]), array([2, 1]))
    """

    count: NDArray[np.int64]
    total_mean: Floats
    deviations: Floats

    @classmethod
    def empty(cls, *shape: int) -> Self:
        """Nothing seen yet: the identity of merge."""
        return cls(np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape))

    def add(self, texts: ArrayLike) -> None:
        """Add values with a leading axis of texts (Welford's update, one text at a time)."""
        batch = np.asarray(texts, dtype=np.float64)
        if not len(batch):
            return
        absent = np.isnan(batch)
        counts = self.count + np.cumsum(~absent, axis=0)
        divisors, some = np.maximum(counts, 1).astype(float), absent.any()
        for values, gone, count in zip(batch, absent, divisors, strict=True):
            step = values - self.total_mean
            step = np.where(gone, 0.0, step) if some else step
            self.total_mean += step / count
            rest = values - self.total_mean
            self.deviations += step * (np.where(gone, 0.0, rest) if some else rest)
        self.count = np.array(counts[-1])

    def merge(self, other: Self) -> Self:
        """Chan's pairwise formula; an empty side leaves the other's bits untouched."""
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        step = other.total_mean - self.total_mean
        mean = np.where(self.count == 0, other.total_mean, self.total_mean + step * share)
        return type(self)(count, mean, self.deviations + other.deviations + step**2 * self.count * share)

    def at(self, index: Any) -> Self:
        """The moments of the cells that a NumPy index selects, as a copy."""
        return type(self)(self.count[index], self.total_mean[index], self.deviations[index])

    @property
    def mean(self) -> Floats:
        """Mean of each cell, NaN where nothing was counted."""
        return np.where(self.count > 0, self.total_mean, np.nan)

    @property
    def std(self) -> Floats:
        """Sample standard deviation (n - 1) of each cell, NaN below two values."""
        variance = self.deviations / np.maximum(self.count - 1, 1)
        return np.where(self.count > 1, np.sqrt(variance), np.nan)


@dataclass(frozen=True)
class Sampled:
    """One text's values in a sample, with what identifies it."""

    rank: str
    line: int
    part: int
    id: str
    values: Floats


@dataclass
class Sample:
    """At most `size` texts, those with the smallest hash(seed, text): the same under any order and any cut.

    >>> sample = Sample.empty(size=2, seed=0)
    >>> sample.add([], np.empty((0, 3)))
    >>> sample.rows()
    []
    """

    size: int
    seed: int
    items: list[Sampled] = field(default_factory=list)

    @classmethod
    def empty(cls, size: int, seed: int) -> Self:
        """Nothing seen yet: the identity of merge. Raises ValueError for a negative size."""
        if size < 0:
            raise ValueError(f"a sample has 0 texts or more, not {size}")
        return cls(size, seed)

    def add(self, texts: Sequence[TokenizedText], values: Floats) -> None:
        """Offer texts with their values (text, ...); those stay whose hash is among the smallest."""
        for text, own in zip(texts, values, strict=True):
            self.items.append(Sampled(_rank(self.seed, text.text), text.line, text.part, text.id, np.array(own)))
        if len(self.items) >= 2 * self.size + 64:
            self.items = self._smallest(self.items)

    def merge(self, other: Self) -> Self:
        """The smallest hashes of both sides."""
        if (self.size, self.seed) != (other.size, other.seed):
            raise ValueError("samples of different size or seed do not merge")
        return type(self)(self.size, self.seed, self._smallest(self.items + other.items))

    def rows(self) -> list[Sampled]:
        """The kept texts in the order of their lines."""
        return sorted(self._smallest(self.items), key=lambda item: (item.line, item.part))

    def limited(self, size: int) -> Self:
        """The sample that `size` would have kept; `size` may not exceed this one's."""
        return type(self)(size, self.seed, sorted(self.items, key=_order)[:size])

    def _smallest(self, items: Sequence[Sampled]) -> list[Sampled]:
        return sorted(items, key=_order)[: self.size]


@lru_cache(maxsize=512)  # of a batch: several analyses of one run ask for the same
def _rank(seed: int, text: str) -> str:
    return hashlib.blake2b(f"{seed}\0{text}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _order(item: Sampled) -> tuple[str, int, int]:
    return item.rank, item.line, item.part


@dataclass
class Counts:
    """How many texts and tokens were seen.

    >>> counts = Counts()
    >>> counts.add([7, 9])
    >>> counts
    Counts(texts=2, tokens=16)
    """

    texts: int = 0
    tokens: int = 0

    def add(self, lengths: Sequence[int]) -> None:
        """Add a batch of texts by their token counts."""
        self.texts += len(lengths)
        self.tokens += sum(lengths)

    def merge(self, other: Self) -> Self:
        """Both counts together."""
        return type(self)(self.texts + other.texts, self.tokens + other.tokens)


@dataclass
class Totals:
    """Plain sums over texts of every cell of an array.

    >>> totals = Totals.empty(2)
    >>> totals.add(np.array([1.0, 2.0]))
    >>> totals.merge(totals).values.tolist()
    [2.0, 4.0]
    """

    values: Floats

    @classmethod
    def empty(cls, *shape: int) -> Self:
        """Nothing seen yet: the identity of merge."""
        return cls(np.zeros(shape))

    def add(self, values: Floats) -> None:
        """Add one text's values."""
        self.values += values

    def merge(self, other: Self) -> Self:
        """Both sums together."""
        return type(self)(self.values + other.values)


@dataclass
class Maxima:
    """The largest value of every cell of an array; NaN where nothing was seen, and NaN counts as nothing.

    >>> maxima = Maxima.empty(2)
    >>> maxima.add(np.array([1.0, 5.0]))
    >>> maxima.add(np.array([3.0, 2.0]))
    >>> maxima.values.tolist()
    [3.0, 5.0]
    """

    values: Floats

    @classmethod
    def empty(cls, *shape: int) -> Self:
        """Nothing seen yet: the identity of merge."""
        return cls(np.full(shape, np.nan))

    def add(self, values: Floats) -> None:
        """Add one text's values."""
        self.values = np.fmax(self.values, values)

    def merge(self, other: Self) -> Self:
        """The larger of both, cell by cell."""
        return type(self)(np.fmax(self.values, other.values))


@dataclass
class TopTokens:
    """For every cell the `size` tokens of the vocabulary with the largest value at any of their occurrences.

    `ids` and `values` are (cell, place), by falling value and then by rising id; -1 and -inf where there are fewer.
    The same under any order and any cut of the texts: what is among the largest of all is among those of its part.

    >>> top = TopTokens.empty(1, size=2)
    >>> top.add([7, 5, 7, 6], ["g", "e", "g", "f"], np.array([[0.1, 0.2, 0.4, 0.3]]))
    >>> top.ids.tolist(), top.values.tolist(), top.pieces
    ([[7, 6]], [[0.4, 0.3]], {6: 'f', 7: 'g'})
    """

    size: int
    ids: NDArray[np.int64]
    values: Floats
    pieces: dict[int, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, cells: int, *, size: int) -> Self:
        """Nothing seen yet: the identity of merge."""
        return cls(size, np.full((cells, size), -1), np.full((cells, size), -np.inf))

    def add(self, ids: Sequence[int], pieces: Sequence[str], values: Floats) -> None:
        """Offer the tokens of one text, each with its value in every cell (cell, token)."""
        known, first, place = np.unique(np.asarray(ids, np.int64), return_index=True, return_inverse=True)
        if not self.size or not len(known):
            return
        order = np.argsort(place, kind="stable")
        starts = np.searchsorted(place[order], np.arange(len(known)))
        largest = np.maximum.reduceat(values[:, order], starts, axis=1)
        offered = largest_of_rows(np.broadcast_to(known, largest.shape), largest, self.size)
        self._take(*offered, {int(known[at]): pieces[first[at]] for at in range(len(known))})

    def merge(self, other: Self) -> Self:
        """The largest of both sides."""
        if self.size != other.size:
            raise ValueError("tables of different size do not merge")
        merged = type(self)(self.size, self.ids, self.values, dict(self.pieces))
        merged._take(other.ids, other.values, other.pieces)
        return merged

    def _take(self, ids: NDArray[np.int64], values: Floats, pieces: dict[int, str]) -> None:
        every, offered = np.hstack([self.ids, ids]), np.hstack([self.values, values])
        own = np.arange(every.shape[1]) < self.ids.shape[1]
        twins = (every[:, :, None] == every[:, None, :]) & (own[:, None] != own[None, :])
        # Of a token that both sides hold the larger value stays, and of equal ones ours.
        beaten = offered[:, None, :] > offered[:, :, None]
        tied = (offered[:, None, :] == offered[:, :, None]) & own[None, :]
        lost = (twins & (beaten | tied)).any(axis=2)
        self.ids, self.values = largest_of_rows(np.where(lost, -1, every), np.where(lost, -np.inf, offered), self.size)
        both = self.pieces | pieces
        self.pieces = {token: both[token] for token in sorted(set(self.ids.ravel().tolist()) - {-1})}


@dataclass
class Tally:
    """How many texts had each whole number in every cell of an array; NaN cells are counted nowhere.

    >>> tally = Tally((2,))
    >>> tally.add(np.array([[1.0, 0.0], [1.0, float("nan")], [-3.0, 0.0]]))
    >>> [values.round(3).tolist() for values in (tally.total, tally.share(1), *tally.most)]
    [[3.0, 2.0], [0.667, 0.0], [1.0, 0.0], [0.667, 1.0]]
    """

    shape: tuple[int, ...]
    counts: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def add(self, texts: Floats) -> None:
        """Add values with a leading axis of texts."""
        for value in np.unique(texts[~np.isnan(texts)]).astype(int).tolist():
            self.counts[value] = self._of(value) + (texts == value).sum(axis=0)

    def merge(self, other: Self) -> Self:
        """Both counts together."""
        if self.shape != other.shape:
            raise ValueError(f"tallies of different shape do not merge: {self.shape}, {other.shape}")
        values = sorted(self.counts.keys() | other.counts.keys())
        return type(self)(self.shape, {value: self._of(value) + other._of(value) for value in values})

    @property
    def total(self) -> Floats:
        """How many texts were counted in each cell."""
        return sum((count.astype(float) for count in self.counts.values()), np.zeros(self.shape))

    def share(self, value: int) -> Floats:
        """The share of a value in each cell, NaN where nothing was counted."""
        total = self.total
        return self._of(value) / np.where(total > 0, total, np.nan)

    @property
    def most(self) -> tuple[Floats, Floats]:
        """The most frequent value of each cell and its share; of equal ones the nearest to 0, and then the negative."""
        if not self.counts:
            return np.full(self.shape, np.nan), np.full(self.shape, np.nan)
        values = sorted(self.counts, key=lambda value: (abs(value), value))
        shares = np.stack([self.share(value) for value in values])
        frequent = np.where(np.isnan(shares[0]), np.nan, np.array(values, dtype=float)[shares.argmax(axis=0)])
        return frequent, shares.max(axis=0)

    def _of(self, value: int) -> NDArray[np.int64]:
        return self.counts.get(value, np.zeros(self.shape, np.int64))
