"""What residual connections do for gradients and for the Jacobians of blocks: sums over texts, tables, figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .accumulators import Moments, Totals
from .jacobian import Shares
from .result import Figure, Lines, Series, Table
from .tables import moment_columns

Floats = NDArray[np.float64]

CUTS: Mapping[str, str] = {
    "none": "all residuals",
    "attention": "attention residual cut",
    "mlp": "MLP residual cut",
    "both": "both cut",
}
"""The kinds of residual connections that are cut, and what figures call the rest."""
GRADIENT = {
    "cut": "residual connections that are cut in every block: none, attention, mlp, both; nothing else is taken away",
    "depth": "0 is the first layer's input, l + 1 the output of layer l",
    "texts": "texts measured",
    "gradient": "root mean square over random unit directions r of |d <r, h_last> / d h_depth| (this project's own "
    "probe), geometric mean over texts; 1 at the last depth",
}
LOG10 = {"log10_gradient": "log10 of the same, mean over texts"}
BLOCKS = {
    "cut": GRADIENT["cut"],
    "layer": "the block from depth l to depth l + 1",
    "texts": "texts measured, those of smallest hash",
}
VALUES = {
    "identity": "tr J / (|J|_F sqrt(n d)): the cosine of J = d h_(l+1) / d h_l, n tokens by d wide, with the identity "
    "(this project's own definition), -1 to 1",
    "diagonal": "tr J / (n d): the mean of the diagonal of J",
    "gain": "|J|_F / sqrt(n d): root mean square of |J^T r| over unit directions r",
    "spectral": "largest singular value of J, by power iteration from below, or exact",
}
ERRORS = {
    f"{name}_error": f"standard error of {name} that is due to random probes; 0 where exact"
    for name in ("identity", "diagonal", "gain")
}
COUNTS = {
    "exact": "texts whose J was computed whole",
    "unsettled": "texts whose power iteration had not settled: their spectral norm may be larger",
}


@dataclass
class ResidualSums:
    """Over texts: log10 gradients (cut, depth, 1), values of blocks (cut, layer, value), squares of their errors."""

    cuts: tuple[str, ...]
    gradients: Moments
    blocks: Moments
    errors: Totals
    counts: Totals
    vanished: int = 0

    @classmethod
    def empty(cls, cuts: Sequence[str], layers: int) -> ResidualSums:
        """Nothing seen yet."""
        cells = len(cuts), layers
        blocks = Moments.empty(*cells, len(VALUES)), Totals.empty(*cells, len(ERRORS)), Totals.empty(*cells, 2)
        return cls(tuple(cuts), Moments.empty(len(cuts), layers + 1, 1), *blocks)

    def add_gradients(self, norms: Sequence[Floats]) -> None:
        """Add the norms (depth, direction) of one text, for every cut. A gradient of 0 has no logarithm."""
        means = np.sqrt((np.stack(norms) ** 2).mean(axis=-1))
        self.vanished += bool((means == 0).any())
        self.gradients.add(np.log10(np.where(means > 0, means, np.nan))[None, ..., None])

    def add_blocks(self, found: Sequence[Sequence[Shares]], exact: bool, settled: Sequence[Sequence[bool]]) -> None:
        """Add what was found of one text's blocks, cut by cut."""
        rows = [[[getattr(own, name) for name in VALUES] for own in shares] for shares in found]
        self.blocks.add(np.array(rows, dtype=float)[None])
        errors = [[[getattr(own, name) for name in ERRORS] for own in shares] for shares in found]
        self.errors.add(np.array(errors, dtype=float) ** 2)
        self.counts.add(np.stack([np.full(np.shape(settled), float(exact)), ~np.array(settled, dtype=bool)], axis=-1))


def gradient_table(sums: ResidualSums) -> Table:
    """How large a gradient reaches each depth."""
    cuts, depths, _ = sums.gradients.mean.shape
    frame = pd.DataFrame({"cut": np.repeat(sums.cuts, depths), "depth": np.tile(np.arange(depths), cuts)})
    frame["texts"] = sums.gradients.count.ravel()
    frame["gradient"] = 10 ** sums.gradients.mean.ravel()
    values, columns = moment_columns(sums.gradients, list(LOG10), LOG10)
    title = "Gradient that reaches each depth"
    return Table("residuals", title, pd.concat([frame, values], axis=1), GRADIENT | columns)


