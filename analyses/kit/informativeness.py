"""Informativeness of a kind of pairs: how far its projection kernels lie from those of random subspaces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtr

from .comparison import Comparison, Heads
from .result import Figure, Heatmap, Table
from .subspaces import LETTERS

Floats = NDArray[np.float64]
PLACES = np.arange(-90, 91) / 10
"""Of the sum that stands for the integral over N(0, 1): beyond 9 deviations lie 2e-19 of it."""


def informativeness(z: Floats) -> float:
    """KL(N(0, 1) || f) in nats, 0 or more, f a Gaussian kernel density of `z`; NaN for fewer than two different values.

    With z = (value - mean) / deviation under chance this is KL(random || empirical): a normal density of the random
    moments against a kernel density of the values with Scott's bandwidth, n^(-1/5) times their standard deviation.
    The integral is a sum over steps of a tenth, of logarithms: f is nowhere 0, and where no value lies near, its
    tails decide. Which estimator Yamagiwa, Takase and Shimodaira use for theirs (arXiv 2601.10266) is not known;
    this one is our own choice.

    >>> round(informativeness(np.linspace(-40.0, 40.0, 8001)), 2)  # even over 80 deviations
    2.96
    """
    width = bandwidth(z)
    if not width > 0:
        return float("nan")
    weights = np.exp(-0.5 * PLACES**2)
    entropy = 0.5 * np.log(2.0 * np.pi * np.e)
    return max(0.0, float(-entropy - weights @ _log_density(PLACES, z, width) / weights.sum()))


def bandwidth(values: Floats) -> float:
    """Scott's rule: n^(-1/5) times the standard deviation (n - 1); 0 for fewer than two values, or for equal ones.

    >>> bandwidth(np.array([0.0, 2.0] * 16)).__round__(6)
    0.508001
    """
    return float(values.std(ddof=1) * len(values) ** -0.2) if len(values) > 1 and np.ptp(values) > 0 else 0.0


def _log_density(places: Floats, values: Floats, width: float) -> Floats:
    """ln of the kernel density at every place; the logarithm of a sum, so that nothing underflows."""
    exponents = (places[:, None] - values) / width
    exponents *= -0.5 * exponents
    nearest = exponents.max(axis=1)
    exponents -= nearest[:, None]
    total = np.exp(exponents, out=exponents).sum(axis=1)
    return np.asarray(nearest + np.log(total / (len(values) * width * np.sqrt(2.0 * np.pi))))


def informativeness_tables(heads: Heads) -> tuple[Table, ...]:
    """A row for each pair of subspaces, and, where all sixteen are there, the informativeness as a 4 x 4 table."""
    frame = pd.DataFrame([_row(heads, one) for one in heads.comparisons])
    title = "Informativeness of pairs of subspaces: KL(random || empirical projection kernels)"
    table = Table("heads-informativeness", title, frame, COLUMNS)
    if len(frame) < len(LETTERS) ** 2:
        return (table,)
    wide = frame.pivot(index="subspace", columns="other_subspace", values="informativeness")
    wide = wide.loc[list(LETTERS), list(LETTERS)].rename_axis(columns=None).reset_index()
    about = {"subspace": COLUMNS["subspace"]}
    about |= {letter: f"{COLUMNS['informativeness']}; other head's subspace {letter}" for letter in LETTERS}
    return table, Table("heads-informativeness-grid", title, wide, about)


COLUMNS = {
    "subspace": "subspace of the head: Q, K, V or O",
    "other_subspace": "subspace of the other head",
    "pairs": "pairs of different heads that count (the pairs of --direction; where both directions agree, once)",
    "mean": "mean projection kernel of these pairs",
    "std": "standard deviation over the pairs (n - 1)",
    "random_mean": "mean for independent random subspaces",
    "random_std": "their standard deviation",
    "informativeness": (
        "KL(random || empirical) in nats, 0 or more: a normal density of the random moments against a Gaussian kernel "
        "density of the values (our own choice of estimator)"
    ),
    "bandwidth": "bandwidth of the kernel density, in units of the projection kernel (Scott's rule)",
    "beyond": "share of the random density beyond the least and the largest value, where the kernels' tails decide",
}


def _row(heads: Heads, one: Comparison) -> dict[str, object]:
    counted = heads.pairing.listed & ~np.eye(len(heads.places), dtype=bool) & ~np.isnan(one.columns["z"])
    if not one.directed:
        counted &= ~(np.tril(counted) & np.tril(counted.T))  # each pair once
    values, z = one.values[counted], one.columns["z"][counted]
    mean, std = (_mean(one.columns[name][counted]) for name in ("random_mean", "random_std"))
    return {
        "subspace": one.kind[0],
        "other_subspace": one.kind[1],
        "pairs": len(values),
        "mean": _mean(values),
        "std": float(values.std(ddof=1)) if len(values) > 1 else np.nan,
        "random_mean": mean,
        "random_std": std,
        "informativeness": informativeness(z),
        "bandwidth": bandwidth(z) * std,
        "beyond": float(ndtr(z.min()) + ndtr(-z.max())) if len(z) else np.nan,
    }


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else float("nan")


def informativeness_figures(tables: Sequence[Table]) -> tuple[Figure, ...]:
    """The 4 x 4 table as a heat map."""
    grids = [table.frame for table in tables if table.name == "heads-informativeness-grid"]
    note = "Normal density of the random moments against a Gaussian kernel density of the projection kernels."
    return tuple(
        Figure(
            "heads-informativeness",
            "Informativeness of pairs of subspaces",
            (_grid_panel(grid[list(LETTERS)].to_numpy(float)),),
            note=note,
        )
        for grid in grids
    )


def _grid_panel(values: Floats) -> Heatmap:
    names = tuple(LETTERS)
    unit = "KL(random || empirical), nats"
    return Heatmap(
        values, "", names, names, "subspace of the head", "of the other head", unit, high=None, written=".2f"
    )
