"""Attention followed through the layers: the mixing matrices of Abnar and Zuidema 2020 and their product."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .maths import normalised_rows

Floats = NDArray[np.float64]


def mean_over_heads(attention: Floats) -> Floats:
    """Attention averaged over heads, rows summing to 1. Shape (..., head, query, key) to (..., query, key).

    >>> mean_over_heads(np.array([[[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]]])).tolist()
    [[[0.5, 0.5], [0.0, 1.0]]]
    """
    return normalised_rows(torch.from_numpy(attention).mean(dim=-3).numpy())


def mixing_matrices(attention: Floats) -> Floats:
    """0.5 A + 0.5 I with A the mean over heads: attention with the residual connection counted as half.

    Shape (layer, query, key) to the same; rows sum to 1.

    >>> mixing_matrices(np.array([[[0.0, 1.0], [1.0, 0.0]]])).tolist()
    [[[0.5, 0.5], [0.5, 0.5]]]
    """
    mixed = 0.5 * attention
    np.einsum("...ii->...i", mixed)[...] += 0.5
    return mixed


def rollout(mixing: Floats) -> Floats:
    """R_1 = A_1, R_l = A_l R_{l-1}: how much of each input token is in each token after layer l, layers being mixers.

    Shape (layer, query, key) to (layer, query, input); rows sum to 1 after every layer.

    >>> rollout(np.array([[[0.5, 0.5], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]]]))[1].tolist()
    [[0.25, 0.75], [0.25, 0.75]]
    """
    products = [mixing[0]]
    for layer in mixing[1:]:
        products.append(layer @ products[-1])
    return normalised_rows(np.stack(products))
