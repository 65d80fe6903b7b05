"""Modularity of a map cut into runs of neighbours: the best such cut, exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def best_runs(weights: Floats, most: int = 8) -> tuple[Floats, Floats]:
    """The largest modularity of a map cut into 2 to `most` runs of neighbours, and the least number of runs with it.

    The map is symmetrised, S = A + A^T, and weights of a unit on itself are left out: they tie it to no other. A run r
    adds S(r, r) / S(all, all) - (S(r, all) / S(all, all))^2 (Newman 2004). Exact, by dynamic programming over where
    the last run begins.

    Shape (..., unit, unit) to (...) and (...). Modularity lies between -0.5 and 1; NaN below two units and where no
    weight lies between units.

    >>> pairs = np.kron(np.eye(2), np.ones((2, 2)))
    >>> [value.item() for value in best_runs(pairs)]
    [0.5, 2.0]
    """
    maps, units = weights.shape[:-2], weights.shape[-1]
    if units < 2:
        return np.full(maps, np.nan), np.full(maps, np.nan)
    every = _best_of_each_number(_prefix_sums(weights.reshape(-1, units, units)), min(most, units))[1:]
    value = every.max(axis=0)
    # Of cuts alike but for rounding the one with the fewest runs.
    runs = 2.0 + (every >= value - 1e-9).argmax(axis=0)
    return value.reshape(maps), np.where(np.isnan(value), np.nan, runs).reshape(maps)


def _prefix_sums(weights: Floats) -> Floats:
    """Sums of S over units before i and before j, S scaled to sum to 1: (map, unit, unit) to (i, j, map).

    Maps come last, so that all that follows goes over many at once, however few their units.
    """
    units = weights.shape[-1]
    last = weights.transpose(1, 2, 0)
    sums = np.zeros((units + 1, units + 1, len(weights)))
    np.add(last, last.swapaxes(0, 1), out=sums[1:, 1:])
    sums[np.arange(units + 1), np.arange(units + 1)] = 0.0
    for at in range(2, units + 1):
        sums[at] += sums[at - 1]
    for at in range(2, units + 1):
        sums[:, at] += sums[:, at - 1]
    total = sums[-1, -1]
    sums /= np.where(total > 0, total, np.nan)
    return sums


def _best_of_each_number(sums: Floats, most: int) -> Floats:
    """The largest modularity with exactly 1, 2 ... `most` runs: (i, j, map) to (number, map)."""
    ends, maps = len(sums), sums.shape[-1]
    degrees = sums[-1]
    within = sums[np.arange(ends), np.arange(ends)]
    best = np.full((most, ends, maps), -np.inf)  # of the first so many units, in one run more than the first index
    for end in range(1, ends):
        inside = within[end] + within[:end] - 2.0 * sums[end, :end]
        gains = inside - np.square(degrees[end] - degrees[:end])
        best[0, end] = gains[0]
        np.max(best[:-1, :end] + gains, axis=1, out=best[1:, end])
    return best[:, -1]
