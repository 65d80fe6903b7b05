"""Which paths a stack of attention with residuals is made of, and how fast attention chained along them loses rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import comb
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .kit.accumulators import Counts, Moments, Sample
from .kit.analysis import Analysis, State, setting
from .kit.pieces import runs
from .kit.record import ForwardRecord, HeadWeights, ModelShape
from .kit.result import Figure, Lines, Result, Series, Table
from .kit.spectra import composite_norm
from .kit.tables import moment_columns, sample_table
from .kit.token_matrices import residuals

Floats = NDArray[np.float64]
Path = tuple[tuple[int, int], ...]
"""The layers that a path goes through, rising, each with its head."""
LENGTH = "layers through whose heads a path goes; it takes the residual around all others"
VALUES = {
    "residual": "|P - rank one| / |P| of the product P of attention along a path, in the norm sqrt(|.|_1 |.|_inf), "
    "mean over sampled paths, 0 or more; empty for length 0",
    "spread": "standard deviation of it over sampled paths (n - 1), 0 or more; empty for fewer than 2",
}


def path_counts(layers: int, heads: int) -> list[int]:
    """Paths of every length k from 0 to `layers`, exact: C(layers, k) heads^k. They sum to (1 + heads)^layers.

    >>> path_counts(2, 3)
    [1, 6, 9]
    """
    return [comb(layers, length) * heads**length for length in range(layers + 1)]


@lru_cache(maxsize=8)
def sampled_paths(layers: int, heads: int, samples: int, seed: int) -> tuple[tuple[Path, ...], ...]:
    """For every length from 1 to `layers`, paths of uniformly drawn layers and heads (PCG64 of the seed)."""
    draw = np.random.default_rng(seed)
    return tuple(tuple(_path(draw, layers, heads, length) for _ in range(samples)) for length in range(1, layers + 1))


def _path(draw: np.random.Generator, layers: int, heads: int, length: int) -> Path:
    through = np.sort(draw.choice(layers, size=length, replace=False)).tolist()
    return tuple(zip(through, draw.integers(heads, size=length).tolist(), strict=True))


def chained(attention: Floats, paths: Sequence[Path], order: str) -> Floats:
    """Products (path, query, key) of attention (layer, head, query, key) along paths of one length.

    In theory a later layer multiplies from the left, P_L ... P_1 X; the code of the paper has it on the right.
    """
    factors = [attention[tuple(np.array(step).T)] for step in zip(*paths, strict=True)]
    return reduce(np.matmul, factors if order == "code" else factors[::-1])


def residual_of_rank_one(matrices: Floats) -> Floats:
    """|P - s u v^T| / |P| in composite norm with the first singular triple: (..., row, column) to (...).

    >>> residual_of_rank_one(np.diag([2.0, 1.0])).item()
    0.5
    """
    left, singular, right = np.linalg.svd(matrices)
    first = singular[..., :1, None] * left[..., :, :1] @ right[..., :1, :]
    ratio: Floats = composite_norm(matrices - first) / composite_norm(matrices)
    return ratio


@dataclass
class PathsState(State):
    """Per-text values (length, value), lengths from 0, and the model's size."""

    moments: Moments
    sample: Sample
    counts: Counts
    layers: int
    heads: int


