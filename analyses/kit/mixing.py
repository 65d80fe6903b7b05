"""How much of a token's new vector comes from other tokens, by vector norms (Kobayashi et al. 2020, 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .kept import Piece
from .maths import lengths, mean_of_rows, ratio
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
class LayerWeights:
    """A layer's W_O^T with the heads end to end (channel, width), its bias, and the gain of the LayerNorm behind it."""

    output: Floats
    bias: Floats
    gain: Floats


def layer_weights(weights: HeadWeights, shape: ModelShape, layers: Sequence[int]) -> dict[int, LayerWeights]:
    """Those of the chosen layers, by layer."""
    joined = weights.output.permute(0, 1, 3, 2).flatten(1, 2).contiguous()
    tensors = joined, weights.output_bias, weights.norm_gain
    return {layer: LayerWeights(*(part[shape.weight_layer[layer]].numpy() for part in tensors)) for layer in layers}


def contributions(attention: Floats, values: Floats, output: Floats) -> Floats:
    """What each token adds to an attention output, sum_h A_ij f_h(x_j): (text, token, width).

    f_h(x) = (x W_V + b_V) W_O, the head's values (text, head, token, channel) times its rows of `output`
    (head x channel, width). `attention` (text, head, token) is the weight of every token j for one token i, whose
    output they and b_O add up to; or the diagonal of A, for what every token gives itself: no vector of a pair is
    formed there.

    >>> contributions(np.array([[[0.25, 0.0]]]), np.array([[[[4.0], [8.0]]]]), np.eye(1)).ravel().tolist()
    [1.0, 0.0]
    """
    texts, heads, tokens, channels = values.shape
    weighted = np.empty((texts, tokens, heads, channels))
    np.multiply(attention[..., None], values, out=weighted.swapaxes(1, 2))
    # torch's product takes half the time of NumPy's for short texts.
    joined: Floats = (torch.from_numpy(weighted).flatten(2) @ torch.from_numpy(output)).numpy()
    return joined


def mixing_ratio(others: Floats, own: Floats) -> Floats:
    """|others| / (|others| + |own|) from both lengths: 0 to 1; NaN where both are zero.

    >>> mixing_ratio(np.array([5.0]), np.array([15.0])).item()
    0.25
    """
    return ratio(others, others + own)


def through_norm(vectors: Floats, gain: Floats) -> Floats:
    """A LayerNorm's linear part gain (v - mean(v)), without the scale 1 / sqrt(var + eps), which a ratio does not see.

    The scale is that of the whole sum, the same for all its terms. Shapes (layer, ..., width), (layer, ..., width) of
    which the second may have 1 in place of all but layer and width, to the first.
    """
    rest: Floats = vectors - np.einsum("...i->...", vectors)[..., None] / vectors.shape[-1]
    rest *= gain
    return rest


def mixing(piece: Piece, layers: Sequence[int], weights: Mapping[int, LayerWeights]) -> Floats:
    """The values of MIXING, means over tokens: (layer, text, value)."""
    own_weights = [weights[layer] for layer in layers]
    others, own, diagonal = parts_of_output(piece, layers, own_weights)
    of_others, of_own = lengths(others), lengths(own)
    own += piece.vectors("hidden_states", layers)
    gain = np.stack([of_layer.gain for of_layer in own_weights])[:, None, None]
    pairs = (
        (of_others, of_own),
        (of_others, lengths(own)),
        tuple(lengths(through_norm(part, gain)) for part in (others, own)),
    )
    found = (1.0 - diagonal.mean(axis=2), *(mixing_ratio(*pair) for pair in pairs))
    return mean_of_rows(np.stack(found, axis=2))


def parts_of_output(
    piece: Piece, layers: Sequence[int], weights: Sequence[LayerWeights]
) -> tuple[Floats, Floats, Floats]:
    """What others and the token itself add to its attention output, which is both and b_O; and the diagonal of A.

    Shapes (layer, text, token, width) twice and (layer, text, head, token). The part of others is the recorded output
    less b_O and the own part, so it is as exact as float32 made the output.
    """
    attention = [piece.record.of_layer("attention", layer)[piece.texts] for layer in layers]
    diagonal = np.stack([np.diagonal(own, axis1=2, axis2=3)[..., piece.kept] for own in attention], dtype=np.float64)
    values = zip(diagonal, piece.vectors("v", layers), weights, strict=True)
    own = np.stack([contributions(weight, vectors, of_layer.output) for weight, vectors, of_layer in values])
    others = piece.vectors("attention_projection", layers)
    others -= np.stack([of_layer.bias for of_layer in weights])[:, None, None]
    others -= own
    return others, own, diagonal
