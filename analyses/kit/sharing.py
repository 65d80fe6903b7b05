"""Keys and queries that all heads share: the CP (PARAFAC) decomposition of a layer's bilinear forms.

T[q, h, k] = sum_c W_Q[h, q, c] W_K[h, k, c] holds every M_h = W_Q W_K^T of a layer. A decomposition of size D writes it
as sum_d A[q, d] B[h, d] C[k, d]: shared queries x A, shared keys x C, and of each head a mixing vector b_h
(collaborative attention: Cordonnier, Loukas and Jaggi 2020, arXiv 2006.16362). T itself is such a sum with D = H dk,
A and C the heads' W_Q and W_K side by side and B ones where a column is a head's own. So what alternating least squares
needs of T are products of thin matrices: width x head x width numbers are never formed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Literal

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from scipy.linalg.lapack import dpstrf

from .analysis import SettingsError
from .captured import together
from .record import HeadWeights
from .subspaces import thin_factors

Floats = NDArray[np.float64]
DAMPING = 1e-12
"""Added to the normal equations of unit columns: what the data leave open stays as it was."""
LARGEST_SEED = 2**32 - 1
"""Of numpy's RandomState, which draws the random start as tensorly does."""
SMALLEST = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class Sharing:
    """How a decomposition is sought: its size D and the settings of alternating least squares."""

    size: int
    iterations: int = 100
    tolerance: float = 1e-6
    initial: Literal["directions", "random"] = "directions"
    seed: int = 0
    solver: Literal["factored", "tensorly"] = "factored"


@dataclass(frozen=True)
class Factors:
    """A: (width, size), B: (head, size), C: (width, size); M_h is A diag(B[h]) C^T."""

    query: Floats
    mixing: Floats
    key: Floats

    @property
    def size(self) -> int:
        """D, the shared key and query dimension."""
        return self.query.shape[1]


@dataclass(frozen=True)
class Shared:
    """A decomposition, the iterations it took, and whether the error's last change fell below the tolerance."""

    factors: Factors
    iterations: int
    converged: bool


@dataclass(frozen=True, eq=False)
class LayerTensor:
    """T of one layer by its thin factors W_Q and W_K, each (head, width, channel). Equal if their numbers are.

    >>> LayerTensor(np.array([[[3.0], [0.0]]]), np.array([[[0.0], [2.0]]])).norms
    array([6.])
    """

    query: Floats
    key: Floats

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerTensor) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> bytes:
        """What tells this layer's weights from any other."""
        parts = (np.ascontiguousarray(part) for part in (self.query, self.key))
        return hashlib.blake2b(b"".join(repr(part.shape).encode() + part.tobytes() for part in parts)).digest()

    @property
    def full(self) -> int:
        """H dk, the size at which heads standing side by side are an exact decomposition."""
        return self.query.shape[0] * self.query.shape[2]

    @cached_property
    def norms(self) -> Floats:
        """|M_h|_F of every head."""
        grams = [part.transpose(0, 2, 1) @ part for part in (self.query, self.key)]
        return np.sqrt(np.maximum((grams[0] * grams[1]).sum(axis=(1, 2)), 0.0))

    @cached_property
    def exact(self) -> Factors:
        """The heads side by side: the decomposition of size H dk that is T itself."""
        mixing = np.repeat(np.eye(len(self.query)), self.query.shape[2], axis=1)
        return Factors(together(self.query)[0], mixing, together(self.key)[0])

    @cached_property
    def directions(self) -> tuple[Factors, Floats]:
        """The singular directions of all M_h, head by head: unit columns, whose they are, singular values (H dk)."""
        bases, triangles = zip(*(np.linalg.qr(part) for part in (self.query, self.key)), strict=True)
        left, values, right = np.linalg.svd(triangles[0] @ triangles[1].transpose(0, 2, 1), full_matrices=False)
        turned = together(bases[0] @ left)[0], together(bases[1] @ right.transpose(0, 2, 1))[0]
        return Factors(turned[0], np.repeat(np.eye(len(values)), values.shape[1], axis=1), turned[1]), values.ravel()

    def common(self, size: int) -> Factors:
        """Singular directions of the heads that say most of all heads together, each head mixing them as fits best.

        Chosen one by one, each for what those before it leave of sigma u v^T (a pivoted Cholesky factorisation of
        their inner products): what heads have in common is chosen once. This project's own start.
        """
        factors, values = self.directions
        products = (factors.query.T @ factors.query) * (factors.key.T @ factors.key)
        chosen = dpstrf(products * np.outer(values, values), lower=1)[1][:size] - 1
        right = (factors.mixing * values) @ products[:, chosen]
        mixing = _solved(right, products[np.ix_(chosen, chosen)], np.zeros_like(right))
        return Factors(factors.query[:, chosen], mixing, factors.key[:, chosen])

    def error_apart(self, size: int) -> float:
        """Relative error of the best decomposition whose every column is one head's own; NaN for a zero tensor.

        It keeps the largest singular values of all M_h: what sharing nothing costs, 0 to 1.
        """
        squares = np.sort(self.directions[1])[::-1] ** 2
        return float(np.sqrt(squares[size:].sum() / squares.sum())) if squares.any() else float("nan")

    def errors(self, factors: Factors) -> Floats:
        """|M_h - A diag(b_h) C^T|_F of every head, entry by entry: exact to rounding, one head at a time in memory."""
        parts = zip(self.query, self.key, factors.mixing, strict=True)
        return np.array([np.linalg.norm(q @ k.T - (factors.query * b) @ factors.key.T) for q, k, b in parts])


