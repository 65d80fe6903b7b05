"""How well the vectors of a word's occurrences fall apart by sense, and where they lie on a plane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial, prod
from typing import Self

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.metrics import silhouette_samples
from sklearn.metrics.pairwise import cosine_distances

from .isotropy_metrics import unit_vectors
from .maths import between_texts_cosine, direction_sums, lengths

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


def cosine_distance(vectors: Floats) -> Floats:
    """1 - cosine of every two vectors, by depth, as scikit-learn has it: 1 where one is zero.

    Shape (depth, item, width) to (depth, item, item).

    >>> cosine_distance(np.array([[[1.0, 0.0], [0.0, 2.0]]])).tolist()
    [[[0.0, 1.0], [1.0, 0.0]]]
    """
    return np.stack([cosine_distances(own) for own in vectors])


@dataclass
class Directions:
    """Sums of unit vectors text by text, by depth: the mean cosine between texts is exact without any pair formed.

    >>> seen = Directions.empty(1, 2)
    >>> seen.add(np.array([[[1.0, 0.0], [2.0, 0.0]]]))
    >>> seen.add(np.array([[[0.0, 1.0], [1.0, 0.0]]]))
    >>> seen.between_texts().tolist()
    [0.5]
    """

    sums: Floats
    squares: Floats

    @classmethod
    def empty(cls, depths: int, width: int) -> Self:
        """Nothing seen yet."""
        return cls(np.zeros((depths, width)), np.zeros((3, depths)))

    def add(self, vectors: Floats) -> None:
        """Add the vectors (depth, item, width) of one text."""
        sums, n = (part[:, 0] for part in direction_sums(vectors, lengths(vectors), np.ones((1, vectors.shape[1]))))
        self.sums += sums
        self.squares += np.stack([n, n**2, (sums**2).sum(axis=-1)])

    def between_texts(self) -> Floats:
        """Mean cosine over all pairs of vectors of different texts (depth,); NaN where all are of one text."""
        return between_texts_cosine((self.sums**2).sum(axis=-1), *self.squares)[0]


def self_similarity(vectors: Floats, text_of: Whole) -> Floats:
    """Mean cosine over all pairs of a word's vectors in different texts (Ethayarajh 2019), by depth.

    Shapes (depth, item, width) and (item,) to (depth,); NaN where all are of one text.

    >>> self_similarity(np.array([[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]]), np.array([0, 0, 1])).tolist()
    [0.0]
    """
    seen = Directions.empty(vectors.shape[0], vectors.shape[2])
    for text in np.unique(text_of):
        seen.add(vectors[:, text_of == text])
    return seen.between_texts()


def can_separate(senses: Whole) -> bool:
    """Whether a silhouette is defined: two senses or more, and one of them with two occurrences."""
    return 2 <= len(set(senses.tolist())) < len(senses)


def silhouettes(distances: Floats, senses: Whole) -> Floats:
    """scikit-learn's silhouette of every item, by depth: (b - a) / max(a, b), -1 to 1, with a the mean distance to its
    own sense and b that to the nearest other one; 0 for the only occurrence of a sense.

    Shapes (depth, item, item), (item,) to (depth, item); NaN where `can_separate` says no.
    """
    if not can_separate(senses):
        return np.full(distances.shape[:2], np.nan)
    return np.stack([silhouette_samples(own, senses, metric="precomputed") for own in distances])


def mean_silhouettes(distances: Floats, senses: Whole) -> Floats:
    """The mean of `silhouettes` by depth, all depths at once, for many labellings of the same items.

    >>> distances = np.array([[[0.0, 1.0, 4.0], [1.0, 0.0, 4.0], [4.0, 4.0, 0.0]]])
    >>> mean_silhouettes(distances, np.array([0, 0, 1])).tolist()
    [0.5]
    """
    member = (senses[:, None] == np.unique(senses)).astype(float)
    count, own = member.sum(axis=0), member.astype(bool)
    sums = distances @ member
    mates = np.broadcast_to((own @ count) - 1, sums.shape[:2])
    inside = (sums * own).sum(axis=-1) / np.maximum(mates, 1)
    outside = np.where(own, np.inf, sums / count).min(axis=-1)
    scale = np.maximum(inside, outside)
    values = np.where((mates > 0) & (scale > 0), (outside - inside) / np.where(scale > 0, scale, 1.0), 0.0)
    return values.mean(axis=-1)


def permutation_p(
    distances: Floats, senses: Whole, text_of: Whole, permutations: int, seed: int
) -> tuple[Floats, float]:
    """How rarely senses that are dealt to the texts at random separate as well: by depth, and for the best depth.

    p = (1 + times that the mean silhouette is no smaller) / (1 + permutations). For the best depth the largest value
    over depths is compared with the largest value over depths of every permutation, so that the choice of the depth is
    paid for; depth 0, which has seen no context, is none of them. A text's occurrences keep one sense. NaN where
    `can_separate` says no.
    """
    if not can_separate(senses):
        return np.full(len(distances), np.nan), float("nan")
    _, first, of_item = np.unique(text_of, return_index=True, return_inverse=True)
    dealt, generator = senses[first], np.random.default_rng(seed)
    drawn = np.array(
        [mean_silhouettes(distances, generator.permutation(dealt)[of_item]) for _ in range(permutations)]
    ).reshape(permutations, len(distances))
    own = mean_silhouettes(distances, senses) - 1e-12  # the same labelling may be summed in another order
    as_good = 1 + (drawn >= own).sum(axis=0), 1 + (drawn[:, 1:].max(axis=1, initial=-1.0) >= own[1:].max()).sum()
    return as_good[0] / (1 + permutations), float(as_good[1] / (1 + permutations))


def divisions(senses: Sequence[str]) -> int:
    """In how many different ways as many texts fall into senses of these sizes: 1 / it is the smallest p there is.

    >>> divisions(["river", "money", "river", "money"]), divisions(["river", "river", "money"])
    (3, 3)
    """
    sizes = Counter(senses).values()
    alike = prod(factorial(count) for count in Counter(sizes).values())
    return factorial(len(senses)) // prod(map(factorial, sizes)) // alike


def nearest_sense(distances: Floats, senses: Whole, text_of: Whole) -> Floats:
    """Share of items whose nearest neighbour in another text has their sense, by depth (1-NN, a text left out).

    Shapes (depth, item, item), (item,) twice to (depth,); of equal neighbours the first counts. NaN with one text.
    """
    if len(set(text_of.tolist())) < 2:
        return np.full(len(distances), np.nan)
    apart = np.where(text_of[:, None] == text_of, np.inf, distances)
    return (senses[apart.argmin(axis=-1)] == senses).mean(axis=-1)


def nearest_by_chance(senses: Whole, text_of: Whole) -> float:
    """What `nearest_sense` is on average where the nearest is any item of another text: by chance. NaN with one text.

    >>> nearest_by_chance(np.array([0, 0, 1, 1]), np.arange(4)).__round__(4)
    0.3333
    """
    other = text_of[:, None] != text_of
    alike = (senses[:, None] == senses) & other
    return float((alike.sum(axis=1) / other.sum(axis=1)).mean()) if other.any() else float("nan")


def pair_cosines(distances: Floats, senses: Whole, text_of: Whole) -> tuple[Floats, Floats]:
    """Mean cosine of items of different texts, with the same sense and with another one, by depth; NaN without any."""
    other_text, same = text_of[:, None] != text_of, senses[:, None] == senses
    masks = other_text & same, other_text & ~same
    return tuple(  # type: ignore[return-value]
        1 - distances[:, mask].mean(axis=1) if mask.any() else np.full(len(distances), np.nan) for mask in masks
    )


def two_clusters(vectors: Floats, seed: int) -> Whole:
    """2-means of the directions (item, width), by scikit-learn; the first item is in cluster 0.

    >>> two_clusters(np.array([[0.0, 1.0], [5.0, 0.1], [0.1, 2.0]]), 0).tolist()
    [0, 1, 0]
    """
    units = unit_vectors(vectors)
    if len(units) < len(vectors) or len(np.unique(units, axis=0)) < 2:
        return np.zeros(len(vectors), np.int64)
    found = KMeans(2, n_init=10, random_state=seed % 2**32).fit_predict(units)
    return (found != found[0]).astype(np.int64)


def plane(vectors: Floats) -> tuple[Floats, Floats]:
    """The first two principal components of vectors (item, width): places (item, 2) and shares of the variance (2,).

    Zeros for an axis that is not there, and NaN shares without variance. Signs are scikit-learn's, so always the same.

    >>> places, shares = plane(np.array([[3.0, 0.0], [-3.0, 0.0]]))
    >>> np.abs(places).tolist(), shares.tolist()
    ([[3.0, 0.0], [3.0, 0.0]], [1.0, 0.0])
    """
    places, shares = np.zeros((len(vectors), 2)), np.full(2, np.nan)
    if len(vectors) > 1 and np.ptp(vectors, axis=0).any():
        axes = min(2, *vectors.shape)
        fitted = PCA(axes, svd_solver="full").fit(vectors)
        places[:, :axes] = fitted.transform(vectors)
        shares = np.pad(fitted.explained_variance_ratio_, (0, 2 - axes))
    return places, shares
