"""Scores of attention maps from which gates are told: what share of the weight lies where, on scales from 0 to 1.

All of them are this project's own definitions. They read a map A between all units (tokens or words), special ones
included, and B, the map between units that are not special, rows divided by what is left of them; rows of B that have
nothing left count nowhere. m units are not special, offset is key minus query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray

from .maths import chosen, entropy, keys_to_reach, mean_of_rows, normalised_rows
from .modularity import best_runs
from .units import Kinds

Floats = NDArray[np.float64]
SLACK = 1e-9
"""What lies on a threshold but for rounding has reached it."""

SCORES: Mapping[str, str] = {
    "n": "units that are not special: tokens, or words with --words; m below",
    "sink": "weight on special tokens, mean over all rows, 0 to 1",
    "self": "weight on the unit itself, 0 to 1 (this and all below but the last three: among units that are not "
    "special, rows renormalised, mean over rows; empty below two)",
    "diagonal": "weight on the strongest diagonal, 0 to 1",
    "backward": "excess of the weight on the window before the unit over a uniform row's: (w - u) / (1 - u), "
    "where w is the weight and u the uniform one; -1 to 1",
    "forward": "the same for the window behind the unit, -1 to 1",
    "column": "weight on the heaviest column, 0 to 1",
    "columns": "weight on the heaviest columns, the --top share of them, at least one; 0 to 1",
    "column_spread": "entropy of the column masses minus mean row entropy, / ln m; 0 (all rows alike) to 1",
    "cluster": "largest modularity of cutting the symmetrised map, without its diagonal, into 2 to 8 runs of "
    "neighbours; -0.5 to 1; empty where nothing lies off the diagonal",
    "runs": "runs of that cut, 2 to 8",
    "entropy_share": "mean row entropy / ln m, 0 to 1",
    "k90_share": "least number of keys that hold 0.9 of a row, / ceil(0.9 m); above 0, at most 1",
    "confident": "share of rows whose maximum is at least --confident, 0 to 1",
    "vertical": "excess of the weight on special tokens over a uniform row's, all rows; below 0 to 1",
    "adjacent": "excess of the weight on the units just before and behind that are not special, all rows; below 0 to 1",
    "block": "excess of the weight within the unit's own text of a pair, among units that are not special; below 0 to "
    "1; empty without a pair",
}
"""Every score and what it is."""


@dataclass(frozen=True)
class GateMaps:
    """Attention (first, head, unit, unit) whose rows sum to 1, and its scores (first, head), each made when asked for.

    `first` runs over texts whose special units stand in equal places, or over layers of one text.
    """

    attention: Floats
    kinds: Kinds
    window: int = 8
    top: float = 0.02
    threshold: float = 0.3

    def value(self, name: str) -> Floats:
        """One of SCORES."""
        if self.m < 2 and name not in ("n", "sink", "vertical", "adjacent"):
            return self._nothing
        score: Floats = getattr(self, f"{name}_weight" if name == "self" else name)
        return score

    @cached_property
    def m(self) -> int:
        """Units that are not special."""
        return len(self._kept)

    @cached_property
    def top_count(self) -> int:
        """How many columns are the heaviest: the share `top` of m, rounded up, at least one."""
        return max(ceil(self.top * self.m - SLACK), 1)

    @property
    def n(self) -> Floats:
        """The same for every map."""
        return np.full(self.attention.shape[:2], float(self.m))

    @cached_property
    def between(self) -> Floats:
        """Weights among units that are not special, rows renormalised; rows with nothing left are 0."""
        rows = chosen(self.attention, self._kept, axis=-2)
        return normalised_rows(chosen(rows, self._kept, axis=-1))

    @cached_property
    def sink(self) -> Floats:
        """Mean weight of a row on special units."""
        return np.minimum(self._received[..., self.kinds.special[0]].sum(axis=-1), 1.0)

    @cached_property
    def diagonals(self) -> Floats:
        """Mean weight of a row at every offset from 1 - m to m - 1."""
        m = self.m
        sums = np.zeros((2 * m - 1, self._maps_last.shape[-1]))
        for row in range(m):
            sums[m - 1 - row : 2 * m - 1 - row] += self._maps_last[row]
        return self._per_row(np.ascontiguousarray(sums.T).reshape(*self.between.shape[:2], -1))

    @property
    def self_weight(self) -> Floats:
        """Mean weight of a row on its own unit."""
        return self.diagonals[..., self.m - 1]

    @property
    def diagonal(self) -> Floats:
        """Mean weight of a row on the strongest diagonal."""
        return self.diagonals.max(axis=-1)

    @property
    def offset(self) -> Floats:
        """The offset of the strongest diagonal; of equal ones the nearest to 0, and then the one before."""
        if self.m < 2:
            return self._nothing
        offsets = np.array(sorted(range(1 - self.m, self.m), key=lambda offset: (abs(offset), offset)))
        near_first = self.diagonals[..., offsets + self.m - 1]
        strongest = (near_first >= near_first.max(axis=-1, keepdims=True) - SLACK).argmax(axis=-1)
        return np.where(np.isnan(self.diagonal), np.nan, offsets[strongest].astype(float))

    @cached_property
    def backward(self) -> Floats:
        """Excess of the weight at offsets -window to -1."""
        return _excess(self.diagonals[..., self.m - 1 - self._reach : self.m - 1].sum(axis=-1), self._uniform_window)

    @cached_property
    def forward(self) -> Floats:
        """Excess of the weight at offsets 1 to window."""
        return _excess(self.diagonals[..., self.m : self.m + self._reach].sum(axis=-1), self._uniform_window)

    @cached_property
    def column_masses(self) -> Floats:
        """Mean weight of a row on every unit that is not special: (first, head, unit), sums to 1."""
        return self._per_row(torch.from_numpy(self.between).sum(dim=-2).numpy())

    @cached_property
    def top_columns(self) -> NDArray[np.intp]:
        """The heaviest columns, heaviest first, as places among all units; of equal ones the first."""
        order = np.argsort(-self.column_masses, axis=-1, kind="stable")
        return self._kept[order[..., : self.top_count]]

    @property
    def column(self) -> Floats:
        """Mean weight of a row on the heaviest column."""
        return self.column_masses.max(axis=-1)

    @property
    def columns(self) -> Floats:
        """Mean weight of a row on the heaviest columns."""
        return np.minimum(np.sort(self.column_masses, axis=-1)[..., -self.top_count :].sum(axis=-1), 1.0)

    @property
    def column_spread(self) -> Floats:
        """Entropy of the column masses minus mean row entropy, in ln m: 0 where all rows are alike."""
        return np.maximum(entropy(self.column_masses) / np.log(self.m) - self.entropy_share, 0.0)

    @cached_property
    def entropy_share(self) -> Floats:
        """Mean row entropy / ln m."""
        return np.minimum(self._per_row(entropy(self.between).sum(axis=-1)) / np.log(self.m), 1.0)

    @property
    def cluster(self) -> Floats:
        """Largest modularity of a cut into 2 to 8 runs."""
        return self._runs[0]

    @property
    def runs(self) -> Floats:
        """How many runs that cut has."""
        return self._runs[1]

    @property
    def k90_share(self) -> Floats:
        """Mean least number of keys that hold 0.9 of a row, as a share of a uniform row's."""
        return mean_of_rows(keys_to_reach(self.between)) / ceil(0.9 * self.m - SLACK)

    @property
    def confident(self) -> Floats:
        """Share of rows whose maximum reaches the threshold."""
        reached = torch.from_numpy(self.between).amax(dim=-1).numpy() >= self.threshold - SLACK
        return self._per_row(reached.sum(axis=-1).astype(float))

    @property
    def vertical(self) -> Floats:
        """Excess of the weight on special units; NaN where there are no others."""
        return _excess(self.sink, float(self.kinds.special[0].mean()))

    @property
    def adjacent(self) -> Floats:
        """Excess of the weight on the units just before and behind that are not special."""
        units, there = self.attention.shape[-1], ~self.kinds.special[0]
        behind = chosen(np.diagonal(self.attention, 1, -2, -1), np.flatnonzero(there[1:]), axis=-1).sum(axis=-1)
        before = chosen(np.diagonal(self.attention, -1, -2, -1), np.flatnonzero(there[:-1]), axis=-1).sum(axis=-1)
        return _excess((before + behind) / units, (there[1:].sum() + there[:-1].sum()) / units**2)

    @property
    def block(self) -> Floats:
        """Excess of the weight within the unit's own text; NaN where there is one text."""
        segment = self.kinds.segment[:, self._kept]
        own = (segment[:, :, None] == segment[:, None, :])[:, None]
        uniform = own.mean(axis=(-2, -1))
        if (uniform == 1).all():
            return self._nothing
        within = self._per_row(np.where(own, self.between, 0.0).sum(axis=-1).sum(axis=-1))
        return _excess(within, np.where(uniform < 1, uniform, np.nan))

    @cached_property
    def _kept(self) -> NDArray[np.intp]:
        return np.flatnonzero(~self.kinds.special[0])

    @cached_property
    def _received(self) -> Floats:
        return torch.from_numpy(self.attention).mean(dim=-2).numpy()

    @cached_property
    def _rows(self) -> Floats:
        """Rows of `between` that have any weight."""
        return self.between.any(axis=-1).sum(axis=-1).astype(float)

    def _per_row(self, sums: Floats) -> Floats:
        rows = np.where(self._rows > 0, self._rows, np.nan)
        return sums / rows.reshape(rows.shape + (1,) * (sums.ndim - rows.ndim))

    @property
    def _nothing(self) -> Floats:
        return np.full(self.attention.shape[:2], np.nan)

    @property
    def _reach(self) -> int:
        return min(self.window, self.m - 1)

    @property
    def _uniform_window(self) -> float:
        return sum(self.m - offset for offset in range(1, self._reach + 1)) / self.m**2

    @cached_property
    def _runs(self) -> tuple[Floats, Floats]:
        value, runs = best_runs(self._maps_last)
        return value.reshape(self.between.shape[:2]), runs.reshape(self.between.shape[:2])

    @cached_property
    def _maps_last(self) -> Floats:
        """`between` as (unit, unit, map): what goes along units then goes over many maps at once."""
        m = self.m
        # torch's copy of a transposed matrix goes block by block.
        flat: Floats = torch.from_numpy(self.between.reshape(-1, m * m)).T.contiguous().numpy()
        return flat.reshape(m, m, -1)


def _excess(mass: Floats, uniform: float | Floats) -> Floats:
    """(mass - uniform) / (1 - uniform): 0 for a uniform row, 1 for all of it; NaN where uniform is all."""
    rest = 1.0 - np.asarray(uniform, dtype=np.float64)
    return (mass - uniform) / np.where(rest > 0, rest, np.nan)
