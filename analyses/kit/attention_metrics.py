"""What is measured of an attention matrix: a value for each query row, whose mean is the head's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .analysis import refuse_unknown_metric
from .maths import entropy, keys_to_reach, mean_distance, normalised_rows
from .units import Units

Floats = NDArray[np.float64]
Special = Literal["keep", "drop", "renormalise"]


@dataclass(frozen=True)
class View:
    """Attention as measured: all of it, and the part that `--special` keeps, with what rows and columns stand for."""

    whole: Floats  # (layer, head, kept query, key)
    kept: Floats  # (layer, head, kept query, kept key); a row is NaN where renormalising had nothing left
    units: Units
    positions: NDArray[np.int64]  # the kept units' places in the text
    entropy_keys: int  # ln of this bounds an entropy

    @cached_property
    def entropy(self) -> Floats:
        """Entropy of every kept row, which three metrics read."""
        return entropy(self.kept)


def view(attention: Floats, units: Units, special: Special) -> View:
    """Attention (layer, head, query, key) between `units`, special tokens kept, dropped or dropped and renormalised."""
    whole = normalised_rows(units.pool(attention))
    if special == "keep":
        return View(whole, whole, units, np.arange(len(units)), len(units))
    at = np.flatnonzero(~units.special)
    kept = whole[..., at[:, None], at[None, :]]
    if special == "drop":
        return View(whole[..., at, :], kept, units, at, len(units))
    nothing_left = kept.sum(axis=-1, keepdims=True) == 0
    kept = np.where(nothing_left, np.nan, normalised_rows(kept))
    return View(whole[..., at, :], kept, units, at, len(at))


def _entropy_share(seen: View) -> Floats:
    keys = seen.entropy_keys
    return seen.entropy / np.log(keys) if keys > 1 else np.full(seen.kept.shape[:-1], np.nan)


def _cls_entropy(seen: View) -> Floats:
    return seen.entropy[..., seen.units.cls[seen.positions]]


def _offset(offset: int) -> Callable[[View], Floats]:
    def mass(seen: View) -> Floats:
        at = seen.positions
        rows, keys = np.nonzero(at[None, :] - at[:, None] == offset)
        values = np.zeros(seen.kept.shape[:-1])
        values[..., rows] = seen.kept[..., rows, keys]
        return values

    return mass


def _mass(kind: Callable[[Units], NDArray[np.bool_]]) -> Callable[[View], Floats]:
    return lambda seen: seen.whole @ kind(seen.units).astype(float)


def _other(units: Units) -> NDArray[np.bool_]:
    return ~(units.cls | units.sep | units.punctuation)


def _crossing(source: int) -> Callable[[View], Floats]:
    def mass(seen: View) -> Floats:
        segment = np.array(seen.units.segment)
        rows = (segment[seen.positions] == source) & ~seen.units.special[seen.positions]
        targets = (segment == 1 - source) & ~seen.units.special
        if not targets.any():
            return np.full((*seen.whole.shape[:2], 0), np.nan)
        return seen.whole[..., rows, :] @ targets.astype(float)

    return mass


def _keys(seen: View) -> Floats:
    return np.full(seen.kept.shape[:-1], float(seen.kept.shape[-1]))


METRICS: Mapping[str, tuple[Callable[[View], Floats], str]] = {
    "n": (_keys, "keys to a row (tokens, or words with --words)"),
    "entropy": (
        lambda seen: entropy(seen.kept),
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
    "mass_cls": (_mass(lambda units: units.cls), "weight on [CLS], 0 to 1; with the next three it sums to 1"),
    "mass_sep": (_mass(lambda units: units.sep), "weight on all [SEP], 0 to 1"),
    "mass_punctuation": (_mass(lambda units: units.punctuation), "weight on Unicode category P, 0 to 1"),
    "mass_other": (_mass(_other), "weight on all other keys, 0 to 1"),
    "mass_a_to_b": (_crossing(0), "weight of the first text's rows on the second text, 0 to 1; empty without a pair"),
    "mass_b_to_a": (_crossing(1), "weight of the second text's rows on the first text, 0 to 1; empty without a pair"),
    "k90": (
        lambda seen: keys_to_reach(seen.kept),
        "least number of keys that hold 0.9, 1 to keys; rows that keep less are left out",
    ),
}
"""Every metric: a value for each query row (layer, head, query), whose mean is the head's, and what it is."""


def chosen_metrics(names: str) -> tuple[str, ...]:
    """The metrics in a comma-separated list. Raises SettingsError for an unknown one, with the reason for the mean."""
    if names == "all":
        return tuple(METRICS)
    chosen = tuple(dict.fromkeys(("n", *(name.strip().replace("-", "_") for name in names.split(",")))))
    for name in chosen:
        refuse_unknown_metric(name, METRICS)
    return chosen
