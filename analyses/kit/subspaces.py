"""Subspaces that heads read and write, and how far one lies in another; norms of products of thin factors.

Everything here is |A^T B|_F^2 for many thin matrices A and B (width x channel). It equals <A A^T, B B^T>, the inner
product of two symmetric matrices, so all pairs together are one product of flattened matrices. With BERT's sizes
(768 and 64) that takes a ninth of the multiplications of all A^T B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .record import HeadWeights

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
LETTERS = "QKVO"
FLOAT32_STEP = 2.0**-23
SLAB_BYTES = 2**26


def thin_factors(weights: HeadWeights, layers: Sequence[int], heads: Sequence[int]) -> dict[str, Floats]:
    """W_Q^T, W_K^T, W_V^T and W_O of single heads, by letter, each (head, width, channel).

    A torch Linear stores (out, in): query, key and value turn, a head's columns of W_O are (width, channel) already.
    `layers` are the checkpoint's own, one for each of `heads`.
    """
    at = list(layers), list(heads)
    turned = [part[at].transpose(1, 2) for part in (weights.query, weights.key, weights.value)]
    tensors = zip(LETTERS, (*turned, weights.output[at]), strict=True)
    return {letter: np.ascontiguousarray(tensor.double().cpu().numpy()) for letter, tensor in tensors}


def orthonormal_bases(matrices: Floats) -> tuple[Floats, Whole]:
    """Orthonormal bases of the column spaces, and their dimensions.

    Shape (head, width, channel) to (head, width, channel) and (head,). A singular value counts as zero when it is at
    most max(width, channel) 2^-23 of the largest (weights are float32); the columns past the dimension are zero.

    >>> bases, dimensions = orthonormal_bases(np.array([[[3.0, 3.0], [0.0, 0.0], [0.0, 0.0]]]))
    >>> np.abs(bases[0]).round(6).tolist(), dimensions.tolist()
    ([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [1])
    """
    rotations, triangles = np.linalg.qr(matrices)
    inner, sizes, _ = np.linalg.svd(triangles, full_matrices=False)
    kept = sizes > max(matrices.shape[1:]) * FLOAT32_STEP * sizes[:, :1]
    return (rotations @ inner) * kept[:, None, :], kept.sum(axis=-1)


def squared_products(first: Floats, second: Floats) -> Floats:
    """|A^T B|_F^2 of every A of `first` with every B of `second`, 0 or more.

    Shapes (head, width, channel) and (other head, width, channel) to (head, other head).

    >>> squared_products(np.array([[[1.0], [2.0]]]), np.array([[[3.0], [4.0]], [[2.0], [-1.0]]])).tolist()
    [[121.0, 0.0]]
    """
    total = np.zeros((len(first), len(second)))
    width = first.shape[1]
    rows = max(1, SLAB_BYTES // (8 * width * max(len(first), len(second))))
    for start in range(0, width, rows):
        left = _gram_rows(first, start, rows)
        right = left if second is first else _gram_rows(second, start, rows)
        total += left @ right.T
    return np.maximum(total, 0.0)


def _gram_rows(matrices: Floats, start: int, rows: int) -> Floats:
    """Rows of every A A^T from its diagonal on, flattened; what stands for two entries is weighted by sqrt(2)."""
    slab = matrices[:, start : start + rows]
    products = slab @ matrices[:, start:].transpose(0, 2, 1)
    products[:, :, slab.shape[1] :] *= np.sqrt(2.0)
    return products.reshape(len(matrices), -1)


def projection_kernels(first: Floats, second: Floats) -> Floats:
    """Sum of cos^2 of the principal angles of every two subspaces, |U^T U'|_F^2, from orthonormal bases.

    Not normalised: 0 (orthogonal) to the smaller dimension (one lies in the other). Shapes as `squared_products`.
    The projection kernel of Yamagiwa, Takase and Shimodaira (arXiv 2601.10266).

    >>> plane = np.eye(4)[:, :2]
    >>> projection_kernels(np.array([plane]), np.array([plane, np.eye(4)[:, 1:3], np.eye(4)[:, 2:]])).tolist()
    [[2.0, 1.0, 0.0]]
    """
    dimensions = [np.rint((bases**2).sum(axis=(1, 2))) for bases in (first, second)]
    return np.minimum(squared_products(first, second), np.minimum.outer(*dimensions))


def kernels_by_kind(bases: Mapping[str, Floats], kinds: Sequence[str]) -> dict[str, Floats]:
    """Projection kernels (head, other head) of pairs of letters such as OQ, all out of one product.

    `bases` holds, by letter, those of the same heads: what stands first in any kind meets what stands second.
    """
    first, second = (sorted({kind[at] for kind in kinds}) for at in (0, 1))
    rows = np.concatenate([bases[letter] for letter in first])
    columns = rows if first == second else np.concatenate([bases[letter] for letter in second])
    grid = projection_kernels(rows, columns).reshape(len(first), -1, len(second), len(columns) // len(second))
    return {kind: grid[first.index(kind[0]), :, second.index(kind[1])] for kind in kinds}


def random_projection_kernel(p: Floats, q: Floats, width: int) -> tuple[Floats, Floats]:
    """Mean and standard deviation of the projection kernel of independent uniform subspaces of dimensions p and q.

    Mean p q / d, variance 2 p q (d - p) (d - q) / (d^2 (d - 1) (d + 2)) in d = `width` dimensions; p and q broadcast.

    >>> mean, deviation = random_projection_kernel(np.array(64.0), np.array(64.0), 768)
    >>> round(float(mean), 3), round(float(deviation), 5)
    (5.333, 0.10796)
    """
    d = float(width)
    # In one dimension nothing varies, and the numerator is 0 as well.
    variance = 2.0 * p * q * (d - p) * (d - q) / (d**2 * max(d - 1, 1.0) * (d + 2))
    return p * q / d, np.sqrt(variance)


def folded(inner: Floats, outer: Floats) -> Floats:
    """Thin stand-ins A R^T for the products A B^T, where B = Q R: |X A B^T|_F = |X A R^T|_F for every X.

    Shapes (head, width, channel) twice, to the same. R^T R is the Gram matrix B^T B, so no width x width is formed.

    >>> float(np.linalg.norm(folded(np.array([[[3.0], [0.0]]]), np.array([[[0.0], [2.0]]]))))
    6.0
    """
    triangles = np.asarray(np.linalg.qr(outer, mode="r"))
    return inner @ triangles.transpose(0, 2, 1)


def composition_scores(first: Floats, second: Floats) -> Floats:
    """|A^T B|_F / (|A|_F |B|_F) for every two, 0 to 1; NaN where a factor is zero. Shapes as `squared_products`.

    >>> composition_scores(np.array([[[1.0], [0.0]]]), np.array([[[3.0], [4.0]], [[0.0], [0.0]]])).tolist()
    [[0.6, nan]]
    """
    scale = np.multiply.outer(*(np.linalg.norm(factors, axis=(1, 2)) for factors in (first, second)))
    there = scale > 0
    ratio = np.sqrt(squared_products(first, second)) / np.where(there, scale, 1.0)
    return np.where(there, np.minimum(ratio, 1.0), np.nan)


def principal_angles(first: Floats, second: Floats) -> Floats:
    """Principal angles of every two subspaces in degrees, rising, from orthonormal bases (zero columns span nothing).

    Shapes (head, width, channel) and (other head, width, other channel) to (head, other head, the fewer channels),
    0 to 90; NaN past the smaller dimension. Their squared cosines are eigenvalues of (U^T U')^T U^T U', which hold
    angles near 0 and near 90 to about 1e-6 degrees.

    >>> plane, line = np.eye(3)[:, :2], np.array([[0.0], [1.0], [1.0]]) / np.sqrt(2)
    >>> principal_angles(np.array([plane]), np.array([line])).round(6).tolist()
    [[[45.0]]]
    """
    if second.shape[2] > first.shape[2]:
        return principal_angles(second, first).transpose(1, 0, 2)
    squares = np.zeros((len(first), len(second), second.shape[2]))
    for at, one in enumerate(first):
        start = at if second is first else 0
        squares[at, start:] = _squared_cosines(one, second[start:])
        if second is first:
            squares[start:, at] = squares[at, start:]
    angles = np.degrees(np.arccos(np.sqrt(np.clip(squares[..., ::-1], 0.0, 1.0))))
    count = np.minimum.outer(*(np.rint((bases**2).sum(axis=(1, 2))) for bases in (first, second)))
    return np.where(np.arange(angles.shape[2]) < count[..., None], angles, np.nan)


def _squared_cosines(one: Floats, others: Floats) -> Floats:
    products = one.T @ others
    return np.asarray(np.linalg.eigvalsh(products.transpose(0, 2, 1) @ products))


def form_products(left: Floats, right: Floats) -> Floats:
    """Inner products <A B^T, A' B'^T>_F of every two bilinear forms, from their thin factors A and B.

    Both (head, width, channel), such as W_Q^T and W_K^T, to (head, head), symmetric. They are sums of
    (A^T A') o (B^T B'), channel x channel, so no width x width matrix is formed.

    >>> form_products(np.array([[[1.0], [2.0]]]), np.array([[[3.0], [0.0]]])).tolist()
    [[45.0]]
    """
    products = np.zeros((len(left), len(left)))
    for head in range(len(left)):
        inner = (left[head].T @ left[head:]) * (right[head].T @ right[head:])
        products[head, head:] = products[head:, head] = inner.sum(axis=(1, 2))
    return products


def content_biases(keys: Floats, biases: Floats) -> Floats:
    """c_h = b_Q^h W_K^h: what a head's scores add for a key whatever the query, x_j . c_h.

    W_K^T of every head (head, width, channel) and b_Q (head, channel) to (head, width). Cordonnier, Loukas and Jaggi
    (arXiv 2006.16362).

    >>> content_biases(np.array([[[1.0, 2.0], [0.0, 3.0]]]), np.array([[10.0, 1.0]])).tolist()
    [[12.0, 3.0]]
    """
    return (keys @ biases[:, :, None])[:, :, 0]
