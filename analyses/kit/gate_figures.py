"""Figures of gates: the map of labels, the scores, the shares by layer, and a real map for each label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .examples import ENOUGH, Example
from .gate_labels import GATES, PATTERNS
from .gate_scores import SCORES
from .result import ClassMap, Figure, Heatmap

Floats = NDArray[np.float64]
Places = tuple[Sequence[int], Sequence[int]]
OWN = "Scores, rules and thresholds are this project's own, not the paper's."
PATTERN_COLOURS = (0, 1, 5, 6, 8)
PANELS: Mapping[str, tuple[str, str, float | None, float | None]] = {
    "sink": ("Weight on special tokens", "weight", 0.0, 1.0),
    "self": ("Weight on the {unit} itself", "weight", 0.0, 1.0),
    "diagonal": ("Strongest diagonal", "weight", 0.0, 1.0),
    "backward": ("Window before the {unit}", "excess over uniform", -1.0, 1.0),
    "forward": ("Window behind the {unit}", "excess over uniform", -1.0, 1.0),
    "column": ("Heaviest column", "weight", 0.0, 1.0),
    "columns": ("Heaviest columns", "weight", 0.0, 1.0),
    "column_spread": ("Column less row entropy", "share of ln m", 0.0, 1.0),
    "cluster": ("Best cut into runs", "modularity", None, None),
    "runs": ("Runs of that cut", "runs", None, None),
    "entropy_share": ("Row entropy", "share of ln m", 0.0, 1.0),
    "k90_share": ("Keys that hold 0.9 of a row", "k90 / ceil(0.9 m)", 0.0, 1.0),
    "confident": ("Confident rows", "share of rows", 0.0, 1.0),
    "vertical": ("Special tokens", "excess over uniform", -1.0, 1.0),
    "adjacent": ("Neighbouring {unit}s", "excess over uniform", -1.0, 1.0),
    "block": ("Own text of a pair", "excess over uniform", -1.0, 1.0),
}
"""Of each score the title, what its colours mean, and the ends of their scale."""


def map_figure(labels: pd.DataFrame, places: Places, texts: int) -> Figure:
    """Layers x heads in the colours of their gates and patterns, with how stable the gates are over texts."""
    offsets = np.where(labels["gate"] == "directional", labels["offset"], np.nan)
    panels: list[ClassMap | Heatmap] = [
        _classes(labels["gate"], GATES, "Gate of the mean scores", places, tuple(range(len(GATES))), offsets)
    ]
    if texts > 1:
        stability = labels["gate_stability"].to_numpy().reshape(len(places[0]), -1)
        panels.append(_heat(stability, "Stability of the gate", "share of texts", places, 0.0, 1.0))
    panels.append(_classes(labels["pattern"], PATTERNS, "Class after Kovaleva et al.", places, PATTERN_COLOURS))
    note = f"{OWN} Numbers in cells: the offset of a directional gate, key minus query."
    if texts > 1:
        note += f" Means over {texts} texts; stability: the share of texts that have the most frequent gate."
    return Figure("gates-map", "Gates by layer and head", tuple(panels), columns=len(panels), note=note)


def scores_figure(mean: Floats, places: Places, unit: str, texts: int) -> Figure:
    """Layers x heads for every score that any text has."""
    shown = [(at, name) for at, name in enumerate(SCORES) if name in PANELS and np.isfinite(mean[..., at]).any()]
    panels = tuple(_score(mean[..., at], name, places, unit) for at, name in shown)
    note = f"{OWN} m: {unit}s that are not special."
    note += f" Mean over {texts} texts." if texts > 1 else ""
    return Figure("gates-scores", "Scores of gates by layer and head", panels, columns=4, note=note)


def shares_figure(shares: pd.DataFrame, layers: Sequence[int], texts: int) -> Figure:
    """Layers x labels: how many of a layer's maps have each."""
    panels = []
    for kind, names, title in (("gate", GATES, "Gates"), ("pattern", PATTERNS, "Classes after Kovaleva et al.")):
        own = shares[shares["kind"] == kind]["share"].to_numpy().reshape(len(layers), -1)
        rows = tuple(map(str, layers))
        panels.append(Heatmap(own, title, rows, names, "layer", "label", "share of maps", 0.0, 1.0))
    over = f" Maps: heads of {texts} texts." if texts > 1 else " Maps: heads."
    return Figure("gates-shares", "Shares of labels by layer", tuple(panels), columns=2, note=OWN + over)


def example_figure(examples: Mapping[int, Example], unit: str, texts: int) -> Figure:
    """For each gate that occurs the map that shows it best."""
    panels = tuple(_example(GATES[label], example, unit, texts) for label, example in examples.items())
    note = f"{OWN} Of each gate the map with the highest deciding score (for mixed: farthest below every threshold)"
    note += f", among short texts, of {ENOUGH} units or more where there are such; special tokens included."
    return Figure("gates-examples", "An attention map for each gate", panels, columns=min(3, len(panels)), note=note)


def _example(name: str, example: Example, unit: str, texts: int) -> Heatmap:
    title = f"{name.capitalize()}: L{example.layer}H{example.head}"
    title += f", line {example.line}" if texts > 1 else ""
    names = example.labels
    return Heatmap(example.attention, title, names, names, f"query {unit}", f"key {unit}", "attention weight")


def _classes(
    labels: pd.Series[str],
    names: tuple[str, ...],
    title: str,
    places: Places,
    colours: tuple[int, ...],
    marks: Floats | None = None,
) -> ClassMap:
    shape = len(places[0]), len(places[1])
    codes = np.array([names.index(label) if label else np.nan for label in labels], dtype=float).reshape(shape)
    rows, columns = (tuple(map(str, indices)) for indices in places)
    written = np.full(shape, np.nan) if marks is None else marks.reshape(shape)
    texts = tuple(tuple("" if np.isnan(mark) else _offset(mark) for mark in row) for row in written)
    return ClassMap(codes, title, rows, columns, "layer", "head", names=names, colours=colours, marks=texts)


def _offset(value: float) -> str:
    return f"{value:+.0f}".replace("-", "\N{MINUS SIGN}") if value else "0"


def _score(values: Floats, name: str, places: Places, unit: str) -> Heatmap:
    title, colours, low, high = PANELS[name]
    return _heat(values, title.format(unit=unit), colours, places, low, high, diverging=low == -1.0)


def _heat(
    values: Floats,
    title: str,
    unit: str,
    places: Places,
    low: float | None,
    high: float | None,
    diverging: bool = False,
) -> Heatmap:
    rows, columns = (tuple(map(str, indices)) for indices in places)
    return Heatmap(values, title, rows, columns, "layer", "head", unit, low, high, diverging)
