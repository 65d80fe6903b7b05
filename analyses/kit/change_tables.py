"""The change between two checkpoints as tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .accumulators import Counts, Moments
from .covariance import Covariance, linear_cka, principal_bases, shared_directions
from .result import Figure, Heatmap, Lines, Result, Series, Table
from .subspaces import LETTERS
from .tables import moment_columns
from .weight_change import SUBSPACES, WEIGHTS

Floats = NDArray[np.float64]
HEAD = {"layer": "layer, from 0 (of layers that share weights the first)", "head": "head, from 0"}
ATTENTION = {
    "attention_cosine": "cosine of A's and B's attention rows, mean over query rows, then over texts; 0 to 1",
    "jensen_shannon": "Jensen-Shannon divergence of A's and B's attention rows, nats, 0 to ln 2; mean over query "
    "rows, then over texts; no smoothing, no root",
}
DEPTH = "0 is the first layer's input, l + 1 the output of layer l"
COSINE = {"token_cosine": "cosine of a token's vector in A with the same token's in B, mean over tokens, then texts"}
TEXTS = {"texts": "texts measured"}


@dataclass(frozen=True)
class Measured:
    """What was chosen, and what the weights gave."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    depths: tuple[int, ...]
    weight_layer: tuple[int, ...]
    weights: pd.DataFrame
    subspaces: pd.DataFrame

    @property
    def held(self) -> list[int]:
        """The layers that stand in the tables of weights."""
        return list(dict.fromkeys(self.weights["layer"]))

    def row_of(self, layer: int) -> int:
        """Which of `held` has the weights of a layer."""
        return [self.weight_layer[at] for at in self.held].index(self.weight_layer[layer])


@dataclass(frozen=True)
class Seen:
    """What the texts gave."""

    attention: Moments
    tokens: Moments
    joint: Covariance
    counts: Counts


def result_of(measured: Measured, seen: Seen | None = None, principal: int = 0) -> Result:
    """Tables and figures of the weights, and of texts where some were read."""
    weights = Table("compare-weights", "Change of weights by head, A to B", measured.weights, HEAD | WEIGHTS, ())
    letters = {"subspace": "Q, K, V: what the head's W reads; O: what its W_O writes"}
    about = HEAD | letters | SUBSPACES
    subspaces = Table("compare-subspaces", "A's and B's subspaces of each head", measured.subspaces, about, ())
    tables, figures = [weights, subspaces], [_weights_figure(measured), _subspaces_figure(measured)]
    layers = _layers_frame(measured)
    if seen is not None:
        attention, hidden = _attention_table(measured, seen), _hidden_table(measured, seen, principal)
        tables += [attention, hidden]
        figures += [_attention_figure(measured, seen), _hidden_figure(hidden, seen.counts, principal)]
        layers = layers.merge(_layers_seen(measured, attention, hidden), on="layer")
    by_layer = _layers_table(layers)
    return Result(_headline(by_layer), (by_layer, *tables), tuple(figures), _notes(measured, seen))


def _layers_frame(measured: Measured) -> pd.DataFrame:
    means = measured.weights.groupby("layer")[list(WEIGHTS)].mean()
    rows = [means.iloc[measured.row_of(layer)] for layer in measured.layers]
    frame = pd.DataFrame(rows)[[name for name in WEIGHTS if name.endswith("_change")]].reset_index(drop=True)
    frame.insert(0, "layer", measured.layers)
    return frame


def _layers_seen(measured: Measured, attention: Table, hidden: Table) -> pd.DataFrame:
    means = attention.frame.groupby("layer", as_index=False)[list(ATTENTION)].mean()
    after = hidden.frame.assign(layer=hidden.frame["depth"] - 1)[["layer", "linear_cka", *COSINE]]
    return means.merge(after, on="layer")


def _layers_table(layers: pd.DataFrame) -> Table:
    about = {"layer": "layer, from 0"} | WEIGHTS | ATTENTION | _hidden_columns(0)
    of_heads = dict.fromkeys(WEIGHTS | ATTENTION, "; mean over heads")
    described = {name: about[name] + of_heads.get(name, "") for name in map(str, layers)}
    title = "Change by layer, A to B (mean over heads; hidden states at the layer's output)"
    return Table("compare-layers", title, layers, described, ())


