"""Items laid out by their distances: in a row of leaves, on a plane, and each with its nearest others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform
from sklearn.manifold import MDS

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


def clustered(distances: Floats) -> tuple[Floats, Whole]:
    """Average linkage of at least two items, and its leaves in the order in which neighbours are closest.

    Shape (item, item), symmetric, to a SciPy linkage matrix and (item,). Optimal leaf order: Bar-Joseph et al. 2001.

    >>> tree, order = clustered(np.abs(np.subtract.outer([0.0, 5.0, 1.0], [0.0, 5.0, 1.0])))
    >>> order.tolist()
    [1, 2, 0]
    """
    tree = linkage(squareform(distances, checks=False), method="average", optimal_ordering=True)
    return tree, leaves_list(tree).astype(np.int64)


def on_plane(distances: Floats) -> tuple[Floats, float]:
    """Metric multidimensional scaling to two dimensions, and its normalised stress (Kruskal's stress-1, 0 is perfect).

    Shape (item, item), symmetric, to (item, 2). SMACOF from the classical solution, so without any chance; turned so
    that the first axis spreads the most.

    >>> places, stress = on_plane(np.abs(np.subtract.outer([0.0, 3.0, 1.0], [0.0, 3.0, 1.0])))
    >>> bool(stress < 1e-3), np.ptp(places, axis=0).round(2).tolist()
    (True, [3.0, 0.0])
    """
    if not distances.any():
        return np.zeros((len(distances), 2)), 0.0
    scaling = MDS(
        n_components=2,
        metric="precomputed",
        metric_mds=True,
        init="classical_mds",
        n_init=1,
        eps=1e-10,
        max_iter=1000,
        normalized_stress=True,
    )
    places = scaling.fit_transform(distances)
    return _principal_axes(places), float(scaling.stress_)


def _principal_axes(places: Floats) -> Floats:
    """Centred and turned so that axes fall in spread; signs so that each axis's largest deviation is positive."""
    centred = places - places.mean(axis=0)
    turned = centred @ np.linalg.svd(centred, full_matrices=False)[2].T
    largest = turned[np.abs(turned).argmax(axis=0), range(turned.shape[1])]
    return turned * np.where(largest < 0, -1.0, 1.0)


def nearest(distances: Floats, count: int) -> Whole:
    """The `count` nearest others of every item, the nearest first; ties in the order of the items.

    Shape (item, item), without NaN, to (item, at most count).

    >>> nearest(np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 0.5], [2.0, 0.5, 0.0]]), 1).tolist()
    [[1], [2], [1]]
    """
    others = distances.copy()
    np.fill_diagonal(others, np.inf)
    return np.argsort(others, axis=1, kind="stable")[:, : min(count, len(distances) - 1)]
