"""The metrics of head against head: what each is, what it reads, and of which kinds of pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .analysis import SettingsError, refuse_unknown_metric
from .comparison import Words
from .divergence import jensen_shannon, row_correlation
from .result import Table
from .subspaces import LETTERS

Floats = NDArray[np.float64]
SUBSPACES = tuple(one + other for one in LETTERS for other in LETTERS)
COMPOSITIONS = ("Q", "K", "V")
OF_TEXT: Mapping[str, Callable[[Floats], Floats]] = {
    "jensen-shannon": jensen_shannon,
    "correlation": row_correlation,
}
"""The metrics of attention: (head, query, key) of one text to (head, other head)."""


@dataclass(frozen=True)
class Kinds:
    """The kinds of pairs that a metric compares: the setting that chooses them, all there are, and what one is."""

    setting: str
    known: Sequence[str]
    what: str


OF_SUBSPACES = Kinds("subspaces", SUBSPACES, "pair of subspaces")
OF_COMPOSITION = Kinds("composition", COMPOSITIONS, "composition")


@dataclass(frozen=True)
class Metric:
    """What a metric reads, what it is, and how its matrices are drawn."""

    reads: str
    about: str
    words: Words
    kinds: Kinds | None = None


def _cosine(title: str, unit: str, own: bool = False) -> Words:
    """Words for what runs from -1 to 1; the distance is half that of two unit vectors."""
    return Words(title, unit, f"root of (1 - {unit}) / 2", -1.0, 1.0, diverging=True, own=own)


METRICS: Mapping[str, Metric] = {
    "projection-kernel": Metric(
        "weights",
        "overlap of the subspaces that two heads read or write: sum of cos^2 of principal angles, 0 to head width",
        Words(
            "projection kernel",
            "projection kernel",
            "chordal distance, the root of head width minus the projection kernel",
            low=0.0,
        ),
        OF_SUBSPACES,
    ),
    "principal-angles": Metric(
        "weights",
        "mean principal angle of two heads' subspaces, 0 to 90 degrees, and the smallest (heads^2 eigenvalue problems)",
        Words("principal angles", "mean principal angle, degrees", "mean principal angle, degrees", None, falling=True),
        OF_SUBSPACES,
    ),
    "bilinear-cosine": Metric(
        "weights",
        "cosine of the bilinear forms M = W_Q^T W_K of two heads as matrices, <M, M'> / (|M| |M'|), Frobenius, -1 to 1",
        _cosine("cosine of bilinear forms", "cosine"),
    ),
    "content-bias-cosine": Metric(
        "weights",
        "cosine of the content biases b_Q^T W_K of two heads, what scores add whatever the query, -1 to 1",
        _cosine("cosine of content biases", "cosine"),
    ),
    "composition": Metric(
        "weights",
        "how much of what an earlier head writes a later head reads: |P M| / (|P| |M|), Frobenius, 0 to 1",
        Words("composition score", "composition score", "1 minus the composition score, 1 within a layer", low=0.0),
        OF_COMPOSITION,
    ),
    "jensen-shannon": Metric(
        "text",
        "Jensen-Shannon divergence of two heads' attention rows, 0 to ln 2 nats (heads^2 x tokens^2 / 2 logarithms)",
        Words(
            "Jensen-Shannon divergence",
            "Jensen-Shannon divergence, nats",
            "root of the Jensen-Shannon divergence",
            low=0.0,
            own=True,
            falling=True,
        ),
    ),
    "correlation": Metric(
        "text",
        "Pearson correlation of two heads' attention rows, -1 to 1",
        _cosine("correlation of attention", "correlation", own=True),
    ),
}


def canonical(metric: str) -> str:
    """A metric's name as METRICS writes it."""
    return metric.strip().lower().replace("_", "-")


def known_metric(metric: str) -> str:
    """The metric's name. Raises SettingsError for an unknown one, with the reason for the mean."""
    name = canonical(metric)
    refuse_unknown_metric(name, METRICS)
    return name


def chosen_kinds(kinds: Kinds, text: str) -> tuple[str, ...]:
    """The kinds in a comma-separated list, or all. Raises SettingsError for an unknown one."""
    if text.strip().lower() == "all":
        return tuple(kinds.known)
    chosen = tuple(dict.fromkeys(part.strip().upper() for part in text.split(",")))
    for kind in chosen:
        if kind not in kinds.known:
            raise SettingsError(f"{kind!r} is no {kinds.what}", f"Choose from {', '.join(kinds.known)}, or all.")
    return chosen


def metrics_table() -> Table:
    """Every metric, and whether it reads weights or text."""
    rows = [(name, metric.reads, metric.about) for name, metric in METRICS.items()]
    columns = {"metric": "value of --metric", "reads": "weights or text", "what": "what it is, and its range"}
    title = "Metrics of bertgeo heads (projection-kernel without --metric)"
    return Table("heads-metrics", title, pd.DataFrame(rows, columns=list(columns)), columns)
