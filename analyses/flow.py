"""Where a token's content comes from: raw attention, rollout and maximum flow to the input tokens, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .kit.accumulators import Counts, Moments, Sample
from .kit.analysis import ALL, Analysis, Selection, SettingsError, State, setting
from .kit.maths import entropy, normalised_rows
from .kit.maxflow import attention_flow, flow_bound, saturated
from .kit.record import ForwardRecord, HeadWeights, ModelShape, TokenizedText
from .kit.result import ColouredText, Figure, LayeredGraph, Lines, Result, Series, Table
from .kit.rollout import mean_over_heads, mixing_matrices, rollout
from .kit.tables import moment_columns, sample_table
from .kit.units import Units, units_of

Floats = NDArray[np.float64]
METHODS = ("attention", "rollout", "flow")
VALUES = {
    "n": "input tokens",
    "entropy": "entropy of the source's distribution over input tokens, nats, 0 to ln n; mean over sources",
    "mass_self": "its weight on the source itself, 0 to 1",
    "mass_cls": "its weight on [CLS], 0 to 1; with the next three it sums to 1",
    "mass_sep": "its weight on all [SEP], 0 to 1",
    "mass_punctuation": "its weight on Unicode category P, 0 to 1",
    "mass_other": "its weight on all other tokens, 0 to 1",
    "flow_total": "sum of the raw flow values over input tokens; empty but for flow",
    "saturated": "share of pairs whose flow is min(1, column sum of the first layer), to 1e-6; empty but for flow",
}
NOTES = ("Special tokens kept. A saturated flow says nothing about the source or the layers above the first.",)
GRAPH_TOKENS = 16
"""Longest text whose layered graph is drawn."""


@dataclass(frozen=True)
class Paths:
    """One text, from each source to each input token at each layer: arrays (layer, source, token)."""

    sources: tuple[int, ...]
    attention: Floats
    rollout: Floats
    flow: Floats
    bound: Floats  # (token)
    saturated: NDArray[np.bool_]
    mixing: Floats  # (layer, query, key)

    @cached_property
    def shares(self) -> Floats:
        """Distributions over input tokens (layer, method, source, token): rows; flow divided by its row sum."""
        return np.stack([self.attention, self.rollout, normalised_rows(self.flow)], axis=1)


def trace(attention: Sequence[Floats], sources: tuple[int, ...]) -> list[Paths]:
    """All three methods for texts of one length by their attention (layer, head, query, key)."""
    means = [mean_over_heads(weights) for weights in attention]
    mixing = np.stack([mixing_matrices(mean) for mean in means], axis=1)
    flows = attention_flow(mixing, sources)
    return [_paths(mean, mixing[:, text], flows[:, text], sources) for text, mean in enumerate(means)]


def _paths(mean: Floats, mixing: Floats, flow: Floats, sources: tuple[int, ...]) -> Paths:
    at, above = list(sources), saturated(flow, mixing)
    return Paths(sources, mean[:, at], rollout(mixing)[:, at], flow, flow_bound(mixing), above, mixing)


@dataclass
class FlowState(State):
    """Per-text values (layer, method, value), means over the text's sources."""

    moments: Moments
    sample: Sample
    counts: Counts
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Flow(Analysis[FlowState]):
    """Where a token's content comes from: raw attention, rollout and exact maximum flow, layer by layer.

    All use the mean over heads; special tokens take part. The masses on [CLS], [SEP], punctuation and other input
    tokens sum to 1; self is a second view. Rollout multiplies 0.5 A + 0.5 I upwards; flow is the maximum flow from the
    token above to each input token with these weights as capacities, given raw and divided by its row sum (Abnar and
    Zuidema 2020). No flow from the second layer up exceeds min(1, column sum of the first layer's 0.5 A + 0.5 I), and
    pairs that reach this bound are counted as saturated: a saturated flow is a property of the first layer alone, so
    it says nothing about the source token or about the upper layers.

    Example: bertgeo flow "The fisherman sat down by the river bank." --from all
    """

    layers: Selection = setting(ALL, "Layers to report, from 0: all, or such as 0,3-5,-1. Lower ones always take part.")
    source: str = setting("cls", "The token above: cls, all, a position such as 3, or a token's text.", name="from")
    sample: int = setting(1000, "Texts of a corpus whose own values are written (those of smallest hash).", least=0)
    seed: int = setting(0, "Seed of that sample's hash.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention"})

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> FlowState:
        layers = self.layers.resolve(shape.layers, "layer")
        moments = Moments.empty(len(layers), len(METHODS), len(VALUES))
        return FlowState(moments, Sample.empty(self.sample, self.seed), Counts(), layers)

    def update(self, state: FlowState, record: ForwardRecord) -> None:
        for sources, alike in groupby(range(len(record.texts)), lambda index: self._sources(record.texts[index])):
            indices = list(alike)
            for index, values in zip(indices, self._values(state, record, indices, sources), strict=True):
                text = record.texts[index]
                state.moments.add(values[None])
                state.sample.add([text], values[None])
        state.counts.add([len(text) for text in record.texts])

    def per_text(self, state: FlowState) -> Table:
        return _texts_table(state)

    def finalize(self, state: FlowState, record: ForwardRecord | None) -> Result:
        table = _layers_table(state)
        if state.counts.texts and not state.moments.count.any() and record is None:
            raise SettingsError(f"no text has a token {self.source!r} to start from", "Choose --from cls or all.")
        if record is None:
            tables = (table, self.per_text(state))
            return Result(_headline(table), tables, (_layers_figure(state),), NOTES)
        text = record.texts[0]
        if not (sources := self._sources(text)):
            raise SettingsError(*self._absent(text))
        paths = trace([record.of_text("attention", 0)], sources)[0]
        figures = [_layers_figure(state), _coloured_text(state, paths, text)]
        if len(text) <= GRAPH_TOKENS:
            figures.append(_graph(state, paths, text))
        return Result(_headline(table), (table, _pairs_table(state, paths, text)), tuple(figures), NOTES)

    def _values(
        self, state: FlowState, record: ForwardRecord, indices: Sequence[int], sources: tuple[int, ...]
    ) -> list[Floats]:
        """The values (layer, method, value) of texts that have the same sources, or NaN where they have none."""
        if not sources:
            return [np.full((len(state.layers), len(METHODS), len(VALUES)), np.nan) for _ in indices]
        every = trace([record.of_text("attention", index) for index in indices], sources)
        units = [units_of(record.texts[index], words=False) for index in indices]
        return [_describe(paths, kinds)[list(state.layers)] for paths, kinds in zip(every, units, strict=True)]

    def _sources(self, text: TokenizedText) -> tuple[int, ...]:
        """Positions of the chosen sources; none when this text does not have them."""
        if self.source == "all":
            return tuple(range(len(text)))
        if self.source == "cls":
            return () if text.cls is None else (text.cls,)
        if re.fullmatch("-?[0-9]+", self.source):
            position = int(self.source)
            return (position % len(text),) if -len(text) <= position < len(text) else ()
        return tuple(at for at, label in enumerate(text.labels) if label == self.source)

    def _absent(self, text: TokenizedText) -> tuple[str, str]:
        return (
            f"the text has no token {self.source!r} to start from",
            f"Choose --from cls, all, a position from 0 to {len(text) - 1}, or one of: {', '.join(text.labels[:12])}.",
        )


