"""The double-exponential bound on texts, beside the residual of passes without attention residual and MLP."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .accumulators import Counts, Moments
from .analysis import Analysis, State
from .record import ForwardRecord, HeadWeights, ModelShape, under
from .result import Figure, Lines, Result, Series, Table
from .spectra import FLOAT32_EPSILON, composite_norm
from .tables import moment_columns
from .weight_norms import HeadMatrices, contraction, log_bound

Floats = NDArray[np.float64]
STATES = under("both", "hidden_states")
VALUES = {
    "residual": "|X - 1 mean| in the norm sqrt(|.|_1 |.|_inf), of passes without attention residual and MLP (SAN), "
    "whose LayerNorm stays; 0 or more",
    "log10_residual": "log10 of it; empty where it is at most n 2^-23 |X|, which rounding to float32 alone may leave",
    "log10_bound": "log10 of c^((3^l - 1) / 2) r^(3^l) at depth l, r the residual at depth 0 and c the largest factor "
    "of a layer; a bound for layers without LayerNorm (Dong et al. 2021, without gamma, cited at second hand); empty "
    "where r is 0",
}
DEPTH = "0 is the first layer's input, l + 1 the output of layer l"


@dataclass
class CollapseBoundState(State):
    """Per-text values (depth, value), and the largest factor of a layer."""

    moments: Moments
    counts: Counts
    factor: float


@dataclass(frozen=True)
class CollapseBound(Analysis[CollapseBoundState]):
    """How far the bound lies from what passes without attention residual and MLP do: the companion of weight-norms."""

    through: str = "VO"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({STATES})

    @property
    def needs_weights(self) -> bool:
        return True

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> CollapseBoundState:
        assert weights is not None
        heads = range(shape.heads)
        largest = max(HeadMatrices.of(weights, at, heads).beta(self.through).max() for at in range(shape.weight_layers))
        factor = contraction(float(largest), shape.heads, shape.head_width)
        return CollapseBoundState(Moments.empty(shape.layers + 1, len(VALUES)), Counts(), factor)

    def update(self, state: CollapseBoundState, record: ForwardRecord) -> None:
        for index, text in enumerate(record.texts):
            states = record.of_text(STATES, index)
            found = composite_norm(states - states.mean(axis=1, keepdims=True))
            rounding = len(text) * FLOAT32_EPSILON * composite_norm(states)
            bound = np.array([log_bound(state.factor, found[0], depth) for depth in range(len(found))])
            state.moments.add(np.stack([found, _log10(found, rounding), bound], axis=-1)[None])
            state.counts.add([len(text)])

    def finalize(self, state: CollapseBoundState, record: ForwardRecord | None) -> Result:
        frame = pd.DataFrame({"depth": range(len(state.moments.mean)), "texts": state.counts.texts})
        values, columns = moment_columns(state.moments, list(VALUES), VALUES)
        about = {"depth": DEPTH, "texts": "texts measured"} | columns
        title = "Residual without attention residual and MLP, and its bound"
        table = Table("weight-norms-bound", title, pd.concat([frame, values], axis=1), about)
        told = "grows with depth, so it says nothing of these texts" if _grows(state) else "falls with depth"
        return Result(table, (table,), (_figure(state),), (f"The bound {told}.",))


def _log10(values: Floats, rounding: Floats) -> Floats:
    real = values > rounding
    return np.where(real, np.log10(np.where(real, values, 1.0)), np.nan)


def _grows(state: CollapseBoundState) -> bool:
    bound = state.moments.mean[:, list(VALUES).index("log10_bound")]
    return bool(bound[-1] > bound[0])


def _figure(state: CollapseBoundState) -> Figure:
    depths, means, names = np.arange(len(state.moments.mean), dtype=float), state.moments.mean, list(VALUES)
    panels = tuple(
        Lines((Series("", depths, means[:, names.index(name)]),), "depth", f"log10 of the {what}", title)
        for name, what, title in (
            ("log10_residual", "residual", "Residual without attention residual and MLP"),
            ("log10_bound", "bound", "Double-exponential bound"),
        )
    )
    texts = state.counts.texts
    note = f"Mean over {texts} text{'s' * (texts != 1)}, without residuals that rounding to float32 alone may leave. "
    note += "The bound knows no LayerNorm; the passes keep it."
    return Figure("weight-norms-bound", "Rank collapse and its bound", panels, columns=2, note=note)
