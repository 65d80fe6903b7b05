"""How alike token vectors become over depth: residuals and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from .kit.accumulators import Counts, Moments, Sample
from .kit.analysis import ALL, Analysis, Selection, State, chosen_names, setting
from .kit.pieces import runs
from .kit.record import ForwardRecord, HeadWeights, ModelShape, TokenizedText
from .kit.result import Figure, Heatmap, Lines, Result, Series, Table
from .kit.spectra import (
    composite_norm,
    effective_rank,
    frobenius_norm,
    numerical_rank,
    ranks,
    singular_values_by_gram,
    stable_rank,
)
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
TOGETHER = 2**16
"""Numbers measured at once: in smaller stacks calls cost most, larger ones wait for memory."""


@dataclass(frozen=True)
class TokenMatrices:
    """Token vectors (..., token, width), and the values of VALUES (...), each made when it is first asked for."""

    states: Floats

    def value(self, name: str) -> Floats:
        """One of VALUES. NaN for no tokens, but for their number.

        >>> TokenMatrices(np.array([[2.0, 0.0], [0.0, 2.0]])).value("stable_rank_share").item()
        1.0
        """
        if self.states.shape[-2] == 0 and name != "n":
            return np.full_like(self.n, np.nan)
        own: Floats = getattr(self, name.removesuffix("_share"))
        return own / self.n if name.endswith("_share") else own

    @cached_property
    def n(self) -> Floats:
        """Number of tokens."""
        return np.full(self.states.shape[:-2], float(self.states.shape[-2]))

    @cached_property
    def residual_composite(self) -> Floats:
        """|X - 1 mean| / |X| in the norm sqrt(|.|_1 |.|_inf)."""
        return self._residuals[0]

    @cached_property
    def residual_frobenius(self) -> Floats:
        """|X - 1 mean|_F / |X|_F."""
        return self._residuals[1]

    @cached_property
    def effective_rank(self) -> Floats:
        """exp of the entropy of sigma / sum sigma."""
        return effective_rank(self._singular)

    @cached_property
    def stable_rank(self) -> Floats:
        """|X|_F^2 / |X|_2^2."""
        return stable_rank(self._singular)

    @cached_property
    def numerical_rank(self) -> Floats:
        """Singular values above n 2^-23 sigma_1."""
        return numerical_rank(self._singular, self.states.shape[-2])

    @cached_property
    def _singular(self) -> Floats:
        return singular_values_by_gram(self.states)

    @cached_property
    def _residuals(self) -> tuple[Floats, Floats]:
        """Both relative residuals, from one array of X - 1 mean."""
        states = torch.from_numpy(self.states)
        mean = states.mean(dim=-2, keepdim=True)
        rest = states.sub(mean).numpy()
        # |X|^2 = |X - 1 mean|^2 + n |mean|^2: another pass over X is not needed.
        part, middle = frobenius_norm(rest), frobenius_norm(mean.numpy())
        composite = composite_norm(rest, out=rest), composite_norm(self.states, out=rest)
        return _ratio(*composite), _ratio(part, np.sqrt(part**2 + self.n * middle**2))


def _ratio(part: Floats, whole: Floats) -> Floats:
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), np.nan)


def residuals(states: Floats) -> Floats:
    """Relative residuals |X - 1 mean| / |X| in composite and Frobenius norm, on a last axis; NaN for zero or no tokens.

    Shape (..., token, width) to (..., 2).

    >>> residuals(np.array([[2.0, 0.0], [0.0, 1.0]])).round(6).tolist()
    [0.866025, 0.707107]
    """
    tokens = TokenMatrices(states)
    return np.stack([tokens.value(f"residual_{norm}") for norm in ("composite", "frobenius")], axis=-1)


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
    """How alike token vectors become over depth: relative residual, and ranks of the token matrix.

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
    metrics: str = setting("all", "Metrics over depth, separated by commas; all computes every one, ranks cost most.")
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

    def listing(self) -> Table | None:
        self._names()
        return None

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> RankCollapseState:
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        depths = tuple(sorted({depth for layer in layers for depth in (layer, layer + 1)}))
        moments, spectra = Moments.empty(len(depths), len(self._names())), (len(layers), len(heads), 2, len(SPECTRA))
        sample = Sample.empty(self.sample, self.seed)
        return RankCollapseState(moments, sample, Moments.empty(*spectra), Counts(), depths, layers, heads)

    def update(self, state: RankCollapseState, record: ForwardRecord) -> None:
        for texts, kept in self._alike(record):
            entries = len(record.texts[texts]) * len(record.texts[0]) * record.shape.width
            cuts = runs(slice(0, len(state.depths)), entries, TOGETHER)
            parts = [self._measured(record, state.depths[cut], texts, kept) for cut in cuts]
            values = np.concatenate(parts, axis=1)
            state.moments.add(values)
            state.sample.add(record.texts[texts], values)
            if self.spectra:
                state.spectra.add([_spectra(state, record, kept, at) for at in range(texts.start, texts.stop)])
        state.counts.add([len(text) for text in record.texts])

    def _measured(self, record: ForwardRecord, depths: Sequence[int], texts: slice, kept: NDArray[np.intp]) -> Floats:
        """The metrics (text, depth, metric) of some depths."""
        layers = [record.layer("hidden_states", depth)[texts] for depth in depths]
        states = torch.empty(len(layers[0]), len(depths), *layers[0].shape[1:], dtype=torch.float64)
        for at, layer in enumerate(layers):
            states[:, at] = layer
        tokens = TokenMatrices((states if len(kept) == states.shape[2] else states[:, :, kept]).numpy())
        return np.stack([tokens.value(name) for name in self._names()], axis=-1)

    def _alike(self, record: ForwardRecord) -> Iterator[tuple[slice, NDArray[np.intp]]]:
        """Neighbours that keep the same tokens (but for `special` drop, all do), and which those are."""
        first = 0
        for _, alike in groupby(record.texts, lambda text: self._kept(text).tolist()):
            count = len(list(alike))
            yield slice(first, first + count), self._kept(record.texts[first])
            first += count

    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("n", *chosen_names(self.metrics, VALUES, "metric"))))

    def per_text(self, state: RankCollapseState) -> Table:
        index, values = pd.DataFrame({"depth": state.depths}), {name: VALUES[name] for name in self._names()}
        title = "Residuals and ranks by text"
        return sample_table("rank-collapse-texts", title, state.sample, index, {"depth": DEPTH}, values)

    def finalize(self, state: RankCollapseState, record: ForwardRecord | None) -> Result:
        names = self._names()
        table = _depth_table(state, names)
        tables, figures = [table], [_depth_figure(state, names, self.special)]
        if record is None:
            tables.append(self.per_text(state))
        if self.spectra:
            tables.append(_spectra_table(state))
            figures.append(_spectra_figure(state))
        note = f"Special tokens {'kept' if self.special == 'keep' else 'dropped'}."
        return Result(_headline(table, names), tuple(tables), tuple(figures), (note,))

    def _kept(self, text: TokenizedText) -> NDArray[np.intp]:
        special = np.array(text.special, dtype=bool)
        return np.flatnonzero(~special) if self.special == "drop" else np.arange(len(text))


