"""What keys and queries shared by all heads change on texts: logits, attention, and how far apart the two are.

With A, C and b_h of a decomposition (kit.sharing), x the attention module's own input and c_h = W_K b_Q,

    score_h(i, j) = ((x_i A) diag(b_h) (x_j C)^T + x_j c_h) / sqrt(dk)

stands for (x_i W_Q + b_Q) (x_j W_K)^T / sqrt(dk). b_K adds the same to all keys of a query and drops out of the
softmax, so it is left out of both; the content bias c_h is kept exactly. The scale stays sqrt(dk): the code of the
paper (arXiv 2006.16362) divides by sqrt(D / heads), which for D below heads x dk sharpens attention beside what the
decomposition does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import softmax

from .accumulators import Counts, Maxima, Moments
from .analysis import ALL, Analysis, Selection, State, derived
from .divergence import divergence_of_rows
from .maths import ratio
from .record import ForwardRecord, HeadWeights, ModelShape
from .redundancy_tables import SHARED
from .result import Figure, Lines, Result, Series, Table
from .sharing import Factors, Sharing, layer_tensors, shared
from .tables import moment_columns

Floats = NDArray[np.float64]
VALUES = {
    "logit_error": "mean |difference| of the scores over queries and keys, b_K left out of both; 0 or more",
    "logit_relative": "|difference|_F / |scores|_F, both less the mean of each query's row, which the softmax does not "
    "see; 0 (exact) or more; empty where all rows are constant",
    "attention_error": "mean |difference| of the attention weights over queries and keys, 0 to 1",
    "divergence": "Jensen-Shannon divergence of the two attention rows, mean over queries; nats, 0 to ln 2",
}
LARGEST = {
    "logit_largest": "largest |difference| of a score in all texts, 0 or more",
    "attention_largest": "largest |difference| of an attention weight in all texts, 0 to 1",
}


@dataclass(frozen=True)
class Layer:
    """A layer's queries and keys (head, width, channel), query biases (head, channel), and what stands for them."""

    query: Floats
    query_bias: Floats
    key: Floats
    shared: tuple[Factors, ...]

    def scores(self, x: Floats) -> Floats:
        """The layer's own scores without b_K: (token, width) to (head, query, key)."""
        queries = x @ self.query + self.query_bias[:, None]
        return queries @ (x @ self.key).transpose(0, 2, 1) / np.sqrt(self.query.shape[-1])

    def shared_scores(self, x: Floats, factors: Factors) -> Floats:
        """The scores by shared queries and keys, on the same axes."""
        mixed = (x @ factors.query) * factors.mixing[:, None]
        content = (self.key @ self.query_bias[..., None])[..., 0] @ x.T
        return (mixed @ (x @ factors.key).T + content[:, None]) / np.sqrt(self.query.shape[-1])


def differences(scores: Floats, other: Floats) -> tuple[Floats, Floats]:
    """VALUES and LARGEST of scores (head, query, key) against others: (head, value) each.

    >>> values, largest = differences(np.zeros((1, 1, 2)), np.log([[[3.0, 1.0]]]))
    >>> values[:, 2].round(6).tolist(), largest[:, 1].round(6).tolist()
    ([0.25], [0.25])
    """
    apart, attention = np.abs(scores - other), softmax(scores, axis=-1)
    weights = softmax(other, axis=-1)
    moved = np.abs(attention - weights)
    centred = [np.linalg.norm(_centred(part), axis=(1, 2)) for part in (scores - other, scores)]
    means = apart.mean(axis=(1, 2)), ratio(*centred), moved.mean(axis=(1, 2)), divergence_of_rows(attention, weights)
    return np.stack(means, axis=-1), np.stack([apart.max(axis=(1, 2)), moved.max(axis=(1, 2))], axis=-1)


def _centred(rows: Floats) -> Floats:
    return rows - rows.mean(axis=-1, keepdims=True)


@dataclass
class SharedAttentionState(State):
    """Per-text values (layer, size, head, value), their largest, and the layers' weights and decompositions."""

    moments: Moments
    largest: Maxima
    counts: Counts
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    parts: tuple[Layer, ...] | None = derived()


