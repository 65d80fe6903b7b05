"""How the entries of vectors are distributed: central moments and histograms that merge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CONSTANT = 2.0**-45
"""A standard deviation below this share of the mean is rounding: such values are constant."""
BINS = 2**12
SHIFT = 20
"""Bits of a float32 that a bin leaves out: what stays is the sign, the exponent and three bits of the fraction."""


def central_sums(values: Floats) -> Floats:
    """Number, mean and sums of (x - mean)^2, ^3 and ^4, on a last axis. Shape (..., entry) to (..., 5).

    The values are overwritten by x - mean: memory at hand is faster than new.

    >>> central_sums(np.array([0.0, 0.0, 0.0, 4.0])).tolist()
    [4.0, 1.0, 12.0, 24.0, 84.0]
    """
    count = values.shape[-1]
    # Sums whose order does not depend on how many others are taken beside them; einsum's does for long rows.
    mean = values.sum(axis=-1) / max(count, 1)
    rest = np.subtract(values, mean[..., None], out=values)
    squares = rest * rest
    sums = np.empty((*mean.shape, 5))
    sums[..., 0], sums[..., 1] = count, mean
    for power, pair in ((2, (rest, rest)), (3, (squares, rest)), (4, (squares, squares))):
        sums[..., power] = np.vecdot(*pair)
    return sums


def pooled(first: Floats, second: Floats) -> Floats:
    """The central sums (..., 5) of both sets of values together, by the exact pairwise update (Pebay 2008).

    An empty side leaves the other's bits untouched.

    >>> pooled(central_sums(np.array([0.0])), central_sums(np.array([0.0, 0.0, 4.0]))).round(12).tolist()
    [4.0, 1.0, 12.0, 24.0, 84.0]
    """
    (n, mean, two, three, four), (m, other_mean, *other) = np.moveaxis(first, -1, 0), np.moveaxis(second, -1, 0)
    total = np.maximum(n + m, 1.0)
    rest, share, step = n / total, m / total, other_mean - mean
    cross = n * share * step**2
    fourth = cross * step**2 * (rest**2 - rest * share + share**2)
    fourth += 6 * step**2 * (rest**2 * other[0] + share**2 * two) + 4 * step * (rest * other[1] - share * three)
    third = cross * step * (rest - share) + 3 * step * (rest * other[0] - share * two)
    sums = (two + other[0] + cross, three + other[1] + third, four + other[2] + fourth)
    return np.stack([n + m, mean + step * share, *sums], axis=-1)


@dataclass
class CentralMoments:
    """Number, mean and central sums up to the fourth of every cell, (..., 5) as `central_sums` has them.

    >>> moments = CentralMoments.empty(1)
    >>> moments.add([central_sums(np.array([[0.0, 0.0]])), central_sums(np.array([[0.0, 4.0]]))])
    >>> moments.skewness.round(4).tolist(), moments.excess_kurtosis.round(4).tolist()
    ([1.1547], [-0.6667])
    """

    sums: Floats

    @classmethod
    def empty(cls, *shape: int) -> Self:
        """Nothing seen yet: the identity of merge."""
        return cls(np.zeros((*shape, 5)))

    def add(self, texts: Iterable[Floats]) -> None:
        """Add the central sums of texts, one after the other."""
        for own in texts:
            self.sums = pooled(self.sums, own)

    def merge(self, other: Self) -> Self:
        """Both sets of values together."""
        return type(self)(pooled(self.sums, other.sums))

    def at(self, index: Any) -> Self:
        """The moments of the cells that a NumPy index selects."""
        return type(self)(self.sums[index])

    @property
    def count(self) -> NDArray[np.int64]:
        """How many values each cell has seen."""
        return self.sums[..., 0].astype(np.int64)

    @property
    def mean(self) -> Floats:
        """Mean of each cell; NaN without values."""
        return np.where(self.sums[..., 0] > 0, self.sums[..., 1], np.nan)

    @property
    def std(self) -> Floats:
        """Standard deviation of each cell (all values are seen: divided by n); NaN without values."""
        count = self.sums[..., 0]
        return np.where(count > 0, np.sqrt(self.sums[..., 2] / np.maximum(count, 1.0)), np.nan)

    @property
    def skewness(self) -> Floats:
        """m3 / m2^1.5 (biased, as scipy.stats.skew); NaN for constant values."""
        return self._standardised(3)

    @property
    def excess_kurtosis(self) -> Floats:
        """m4 / m2^2 - 3 (biased, as scipy.stats.kurtosis): 0 for a normal distribution; NaN for constant values."""
        return self._standardised(4) - 3.0

    @property
    def jarque_bera(self) -> Floats:
        """The Jarque-Bera statistic divided by n: skewness^2 / 6 + excess kurtosis^2 / 24; 0 for a normal one."""
        return self.skewness**2 / 6 + self.excess_kurtosis**2 / 24

    def _standardised(self, power: int) -> Floats:
        count = np.maximum(self.sums[..., 0], 1.0)
        deviation = np.sqrt(self.sums[..., 2] / count)
        varies = deviation > CONSTANT * np.abs(self.sums[..., 1])
        scale = np.where(varies, deviation, 1.0) ** power
        return np.where(varies, self.sums[..., power] / count / scale, np.nan)


def bin_counts(values: NDArray[Any]) -> Floats:
    """How many of each row's values fall into the BINS fixed bins, the same for all data: (row, ...) to (row, BINS).

    A bin holds the float32 numbers of one sign and exponent whose fraction starts with the same three bits: eight
    bins to each power of two.

    >>> counts = bin_counts(np.array([[1.0, 1.1, -1.2]]))[0]
    >>> low, high = bin_edges()
    >>> [(float(low[at]), float(high[at]), int(counts[at])) for at in np.flatnonzero(counts)]
    [(1.0, 1.125, 2), (-1.25, -1.125, 1)]
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(len(values), -1) >> SHIFT
    # torch counts these as they are, and other threads go on meanwhile.
    found = [torch.bincount(row, minlength=BINS) for row in torch.from_numpy(bits.view(np.int32))]
    return torch.stack(found).numpy().astype(np.float64)