DEPTH = "0 is the first layer's input, l + 1 the output of layer l"


def _spectra(state: RankCollapseState, record: ForwardRecord, kept: NDArray[np.intp], index: int) -> Floats:
    """Ranks (layer, head, matrix, value) of the attention and of Q K^T, biases included, of one text."""
    rows, columns = kept[:, None], kept[None, :]
    heads = list(state.heads)
    attention = record.of_text("attention", index, state.layers)[:, heads][..., rows, columns]
    q, k = (record.of_text(name, index, state.layers)[:, heads][..., kept, :] for name in ("q", "k"))
    matrices = np.stack([attention, q @ k.swapaxes(-1, -2)], axis=2)
    n = np.full((*matrices.shape[:3], 1), float(len(kept)))
    return np.concatenate([n, ranks(matrices, len(kept))], axis=-1)


def _depth_table(state: RankCollapseState, names: tuple[str, ...]) -> Table:
    frame = pd.DataFrame({"depth": state.depths, "texts": state.counts.texts})
    values, columns = moment_columns(state.moments, names, VALUES)
    columns = {"depth": DEPTH, "texts": "texts measured"} | columns
    title = "Residuals and ranks of the token matrix over depth"
    return Table("rank-collapse", title, pd.concat([frame, values], axis=1), columns)


def _headline(table: Table, names: tuple[str, ...]) -> Table:
    usual = ("n", "residual_composite", "residual_frobenius", *RANKS, "effective_rank_share")
    shown = ["depth", *(usual if len(names) == len(VALUES) else names)]
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


PANELS = (
    (
        "Distance from equal tokens",
        "relative residual",
        {"residual_composite": "composite norm", "residual_frobenius": "Frobenius norm"},
    ),
    (
        "Rank of the token matrix, per token",
        "rank / n",
        {"effective_rank_share": "effective", "stable_rank_share": "stable", "numerical_rank_share": "numerical"},
    ),
    (
        "Rank of the token matrix",
        "rank",
        {"effective_rank": "effective", "stable_rank": "stable", "numerical_rank": "numerical"},
    ),
    ("Length of the texts", "tokens", {"n": "tokens"}),
)
"""Title, unit and curves of what can be drawn, the most telling first."""


def _depth_figure(state: RankCollapseState, names: tuple[str, ...], special: str) -> Figure:
    panels = [
        Lines(tuple(_curve(state, names.index(name), curves[name]) for name in drawn), "depth", unit, title, low=0.0)
        for title, unit, curves in PANELS
        if (drawn := [name for name in curves if name in names])
    ][:2]
    if len(names) > 1 and panels[-1].title == PANELS[-1][0]:
        panels.pop()  # lengths say little beside any other metric
    texts = state.counts.texts
    note = f"Special tokens {'kept' if special == 'keep' else 'dropped'}. Depth 0 is the first layer's input."
    if texts > 1:
        note += f" Lines: mean over {texts} texts; bands: one standard deviation either side."
    return Figure("rank-collapse", "Rank collapse over depth", tuple(panels), columns=len(panels), note=note)


def _curve(state: RankCollapseState, at: int, label: str) -> Series:
    y, spread = state.moments.mean[:, at], state.moments.std[:, at]
    band = (y - spread, y + spread) if np.isfinite(spread).any() else (None, None)
    return Series(label, np.array(state.depths, dtype=float), y, *band)


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
