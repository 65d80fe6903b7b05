"""How large the attention weights are, in the norms of the theorems on rank collapse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .kit.analysis import ALL, Analysis, Selection, State, setting
from .kit.collapse_bound import CollapseBound
from .kit.record import ForwardRecord, HeadWeights, ModelShape
from .kit.result import Figure, Heatmap, Lines, Result, Series, Table
from .kit.weight_norms import MATRICES, NORMS, HeadMatrices, contraction

Floats = NDArray[np.float64]
IN_WORDS = {
    "max": "largest |entry| of {}, 0 or more",
    "one": "|{}|_1, largest sum of a column's absolute values, 0 or more",
    "inf": "|{}|_inf, largest sum of a row's absolute values, 0 or more",
}
VALUES = {f"{name}_{norm}": IN_WORDS[norm].format(matrix) for name, matrix in MATRICES.items() for norm in NORMS}
BETA = (
    "|W_Q W_K^T|_1 |W|_{1,inf} with W = W_V W_O, or W_V by --through; 0 or more (Dong et al. 2021, cited at second "
    "hand)"
)


@dataclass
class WeightNormsState(State):
    """The layers asked for, by the first that runs each one's weights, their matrices, and the width of a head."""

    layers: tuple[int, ...]
    matrices: tuple[HeadMatrices, ...]
    head_width: int


@dataclass(frozen=True)
class WeightNorms(Analysis[WeightNormsState]):
    """How large the attention weights are, in the norms of the theorems on rank collapse.

    Largest entries and induced norms of W_Q, W_K, W_V and W_O by head and by layer, W acting on row vectors. For layers
    without residuals, MLP and LayerNorm, Dong et al. (2021, arXiv 2103.03404) bound the residual r of X in the norm
    sqrt(|.|_1 |.|_inf) by c r^3 after one layer and c^((3^L - 1) / 2) r^(3^L) after L, c = 4 beta H / sqrt(dk) with
    |W_Q W_K^T|_1 |W|_{1,inf} at most beta; here in the form without gamma, cited at second hand. W is W_V there; for
    several heads it must be what a head writes, W_V W_O (this project's reading, the default). Alman and Song (arXiv
    2505.16284) show that layers collapse to one where |W_Q|, |W_K| and |W_V| are small; whether they mean the largest
    entry or the induced |.|_inf was not read, so both stand here. Biases are left out.

    Of a text or corpus it also gives the bound by depth beside the residual of passes without attention residual and
    MLP.

    Example: bertgeo weight-norms --corpus corpus.txt
    """

    layers: Selection = setting(ALL, "Layers, from 0: all, or such as 0,3-5,-1. The bound on texts takes all.")
    through: Literal["VO", "V"] = setting("VO", "W of the bound: VO, W_V W_O, what a head writes; V, W_V alone.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def on_texts(self) -> Analysis[Any]:
        return CollapseBound(self.through)

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> WeightNormsState:
        assert weights is not None
        layers = self.layers.resolve(shape.layers, "layer")
        first = {shape.weight_layer[layer]: layer for layer in reversed(layers)}
        held = sorted(first, key=first.__getitem__)
        matrices = tuple(HeadMatrices.of(weights, at, range(shape.heads)) for at in held)
        return WeightNormsState(tuple(first[at] for at in held), matrices, shape.head_width)

    def finalize(self, state: WeightNormsState, record: ForwardRecord | None) -> Result:
        betas = np.stack([matrices.beta(self.through) for matrices in state.matrices])
        heads, layers = _head_table(state, betas), _layer_table(state, betas)
        names = ["layer", "q_max", "k_max", "v_max", "o_max", "beta", "factor", "shrinks_below"]
        headline = Table(layers.name, layers.title, layers.frame[names], {name: layers.columns[name] for name in names})
        note = f"W of the bound: {'W_V W_O' if self.through == 'VO' else 'W_V'}. Biases left out."
        return Result(headline, (layers, heads), (_sizes(layers.frame), _betas(state, betas, note)), (note,))


def _head_table(state: WeightNormsState, betas: Floats) -> Table:
    frames = [
        pd.DataFrame(
            {"layer": layer, "head": range(len(matrices.q))}
            | {f"{name}_{norm}": of(getattr(matrices, name)) for name in MATRICES for norm, of in NORMS.items()}
        )
        for layer, matrices in zip(state.layers, state.matrices, strict=True)
    ]
    frame = pd.concat(frames, ignore_index=True).assign(beta=betas.reshape(-1))
    about = {"layer": "layer, from 0", "head": "head, from 0", **VALUES, "beta": BETA}
    return Table("weight-norms-heads", "Norms of each head's weights", frame, about)


def _layer_table(state: WeightNormsState, betas: Floats) -> Table:
    rows = [
        {
            f"{name}_{norm}": of(matrix).item()
            for name, matrix in matrices.side_by_side().items()
            for norm, of in NORMS.items()
        }
        for matrices in state.matrices
    ]
    frame = pd.DataFrame({"layer": state.layers}).join(pd.DataFrame(rows)).assign(beta=betas.max(axis=1))
    frame["factor"] = [contraction(beta, betas.shape[1], state.head_width) for beta in frame["beta"]]
    frame["shrinks_below"] = [factor**-0.5 if factor > 0 else np.nan for factor in frame["factor"]]
    about = {
        "layer": "layer, from 0",
        **{name: f"{meaning}; all heads side by side" for name, meaning in VALUES.items()},
        "beta": f"largest of the heads' {BETA}",
        "factor": "c = 4 beta H / sqrt(dk), 0 or more (Dong et al. 2021, without gamma, cited at second hand)",
        "shrinks_below": "residual in the norm sqrt(|.|_1 |.|_inf) below which c r^3 < r: 1 / sqrt(c); empty for c = 0",
    }
    return Table("weight-norms", "Norms of each layer's attention weights", frame, about)


def _sizes(layers: pd.DataFrame) -> Figure:
    """Norms of whole layers."""
    x = layers["layer"].to_numpy(float)
    panels = tuple(
        Lines(
            tuple(Series(MATRICES[name], x, layers[f"{name}_{norm}"].to_numpy(float)) for name in MATRICES),
            "layer",
            unit,
            title,
            low=0.0,
        )
        for norm, unit, title in (
            ("max", "largest |entry|", "Largest weights"),
            ("one", "|W|_1", "Largest sum of a column"),
            ("inf", "|W|_inf", "Largest sum of a row"),
        )
    )
    return Figure("weight-norms", "Size of attention weights", panels, columns=3, note="All heads side by side.")


def _betas(state: WeightNormsState, betas: Floats, note: str) -> Figure:
    """The bound's beta of every head."""
    logs = np.log10(betas, out=np.full_like(betas, np.nan), where=betas > 0)
    rows, columns = tuple(map(str, state.layers)), tuple(map(str, range(betas.shape[1])))
    panel = Heatmap(logs, "", rows, columns, "layer", "head", "log10 beta", low=None, high=None)
    title = "Beta of the bound on rank collapse, by layer and head"
    return Figure("weight-norms-beta", title, (panel,), note=f"beta = |W_Q W_K^T|_1 |W|_{{1,inf}}. {note}")
