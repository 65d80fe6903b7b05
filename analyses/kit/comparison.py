"""Head against head: the matrices of one metric, and the tables made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .arrangement import nearest
from .result import Table

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
CLOSEST = 10
"""Pairs in the headline, all kinds together."""


@dataclass(frozen=True)
class Place:
    """A head and where it runs: the first and the last chosen layer with its weights (the same unless shared)."""

    layer: int
    last: int
    weight_layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"


def places_of(layers: Sequence[int], heads: Sequence[int], weight_layer: Sequence[int]) -> tuple[Place, ...]:
    """The heads of the chosen layers, each once: layers that share weights (`weight_layer`) count as one.

    >>> [str(place) for place in places_of([0, 1, 2], [5], [0, 0, 1])]
    ['L0H5', 'L2H5']
    """
    runs: dict[int, list[int]] = {}
    for layer in layers:
        runs.setdefault(weight_layer[layer], []).append(layer)
    return tuple(Place(run[0], run[-1], held, head) for held, run in runs.items() for head in heads)


def runs_before(places: Sequence[Place]) -> Flags:
    """Whether a head (row) runs in a layer strictly before one that runs another (column). Shape (head, other)."""
    first, last = np.array([place.layer for place in places]), np.array([place.last for place in places])
    return first[:, None] < last[None, :]


@dataclass(frozen=True)
class Pairing:
    """Which ordered pairs of heads are compared: `before` as `runs_before`, `listed` those that are asked for."""

    before: Flags
    listed: Flags

    @classmethod
    def of(cls, places: Sequence[Place], *, only_later: bool) -> Self:
        """All pairs, or those of a head with one that runs strictly later."""
        before = runs_before(places)
        return cls(before, before if only_later else np.ones_like(before))


def mutual(values: Floats, before: Flags) -> Floats:
    """One value a pair: from the earlier head to the later; the mean of both directions where neither is first.

    Our own choice, to draw what is directed on symmetric maps; symmetric values stay as they are.

    >>> mutual(np.array([[9.0, 1.0], [2.0, 9.0]]), np.array([[False, True], [False, False]])).tolist()
    [[9.0, 1.0], [1.0, 9.0]]
    """
    forth, back = before & ~before.T, before.T & ~before
    return np.where(forth, values, np.where(back, values.T, (values + values.T) / 2))


@dataclass(frozen=True)
class Words:
    """How a metric's matrices are named and drawn."""

    title: str
    unit: str
    distance: str
    low: float | None = None
    high: float | None = None
    diverging: bool = False
    own: bool = False  # whether a head's value with itself is drawn (else it would only stretch the colours)
    falling: bool = False  # whether smaller values mean closer heads


@dataclass(frozen=True)
class Comparison:
    """One kind of value of every head (row) with every other (column), NaN where there is none.

    `pairs` is the symmetric matrix that is clustered and drawn, `distances` what it amounts to (zero diagonal, no
    NaN); `columns` are further columns of the table, such as what random subspaces would give.
    """

    kind: str
    values: Floats
    pairs: Floats
    distances: Floats
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def directed(self) -> bool:
        """Whether it matters which head comes first."""
        return not np.allclose(self.values, self.values.T, equal_nan=True)


def comparison(
    kind: str,
    values: Floats,
    pairing: Pairing,
    distances: Floats,
    columns: Mapping[str, NDArray[Any]],
    farthest: Floats | float = 1.0,
) -> Comparison:
    """A comparison of the pairs that are asked for; the others have no value.

    Its distances are made fit: symmetric by `mutual`, not below 0, 0 from a head to itself, and `farthest` where a
    pair has no value.
    """
    known = np.where(pairing.listed, values, np.nan)
    pairs = mutual(known, pairing.before)
    apart = np.where(np.isnan(pairs), farthest, np.maximum(mutual(distances, pairing.before), 0.0))
    np.fill_diagonal(apart, 0.0)
    return Comparison(kind, known, pairs, apart, columns)


