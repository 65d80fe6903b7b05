"""The kept occurrences of a word, with what is measured of them together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .occurrences import Occurrence, Occurrences
from .senses import (
    Directions,
    can_separate,
    cosine_distance,
    nearest_by_chance,
    nearest_sense,
    pair_cosines,
    permutation_p,
    plane,
    self_similarity,
    silhouettes,
    two_clusters,
)

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Separation:
    """How the occurrences `known` to have a sense fall apart: by depth, `silhouettes` also by occurrence.

    `p_of_best` is that of the best depth, with the choice of the depth paid for.
    """

    known: NDArray[np.intp]
    silhouettes: Floats
    nearest: Floats
    chance: float
    same: Floats
    other: Floats
    p: Floats
    p_of_best: float

    @property
    def silhouette(self) -> Floats:
        """The mean over occurrences, by depth."""
        return self.silhouettes.mean(axis=1)

    @property
    def best(self) -> int:
        """The depth of the largest mean silhouette, of equal ones the first; depth 0 has seen no context."""
        return 1 + int(self.silhouette[1:].argmax())


@dataclass(frozen=True)
class Contexts:
    """What was found of a word; `baseline` holds all ordinary tokens of the texts that have it."""

    word: str
    found: Occurrences
    baseline: Directions
    permutations: int

    @cached_property
    def items(self) -> list[Occurrence]:
        """The kept occurrences in the order of the texts."""
        return self.found.kept()

    @cached_property
    def vectors(self) -> Floats:
        """(depth, occurrence, width)."""
        return np.stack([item.vectors for item in self.items], axis=1)

    @cached_property
    def text_of(self) -> Whole:
        """The number of each occurrence's text."""
        texts = [(item.text.line, item.text.part) for item in self.items]
        number = {text: at for at, text in enumerate(dict.fromkeys(texts))}
        return np.array([number[text] for text in texts], np.int64)

    @cached_property
    def senses(self) -> tuple[str, ...]:
        """The senses that occur, in the order of the alphabet."""
        return tuple(sorted({item.sense for item in self.items} - {""}))

    @cached_property
    def cosines(self) -> tuple[Floats, Floats]:
        """Self-similarity and baseline by depth."""
        return self_similarity(self.vectors, self.text_of), self.baseline.between_texts()

    @cached_property
    def separation(self) -> Separation | None:
        """How the senses fall apart; None where that is not defined."""
        known = np.array([at for at, item in enumerate(self.items) if item.sense], dtype=np.intp)
        senses = np.array([self.senses.index(self.items[at].sense) for at in known], np.int64)
        if not can_separate(senses):
            return None
        distances, text_of = cosine_distance(self.vectors[:, known]), self.text_of[known]
        return Separation(
            known,
            silhouettes(distances, senses),
            nearest_sense(distances, senses, text_of),
            nearest_by_chance(senses, text_of),
            *pair_cosines(distances, senses, text_of),
            *permutation_p(distances, senses, text_of, self.permutations, self.found.seed),
        )

    @cached_property
    def clusters(self) -> Whole | None:
        """2-means clusters of the last depth, where no sense is known."""
        return None if self.senses else two_clusters(self.vectors[-1], self.found.seed)

    @cached_property
    def planes(self) -> list[tuple[Floats, Floats]]:
        """Places (occurrence, 2) on the first two principal components, and their shares, by depth."""
        return [plane(own) for own in self.vectors]
