"""How alike token vectors become over depth: residuals and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .kit.accumulators import Counts, Moments, Sample
from .kit.analysis import ALL, Analysis, Selection, State, chosen_names, setting
from .kit.maths import chosen
from .kit.pieces import over_layers
from .kit.record import ABLATIONS, ForwardRecord, HeadWeights, ModelShape, TokenizedText, under
from .kit.result import Figure, Heatmap, Lines, Result, Series, Table
from .kit.spectra import ranks
from .kit.tables import moment_columns, sample_table
from .kit.token_matrices import RANKS, VALUES, TokenMatrices

Floats = NDArray[np.float64]
SPECTRA = {"n": "rows of the matrix", **RANKS}
MATRICES = ("attention", "scores")


@dataclass
class RankCollapseState(State):
    """Per-text values (ablation, depth, value), and with spectra (ablation, layer, head, matrix, value)."""

    moments: Moments
    sample: Sample
    spectra: Moments
    counts: Counts
    ablations: tuple[str, ...]
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

    --ablate cuts out of every block what Dong et al. cut: skip, the residual around attention (they call the rest
    SAN+MLP); mlp, the MLP with its LayerNorm and residual (SAN+skip); both (SAN); none is the transformer. LayerNorm
    after attention stays. Each is a pass of its own; all gives the four curves in one figure.

    Example: bertgeo rank-collapse --spectra
    """

    layers: Selection = setting(
        ALL, "Layers, from 0: all, or such as 0,3-5,-1. Layer l leads from depth l to depth l + 1."
    )
    heads: Selection = setting(ALL, "Heads of --spectra, from 0: all, or such as 0,3-5,-1.")
    metrics: str = setting("all", "Metrics over depth, separated by commas; all computes every one, ranks cost most.")
    ablate: str = setting(
        "none", "What every block lacks: none, skip, mlp, both, separated by commas, each measured; all for all four."
    )
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
        names = ("hidden_states", "attention", "q", "k") if self.spectra else ("hidden_states",)
        return frozenset(under(ablation, name) for ablation in self._ablations() for name in names)

    def listing(self) -> Table | None:
        self._names()
        self._ablations()
        return None

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> RankCollapseState:
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        depths = tuple(sorted({depth for layer in layers for depth in (layer, layer + 1)}))
        ablations, sample = self._ablations(), Sample.empty(self.sample, self.seed)
        moments = Moments.empty(len(ablations), len(depths), len(self._names()))
        spectra = Moments.empty(len(ablations), len(layers), len(heads), len(MATRICES), len(SPECTRA))
        return RankCollapseState(moments, sample, spectra, Counts(), ablations, depths, layers, heads)

    def update(self, state: RankCollapseState, record: ForwardRecord) -> None:
        for texts, kept in self._alike(record):
            names = [under(ablation, "hidden_states") for ablation in state.ablations]
            passes = [self._over_depths(record, name, state, texts, kept) for name in names]
            values = np.stack(passes, axis=1)
            state.moments.add(values)
            state.sample.add(record.texts[texts], values)
            if self.spectra:
                state.spectra.add([_spectra(state, record, kept, at) for at in range(texts.start, texts.stop)])
        state.counts.add([len(text) for text in record.texts])

    def _over_depths(
        self, record: ForwardRecord, name: str, state: RankCollapseState, texts: slice, kept: NDArray[np.intp]
    ) -> Floats:
        """The metrics (text, depth, metric) of the token vectors `name`."""

        metrics = self._names()

        def measured(states: Floats, _: slice) -> Floats:
            tokens = TokenMatrices(chosen(states, kept, axis=-2))
            return np.stack([tokens.value(metric) for metric in metrics], axis=-1)

        return over_layers(record, name, state.depths, measured, texts)

    def _alike(self, record: ForwardRecord) -> Iterator[tuple[slice, NDArray[np.intp]]]:
        """Neighbours that keep the same tokens (but for `special` drop, all do), and which those are."""
        first = 0
        for _, alike in groupby(record.texts, lambda text: self.special == "drop" and text.special):
            count = len(list(alike))
            yield slice(first, first + count), self._kept(record.texts[first])
            first += count

    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("n", *chosen_names(self.metrics, VALUES, "metric"))))

    def _ablations(self) -> tuple[str, ...]:
        chosen = chosen_names(self.ablate, ABLATIONS, "ablation")
        return tuple(name for name in ABLATIONS if name in chosen)

    def per_text(self, state: RankCollapseState) -> Table:
        index, about = _rows(state, {"depth": state.depths})
        values, title = {name: VALUES[name] for name in self._names()}, "Residuals and ranks by text"
        return sample_table("rank-collapse-texts", title, state.sample, index, about, values)

    def finalize(self, state: RankCollapseState, record: ForwardRecord | None) -> Result:
        names = self._names()
        table = _depth_table(state, names)
        tables, figures = [table], [_depth_figure(state, names, self.special)]
        if record is None:
            tables.append(self.per_text(state))
        if self.spectra:
            tables.append(_spectra_table(state))
            figures += [_spectra_figure(state, ablation, self.special) for ablation in state.ablations]
        note = f"Special tokens {'kept' if self.special == 'keep' else 'dropped'}."
        return Result(_headline(table, names), tuple(tables), tuple(figures), (note,))

    def _kept(self, text: TokenizedText) -> NDArray[np.intp]:
        special = np.array(text.special, dtype=bool)
        return np.flatnonzero(~special) if self.special == "drop" else np.arange(len(text))


