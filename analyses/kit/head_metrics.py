"""The metrics of head against head: what each reads, and the comparisons that it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .accumulators import Moments
from .analysis import SettingsError, refuse_unknown_metric
from .comparison import Comparison, Heads, Place, Words, comparison, mutual, runs_before
from .divergence import jensen_shannon, row_correlation
from .record import HeadWeights
from .result import Table
from .subspaces import (
    LETTERS,
    composition_scores,
    folded,
    kernels_by_kind,
    orthonormal_bases,
    random_projection_kernel,
    thin_factors,
)

Floats = NDArray[np.float64]
SUBSPACES = tuple(one + other for one in LETTERS for other in LETTERS)
COMPOSITIONS = ("Q", "K", "V")
OF_TEXT: Mapping[str, Callable[[Floats], Floats]] = {
    "jensen-shannon": jensen_shannon,
    "correlation": row_correlation,
}
"""The metrics of attention: (head, query, key) of one text to (head, other head)."""


@dataclass(frozen=True)
class Metric:
    """What a metric reads, what it is, and how its matrices are drawn."""

    reads: str
    about: str
    words: Words


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
    ),
    "composition": Metric(
        "weights",
        "how much of what an earlier head writes a later head reads: |P M| / (|P| |M|), Frobenius, 0 to 1",
        Words("composition score", "composition score", "1 minus the composition score, 1 within a layer", low=0.0),
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
        ),
    ),
    "correlation": Metric(
        "text",
        "Pearson correlation of two heads' attention rows, -1 to 1",
        Words(
            "correlation of attention",
            "correlation",
            "root of (1 - correlation) / 2",
            low=-1.0,
            high=1.0,
            diverging=True,
            own=True,
        ),
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


def kinds_of(text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """The kinds in a comma-separated list, or all. Raises SettingsError for an unknown one."""
    if text.strip().lower() == "all":
        return tuple(known)
    chosen = tuple(dict.fromkeys(part.strip().upper() for part in text.split(",")))
    for kind in chosen:
        if kind not in known:
            raise SettingsError(f"{kind!r} is no {what}", f"Choose from {', '.join(known)}, or all.")
    return chosen


def metrics_table() -> Table:
    """Every metric, and whether it reads weights or text."""
    rows = [(name, metric.reads, metric.about) for name, metric in METRICS.items()]
    columns = {"metric": "value of --metric", "reads": "weights or text", "what": "what it is, and its range"}
    title = "Metrics of bertgeo heads (projection-kernel without --metric)"
    return Table("heads-metrics", title, pd.DataFrame(rows, columns=list(columns)), columns)


@dataclass(frozen=True)
class Answer:
    """The comparisons of a metric, what the further columns of its table of pairs are, and notes."""

    heads: Heads
    others: Mapping[str, str]
    notes: tuple[str, ...] = ()


def by_projection_kernel(places: tuple[Place, ...], weights: HeadWeights, kinds: Sequence[str]) -> Answer:
    """Overlap of subspaces, and what independent uniform subspaces of the same dimensions would give.

    The distance is that of the projections on two subspaces, |P - P'|_F / sqrt(2): the chordal distance where both
    have one dimension.
    """
    factors, before = _factors(places, weights), runs_before(places)
    bases = {letter: orthonormal_bases(factors[letter]) for letter in LETTERS if letter in "".join(kinds)}
    kernels = kernels_by_kind({letter: vectors for letter, (vectors, _) in bases.items()}, kinds)
    comparisons = []
    for kind, values in kernels.items():
        p, q = (bases[letter][1].astype(np.float64) for letter in kind)
        mean, std = random_projection_kernel(p[:, None], q[None, :], factors[kind[0]].shape[1])
        z = np.where(std > 0, (values - mean) / np.where(std > 0, std, 1.0), np.nan)
        columns = {"earlier": before, "random_mean": mean, "random_std": std, "z": z}
        distances = np.sqrt(np.maximum(np.add.outer(p, q) / 2 - values, 0.0))
        comparisons.append(comparison(kind, values, before, distances, columns))
    words = METRICS["projection-kernel"].words
    heads = Heads("projection-kernel", "subspaces", words, places, tuple(comparisons), np.ones_like(before))
    return Answer(heads, RANDOM_SUBSPACES, (_random_note(comparisons), *_shared_note(places)))


RANDOM_SUBSPACES = {
    "earlier": "whether the head runs in a layer strictly before the other: what it writes can be read",
    "random_mean": "mean for independent random subspaces, p q / d for dimensions p and q in d",
    "random_std": "their standard deviation",
    "z": "(value - random_mean) / random_std; empty where nothing can vary",
}


def _random_note(comparisons: Sequence[Comparison]) -> str:
    mean, std = (max(float(one.columns[name].max()) for one in comparisons) for name in ("random_mean", "random_std"))
    return f"Independent random subspaces would give {mean:.3f}, standard deviation {std:.3f}."


def by_composition(places: tuple[Place, ...], weights: HeadWeights, kinds: Sequence[str]) -> Answer:
    """|P M| / (|P| |M|) of earlier with later heads, P = W_V^T W_O^T of the earlier (on row vectors).

    Q composition: M = W_Q^T W_K of the later; K: its transpose; V: the later's own P (Elhage et al. 2021). No biases.
    """
    factors, before = _factors(places, weights), runs_before(places)
    writes = folded(factors["O"], factors["V"])
    about = 1 / np.sqrt(writes.shape[1])
    comparisons = []
    for kind in kinds:
        scores = composition_scores(writes, folded(factors[kind], factors[PARTNER[kind]]))
        values = np.where(before, scores, np.nan)
        distances = 1.0 - np.nan_to_num(mutual(values, before))
        comparisons.append(comparison(kind, values, before, distances, {"random_about": np.full(before.shape, about)}))
    heads = Heads("composition", "composition", METRICS["composition"].words, places, tuple(comparisons), before)
    others = {"random_about": "about what random Gaussian weights would give: 1 / sqrt(width), an approximation"}
    return Answer(heads, others, (f"Random weights would give about {about:.3f}.", *_shared_note(places)))


PARTNER = {"Q": "K", "K": "Q", "V": "O"}
"""M = Q K^T, K Q^T or V O^T in the thin factors: the letter that reads, and the other."""


def _factors(places: Sequence[Place], weights: HeadWeights) -> dict[str, Floats]:
    return thin_factors(weights, [place.weight_layer for place in places], [place.head for place in places])


def _shared_note(places: Sequence[Place]) -> tuple[str, ...]:
    shared = any(place.last > place.layer for place in places)
    return ("Layers that share weights count once, as the first of them.",) if shared else ()


def by_attention(metric: str, places: tuple[Place, ...], moments: Moments) -> Answer:
    """The mean over texts of a metric of attention. A pair without a value lies as far apart as can be."""
    before = runs_before(places)
    distances = np.nan_to_num(DISTANCES[metric](moments.mean), nan=1.0)
    columns = {"texts": moments.count, "value_std": moments.std}
    others = {"texts": "texts in which the pair has a value"}
    if (moments.count > 1).any():
        others["value_std"] = "standard deviation over texts (n - 1)"
    one = comparison("", moments.mean, before, distances, columns)
    return Answer(Heads(metric, None, METRICS[metric].words, places, (one,), np.ones_like(before)), others)


DISTANCES: Mapping[str, Callable[[Floats], Floats]] = {
    "jensen-shannon": np.sqrt,
    "correlation": lambda values: np.sqrt((1.0 - values) / 2),
}
"""Metrics between rows; a root of a mean of squares over rows stays one."""