def _headline(layers: Table) -> Table:
    usual = ("layer", "homogeneous_change", "ov_change", *ATTENTION, "linear_cka", *COSINE)
    shown = [name for name in usual if name in layers.frame]
    return Table(layers.name, layers.title, layers.frame[shown], layers.columns, ())


def _attention_table(measured: Measured, seen: Seen) -> Table:
    index = [(layer, head) for layer in measured.layers for head in measured.heads]
    values, columns = moment_columns(seen.attention, list(ATTENTION), ATTENTION)
    frame = pd.concat([pd.DataFrame(index, columns=["layer", "head"]).assign(texts=seen.counts.texts), values], axis=1)
    about = {"layer": "layer, from 0", "head": "head, from 0"} | TEXTS | columns
    return Table("compare-attention", "A's and B's attention by head", frame, about)


def _hidden_columns(principal: int) -> dict[str, str]:
    return {
        "linear_cka": "linear CKA of all token vectors in A and in B, centred, 0 to 1: the plain estimate, high by "
        "chance where tokens are fewer than channels; empty where nothing varies",
        **COSINE,
        "principal_share": f"mean cos^2 of the principal angles between the {principal} leading principal directions "
        "of A's vectors and B's, 0 to 1; empty where vectors vary in fewer",
        "principal_angle": "the largest of these angles, degrees, 0 to 90",
    }


def _hidden_table(measured: Measured, seen: Seen, principal: int) -> Table:
    frame = pd.DataFrame({"depth": measured.depths, "texts": seen.counts.texts, "tokens": seen.counts.tokens})
    values = [hidden_change(products, principal) for products in seen.joint.products]
    frame[["linear_cka", "principal_share", "principal_angle"]] = np.array(values)
    means, deviations = moment_columns(seen.tokens, list(COSINE), COSINE)
    columns = {"depth": DEPTH} | TEXTS | {"tokens": "tokens measured"} | _hidden_columns(principal) | deviations
    frame = pd.concat([frame, means], axis=1)
    title = "A's and B's hidden states by depth"
    return Table("compare-hidden", title, frame[list(columns)], columns, ("texts", "tokens"))


def hidden_change(products: Floats, principal: int) -> tuple[float, float, float]:
    """Linear CKA, mean cos^2 and largest angle of the principal subspaces, from centred products of (A, B) end to end.

    Shape (2 width, 2 width). NaN where vectors do not vary, or vary in fewer than `principal` directions.

    >>> x = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 3.0], [0.0, -3.0]]); both = np.hstack([x, x[:, ::-1]])
    >>> [round(value, 4) for value in hidden_change(both.T @ both, 1)]
    [1.0, 0.0, 90.0]
    """
    width = len(products) // 2
    first, between, second = products[:width, :width], products[:width, width:], products[width:, width:]
    bases, there = principal_bases(np.stack([first, second]), principal)
    share, angle = shared_directions(bases[:1], bases[1:])
    cka = float(linear_cka(first, between, second))
    return (cka, float(share[0]), float(angle[0])) if there.all() else (cka, float("nan"), float("nan"))


Shown = tuple[Sequence[int], Sequence[int]]
"""Layers and heads of a map's rows and columns."""


def _map(values: NDArray[Any], title: str, shown: Shown, unit: str, low: float | None, high: float | None) -> Heatmap:
    layers, heads = (tuple(map(str, chosen)) for chosen in shown)
    values = values.reshape(len(layers), len(heads))
    return Heatmap(values, title, layers, heads, "layer", "head", unit, low, high)


FORMS = {
    "homogeneous_change": "M~ = [W_Q b_Q]^T [W_K b_K]",
    "bilinear_change": "M = W_Q^T W_K",
    "ov_change": "W_V^T W_O^T",
    "query_change": "W_Q",
    "key_change": "W_K",
    "value_change": "W_V",
    "output_change": "W_O",
}


