"""Answers as data: tables and figures that know nothing of files or of matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """A tidy table. `columns` says of every column what it is, with unit and range; `name` is the file's stem.

    Floats are values, the `counts` say how much was measured, and all other columns are the keys of a row.
    """

    name: str
    title: str
    frame: pd.DataFrame
    columns: Mapping[str, str]
    counts: tuple[str, ...] = ("texts",)

    def __post_init__(self) -> None:
        undescribed = [column for column in self.frame.columns if column not in self.columns]
        if undescribed:
            raise ValueError(f"table {self.name!r}: columns without a description: {undescribed}")

    @property
    def keys(self) -> pd.DataFrame:
        """The columns that say what a row is about."""
        named = self.frame.select_dtypes(exclude="float")
        return named[[name for name in named if name not in self.counts]]


@dataclass(frozen=True)
class Heatmap:
    """A matrix as colours. Rows run downwards. None limits are taken from the values (NaN stays blank).

    `groups` gives a group number for every row and column (say, the layer of each head): figures mark them.
    `tree` is a SciPy linkage of rows and columns alike, whose leaf order `values` already follows. `written` is the
    format in which every cell's value stands in it (".2f"); for small matrices.
    """

    values: Floats
    title: str = ""
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    row_label: str = "query"
    column_label: str = "key"
    unit: str = "attention weight"
    low: float | None = 0.0
    high: float | None = 1.0
    diverging: bool = False
    groups: tuple[int, ...] = ()
    tree: Floats | None = None
    written: str = ""


@dataclass(frozen=True)
class ClassMap(Heatmap):
    """A matrix of classes as colours. `values` are places in `names` (NaN stays blank).

    `colours` are each class's place in the palette, so that a class looks the same in every figure; `marks`, if given,
    are short texts written into the cells.
    """

    names: tuple[str, ...] = ()
    colours: tuple[int, ...] = ()
    marks: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Series:
    """One curve; `low` and `high` bound a band of spread around `y` where they are given."""

    label: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Lines:
    """Curves over a common x, whole numbers on it where `whole` (depth, layer).

    Axes are logarithmic where `log_x` and `log_y`; the latter has no limits but those of the curves. A `mark` is a
    vertical line at that x, with a label.
    """

    series: tuple[Series, ...]
    x_label: str
    y_label: str
    title: str = ""
    whole: bool = True
    low: float | None = None
    high: float | None = None
    log_x: bool = False
    log_y: bool = False
    mark: float | None = None
    mark_label: str = ""


@dataclass(frozen=True)
class Points:
    """A labelled scatter on a plane; `groups` (such as the layer) gives the colour and has its own label.

    With `names` the groups are places in them, and a legend stands in for the scale.
    """

    x: Floats
    y: Floats
    labels: tuple[str, ...]
    groups: tuple[int, ...]
    group_label: str
    x_label: str
    y_label: str
    title: str = ""
    equal: bool = True
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ColouredText:
    """The same text written once a row, every token on a ground of its value's colour. `values`: (row, token)."""

    tokens: tuple[str, ...]
    rows: tuple[str, ...]
    values: Floats
    unit: str
    title: str = ""
    low: float | None = 0.0
    high: float | None = None


@dataclass(frozen=True)
class LayeredGraph:
    """Tokens at every depth as nodes, `edges` (depth of the upper end, upper token, lower token, weight) between."""

    tokens: tuple[str, ...]
    depths: int
    edges: tuple[tuple[int, int, int, float], ...]
    unit: str
    title: str = ""


@dataclass(frozen=True)
class Network:
    """Heads as nodes, the layers side by side, and `edges` (place of the one node, of the other, weight) between.

    A node has a layer, a head and a label, which stands beside it unless it is empty. `falling` where a smaller
    weight is a stronger edge.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    labels: tuple[str, ...]
    edges: tuple[tuple[int, int, float], ...]
    unit: str
    falling: bool = False
    title: str = ""


Panel = Heatmap | Lines | Points | ColouredText | LayeredGraph | Network


@dataclass(frozen=True)
class Figure:
    """A page of panels, `columns` to a row. `note` is printed below in small type."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    columns: int = 1
    note: str = ""


@dataclass(frozen=True)
class Graph:
    """A directed graph as two frames: `nodes` by their `node`, `edges` from `source` to `target`, attributes beside.

    `columns` says of every column what it is; several edges may join the same two nodes.
    """

    name: str
    title: str
    nodes: pd.DataFrame
    edges: pd.DataFrame
    columns: Mapping[str, str]

    def __post_init__(self) -> None:
        held = {"node": self.nodes.columns, "source": self.edges.columns, "target": self.edges.columns}
        missing = [name for name, columns in held.items() if name not in columns]
        undescribed = [name for name in (*self.nodes, *self.edges) if name not in self.columns]
        if missing or undescribed:
            raise ValueError(f"graph {self.name!r}: columns missing {missing}, without a description {undescribed}")


@dataclass(frozen=True)
class Result:
    """What an analysis answers: `headline` is the short table for the terminal, `notes` lines to print below it.

    `headline_on_texts` is a second such table, where weights were asked and texts too. `details` are more short tables
    for the terminal, below the headline, where one cannot say it.
    """

    headline: Table
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = field(default=())
    details: tuple[Table, ...] = ()
    headline_on_texts: Table | None = None
    graphs: tuple[Graph, ...] = ()

    def with_tables(self, tables: Sequence[Table]) -> Self:
        """The same answer with more tables."""
        return replace(self, tables=(*self.tables, *tables))

    def joined(self, on_texts: Result) -> Self:
        """This answer of the weights with that of texts behind it."""
        return replace(
            self,
            tables=(*self.tables, *on_texts.tables),
            figures=(*self.figures, *on_texts.figures),
            notes=(*self.notes, *on_texts.notes),
            details=(*self.details, *on_texts.details),
            headline_on_texts=on_texts.headline,
            graphs=(*self.graphs, *on_texts.graphs),
        )
