"""How far token vectors have become one another: residuals and ranks over depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from .kit.accumulators import Counts, Moments, Sample
from .kit.analysis import ALL, Analysis, Selection, State, setting
from .kit.record import ForwardRecord, HeadWeights, ModelShape, TokenizedText
from .kit.result import Figure, Heatmap, Lines, Result, Series, Table
from .kit.spectra import composite_norm, frobenius_norm, ranks
from .kit.tables import moment_columns, sample_table

Floats = NDArray[np.float64]
RANKS = {
    "effective_rank": "exp of the entropy of sigma / sum sigma, 1 to n; empty for a zero matrix",
    "stable_rank": "|A|_F^2 / |A|_2^2, 1 to n; empty for a zero matrix",
    "numerical_rank": "singular values above n 2^-23 sigma_1, 0 to n",
}
VALUES = {
    "n": "token vectors of a text",
    "residual_composite": "|X - 1 mean| / |X| in the norm sqrt(|.|_1 |.|_inf); 0 for equal tokens, may exceed 1",
    "residual_frobenius": "|X - 1 mean|_F / |X|_F, 0 to 1",
    **RANKS,
    **{f"{name}_share": f"{name} / n, 0 to 1" for name in RANKS},
}
SPECTRA = {"n": "rows of the matrix", **RANKS}
MATRICES = ("attention", "scores")
CACHED = 2**19
"""Numbers measured at once: larger stacks wait for memory."""


def residuals(states: Floats) -> Floats:
    """Relative residuals |X - 1 mean| / |X| in composite and Frobenius norm, on a last axis; NaN for zero or no tokens.

    Shape (..., token, width) to (..., 2).

    >>> residuals(np.array([[2.0, 0.0], [0.0, 1.0]])).round(6).tolist()
    [0.866025, 0.707107]
    """
    if states.shape[-2] == 0:
        return np.full((*states.shape[:-2], 2), np.nan)
    every = torch.from_numpy(states)
    rest = (every - every.mean(dim=-2, keepdim=True)).numpy()
    shares = []
    for norm in (composite_norm, frobenius_norm):
        whole = norm(states)
        shares.append(np.where(whole > 0, norm(rest) / np.where(whole > 0, whole, 1.0), np.nan))
    return np.stack(shares, axis=-1)


@dataclass
class RankCollapseState(State):
    """Per-text values (depth, value), and with spectra (layer, head, matrix, value)."""

    moments: Moments
    sample: Sample
    spectra: Moments
    counts: Counts
    depths: tuple[int, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True)
class RankCollapse(Analysis[RankCollapseState]):
    """How far token vectors become one another over depth: relative residual, and ranks of the token matrix.

    The residual is X minus the mean token in every row, relative to X, in the composite norm sqrt(|.|_1 |.|_inf) and
    in Frobenius norm (Dong et al. 2021, whose code takes the mean too). Effective rank after Roy and Vetterli 2007;
    stable rank |A|_F^2 / |A|_2^2; the numerical rank counts singular values above n 2^-23 sigma_1. Ranks are bounded
    by the number of tokens n, so across texts of different length compare rank / n. All from Gram matrices in float64.

    Example: bertgeo rank-collapse --spectra
    """

    layers: Selection = setting(
        ALL, "Layers, from 0: all, or such as 0,3-5,-1. Layer l leads from depth l to depth l + 1."
    )
    heads: Selection = setting(ALL, "Heads of --spectra, from 0: all, or such as 0,3-5,-1.")
    spectra: bool = setting(
        False, "Also the ranks of every attention matrix and of Q K^T; costs nearly half a forward pass."
    )
    special: Literal["keep", "drop"] = setting(
        "keep", "Special tokens: keep them (as Dong et al. do), or drop their rows (and columns of --spectra)."
    )
    sample: int = setting(1000, "Texts of a corpus whose own values are written (those of smallest hash).", least=0)
    seed: int = setting(0, "Seed of that sample's hash.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"hidden_states", "attention", "q", "k"} if self.spectra else {"hidden_states"})

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> RankCollapseState:
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        depths = tuple(sorted({depth for layer in layers for depth in (layer, layer + 1)}))
        moments, spectra = Moments.empty(len(depths), len(VALUES)), (len(layers), len(heads), 2, len(SPECTRA))
        sample = Sample.empty(self.sample, self.seed)
        return RankCollapseState(moments, sample, Moments.empty(*spectra), Counts(), depths, layers, heads)

    def update(self, state: RankCollapseState, record: ForwardRecord) -> None:
        for texts in self._alike(record, state):
            kept = self._kept(record.texts[texts[0]])
            hidden = record.of_texts("hidden_states", slice(texts[0], texts[-1] + 1), state.depths)
            values = _measure(hidden if len(kept) == hidden.shape[2] else hidden[:, :, kept].copy())
            state.moments.add(values)
            for index, row in zip(texts, values, strict=True):
                text = record.texts[index]
                state.sample.add([text], row[None])
                if self.spectra:
                    state.spectra.add(_spectra(state, record, index, kept)[None])
        state.counts.add([len(text) for text in record.texts])

    def _alike(self, record: ForwardRecord, state: RankCollapseState) -> Iterator[list[int]]:
        """Neighbours that keep the same tokens (but for `special` drop, all do), as many as a core's cache holds."""
        shape = record.shape
        together = max(1, CACHED // (len(state.depths) * shape.width * len(record.texts[0])))
        for _, alike in groupby(range(len(record.texts)), lambda index: self._kept(record.texts[index]).tolist()):
            while texts := list(islice(alike, together)):
                yield texts

    def per_text(self, state: RankCollapseState) -> Table:
        index, columns = pd.DataFrame({"depth": state.depths}), {"depth": DEPTH}
        return sample_table("rank-collapse-texts", "Residuals and ranks by text", state.sample, index, columns, VALUES)

    def finalize(self, state: RankCollapseState, record: ForwardRecord | None) -> Result:
        table = _depth_table(state)
        tables, figures = [table], [_depth_figure(state, self.special)]
        if record is None:
            tables.append(self.per_text(state))
        if self.spectra:
            tables.append(_spectra_table(state))
            figures.append(_spectra_figure(state))
        note = f"Special tokens {'kept' if self.special == 'keep' else 'dropped'}."
        return Result(_headline(table), tuple(tables), tuple(figures), (note,))

    def _kept(self, text: TokenizedText) -> NDArray[np.intp]:
        special = np.array(text.special, dtype=bool)
        return np.flatnonzero(~special) if self.special == "drop" else np.arange(len(text))


DEPTH = "0 is the first layer's input, l + 1 the output of layer l"


def _measure(hidden: Floats) -> Floats:
    """The values of VALUES (text, depth, value) for hidden states (text, depth, token, width)."""
    n = np.full((*hidden.shape[:2], 1), float(hidden.shape[2]))
    rank = ranks(hidden, hidden.shape[2])
    return np.concatenate([n, residuals(hidden), rank, rank / np.maximum(n, 1.0)], axis=-1)


def _spectra(state: RankCollapseState, record: ForwardRecord, index: int, kept: NDArray[np.intp]) -> Floats:
    """Ranks (layer, head, matrix, value) of the attention and of Q K^T, biases included, of one text."""
    rows, columns = kept[:, None], kept[None, :]
    heads = list(state.heads)
    attention = record.of_text("attention", index, state.layers)[:, heads][..., rows, columns]
    q, k = (record.of_text(name, index, state.layers)[:, heads][..., kept, :] for name in ("q", "k"))
    matrices = np.stack([attention, q @ k.swapaxes(-1, -2)], axis=2)
    n = np.full((*matrices.shape[:3], 1), float(len(kept)))
    return np.concatenate([n, ranks(matrices, len(kept))], axis=-1)


def _depth_table(state: RankCollapseState) -> Table:
    frame = pd.DataFrame({"depth": state.depths, "texts": state.counts.texts})
    values, columns = moment_columns(state.moments, list(VALUES), VALUES)
    columns = {"depth": DEPTH, "texts": "texts measured"} | columns
    title = "Residuals and ranks of the token matrix over depth"
    return Table("rank-collapse", title, pd.concat([frame, values], axis=1), columns)


def _headline(table: Table) -> Table:
    shown = ["depth", "n", "residual_composite", "residual_frobenius", *RANKS, "effective_rank_share"]
    return Table(table.name, table.title, table.frame[shown], table.columns)


def _spectra_table(state: RankCollapseState) -> Table:
    rows = [(layer, head, matrix) for layer in state.layers for head in state.heads for matrix in MATRICES]
    frame = pd.DataFrame(rows, columns=["layer", "head", "matrix"])
    frame["texts"] = state.counts.texts
    values, columns = moment_columns(state.spectra, list(SPECTRA), SPECTRA)
    about = {
        "layer": "layer, from 0",
        "head": "head, from 0",
        "matrix": "attention, or scores: Q K^T with its biases, whose rank is at most dk",
        "texts": "texts measured",
    }
    title = "Ranks of attention and of Q K^T by head"
    return Table("rank-collapse-spectra", title, pd.concat([frame, values], axis=1), about | columns)


def _depth_figure(state: RankCollapseState, special: str) -> Figure:
    names = list(VALUES)
    mean, std = state.moments.mean, state.moments.std

    def series(name: str, label: str) -> Series:
        at = names.index(name)
        y, spread = mean[:, at], std[:, at]
        band = (y - spread, y + spread) if np.isfinite(spread).any() else (None, None)
        return Series(label, np.array(state.depths, dtype=float), y, *band)

    residual = (series("residual_composite", "composite norm"), series("residual_frobenius", "Frobenius norm"))
    rank = (
        series("effective_rank_share", "effective"),
        series("stable_rank_share", "stable"),
        series("numerical_rank_share", "numerical"),
    )
    panels = (
        Lines(residual, "depth", "relative residual", "Distance from equal tokens", low=0.0),
        Lines(rank, "depth", "rank / n", "Rank of the token matrix, per token", low=0.0),
    )
    texts = state.counts.texts
    note = f"Special tokens {'kept' if special == 'keep' else 'dropped'}. Depth 0 is the first layer's input."
    if texts > 1:
        note += f" Lines: mean over {texts} texts; bands: one standard deviation either side."
    return Figure("rank-collapse", "Rank collapse over depth", panels, columns=2, note=note)


def _spectra_figure(state: RankCollapseState) -> Figure:
    names = list(SPECTRA)
    panels = tuple(
        Heatmap(
            state.spectra.mean[:, :, MATRICES.index(matrix), names.index(name)],
            f"{name.replace('_', ' ')} of {'attention' if matrix == 'attention' else 'Q K^T'}",
            tuple(map(str, state.layers)),
            tuple(map(str, state.heads)),
            "layer",
            "head",
            name.replace("_", " "),
            high=None,
        )
        for matrix in MATRICES
        for name in RANKS
    )
    note = f"Mean over {state.counts.texts} text{'s' * (state.counts.texts != 1)}."
    return Figure("rank-collapse-spectra", "Ranks by layer and head", panels, columns=3, note=note)