def block_table(sums: ResidualSums) -> Table:
    """How much of every block's Jacobian is the identity."""
    cuts, layers, _ = sums.blocks.mean.shape
    frame = pd.DataFrame({"cut": np.repeat(sums.cuts, layers), "layer": np.tile(np.arange(layers), cuts)})
    texts = sums.blocks.count.max(axis=-1)
    frame["texts"] = texts.ravel()
    for at, name in enumerate(COUNTS):
        frame[name] = sums.counts.values[..., at].ravel().astype(int)
    values, columns = moment_columns(sums.blocks, list(VALUES), VALUES)
    errors = np.sqrt(sums.errors.values) / np.maximum(texts, 1)[..., None]
    for at, name in enumerate(ERRORS):
        values[name] = errors[..., at].ravel()
    about = BLOCKS | COUNTS | columns | ERRORS
    title = "Jacobians of blocks"
    joined = pd.concat([frame, values], axis=1)[list(about)]
    return Table("residuals-blocks", title, joined, about, ("texts", *COUNTS))


def headline(gradients: Table, blocks: Table | None) -> Table:
    """Gradient by depth, a column for each cut; and identity in the block above it, for the first and the last cut."""
    wide = gradients.frame.pivot_table(index="depth", columns="cut", values="gradient", sort=False, dropna=False)
    frame, columns = pd.DataFrame({"depth": wide.index}), {"depth": GRADIENT["depth"]}
    for cut in map(str, wide):
        frame[cut], columns[cut] = wide[cut].to_numpy(), f"gradient, {CUTS[cut]}"
    cuts = list(columns)[1:]
    for cut in dict.fromkeys((cuts[0], cuts[-1])) if blocks is not None else ():
        assert blocks is not None
        rows = blocks.frame[blocks.frame["cut"] == cut].set_index("layer")
        name = f"identity_{cut}"
        frame[name], columns[name] = rows["identity"].reindex(frame["depth"]).to_numpy(), f"identity, {CUTS[cut]}"
    title = "Gradient that reaches each depth, and identity in the block above it, by residuals cut"
    return Table(gradients.name, title, frame, columns)


def gradient_figure(sums: ResidualSums) -> Figure:
    """The gradient by depth, on a logarithmic axis, a curve for each cut."""
    curves = tuple(_curve(sums, at, CUTS[cut]) for at, cut in enumerate(sums.cuts))
    texts = int(sums.gradients.count.max())
    note = "Root mean square over random unit directions r of |d <r, h_last> / d h_depth|: 1 at the last depth."
    if texts > 1:
        note += f" Geometric mean over {texts} texts; bands: one standard deviation of the logarithm either side."
    panel = Lines(curves, "depth", "gradient norm, relative to the last depth", log_y=True)
    return Figure("residuals", "Gradient that reaches each depth", (panel,), note=note)


def _curve(sums: ResidualSums, at: int, label: str) -> Series:
    mean, spread = sums.gradients.mean[at, :, 0], sums.gradients.std[at, :, 0]
    band = (10 ** (mean - spread), 10 ** (mean + spread)) if np.isfinite(spread).any() else (None, None)
    return Series(label, np.arange(len(mean), dtype=float), 10**mean, *band)


PANELS = (
    ("identity", "Likeness to the identity", "cosine of J with I"),
    ("gain", "Gain", "|J|_F / sqrt(n d)"),
    ("spectral", "Largest singular value", "singular value"),
)


def block_figure(sums: ResidualSums) -> Figure:
    """Identity, gain and spectral norm of every block."""
    panels = tuple(_panel(sums, *panel) for panel in PANELS)
    texts = int(sums.blocks.count.max())
    note = "J = d h_(l+1) / d h_l of block l, all n tokens by d wide; its cosine with the identity is "
    note += "tr J / (|J|_F sqrt(n d))."
    if texts > 1:
        note += f" Mean over {texts} texts; bands: one standard deviation either side."
    return Figure("residuals-blocks", "Jacobians of blocks", panels, len(panels), note)


def _panel(sums: ResidualSums, name: str, title: str, unit: str) -> Lines:
    place, curves = list(VALUES).index(name), []
    for at, cut in enumerate(sums.cuts):
        mean, spread = sums.blocks.mean[at, :, place], sums.blocks.std[at, :, place]
        band = (mean - spread, mean + spread) if np.isfinite(spread).any() else (None, None)
        curves.append(Series(CUTS[cut], np.arange(len(mean), dtype=float), mean, *band))
    return Lines(tuple(curves), "layer", unit, title, low=min(0.0, float(np.nanmin(sums.blocks.mean[..., place]))))
