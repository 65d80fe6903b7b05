"""What bilinear forms are asked of texts: what the query bias moves, and which tokens search and are found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .accumulators import Counts, Moments, TopTokens
from .analysis import Analysis, Selection, State, derived
from .bilinear_weights import PLACE
from .forms import ThinForms
from .maths import mean_of_rows, ratio
from .record import ForwardRecord, HeadWeights, ModelShape, TokenizedText
from .result import Figure, Heatmap, Result, Table
from .subspaces import thin_factors
from .tables import moment_columns
from .units import Kinds, units_of

Floats = NDArray[np.float64]
KINDS = ("cls", "sep", "punctuation", "other")
SIDES = ("searching", "searched")
TERMS = {
    "bias_std": "standard deviation over a text's keys j of the query-independent term b_Q . W_K x_j / sqrt(channel)",
    "bilinear_std": "root mean square over queries i of the deviation over keys of x_i^T M x_j / sqrt(channel)",
    "bias_share": "bias_std^2 / (bias_std^2 + bilinear_std^2), 0 to 1; empty where neither varies",
}
DRAWN = {
    "bias_std": "Query bias: std of b_Q . W_K x_j",
    "bilinear_std": "Bilinear part: std of x_i^T M x_j",
    "bias_share": "Query bias: share of the variance",
}
SHARES = {
    side: f"share of a token vector's squared length inside the {side} subspace, mean over tokens of the kind, 0 to 1"
    for side in SIDES
}
MOVED = (
    "Standard deviations over keys, since what is the same for every key of a row leaves its softmax alone (so b_K "
    "drops out)."
)
INSIDE = (
    "Shares of squared length inside the first {rank} singular directions of M_h, of the attention's input as it is, "
    "not centred; a random vector has {expected:.3f}."
)


@dataclass(frozen=True)
class Reading:
    """Of the chosen heads: b_Q (layer, head, channel), and both subspaces (layer, width, side x head x rank)."""

    biases: Floats
    bases: Floats

    @classmethod
    def of(cls, weights: HeadWeights, held: list[int], heads: list[int], rank: int) -> Reading:
        """Those of the checkpoint's layers `held`, a layer that is run again (ALBERT) each time it is run."""
        once = sorted(set(held))
        places = [layer for layer in once for _ in heads], heads * len(once)
        factors = thin_factors(weights, *places)
        sides = ThinForms(factors["Q"], factors["K"]).directions(rank)
        by_layer = [side.reshape(len(once), len(heads), -1, rank).transpose(0, 2, 1, 3) for side in sides]
        bases = np.stack(by_layer, axis=2).reshape(len(once), by_layer[0].shape[1], -1)
        biases = weights.query_bias[held][:, heads].double().cpu().numpy()
        return cls(biases, np.ascontiguousarray(bases[[once.index(layer) for layer in held]]))


@dataclass
class TextsState(State):
    """Per-text values (layer, head, term) and (layer, head, kind, side), and the tokens of largest share."""

    terms: Moments
    shares: Moments
    top: TopTokens
    counts: Counts
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    rank: int
    width: int
    reading: Reading | None = derived()


@dataclass(frozen=True)
class BilinearOnTexts(Analysis[TextsState]):
    """On texts: the query-independent term of the score against the bilinear part, and the tokens in each subspace."""

    layers: Selection
    heads: Selection
    rank: int
    top: int

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"q", "k", "hidden_states"})

    @property
    def needs_weights(self) -> bool:
        return True

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> TextsState:
        assert weights is not None
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        reading = Reading.of(weights, [shape.weight_layer[layer] for layer in layers], list(heads), self.rank)
        size = len(layers), len(heads)
        return TextsState(
            Moments.empty(*size, len(TERMS)),
            Moments.empty(*size, len(KINDS), len(SIDES)),
            TopTokens.empty(len(SIDES) * size[0] * size[1], size=self.top),
            Counts(),
            layers,
            heads,
            self.rank,
            shape.width,
            reading,
        )

    def update(self, state: TextsState, record: ForwardRecord) -> None:
        assert state.reading is not None
        heads = list(state.heads)
        for index, text in enumerate(record.texts):
            queries, keys = (record.of_text(name, index, state.layers)[:, heads] for name in ("q", "k"))
            state.terms.add(terms(queries, keys, state.reading.biases)[None])
            inputs = record.of_text("hidden_states", index, state.layers)
            shares = subspace_shares(inputs, state.reading.bases, len(heads))
            state.shares.add(_by_kind(shares, text)[None])
            state.top.add(text.ids, text.tokens, shares.reshape(-1, len(text)))
            state.counts.add([len(text)])

    def finalize(self, state: TextsState, record: ForwardRecord | None) -> Result:
        heads = _terms_table(state)
        tables = (heads, _kinds_table(state), _top_table(state))
        return Result(_headline(state), tables, _figures(state), (MOVED, _inside(state)))


def terms(queries: Floats, keys: Floats, biases: Floats) -> Floats:
    """The values of TERMS for every head: q and k (layer, head, token, channel), with biases, and b_Q.

    Shape (layer, head, term). With centred keys K, sum_ij (q_i . k_j)^2 = sum of the entries of Q^T Q times K^T K.

    >>> keys = np.array([[[[1.0], [-1.0]]]])
    >>> terms(np.array([[[[3.0], [1.0]]]]), keys, np.array([[[1.0]]])).round(6).tolist()
    [[[1.0, 1.414214, 0.333333]]]
    """
    own = queries - biases[..., None, :]
    centred = keys - keys.mean(axis=-2, keepdims=True)
    channels, tokens = keys.shape[-1], keys.shape[-2]
    bias = np.einsum("lhtc,lhc->lht", centred, biases)
    bias_variance = np.einsum("lht,lht->lh", bias, bias) / (tokens * channels)
    grams = [vectors.swapaxes(-1, -2) @ vectors for vectors in (own, centred)]
    variance = np.maximum(np.einsum("lhcd,lhcd->lh", *grams), 0.0) / (tokens**2 * channels)
    return np.stack([np.sqrt(bias_variance), np.sqrt(variance), ratio(bias_variance, bias_variance + variance)], -1)


