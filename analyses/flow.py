"""Where a token's content comes from: raw attention, rollout and maximum flow to the input tokens, layer by layer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .kit.accumulators import Counts, Moments, Sample
from .kit.analysis import ALL, Analysis, Selection, SettingsError, State, chosen_names, setting
from .kit.maths import entropy, normalised_rows
from .kit.maxflow import attention_flow, flow_bound, saturated
from .kit.pieces import over_layers
from .kit.record import ForwardRecord, HeadWeights, ModelShape, TokenizedText
from .kit.result import ColouredText, Figure, LayeredGraph, Lines, Result, Series, Table
from .kit.rollout import mean_over_heads, mixing_matrices, rollout
from .kit.tables import moment_columns, sample_table
from .kit.units import Kinds, units_of

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
GRAPH_TOKENS = 16
"""Longest text whose layered graph is drawn."""


@dataclass(frozen=True)
class Paths:
    """From each source to each input token at each layer, for one text or texts of one length.

    Arrays (layer, [text,] source, token), each made when it is first asked for.
    """

    means: Floats  # mean attention over heads (layer, [text,] query, key)
    sources: tuple[int, ...]

    @cached_property
    def mixing(self) -> Floats:
        """0.5 A + 0.5 I (layer, [text,] query, key)."""
        return mixing_matrices(self.means)

    @cached_property
    def attention(self) -> Floats:
        """Each layer's own attention."""
        return self.means[..., list(self.sources), :]

    @cached_property
    def rollout(self) -> Floats:
        """Rollout down to the input; rows sum to 1."""
        return rollout(self.mixing)[..., list(self.sources), :]

    @cached_property
    def flow(self) -> Floats:
        """Maximum flow down to the input, raw."""
        return attention_flow(self.mixing, self.sources)

    @cached_property
    def bound(self) -> Floats:
        """What no flow exceeds, ([text,] token)."""
        return flow_bound(self.mixing)

    @cached_property
    def saturated(self) -> NDArray[np.bool_]:
        """Whether a flow is its bound."""
        return saturated(self.flow, self.mixing)

    def share(self, method: str) -> Floats:
        """One method's distributions over input tokens: rows; flow divided by its row sum."""
        values: Floats = getattr(self, method)
        return normalised_rows(values) if method == "flow" else values


@dataclass
class FlowState(State):
    """Per-text values (layer, method, value), means over the text's sources."""

    moments: Moments
    sample: Sample
    counts: Counts
    layers: tuple[int, ...]
    methods: tuple[str, ...]


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
    methods: str = setting(
        "all", "attention, rollout and flow, separated by commas, or all; the maximum flow costs most."
    )
    source: str = setting("cls", "The token above: cls, all, a position such as 3, or a token's text.", name="from")
    sample: int = setting(1000, "Texts of a corpus whose own values are written (those of smallest hash).", least=0)
    seed: int = setting(0, "Seed of that sample's hash.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention"})

    def listing(self) -> Table | None:
        self._methods()
        return None

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> FlowState:
        layers, methods = self.layers.resolve(shape.layers, "layer"), self._methods()
        moments = Moments.empty(len(layers), len(methods), len(VALUES))
        return FlowState(moments, Sample.empty(self.sample, self.seed), Counts(), layers, methods)

    def update(self, state: FlowState, record: ForwardRecord) -> None:
        means, kinds = _means(state, record), Kinds([units_of(text, words=False) for text in record.texts])
        first = 0
        for sources, alike in groupby(record.texts, self._sources):
            texts = slice(first, first + len(list(alike)))
            values = _described(state, Paths(means[:, texts], sources), kinds[texts])
            state.moments.add(values)
            state.sample.add(record.texts[texts], values)
            first = texts.stop
        state.counts.add([len(text) for text in record.texts])

    def _methods(self) -> tuple[str, ...]:
        asked = chosen_names(self.methods, METHODS, "method")
        return tuple(method for method in METHODS if method in asked)

    def per_text(self, state: FlowState) -> Table:
        return _texts_table(state)

    def finalize(self, state: FlowState, record: ForwardRecord | None) -> Result:
        table = _layers_table(state, self._origin)
        if state.counts.texts and not state.moments.count.any() and record is None:
            raise SettingsError(f"no text has a token {self.source!r} to start from", "Choose --from cls or all.")
        if record is None:
            tables = (table, self.per_text(state))
            return Result(_headline(table), tables, (_layers_figure(state, self._origin),), _notes(state))
        text = record.texts[0]
        if not (sources := self._sources(text)):
            raise SettingsError(*self._absent(text))
        paths = Paths(_means(state, record)[:, 0], sources)
        figures = [_layers_figure(state, self._origin), _coloured_text(state, paths, text)]
        if len(text) <= GRAPH_TOKENS and state.methods != ("attention",):
            figures.append(_graph(state, paths, text))
        return Result(_headline(table), (table, _pairs_table(state, paths, text)), tuple(figures), _notes(state))

    @property
    def _origin(self) -> str:
        return {"cls": "[CLS]", "all": "every token"}.get(self.source, self.source)

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


def _means(state: FlowState, record: ForwardRecord) -> Floats:
    """Mean attention over heads (layer, text, query, key) up to the highest layer that is reported."""
    layers = range(max(state.layers) + 1)
    means = over_layers(record, "attention", layers, lambda attention, _: mean_over_heads(attention))
    return np.ascontiguousarray(means.swapaxes(0, 1))


