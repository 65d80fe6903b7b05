"""What the parts of a block do to token vectors: how far sublayers move them, and what each LayerNorm does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .kept import Piece
from .maths import mean_of_rows
from .spectra import FLOAT32_EPSILON, frobenius_norm, singular_values_by_gram

Floats = NDArray[np.float64]

STEPS = {
    "update_ratio": "|update| / |input|, 0 or more",
    "update_angle": "angle of the update against the input, degrees, 0 to 180",
    "moved_angle": "angle of input + update against the input, degrees, 0 to 180",
}
"""Values of a step, each the mean over a text's tokens."""
SUBLAYERS = {
    "attention": ("hidden_states", "attention_projection"),
    "mlp": ("attention_norm", "mlp_output"),
    "block": ("hidden_states", "hidden_states"),
}
"""Input and update of each; the block's update is its output less its input, LayerNorms included."""

LAYER_NORMS = {
    "scale": "1 / standard deviation of a vector's entries (n): what it is multiplied by, but for the gain; above 0",
    "entry_mean": "mean of a vector's entries, which is taken away",
    "ones_share": "share of |vector|^2 along (1, ..., 1), which is lost: width mean^2 / |vector|^2, 0 to 1",
    "affine_rank_before": "rank of X - 1 mean ahead of it: singular values above n 2^-23 |X|_F, 0 to n - 1",
    "affine_rank_after": "the same behind it, where zero variance, scales and shifts may have changed it",
    "affine_rank_change": "rank behind less rank ahead",
}
"""Values of a LayerNorm: means over a text's tokens, and ranks of its token matrix X."""
NORMS = {"attention": ("attention_sum", "attention_norm"), "mlp": ("mlp_sum", "hidden_states")}
"""The points ahead of each LayerNorm and behind it."""


def step_values(vectors: Floats, update: Floats) -> Floats:
    """The values of STEPS on a last axis, token by token; NaN where a vector is zero that has to have a direction.

    Shapes (..., width) twice to (..., 3). Angles come from sine and cosine, so small ones keep their digits.

    >>> step_values(np.array([2.0, 0.0]), np.array([0.0, 2.0])).round(12).tolist()
    [1.0, 90.0, 45.0]
    """
    own, inner, moved = (np.vecdot(*pair) for pair in ((vectors, vectors), (vectors, update), (update,) * 2))
    there, both = own > 0, own * moved > 0
    along = inner / np.where(there, own, 1.0)
    across = update - along[..., None] * vectors
    sine = np.sqrt(np.vecdot(across, across) * own)
    ratio = np.where(there, np.sqrt(moved / np.where(there, own, 1.0)), np.nan)
    update_angle = np.where(both, np.degrees(np.arctan2(sine, inner)), np.nan)
    moved_angle = np.where(there & (sine + np.abs(own + inner) > 0), np.degrees(np.arctan2(sine, own + inner)), np.nan)
    return np.stack([ratio, update_angle, moved_angle], axis=-1)


def steps(piece: Piece, layers: Sequence[int]) -> Floats:
    """The values of STEPS for each of SUBLAYERS, means over tokens: (layer, text, sublayer, value)."""
    before, after = (piece.vectors("hidden_states", depths) for depths in (layers, behind(layers)))
    inner = piece.vectors("attention_norm", layers)
    projection, mlp = piece.vectors("attention_projection", layers), piece.vectors("mlp_output", layers)
    found = [step_values(*pair) for pair in ((before, projection), (inner, mlp), (before, after - before))]
    return mean_of_rows(np.stack(found, axis=2).swapaxes(-1, -2))


def behind(layers: Sequence[int]) -> list[int]:
    """The depths to which layers lead."""
    return [layer + 1 for layer in layers]


def norm_values(before: Floats, after: Floats) -> Floats:
    """The values of LAYER_NORMS of token vectors ahead of a LayerNorm and behind it, on a last axis.

    Shapes (..., token, width) twice to (..., 6); means leave out tokens without a value.
    """
    width = before.shape[-1]
    mean = np.einsum("...i->...", before) / width
    square = np.vecdot(before, before)
    rest = before - mean[..., None]
    deviation = np.sqrt(np.vecdot(rest, rest) / width)
    varies, there = deviation > 0, square > 0
    scale = np.where(varies, 1 / np.where(varies, deviation, 1.0), np.nan)
    share = np.where(there, np.minimum(width * mean**2 / np.where(there, square, 1.0), 1.0), np.nan)
    ranks = affine_rank(before), affine_rank(after)
    return np.stack([*map(mean_of_rows, (scale, mean, share)), *ranks, ranks[1] - ranks[0]], axis=-1)


def layer_norms(piece: Piece, layers: Sequence[int]) -> Floats:
    """The values of LAYER_NORMS for each of NORMS: (layer, text, norm, value)."""
    depths = {"hidden_states": behind(layers)}
    points = [[piece.vectors(point, depths.get(point, layers)) for point in pair] for pair in NORMS.values()]
    return np.stack([norm_values(*pair) for pair in points], axis=2)


def affine_rank(states: Floats) -> Floats:
    """Dimension of the affine hull of token vectors: rank of X - 1 mean. Shape (..., token, width) to (...).

    Singular values count above n 2^-23 |X|_F: X, not X - 1 mean, since rounding of what was recorded is a share of X.
    From 0 (equal tokens) to n - 1; NaN without tokens.

    >>> affine_rank(np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])).item()
    1.0
    """
    tokens = states.shape[-2]
    if not tokens:
        return np.full(states.shape[:-2], np.nan)
    centred = states - np.einsum("...ij->...j", states)[..., None, :] / tokens
    least = tokens * FLOAT32_EPSILON * frobenius_norm(states)
    found = np.full(least.shape, tokens - 1.0)
    rest = ~_full(centred, least)
    found[rest] = (singular_values_by_gram(centred[rest]) > least[rest, None]).sum(axis=-1)
    return found


def _full(centred: Floats, least: Floats) -> NDArray[np.bool_]:
    """Whether all singular values but the one of (1, ..., 1) exceed `least`, by a factorisation instead of a spectrum.

    True only where G + c 1 1^T - least^2 is positive definite, G the Gram matrix, which has no part along (1, ..., 1).
    """
    rows = torch.from_numpy(centred)
    tokens, width = rows.shape[-2:]
    if tokens > width:
        return np.zeros(least.shape, dtype=bool)
    gram = rows @ rows.mT
    gram += (torch.diagonal(gram, dim1=-2, dim2=-1).sum(dim=-1) / tokens)[..., None, None]
    torch.diagonal(gram, dim1=-2, dim2=-1).sub_(torch.from_numpy(np.asarray(least**2))[..., None])
    return np.asarray(torch.linalg.cholesky_ex(gram).info.numpy() == 0)
