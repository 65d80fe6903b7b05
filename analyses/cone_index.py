"""How narrow a cone the token vectors fill, at five points of each block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .kit.accumulators import Counts, Moments, Sample, Totals
from .kit.analysis import ALL, Analysis, Selection, State, chosen_names, setting
from .kit.maths import between_texts_cosine, direction_sums, lengths, mean_cosine
from .kit.pieces import of_heads, over_layers
from .kit.record import ForwardRecord, HeadWeights, ModelShape
from .kit.result import Figure, Lines, Result, Series, Table
from .kit.tables import moment_columns, sample_table

Floats = NDArray[np.float64]
SPECIAL = (True, False)
VALUES = {
    "n": "token vectors of a text (zero vectors have no direction and are left out)",
    "cone_index": "I = |sum of the unit token vectors|, 0 to n",
    "cone_per_token": "I / n, 0 to 1",
    "mean_cosine": "mean cosine of different tokens of a text, (I^2 - n) / (n (n - 1)); empty below two tokens",
    "isotropic": "sqrt(n): root mean square of I for independent uniform directions",
    "isotropic_per_token": "1 / sqrt(n): root mean square of I / n for such directions",
}


POINTS = {
    "hidden_state": "hidden_states",
    "head_output": "head_outputs",
    "concatenated_heads": "head_outputs",
    "attention_norm": "attention_norm",
}
"""Where vectors are measured, and the recorded tensor that holds them."""


@dataclass(frozen=True)
class Place:
    """One of POINTS at a depth of the hidden states, or inside a block (for one head of it)."""

    point: str
    index: int  # depth of a hidden state, else layer
    head: int | None = None


def places(layers: tuple[int, ...], heads: tuple[int, ...], points: Collection[str] = tuple(POINTS)) -> list[Place]:
    """Every measuring place of the chosen layers, each once, in the order in which states hold them."""
    within = {"head_output": heads}
    return [
        Place(point, index, head)
        for point in points
        for index in indices_of(point, layers)
        for head in within.get(point, (None,))
    ]


def indices_of(point: str, layers: tuple[int, ...]) -> tuple[int, ...]:
    """The layers, or for hidden states the depths at both ends of each."""
    if point != "hidden_state":
        return layers
    return tuple(sorted({depth for layer in layers for depth in (layer, layer + 1)}))


def measure(sums: Floats, n: Floats) -> Floats:
    """The values of VALUES, on a last axis, from sums of unit vectors (..., width) and how many each adds (...).

    >>> measure(np.array([1.0, 1.0]), np.array(2.0)).round(3).tolist()
    [2.0, 1.414, 0.707, 0.0, 1.414, 0.707]
    """
    # Rounding may carry n equal directions a last bit above n.
    cone = np.minimum(lengths(sums), n)
    root = np.sqrt(np.maximum(n, 1.0))
    values = np.stack([cone, cone / np.maximum(n, 1.0), mean_cosine(cone, n), root, 1 / root], axis=-1)
    return np.concatenate([n[..., None], np.where(n[..., None] > 0, values, np.nan)], axis=-1)


@dataclass
class ConeIndexState(State):
    """Per-text values (place, special, value), and per place the sums that give the cosine between texts."""

    moments: Moments
    sample: Sample
    counts: Counts
    direction_sums: dict[str, Totals]
    square_sums: Totals
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    points: tuple[str, ...]

    @property
    def places(self) -> list[Place]:
        """What the first axis of every array stands for."""
        return places(self.layers, self.heads, self.points)


@dataclass(frozen=True)
class ConeIndex(Analysis[ConeIndexState]):
    """How narrow a cone the token vectors fill, layer by layer: I = |sum of the unit token vectors|.

    Beside I stand I / n, the mean cosine of different tokens (I^2 - n) / (n (n - 1)), and sqrt(n), the root mean
    square of I for independent uniform directions; I and I / n depend on n, the mean cosine does not. Measured at the
    layer input, each head's output (A V, before W_O), the concatenated heads, after the attention LayerNorm and at the
    layer output, with special tokens and without. A corpus also gives the mean cosine of tokens of different texts,
    over all such pairs: the baseline of Ethayarajh 2019 without its sampling. The cone index is that of arXiv
    2502.12033, without its padding rows.

    Example: bertgeo cone-index --layers all
    """

    layers: Selection = setting(
        ALL, "Layers, from 0: all, or such as 0,3-5,-1. Layer l leads from depth l to depth l + 1."
    )
    heads: Selection = setting(ALL, "Heads, from 0: all, or such as 0,3-5,-1.")
    points: str = setting(
        "all",
        "Where to measure, separated by commas: hidden_state (layer input and output), head_output, "
        "concatenated_heads, attention_norm; all measures everywhere.",
    )
    sample: int = setting(1000, "Texts of a corpus whose own values are written (those of smallest hash).", least=0)
    seed: int = setting(0, "Seed of that sample's hash.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(POINTS[point] for point in self._points())

    def listing(self) -> Table | None:
        self._points()
        return None

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> ConeIndexState:
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        points = self._points()
        at = places(layers, heads, points)
        widths = {"head_output": shape.head_width, "concatenated_heads": shape.heads * shape.head_width}
        counted = Counter(place.point for place in at)
        sums = {point: Totals.empty(count, 2, widths.get(point, shape.width)) for point, count in counted.items()}
        moments = Moments.empty(len(at), 2, len(VALUES))
        sample = Sample.empty(self.sample, self.seed)
        return ConeIndexState(moments, sample, Counts(), sums, Totals.empty(len(at), 2, 3), layers, heads, points)

    def update(self, state: ConeIndexState, record: ForwardRecord) -> None:
        ordinary = ~np.array([text.special for text in record.texts])
        chosen = np.stack([np.ones(ordinary.shape), ordinary], axis=1)
        parts = []
        for point in state.points:
            sums, n = _direction_sums(state, record, point, chosen)
            for own in sums:
                state.direction_sums[point].add(own)
            parts.append(measure(sums, n))
        values = np.concatenate(parts, axis=1)
        n, cone = values[..., 0], np.where(values[..., 0] > 0, values[..., 1], 0.0)
        for own in np.stack([n, n**2, cone**2], axis=-1):
            state.square_sums.add(own)
        state.moments.add(values)
        state.sample.add(record.texts, values)
        state.counts.add([len(text) for text in record.texts])

    def _points(self) -> tuple[str, ...]:
        asked = chosen_names(self.points, POINTS, "point")
        return tuple(point for point in POINTS if point in asked)

    def per_text(self, state: ConeIndexState) -> Table:
        return _texts_table(state)

    def finalize(self, state: ConeIndexState, record: ForwardRecord | None) -> Result:
        table = _cone_table(state)
        tables = [table] if record is not None else [table, self.per_text(state)]
        figure = _depth_figure(state)
        return Result(_headline(table), tuple(tables), (figure,), _notes(state))


def _direction_sums(state: ConeIndexState, record: ForwardRecord, point: str, chosen: Floats) -> tuple[Floats, Floats]:
    """Sums of unit vectors (text, place, special, width) at the places of a point, and how many each adds."""
    at = partial(_concatenated_sums if point == "concatenated_heads" else _unit_sums, chosen, state.heads)
    found = over_layers(record, POINTS[point], indices_of(point, state.layers), at)
    found = found.reshape(len(found), -1, *found.shape[-2:])
    return found[..., :-1], found[..., -1]


def _unit_sums(chosen: Floats, heads: tuple[int, ...], vectors: Floats, texts: slice) -> Floats:
    """Of vectors (layer, text, [head,] token, width): (layer, text, [head,] special, width + 1), their number last."""
    of_head = vectors.ndim == 5
    own = of_heads(vectors, heads) if of_head else vectors
    sums, n = direction_sums(own, lengths(own), chosen[texts, None] if of_head else chosen[texts])
    return np.concatenate([sums, n[..., None]], axis=-1)


def _concatenated_sums(chosen: Floats, heads: tuple[int, ...], outputs: Floats, texts: slice) -> Floats:
    """The same of all heads' outputs as one vector a token, which is put together only when it has been summed."""
    whole = np.linalg.norm(lengths(outputs), axis=2)
    sums, n = direction_sums(outputs, whole[:, :, None], chosen[texts, None])
    joined = np.moveaxis(sums, 2, 3).reshape(*sums.shape[:2], 2, -1)
    return np.concatenate([joined, n[:, :, 0, :, None]], axis=-1)