PLAIN = ("none",)
"""The intact model alone: no table or figure speaks of ablations."""
PLACES = {
    "ablation": "cut out of every block: " + ", ".join(f"{name} ({label})" for name, label in ABLATIONS.items()),
    "depth": "0 is the first layer's input, l + 1 the output of layer l",
    "layer": "layer, from 0",
    "head": "head, from 0",
    "matrix": "attention, or scores: Q K^T with its biases, whose rank is at most dk",
}


def _rows(state: RankCollapseState, axes: Mapping[str, Sequence[object]]) -> tuple[pd.DataFrame, dict[str, str]]:
    """A row for every ablation and place, and what its columns are; the intact model alone needs no ablations."""
    axes = axes if state.ablations == PLAIN else {"ablation": state.ablations, **axes}
    return pd.DataFrame(list(product(*axes.values())), columns=list(axes)), {name: PLACES[name] for name in axes}


def _spectra(state: RankCollapseState, record: ForwardRecord, kept: NDArray[np.intp], index: int) -> Floats:
    """Ranks (ablation, layer, head, matrix, value) of the attention and of Q K^T, biases included, of one text."""
    rows, columns = kept[:, None], kept[None, :]
    heads, found = list(state.heads), []
    for ablation in state.ablations:
        names = [under(ablation, name) for name in ("attention", "q", "k")]
        attention, q, k = (record.of_text(name, index, state.layers)[:, heads] for name in names)
        scores = q[..., kept, :] @ k[..., kept, :].swapaxes(-1, -2)
        matrices = np.stack([attention[..., rows, columns], scores], axis=2)
        n = np.full((*matrices.shape[:3], 1), float(len(kept)))
        found.append(np.concatenate([n, ranks(matrices, len(kept))], axis=-1))
    return np.stack(found)


def _depth_table(state: RankCollapseState, names: tuple[str, ...]) -> Table:
    frame, about = _rows(state, {"depth": state.depths})
    frame["texts"] = state.counts.texts
    values, columns = moment_columns(state.moments, names, VALUES)
    columns = about | {"texts": "texts measured"} | columns
    title = "Residuals and ranks of the token matrix over depth"
    return Table("rank-collapse", title, pd.concat([frame, values], axis=1), columns)


