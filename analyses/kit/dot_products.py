"""How widely q.k spreads, of what its spread is made, and what the softmax makes of it at many temperatures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .accumulators import Counts, Moments, Totals
from .analysis import State
from .distribution import BINS, CentralMoments, bin_counts, central_sums
from .maths import mean_of_rows, ratio
from .pieces import runs
from .record import ForwardRecord
from .temperature import SWEEP, sweep_values

Floats = NDArray[np.float64]

NEEDS = frozenset({"q", "k"})
SPREAD: Mapping[str, str] = {
    "mean": "mean of q.k over all pairs of a query and a key of one text, texts pooled",
    "std": "its standard deviation (n)",
    "skewness": "its skewness; empty for constant values",
    "excess_kurtosis": "its excess kurtosis: 0 for a normal distribution; empty for constant values",
    "scaled_std": "std / sqrt(dk): the standard deviation of the scores that the softmax is given; 1 in theory for "
    "independent entries of variance 1",
    "query_std": "standard deviation (n) of the entries of q: all tokens, all channels",
    "key_std": "the same of k",
    "law": "std / (sqrt(dk) query_std key_std): 1 where q.k spreads as for independent entries of mean 0, whatever "
    "their variance (this project's own); empty where q or k is constant",
    "query_share": "share of q.k's variance that depends on the query alone, 0 to 1: q against the mean key; the "
    "softmax does not see it",
    "key_share": "share that depends on the key alone, 0 to 1: k against the mean query",
    "pair_share": "share of the pair, 0 to 1: q and k each less its mean over the text",
    "text_share": "share of differences between the means of texts, 0 to 1; with the three before it sums to 1",
}
"""Values of a head."""


def variance_parts(products: Floats) -> Floats:
    """Sums of squares of q.k over all pairs of a text by what it depends on: query alone, key alone, the pair.

    Shape (..., query, key) to (..., 3). q_i.k_j = mean + (q_i - q).k + q.(k_j - k) + (q_i - q).(k_j - k) with the mean
    query q and key k: over all pairs these are orthogonal, so the three add up to the sum of squared deviations (the
    two-way analysis of variance without replication).

    >>> variance_parts(np.array([[0.0, 2.0], [4.0, 6.0]])).tolist()
    [16.0, 4.0, 0.0]
    """
    queries, keys = products.shape[-2:]
    of_query = np.einsum("...ij->...i", products) / keys
    of_key = np.einsum("...ij->...j", products) / queries
    mean = np.einsum("...i->...", of_query)[..., None] / queries
    rest = products - of_query[..., :, None] - (of_key - mean)[..., None, :]
    of_query, of_key = of_query - mean, of_key - mean
    query, key = (np.einsum("...i,...i->...", part, part) for part in (of_query, of_key))
    return np.stack([keys * query, queries * key, np.einsum("...ij,...ij->...", rest, rest)], axis=-1)


@dataclass
class DotProducts(State):
    """Of q.k by layer and head: moments, parts of the variance, a sweep over temperatures; of q and k the moments.

    `histograms` count q.k by layer, heads together.
    """

    products: CentralMoments
    queries: CentralMoments
    keys: CentralMoments
    parts: Totals
    sweep: Moments
    histograms: Totals
    counts: Counts
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    temperatures: tuple[float, ...]
    head_width: int

    @classmethod
    def empty(cls, layers: Sequence[int], heads: Sequence[int], temperatures: Sequence[float], head_width: int) -> Self:
        """Nothing seen yet: the identity of merge."""
        cells = len(layers), len(heads)
        return cls(
            products=CentralMoments.empty(*cells),
            queries=CentralMoments.empty(*cells),
            keys=CentralMoments.empty(*cells),
            parts=Totals.empty(*cells, 3),
            sweep=Moments.empty(*cells, len(temperatures), len(SWEEP)),
            histograms=Totals.empty(len(layers), BINS),
            counts=Counts(),
            layers=tuple(layers),
            heads=tuple(heads),
            temperatures=tuple(temperatures),
            head_width=head_width,
        )

    def add(self, record: ForwardRecord) -> None:
        """Add a batch, a few texts and one layer at a time: no more than one layer's q.k is held in float64."""
        tokens = len(record.texts[0])
        for texts in runs(slice(0, len(record.texts)), len(self.heads) * max(tokens**2, tokens * self.head_width)):
            found = [self._layer(record, at, texts) for at in range(len(self.layers))]
            moments, parts, sweep = (np.stack(values, axis=1) for values in zip(*found, strict=True))
            for at, kept in enumerate((self.products, self.queries, self.keys)):
                kept.add(moments[..., at, :])
            for own in parts:
                self.parts.add(own)
            self.sweep.add(sweep)
        self.counts.add([tokens] * len(record.texts))

    def _layer(self, record: ForwardRecord, at: int, texts: slice) -> tuple[Floats, Floats, Floats]:
        """Of one layer: central sums (text, head, 3, 5), parts (text, head, 3), sweep (text, head, tau, value)."""
        q, k = (
            record.of_layer(name, self.layers[at])[texts][:, list(self.heads)].astype(np.float64, order="C")
            for name in ("q", "k")
        )
        products = q @ k.swapaxes(-1, -2)
        self.histograms.values[at] += bin_counts(products[None])[0]
        parts = variance_parts(products)
        sweep = [mean_of_rows(np.moveaxis(sweep_values(products, tau), -1, -2)) for tau in self.temperatures]
        moments = [central_sums(values.reshape(*values.shape[:2], -1)) for values in (products, q, k)]
        return np.stack(moments, axis=2), parts, np.stack(sweep, axis=2)

    @property
    def spread(self) -> Floats:
        """The values of SPREAD on a last axis: (layer, head, value)."""
        products, queries, keys = self.products, self.queries, self.keys
        root = np.sqrt(self.head_width)
        total = products.sums[..., 2]
        shares = ratio(self.parts.values, np.broadcast_to(total[..., None], self.parts.values.shape))
        between = np.clip(1.0 - shares.sum(axis=-1), 0.0, 1.0)
        values = (
            products.mean,
            products.std,
            products.skewness,
            products.excess_kurtosis,
            products.std / root,
            queries.std,
            keys.std,
            ratio(products.std, root * queries.std * keys.std),
            *np.moveaxis(shares, -1, 0),
            between,
        )
        return np.stack(values, axis=-1)
