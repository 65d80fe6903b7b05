"""One attention map for each label: the clearest that a corpus holds, short enough to be drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .record import ForwardRecord
from .units import Units

Floats = NDArray[np.float64]
ENOUGH = 8
"""Shorter texts stand for a label only where no longer one does: few tokens fall into any shape by chance."""


@dataclass(frozen=True)
class Example:
    """A head's attention map of one text, and how well it shows its label."""

    enough: bool
    strength: float
    line: int
    part: int
    layer: int
    head: int
    attention: Floats
    labels: tuple[str, ...]

    @property
    def key(self) -> tuple[float, ...]:
        """What the best has most of: long enough, clear, early in the corpus, low in the model."""
        return (self.enough, self.strength, -self.line, -self.part, -self.layer, -self.head)


@dataclass
class Examples:
    """The best example of every label, among texts of at most `longest` units."""

    longest: int
    best: dict[int, Example] = field(default_factory=dict)

    def offer(
        self,
        record: ForwardRecord,
        texts: slice,
        units: Sequence[Units],
        places: tuple[Sequence[int], Sequence[int]],
        labels: Floats,
        strengths: Floats,
    ) -> None:
        """Offer texts with the `labels` (text, layer, head) of their maps and `strengths` (text, layer, head, label).

        `places` are the layers and heads of those axes; all texts have equally many units.
        """
        if not 0 < len(units[0]) <= self.longest:
            return
        for label in np.unique(labels[~np.isnan(labels)]).astype(int).tolist():
            # Rounded, so that maps alike but for rounding are told apart by where they stand.
            strength = np.where(labels == label, strengths[..., label].round(9), -np.inf)
            at = np.argwhere(strength == strength.max())
            found = (self._example(record, texts.start, units, places, place, float(strength.max())) for place in at)
            self._keep(label, max(found, key=lambda example: example.key))

    def merge(self, other: Self) -> Self:
        """The better of both for each label."""
        if self.longest != other.longest:
            raise ValueError("examples of different length do not merge")
        merged = type(self)(self.longest, dict(self.best))
        for label, example in other.best.items():
            merged._keep(label, example)
        return merged

    def rows(self) -> Mapping[int, Example]:
        """The examples in the order of their labels."""
        return dict(sorted(self.best.items()))

    def _keep(self, label: int, example: Example) -> None:
        if label not in self.best or example.key > self.best[label].key:
            self.best[label] = example

    @staticmethod
    def _example(
        record: ForwardRecord,
        first: int,
        units: Sequence[Units],
        places: tuple[Sequence[int], Sequence[int]],
        at: NDArray[np.intp],
        strength: float,
    ) -> Example:
        text, own = record.texts[first + at[0]], units[at[0]]
        layer, head = places[0][at[1]], places[1][at[2]]
        attention = own.pool(record.of_text("attention", first + int(at[0]), [layer])[0, head])
        enough = int((~own.special).sum()) >= ENOUGH
        return Example(enough, strength, text.line, text.part, layer, head, attention, own.labels)
