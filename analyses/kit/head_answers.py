"""The comparisons that each metric of head against head makes, from weights or from means over texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .accumulators import Moments
from .comparison import Comparison, Heads, Pairing, Place, comparison
from .head_metrics import METRICS
from .informativeness import informativeness_figures, informativeness_tables
from .maths import cosines, ratio
from .record import HeadWeights
from .result import Figure, Table
from .subspaces import (
    composition_scores,
    content_biases,
    folded,
    form_products,
    kernels_by_kind,
    orthonormal_bases,
    principal_angles,
    random_projection_kernel,
    thin_factors,
)

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Answer:
    """The comparisons of a metric, what the further columns of its table of pairs are, and what only it has."""

    heads: Heads
    others: Mapping[str, str]
    notes: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()


def by_projection_kernel(
    places: tuple[Place, ...], weights: HeadWeights, kinds: Sequence[str], pairing: Pairing
) -> Answer:
    """Overlap of subspaces, and what independent uniform subspaces of the same dimensions would give.

    The distance is that of the projections on two subspaces, |P - P'|_F / sqrt(2): the chordal distance where both
    have one dimension.
    """
    bases = _bases(places, weights, kinds)
    kernels = kernels_by_kind({letter: vectors for letter, (vectors, _) in bases.items()}, kinds)
    comparisons = []
    for kind, values in kernels.items():
        p, q = (bases[letter][1].astype(np.float64) for letter in kind)
        mean, std = random_projection_kernel(p[:, None], q[None, :], bases[kind[0]][0].shape[1])
        z = ratio(values - mean, std)
        columns = {"earlier": pairing.before, "random_mean": mean, "random_std": std, "z": z}
        half = np.add.outer(p, q) / 2
        distances = np.sqrt(np.maximum(half - values, 0.0))
        comparisons.append(comparison(kind, values, pairing, distances, columns, np.sqrt(half)))
    heads = _heads("projection-kernel", places, comparisons, pairing)
    tables, notes = informativeness_tables(heads), (_random_note(comparisons), *_shared_note(places))
    return Answer(heads, RANDOM_SUBSPACES, notes, tables, informativeness_figures(tables))


EARLIER = {"earlier": "whether the head runs in a layer strictly before the other: what it writes can be read"}
RANDOM_SUBSPACES = EARLIER | {
    "random_mean": "mean for independent random subspaces, p q / d for dimensions p and q in d",
    "random_std": "their standard deviation",
    "z": "(value - random_mean) / random_std; empty where nothing can vary",
}


def _random_note(comparisons: Sequence[Comparison]) -> str:
    mean, std = (max(float(one.columns[name].max()) for one in comparisons) for name in ("random_mean", "random_std"))
    return f"Independent random subspaces would give {mean:.3f}, standard deviation {std:.3f}."


def by_principal_angles(
    places: tuple[Place, ...], weights: HeadWeights, kinds: Sequence[str], pairing: Pairing
) -> Answer:
    """The mean principal angle of two subspaces, beside it the smallest and how many there are."""
    bases = _bases(places, weights, kinds)
    comparisons, found = [], dict[str, Floats]()
    for kind in kinds:
        back = found.get(kind[::-1])
        angles = principal_angles(*(bases[at][0] for at in kind)) if back is None else back.transpose(1, 0, 2)
        found[kind] = angles
        count = (~np.isnan(angles)).sum(axis=2)
        mean = np.where(count > 0, np.nansum(angles, axis=2) / np.maximum(count, 1), np.nan)
        columns = {"earlier": pairing.before, "smallest": angles[:, :, 0], "angles": count}
        comparisons.append(comparison(kind, mean, pairing, mean, columns, 90.0))
    heads = _heads("principal-angles", places, comparisons, pairing)
    return Answer(heads, ANGLES, _shared_note(places))


ANGLES = EARLIER | {
    "smallest": "smallest principal angle in degrees, 0 to 90: 0 where the subspaces share a direction",
    "angles": "how many principal angles there are: the smaller dimension of the two subspaces",
}


def by_bilinear_cosine(
    places: tuple[Place, ...], weights: HeadWeights, kinds: Sequence[str], pairing: Pairing
) -> Answer:
    """Frobenius cosine of M = W_Q^T W_K, without biases, of every two heads."""
    factors = _factors(places, weights)
    values = cosines(form_products(factors["Q"], factors["K"]))
    return _by_cosine("bilinear-cosine", places, values, pairing)


def by_content_bias_cosine(
    places: tuple[Place, ...], weights: HeadWeights, kinds: Sequence[str], pairing: Pairing
) -> Answer:
    """Cosine of c = b_Q^T W_K of every two heads; a head without query bias has none."""
    at = [place.weight_layer for place in places], [place.head for place in places]
    biases = weights.query_bias[at].double().cpu().numpy()
    found = content_biases(_factors(places, weights)["K"], biases)
    return _by_cosine("content-bias-cosine", places, cosines(found @ found.T), pairing)


def _by_cosine(metric: str, places: tuple[Place, ...], values: Floats, pairing: Pairing) -> Answer:
    distances = np.sqrt((1.0 - values) / 2)
    one = comparison("", values, pairing, distances, {"earlier": pairing.before})
    return Answer(_heads(metric, places, (one,), pairing), EARLIER, _shared_note(places))


def by_composition(places: tuple[Place, ...], weights: HeadWeights, kinds: Sequence[str], pairing: Pairing) -> Answer:
    """|P M| / (|P| |M|) of earlier with later heads, P = W_V^T W_O^T of the earlier (on row vectors).

    Q composition: M = W_Q^T W_K of the later; K: its transpose; V: the later's own P (Elhage et al. 2021). No biases.
    """
    factors = _factors(places, weights)
    writes = folded(factors["O"], factors["V"])
    about = 1 / np.sqrt(writes.shape[1])
    comparisons = []
    for kind in kinds:
        scores = composition_scores(writes, folded(factors[kind], factors[PARTNER[kind]]))
        columns = {"random_about": np.full(scores.shape, about)}
        comparisons.append(comparison(kind, scores, pairing, 1.0 - scores, columns))
    heads = _heads("composition", places, comparisons, pairing)
    others = {"random_about": "about what random Gaussian weights would give: 1 / sqrt(width), an approximation"}
    return Answer(heads, others, (f"Random weights would give about {about:.3f}.", *_shared_note(places)))


PARTNER = {"Q": "K", "K": "Q", "V": "O"}
"""M = Q K^T, K Q^T or V O^T in the thin factors: the letter that reads, and the other."""


def _factors(places: Sequence[Place], weights: HeadWeights) -> dict[str, Floats]:
    return thin_factors(weights, [place.weight_layer for place in places], [place.head for place in places])


def _bases(places: Sequence[Place], weights: HeadWeights, kinds: Sequence[str]) -> dict[str, tuple[Floats, Whole]]:
    """Orthonormal bases and dimensions of the subspaces that the kinds speak of, by letter."""
    factors = _factors(places, weights)
    return {letter: orthonormal_bases(factors[letter]) for letter in sorted(set("".join(kinds)))}


def _heads(metric: str, places: tuple[Place, ...], comparisons: Sequence[Comparison], pairing: Pairing) -> Heads:
    kinds = METRICS[metric].kinds
    return Heads(metric, kinds.setting if kinds else None, METRICS[metric].words, places, tuple(comparisons), pairing)


def _shared_note(places: Sequence[Place]) -> tuple[str, ...]:
    shared = any(place.last > place.layer for place in places)
    return ("Layers that share weights count once, as the first of them.",) if shared else ()


def by_attention(metric: str, places: tuple[Place, ...], moments: Moments, pairing: Pairing) -> Answer:
    """The mean over texts of a metric of attention. A pair without a value lies as far apart as can be."""
    columns = {"texts": moments.count, "value_std": moments.std}
    others = {"texts": "texts in which the pair has a value"}
    if (moments.count > 1).any():
        others["value_std"] = "standard deviation over texts (n - 1)"
    one = comparison("", moments.mean, pairing, DISTANCES[metric](moments.mean), columns)
    return Answer(_heads(metric, places, (one,), pairing), others)


DISTANCES: Mapping[str, Callable[[Floats], Floats]] = {
    "jensen-shannon": np.sqrt,
    "correlation": lambda values: np.sqrt((1.0 - values) / 2),
}
"""Metrics between rows; a root of a mean of squares over rows stays one."""

OfWeights = Callable[[tuple[Place, ...], HeadWeights, Sequence[str], Pairing], Answer]
BY_WEIGHTS: Mapping[str, OfWeights] = {
    "projection-kernel": by_projection_kernel,
    "principal-angles": by_principal_angles,
    "bilinear-cosine": by_bilinear_cosine,
    "content-bias-cosine": by_content_bias_cosine,
    "composition": by_composition,
}
"""The metrics of weights, by name: heads, weights, kinds and pairs to an answer."""
