"""A batch cut into pieces that a core's cache holds, with the tokens that are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .maths import chosen
from .pieces import runs
from .record import ForwardRecord, TokenizedText

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Piece:
    """Some neighbouring texts of a batch of which the same tokens are measured."""

    record: ForwardRecord
    texts: slice
    kept: NDArray[np.intp]

    def __len__(self) -> int:
        return self.texts.stop - self.texts.start

    def recorded(self, name: str, index: int) -> NDArray[Any]:
        """The measured tokens' vectors (text, [head,] token, width) at one layer (or depth), as they were recorded."""
        return chosen(self.record.of_layer(name, index)[self.texts], self.kept, axis=-2)

    def vectors(self, name: str, layers: Sequence[int]) -> Floats:
        """Those of some layers (layer, text, [head,] token, width) in float64, and free to be overwritten."""
        return np.stack([self.recorded(name, layer) for layer in layers], dtype=np.float64)

    def layer_runs(self, layers: Sequence[int]) -> Iterator[Sequence[int]]:
        """The layers, as many at once as a core's cache holds: of a few short texts, several."""
        entries = len(self) * len(self.record.texts[0]) * self.record.shape.width
        return (layers[run] for run in runs(slice(0, len(layers)), entries))

    def over_layers(self, layers: Sequence[int], measure: Callable[[Piece, Sequence[int]], Floats]) -> Floats:
        """What `measure` makes of runs of layers (layer, text, ...), joined to (text, layer, ...)."""
        found = np.concatenate([measure(self, some) for some in self.layer_runs(layers)])
        return np.ascontiguousarray(found.swapaxes(0, 1))


def pieces(record: ForwardRecord, *, special: bool) -> Iterator[Piece]:
    """The batch in order, cut wherever tokens to measure change; without `special` ones, special tokens are none."""
    first = 0
    for kept, alike in groupby(record.texts, lambda text: _kept(text, special)):
        count = len(list(alike))
        entries = len(record.texts[0]) * record.shape.width
        for texts in runs(slice(first, first + count), entries):
            yield Piece(record, texts, np.array(kept, dtype=np.intp))
        first += count


def _kept(text: TokenizedText, special: bool) -> tuple[int, ...]:
    return tuple(at for at, added in enumerate(text.special) if special or not added)
