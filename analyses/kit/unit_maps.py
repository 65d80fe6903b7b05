"""Attention between tokens or words, as many texts and layers at once as a core's cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from .pieces import of_heads, runs
from .record import ForwardRecord
from .units import Kinds, Units, units_of

Floats = NDArray[np.float64]
Measure = Callable[[Floats, Kinds], Floats]
"""Attention (first, head, unit, unit) and kinds of units (first, unit) to (first, head, ...); first: texts, layers."""

TOGETHER = 2**18
"""Weights measured at once: in smaller pieces calls cost most, larger ones wait for memory."""


def over_units(
    record: ForwardRecord, layers: Sequence[int], heads: Sequence[int], measure: Measure, *, words: bool
) -> Iterator[tuple[slice, list[Units], Floats]]:
    """Neighbouring texts whose tokens fall into units alike, their units, and what `measure` makes of their attention.

    The values have the axes (text, layer, head, ...). Texts and layers never share a sum in a good measure: what a
    text gets does not depend on those beside it.
    """
    weights = record.shape.heads * len(record.texts[0]) ** 2
    for texts, units in _alike(record, words=words):
        kinds, found = Kinds(units), []
        for cut in runs(texts, weights * len(layers), TOGETHER):
            own = kinds[cut.start - texts.start : cut.stop - texts.start]
            some = runs(slice(0, len(layers)), weights * (cut.stop - cut.start), TOGETHER)
            parts = [_measured(record, layers[part], heads, units[0], own, cut, measure) for part in some]
            found.append(np.concatenate(parts, axis=1))
        # In one order in memory: otherwise later sums might be taken in an order that depends on the number of texts.
        yield texts, units, np.ascontiguousarray(np.concatenate(found))


def _alike(record: ForwardRecord, *, words: bool) -> Iterator[tuple[slice, list[Units]]]:
    """Neighbours whose tokens fall into words and specials alike (most, but for words), and their units."""
    every = [units_of(text, words=words) for text in record.texts]
    first = 0
    for _, alike in groupby(every, lambda units: (units.of_token, units.special.tolist())):
        units = list(alike)
        yield slice(first, first + len(units)), units
        first += len(units)


def _measured(
    record: ForwardRecord,
    layers: Sequence[int],
    heads: Sequence[int],
    units: Units,
    kinds: Kinds,
    texts: slice,
    measure: Measure,
) -> Floats:
    """The measure (text, layer, head, ...) of some layers and texts at once."""
    arrays = [record.of_layer("attention", layer)[texts] for layer in layers]
    attention = np.concatenate(arrays, dtype=np.float64)
    values = measure(units.pool(of_heads(attention, heads)), kinds.repeated(len(layers)))
    return values.reshape(len(layers), -1, *values.shape[1:]).swapaxes(0, 1)
