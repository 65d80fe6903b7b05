"""Head against head, drawn: clustered, on a plane, and in layer order where direction matters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .arrangement import clustered, on_plane
from .comparison import Comparison, Heads
from .result import Figure, Heatmap, Points, Table

Floats = NDArray[np.float64]
Order = NDArray[np.int64]
FEW = 4
"""Panels that still have room for the names of heads."""
MUTUAL = (
    "Where direction matters, a pair's value is the earlier head's with the later; within a layer the mean of both."
)


def arranged(heads: Heads) -> tuple[Table, tuple[Figure, ...]]:
    """Every head's leaf in the clustering and its place on the plane, and the figures."""
    frames, heatmaps, planes, stresses = [], [], [], []
    for one in heads.comparisons:
        tree, order = clustered(one.distances)
        places, stress = on_plane(one.distances)
        frames.append(_places_frame(heads, one, order, places))
        heatmaps.append(_heatmap(heads, one, _drawn(heads, one), order, tree))
        planes.append(_plane(heads, one, places))
        stresses.append(f"{one.kind} {stress:.2f}".strip())
    figures = (_clustered(heads, heatmaps), *_directions(heads), _map(heads, planes, stresses))
    return _places_table(heads, frames), figures


def _places_frame(heads: Heads, one: Comparison, order: Order, places: Floats) -> pd.DataFrame:
    at = np.arange(len(heads.places))
    frame = heads.index(one, at, at).drop(columns=["other_layer", "other_head"])
    return frame.assign(leaf=np.argsort(order), x=places[:, 0], y=places[:, 1])


def _places_table(heads: Heads, frames: Sequence[pd.DataFrame]) -> Table:
    axes = {"x": "first axis of the map", "y": "second axis of the map"}
    columns = heads.descriptions({"leaf": "place in the clustered heat map, from 0", **axes})
    frame = pd.concat(frames, ignore_index=True)
    return Table("heads-places", "Heads arranged by distance", frame, {name: columns[name] for name in map(str, frame)})


def _drawn(heads: Heads, one: Comparison) -> Floats:
    own = np.eye(len(heads.places), dtype=bool)
    return one.pairs if heads.words.own else np.where(own, np.nan, one.pairs)


def _heatmap(heads: Heads, one: Comparison, values: Floats, order: Order, tree: Floats | None = None) -> Heatmap:
    names = tuple(str(heads.places[at]) for at in order) if len(heads.comparisons) <= FEW else ()
    return Heatmap(
        values[np.ix_(order, order)],
        one.kind,
        names,
        names,
        "head",
        "head" if tree is not None else "other head",
        heads.words.unit,
        heads.words.low,
        heads.words.high,
        heads.words.diverging,
        groups=tuple(heads.places[at].layer for at in order),
        tree=tree,
    )


def _plane(heads: Heads, one: Comparison, places: Floats) -> Points:
    names = tuple(map(str, heads.places)) if len(heads.comparisons) <= FEW else ()
    layers = tuple(place.layer for place in heads.places)
    return Points(places[:, 0], places[:, 1], names, layers, "layer", "first axis", "second axis", one.kind)


def _clustered(heads: Heads, panels: Sequence[Heatmap]) -> Figure:
    note = f"Average linkage of a distance: {heads.words.distance}."
    note += "" if heads.words.own else " A head with itself is left blank."
    if any(one.directed for one in heads.comparisons):
        note += f" {MUTUAL}"
    if any(np.isnan(one.pairs).any() for one in heads.comparisons):
        note += " Pairs without a value count as the farthest apart."
    if len(panels) > FEW:
        note += " Which head stands where: column leaf of heads-places."
    return Figure("heads-heatmap", f"Heads clustered by {heads.words.title}", tuple(panels), _columns(panels), note)


def _directions(heads: Heads) -> tuple[Figure, ...]:
    """The directed values in layer order, from the head of a row to the other of a column."""
    order = np.arange(len(heads.places))
    panels = [_heatmap(heads, one, one.values, order) for one in heads.comparisons if one.directed]
    if not panels:
        return ()
    note = "In layer order, the head first and the other head second."
    title = f"{heads.words.title[:1].upper()}{heads.words.title[1:]}, head by head"
    return (Figure("heads-directions", title, tuple(panels), _columns(panels), note),)


def _map(heads: Heads, panels: Sequence[Points], stresses: Sequence[str]) -> Figure:
    note = (
        f"Metric multidimensional scaling of a distance: {heads.words.distance}. Stress-1 {', '.join(stresses)} "
        "(0 is perfect; from 0.2 on, planes show distances poorly). Orientation has no meaning."
    )
    return Figure("heads-map", f"Heads placed by {heads.words.title}", tuple(panels), _columns(panels), note)


def _columns(panels: Sequence[object]) -> int:
    return min(4, len(panels)) if len(panels) > FEW else min(2, len(panels))
