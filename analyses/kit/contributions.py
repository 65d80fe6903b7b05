"""A logit z = w.g + b as the sum of what each channel contributes, w_i g_i, the largest of them named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .maths import largest_magnitudes

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Decomposition:
    """Each logit as its largest contributions (label, place), the remainder of all other channels, and the bias.

    `contributions` + `remainder` + `bias` add up to `logits`. Of each named contribution stand the channel, its weight
    w_i and its feature g_i, whose product it is.

    >>> found = Decomposition.of(np.array([[1.0, -2.0, 3.0]]), np.array([0.5]), np.array([1.0, 2.0, 0.1]), 2)
    >>> found.channels.tolist(), found.contributions.tolist(), found.remainder.round(6).tolist()
    ([[1, 0]], [[-4.0, 1.0]], [0.3])
    >>> found.logits.round(6).tolist()
    [-2.2]
    """

    logits: Floats
    bias: Floats
    channels: NDArray[np.int64]
    weights: Floats
    features: Floats
    contributions: Floats
    remainder: Floats

    @classmethod
    def of(cls, weight: Floats, bias: Floats, features: Floats, count: int) -> Self:
        """Of z = W g + b with W (label, channel), b (label,), g (channel,); `count` channels of a label are named."""
        every = weight * features
        channels, named = largest_magnitudes(every, count)
        own = np.take_along_axis(weight, channels, axis=1)
        # The others are summed by themselves: as a difference they would be lost beside large contributions.
        others = every.copy()
        np.put_along_axis(others, channels, 0.0, axis=1)
        remainder = others.sum(axis=1)
        logits = named.sum(axis=1) + remainder + bias
        return cls(logits, bias, channels, own, features[channels], named, remainder)


def difference(weight: Floats, bias: Floats, features: Floats, first: int, second: int, count: int) -> Decomposition:
    """z_first - z_second as a sum: the channels that set the two labels apart, (w_first - w_second)_i g_i.

    >>> found = difference(np.array([[1.0, 0.0], [0.0, 2.0]]), np.zeros(2), np.array([3.0, 1.0]), 0, 1, 1)
    >>> found.logits.tolist(), found.channels.tolist(), found.contributions.tolist(), found.remainder.tolist()
    ([1.0], [[0]], [[3.0]], [-2.0])
    """
    apart, shift = weight[first] - weight[second], bias[first] - bias[second]
    return Decomposition.of(apart[None], np.array([shift]), features, count)


def on_channels(weight: Floats, features: Floats, channels: Sequence[int]) -> Floats:
    """The contributions of some channels to every label, (label, channel), and in a last column those of all others.

    >>> on_channels(np.array([[1.0, -2.0, 3.0]]), np.array([1.0, 2.0, 1.0]), [1]).tolist()
    [[-4.0, 4.0]]
    """
    every = weight * features
    rest = np.delete(every, list(channels), axis=1).sum(axis=1)
    return np.column_stack([every[:, list(channels)], rest])
