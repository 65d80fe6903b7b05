"""The points of each block at which the stream of vectors is measured, and what is kept of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .accumulators import Totals
from .distribution import BINS, CentralMoments, bin_counts, central_sums
from .isotropy_metrics import outlier_bound
from .kept import Piece
from .maths import lengths
from .pieces import of_heads

Floats = NDArray[np.float64]

OF_HEADS: Mapping[str, str] = {"query": "q", "key": "k", "value": "v", "head_output": "head_outputs"}
WIDE: Mapping[str, str] = {
    "attention_projection": "attention_projection",
    "attention_sum": "attention_sum",
    "attention_norm": "attention_norm",
    "mlp_output": "mlp_output",
    "mlp_sum": "mlp_sum",
    "hidden_state": "hidden_states",
}
"""Points and the recorded tensors that hold them: of single heads, and of the model's width."""
ORDER = ("layer_input", *OF_HEADS, *WIDE, "layer_output")
POINTS = {
    "layer_input": "hidden state ahead of the block",
    **{name: f"{name.replace('_', ' ')} of a head" for name in OF_HEADS},
    "attention_projection": "W_O's output with its bias",
    "attention_sum": "the same plus the layer input, ahead of the first LayerNorm",
    "attention_norm": "behind the first LayerNorm",
    "mlp_output": "the MLP's output",
    "mlp_sum": "the same plus its input, ahead of the second LayerNorm",
    "layer_output": "behind the second LayerNorm: the next layer's input",
}
"""Points of a block in the order of the pass."""


@dataclass(frozen=True)
class Points:
    """Every point of the chosen layers and heads, once: a hidden state between two blocks belongs to both."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]

    @cached_property
    def stacks(self) -> list[tuple[str, int]]:
        """Point and layer (or depth, for hidden states) of each, the heads together: what a histogram is kept of."""
        depths = sorted({depth for layer in self.layers for depth in (layer, layer + 1)})
        inside = [(point, layer) for point in (*OF_HEADS, *WIDE) if point != "hidden_state" for layer in self.layers]
        return [*inside, *(("hidden_state", depth) for depth in depths)]

    @cached_property
    def wide(self) -> list[tuple[str, int]]:
        """Those of the model's width: what channels are measured of."""
        return [stack for stack in self.stacks if stack[0] in WIDE]

    @cached_property
    def cells(self) -> list[tuple[str, int, int | None]]:
        """The same with each head on its own: what moments are kept of."""
        return [(*stack, head) for stack in self.stacks for head in (self.heads if stack[0] in OF_HEADS else (None,))]

    def block(self, layer: int) -> Iterator[tuple[str, tuple[str, int]]]:
        """The points of a layer, in the order of the pass, and the stack that each stands for."""
        for point in POINTS:
            depth = layer + (point == "layer_output")
            yield point, (("hidden_state", depth) if point.startswith("layer_") else (point, layer))


@dataclass
class Distributions:
    """Of the entries of vectors and of their norms: moments (cell, 2), histograms (stack, bin), channels.

    `channels` holds the sums of x and x^2 over tokens: (wide stack, channel, 2).
    """

    moments: CentralMoments
    histograms: Totals
    channels: Totals

    @classmethod
    def empty(cls, points: Points, width: int) -> Self:
        """Nothing seen yet: the identity of merge."""
        histograms = Totals.empty(len(points.stacks), BINS)
        return cls(CentralMoments.empty(len(points.cells), 2), histograms, Totals.empty(len(points.wide), width, 2))

    def add(self, piece: Piece, points: Points) -> None:
        """Add the vectors of a piece; sums are taken text by text, in order."""
        parts = [self._measured(piece, points, *run) for run in _runs(piece, points)]
        entries, norms = (np.concatenate([part[at] for part in parts], axis=1) for at in (0, 1))
        self.moments.add(np.stack([entries, central_sums(norms)], axis=2))
        for own in np.concatenate([part[2] for part in parts if part[2] is not None], axis=1):
            self.channels.add(own)

    def _measured(
        self, piece: Piece, points: Points, first: int, point: str, layers: Sequence[int]
    ) -> tuple[Floats, Floats, Floats | None]:
        """Central sums of entries (text, cell, 5), norms (text, cell, token), sums of channels (text, layer, ...)."""
        name = {**OF_HEADS, **WIDE}[point]
        found = np.stack([piece.recorded(name, layer) for layer in layers])
        found = of_heads(found, points.heads) if point in OF_HEADS else found[:, :, None]
        self.histograms.values[first : first + len(layers)] += bin_counts(found)
        vectors = found.astype(np.float64, order="C")
        channels = _channel_sums(vectors[:, :, 0]).swapaxes(0, 1) if point in WIDE else None
        norms = lengths(vectors)
        entries = central_sums(vectors.reshape(*vectors.shape[:3], -1))  # overwrites them
        return _cells(entries), _cells(norms), channels

    def merge(self, other: Self) -> Self:
        """Both together."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("moments", "histograms", "channels"))
        return type(self)(*(first.merge(second) for first, second in pairs))


def _runs(piece: Piece, points: Points) -> Iterator[tuple[int, str, Sequence[int]]]:
    """Runs of layers of one point: the first one's place among the stacks, the point, and the layers (or depths)."""
    first = 0
    for point, alike in groupby(points.stacks, lambda stack: stack[0]):
        for layers in piece.layer_runs([layer for _, layer in alike]):
            yield first, point, layers
            first += len(layers)


def _cells(values: Floats) -> Floats:
    """(layer, text, head, ...) to (text, layer x head, ...)."""
    layers, texts, heads, *rest = values.shape
    return values.swapaxes(0, 1).reshape(texts, layers * heads, *rest)


def _channel_sums(vectors: Floats) -> Floats:
    """Sums of x and x^2 over tokens: (layer, text, token, channel) to (layer, text, channel, 2)."""
    sums = np.einsum("ltic->ltc", vectors), np.einsum("ltic,ltic->ltc", vectors, vectors)
    return np.stack(sums, axis=-1)


def outlier_channels(sums: Floats, tokens: int, deviations: float) -> tuple[Floats, Floats, Floats, Sequence[int]]:
    """Mean and variance of every channel, their bounds, and the channels beyond: |mean| or variance above the mean
    over channels + `deviations` standard deviations over channels. `sums`: (channel, 2) of x and x^2 over tokens.

    >>> sums = np.array([[2.0, 2.0]] * 20 + [[100.0, 5000.0]])
    >>> list(outlier_channels(sums, 2, 3)[3])
    [20]
    """
    mean, square = sums.T / max(tokens, 1)
    variance = np.maximum(square - mean**2, 0.0)
    bounds = [outlier_bound(values, deviations) for values in (np.abs(mean), variance)]
    beyond = (np.abs(mean) > bounds[0]) | (variance > bounds[1])
    return mean, variance, np.array(bounds), np.flatnonzero(beyond).tolist()
