"""What was kept of the stream of vectors, as figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .accumulators import Moments
from .distribution import histogram
from .result import Figure, Heatmap, Lines, Panel, Series
from .stream_points import POINTS, Distributions
from .stream_tables import PARTS, Kept

Floats = NDArray[np.float64]

PLACES = {
    "hidden_state": ("hidden states", 0.0),
    "attention_projection": ("attention output", 0.35),
    "attention_sum": ("attention sum", 0.45),
    "attention_norm": ("attention LayerNorm", 0.55),
    "mlp_output": ("MLP output", 0.8),
    "mlp_sum": ("MLP sum", 0.9),
}
"""What each point's curve is called, and where within its block it is drawn."""
TAIL = 1e-3
"""Share of entries at either end that histograms leave out: single outliers would hide all others."""
INSIDE = "Depth 0 is the first layer's input; points inside block l stand at their place between depths l and l + 1."


def _texts(kept: Kept) -> str:
    texts = kept.counts.texts
    return f"{texts} text{'s' * (texts != 1)}"


def distribution_figure(seen: Distributions, kept: Kept) -> Figure:
    """Norms, deviations, skewness and kurtosis along the stream."""
    entries, norms = seen.moments.at(np.s_[:, 0]), seen.moments.at(np.s_[:, 1])
    panels = (
        _along(kept, "Lengths of vectors", "mean length", norms.mean),
        _along(kept, "Spread of entries", "standard deviation", entries.std),
        _along(kept, "Asymmetry of entries", "skewness", entries.skewness),
        _along(kept, "Tails of entries", "log10 kurtosis", np.log10(entries.excess_kurtosis + 3)),
    )
    note = f"{INSIDE} Entries and tokens of {_texts(kept)}; of a normal distribution the log10 kurtosis is 0.48."
    return Figure("stream", "Distribution of vectors along the stream", panels, columns=2, note=note)


def _along(kept: Kept, title: str, unit: str, values: Floats) -> Lines:
    curves = []
    for point, (label, offset) in PLACES.items():
        at = [number for number, cell in enumerate(kept.points.cells) if cell[0] == point]
        x = np.array([kept.points.cells[number][1] + offset for number in at])
        curves.append(Series(label, x, values[at]))
    return Lines(tuple(curves), "depth", unit, title)


def histogram_figure(seen: Distributions, kept: Kept) -> Figure:
    """A panel for each point: the density of its entries in the first, the middle and the last layer."""
    layers = kept.points.layers
    shown = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
    panels = tuple(
        Lines(
            tuple(_density(seen, kept, layer, point) for layer in shown),
            "entry",
            "log10 density",
            _title(point),
            whole=False,
        )
        for point in POINTS
    )
    note = f"Entries of {_texts(kept)}, heads together; a normal density is a parabola here."
    note += " Not drawn: one entry in 1,000 at either end."
    return Figure("stream-histograms", "Entries of vectors at the points of a block", panels, columns=4, note=note)


def _title(point: str) -> str:
    """A point as a panel names it: by its curve's name, where it has one."""
    name = PLACES[point][0] if point in PLACES else point.replace("_", " ")
    return name[0].upper() + name[1:]


def _density(seen: Distributions, kept: Kept, layer: int, point: str) -> Series:
    found = histogram(seen.histograms.values[kept.points.stacks.index(dict(kept.points.block(layer))[point])])
    below = np.cumsum(found.counts) / max(found.counts.sum(), 1.0)
    filled = (found.counts > 0) & (below > TAIL) & (below - found.counts / max(found.counts.sum(), 1.0) < 1 - TAIL)
    middle = (found.low[filled] + found.high[filled]) / 2
    return Series(f"layer {layer}", middle, np.log10(found.density[filled]))


PANELS: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "steps": (
        ("Size of the update", "|update| / |input|", ("update_ratio",)),
        ("Direction of the update", "degrees", ("update_angle",)),
        ("How far the token turns", "degrees", ("moved_angle",)),
    ),
    "layernorms": (
        ("Scale", "1 / standard deviation", ("scale",)),
        ("Share along (1, ..., 1)", "share of |x|^2", ("ones_share",)),
        ("Change of affine rank", "rank after - before", ("affine_rank_change",)),
    ),
}
MIXED = {
    "mixing_weights": "attention weights",
    "mixing_attention": "attention, by norms",
    "mixing_residual": "with residual",
    "mixing_norm": "with LayerNorm",
}
HEADS = (
    ("attention_entropy_share", "Entropy of attention", "share of ln n", 1.0),
    ("scores_entropy_share", "Entropy of Q K^T", "share of ln n", 1.0),
    ("symmetric_entropy_share", "Entropy of its symmetric part", "share of ln n", 1.0),
    ("output_effective_rank", "Effective rank of A V", "effective rank", None),
    ("output_sigma", "Largest singular value of A V", "singular value", None),
    ("k90_share", "Keys that hold 0.9", "k90 / keys", 1.0),
)


def part_figure(name: str, moments: Moments, kept: Kept) -> Figure:
    """The values of a part over layers, or by layer and head."""
    part = PARTS[name]
    if name == "spectra":
        panels: Sequence[Panel] = [_heads(moments, kept, *shown) for shown in HEADS]
    elif name == "mixing":
        curves = tuple(_curve(moments, kept, (list(MIXED).index(value),), label) for value, label in MIXED.items())
        panels = [Lines(curves, "layer", "mixing ratio", "", low=0.0, high=1.0)]
    else:
        panels = [_by_row(moments, kept, name, *shown) for shown in PANELS[name]]
    columns = 1 if name == "mixing" else 3
    bands = "; bands: one standard deviation either side" * (name != "spectra" and bool((moments.count > 1).any()))
    title, note = part.title.partition(" (")[0], f"Mean over {_texts(kept)}{bands}."
    return Figure(f"stream-{name}", title, tuple(panels), columns, note)


def _by_row(moments: Moments, kept: Kept, name: str, title: str, unit: str, values: tuple[str, ...]) -> Lines:
    part = PARTS[name]
    curves = tuple(
        _curve(moments, kept, (row, list(part.values).index(value)), label.replace("mlp", "MLP"))
        for value in values
        for row, label in enumerate(part.names)
    )
    return Lines(curves, "layer", unit, title)


def _curve(moments: Moments, kept: Kept, at: tuple[int, ...], label: str) -> Series:
    cells = moments.at((slice(None), *at))
    y, spread = cells.mean, cells.std
    band = (y - spread, y + spread) if np.isfinite(spread).any() else (None, None)
    return Series(label, np.array(kept.points.layers, dtype=float), y, *band)


def _heads(moments: Moments, kept: Kept, value: str, title: str, unit: str, high: float | None) -> Heatmap:
    at = list(PARTS["spectra"].values).index(value)
    rows, columns = (tuple(map(str, names)) for names in (kept.points.layers, kept.points.heads))
    return Heatmap(moments.mean[:, :, at], title, rows, columns, "layer", "head", unit, high=high)
