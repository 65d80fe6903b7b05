"""Texts in another order of words, and how far a model's outputs follow their tokens there."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .analysis import SettingsError
from .maths import lengths, paired_cosines, ratio
from .record import TokenizedText
from .spectra import frobenius_norm
from .units import Units, units_of

Floats = NDArray[np.float64]
LISTED = 40
"""Words that an error names."""
DIFFERENCES: Mapping[str, str] = {
    "largest": "largest |H' - P H| of any entry, 0 or more",
    "largest_relative": "largest / largest |H| of any entry",
    "distance": "|H' - P H| / |H| (Frobenius norms), 0 or more",
    "cosine": "mean over tokens of the cosine of a token's vector with its own in the text as given, -1 to 1",
    "cosine_least": "the smallest of these cosines",
}
"""How far vectors H' (token, width) of the reordered text are from those H of the given one, reordered alike (P H)."""


def swapped(text: TokenizedText, words: str) -> tuple[int, ...]:
    """The order of tokens with two words exchanged, `words` being such as `dog,man`: the first occurrence of each.

    Place i holds the token that was at place order[i]; all pieces of a word move. Case and punctuation at the ends do
    not count. Raises SettingsError for a word that the text lacks, and for two that are the same tokens.
    """
    units = units_of(text, words=True)
    parts = [part.strip() for part in words.split(",")]
    if len(parts) != 2 or not all(parts):
        raise SettingsError(f"--swap {words!r} is not two words", "Write them such as --swap dog,man.")
    first, second = (_place(units, part) for part in parts)
    places = list(range(len(units)))
    places[first], places[second] = second, first
    order = token_order(units.of_token, places)
    if same_text(text, order):
        raise SettingsError(f"--swap {words} exchanges equal words, which changes nothing", _words(units))
    return order


def shuffled(text: TokenizedText, seed: int) -> tuple[int, ...]:
    """The order of tokens with words shuffled (PCG64 of the seed): special tokens stay, each text of a pair for itself.

    Place i holds the token that was at place order[i]. Words are what the tokenizer takes for one, marks among them;
    all pieces of a word move. Orders that leave every place with an equal token are drawn again. Raises SettingsError
    for a text without two different words.
    """
    units = units_of(text, words=True)
    movable = [np.flatnonzero(~units.special & (np.array(units.segment) == part)) for part in (0, 1)]
    pieces = [tuple(text.ids[at] for at, unit in enumerate(units.of_token) if unit == own) for own in range(len(units))]
    if all(len({pieces[unit] for unit in own}) < 2 for own in movable):
        raise SettingsError("the text has no two different words, so no other order", "Give a longer text.")
    draw = np.random.default_rng(seed)
    while True:
        places = np.arange(len(units))
        for own in movable:
            places[own] = draw.permutation(own)
        order = token_order(units.of_token, places.tolist())
        if not same_text(text, order):
            return order


def token_order(of_token: Sequence[int], units: Sequence[int]) -> tuple[int, ...]:
    """The order of tokens that follows from an order of their units.

    >>> token_order([0, 1, 1, 2], [2, 1, 0])
    (3, 1, 2, 0)
    """
    return tuple(token for unit in units for token, own in enumerate(of_token) if own == unit)


def same_text(text: TokenizedText, order: Sequence[int]) -> bool:
    """Whether the model could not tell the reordered text from the given one."""
    return all((text.ids[at], text.segment[at]) == (text.ids[new], text.segment[new]) for new, at in enumerate(order))


def reordered(text: TokenizedText, order: Sequence[int]) -> TokenizedText:
    """The same tokens in another order, each with all that is said of it; its segment moves with it."""
    moved: dict[str, Any] = {
        field.name: tuple(values[at] for at in order)
        for field in fields(text)
        if isinstance(values := getattr(text, field.name), tuple) and field.name != "sep"
    }
    place = {at: new for new, at in enumerate(order)}
    cls = None if text.cls is None else place[text.cls]
    return replace(text, **moved, cls=cls, sep=tuple(sorted(place[at] for at in text.sep)))


def differences(given: Floats, other: Floats, order: Sequence[int]) -> Floats:
    """The values of DIFFERENCES at every depth. Shapes (depth, token, width) twice to (depth, 5).

    >>> differences(np.array([[[1.0], [2.0]]]), np.array([[[2.0], [1.0]]]), [1, 0]).tolist()
    [[0.0, 0.0, 0.0, 1.0, 1.0]]
    """
    expected = given[:, list(order)]
    apart, largest = np.abs(other - expected).max(axis=(1, 2)), np.abs(given).max(axis=(1, 2))
    cosine = paired_cosines(other, expected)
    distance = ratio(frobenius_norm(other - expected), frobenius_norm(expected))
    return np.stack([apart, ratio(apart, largest), distance, cosine.mean(axis=1), cosine.min(axis=1)], axis=-1)


def token_differences(given: Floats, other: Floats, order: Sequence[int]) -> tuple[Floats, Floats]:
    """Cosine with the token's vector in the given text, and |h' - h| / |h|: (depth, token) each, in the new order."""
    expected = given[:, list(order)]
    return paired_cosines(other, expected), ratio(lengths(other - expected), lengths(expected))


def _place(units: Units, word: str) -> int:
    found = [at for at, label in enumerate(units.labels) if not units.special[at] and _plain(label) == _plain(word)]
    if not found:
        raise SettingsError(f"--swap: the text has no word {word!r}", _words(units))
    return found[0]


def _plain(word: str) -> str:
    return word.casefold().strip(string.punctuation) or word


def _words(units: Units) -> str:
    words = list(
        dict.fromkeys(label for label, special in zip(units.labels, units.special, strict=True) if not special)
    )
    return f"Its words: {' '.join(words[:LISTED])}{' ...' if len(words) > LISTED else ''}"