def _headline(table: Table, names: tuple[str, ...]) -> Table:
    usual = ("n", "residual_composite", "residual_frobenius", *RANKS, "effective_rank_share")
    places = [name for name in ("ablation", "depth") if name in table.frame]
    shown = [*places, *(usual if len(names) == len(VALUES) else names)]
    return Table(table.name, table.title, table.frame[shown], table.columns)


def _spectra_table(state: RankCollapseState) -> Table:
    frame, about = _rows(state, {"layer": state.layers, "head": state.heads, "matrix": MATRICES})
    frame["texts"] = state.counts.texts
    values, columns = moment_columns(state.spectra, list(SPECTRA), SPECTRA)
    title = "Ranks of attention and of Q K^T by head"
    columns = about | {"texts": "texts measured"} | columns
    return Table("rank-collapse-spectra", title, pd.concat([frame, values], axis=1), columns)


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
CURVES = {
    "none": "transformer",
    "skip": "SAN+MLP: no skip",
    "mlp": "SAN+skip: no MLP",
    "both": "SAN: neither",
}


def _depth_figure(state: RankCollapseState, names: tuple[str, ...], special: str) -> Figure:
    panels = _metric_panels(state, names) if state.ablations == PLAIN else _ablation_panels(state, names)
    if len(names) > 1 and panels[-1].title == PANELS[-1][0]:
        panels.pop()  # lengths say little beside any other metric
    texts = state.counts.texts
    note = f"Special tokens {'kept' if special == 'keep' else 'dropped'}. Depth 0 is the first layer's input."
    if texts > 1:
        note += f" Lines: mean over {texts} texts; bands: one standard deviation either side."
    return Figure("rank-collapse", "Rank collapse over depth", tuple(panels), columns=len(panels), note=note)


def _metric_panels(state: RankCollapseState, names: tuple[str, ...]) -> list[Lines]:
    """The curves of the first two of PANELS that were measured."""
    return [
        Lines(tuple(_curve(state, 0, names.index(name), curves[name]) for name in drawn), "depth", unit, title, low=0.0)
        for title, unit, curves in PANELS
        if (drawn := [name for name in curves if name in names])
    ][:2]


def _ablation_panels(state: RankCollapseState, names: tuple[str, ...]) -> list[Lines]:
    """A curve for every ablation, in the leading metric of the first two of PANELS that were measured."""
    return [
        Lines(
            tuple(_curve(state, at, names.index(name), CURVES[cut]) for at, cut in enumerate(state.ablations)),
            "depth",
            f"{unit} ({curves[name]})",
            title,
            low=0.0,
        )
        for title, unit, curves in PANELS
        for name in [name for name in curves if name in names][:1]
    ][:2]


def _curve(state: RankCollapseState, ablation: int, at: int, label: str) -> Series:
    y, spread = state.moments.mean[ablation, :, at], state.moments.std[ablation, :, at]
    band = (np.maximum(y - spread, 0.0), y + spread) if np.isfinite(spread).any() else (None, None)
    return Series(label, np.array(state.depths, dtype=float), y, *band)


def _spectra_figure(state: RankCollapseState, ablation: str, special: str) -> Figure:
    names, means = list(SPECTRA), state.spectra.mean[state.ablations.index(ablation)]
    panels = tuple(
        Heatmap(
            means[:, :, MATRICES.index(matrix), names.index(name)],
            f"{name.replace('_', ' ').capitalize()} of {'attention' if matrix == 'attention' else 'Q K^T'}",
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
    note = f"Special tokens {'kept' if special == 'keep' else 'dropped'}. "
    note += f"Mean over {state.counts.texts} text{'s' * (state.counts.texts != 1)}."
    name, title = "rank-collapse-spectra", "Ranks by layer and head"
    if state.ablations != PLAIN:
        name, title = f"{name}-{ablation}", f"{title} ({CURVES[ablation]})"
    return Figure(name, title, panels, columns=3, note=note)
