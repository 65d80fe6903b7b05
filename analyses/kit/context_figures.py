"""One word in many contexts as figures: curves over depth, maps by sense, and the texts coloured by what pulled it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .context_tables import norm_shares
from .contexts import Contexts
from .occurrences import Occurrence
from .result import ColouredText, Figure, Lines, Points, Series

Floats = NDArray[np.float64]
NO_SENSE = "no sense given"
MOST_TEXTS = 4
"""Senses whose text is drawn."""


def depth_figure(seen: Contexts) -> Figure:
    """Self-similarity and separation by depth."""
    own, baseline = seen.cosines
    found, x = seen.separation, np.arange(len(own), dtype=float)
    curves = [Series("all pairs", x, own)]
    if found:
        curves += [Series("same sense", x, found.same), Series("different senses", x, found.other)]
    curves.append(Series("baseline", x, baseline, dashed=True))
    low = min(0.0, *(float(np.nanmin(curve.y, initial=0.0)) for curve in curves))
    panels = [Lines(tuple(curves), "depth", "mean cosine", "Similarity to itself", low=low, high=1.0)]
    if found:
        apart = Series("silhouette", x, found.silhouette), Series("nearest of same sense", x, found.nearest)
        low = min(0.0, float(found.silhouette.min()))
        panels.append(Lines(apart, "depth", "silhouette, or share", "Separation of the senses", low=low, high=1.0))
    note = "Pairs of occurrences in different texts; baseline: of ordinary tokens of the same texts. "
    note += f"{len(seen.items)} occurrences. Depth 0 is the first layer's input."
    if found:
        note += f" A random neighbour has the same sense in {found.chance:.0%} of cases."
    return Figure("context", f"{seen.word} in its contexts", tuple(panels), len(panels), note)


def map_figure(seen: Contexts) -> Figure:
    """The occurrences on their principal components: at the first depth, where senses separate best, at the last."""
    last = len(seen.vectors) - 1
    best = seen.separation.best if seen.separation else last
    depths = sorted({0, best, last})
    names, groups = _groups(seen)
    panels = tuple(_map(seen, depth, names, groups) for depth in depths)
    note = "Principal components (PC) of the occurrences' vectors at each depth, with their shares of the variance. "
    note += "Numbers: lines of the corpus."
    if seen.clusters is not None:
        note += " Clusters: 2-means of the last depth, found from the same vectors; they are no evidence of senses."
    return Figure("context-map", f"{seen.word}: its occurrences by depth", panels, len(panels), note)


def _groups(seen: Contexts) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names of the colours, and each occurrence's place among them."""
    if seen.clusters is not None:
        count = int(seen.clusters.max()) + 1
        return tuple(f"cluster {cluster}" for cluster in range(count)), tuple(seen.clusters.tolist())
    named = [item.sense or NO_SENSE for item in seen.items]
    names = (*seen.senses, *([NO_SENSE] if NO_SENSE in named else []))
    return names, tuple(names.index(name) for name in named)


def _map(seen: Contexts, depth: int, names: tuple[str, ...], groups: tuple[int, ...]) -> Points:
    places, shares = seen.planes[depth]
    labels = tuple(str(item.text.line) for item in seen.items)
    across, up = (f"PC {axis + 1}" + _percent(share) for axis, share in enumerate(shares))
    best = seen.separation is not None and depth == seen.separation.best
    title = f"Depth {depth}" + " (best separated)" * best
    return Points(places[:, 0], places[:, 1], labels, groups, "sense", across, up, title, names=names)


def _percent(share: float) -> str:
    return f" ({share:.0%})" if np.isfinite(share) else ""


def pull_figure(seen: Contexts) -> Figure:
    """For each sense the shortest text that holds the word, every token coloured by its share of what pulled it."""
    panels = tuple(_coloured(item) for item in _shortest(seen))
    note = "Each row: |sum_h A_ij f_h(x_j)| of every token j for the word i, as a share of the row's sum. "
    note += "Of each sense the shortest text."
    return Figure("context-pull", f"What pulled {seen.word}", panels, note=note)


def _shortest(seen: Contexts) -> Iterator[Occurrence]:
    for sense in (seen.senses or ("",))[:MOST_TEXTS]:
        yield min((item for item in seen.items if item.sense == sense), key=lambda item: (len(item.text), item.place))


def _coloured(item: Occurrence) -> ColouredText:
    rows = tuple(f"layer {layer}" for layer in range(len(item.norms)))
    title = f"{item.sense}, line {item.text.line}" if item.sense else f"line {item.text.line}"
    return ColouredText(item.text.labels, rows, norm_shares(item), "share of norms", title)
