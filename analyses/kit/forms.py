"""Bilinear forms x A B^T y of heads, from their thin factors A and B (width x channel).

A matrix of width x width is never formed. With A = Q_A R_A and B = Q_B R_B everything there is to know stands in the
core R_A R_B^T, channel x channel; the symmetric part in one of twice that size. Norms of rows and columns come from
A R_B^T and B R_A^T.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .maths import ratio
from .spectra import FLOAT32_EPSILON, effective_rank, numerical_rank, stable_rank

Floats = NDArray[np.float64]
SLAB_BYTES = 2**24
DEVIATIONS = 2.0
"""Standard deviations above the mean from which a norm counts as an outlier (Saponati et al.)."""
NOTHING = 1e-12
"""Relative to the norms: what lies this little above a threshold is rounding."""

MEASURES = {
    "frobenius": "Frobenius norm |M|_F, 0 or more",
    "spectral": "spectral norm |M|_2, the largest singular value, 0 or more",
    "max_entry": "largest |M_ij|, 0 or more; depends on the basis of the residual space",
    "effective_rank": "exp of the entropy of sigma / sum sigma (Roy and Vetterli 2007), 1 to channels",
    "stable_rank": "|M|_F^2 / |M|_2^2, 1 to channels",
    "numerical_rank": "singular values above width 2^-23 sigma_1, 0 to channels",
    "symmetric_share": "|(M + M^T) / 2|_F^2 / |M|_F^2, 0 to 1",
    "antisymmetric_share": "|(M - M^T) / 2|_F^2 / |M|_F^2, 1 minus the symmetric share, 0 to 1",
    "symmetry": "tr(M^2) / |M|_F^2: 1 for a symmetric M, -1 for a skew one (the score of Saponati et al., arXiv "
    "2502.10927, here of one head)",
    "directionality": "excess of outlying row norms minus that of column norms, over their sum, -1 to 1 (the score of "
    "Saponati et al. of one head); depends on the basis of the residual space",
    "positive": "eigenvalues of (M + M^T) / 2 above width 2^-23 of the largest in size; as many as channels unless "
    "the two factors' spaces meet",
    "negative": "those below minus that",
    "positive_mass": "sum of the positive eigenvalues of (M + M^T) / 2 over the sum of all in size, 0 to 1 (this "
    "project's own)",
    "trace_share": "tr(M) / sum of singular values, -1 to 1: whether like finds like, or the opposite (this project's "
    "own)",
}
"""What `ThinForms.measures` gives, with what each is."""


@dataclass(frozen=True)
class ThinForms:
    """Forms M = A B^T of many heads: `left` holds each A, `right` each B, both (head, width, channel)."""

    left: Floats
    right: Floats

    def measures(self) -> dict[str, Floats]:
        """The values of MEASURES, each (head,); NaN for ratios of a zero form.

        >>> turn = ThinForms(np.eye(2)[None], np.array([[[0.0, -1.0], [1.0, 0.0]]]))
        >>> {name: turn.measures()[name].round(9).item() for name in ("symmetry", "trace_share", "effective_rank")}
        {'symmetry': -1.0, 'trace_share': 0.0, 'effective_rank': 2.0}
        """
        trace = np.einsum("hwc,hwc->h", self.left, self.right)
        norms = {"frobenius": self.frobenius, "spectral": self.singular[:, 0], "max_entry": self.largest_entry}
        return (
            norms
            | ranks_of(self.singular, self.left.shape[1])
            | symmetry_of(self.trace_of_square, self.frobenius)
            | {"directionality": directionality(*self.norms)}
            | signature(self.symmetric_eigenvalues, self.left.shape[1])
            | {"trace_share": ratio(trace, self.singular.sum(axis=-1))}
        )

    @cached_property
    def singular(self) -> Floats:
        """Singular values, falling. Shape (head, channel)."""
        return self._decomposed[1]

    @cached_property
    def frobenius(self) -> Floats:
        """|M|_F. Shape (head,)."""
        return np.sqrt(np.einsum("hc,hc->h", self.singular, self.singular))

    def directions(self, rank: int) -> tuple[Floats, Floats]:
        """The first left and right singular vectors, twice (head, width, rank), by falling singular value.

        Those past the numerical rank are zero. A pair's common sign is free: the left vector's largest entry in size
        is positive.
        """
        inner, singular, outer = self._decomposed
        left, right = self._left[0] @ inner[..., :rank], self._right[0] @ outer[..., :rank]
        largest = np.take_along_axis(left, np.abs(left).argmax(axis=1)[:, None], axis=1)
        there = singular[:, :rank] > self.left.shape[1] * FLOAT32_EPSILON * singular[:, :1]
        signs = np.where(largest < 0, -1.0, 1.0) * there[:, None]
        return left * signs, right * signs

    @cached_property
    def trace_of_square(self) -> Floats:
        """tr(M^2) = tr((B^T A)^2). Shape (head,)."""
        return np.einsum("hcd,hdc->h", self.mixed, self.mixed)

    @cached_property
    def mixed(self) -> Floats:
        """B^T A, whose eigenvalues are those of M but for zeros. Shape (head, channel, channel)."""
        return self.right.transpose(0, 2, 1) @ self.left

    @cached_property
    def norms(self) -> tuple[Floats, Floats]:
        """Euclidean norms of the rows and of the columns of M, both (head, width)."""
        rows = self.left @ self._right[1].transpose(0, 2, 1)
        columns = self.right @ self._left[1].transpose(0, 2, 1)
        return np.sqrt(np.einsum("hwc,hwc->hw", rows, rows)), np.sqrt(np.einsum("hwc,hwc->hw", columns, columns))

    @cached_property
    def symmetric_eigenvalues(self) -> Floats:
        """Eigenvalues of (M + M^T) / 2 but for zeros (more of which may stand among them), rising.

        Shape (head, 2 channel). Exact to 1e-8 of the largest, far below the signature's tolerance.
        """
        # In an orthonormal basis whose first half is Q_A, by the angles between both factors' spaces:
        # A is (R_A, 0), and B is (Q_A^T Q_B R_B, sin V^T R_B), where Q_A^T Q_B = U cos V^T.
        (first, left), (second, right) = self._left, self._right
        overlap = first.transpose(0, 2, 1) @ second
        _, cosines, turned = np.linalg.svd(overlap)
        sines = np.sqrt(np.clip(1.0 - cosines**2, 0.0, 1.0))
        outer = np.concatenate([overlap @ right, sines[..., None] * (turned @ right)], axis=1)
        half = np.concatenate([left, np.zeros_like(left)], axis=1) @ outer.transpose(0, 2, 1)
        return np.linalg.eigvalsh((half + half.transpose(0, 2, 1)) / 2)

    @cached_property
    def largest_entry(self) -> Floats:
        """Largest |M_ij|, from blocks of rows. Shape (head,)."""
        return np.array([_largest_entry(left, right) for left, right in zip(self.left, self.right, strict=True)])

    @cached_property
    def _left(self) -> tuple[Floats, Floats]:
        return np.linalg.qr(self.left)

    @cached_property
    def _right(self) -> tuple[Floats, Floats]:
        return np.linalg.qr(self.right)

    @cached_property
    def _decomposed(self) -> tuple[Floats, Floats, Floats]:
        """U, sigma and V of the cores R_A R_B^T = U diag(sigma) V^T."""
        inner, singular, outer = np.linalg.svd(self._left[1] @ self._right[1].transpose(0, 2, 1))
        return inner, singular, outer.transpose(0, 2, 1)


def _largest_entry(left: Floats, right: Floats) -> float:
    rows = max(1, SLAB_BYTES // (8 * len(right)))
    blocks = (left[start : start + rows] @ right.T for start in range(0, len(left), rows))
    return max(float(max(block.max(), -block.min())) for block in blocks)


def ranks_of(singular: Floats, width: int) -> dict[str, Floats]:
    """Effective, stable and numerical rank by singular values (..., value), each (...).

    >>> {name: value.item() for name, value in ranks_of(np.array([[2.0, 2.0, 0.0]]), 3).items()}
    {'effective_rank': 2.0, 'stable_rank': 2.0, 'numerical_rank': 2.0}
    """
    return {
        "effective_rank": effective_rank(singular),
        "stable_rank": stable_rank(singular),
        "numerical_rank": numerical_rank(singular, width),
    }


def symmetry_of(trace_of_square: Floats, frobenius: Floats) -> dict[str, Floats]:
    """Symmetry tr(M^2) / |M|_F^2, from -1 to 1, and the shares of the symmetric and antisymmetric part of |M|_F^2.

    |(M + M^T) / 2|_F^2 = (|M|_F^2 + tr(M^2)) / 2, and with a minus sign that of the antisymmetric part.

    >>> {name: value.item() for name, value in symmetry_of(np.array([3.0]), np.array([2.0])).items()}
    {'symmetric_share': 0.875, 'antisymmetric_share': 0.125, 'symmetry': 0.75}
    """
    symmetry = np.clip(ratio(trace_of_square, frobenius**2), -1.0, 1.0)
    return {"symmetric_share": (1 + symmetry) / 2, "antisymmetric_share": (1 - symmetry) / 2, "symmetry": symmetry}


def directionality(rows: Floats, columns: Floats) -> Floats:
    """How far outlying norms are those of rows (to 1) or of columns (to -1); 0 without outliers of either.

    The norms of rows and columns (..., width) to (...). An outlier exceeds mean + 2 standard deviations (n - 1) of its
    kind, E is the sum of what exceeds it: (E_rows - E_columns) / (E_rows + E_columns), the sign as published by
    Saponati et al. (arXiv 2502.10927), whose code computes the negative of it.

    >>> directionality(np.array([9.0] + [1.0] * 9), np.array([2.0] * 10)).item()
    1.0
    """
    searching, searched = _excess(rows), _excess(columns)
    together = searching + searched
    return np.where(together > 0, (searching - searched) / np.where(together > 0, together, 1.0), 0.0)


def _excess(norms: Floats) -> Floats:
    mean = norms.mean(axis=-1, keepdims=True)
    over = norms - mean - DEVIATIONS * norms.std(axis=-1, keepdims=True, ddof=1)
    return np.where(over > NOTHING * mean, over, 0.0).sum(axis=-1)


def signature(eigenvalues: Floats, width: int) -> dict[str, Floats]:
    """Numbers of positive and negative eigenvalues (..., value), and the share of the positive ones of sum |lambda|.

    One counts as zero when it is at most width 2^-23 of the largest in size: weights are float32.

    >>> {name: value.item() for name, value in signature(np.array([-1.0, 1e-9, 3.0]), 4).items()}
    {'positive': 1.0, 'negative': 1.0, 'positive_mass': 0.75}
    """
    least = width * FLOAT32_EPSILON * np.abs(eigenvalues).max(axis=-1, keepdims=True)
    above, below = eigenvalues > least, eigenvalues < -least
    plus, minus = ((eigenvalues * where).sum(axis=-1) for where in (above, below))
    counts = {"positive": above.sum(axis=-1).astype(float), "negative": below.sum(axis=-1).astype(float)}
    return counts | {"positive_mass": ratio(plus, plus - minus)}


def copying(mixed: Floats) -> Floats:
    """Sum of the eigenvalues of a form over the sum of their absolute values, -1 to 1; NaN for a zero form.

    Elhage et al. (2021) take it of the whole circuit from token to token; here it is of x -> x A B^T alone, by the
    eigenvalues of B^T A. Shape (head, channel, channel) to (head,).

    >>> copying(np.array([[[2.0, 0.0], [0.0, -1.0]]])).round(6).item()
    0.333333
    """
    sizes = np.abs(np.linalg.eigvals(mixed)).sum(axis=-1)
    return np.clip(ratio(np.trace(mixed, axis1=-2, axis2=-1), sizes), -1.0, 1.0)


def expansion_rates(value: Floats, output: Floats, output_bias: Floats) -> dict[str, Floats]:
    """Root mean square singular values of a whole layer's f on x~ = (x, 1), after Kobayashi et al. (2021).

    `expansion_rate` is |T|_F / sqrt(width + 1) of the T with x~ T = ((x W_V + b_V) W_O + b_O, 1). Their code puts b_O
    as a column, not as the row that it adds, where it meets value channels and depends on the order of heads:
    `expansion_rate_published` does the same, to be compared with the published values.

    Shapes (layer, width + 1, channel) with b_V as the last row, (layer, channel, width) and (layer, width), with as
    many channels in all as the width, to (layer,).

    >>> rates = expansion_rates(np.array([[[2.0], [1.0]]]), np.array([[[3.0]]]), np.array([[4.0]]))
    >>> {name: (2 * rate**2).round(6).item() for name, rate in rates.items()}
    {'expansion_rate': 86.0, 'expansion_rate_published': 134.0}
    """
    inner, column = value @ output, np.einsum("lrc,lc->lr", value, output_bias)
    column[:, -1] += 1.0
    published = np.einsum("lrw,lrw->l", inner, inner) + np.einsum("lr,lr->l", column, column)
    inner[:, -1] += output_bias
    meant = np.einsum("lrw,lrw->l", inner, inner) + 1.0
    scaled = (np.sqrt(squares / value.shape[1]) for squares in (meant, published))
    return dict(zip(("expansion_rate", "expansion_rate_published"), scaled, strict=True))


def principal_cosines(first: Floats, second: Floats) -> Floats:
    """Cosines of the principal angles of subspaces with orthonormal bases (head, width, rank), falling, 0 to 1.

    Columns of zeros span nothing: NaN past the smaller dimension.

    >>> principal_cosines(np.eye(3)[None, :, :2], np.eye(3)[None, :, 1:]).round(12).tolist()
    [[1.0, 0.0]]
    """
    cosines = np.clip(np.linalg.svd(first.transpose(0, 2, 1) @ second, compute_uv=False), 0.0, 1.0)
    there = np.minimum(*(bases.any(axis=1).sum(axis=-1) for bases in (first, second)))
    return np.where(np.arange(cosines.shape[-1]) < there[:, None], cosines, np.nan)
