"""Pure formulas on arrays with named axes: each with its shape, its bounds and a worked example."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SMALLEST = float(np.finfo(np.float64).tiny)
K90_SLACK = 1e-6
"""Nine times 0.1 in floating point is below 0.9."""


def ratio(part: Floats, whole: Floats) -> Floats:
    """part / whole, NaN where the whole is 0.

    >>> ratio(np.array([1.0, 0.0]), np.array([4.0, 0.0])).tolist()
    [0.25, nan]
    """
    there = whole != 0
    return np.where(there, part / np.where(there, whole, 1.0), np.nan)


def as_slice(places: NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """Neighbouring places as a slice, which selects without a copy; others as they are.

    >>> as_slice(np.array([1, 2, 3])), as_slice(np.array([1, 3])).tolist()
    (slice(1, 4, None), [1, 3])
    """
    neighbours = len(places) > 0 and bool((np.diff(places) == 1).all())
    return slice(int(places[0]), int(places[-1]) + 1) if neighbours else places


def chosen(values: NDArray[Any], places: NDArray[np.intp], axis: int) -> NDArray[Any]:
    """Values at some places of an axis, counted from the last: neighbours without a copy, others in order in memory.

    An index of places may leave another order, and then later sums would depend on how many are taken side by side.

    >>> chosen(np.array([[1.0, 2.0, 3.0]]), np.array([0, 2]), axis=-1).tolist()
    [[1.0, 3.0]]
    """
    found = as_slice(places)
    if isinstance(found, slice):
        index: tuple[Any, ...] = (..., found, *[slice(None)] * (-axis - 1))
        return values[index]
    return values.take(found, axis=axis)


def normalised_rows(weights: Floats) -> Floats:
    """Rows divided by their sum; rows that sum to 0 stay 0.

    Shape (..., key). A recorded float32 row sums to 1 within 1e-6: this makes it a distribution in float64.

    >>> normalised_rows(np.array([[1.0, 3.0], [0.0, 0.0]])).tolist()
    [[0.25, 0.75], [0.0, 0.0]]
    """
    rows = torch.from_numpy(weights)  # short rows cost NumPy twice as much, here and below
    return (rows / rows.sum(dim=-1, keepdim=True).clamp_min_(SMALLEST)).numpy()


def entropy(weights: Floats) -> Floats:
    """-sum p ln p of every row in nats, with 0 ln 0 = 0; from 0 to ln(keys) for rows that sum to 1.

    Shape (..., key) to (...). Never -0.0; NaN for rows with NaN.

    >>> entropy(np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])).round(6).tolist()
    [0.0, 0.693147]
    """
    rows = torch.from_numpy(weights)
    value: Floats = rows.clamp_min(SMALLEST).log_().mul_(rows).sum(dim=-1).neg_().clamp_min_(0.0).add_(0.0).numpy()
    bound = np.log(max(weights.shape[-1], 1))
    over = value > bound
    if over.any():
        # Rounding may carry a uniform row above its bound; a row that is no distribution may truly lie there.
        rounded = np.abs(weights[over].sum(axis=-1) - 1) < 1e-9
        value[over] = np.where(rounded, bound, value[over])
    return value


def entropy_of_shares(weights: Floats) -> Floats:
    """The entropy of every row divided by its sum W, ln W - sum w ln w / W in nats; 0 for rows that sum to 0.

    Shape (..., key) to (...); from 0 to ln(keys). The shares themselves are never formed; NaN for rows with NaN.

    >>> entropy_of_shares(np.array([[2.0, 2.0, 0.0], [0.0, 0.3, 0.0], [0.0, 0.0, 0.0]])).round(6).tolist()
    [0.693147, 0.0, 0.0]
    """
    rows = torch.from_numpy(weights)
    total = rows.sum(dim=-1).clamp_min_(SMALLEST)
    with np.errstate(invalid="ignore"):  # of a weight of 0, rare in a softmax
        inner = np.vecdot(rows.log().numpy(), weights)
    if np.isnan(inner.sum()):
        inner = np.vecdot(rows.clamp_min(SMALLEST).log_().numpy(), weights)
    value = total.log().sub_(torch.from_numpy(inner).div_(total))
    return value.clamp_(0.0, np.log(max(weights.shape[-1], 1))).add_(0.0).numpy()


def keys_to_reach(weights: Floats, share: float = 0.9) -> Floats:
    """Least number of keys whose cumulated weight reaches `share` - 1e-6; NaN for rows that never do.

    Shape (..., key) to (...); from 1 to the number of keys.

    >>> keys_to_reach(np.array([[0.1] * 10, [0.95] + [0.05 / 9] * 9])).tolist()
    [9.0, 1.0]
    """
    if weights.shape[-1] == 0:
        return np.full(weights.shape[:-1], np.nan)
    # Negated, so that the largest come first; NumPy's temporaries would cost as much as the sorting.
    cumulated = np.negative(weights)
    cumulated.sort(axis=-1)
    np.cumsum(cumulated, axis=-1, out=cumulated)
    reached = cumulated <= K90_SLACK - share
    return np.where(reached[..., -1], 1.0 + reached.argmax(axis=-1), np.nan)


def mean_of_rows(values: Floats) -> Floats:
    """Mean over the last axis of what is not NaN; NaN when nothing is left. Never beyond the extremes it averages.

    Shape (..., row) to (...).

    >>> mean_of_rows(np.array([[1.0, 2.0, np.nan], [np.nan, np.nan, np.nan]])).tolist()
    [1.5, nan]
    """
    if values.shape[-1] == 1:
        return values[..., 0]
    rows = torch.from_numpy(values)
    if values.size and not (whole := rows.mean(dim=-1)).sum().isnan():
        return whole.clamp(rows.amin(dim=-1), rows.amax(dim=-1)).numpy()
    seen = ~np.isnan(values)
    count = seen.sum(axis=-1)
    known, low, high = (np.where(seen, values, absent) for absent in (0.0, np.inf, -np.inf))
    mean = torch.from_numpy(known).sum(dim=-1).numpy() / np.maximum(count, 1)  # the bits of the mean above
    least, most = low.min(axis=-1, initial=np.inf), high.max(axis=-1, initial=-np.inf)
    return np.where(count > 0, np.minimum(np.maximum(mean, least), most), np.nan)


def mean_distance(weights: Floats, positions: Sequence[int]) -> Floats:
    """Mean distance sum_j A_ij |i - j| of every row in tokens, with i and j the given positions.

    Shape (..., query, key) to (..., query).

    >>> mean_distance(np.array([[0.5, 0.5], [0.0, 1.0]]), [0, 1]).tolist()
    [0.5, 0.0]
    """
    at = np.asarray(positions)
    return np.einsum("...qk,qk->...q", weights, np.abs(at[:, None] - at[None, :]).astype(float))


def direction_sums(vectors: Floats, lengths: Floats, chosen: Floats) -> tuple[Floats, Floats]:
    """Sums of unit vectors over some choices of tokens, and how many vectors each adds: zero vectors have no direction.

    Shapes (..., token, width), (..., token) and (..., choice, token), which holds 0 and 1, to (..., choice, width) and
    (..., choice). The unit vectors themselves are never formed: one product with 1 / length serves all choices.

    >>> vectors = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 2.0]])
    >>> sums, count = direction_sums(vectors, lengths(vectors), np.array([[1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]))
    >>> sums.round(6).tolist(), count.tolist()
    ([[0.6, 1.8], [0.0, 1.0]], [2.0, 1.0])
    """
    there = lengths > 0
    scales = there / np.where(there, lengths, 1.0)
    return (chosen * scales[..., None, :]) @ vectors, (chosen * there[..., None, :]).sum(axis=-1)


def lengths(vectors: Floats) -> Floats:
    """Euclidean lengths; the squares of what was recorded in float32 neither over- nor underflow in float64.

    Shape (..., width) to (...).

    >>> lengths(np.array([3.0, 4.0])).item()
    5.0
    """
    return np.sqrt(np.vecdot(vectors, vectors))


def paired_cosines(first: Floats, second: Floats) -> Floats:
    """Cosine of every vector with its counterpart, -1 to 1, exactly 1 for equal ones; NaN where one is zero.

    Shapes (..., width) twice to (...).

    >>> paired_cosines(np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[4.0, 3.0], [1.0, 0.0]])).tolist()
    [0.96, nan]
    """
    inner, own, other = (np.vecdot(*pair) for pair in ((first, second), (first,) * 2, (second,) * 2))
    # The root of the product, not the product of roots: it is exact where both are the same number.
    scale = np.sqrt(own * other)
    return np.clip(ratio(inner, scale), -1.0, 1.0)


def mean_cosine(cone_index: Floats, count: Floats) -> Floats:
    """Mean cosine over ordered pairs of different tokens, (I^2 - n) / (n (n - 1)); NaN below two tokens.

    From -1 / (n - 1) to 1.

    >>> mean_cosine(np.array([2.0]), np.array([2.0])).tolist()
    [1.0]
    """
    pairs = count * (count - 1)
    return ratio(cone_index**2 - count, pairs)


def between_texts_cosine(total: Floats, n: Floats, squares: Floats, cones: Floats) -> tuple[Floats, Floats]:
    """Mean cosine of tokens of different texts over all such pairs, and the number of those (unordered) pairs.

    (|S|^2 - sum_t I_t^2) / (N^2 - sum_t n_t^2), with S the sum of all unit vectors: exact, where sampling pairs
    (Ethayarajh 2019) only estimates it. `total` is |S|^2, `n` N, `squares` sum n_t^2 and `cones` sum I_t^2, all (...).
    NaN where all tokens stand in one text.

    >>> [part.item() for part in between_texts_cosine(*map(np.array, (2.0, 2.0, 2.0, 2.0)))]
    [0.0, 1.0]
    """
    pairs = n**2 - squares
    many = pairs > 0.5
    return np.where(many, (total - cones) / np.where(many, pairs, 1.0), np.nan), np.where(many, pairs / 2, 0.0)


@lru_cache(maxsize=2**15)
def is_punctuation(text: str) -> bool:
    """Whether a token's original text consists of characters of Unicode category P.

    >>> is_punctuation("..."), is_punctuation("$5")
    (True, False)
    """
    return bool(text) and all(unicodedata.category(character).startswith("P") for character in text)


def pool_units(attention: Floats, units: Sequence[int]) -> Floats:
    """Attention between units (words): summed over a unit's keys, averaged over its queries, so rows still sum to 1.

    Shape (..., query, key) to (..., unit, unit); `units` gives each token's unit, counted from 0.

    >>> pool_units(np.array([[0.2, 0.3, 0.5], [0.4, 0.4, 0.2], [1.0, 0.0, 0.0]]), [0, 0, 1]).round(2).tolist()
    [[0.65, 0.35], [1.0, 0.0]]
    """
    member = np.zeros((len(units), max(units, default=-1) + 1))
    member[np.arange(len(units)), list(units)] = 1.0
    return (member / member.sum(axis=0)).T @ attention @ member


def largest_of_rows(ids: NDArray[np.int64], values: Floats, count: int) -> tuple[NDArray[np.int64], Floats]:
    """The `count` largest values of every row with their ids, falling; of equal values the smaller id comes first.

    Shapes (row, item) twice, to (row, count) twice.

    >>> ids, values = largest_of_rows(np.array([[7, 5, 6]]), np.array([[0.5, 0.5, 0.9]]), 2)
    >>> ids.tolist(), values.tolist()
    ([[6, 5]], [[0.9, 0.5]])
    """
    order = np.lexsort((ids, -values), axis=-1)[:, :count]
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)


def largest_magnitudes(values: Floats, count: int) -> tuple[NDArray[np.int64], Floats]:
    """Places and values of the `count` largest absolute values of every row, falling; of equal ones the first stays.

    Shape (row, item) to (row, count) twice; all items where there are fewer.

    >>> places, values = largest_magnitudes(np.array([[0.25, -0.5, 0.25]]), 2)
    >>> places.tolist(), values.tolist()
    ([[1, 0]], [[-0.5, 0.25]])
    """
    rows = torch.from_numpy(values)  # sorting many long rows costs NumPy several times as much
    places = torch.sort(rows.abs(), dim=-1, descending=True, stable=True).indices[:, :count]
    return places.numpy(), rows.gather(-1, places).numpy()


def cosines(products: Floats) -> Floats:
    """Cosines of every two vectors from their inner products, -1 to 1; NaN where one of them is zero.

    Shape (item, item) to the same; on the diagonal stand the squared lengths.

    >>> cosines(np.array([[4.0, 2.0, 0.0], [2.0, 4.0, 0.0], [0.0, 0.0, 0.0]])).tolist()
    [[1.0, 0.5, nan], [0.5, 1.0, nan], [nan, nan, nan]]
    """
    squares = np.diagonal(products)
    scale = np.sqrt(np.multiply.outer(squares, squares))
    return np.clip(ratio(products, scale), -1.0, 1.0)