def between_texts(state: ConeIndexState) -> tuple[Floats, Floats]:
    """Mean cosine of tokens of different texts, and the number of such pairs (unordered), per place and special.

    NaN below two texts.
    """
    total = np.concatenate([(sums.values**2).sum(axis=-1) for sums in state.direction_sums.values()])
    return between_texts_cosine(total, *np.moveaxis(state.square_sums.values, -1, 0))


def _place_frame(state: ConeIndexState) -> pd.DataFrame:
    """The rows of a table, block by block in the order of the pass; `place` and `variant` say where values stand."""
    at = {place: number for number, place in enumerate(state.places)}
    rows = [
        (layer, depth, name, place.head, special, at[place], variant)
        for layer in state.layers
        for name, depth, place in _block(layer, state.heads)
        if place in at
        for variant, special in enumerate(SPECIAL)
    ]
    frame = pd.DataFrame(rows, columns=["layer", "depth", "point", "head", "special", "place", "variant"])
    return frame.astype({"depth": "Int64", "head": "Int64"})


def _block(layer: int, heads: tuple[int, ...]) -> Iterator[tuple[str, int | None, Place]]:
    yield "layer_input", layer, Place("hidden_state", layer)
    yield from (("head_output", None, Place("head_output", layer, head)) for head in heads)
    yield "concatenated_heads", None, Place("concatenated_heads", layer)
    yield "attention_norm", None, Place("attention_norm", layer)
    yield "layer_output", layer + 1, Place("hidden_state", layer + 1)


PLACE_COLUMNS = {
    "layer": "layer, from 0",
    "depth": "depth of the hidden state, 0 is the first layer's input; empty inside a block",
    "point": "layer_input, head_output (A V, before W_O), concatenated_heads, attention_norm or layer_output",
    "head": "head, from 0, for head_output",
    "special": "whether special tokens count",
}


