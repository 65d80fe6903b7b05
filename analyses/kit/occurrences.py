"""The occurrences of a word in texts: where they are, and the vectors of at most so many of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .maths import is_punctuation
from .record import TokenizedText
from .vector_sample import hashed

Floats = NDArray[np.float64]
Normalise = Callable[[str], str]
Part = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Word:
    """A word as the tokenizer cuts it up: one part, or several for what it takes to be several words (don't)."""

    parts: tuple[str, ...]
    normalise: Normalise

    @classmethod
    def of(cls, text: TokenizedText, normalise: Normalise) -> Word:
        """The whole of a text as a word. Raises ValueError for one without anything to find."""
        parts = tuple(name for name, _ in parts_of(text, normalise))
        if not parts:
            raise ValueError(f"{text.text!r} holds no word")
        return cls(parts, normalise)

    def places(self, text: TokenizedText) -> list[tuple[int, ...]]:
        """The tokens of every occurrence, in the order of the text; all pieces of a word belong to it."""
        found, count = parts_of(text, self.normalise), len(self.parts)
        names, tokens = [name for name, _ in found], [own for _, own in found]
        starts = [at for at in range(len(found)) if tuple(names[at : at + count]) == self.parts]
        return [tuple(token for own in tokens[at : at + count] for token in own) for at in starts]


def parts_of(text: TokenizedText, normalise: Normalise) -> list[Part]:
    """The words of a text without special tokens, each with its tokens; a token that is punctuation stands alone.

    Some tokenizers (sentencepiece) take a full stop to be part of the word before it. Words are named as the
    tokenizer reads them: `normalise` makes them lower case where it does.
    """
    groups: list[tuple[tuple[Any, ...], list[int]]] = []
    for token in range(len(text)):
        if text.special[token] or not normalise(text.labels[token]):
            continue
        mark = token if is_punctuation(normalise(text.labels[token])) else None
        key = (text.segment[token], text.word[token], mark)
        if not groups or groups[-1][0] != key or text.word[token] is None:
            groups.append((key, []))
        groups[-1][1].append(token)
    return [(normalise(_label(text, tokens)), tuple(tokens)) for _, tokens in groups]


def _label(text: TokenizedText, tokens: Sequence[int]) -> str:
    first, last = text.start[tokens[0]], text.end[tokens[-1]]
    source = (text.pair or "") if text.segment[tokens[0]] else text.text
    return source[first:last]


@dataclass(frozen=True)
class Occurrence:
    """One occurrence of the word, with what was measured of it.

    `vectors` (depth, width) are means over its tokens; `norms` and `shares` (layer, token) are what every token of
    the text adds to its attention output, `bias_shares` (layer) what b_O does.
    """

    text: TokenizedText
    tokens: tuple[int, ...]
    sense: str
    vectors: Floats
    norms: Floats
    shares: Floats
    bias_shares: Floats

    @property
    def place(self) -> tuple[int, int, int]:
        """Line, part and first token."""
        return self.text.line, self.text.part, self.tokens[0]


@dataclass
class Occurrences:
    """At most `most` occurrences, those with the smallest hash(seed, text, place): the same under any order of texts.

    `seen` counts all of them, `texts` the texts that hold one, `read` all texts.
    """

    most: int
    seed: int
    seen: int = 0
    texts: int = 0
    read: int = 0
    items: list[Occurrence] = field(default_factory=list)

    def add(self, found: Sequence[Occurrence]) -> None:
        """Offer the occurrences of one text."""
        self.seen += len(found)
        self.texts += bool(found)
        self.items += found
        if len(self.items) >= 2 * self.most + 64:
            self.items = self._smallest()

    def kept(self) -> list[Occurrence]:
        """Those that stay, in the order of the texts."""
        return sorted(self._smallest(), key=lambda item: item.place)

    def _smallest(self) -> list[Occurrence]:
        return sorted(self.items, key=self._rank)[: self.most]

    def _rank(self, item: Occurrence) -> tuple[int, tuple[int, int, int]]:
        key = f"{item.text.text}\0{item.text.pair or ''}\0{item.tokens[0]}"
        return hashed(key, self.seed), item.place
