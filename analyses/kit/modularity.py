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

    Shape (unit, unit, map) to (map) and (map): maps come last, so that all goes over many at once, however few their
    units. Modularity lies between -0.5 and 1; NaN below two units and where no weight lies between units.

    >>> pairs = np.kron(np.eye(2), np.ones((2, 2)))
    >>> [value.item() for value in best_runs(pairs[..., None])]
    [0.5, 2.0]
    """
    units, maps = weights.shape[1:]
    if units < 2:
        return np.full(maps, np.nan), np.full(maps, np.nan)
    sums, total = _prefix_sums(weights)
    every = _best_of_each_number(sums, min(most, units))[1:] / np.where(total > 0, total, np.nan)
    value = every.max(axis=0)
    # Of cuts alike but for rounding the one with the fewest runs.
    runs = 2.0 + (every >= value - 1e-9).argmax(axis=0)
    return value, np.where(np.isnan(value), np.nan, runs)


def _prefix_sums(weights: Floats) -> tuple[Floats, Floats]:
    """Sums of B over the units before i and before j, and the sum of S: (unit, unit, map) to (i, j, map), (map).

    B is S - k k^T / sum S with the degrees k, so that a run adds the sum of B over it, divided by the sum of S.
    """
    units, maps = weights.shape[1:]
    sums = np.zeros((units + 1, units + 1, maps))
    inner = sums[1:, 1:]
    np.add(weights, weights.swapaxes(0, 1), out=inner)
    inner[np.arange(units), np.arange(units)] = 0.0
    degrees = _summed(inner)
    total = _summed(degrees)
    scaled = degrees / np.where(total > 0, total, 1.0)
    for at in range(units):
        inner[at] -= degrees[at] * scaled
        inner[at] += sums[at, 1:]
    for at in range(2, units + 1):
        sums[:, at] += sums[:, at - 1]
    return sums, total


def _summed(rows: Floats) -> Floats:
    """The sum over the first axis, in its order: NumPy's own depends on how long the others are."""
    total = np.zeros(rows.shape[1:])
    for row in rows:
        total += row
    return total


def _best_of_each_number(sums: Floats, most: int) -> Floats:
    """The largest sum of B over exactly 1, 2 ... `most` runs: (i, j, map) to (number, map).

    A run from i to j holds b(j) + b(i) - 2 b(i, j), with b the prefix sums and b(i) that of the diagonal.
    The sums are overwritten.
    """
    ends, maps = len(sums), sums.shape[-1]
    own = sums[np.arange(ends), np.arange(ends)]
    doubled = np.multiply(sums, 2.0, out=sums)
    room = np.empty((most - 1, ends, maps))
    best = np.full((most, ends, maps), -np.inf)  # of the first so many units, in one run more than the first index
    best[0, 1:] = 2.0 * own[1:]  # b(i) is added once more, for the run that begins at i
    for end in range(1, ends):
        before = np.subtract(best[:-1, :end], doubled[end, :end], out=room[:, :end])
        np.add(before.max(axis=1), 2.0 * own[end], out=best[1:, end])
    return best[:, -1] - own[-1]
