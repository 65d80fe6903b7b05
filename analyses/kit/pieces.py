"""A batch cut into pieces that a core's cache holds.

A whole batch at once would wait for memory, text by text most time would go to the number of calls. Texts never share
a sum here: what a text gets does not depend on those beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .record import ForwardRecord

Floats = NDArray[np.float64]
F = TypeVar("F", bound=np.generic)

CACHED = 2**16
"""Numbers to a piece: several arrays of that size (half a mebibyte each) fit into a core's second-level cache."""


def runs(texts: slice, entries: int, most: int = CACHED) -> Iterator[slice]:
    """Neighbouring texts, as many as have at most `most` numbers together at `entries` to each, and at least one.

    >>> list(runs(slice(2, 7), CACHED // 2))
    [slice(2, 4, None), slice(4, 6, None), slice(6, 7, None)]
    """
    size = max(most // max(entries, 1), 1)
    return (slice(first, min(first + size, texts.stop)) for first in range(texts.start, texts.stop, size))


def over_layers(
    record: ForwardRecord,
    name: str,
    layers: Sequence[int],
    measure: Callable[[Floats, slice], Floats],
    texts: slice | None = None,
) -> Floats:
    """What `measure` makes of each layer (or depth) of a tensor, in float64, for all or some texts of the batch.

    `measure` is given the values (layer, text, ...) of some layers and which texts those are, and returns
    (layer, text, ...). Joined to (text, layer, ...).
    """
    arrays = [record.of_layer(name, layer) for layer in layers]
    texts = slice(0, len(record.texts)) if texts is None else texts
    entries = arrays[0][0].size
    parts = [
        (cut, part, measure(together(arrays[part], cut), cut))
        for cut in runs(texts, entries)
        for part in runs(slice(0, len(layers)), entries * (cut.stop - cut.start))
    ]
    # In one order in memory: otherwise later sums might be taken in an order that depends on the number of texts.
    found = np.empty((texts.stop - texts.start, len(layers), *parts[0][-1].shape[2:]))
    for cut, part, values in parts:
        found[cut.start - texts.start : cut.stop - texts.start, part] = values.swapaxes(0, 1)
    return found


def together(layers: Sequence[NDArray[np.generic]], texts: slice) -> Floats:
    """Some texts of arrays (text, ...) in float64, stacked to (layer, text, ...)."""
    return np.stack([layer[texts] for layer in layers], dtype=np.float64)


def of_heads(values: NDArray[F], heads: Sequence[int]) -> NDArray[F]:
    """Some heads, in rising order, of (..., head, token, channel or key); all of them without a copy.

    >>> of_heads(np.arange(3.0).reshape(3, 1, 1), [0, 2]).ravel().tolist()
    [0.0, 2.0]
    """
    return values if len(heads) == values.shape[-3] else values.take(heads, axis=-3)
