"""Which tokens of a text a masked-LM model is to predict, and what it reads in their place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from .record import TokenizedText

Corruption = Literal["80-10-10", "mask"]
MASKED, SWAPPED, KEPT = "mask", "random", "kept"
"""What may become of a chosen token."""


@dataclass(frozen=True)
class Probe:
    """A text as the model reads it, and the positions to predict. `inputs` says what stands at each of them.

    `text` is the text itself, `read` what goes to the model.
    """

    text: TokenizedText
    read: TokenizedText
    positions: tuple[int, ...]
    inputs: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.read)


@dataclass(frozen=True)
class Masking:
    """The [MASK] id, and the ids that may stand in for a token at random: all but special ones."""

    mask: int
    substitutes: Sequence[int] = ()
    share: float = 0.15
    seed: int = 0
    corruption: Corruption = "80-10-10"

    def each(self, text: TokenizedText) -> list[Probe]:
        """Every token masked one at a time, a copy of the text each: what a pseudo-likelihood asks."""
        return [self._probe(text, {position: self.mask}, (MASKED,)) for position in predictable(text)]

    def given(self, text: TokenizedText) -> list[Probe]:
        """The [MASK]s that stand in the text."""
        there = tuple(position for position, token in enumerate(text.ids) if token == self.mask)
        return [Probe(text, text, there, (MASKED,) * len(there))] if there else []

    def none(self, text: TokenizedText) -> list[Probe]:
        """Every token, with itself to be seen."""
        there = predictable(text)
        return [Probe(text, text, there, (KEPT,) * len(there))] if there else []

    def random(self, text: TokenizedText) -> list[Probe]:
        """A share of the tokens, drawn by hash of seed and text: of the order and number of other texts it is free.

        As in BERT (Devlin et al. 2019) at least one, and of those drawn 80 % become [MASK], 10 % a random token, and
        10 % stay, each by its own draw.
        """
        there, draw = predictable(text), _generator(self.seed, text)
        count = max(1, round(self.share * len(there)))
        chosen = sorted(draw.permutation(there)[:count].tolist())
        fates = [MASKED if self.corruption == "mask" else _fate(value) for value in draw.random(len(chosen))]
        substitutes = draw.integers(len(self.substitutes) or 1, size=len(chosen)).tolist()
        ids = {
            position: self.mask if fate == MASKED else self.substitutes[substitute]
            for position, fate, substitute in zip(chosen, fates, substitutes, strict=True)
            if fate != KEPT
        }
        return [replace(self._probe(text, ids, tuple(fates)), positions=tuple(chosen))] if chosen else []

    def _probe(self, text: TokenizedText, ids: Mapping[int, int], inputs: tuple[str, ...]) -> Probe:
        read = tuple(ids.get(position, token) for position, token in enumerate(text.ids))
        return Probe(text, replace(text, ids=read), tuple(ids), inputs)


WAYS: Mapping[str, Callable[[Masking, TokenizedText], list[Probe]]] = {
    "each": Masking.each,
    "given": Masking.given,
    "random": Masking.random,
    "none": Masking.none,
}


def predictable(text: TokenizedText) -> tuple[int, ...]:
    """The positions of all tokens that are not special: those are never predicted."""
    return tuple(position for position, special in enumerate(text.special) if not special)


def _fate(value: float) -> str:
    return MASKED if value < 0.8 else SWAPPED if value < 0.9 else KEPT


def _generator(seed: int, text: TokenizedText) -> np.random.Generator:
    told = f"{seed}\0{text.text}\0{text.pair}\0{text.part}".encode("utf-8", "surrogatepass")
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(told, digest_size=16).digest(), "big"))
