"""What the division by sqrt(dk) does, trained and at random initialisation, as tables, figures and lines to print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .distribution import histogram
from .dot_products import SPREAD, DotProducts
from .result import Figure, Heatmap, Lines, Panel, Result, Series, Table
from .tables import moment_columns
from .temperature import SWEEP, softmax_at, sweep_values

Floats = NDArray[np.float64]
Both = Mapping[str, DotProducts]
TRAINED, RANDOM = "trained", "random"
WEIGHTS = {
    "weights": "trained: the checkpoint's; random: the same configuration at transformers' initialisation, by --seed",
}
HEAD = WEIGHTS | {"layer": "layer, from 0", "head": "head, from 0"}
TAUS = {"tau": "the temperature that q.k is divided by", "of_own": "tau / sqrt(dk): 1 at the model's own"}
COUNTS = {"texts": "texts measured", "pairs": "pairs of a query and a key measured"}
CURVES = {
    "entropy_share": ("How even the weights are", "entropy / ln(keys)", 1.0),
    "largest": ("Largest weight", "weight", 1.0),
    "jacobian": ("Gradient through the softmax", "|dp / d(q.k / tau)|", 0.5),
    "jacobian_raw": ("Gradient left for q and k", "log10 |dp / d(q.k)|", None),
}
"""Title, unit and upper limit of every panel of a sweep."""
TAIL = 1e-3
"""Share of the products at either end that histograms leave out."""


def scaling_result(both: Both, about: str) -> Result:
    """The answer from both models' dot products; `about` says how the random weights were drawn."""
    one = both[TRAINED]
    texts = f"{one.counts.texts} text{'s' * (one.counts.texts != 1)}"
    note = f"{texts}; {about}"
    figures = _spread_figure(both, note), _sweep_figure(both, note), _histogram_figure(both, note)
    return Result(_headline(both), (_heads(both), _sweep(both)), figures, _notes(both))


def _cells(seen: DotProducts, name: str) -> pd.DataFrame:
    rows = [(name, layer, head) for layer in seen.layers for head in seen.heads]
    return pd.DataFrame(rows, columns=list(HEAD))


def _heads(both: Both) -> Table:
    frames = []
    for name, seen in both.items():
        frame = _cells(seen, name)
        frame["texts"], frame["pairs"] = seen.counts.texts, seen.products.count.ravel()
        frame[list(SPREAD)] = seen.spread.reshape(len(frame), -1)
        frames.append(frame)
    title = "How widely q.k spreads, by head (all pairs of all texts)"
    columns = HEAD | COUNTS | dict(SPREAD)
    return Table("scaling-heads", title, pd.concat(frames, ignore_index=True), columns, tuple(COUNTS))


def _sweep(both: Both) -> Table:
    frames, described = [], dict[str, str]()
    for name, seen in both.items():
        cells = _cells(seen, name)
        frame = cells.loc[cells.index.repeat(len(seen.temperatures))].reset_index(drop=True)
        frame["tau"] = np.tile(seen.temperatures, len(cells))
        frame["of_own"] = frame["tau"] / math.sqrt(seen.head_width)
        frame["texts"] = seen.counts.texts
        values, described = moment_columns(seen.sweep, list(SWEEP), SWEEP)
        frames.append(pd.concat([frame, values], axis=1))
    columns = HEAD | TAUS | {"texts": COUNTS["texts"]} | described
    title = "The softmax of q.k / tau, by head and temperature (mean over query rows, then over texts)"
    return Table("scaling-sweep", title, pd.concat(frames, ignore_index=True), columns)


def _headline(both: Both) -> Table:
    shown = {
        "scaled_std": "standard deviation of the scaled scores",
        "law": "q.k's standard deviation / (sqrt(dk) std(q) std(k))",
        "jacobian_1": "|d p / d(q.k)| without the division (tau = 1)",
        "jacobian": "|d p / d(q.k / tau)| at tau = sqrt(dk)",
    }
    one = both[TRAINED]
    frame = pd.DataFrame({"layer": one.layers})
    columns = {"layer": HEAD["layer"]}
    for value, meaning in shown.items():
        for name, seen in both.items():
            frame[f"{value}_{name}"] = _by_layer(seen, value)
            columns[f"{value}_{name}"] = f"{meaning}, {name} weights, mean over heads"
    title = "q.k against sqrt(dk) by layer (mean over heads)"
    return Table("scaling-layers", title, frame, columns)


def _by_layer(seen: DotProducts, value: str) -> Floats:
    if value in SPREAD:
        return seen.spread[..., list(SPREAD).index(value)].mean(axis=1)
    tau = 1.0 if value.endswith("_1") else math.sqrt(seen.head_width)
    at = seen.temperatures.index(tau), list(SWEEP).index(value.removesuffix("_1"))
    return seen.sweep.mean[:, :, at[0], at[1]].mean(axis=1)


def _notes(both: Both) -> tuple[str, ...]:
    root = math.sqrt(both[TRAINED].head_width)
    lines = [f"sqrt(dk) = {root:.4g}: what independent entries of variance 1 would give q.k as standard deviation."]
    for name, seen in both.items():
        means = dict(zip(SPREAD, seen.spread.mean(axis=(0, 1)), strict=True))
        lines.append(
            f"{name.capitalize()}, mean over heads: std(q.k) {means['std']:.4g} = {means['scaled_std']:.3g} sqrt(dk); "
            f"std(q) {means['query_std']:.3g}, std(k) {means['key_std']:.3g}; "
            f"{means['law']:.3g} times sqrt(dk) std(q) std(k)."
        )
    return tuple(lines)