@dataclass(frozen=True)
class Paths(Analysis[PathsState]):
    """Paths through heads and residuals by length, and how fast attention chained along them loses rank.

    With residuals, a stack of attention is a sum over paths that in each layer take one of H heads or the residual;
    C(L, k) H^k of them are k long (Dong et al. 2021, arXiv 2103.03404). Of each length, paths are sampled, the same for
    every text, and the attention matrices along a path multiplied: of the product, what is left without rank one, in
    the norm sqrt(|.|_1 |.|_inf). Rank one is the mean row in every row, to which attention collapses, or the first
    singular triple, as in the paper's code. MLP, LayerNorm and values are left out; special tokens stay.

    Example: bertgeo paths --path-samples 200 --order code --rank-one svd
    """

    path_samples: int = setting(100, "Paths to sample of each length.", least=1)
    order: Literal["theory", "code"] = setting(
        "theory", "theory: later layers multiply from the left; code: from the right, as in the paper's code."
    )
    rank_one: Literal["mean", "svd"] = setting(
        "mean", "What is taken off: the mean row, as in rank-collapse, or the first singular triple (slow)."
    )
    sample: int = setting(1000, "Texts of a corpus whose own values are written (those of smallest hash).", least=0)
    seed: int = setting(0, "Seed of the paths and of that sample's hash.", least=0)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention"})

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> PathsState:
        moments, sample = Moments.empty(shape.layers + 1, len(VALUES)), Sample.empty(self.sample, self.seed)
        return PathsState(moments, sample, Counts(), shape.layers, shape.heads)

    def update(self, state: PathsState, record: ForwardRecord) -> None:
        by_length = sampled_paths(state.layers, state.heads, self.path_samples, self.seed)
        for index, text in enumerate(record.texts):
            attention = record.of_text("attention", index)
            found = [_mean_and_spread(self._residuals(attention, paths)) for paths in by_length]
            values = np.array([[(np.nan, np.nan), *found]])
            state.moments.add(values)
            state.sample.add([text], values)
            state.counts.add([len(text)])

    def _residuals(self, attention: Floats, paths: Sequence[Path]) -> Floats:
        """The residual of every path."""
        cuts = runs(slice(0, len(paths)), attention[0, 0].size)
        products = (chained(attention, paths[cut], self.order) for cut in cuts)
        measure = residual_of_rank_one if self.rank_one == "svd" else _residual_of_mean
        return np.concatenate([measure(product) for product in products])

    def per_text(self, state: PathsState) -> Table:
        index = pd.DataFrame({"length": range(state.layers + 1)})
        return sample_table("paths-texts", "Paths by text", state.sample, index, {"length": LENGTH}, VALUES)

    def finalize(self, state: PathsState, record: ForwardRecord | None) -> Result:
        table = _table(state)
        tables = (table,) if record is not None else (table, self.per_text(state))
        mean = state.layers * state.heads / (1 + state.heads)
        note = f"{(1 + state.heads) ** state.layers:,} paths, {mean:.4f} layers long on average."
        return Result(table, tables, (self._figure(state, table),), (note,))

    def _figure(self, state: PathsState, table: Table) -> Figure:
        lengths, shares = table.frame["length"].to_numpy(float), table.frame["share"].to_numpy(float)
        axis, unit, what = "length (layers)", "share of all paths", "Paths by length"
        counted = Lines((Series("", lengths, shares),), axis, unit, what, low=0.0)
        y, spread = state.moments.mean[:, 0], state.moments.std[:, 0]
        band = (np.maximum(y - spread, 0.0), y + spread) if np.isfinite(spread).any() else (None, None)
        unit, what = "relative residual (composite norm)", "What attention along a path leaves beside rank one"
        left = Lines((Series("", lengths, y, *band),), axis, unit, what, low=0.0)
        texts = state.counts.texts
        note = f"Rank one: {'first singular triple' if self.rank_one == 'svd' else 'mean row'}. Later layers multiply "
        note += f"from the {'right' if self.order == 'code' else 'left'}. {self.path_samples} sampled paths a length."
        if texts > 1:
            note += f" Line: mean over {texts} texts; band: one standard deviation either side."
        return Figure("paths", "Paths through heads and residuals", (counted, left), columns=2, note=note)


def _residual_of_mean(matrices: Floats) -> Floats:
    return residuals(matrices)[..., 0]


def _mean_and_spread(values: Floats) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else np.nan


def _table(state: PathsState) -> Table:
    counts, whole = path_counts(state.layers, state.heads), (1 + state.heads) ** state.layers
    frame = pd.DataFrame({"length": range(len(counts)), "paths": list(map(str, counts))})
    frame["share"] = [count / whole for count in counts]
    frame["texts"] = state.counts.texts
    values, columns = moment_columns(state.moments, list(VALUES), VALUES)
    about = {
        "length": LENGTH,
        "paths": "paths of this length, C(layers, length) heads^length, every digit of it",
        "share": "of all (1 + heads)^layers paths, 0 to 1",
        "texts": "texts measured",
    }
    return Table("paths", "Paths by length", pd.concat([frame, values], axis=1), about | columns)