@dataclass(frozen=True)
class Heads:
    """The heads compared, under the metric's name and words, with all its comparisons."""

    metric: str
    kind_column: str | None  # what tells the comparisons of this metric apart; None where there is one
    words: Words
    places: tuple[Place, ...]
    comparisons: tuple[Comparison, ...]
    pairing: Pairing

    def index(self, one: Comparison, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> pd.DataFrame:
        """The first columns of a table of pairs."""
        frame = pd.DataFrame({"metric": np.full(len(rows), self.metric, dtype=object)})
        if self.kind_column:
            frame[self.kind_column] = one.kind
        for prefix, at in (("", rows), ("other_", columns)):
            frame[f"{prefix}layer"] = np.array([place.layer for place in self.places])[at]
            frame[f"{prefix}head"] = np.array([place.head for place in self.places])[at]
        return frame

    def table(self, name: str, title: str, frame: pd.DataFrame, others: Mapping[str, str]) -> Table:
        """A table whose columns, and no others, are described; `others` describes those beyond `index` and values."""
        columns = {column: text for column, text in self.descriptions(others).items() if column in frame}
        return Table(name, title, frame, columns)

    def descriptions(self, others: Mapping[str, str]) -> dict[str, str]:
        """What every column of a table is: those of `index`, then the others."""
        kinds = {
            "subspaces": "subspace of the head, then of the other head: Q, K, V or O",
            "composition": "what of the later head reads the earlier head's output: Q, K or V",
        }
        about = {"metric": "the metric's name"}
        about |= {self.kind_column: kinds[self.kind_column]} if self.kind_column else {}
        about |= {"layer": "layer, from 0", "head": "head, from 0"}
        about |= {"other_layer": "layer of the other head", "other_head": "the other head"}
        mutual = (
            "value of the pair: its value where both directions agree; else, by our own choice, that of the earlier "
            "head with the later, and within a layer the mean of both directions"
        )
        return about | {"value": self.words.unit, "pair_value": mutual} | dict(others)


def pairs_table(heads: Heads, others: Mapping[str, str]) -> Table:
    """Every ordered pair of heads that the metric is about, a row each; `others` describes the further columns."""
    rows, columns = np.nonzero(heads.pairing.listed)
    frames = []
    for one in heads.comparisons:
        frame = heads.index(one, rows, columns).assign(value=one.values[rows, columns])
        frames.append(frame.assign(**{name: one.columns[name][rows, columns] for name in others}))
    return heads.table("heads-pairs", "Head against head", pd.concat(frames, ignore_index=True), others)


def nearest_table(heads: Heads, count: int) -> Table:
    """The nearest heads of every head."""
    frames = []
    for one in heads.comparisons:
        chosen = nearest(one.distances, count)
        rows, columns = np.repeat(np.arange(len(chosen)), chosen.shape[1]), chosen.ravel()
        frame = heads.index(one, rows, columns)
        frame["place"] = np.tile(np.arange(1, chosen.shape[1] + 1), len(chosen))
        frame["pair_value"], frame["distance"] = one.pairs[rows, columns], one.distances[rows, columns]
        frames.append(frame[frame["pair_value"].notna()])
    others = {"place": "1 for the nearest", "distance": heads.words.distance}
    return heads.table("heads-nearest", "Nearest heads", pd.concat(frames, ignore_index=True), others)


def summary_table(heads: Heads) -> Table:
    """Pairs within a layer and between layers: how many, mean, spread and range."""
    layer = np.array([place.layer for place in heads.places])
    upper = np.triu(np.ones((len(layer), len(layer)), dtype=bool), 1)
    same = layer[:, None] == layer[None, :]
    rows = [
        {"metric": heads.metric, **({heads.kind_column: one.kind} if heads.kind_column else {}), "pairs": name}
        | _spread(one.pairs[upper & chosen])
        for one in heads.comparisons
        for name, chosen in (("within a layer", same), ("between layers", ~same))
    ]
    others = {
        "pairs": "pairs of heads of one layer, or of different layers",
        "count": "pairs that have a value (pair_value of the other tables)",
        "mean": f"mean of: {heads.words.unit}",
        "std": "standard deviation over pairs (n - 1)",
        "low": "smallest value",
        "high": "largest value",
    }
    return heads.table("heads-summary", "Pairs of heads in brief", pd.DataFrame(rows), others)


def _spread(values: Floats) -> dict[str, float]:
    seen = values[~np.isnan(values)]
    none = float("nan")
    return {
        "count": len(seen),
        "mean": float(seen.mean()) if len(seen) else none,
        "std": float(seen.std(ddof=1)) if len(seen) > 1 else none,
        "low": float(seen.min()) if len(seen) else none,
        "high": float(seen.max()) if len(seen) else none,
    }


def closest_table(heads: Heads) -> Table:
    """The closest pairs of different heads: the headline."""
    count = max(1, CLOSEST // len(heads.comparisons))
    frames = []
    for one in heads.comparisons:
        rows, columns = np.triu_indices(len(heads.places), 1)
        without = np.isnan(one.pairs[rows, columns])
        chosen = np.lexsort([one.distances[rows, columns], without])[: min(count, max(1, int((~without).sum())))]
        frame = heads.index(one, rows[chosen], columns[chosen])
        frame["pair_value"] = one.pairs[rows[chosen], columns[chosen]]
        frames.append(frame)
    frame = pd.concat(frames, ignore_index=True)
    directed = any(one.directed for one in heads.comparisons)
    rule = ": the earlier head with the later, within a layer the mean of both directions" if directed else ""
    return heads.table("heads-closest", f"The closest pairs of heads{rule}", frame, {})