def layer_tensors(weights: HeadWeights, layers: Sequence[int], heads: Sequence[int]) -> tuple[LayerTensor, ...]:
    """T of each of the checkpoint's `layers`, every one once, made of some heads alone."""
    factors = [thin_factors(weights, [layer] * len(heads), heads) for layer in dict.fromkeys(layers)]
    return tuple(LayerTensor(letters["Q"], letters["K"]) for letters in factors)


def refuse_no_size(size: int, heads: int, channels: int) -> None:
    """Raise SettingsError for a shared size that heads of so many channels do not have."""
    full = heads * channels
    if not 1 <= size <= full:
        told = f"there is no shared size {size} in {heads} x {channels} channels (heads x channels of each)"
        raise SettingsError(told, f"Choose from 1 to {full}, which is exact.")


@cache
def shared(layer: LayerTensor, how: Sharing) -> Shared:
    """The decomposition of a layer. Found once in a process: the weights ask for it, and texts again.

    Raises SettingsError for a size that is none, and for tensorly where it is missing or fails.
    """
    refuse_no_size(how.size, len(layer.query), layer.query.shape[2])
    if how.size == layer.full:
        return Shared(layer.exact, 0, True)
    start = layer.common(how.size) if how.initial == "directions" else _random(layer, how)
    return (by_tensorly if how.solver == "tensorly" else by_least_squares)(layer, start, how)


def _random(layer: LayerTensor, how: Sharing) -> Factors:
    """Uniform in [0, 1), drawn in the order of tensorly's own random start."""
    draws = np.random.RandomState(how.seed)
    heads, width, _ = layer.query.shape
    return Factors(*(draws.random_sample((rows, how.size)) for rows in (width, heads, width)))


def by_least_squares(layer: LayerTensor, start: Factors, how: Sharing) -> Shared:
    """Alternating least squares from the thin factors: the steps of tensorly's `parafac` at a fraction of the cost.

    It ends when the relative error changes by less than the tolerance, or after the last iteration.
    """
    steps, factors, error = _Steps(layer), start, np.inf
    for iteration in range(1, how.iterations + 1):
        factors, now = steps(factors)
        if abs(error - now) < how.tolerance:
            return Shared(factors, iteration, True)
        error = now
    return Shared(factors, how.iterations, False)


class _Steps:
    """One iteration: A, then B, then C, each the least-squares solution given the other two."""

    def __init__(self, layer: LayerTensor):
        self.own = layer.exact
        self.heads, _, self.channels = layer.query.shape
        self.total = max(float((layer.norms**2).sum()), SMALLEST)

    def __call__(self, factors: Factors) -> tuple[Factors, float]:
        """The next factors, and their relative error (accurate to about 1e-8, since squares are subtracted)."""
        a, b, c = factors.query, factors.mixing, factors.key
        on_keys, key_gram = self.own.key.T @ c, c.T @ c
        a = _solved(self.own.query @ (self._spread(b) * on_keys), (b.T @ b) * key_gram, a)
        on_queries, query_gram = self.own.query.T @ a, a.T @ a
        own_products = (on_queries * on_keys).reshape(self.heads, self.channels, -1).sum(axis=1)
        b = _solved(own_products, query_gram * key_gram, b)
        right, gram = self.own.key @ (self._spread(b) * on_queries), query_gram * (b.T @ b)
        c = _solved(right, gram, c)
        squares = self.total + (gram * (c.T @ c)).sum() - 2 * (right * c).sum()
        return Factors(a, b, c), float(np.sqrt(abs(squares) / self.total))

    def _spread(self, mixing: Floats) -> Floats:
        """Every head's mixing vector, once for each of its channels."""
        return np.repeat(mixing, self.channels, axis=0)


def _solved(right: Floats, gram: Floats, before: Floats) -> Floats:
    """X with X gram = right, nearest to `before` where that leaves X open."""
    scale = np.sqrt(np.diag(gram))
    scale[scale == 0] = 1.0
    damped = gram / np.outer(scale, scale) + DAMPING * np.eye(len(gram))
    factor = scipy.linalg.cho_factor(damped, overwrite_a=True, check_finite=False)
    known = right / scale + DAMPING * before * scale
    solution: Floats = scipy.linalg.cho_solve(factor, known.T, check_finite=False).T / scale
    return solution


def by_tensorly(layer: LayerTensor, start: Factors, how: Sharing) -> Shared:
    """The same by tensorly's `parafac` on the dense tensor, as the published code does.

    Raises SettingsError without tensorly, and where its normal equations are singular.
    """
    refuse_missing_tensorly()
    from tensorly.decomposition import parafac

    dense = np.einsum("hqc,hkc->qhk", layer.query, layer.key, optimize=True)
    errors: list[float] = []
    initial = (np.ones(how.size), [start.query, start.mixing, start.key])
    try:
        found = parafac(
            dense,
            how.size,
            n_iter_max=how.iterations,
            init=initial,
            tol=max(how.tolerance, SMALLEST),  # with 0 it would call back an error that it has not computed
            callback=lambda _, error: errors.append(float(error)),
        )
    except np.linalg.LinAlgError:
        told = f"tensorly finds no decomposition of size {how.size}: its equations are singular"
        raise SettingsError(told, "Leave --solver out.") from None
    return Shared(Factors(*found.factors), len(errors) - 1, _settled(errors, how.tolerance))


def _settled(errors: Sequence[float], tolerance: float) -> bool:
    """Whether the last of the errors, of which the first is that of the start, changed less than the tolerance."""
    return len(errors) > 2 and abs(errors[-2] - errors[-1]) < tolerance


def refuse_missing_tensorly() -> None:
    """Raise SettingsError where tensorly, which is an extra, is not installed."""
    if find_spec("tensorly") is None:
        raise SettingsError("--solver tensorly needs tensorly", "Install it: pip install 'bertgeo[tensor]'.")
