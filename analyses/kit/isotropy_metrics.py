"""How evenly a cloud of vectors fills its space: measures of a spectrum, outlier dimensions, intrinsic dimension."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from .maths import lengths, mean_cosine
from .spectra import FLOAT32_EPSILON, effective_rank

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

SPECTRUM: Mapping[str, str] = {
    "first_component": "share of the variance along the first principal component (centred), 1 / dimensions to 1; "
    "empty without variance",
    "isoscore": "IsoScore (Rudman et al. 2022), (participation ratio - 1) / (dimensions - 1): 0 on a line to 1 for "
    "equal variances; empty without variance",
    "participation_ratio": "(sum lambda)^2 / sum lambda^2 of the covariance's eigenvalues, 1 to dimensions; empty "
    "without variance",
    "effective_rank": "exp of the entropy of lambda / sum lambda, the effective rank (Roy and Vetterli 2007) of the "
    "covariance, 1 to dimensions; empty without variance",
}


def varies(total_variance: Floats, mean: Floats) -> Flags:
    """Whether vectors differ by more than what rounding to float32 leaves of |mean|. Shapes (...), (..., width).

    >>> varies(np.array([1e-16, 1.0]), np.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [False, True]
    """
    return total_variance > FLOAT32_EPSILON**2 * (mean**2).sum(axis=-1)


def spectrum_values(variances: Floats) -> Floats:
    """The values of SPECTRUM on a last axis, from the eigenvalues (..., dimension) of covariances.

    NaN without variance; IsoScore is NaN in one dimension, where every cloud is even and a line at once.

    >>> spectrum_values(np.array([3.0, 1.0])).round(4).tolist()
    [0.75, 0.6, 1.6, 1.7548]
    """
    width, total = variances.shape[-1], variances.sum(axis=-1)
    there = total > 0
    shares = variances / np.where(there, total, 1.0)[..., None]
    squares = (shares**2).sum(axis=-1)
    ratio = 1 / np.where(there, squares, 1.0)
    iso = (ratio - 1) / (width - 1) if width > 1 else np.full_like(ratio, np.nan)
    values = np.stack([shares.max(axis=-1, initial=0.0), iso, ratio, effective_rank(variances)], axis=-1)
    return np.where(there[..., None], values, np.nan)


def outlier_bound(values: Floats, deviations: float) -> float:
    """Mean + `deviations` standard deviations of the values of all dimensions: what lies beyond it is an outlier.

    >>> outlier_bound(np.array([0.0, 2.0]), 3)
    4.0
    """
    return float(values.mean() + deviations * values.std())


def random_pair_cosine(vectors: Floats) -> float:
    """Mean cosine over all pairs of vectors (token, width); zero vectors have no direction. NaN below two.

    >>> random_pair_cosine(np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])).__round__(4)
    0.3333
    """
    units = unit_vectors(vectors)
    count = float(len(units))
    # Rounding may carry equal directions a last bit above 1.
    return float(mean_cosine(np.minimum(lengths(units.sum(axis=0)), count), np.array(count)))


def unit_vectors(vectors: Floats) -> Floats:
    """The directions (token, width) of the vectors that have one.

    >>> unit_vectors(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6, 0.8]]
    """
    size = lengths(vectors)
    return vectors[size > 0] / size[size > 0, None]


DISCARDED = 0.1
"""Share of the largest ratios that TwoNN leaves out."""


def two_nn(points: Floats) -> float:
    """Intrinsic dimension by the two nearest neighbours (Facco et al. 2017), of different points (point, width).

    With mu = r2 / r1 of every point and F the share of smaller mu, -log(1 - F) = d log mu; d is the slope through the
    origin over the nine tenths of smallest mu. It supposes that density is even as far as the second neighbour and
    that r1 > 0; with few points high dimensions come out too low. NaN below four points or when all mu are 1.
    """
    if len(points) < 4:
        return float("nan")
    first, second = _two_nearest(points)
    mu = np.sort(np.log(second / first))[: int(len(points) * (1 - DISCARDED))]
    spread = -np.log1p(-np.arange(len(mu)) / len(points))
    return float(mu @ spread / (mu @ mu)) if mu @ mu > 0 else float("nan")


def _two_nearest(points: Floats) -> tuple[Floats, Floats]:
    """Distances to the two nearest neighbours: found by products of some rows at a time, then taken exactly."""
    centred = points - points.mean(axis=0)
    squares, nearest = (centred**2).sum(axis=1), np.empty((len(points), 3), np.intp)
    for rows in (slice(start, start + 512) for start in range(0, len(points), 512)):
        distances = squares - 2 * centred[rows] @ centred.T  # + |x|^2, which does not change the order in a row
        np.fill_diagonal(distances[:, rows], np.inf)
        nearest[rows] = np.argpartition(distances, 2, axis=1)[:, :3]
    exact = np.sort(np.stack([lengths(points - points[nearest[:, at]]) for at in range(3)], axis=1), axis=1)
    return exact[:, 0], exact[:, 1]
