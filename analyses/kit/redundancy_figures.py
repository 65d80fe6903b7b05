"""Redundancy, drawn: captured variance, components needed by layer, and the error of shared keys and queries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .captured import MATRICES, components_to_reach
from .redundancy_tables import Curves, moments_of
from .result import Figure, Lines, Series

Floats = NDArray[np.float64]
SCOPES = {"head": "Every head by itself", "layer": "Heads together"}


def captured_figures(curves: Curves, layers: Sequence[int]) -> tuple[Figure, Figure]:
    """The mean curves of the three matrices, and those of W_Q W_K^T layer by layer; single heads left of layers."""
    means = [
        _captured([_mean(name, curves[scope][at]) for at, name in MATRICES.items()], where)
        for scope, where in SCOPES.items()
    ]
    by_layer = [_captured(_layers(curves[scope]["QK"], layers), where) for scope, where in SCOPES.items()]
    note = "Mean over layers (and heads); bands: one standard deviation either side."
    each = "Single heads: mean over heads."
    return (
        Figure("redundancy-captured", "Captured variance", tuple(means), columns=2, note=note),
        Figure("redundancy-layers", "Captured variance of W_Q W_K^T by layer", tuple(by_layer), columns=2, note=each),
    )


def _captured(series: Sequence[Series], title: str) -> Lines:
    return Lines(tuple(series), "components", "captured variance", title, low=0.0, high=1.0)


def _series(label: str, y: Floats, spread: Floats | None = None) -> Series:
    """A curve over components, from none on."""
    x, whole = np.arange(len(y) + 1.0), np.concatenate([[0.0], y])
    if spread is None or not np.isfinite(spread).any():
        return Series(label, x, whole)
    beside = np.concatenate([[0.0], spread])
    return Series(label, x, whole, np.maximum(whole - beside, 0.0), np.minimum(whole + beside, 1.0))


def _layers(values: Floats, layers: Sequence[int]) -> list[Series]:
    pairs = zip(layers, values, strict=True)
    return [_series(f"layer {layer}", moments_of(heads).mean) for layer, heads in pairs]


def _mean(label: str, values: Floats) -> Series:
    moments = moments_of(values.reshape(-1, values.shape[-1]))
    return _series(label, moments.mean, moments.std)


def components_figure(curves: Curves, layers: Sequence[int], shares: Sequence[float]) -> Figure:
    """Components that reach each share over the layers, a panel for each scope and matrix."""
    panels = [
        Lines(
            tuple(_needed(f"{share:g} of the variance", curves[scope][at], share, layers) for share in shares),
            "layer",
            f"components of {curves[scope][at].shape[-1]}",
            f"{name}: {where.lower()}",
            low=0.0,
            high=float(curves[scope][at].shape[-1]),
        )
        for scope, where in SCOPES.items()
        for at, name in MATRICES.items()
    ]
    note = "Single heads: mean over heads; bands: one standard deviation either side."
    return Figure("redundancy-components", "Components that reach a share of the variance", tuple(panels), 3, note)


def _needed(label: str, values: Floats, share: float, layers: Sequence[int]) -> Series:
    moments = moments_of(np.moveaxis(components_to_reach(values, [share])[..., 0], 1, 0))
    y, spread = moments.mean, moments.std
    band = (y - spread, y + spread) if np.isfinite(spread).any() else (None, None)
    return Series(label, np.asarray(layers, dtype=float), y, *band)


def shared_figure(shared: pd.DataFrame) -> Figure:
    """The relative error of shared keys and queries, and of directions that no two heads share.

    Over the shared size, a curve for each layer, or with one size over the layers.
    """
    names = {"error": "Shared by all heads", "error_apart": "None shared"}
    if shared["shared_size"].nunique() > 1:
        layers = list(shared.groupby("layer"))
        panels = [
            _errors([_over("shared_size", f"layer {layer}", rows, at) for layer, rows in layers], "shared size D", name)
            for at, name in names.items()
        ]
    else:
        curves = [_over("layer", name, shared, at) for at, name in names.items()]
        panels = [_errors(curves, "layer", f"Shared size {shared['shared_size'].iloc[0]}")]
    return Figure("redundancy-shared", "Keys and queries shared by all heads", tuple(panels), columns=2)


def _errors(series: Sequence[Series], x: str, title: str) -> Lines:
    return Lines(tuple(series), x, "relative error of W_Q W_K^T", title, low=0.0, high=1.0)


def _over(x: str, label: str, rows: pd.DataFrame, at: str) -> Series:
    return Series(label, rows[x].to_numpy(float), rows[at].to_numpy())