def _cone_table(state: ConeIndexState) -> Table:
    frame = _place_frame(state)
    at = frame.pop("place"), frame.pop("variant")
    frame["texts"] = state.counts.texts
    values, columns = moment_columns(state.moments.at(at), list(VALUES), VALUES)
    frame = pd.concat([frame, values], axis=1)
    columns = PLACE_COLUMNS | {"texts": "texts measured"} | columns
    if state.counts.texts > 1:
        cosine, pairs = between_texts(state)
        frame["between_texts_cosine"], frame["between_texts_pairs"] = cosine[at], pairs[at].astype(np.int64)
        columns["between_texts_cosine"] = "mean cosine of tokens of different texts, over all such pairs: the baseline"
        columns["between_texts_pairs"] = "number of those pairs"
    title, counts = "Cone index by layer and point (mean over texts)", ("texts", "between_texts_pairs")
    return Table("cone-index", title, frame, columns, counts)


def _texts_table(state: ConeIndexState) -> Table:
    frame = _place_frame(state)
    at = frame.pop("place"), frame.pop("variant")
    return sample_table(
        "cone-index-texts", "Cone index by text", state.sample, frame, PLACE_COLUMNS, VALUES, lambda values: values[at]
    )


def _headline(table: Table) -> Table:
    shown = ["n", "cone_index", "cone_per_token", "mean_cosine", "isotropic", "between_texts_cosine"]
    values = [name for name in shown if name in table.frame]
    chosen = table.frame[table.frame["point"].isin(["layer_input", "layer_output"])]
    if len(chosen):
        frame = chosen.drop_duplicates(["depth", "special"])[["depth", "special", *values]]
        return Table("cone-index-depth", "Cone index over depth", frame, table.columns)
    frame = table.frame.groupby(["layer", "point", "special"], as_index=False, sort=False)[values].mean()
    return Table("cone-index-points", "Cone index by layer and point (mean over heads)", frame, table.columns)


def _notes(state: ConeIndexState) -> tuple[str, ...]:
    if state.counts.texts > 1:
        return ()
    return ("One text: the baseline between texts needs a corpus (--corpus).",)


def _depth_figure(state: ConeIndexState) -> Figure:
    panels = tuple(
        Lines(
            (*_curves(state, SPECIAL.index(special), value), *_baselines(state, SPECIAL.index(special), value)),
            "depth",
            label,
            f"{title}, {'with' if special else 'without'} special tokens",
            low=0.0 if value == "cone_per_token" else None,
            high=1.0,
        )
        for value, label, title in (
            ("cone_per_token", "cone index / n", "Cone index"),
            ("mean_cosine", "mean cosine", "Mean cosine"),
        )
        for special in SPECIAL
    )
    texts = state.counts.texts
    note = "Depth 0 is the first layer's input; points inside block l stand at their place between depths l and l + 1."
    if "hidden_state" in state.points:
        note += " Dashed: what isotropic directions would give, and tokens of different texts (hidden states)."
    if texts > 1:
        note += f" Lines: mean over {texts} texts; bands: one standard deviation either side. Heads: mean over heads."
    return Figure("cone-index", "How narrow a cone the token vectors fill", panels, columns=2, note=note)


CURVES = {
    "hidden_state": ("hidden states", 0.0),
    "head_output": ("head outputs", 0.25),
    "concatenated_heads": ("concatenated heads", 0.35),
    "attention_norm": ("attention LayerNorm", 0.6),
}
"""What each point's curve is called, and where within its block it is drawn."""


def _curves(state: ConeIndexState, special: int, value: str) -> tuple[Series, ...]:
    index = list(VALUES).index(value)
    frame = pd.DataFrame(state.places)
    frame["mean"], frame["std"] = state.moments.mean[:, special, index], state.moments.std[:, special, index]
    curves = []
    for point in state.points:
        label, offset = CURVES[point]
        by_index = frame[frame["point"] == point].groupby("index")[["mean", "std"]].mean()
        x, y, spread = by_index.index.to_numpy(float) + offset, by_index["mean"].to_numpy(), by_index["std"].to_numpy()
        band = (y - spread, y + spread) if np.isfinite(spread).any() else (None, None)
        curves.append(Series(label, x, y, *band))
    return tuple(curves)


def _baselines(state: ConeIndexState, special: int, value: str) -> tuple[Series, ...]:
    """Isotropic directions, and in a corpus the hidden states of different texts."""
    hidden = [at for at, place in enumerate(state.places) if place.point == "hidden_state"]
    if not hidden:
        return ()
    depths = np.array([float(state.places[at].index) for at in hidden])
    if value == "cone_per_token":
        isotropic = state.moments.mean[hidden, special, list(VALUES).index("isotropic_per_token")]
        return (Series("isotropic", depths, isotropic, dashed=True),)
    flat = Series("isotropic", depths, np.zeros_like(depths), dashed=True)
    between = between_texts(state)[0][hidden, special]
    return (flat, Series("different texts", depths, between, dashed=True)) if np.isfinite(between).any() else (flat,)