@dataclass(frozen=True)
class SharedAttention(Analysis[SharedAttentionState]):
    """What shared keys and queries change in the logits and the attention of texts: the companion of redundancy."""

    sharings: tuple[Sharing, ...]
    layers: Selection = ALL
    heads: Selection = ALL

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"hidden_states"})

    @property
    def needs_weights(self) -> bool:
        return True

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> SharedAttentionState:
        assert weights is not None
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        cells = (len(layers), len(self.sharings), len(heads))
        parts = self._parts(weights, [shape.weight_layer[layer] for layer in layers], heads)
        moments, largest = Moments.empty(*cells, len(VALUES)), Maxima.empty(*cells, len(LARGEST))
        return SharedAttentionState(moments, largest, Counts(), layers, heads, parts)

    def _parts(self, weights: HeadWeights, held: Sequence[int], heads: Sequence[int]) -> tuple[Layer, ...]:
        """What each of the checkpoint's layers `held` needs, one for each that runs."""
        parts = {}
        for at, tensor in zip(dict.fromkeys(held), layer_tensors(weights, held, heads), strict=True):
            biases = weights.query_bias[at][list(heads)].double().cpu().numpy()
            found = tuple(shared(tensor, how).factors for how in self.sharings)
            parts[at] = Layer(tensor.query, biases, tensor.key, found)
        return tuple(parts[at] for at in held)

    def update(self, state: SharedAttentionState, record: ForwardRecord) -> None:
        assert state.parts is not None
        for index, text in enumerate(record.texts):
            inputs = record.of_text("hidden_states", index, state.layers)
            found = [self._differences(part, x) for part, x in zip(state.parts, inputs, strict=True)]
            values, largest = (np.stack(kind) for kind in zip(*found, strict=True))
            state.moments.add(values[None])
            state.largest.add(largest)
            state.counts.add([len(text)])

    def _differences(self, part: Layer, x: Floats) -> tuple[Floats, Floats]:
        """VALUES and LARGEST (size, head, value) of one layer's input."""
        scores = part.scores(x)
        found = [differences(scores, part.shared_scores(x, factors)) for factors in part.shared]
        return np.stack([values for values, _ in found]), np.stack([largest for _, largest in found])

    def finalize(self, state: SharedAttentionState, record: ForwardRecord | None) -> Result:
        sizes = tuple(how.size for how in self.sharings)
        table = _table(state, sizes)
        note = "b_K is left out of scores (the softmax does not see it); the content bias is kept; scale sqrt(dk)."
        return Result(_headline(table), (table,), (_figure(state, sizes),), (note,))


def _table(state: SharedAttentionState, sizes: Sequence[int]) -> Table:
    rows = [(layer, size, head) for layer in state.layers for size in sizes for head in state.heads]
    frame = pd.DataFrame(rows, columns=["layer", "shared_size", "head"])[["layer", "head", "shared_size"]]
    frame["texts"] = state.counts.texts
    values, columns = moment_columns(state.moments, list(VALUES), VALUES)
    largest = pd.DataFrame(state.largest.values.reshape(len(frame), -1), columns=list(LARGEST))
    about = {**SHARED, "layer": "layer, from 0", "texts": "texts measured", **columns, **LARGEST}
    title = "What shared keys and queries change on texts"
    return Table("redundancy-texts", title, pd.concat([frame, values, largest], axis=1), about)


def _headline(table: Table) -> Table:
    """By layer and size: the mean over heads, and the largest of any."""
    groups = table.frame.groupby(["layer", "shared_size", "texts"], as_index=False)
    frame = groups.agg(dict.fromkeys(VALUES, "mean") | dict.fromkeys(LARGEST, "max"))
    columns = {**table.columns, **{name: f"mean over heads: {VALUES[name]}" for name in VALUES}}
    return Table(table.name, table.title, frame, {name: columns[name] for name in map(str, frame)})


PANELS = {
    "logit_relative": ("Logits", "relative error of centred rows"),
    "attention_error": ("Attention weights", "mean |difference|"),
    "divergence": ("Jensen-Shannon divergence of rows", "nats"),
}


def _figure(state: SharedAttentionState, sizes: Sequence[int]) -> Figure:
    panels = tuple(
        Lines(
            tuple(_curve(state, at, size, list(VALUES).index(name)) for at, size in enumerate(sizes)),
            "layer",
            unit,
            title,
            low=0.0,
        )
        for name, (title, unit) in PANELS.items()
    )
    texts = state.counts.texts
    note = f"Mean over heads and {texts} text{'s' * (texts != 1)}; bands: one standard deviation of heads either side."
    return Figure("redundancy-texts", "What shared keys and queries change", panels, columns=3, note=note)


def _curve(state: SharedAttentionState, at: int, size: int, value: int) -> Series:
    heads = Moments.empty(len(state.layers))
    heads.add(state.moments.mean[:, at, :, value].T)
    y, spread = heads.mean, heads.std
    band = (np.maximum(y - spread, 0.0), y + spread) if np.isfinite(spread).any() else (None, None)
    return Series(f"shared size {size}", np.array(state.layers, dtype=float), y, *band)