def subspace_shares(inputs: Floats, bases: Floats, heads: int) -> Floats:
    """|U^T x|^2 / |x|^2 of every token in both subspaces of every head, 0 to 1; 0 for a zero vector.

    Shapes (layer, token, width) and (layer, width, side x head x rank) to (layer, head, side, token).
    """
    coordinates = (inputs @ bases).reshape(*inputs.shape[:2], len(SIDES), heads, -1)
    inside = np.einsum("ltshr,ltshr->lhst", coordinates, coordinates)
    squares = np.einsum("ltw,ltw->lt", inputs, inputs)[:, None, None]
    return np.minimum(inside / np.where(squares > 0, squares, 1.0), 1.0)


def _by_kind(shares: Floats, text: TokenizedText) -> Floats:
    """Means over the tokens of each kind (layer, head, kind, side); NaN for a kind that the text lacks."""
    kinds = Kinds([units_of(text, words=False)])
    masks = np.stack([getattr(kinds, kind)[0] for kind in KINDS]).astype(float)
    counts = masks.sum(axis=1)
    means = np.einsum("lhst,kt->lhks", shares, masks / np.maximum(counts, 1)[:, None])
    return np.where(counts[:, None] > 0, means, np.nan)


def _index(state: TextsState, **more: tuple[object, ...]) -> pd.DataFrame:
    product = pd.MultiIndex.from_product([state.layers, state.heads, *more.values()], names=[*PLACE, *more])
    return product.to_frame(index=False)


def _terms_table(state: TextsState) -> Table:
    frame = _index(state).assign(texts=state.counts.texts)
    values, columns = moment_columns(state.terms, list(TERMS), TERMS)
    about = {**PLACE, "texts": "texts measured", **columns}
    title = "The query-independent term of scores against their bilinear part, mean over texts"
    return Table("bilinear-texts", title, pd.concat([frame, values], axis=1), about)


def _kinds_table(state: TextsState) -> Table:
    frame = _index(state, kind=KINDS).assign(texts=state.shares.count[..., 0].ravel())
    values, columns = moment_columns(state.shares, SIDES, SHARES)
    about = {**PLACE, "kind": "tokens meant: [CLS], [SEP], punctuation, or all others"}
    about |= {"texts": "texts that have such tokens", **columns}
    title = "Kinds of tokens in the searching and the searched subspace of M_h, mean over texts"
    return Table("bilinear-token-kinds", title, pd.concat([frame, values], axis=1), about)


def _top_table(state: TextsState) -> Table:
    frame = _index(state, side=SIDES, place=tuple(range(1, state.top.size + 1)))
    ids = state.top.ids.ravel()
    frame["token"] = np.array([state.top.pieces.get(token, "") for token in ids.tolist()], dtype=object)
    frame["id"], frame["share"] = ids, state.top.values.ravel()
    frame = frame[ids >= 0].reset_index(drop=True)
    columns = {
        **PLACE,
        "side": "searching (left singular vectors of M_h) or searched (right)",
        "place": "by falling share, from 1",
        "token": "the token as it stands in the vocabulary",
        "id": "its row in the embedding",
        "share": "largest share of squared length inside the subspace at any of its occurrences, 0 to 1",
    }
    return Table("bilinear-top-tokens", "Tokens of the texts that lie deepest in each subspace", frame, columns)


def _headline(state: TextsState) -> Table:
    means = {name: mean_of_rows(state.terms.mean[..., at]) for at, name in enumerate(TERMS)}
    frame = pd.DataFrame({"layer": state.layers, **means})
    columns = {"layer": "layer, from 0"} | TERMS
    return Table("bilinear-texts-layers", "On texts, by layer (mean over heads)", frame, columns)


def _figures(state: TextsState) -> tuple[Figure, ...]:
    moved = [
        _heatmap(state, state.terms.mean[..., at], DRAWN[name], "share" if "share" in name else "score")
        for at, name in enumerate(TERMS)
    ]
    names = {kind: f"[{kind.upper()}]" if kind in ("cls", "sep") else kind for kind in KINDS}
    kinds = [
        _heatmap(state, state.shares.mean[..., of, at], f"{names[kind]}, {side}", "share", high=None)
        for at, side in enumerate(SIDES)
        for of, kind in enumerate(KINDS)
    ]
    return (
        Figure("bilinear-texts", "What the query-independent term moves in scores", tuple(moved), 3, MOVED),
        Figure(
            "bilinear-token-kinds",
            "Kinds of tokens in each head's two subspaces",
            tuple(kinds),
            len(KINDS),
            _inside(state),
        ),
    )


def _inside(state: TextsState) -> str:
    return INSIDE.format(rank=state.rank, expected=state.rank / state.width)


def _heatmap(state: TextsState, values: Floats, title: str, unit: str, high: float | None = 1.0) -> Heatmap:
    names = tuple(map(str, state.layers)), tuple(map(str, state.heads))
    return Heatmap(values, title, *names, "layer", "head", unit, high=high if unit == "share" else None)
