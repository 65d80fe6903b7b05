"""What changed in the weights of heads between two checkpoints of one architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .comparison import Place
from .covariance import shared_directions
from .maths import ratio
from .record import HeadWeights
from .subspaces import LETTERS, folded, orthonormal_bases, thin_factors

Floats = NDArray[np.float64]
NAMES = {"Q": "query", "K": "key", "V": "value", "O": "output"}
CHANGES = {
    "bilinear": "M_h = W_Q^T W_K without biases",
    "homogeneous": "M~_h = [W_Q b_Q]^T [W_K b_K], M_h with its biases",
    "ov": "W_V^T W_O^T of the head without biases, what it writes of what it attends to",
}
"""The products of two thin factors that are compared."""
WEIGHTS = {
    name: text
    for form, what in CHANGES.items()
    for name, text in (
        (f"{form}_change", f"|B - A|_F / |A|_F of {what}, 0 or more; empty where A is zero"),
        (f"{form}_cosine", f"Frobenius cosine <A, B> / (|A|_F |B|_F) of {what}, -1 to 1; empty where one is zero"),
    )
} | {
    f"{NAMES[letter]}_change": f"|B - A|_F / |A|_F of the head's W_{letter} without bias, 0 or more"
    for letter in LETTERS
}
SUBSPACES = {
    "dimension_a": "dimension of A's subspace: numerical rank of the weight, at most dk",
    "dimension_b": "dimension of B's subspace",
    "kernel_share": "projection kernel of A's subspace with B's over the smaller dimension (dk, but for weights that "
    "lack rank): mean cos^2 of the principal angles, 0 to 1",
    "largest_angle": "largest principal angle, degrees, 0 to 90",
}


def relative_change(first: Floats, second: Floats) -> Floats:
    """|B - A|_F / |A|_F of every two matrices (head, row, column), 0 or more; NaN where A is zero.

    >>> relative_change(np.array([[[3.0, 4.0]]]), np.array([[[3.0, 1.0]]])).tolist()
    [0.6]
    """
    return ratio(np.linalg.norm(second - first, axis=(1, 2)), np.linalg.norm(first, axis=(1, 2)))


def product_change(first: tuple[Floats, Floats], second: tuple[Floats, Floats]) -> Floats:
    """|B - A|_F / |A|_F of products A = L R^T and B = L' R'^T of thin factors (head, width, channel); NaN for A = 0.

    B - A = (L' - L) R'^T + L (R' - R)^T is again a product of thin factors: no width x width matrix is formed, and
    small changes are not lost in the difference of large norms.

    >>> ones, twos = np.ones((1, 3, 1)), np.full((1, 3, 1), 2.0)
    >>> product_change((ones, ones), (ones, twos)).round(12).tolist()
    [1.0]
    """
    (left, right), (new_left, new_right) = first, second
    outer = np.concatenate([new_right, new_right - right], axis=-1)
    difference = folded(np.concatenate([new_left - left, left], axis=-1), outer)
    return ratio(np.linalg.norm(difference, axis=(1, 2)), np.linalg.norm(folded(left, right), axis=(1, 2)))


def product_cosine(first: tuple[Floats, Floats], second: tuple[Floats, Floats]) -> Floats:
    """<A, B>_F / (|A|_F |B|_F) of products A = L R^T and B = L' R'^T, -1 to 1; NaN where one is zero.

    Shapes as `product_change`; <A, B> is the sum of (L^T L') * (R^T R'), channel by channel.

    >>> ones = np.ones((1, 3, 1))
    >>> product_cosine((ones, ones), (-ones, ones)).tolist()
    [-1.0]
    """
    # The root of the product, not the product of roots: it is exact where both are the same number.
    scale = np.sqrt(_inner(first, first) * _inner(second, second))
    return np.clip(ratio(_inner(first, second), scale), -1.0, 1.0)


def _inner(first: tuple[Floats, Floats], second: tuple[Floats, Floats]) -> Floats:
    # Turned by a copy: NumPy would take a matrix times itself by another routine, with other last bits.
    turned = (np.ascontiguousarray(factor.swapaxes(-1, -2)) for factor in first)
    left, right = (one @ other for one, other in zip(turned, second, strict=True))
    return np.einsum("hij,hij->h", left, right)


def weight_changes(
    first: HeadWeights, second: HeadWeights, places: Sequence[Place]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Of every head: WEIGHTS, and of each of its subspaces: SUBSPACES. A layer at a time, for the sake of memory."""
    layers = list(dict.fromkeys(place.weight_layer for place in places))
    parts = [_of_layer(first, second, [place for place in places if place.weight_layer == at]) for at in layers]
    weights, subspaces = (pd.concat(frames, ignore_index=True) for frames in zip(*parts, strict=True))
    return weights, subspaces


def _of_layer(first: HeadWeights, second: HeadWeights, places: Sequence[Place]) -> tuple[pd.DataFrame, pd.DataFrame]:
    heads = [place.head for place in places]
    index = pd.DataFrame({"layer": [place.layer for place in places], "head": heads})
    layers = [weights.of_layer(places[0].weight_layer) for weights in (first, second)]
    thin = [thin_factors(layer, [0] * len(heads), heads) for layer in layers]
    products = [_products(layer, own, heads) for layer, own in zip(layers, thin, strict=True)]
    values = {}
    for form in CHANGES:
        values[f"{form}_change"] = product_change(products[0][form], products[1][form])
        values[f"{form}_cosine"] = product_cosine(products[0][form], products[1][form])
    for letter in LETTERS:
        values[f"{NAMES[letter]}_change"] = relative_change(thin[0][letter], thin[1][letter])
    subspaces = [_subspaces(index, letter, thin[0][letter], thin[1][letter]) for letter in LETTERS]
    together = pd.concat(subspaces).sort_values(["layer", "head"], kind="stable", ignore_index=True)
    return index.assign(**values), together


def _products(layer: HeadWeights, thin: Mapping[str, Floats], heads: Sequence[int]) -> dict[str, tuple[Floats, Floats]]:
    """The thin factors of CHANGES, each (head, width, channel)."""
    query, key = (factor[0, list(heads)].mT.cpu().numpy() for factor in layer.bilinear_factors())
    return {"bilinear": (thin["Q"], thin["K"]), "homogeneous": (query, key), "ov": (thin["V"], thin["O"])}


def _subspaces(index: pd.DataFrame, letter: str, first: Floats, second: Floats) -> pd.DataFrame:
    (own, dimension), (other, other_dimension) = orthonormal_bases(first), orthonormal_bases(second)
    share, angle = shared_directions(own, other)
    return index.assign(
        subspace=letter,
        dimension_a=dimension,
        dimension_b=other_dimension,
        kernel_share=share,
        largest_angle=angle,
    )
