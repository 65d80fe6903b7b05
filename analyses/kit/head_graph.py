"""The strongest pairs of heads as a directed graph from earlier to later layers, its hubs, and how it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .analysis import SettingsError
from .comparison import Comparison, Heads
from .result import Figure, Graph, Network, Table

Floats = NDArray[np.float64]
Whole = NDArray[np.intp]
FEW = 4
NAMED, NAMED_OF_MANY = 8, 3
"""Hubs that a panel names, and one of more than FEW panels."""
DIGITS = 12
"""Decimals to which two values are told apart: what rounding alone decides would not be the same twice."""


def edge_count(text: str, pairs: int) -> int:
    """How many of `pairs` are the strongest: a number, or a share of them with a percent sign, at least one.

    Raises SettingsError for anything else. The share is rounded down: 3 % of 9,504 pairs are 285, as published
    (Yamagiwa et al., arXiv 2601.10266).

    >>> edge_count("3%", 9504), edge_count("100", 40), edge_count("0.1%", 40)
    (285, 40, 1)
    """
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / 100 if percent else int(number)
    except ValueError:
        value = 0
    if rest or not (0 < value <= 1 if percent else value >= 1):
        raise SettingsError(f"{text!r} strongest edges are no graph", "Give a number such as 100, or a share: 3%.")
    return min(pairs, max(1, int(value * pairs + 1e-9) if percent else int(value)))


@dataclass(frozen=True)
class Strongest:
    """The answer of a graph: nothing of it is there where no head runs before another."""

    graphs: tuple[Graph, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()


def strongest(heads: Heads, edges: str) -> Strongest:
    """The strongest pairs of every comparison as edges from the earlier head to the later one, whatever the metric.

    Strong is a large value, or a small one where smaller means closer (angles, divergences).
    """
    before = heads.pairing.before & ~heads.pairing.before.T
    if not before.any():
        return Strongest(notes=("There is no graph of heads: none runs before another.",))
    chosen = [_strongest(heads, one, before, edges) for one in heads.comparisons]
    graph, hubs = _graph(heads, chosen), _hubs_table(heads, chosen)
    panels = tuple(_panel(heads, one, at) for one, at in zip(heads.comparisons, chosen, strict=True))
    return Strongest((graph,), (hubs,), (_figure(heads, panels, edges),))


def _strongest(heads: Heads, one: Comparison, before: NDArray[np.bool_], edges: str) -> tuple[Whole, Whole]:
    """Rows and columns of the strongest pairs, the strongest first; ties in the order of the heads."""
    rows, columns = np.nonzero(before & ~np.isnan(one.values))
    values = one.values[rows, columns].round(DIGITS)
    order = np.argsort(values if heads.words.falling else -values, kind="stable")
    order = order[: edge_count(edges, len(order))]
    return rows[order], columns[order]


def _graph(heads: Heads, chosen: Sequence[tuple[Whole, Whole]]) -> Graph:
    names = np.array([str(place) for place in heads.places])
    nodes = pd.DataFrame({"node": names, **_places(heads)})
    frames = []
    for one, (rows, columns) in zip(heads.comparisons, chosen, strict=True):
        frame = pd.DataFrame({"source": names[rows], "target": names[columns], "weight": one.values[rows, columns]})
        frames.append(frame.assign(**{heads.kind_column: one.kind}) if heads.kind_column else frame)
    about = heads.descriptions({"node": "the head's name", "source": "the earlier head", "target": "the later head"})
    about |= {"weight": heads.words.unit}
    edges = pd.concat(frames, ignore_index=True)
    columns_of = [*map(str, nodes), *map(str, edges)]
    title = f"The strongest pairs of heads by {heads.words.title}"
    return Graph("heads-graph", title, nodes, edges, {name: about[name] for name in columns_of})


def _places(heads: Heads) -> dict[str, list[int]]:
    return {"layer": [place.layer for place in heads.places], "head": [place.head for place in heads.places]}


def _hubs_table(heads: Heads, chosen: Sequence[tuple[Whole, Whole]]) -> Table:
    """Every head of every comparison, those with the most edges first."""
    frames = []
    for one, at in zip(heads.comparisons, chosen, strict=True):
        kind = {heads.kind_column: one.kind} if heads.kind_column else {}
        frame = pd.DataFrame({"metric": heads.metric, **kind, **_places(heads), **_degrees(one, at)})
        frames.append(frame.sort_values("degree", ascending=False, kind="stable"))
    others = {
        "in_degree": "edges that come in, from earlier heads",
        "out_degree": "edges that go out, to later heads",
        "degree": "edges in all",
        "in_weight": "sum of the values of the edges that come in",
        "out_weight": "sum of the values of the edges that go out",
    }
    counts = ("in_degree", "out_degree", "degree")
    table = heads.table("heads-hubs", "Hubs among the strongest edges", pd.concat(frames, ignore_index=True), others)
    return Table(table.name, table.title, table.frame, table.columns, counts)


def _degrees(one: Comparison, at: tuple[Whole, Whole]) -> dict[str, NDArray[np.generic]]:
    """Number and weight of the edges of every head."""
    rows, columns = at
    size, weights = len(one.values), one.values[at]
    ends, starts = np.bincount(columns, minlength=size), np.bincount(rows, minlength=size)
    return {
        "in_degree": ends,
        "out_degree": starts,
        "degree": ends + starts,
        "in_weight": np.bincount(columns, weights, size),
        "out_weight": np.bincount(rows, weights, size),
    }


def _panel(heads: Heads, one: Comparison, at: tuple[Whole, Whole]) -> Network:
    degree = np.asarray(_degrees(one, at)["degree"])
    named = np.argsort(-degree, kind="stable")[: NAMED if len(heads.comparisons) <= FEW else NAMED_OF_MANY]
    return Network(
        tuple(_places(heads)["layer"]),
        tuple(_places(heads)["head"]),
        tuple(str(place) if at in named and degree[at] else "" for at, place in enumerate(heads.places)),
        tuple((int(row), int(column), float(one.values[row, column])) for row, column in zip(*at, strict=True)),
        heads.words.unit,
        falling=heads.words.falling,
        title=one.kind,
    )


def _figure(heads: Heads, panels: tuple[Network, ...], edges: str) -> Figure:
    what = f"the strongest {edges.strip()} of such pairs" if "%" in edges else f"the {edges.strip()} strongest pairs"
    note = (
        f"Edges run from a head to one of a later layer, {what}{' of each kind' if len(panels) > 1 else ''}, darker "
        "where stronger. A dot is larger the more edges it has; those with the most are named. All are in heads-hubs."
    )
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= FEW else 4
    return Figure("heads-graph", f"The strongest pairs of heads by {heads.words.title}", panels, columns, note)
