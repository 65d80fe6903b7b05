"""Spectra of what a head computes: entropy of its attention and scores, ranks of its output, keys that hold most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .kept import Piece
from .maths import keys_to_reach, mean_of_rows
from .pieces import of_heads
from .record import HeadWeights, ModelShape
from .spectra import effective_rank, numerical_rank, singular_values_by_gram, stable_rank, von_neumann_entropy

Floats = NDArray[np.float64]

SPECTRA = {
    "n": "rows of each matrix: tokens measured",
    "attention_entropy": "von Neumann entropy of the attention among the tokens measured, nats, 0 to ln n",
    "scores_entropy": "von Neumann entropy of their Q K^T with its biases, nats, 0 to ln n",
    "symmetric_entropy": "von Neumann entropy of (S + S^T) / 2 with S = Q K^T, nats, 0 to ln n",
    "attention_entropy_share": "attention_entropy / ln n, 0 to 1; empty for one token",
    "scores_entropy_share": "scores_entropy / ln n, 0 to 1; empty for one token",
    "symmetric_entropy_share": "symmetric_entropy / ln n, 0 to 1; empty for one token",
    "output_sigma": "largest singular value of the head's output A V, 0 or more",
    "output_effective_rank": "exp of the entropy of sigma / sum sigma of A V, 1 to n; empty for a zero matrix",
    "output_stable_rank": "|A V|_F^2 / |A V|_2^2, 1 to n; empty for a zero matrix",
    "output_numerical_rank": "singular values of A V above n 2^-23 sigma_1, 0 to min(n, dk)",
    "k90": "fewest attention weights of a row, over all keys, that hold 0.9 of it; mean over rows, 1 to the keys",
    "k90_share": "k90 / number of keys, 0 to 1",
}
"""Values of a head in a text. Entropies are -sum p ln p with p = sigma^2 / sum sigma^2."""


def spectra(piece: Piece, layers: Sequence[int], heads: Sequence[int]) -> Floats:
    """The values of SPECTRA: (layer, text, head, value)."""
    attention, q, k, outputs = (
        of_heads(piece.vectors(name, layers), heads) for name in ("attention", "q", "k", "head_outputs")
    )
    n = len(piece.kept)
    if not n:
        empty = np.full((*attention.shape[:3], len(SPECTRA)), np.nan)
        empty[..., 0] = 0.0
        return empty
    scores = q @ k.swapaxes(-1, -2)
    entropies = [
        von_neumann_entropy(singular_values_by_gram(np.ascontiguousarray(attention[..., piece.kept]))),
        von_neumann_entropy(singular_values_by_gram(scores)),
        von_neumann_entropy(np.abs(np.linalg.eigvalsh((scores + scores.swapaxes(-1, -2)) / 2))),
    ]
    shares = [entropy / np.log(n) if n > 1 else np.full_like(entropy, np.nan) for entropy in entropies]
    singular = singular_values_by_gram(outputs)
    ranks = [effective_rank(singular), stable_rank(singular), numerical_rank(singular, n)]
    k90 = mean_of_rows(keys_to_reach(attention))
    found = [np.full_like(k90, n), *entropies, *shares, singular[..., -1], *ranks, k90, k90 / attention.shape[-1]]
    return np.stack(found, axis=-1)


def output_conditions(weights: HeadWeights, shape: ModelShape, layers: Sequence[int]) -> Floats:
    """Condition number sigma_1 / sigma_d of each layer's W_O, all heads joined: (layer,), 1 or more, or inf.

    Head outputs can be told from the attention's output as far as this is small (for a square W_O).
    """
    found = {own: _condition(weights, own) for own in {shape.weight_layer[layer] for layer in layers}}
    return np.array([found[shape.weight_layer[layer]] for layer in layers])


def _condition(weights: HeadWeights, own: int) -> float:
    joined = weights.output[own].permute(1, 0, 2).flatten(1).numpy()
    singular = np.linalg.svd(joined, compute_uv=False)
    return float(singular[0] / singular[-1]) if singular[-1] > 0 else float("inf")
