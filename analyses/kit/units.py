"""What rows and columns of an attention matrix stand for: tokens, or the words they make up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .maths import is_punctuation, pool_units
from .record import TokenizedText

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Units:
    """The tokens or words of a text: a name, a span in the text and a kind each."""

    of_token: tuple[int, ...]
    labels: tuple[str, ...]
    start: tuple[int | None, ...]
    end: tuple[int | None, ...]
    segment: tuple[int, ...]
    special: Flags
    cls: Flags
    sep: Flags

    @cached_property
    def punctuation(self) -> Flags:
        """Units of Unicode category P that are not special."""
        return ~self.special & np.fromiter(map(is_punctuation, self.labels), bool, len(self))

    def __len__(self) -> int:
        return len(self.labels)

    def pool(self, attention: Floats) -> Floats:
        """Attention between these units, from attention between tokens (..., query, key)."""
        return attention if len(self) == len(self.of_token) else pool_units(attention, self.of_token)


@dataclass(frozen=True)
class Kinds:
    """Of which kind each unit is, for texts that have equally many: flags (text, unit), made when they are asked for.

    The texts stand there again and again, `times` over: for as many layers.
    """

    texts: Sequence[Units]
    times: int = 1

    def __getitem__(self, texts: slice) -> Self:
        return replace(self, texts=self.texts[texts])

    def repeated(self, times: int) -> Self:
        """These texts for so many layers."""
        return replace(self, times=times)

    @cached_property
    def cls(self) -> Flags:
        """[CLS]."""
        return self._of("cls")

    @cached_property
    def sep(self) -> Flags:
        """Every [SEP]."""
        return self._of("sep")

    @cached_property
    def punctuation(self) -> Flags:
        """Units of Unicode category P that are not special."""
        return self._of("punctuation")

    @cached_property
    def special(self) -> Flags:
        """All that the tokenizer has added."""
        return self._of("special")

    @cached_property
    def segment(self) -> NDArray[np.int64]:
        """0 for the first text, 1 for the second of a pair."""
        return self._of("segment")

    @property
    def other(self) -> Flags:
        """Neither [CLS] nor [SEP] nor punctuation."""
        return ~(self.cls | self.sep | self.punctuation)

    def _of(self, name: str) -> NDArray[Any]:
        return np.tile(np.array([getattr(text, name) for text in self.texts]), (self.times, 1))


@lru_cache(maxsize=512)  # of a batch: several analyses of one run ask for the same
def units_of(text: TokenizedText, *, words: bool) -> Units:
    """The text's tokens, or its words (runs of tokens of one word; special tokens stand alone)."""
    return _words(text) if words else _tokens(text)


def _tokens(text: TokenizedText) -> Units:
    every, special = range(len(text)), np.array(text.special, dtype=bool)
    cls, sep = np.zeros(len(text), dtype=bool), np.zeros(len(text), dtype=bool)
    cls[[] if text.cls is None else text.cls], sep[list(text.sep)] = True, True
    return Units(tuple(every), text.labels, text.start, text.end, text.segment, special, cls, sep)


def _words(text: TokenizedText) -> Units:
    of_token = _word_numbers(text)
    members: list[list[int]] = [[] for _ in range(max(of_token, default=-1) + 1)]
    for token, unit in enumerate(of_token):
        members[unit].append(token)
    labels = tuple(_label(text, tokens) for tokens in members)
    special = np.array([text.special[tokens[0]] for tokens in members], dtype=bool)
    return Units(
        of_token,
        labels,
        start=tuple(text.start[tokens[0]] for tokens in members),
        end=tuple(text.end[tokens[-1]] for tokens in members),
        segment=tuple(text.segment[tokens[0]] for tokens in members),
        special=special,
        cls=np.array([tokens[0] == text.cls for tokens in members], dtype=bool),
        sep=np.array([tokens[0] in text.sep for tokens in members], dtype=bool),
    )


def _word_numbers(text: TokenizedText) -> tuple[int, ...]:
    numbers: list[int] = []
    for token in range(len(text)):
        same = token > 0 and text.word[token] is not None and _word(text, token) == _word(text, token - 1)
        numbers.append(numbers[-1] + (not same) if numbers else 0)
    return tuple(numbers)


def _word(text: TokenizedText, token: int) -> tuple[int, int | None, bool]:
    return text.segment[token], text.word[token], text.special[token]


def _label(text: TokenizedText, tokens: list[int]) -> str:
    first, last = text.start[tokens[0]], text.end[tokens[-1]]
    if first is None or last is None or len(tokens) == 1:
        return text.labels[tokens[0]]
    source = (text.pair or "") if text.segment[tokens[0]] else text.text
    return source[first:last].strip()