def _spread_figure(both: Both, note: str) -> Figure:
    titles = {"scaled_std": "std(q.k) / sqrt(dk)", "law": "std(q.k) / (sqrt(dk) std(q) std(k))"}
    panels = tuple(
        Heatmap(
            _log(np.log2, seen.spread[..., list(SPREAD).index(value)]),
            f"{title}, {name}",
            tuple(map(str, seen.layers)),
            tuple(map(str, seen.heads)),
            "layer",
            "head",
            "log2 of the ratio",
            low=None,
            high=None,
            diverging=True,
        )
        for value, title in titles.items()
        for name, seen in both.items()
    )
    note = f"0: as wide as the denominator says; 1: twice as wide. {note}"
    return Figure("scaling-spread", "q.k against sqrt(dk), by head", panels, len(both), note)


def _log(log: np.ufunc, values: Floats) -> Floats:
    """The logarithm, NaN where there is none."""
    return log(np.where(values > 0, values, np.nan))


def _sweep_figure(both: Both, note: str) -> Figure:
    panels = tuple(_curves(both, value) for value in CURVES)
    note = f"Mean over query rows, texts and heads. Norms are Frobenius norms of the softmax's Jacobian. {note}"
    return Figure("scaling-sweep", "The softmax of q.k / tau", panels, 2, note)


def _curves(both: Both, value: str) -> Lines:
    one, at = both[TRAINED], list(SWEEP).index(value)
    x = np.array(one.temperatures)
    mean = one.sweep.mean[..., at].mean(axis=1)
    series = [Series(f"layer {layer}", x, mean[row]) for row, layer in enumerate(one.layers)]
    rest = [
        Series("random, all layers", x, seen.sweep.mean[..., at].mean(axis=(0, 1)), dashed=True)
        for name, seen in both.items()
        if name != TRAINED
    ]
    return sweep_panel((*series, *rest), value, math.sqrt(one.head_width))


def sweep_panel(series: Sequence[Series], value: str, own: float) -> Lines:
    """Curves of a value of CURVES over temperatures, the model's own marked."""
    title, unit, high = CURVES[value]
    if unit.startswith("log10"):
        series = [replace(one, y=_log(np.log10, one.y)) for one in series]
    low = 0.0 if high else None
    return Lines(tuple(series), "tau", unit, title, False, low, high, log_x=True, mark=own, mark_label="sqrt(dk)")


def _histogram_figure(both: Both, note: str) -> Figure:
    panels: list[Panel] = []
    for name, seen in both.items():
        root = math.sqrt(seen.head_width)
        for label, scale in (("q.k", 1.0), ("q.k / sqrt(dk)", root)):
            curves = tuple(_density(seen, at, scale) for at in range(len(seen.layers)))
            panels.append(Lines(curves, label, "log10 density", f"{label}, {name}", whole=False))
    note = f"Heads together. Not drawn: one product in 1,000 at either end. {note}"
    return Figure("scaling-distribution", "q.k before and after the division by sqrt(dk)", tuple(panels), 2, note)


def _density(seen: DotProducts, at: int, scale: float) -> Series:
    width = seen.products.std[at].mean()
    # Bins narrower than this would hold too few products to tell a density.
    found = histogram(seen.histograms.values[at], least=2.0 ** math.floor(math.log2(max(width, TAIL) / 4)))
    share = found.counts / max(found.counts.sum(), 1.0)
    below = np.cumsum(share)
    filled = (share > 0) & (below > TAIL) & (below - share < 1 - TAIL)
    middle = (found.low[filled] + found.high[filled]) / 2
    return Series(f"layer {seen.layers[at]}", middle / scale, np.log10(found.density[filled] * scale))


def row_result(scores: Sequence[float], head_width: int, taus: Sequence[float]) -> Result:
    """The answer for one row of scores q.k, without a model: the softmax before and after, and the sweep."""
    products, own = np.array(scores), math.sqrt(head_width)
    before, after = (softmax_at(products, tau) for tau in (1.0, own))
    weights = pd.DataFrame({"key": range(len(scores)), "score": products, "scaled": products / own})
    weights["weight_before"], weights["weight_after"] = before, after
    columns = {
        "key": "the key, from 0",
        "score": "q.k as given",
        "scaled": "score / sqrt(dk)",
        "weight_before": "softmax of the scores as they are, 0 to 1",
        "weight_after": "softmax of the scaled scores, 0 to 1",
    }
    table = Table("scaling-row", f"One row of scores, dk = {head_width}", weights, columns)
    sweep = pd.DataFrame({"tau": taus, "of_own": np.array(taus) / own})
    sweep[list(SWEEP)] = np.stack([sweep_values(products, tau) for tau in taus])
    swept = Table("scaling-row-sweep", "The softmax of the row at every temperature", sweep, TAUS | dict(SWEEP))
    return Result(table, (table, swept), (_row_figure(sweep, own),), _row_notes(products, own), details=(swept,))


def _row_figure(sweep: pd.DataFrame, own: float) -> Figure:
    x = sweep["tau"].to_numpy(float)
    panels = tuple(sweep_panel([Series("", x, sweep[value].to_numpy(float))], value, own) for value in CURVES)
    return Figure("scaling-row", "The softmax of the row at temperatures tau", panels, 2)


def _row_notes(products: Floats, own: float) -> tuple[str, ...]:
    lines = []
    for name, tau in (("Before", 1.0), (f"After / sqrt(dk) = {own:.6g}", own)):
        value = dict(zip(SWEEP, sweep_values(products, tau).tolist(), strict=True))
        lines.append(
            f"{name}: entropy {value['entropy']:.4g} nats, largest weight {value['largest']:.6g}, "
            f"Jacobian |dp / d(q.k / tau)| {value['jacobian']:.4g}, |dp / d(q.k)| {value['jacobian_raw']:.4g}."
        )
    return tuple(lines)