def _described(state: FlowState, paths: Paths, kinds: Kinds) -> Floats:
    """The values of VALUES (text, layer, method, value), means over sources; NaN without any."""
    texts = paths.means.shape[1]
    if not paths.sources:
        return np.full((texts, *state.moments.mean.shape), np.nan)
    flags = np.stack([kinds.cls, kinds.sep, kinds.punctuation, kinds.other], axis=-1).astype(float)
    values = np.stack([_of_method(paths, method, flags) for method in state.methods], axis=2)
    return values[:, list(state.layers)]


def _of_method(paths: Paths, method: str, flags: Floats) -> Floats:
    """The values (text, layer, value) of one method; `flags` (text, token, kind) hold 0 and 1."""
    shares = paths.share(method)
    layers, texts, sources, tokens = shares.shape
    values = np.full((layers, texts, len(VALUES)), np.nan)
    values[..., 0], values[..., 1] = tokens, entropy(shares).mean(axis=-1)
    values[..., 2] = shares[..., np.arange(sources), list(paths.sources)].mean(axis=-1)
    values[..., 3:7] = (shares.mean(axis=-2)[..., None, :] @ flags)[..., 0, :]
    if method == "flow":
        values[..., 7] = paths.flow.sum(axis=-1).mean(axis=-1)
        values[..., 8] = paths.saturated.mean(axis=(-2, -1))
    return values.swapaxes(0, 1)


def _rows(state: FlowState) -> pd.DataFrame:
    rows = [(layer, method) for layer in state.layers for method in state.methods]
    return pd.DataFrame(rows, columns=["layer", "method"])


ROWS = {
    "layer": "the top layer: paths start above it and end at the input",
    "method": "attention: of that layer alone; rollout; flow: divided by its row sum",
}


def _layers_table(state: FlowState, source: str) -> Table:
    frame = _rows(state)
    frame["texts"] = state.moments.count[:, :, 0].ravel()
    values, columns = moment_columns(state.moments, list(VALUES), VALUES)
    columns = ROWS | {"texts": "texts that have the source"} | columns
    title = f"From {source} to the input: attention, rollout, flow (mean over sources, then texts)"
    return Table("flow-layers", title, pd.concat([frame, values], axis=1), columns)


def _texts_table(state: FlowState) -> Table:
    return sample_table("flow-texts", "Attention, rollout and flow by text", state.sample, _rows(state), ROWS, VALUES)


def _notes(state: FlowState) -> tuple[str, ...]:
    saturated = " A saturated flow says nothing about the source or the layers above the first."
    return ("Special tokens kept." + saturated * ("flow" in state.methods),)


def _headline(table: Table) -> Table:
    return Table(table.name, table.title, table.frame[["layer", "method", *VALUES]], table.columns)


def _pairs_table(state: FlowState, paths: Paths, text: TokenizedText) -> Table:
    shape = len(state.layers), len(paths.sources), len(text)
    layers, sources, tokens = (index.ravel() for index in np.indices(shape))
    at = (np.array(state.layers)[layers], sources, tokens)
    source = np.array(paths.sources)[sources]
    labels = np.array(text.labels, dtype=object)
    frame = pd.DataFrame({"layer": at[0], "source": source, "source_token": labels[source], "token": tokens})
    frame["token_text"] = labels[tokens]
    frame["start"] = pd.array(text.start, dtype="Int64")[tokens]
    frame["end"] = pd.array(text.end, dtype="Int64")[tokens]
    for method in state.methods:
        frame[method if method != "flow" else "flow_value"] = getattr(paths, method)[at]
    if "flow" in state.methods:
        frame["flow_share"], frame["bound"], frame["saturated"] = (
            paths.share("flow")[at],
            paths.bound[tokens],
            paths.saturated[at],
        )
    columns = {name: about for name, about in PAIRS.items() if name in frame}
    return Table("flow", "From each source to each input token", frame, columns)


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


def _layers_figure(state: FlowState, origin: str) -> Figure:
    panels = tuple(
        Lines(_method_curves(state, value, methods), "layer", label, title, low=0.0)
        for value, methods, label, title in (
            ("entropy", state.methods, "entropy, nats", "Spread over input tokens"),
            ("mass_self", state.methods, "weight", "On the source itself"),
            ("saturated", ("flow",), "share of pairs", "Flow at its bound"),
        )
        if set(methods) <= set(state.methods)
    )
    bounded = "A flow at its bound says nothing about the source or the layers above the first."
    note = bounded if "flow" in state.methods else ""
    if (texts := state.counts.texts) > 1:
        note += f" Lines: mean over {texts} texts; bands: one standard deviation either side."
    title = f"From {origin} to the input by layer: {', '.join(state.methods)}"
    return Figure("flow-layers", title, panels, len(panels), note.strip())


TITLES = {"attention": "Raw attention", "rollout": "Rollout", "flow": "Maximum flow, divided by its sum"}


def _method_curves(state: FlowState, value: str, methods: tuple[str, ...]) -> tuple[Series, ...]:
    index, curves = list(VALUES).index(value), []
    for method in methods:
        y = state.moments.mean[:, state.methods.index(method), index]
        spread = state.moments.std[:, state.methods.index(method), index]
        band = (y - spread, y + spread) if np.isfinite(spread).any() else (None, None)
        curves.append(Series(method, np.array(state.layers, dtype=float), y, *band))
    return tuple(curves)


def _coloured_text(state: FlowState, paths: Paths, text: TokenizedText) -> Figure:
    source = paths.sources[0]
    rows = tuple(f"layer {layer}" for layer in state.layers)
    panels = tuple(
        ColouredText(text.labels, rows, paths.share(method)[list(state.layers), 0], "weight", TITLES[method])
        for method in state.methods
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