def _weights_figure(measured: Measured) -> Figure:
    shown = measured.held, measured.heads
    maps = [_map(_column(measured.weights, name), FORMS[name], shown, "|B - A| / |A|", 0.0, None) for name in FORMS]
    cosine = _column(measured.weights, "homogeneous_cosine")
    panels = (*maps, _map(cosine, "Frobenius cosine of M~", shown, "cosine", None, 1.0))
    note = "Relative change in the Frobenius norm of each head's weights. M~ is M with its biases."
    return Figure("compare-weights", "Change of weights, A to B", panels, columns=4, note=note)


def _subspaces_figure(measured: Measured) -> Figure:
    shown, frame = (measured.held, measured.heads), measured.subspaces
    own = {letter: frame[frame["subspace"] == letter] for letter in LETTERS}
    shares = [
        _map(_column(own[letter], "kernel_share"), f"{letter}: projection kernel / dim", shown, "mean cos^2", None, 1.0)
        for letter in LETTERS
    ]
    angles = [
        _map(_column(own[letter], "largest_angle"), f"{letter}: largest angle", shown, "degrees", 0.0, None)
        for letter in LETTERS
    ]
    note = "Upper row: mean cos^2 of the principal angles of A's and B's subspace. Lower row: the largest of them."
    return Figure("compare-subspaces", "Subspaces of heads, A against B", (*shares, *angles), columns=4, note=note)


def _column(frame: pd.DataFrame, name: str) -> Floats:
    return frame[name].to_numpy(dtype=np.float64)


def _attention_figure(measured: Measured, seen: Seen) -> Figure:
    mean, shown = seen.attention.mean, (measured.layers, measured.heads)
    panels = (
        _map(mean[..., 0], "Cosine of attention rows", shown, "cosine", None, 1.0),
        _map(mean[..., 1], "Jensen-Shannon divergence", shown, "nats", 0.0, None),
    )
    return Figure("compare-attention", "Attention, A against B", panels, columns=2, note=_read(seen.counts))


def _hidden_figure(hidden: Table, counts: Counts, principal: int) -> Figure:
    frame = hidden.frame

    def lines(title: str, unit: str, curves: Mapping[str, str], high: float) -> Lines:
        x = frame["depth"].to_numpy(dtype=float)
        series = tuple(Series(label, x, _column(frame, name)) for name, label in curves.items())
        low = float(np.nanmin([0.0, *(curve.y.min() for curve in series)]))
        return Lines(series, "depth", unit, title, low=low, high=high)

    alike = {"linear_cka": "linear CKA", "token_cosine": "token cosine", "principal_share": "principal directions"}
    panels = (
        lines("How alike the vectors are", "similarity", alike, 1.05),
        lines(f"Largest angle of {principal} principal directions", "degrees", {"principal_angle": "angle"}, 90.0),
    )
    note = f"{_read(counts)} Principal directions: mean cos^2 of the angles between the leading {principal}. "
    return Figure(
        "compare-hidden", "Hidden states, A against B", panels, columns=2, note=f"{note}{DEPTH.capitalize()}."
    )


def _read(counts: Counts) -> str:
    return f"{counts.texts} text{'s' * (counts.texts != 1)}, {counts.tokens} tokens, special tokens kept."


def _notes(measured: Measured, seen: Seen | None) -> tuple[str, ...]:
    """Where the change is largest."""
    changes = measured.weights["homogeneous_change"].to_numpy().reshape(len(measured.held), -1)
    notes = [_most("M~", changes, measured.held, measured.heads, "(|B - A| / |A|)")]
    if seen is not None:
        divergences = seen.attention.mean[..., 1]
        notes.append(_most("Attention", divergences, measured.layers, measured.heads, "nats"))
        notes.append(_read(seen.counts))
    return tuple(notes)


def _most(what: str, values: Floats, layers: Sequence[int], heads: Sequence[int], unit: str) -> str:
    at, of = divmod(int(np.nan_to_num(values, nan=-1.0).argmax()), values.shape[1])
    if np.isnan(values).all():
        return f"{what} is zero in A, so that there is no relative change."
    if not values[at, of]:
        return f"{what} is the same in A and B."
    return f"{what} changed most in L{layers[at]}H{heads[of]}: {values[at, of]:.3g} {unit}."
