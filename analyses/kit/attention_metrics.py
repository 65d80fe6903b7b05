"""What is measured of an attention matrix: a value for each query row, whose mean is the head's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .analysis import refuse_unknown_metric
from .maths import entropy, entropy_of_shares, keys_to_reach, mean_distance, normalised_rows
from .units import Flags, Kinds

Floats = NDArray[np.float64]
Special = Literal["keep", "drop", "renormalise"]


@dataclass(frozen=True)
class View:
    """Attention as measured, and what its rows and columns stand for; each part is made when it is asked for.

    `attention` is (first, head, query, key), its rows sum to 1 but for rounding; the first axis runs over layers of
    one text, or over texts of one layer whose tokens fall into units alike.
    """

    attention: Floats
    kinds: Kinds
    special: Special

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """The kept units' places in the text."""
        units = np.arange(self.attention.shape[-1])
        return units if self.special == "keep" else np.flatnonzero(~self.kinds.special[0])

    @property
    def entropy_keys(self) -> int:
        """Keys whose logarithm bounds an entropy."""
        return len(self.positions) if self.special == "renormalise" else self.attention.shape[-1]

    @cached_property
    def whole(self) -> Floats:
        """The kept rows over all keys: (first, head, kept query, key)."""
        whole = normalised_rows(self.attention)
        # Not by indexing, which may leave an array whose order in memory, and so its sums, depends on the number of
        # texts.
        return whole if self.special == "keep" else whole.take(self.positions, axis=-2)

    @cached_property
    def kept(self) -> Floats:
        """Their part that `special` keeps (first, head, kept query, kept key); NaN where there is nothing left."""
        if self.special == "keep":
            return self.whole
        kept = self.whole.take(self.positions, axis=-1)
        if self.special == "drop":
            return kept
        nothing_left = kept.sum(axis=-1, keepdims=True) == 0
        return np.where(nothing_left, np.nan, normalised_rows(kept))

    @cached_property
    def entropy(self) -> Floats:
        """Entropy of every kept row, which three metrics read."""
        return entropy_of_shares(self.attention) if self.special == "keep" else entropy(self.kept)


def _entropy_share(seen: View) -> Floats:
    keys = seen.entropy_keys
    return seen.entropy / np.log(keys) if keys > 1 else np.full_like(seen.entropy, np.nan)


def _cls_entropy(seen: View) -> Floats:
    return np.where(seen.kinds.cls[:, None, seen.positions], seen.entropy, np.nan)


def _offset(offset: int) -> Callable[[View], Floats]:
    def mass(seen: View) -> Floats:
        at = seen.positions
        rows, keys = np.nonzero(at[None, :] - at[:, None] == offset)
        values = np.zeros(seen.kept.shape[:-1])
        values[..., rows] = seen.kept[..., rows, keys]
        return values

    return mass


def _mass(kind: Callable[[Kinds], Flags]) -> Callable[[View], Floats]:
    return lambda seen: _weight_on(seen.whole, kind(seen.kinds))


def _weight_on(weights: Floats, keys: Flags) -> Floats:
    """Weight of every row on some keys: (first, head, query, key) and (1 or text, key) to (first, head, query)."""
    return (weights @ keys[:, None, :, None].astype(float))[..., 0]


def _crossing(source: int) -> Callable[[View], Floats]:
    def mass(seen: View) -> Floats:
        own, other = ((seen.kinds.segment == segment) & ~seen.kinds.special for segment in (source, 1 - source))
        if not other.any():
            return np.full((*seen.whole.shape[:2], 0), np.nan)
        rows = own[:, seen.positions] & other.any(axis=-1, keepdims=True)
        return np.where(rows[:, None], _weight_on(seen.whole, other), np.nan)

    return mass


def _keys(seen: View) -> Floats:
    keys = len(seen.positions)
    return np.full((*seen.attention.shape[:2], min(keys, 1)), float(keys))  # every row has as many: one stands for all


METRICS: Mapping[str, tuple[Callable[[View], Floats], str]] = {
    "n": (_keys, "keys to a row (tokens, or words with --words)"),
    "entropy": (
        lambda seen: seen.entropy,
        "row entropy, nats, 0 to ln(keys); with drop, the kept keys' part of it",
    ),
    "entropy_share": (
        _entropy_share,
        "entropy / ln(keys), 0 to 1; with drop, all keys count; empty below two",
    ),
    "cls_entropy": (_cls_entropy, "entropy of the [CLS] row, nats; empty when [CLS] is dropped"),
    "confidence": (lambda seen: seen.kept.max(axis=-1, initial=0.0), "row maximum, 0 to 1"),
    "distance": (
        lambda seen: mean_distance(seen.kept, list(seen.positions)),
        "sum_j A_ij |i - j|, tokens (or words); special tokens have places too",
    ),
    "mass_self": (_offset(0), "weight on the query itself, 0 to 1"),
    "mass_previous": (_offset(-1), "weight on the position before, 0 to 1; the first row counts as 0"),
    "mass_next": (_offset(1), "weight on the position after, 0 to 1; the last row counts as 0"),
    "mass_cls": (_mass(lambda kinds: kinds.cls), "weight on [CLS], 0 to 1; with the next three it sums to 1"),
    "mass_sep": (_mass(lambda kinds: kinds.sep), "weight on all [SEP], 0 to 1"),
    "mass_punctuation": (_mass(lambda kinds: kinds.punctuation), "weight on Unicode category P, 0 to 1"),
    "mass_other": (_mass(lambda kinds: kinds.other), "weight on all other keys, 0 to 1"),
    "mass_a_to_b": (_crossing(0), "weight of the first text's rows on the second text, 0 to 1; empty without a pair"),
    "mass_b_to_a": (_crossing(1), "weight of the second text's rows on the first text, 0 to 1; empty without a pair"),
    "k90": (
        lambda seen: keys_to_reach(seen.kept),
        "least number of keys that hold 0.9, 1 to keys; rows that keep less are left out",
    ),
}
"""Every metric: a value for each query row (first, head, query), whose mean is the head's, and what it is."""


def chosen_metrics(names: str) -> tuple[str, ...]:
    """The metrics in a comma-separated list. Raises SettingsError for an unknown one, with the reason for the mean."""
    if names.strip() == "all":
        return tuple(METRICS)
    chosen = tuple(dict.fromkeys(("n", *(name.strip().replace("-", "_") for name in names.split(",")))))
    for name in chosen:
        refuse_unknown_metric(name, METRICS)
    return chosen
