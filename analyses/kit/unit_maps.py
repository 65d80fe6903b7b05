"""Attention between tokens or words, as many texts or layers at once as have equal rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from .pieces import of_heads, over_layers
from .record import ForwardRecord
from .units import Kinds, Units, units_of

Floats = NDArray[np.float64]
Measure = Callable[[Floats, Kinds], Floats]
"""Attention (first, head, unit, unit) and the kinds of the units to (first, head, ...); first: texts or layers."""


def over_units(
    record: ForwardRecord, layers: Sequence[int], heads: Sequence[int], measure: Measure, *, words: bool
) -> Iterator[tuple[slice, list[Units], Floats]]:
    """Neighbouring texts whose tokens fall into units alike, their units, and what `measure` makes of their attention.

    The values have the axes (text, layer, head, ...).
    """
    for texts, units in _alike(record, words=words):
        if len(units) == 1:  # with words most texts stand alone: then all layers go together
            attention = record.of_text("attention", texts.start, layers)[:, list(heads)]
            values = measure(units[0].pool(attention), Kinds.of(units))[None]
        else:
            of_some = partial(_measured, measure, heads, units[0], Kinds.of(units), texts.start)
            values = over_layers(record, "attention", layers, of_some, texts)
        yield texts, units, values


def _alike(record: ForwardRecord, *, words: bool) -> Iterator[tuple[slice, list[Units]]]:
    """Neighbours whose tokens fall into words and specials alike (most, but for words), and their units."""
    every = [units_of(text, words=words) for text in record.texts]
    first = 0
    for _, alike in groupby(every, lambda units: (units.of_token, units.special.tolist())):
        units = list(alike)
        yield slice(first, first + len(units)), units
        first += len(units)


def _measured(
    measure: Measure, heads: Sequence[int], units: Units, kinds: Kinds, first: int, attention: Floats, texts: slice
) -> Floats:
    """The measure of one layer and some texts; `kinds` start with those of text `first`."""
    return measure(units.pool(of_heads(attention, heads)), kinds[texts.start - first : texts.stop - first])