def _describe(paths: Paths, units: Units) -> Floats:
    """The values of VALUES (layer, method, value), means over sources."""
    shares = paths.shares
    layers, methods, sources, tokens = shares.shape
    kinds = np.stack([units.cls, units.sep, units.punctuation, ~(units.cls | units.sep | units.punctuation)])
    own = shares[:, :, np.arange(sources), list(paths.sources)].mean(axis=-1)
    values = np.full((layers, methods, len(VALUES)), np.nan)
    values[..., 0], values[..., 1], values[..., 2] = tokens, entropy(shares).mean(axis=-1), own
    values[..., 3:7] = shares.mean(axis=2) @ kinds.T.astype(float)
    values[:, METHODS.index("flow"), 7] = paths.flow.sum(axis=-1).mean(axis=-1)
    values[:, METHODS.index("flow"), 8] = paths.saturated.mean(axis=(-2, -1))
    return values


def _rows(state: FlowState) -> pd.DataFrame:
    rows = [(layer, method) for layer in state.layers for method in METHODS]
    return pd.DataFrame(rows, columns=["layer", "method"])


ROWS = {
    "layer": "the top layer: paths start above it and end at the input",
    "method": "attention: of that layer alone; rollout; flow: divided by its row sum",
}


def _layers_table(state: FlowState) -> Table:
    frame = _rows(state)
    frame["texts"] = state.moments.count[:, :, 0].ravel()
    values, columns = moment_columns(state.moments, list(VALUES), VALUES)
    columns = ROWS | {"texts": "texts that have the source"} | columns
    title = "From a token to the input: attention, rollout, flow (mean over sources, then texts)"
    return Table("flow-layers", title, pd.concat([frame, values], axis=1), columns)


def _texts_table(state: FlowState) -> Table:
    return sample_table("flow-texts", "Attention, rollout and flow by text", state.sample, _rows(state), ROWS, VALUES)


