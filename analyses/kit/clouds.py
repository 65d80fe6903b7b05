"""The cloud of token vectors at every depth: its spectrum and its outlier dimensions, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .covariance import Covariance
from .isotropy_metrics import outlier_bound, varies
from .result import Table

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
SMALLEST = float(np.finfo(np.float64).tiny)

KEYS = {
    "depth": "0 is the first layer's input, l + 1 the output of layer l",
    "dimensions": "all, or without_outliers: without the dimensions that isotropy-outliers lists for this depth",
}
OUTLIERS = {
    "depth": KEYS["depth"],
    "dimension": "number of the dimension, from 0",
    "by": "what lies beyond its bound: mean (its absolute value), variance, or both",
    "mean": "mean of the dimension over tokens",
    "mean_bound": "mean + k standard deviations of |mean| over dimensions",
    "variance": "variance of the dimension over tokens (n - 1)",
    "variance_bound": "mean + k standard deviations of the variance over dimensions",
    "variance_share": "its share of the variance of all dimensions, 0 to 1",
}
SPECTRUM = KEYS | {
    "component": "principal component, from 0, by falling variance",
    "variance": "eigenvalue of the covariance (n - 1)",
    "share": "its share of their sum; 0 without variance",
    "cumulative_share": "share of the components as far as this one",
}


@dataclass(frozen=True)
class Cloud:
    """The tokens of one depth: means and variances of all dimensions, and the covariance of the dimensions `left`.

    `variances` are its eigenvalues, rising: zeros without variance, none where only the diagonal was kept.
    """

    depth: int
    dimensions: str
    mean: Floats
    variance: Floats
    mean_bound: float
    variance_bound: float
    left: Flags
    variances: Floats


def clouds_of(sums: Covariance, depths: Sequence[int], deviations: float) -> Iterator[Cloud]:
    """Every depth with all dimensions and then without outliers, of whole covariances or of diagonals (cell, 1, 1)."""
    degrees = max(sums.count - 1, 1)
    means = sums.mean.reshape(len(depths), -1)
    diagonals = np.diagonal(sums.products, axis1=1, axis2=2).reshape(means.shape) / degrees
    for at, depth in enumerate(depths):
        mean, variance = means[at], diagonals[at]
        bounds = outlier_bound(np.abs(mean), deviations), outlier_bound(variance, deviations)
        inside = (np.abs(mean) <= bounds[0]) & (variance <= bounds[1])
        for dimensions, left in (("all", np.ones_like(inside)), ("without_outliers", inside)):
            products = sums.products[at] if sums.products.shape[-1] > 1 else None
            yield Cloud(depth, dimensions, mean, variance, *bounds, left, _spectrum(products, degrees, mean, left))


def _spectrum(products: Floats | None, degrees: int, mean: Floats, left: Flags) -> Floats:
    if products is None:
        return np.empty(0)
    inner = products[np.ix_(left, left)] / degrees
    if not varies(np.trace(inner), mean[left]):
        return np.zeros(len(inner))
    return np.maximum(np.linalg.eigvalsh(inner), 0.0)


def outlier_table(clouds: Sequence[Cloud]) -> Table:
    """The outlier dimensions of every depth, a row each."""
    rows = [
        (
            cloud.depth,
            int(dimension),
            _reason(cloud, int(dimension)),
            cloud.mean[dimension],
            cloud.mean_bound,
            cloud.variance[dimension],
            cloud.variance_bound,
            cloud.variance[dimension] / max(cloud.variance.sum(), SMALLEST),
        )
        for cloud in clouds
        if cloud.dimensions != "all"
        for dimension in np.flatnonzero(~cloud.left)
    ]
    kinds = dict.fromkeys(OUTLIERS, float) | {"depth": int, "dimension": int, "by": object}
    frame = pd.DataFrame(rows, columns=list(OUTLIERS)).astype(kinds)
    return Table("isotropy-outliers", "Outlier dimensions by depth", frame, OUTLIERS)


def _reason(cloud: Cloud, dimension: int) -> str:
    by_mean = abs(cloud.mean[dimension]) > cloud.mean_bound
    by_variance = cloud.variance[dimension] > cloud.variance_bound
    return "both" if by_mean and by_variance else "mean" if by_mean else "variance"


def spectrum_table(clouds: Sequence[Cloud]) -> Table:
    """Every eigenvalue of every covariance."""
    frames = []
    for cloud in clouds:
        variances = cloud.variances[::-1]
        shares = variances / max(variances.sum(), SMALLEST)
        values = (cloud.depth, cloud.dimensions, np.arange(len(variances)), variances, shares, shares.cumsum())
        frames.append(pd.DataFrame(dict(zip(SPECTRUM, values, strict=True))))
    frame = pd.concat(frames, ignore_index=True)
    return Table("isotropy-spectrum", "Spectrum of the covariance by depth", frame, SPECTRUM)
