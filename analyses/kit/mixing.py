"""How much of a token's new vector comes from other tokens, by vector norms (Kobayashi et al. 2020, 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .kept import Piece
from .maths import lengths, mean_of_rows
from .record import HeadWeights, ModelShape

Floats = NDArray[np.float64]

MIXING = {
    "mixing_weights": "1 - A_ii of the mean attention of all heads, 0 to 1 (Attn-W)",
    "mixing_attention": "mixing ratio by norms of the attention's output without its bias, 0 to 1 (Attn-N)",
    "mixing_residual": "the same with the residual, which is the token's own, 0 to 1 (AttnRes-N)",
    "mixing_norm": "the same behind the LayerNorm, whose shift is left out, 0 to 1 (AttnResLN-N)",
}
"""Values of a layer, each the mean over a text's tokens."""


@dataclass(frozen=True)
class MixingWeights:
    """Of each layer W_O^T, turned so that joined head outputs stand ahead of it (layer, channel, width), and the gain
    of the LayerNorm behind it (layer, width)."""

    output: dict[int, Floats]
    gain: dict[int, Floats]

    @classmethod
    def of(cls, weights: HeadWeights, shape: ModelShape, layers: Sequence[int]) -> Self:
        """Those of the chosen layers."""
        at = {layer: shape.weight_layer[layer] for layer in layers}
        joined = weights.output.permute(0, 1, 3, 2).flatten(1, 2).contiguous().numpy()
        return cls(
            {layer: joined[own] for layer, own in at.items()},
            {layer: weights.norm_gain[own].numpy() for layer, own in at.items()},
        )


def terms(attention: Floats, values: Floats, outputs: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """What a token's attention output has of others and of itself: sum_h sum_j!=i A_ij f_h(x_j), sum_h A_ii f_h(x_i).

    f_h(x) = (x W_V + b_V) W_O, the head's values (text, head, token, channel) times its columns of W_O; `outputs` are
    A V and `weights` (head x channel, width). No vector of a pair (i, j) is ever formed: the token's own part comes
    from the diagonal of A, that of the others is the rest. Both (text, token, width); with b_O they add up to the
    output.

    >>> attention, values = np.array([[[[0.25, 0.75], [1.0, 0.0]]]]), np.array([[[[4.0], [8.0]]]])
    >>> others, own = terms(attention, values, attention @ values, np.eye(1))
    >>> others.ravel().tolist(), own.ravel().tolist()
    ([6.0, 4.0], [1.0, 0.0])
    """
    own = np.einsum("...ii->...i", attention)[..., None] * values
    both = np.stack([outputs - own, own], axis=1).swapaxes(2, 3)
    found = both.reshape(*both.shape[:3], -1) @ weights
    return found[:, 0], found[:, 1]


def ratio(others: Floats, own: Floats) -> Floats:
    """|others| / (|others| + |own|) of vectors (..., width): 0 to 1; NaN where both are zero.

    >>> ratio(np.array([3.0, 4.0]), np.array([0.0, 15.0])).item()
    0.25
    """
    first, second = lengths(others), lengths(own)
    there = first + second > 0
    return np.where(there, first / np.where(there, first + second, 1.0), np.nan)


def through_norm(vectors: Floats, gain: Floats) -> Floats:
    """A LayerNorm's linear part gain (v - mean(v)), without the scale 1 / sqrt(var + eps), which a ratio does not see.

    The scale is that of the whole sum, the same for all its terms. Shapes (..., width), (width,) to (..., width).
    """
    return gain * (vectors - np.einsum("...i->...", vectors)[..., None] / vectors.shape[-1])


def mixing(piece: Piece, layer: int, weights: MixingWeights) -> Floats:
    """The values of MIXING, means over tokens: (text, value)."""
    record, kept = piece.record, piece.kept
    names = ("attention", "v", "head_outputs")
    attention, values, outputs = (
        record.of_layer(name, layer)[piece.texts].astype(np.float64, order="C") for name in names
    )
    others, own = (part[:, kept] for part in terms(attention, values, outputs, weights.output[layer]))
    with_residual = own + piece.vectors("hidden_states", layer)
    normed = [through_norm(part, weights.gain[layer]) for part in (others, with_residual)]
    diagonal = np.einsum("thii->ti", attention)[:, kept] / attention.shape[1]
    found = (1.0 - diagonal, ratio(others, own), ratio(others, with_residual), ratio(*normed))
    return mean_of_rows(np.stack(found, axis=1))