def _headline(table: Table) -> Table:
    return Table(table.name, table.title, table.frame[["layer", "method", *VALUES]], table.columns)


def _pairs_table(state: FlowState, paths: Paths, text: TokenizedText) -> Table:
    layers, sources, tokens = (index.ravel() for index in np.indices(paths.flow[list(state.layers)].shape))
    at = (np.array(state.layers)[layers], sources, tokens)
    source = np.array(paths.sources)[sources]
    labels = np.array(text.labels, dtype=object)
    frame = pd.DataFrame({"layer": at[0], "source": source, "source_token": labels[source], "token": tokens})
    frame["token_text"] = labels[tokens]
    frame["start"] = pd.array(text.start, dtype="Int64")[tokens]
    frame["end"] = pd.array(text.end, dtype="Int64")[tokens]
    frame["attention"], frame["rollout"] = paths.attention[at], paths.rollout[at]
    frame["flow_value"], frame["flow_share"] = paths.flow[at], paths.shares[:, METHODS.index("flow")][at]
    frame["bound"], frame["saturated"] = paths.bound[tokens], paths.saturated[at]
    return Table("flow", "From each source to each input token", frame, PAIRS)


PAIRS = {
    "layer": "the top layer: the source is above it",
    "source": "position of the source, from 0",
    "source_token": "its text",
    "token": "position of the input token, from 0",
    "token_text": "its text",
    "start": "its first character in the text",
    "end": "one past its last character",
    "attention": "mean attention of that layer's heads, 0 to 1",
    "rollout": "rollout, 0 to 1; a row sums to 1",
    "flow_value": "raw maximum flow, 0 to 1",
    "flow_share": "flow divided by its sum over input tokens",
    "bound": "min(1, column sum of the first layer's 0.5 A + 0.5 I)",
    "saturated": "whether the flow is the bound, to 1e-6",
}


def _layers_figure(state: FlowState) -> Figure:
    panels = tuple(
        Lines(_method_curves(state, value, methods), "layer", label, title, low=0.0)
        for value, methods, label, title in (
            ("entropy", METHODS, "entropy, nats", "Spread over input tokens"),
            ("mass_self", METHODS, "weight", "On the source itself"),
            ("saturated", ("flow",), "share of pairs", "Flow at its bound"),
        )
    )
    texts = state.counts.texts
    note = "A flow at its bound says nothing about the source or the layers above the first."
    if texts > 1:
        note += f" Lines: mean over {texts} texts; bands: one standard deviation either side."
    return Figure("flow-layers", "Attention, rollout and flow by layer", panels, columns=3, note=note)


def _method_curves(state: FlowState, value: str, methods: tuple[str, ...]) -> tuple[Series, ...]:
    index, curves = list(VALUES).index(value), []
    for method in methods:
        y = state.moments.mean[:, METHODS.index(method), index]
        spread = state.moments.std[:, METHODS.index(method), index]
        band = (y - spread, y + spread) if np.isfinite(spread).any() else (None, None)
        curves.append(Series(method, np.array(state.layers, dtype=float), y, *band))
    return tuple(curves)


def _coloured_text(state: FlowState, paths: Paths, text: TokenizedText) -> Figure:
    source = paths.sources[0]
    rows = tuple(f"layer {layer}" for layer in state.layers)
    names = {"attention": "Raw attention", "rollout": "Rollout", "flow": "Maximum flow, divided by its sum"}
    panels = tuple(
        ColouredText(text.labels, rows, paths.shares[list(state.layers), METHODS.index(method), 0], "weight", title)
        for method, title in names.items()
    )
    title = f"From {text.labels[source]} (position {source}) to the input"
    note = "Each row: the weights of all input tokens, which sum to 1."
    if len(paths.sources) > 1:
        note += f" The first of {len(paths.sources)} sources; the others are in the table."
    return Figure("flow-text", title, panels, note=note)


def _graph(state: FlowState, paths: Paths, text: TokenizedText) -> Figure:
    n, depth = len(text), max(state.layers) + 1
    between = paths.mixing[:depth] * (1 - np.eye(n))
    strongest = np.argsort(-between, axis=None, kind="stable")[: 3 * n]
    layers, queries, keys = np.unravel_index(strongest, between.shape)
    edges = tuple(
        (int(layer) + 1, int(query), int(key), float(between[layer, query, key]))
        for layer, query, key in zip(layers, queries, keys, strict=True)
    )
    note = f"The {len(edges)} strongest capacities between different tokens (three a token), whatever the source; each "
    note += "token's edge to itself, 0.5 or more, is left out."
    panel = LayeredGraph(text.labels, depth + 1, edges, "0.5 A, mean over heads")
    return Figure("flow-graph", "Strongest edges of the flow graph", (panel,), note=note)