def bin_edges() -> tuple[Floats, Floats]:
    """The lower and upper edge of each bin: two arrays (BINS,)."""
    exponent, eighths = np.divmod(np.arange(BINS // 2 + 1), 8)
    edges = np.ldexp((exponent > 0) + eighths / 8, np.maximum(exponent, 1) - 127)
    near, far = edges[:-1], edges[1:]
    return np.concatenate([near, -far]), np.concatenate([far, -near])


@dataclass(frozen=True)
class Histogram:
    """Counts between rising edges: (bin,) each, for finite values."""

    low: Floats
    high: Floats
    counts: Floats

    @property
    def density(self) -> Floats:
        """Share of all values per unit of length: the area below it is 1."""
        return self.counts / max(self.counts.sum(), 1.0) / (self.high - self.low)


def histogram(counts: Floats, least: float = 2.0**-6) -> Histogram:
    """Bins from the lowest filled one to the highest, those within `least` of 0, a power of two, as one.

    >>> found = histogram(bin_counts(np.array([[0.0, -1e-9, 0.017]]))[0])
    >>> found.low.tolist(), found.high.tolist(), found.counts.tolist()
    ([-0.015625, 0.015625], [0.015625, 0.017578125], [2.0, 1.0])
    """
    low, high = bin_edges()
    order = np.concatenate([np.arange(BINS - 1, BINS // 2 - 1, -1), np.arange(BINS // 2)])
    low, high, counts = low[order], high[order], counts[order]
    middle = (low >= -least) & (high <= least)
    first, last = np.flatnonzero(middle)[[0, -1]]
    low, high = (
        np.concatenate([side[:first], [edge], side[last + 1 :]]) for side, edge in ((low, -least), (high, least))
    )
    counts = np.concatenate([counts[:first], [counts[first : last + 1].sum()], counts[last + 1 :]])
    filled = np.flatnonzero(counts)
    span = slice(filled[0], filled[-1] + 1) if len(filled) else slice(0, 0)
    return Histogram(low[span], high[span], counts[span])
