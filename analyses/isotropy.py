"""How evenly token vectors fill their space over depth, and how much a word's vectors depend on its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .kit.accumulators import Counts, Moments, Totals
from .kit.analysis import ALL, Analysis, Selection, State, setting
from .kit.clouds import KEYS, Cloud, clouds_of, outlier_table, spectrum_table
from .kit.covariance import Covariance
from .kit.isotropy_metrics import SPECTRUM, random_pair_cosine, spectrum_values, two_nn
from .kit.kept import Piece, pieces
from .kit.maths import between_texts_cosine, direction_sums, lengths, paired_cosines
from .kit.record import ForwardRecord, HeadWeights, ModelShape
from .kit.result import Figure, Lines, Result, Series, Table
from .kit.token_covariance import TokenCovariance
from .kit.vector_sample import Keys, VectorSample, hashed, text_keys, token_keys

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
CONTEXTS = 8
"""Occurrences of a word that are kept: at most 28 pairs."""

COUNTS = {
    "texts": "texts measured",
    "tokens": "token vectors in the covariance and in the exact cosines",
    "dimension_count": "dimensions that are left",
    "sampled": "texts of the sample, a token each, behind random_pair_cosine and intra_similarity",
    "words": "sampled words with two occurrences or more, behind self_similarity",
    "two_nn_points": "different vectors of the sampled tokens, behind two_nn",
}
COSINES = {
    "random_pair_cosine": "mean cosine over all pairs of the sampled tokens, each of another text: the baseline "
    "(anisotropy, Ethayarajh 2019), -1 to 1",
    "between_texts_cosine": "the same over all pairs of tokens of different texts of the whole corpus, exact; for all "
    "dimensions",
    "intra_similarity": "mean cosine of a sampled token with the mean vector of its text (intra-sentence similarity), "
    "-1 to 1",
    "intra_similarity_adjusted": "intra_similarity - random_pair_cosine",
    "intra_similarity_exact": "mean over all texts of the mean cosine of their tokens with their mean vector; for all "
    "dimensions",
    "self_similarity": f"mean over words of the mean cosine of up to {CONTEXTS} occurrences (pairs), -1 to 1",
    "self_similarity_adjusted": "self_similarity - random_pair_cosine",
}
TWO_NN = {
    "two_nn": "intrinsic dimension of the sampled tokens by their two nearest neighbours (TwoNN, Facco et al. 2017), "
    "duplicates dropped; it supposes even density as far as the second neighbour; too low where dimension is high",
    "two_nn_half": "the same from every second point: far from two_nn, neither is a dimension at this scale",
}


@dataclass
class IsotropyState(State):
    """Sums over all tokens, and vectors of some. `intra` has the axes (depth, value), `squares` (depth, value)."""

    covariance: TokenCovariance
    directions: Totals
    squares: Totals
    intra: Moments
    pairs: VectorSample
    words: VectorSample
    counts: Counts
    depths: tuple[int, ...]


@dataclass(frozen=True)
class Isotropy(Analysis[IsotropyState]):
    """How evenly token vectors fill their space over depth: anisotropy, self-similarity, spectrum, dimension.

    Cosines as in Ethayarajh 2019, raw and less the baseline of random pairs: of tokens of different texts, of a token
    with its text's mean vector, of a word (an entry of the vocabulary, none special) in different contexts. From the
    covariance of all tokens: share of the first component, IsoScore (Rudman et al. 2022), participation ratio,
    effective rank. TwoNN dimension (Facco et al. 2017). All also without outlier dimensions, by this project's own
    definition those whose |mean| or variance over tokens lies more than k standard deviations above its mean over
    dimensions. Samples are drawn by hash: neither the texts' order nor any cut of the corpus matters.

    The covariances take depths x width^2 x 8 bytes (BERT-base 61 MB, MiniLM 8 MB), the samples at most depths x width
    x 4 bytes x (2 x pairs + 8 x words) (BERT-base 160 MB, MiniLM 43 MB). --no-spectrum does without covariances.

    Example: bertgeo isotropy --special drop
    """

    layers: Selection = setting(
        ALL, "Layers, from 0: all, or such as 0,3-5,-1. Layer l leads from depth l to depth l + 1."
    )
    special: Literal["keep", "drop"] = setting("keep", "Special tokens: keep them, or drop them.")
    spectrum: bool = setting(
        True, "Keep covariances. Without them there is no spectrum and no rank, and little memory is needed."
    )
    outliers: int = setting(3, "k: standard deviations beyond which a dimension is an outlier.", least=1)
    pairs: int = setting(1000, "Texts of which a token each is sampled for random pairs and TwoNN.", least=2)
    words: int = setting(500, "Words of the vocabulary that are sampled for self-similarity.", least=1)
    seed: int = setting(0, "Seed of the samples' hash.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"hidden_states"})

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> IsotropyState:
        layers = self.layers.resolve(shape.layers, "layer")
        depths = tuple(sorted({depth for layer in layers for depth in (layer, layer + 1)}))
        count, width = len(depths), shape.width
        cells = (count, width) if self.spectrum else (count * width, 1)
        return IsotropyState(
            TokenCovariance(Covariance.empty(*cells)),
            Totals.empty(count, width),
            Totals.empty(count, 3),
            Moments.empty(count),
            VectorSample.empty(1, self.pairs, (count, 2, width), identity=2),
            VectorSample.empty(self.words, CONTEXTS, (count, width), identity=3),
            Counts(),
            depths,
        )

    def update(self, state: IsotropyState, record: ForwardRecord) -> None:
        for piece in pieces(record, special=self.special == "keep"):
            state.counts.add([len(piece.kept)] * len(piece))
            if len(piece.kept):
                states = [piece.recorded("hidden_states", depth) for depth in state.depths]
                state.covariance.add([tokens.reshape(-1, tokens.shape[-1]) for tokens in states])
                means = _add_cosines(state, piece)
                keys = token_keys(record.texts[piece.texts], piece.kept, self.seed)
                self._sample_tokens(state, piece, keys, means)
                self._sample_words(state, piece, keys)

    def _sample_tokens(self, state: IsotropyState, piece: Piece, keys: Keys, means: Floats) -> None:
        """Offer one token of every text, that of smallest hash, with the text's mean vector beside it."""
        own = np.insert(text_keys(piece.record.texts[piece.texts], self.seed), 0, 0, axis=-1)
        texts = np.flatnonzero(state.pairs.wanted(own))
        places = texts + piece.texts.start, piece.kept[keys[texts, :, 0].argmin(axis=-1)]
        tokens = piece.record.of_tokens("hidden_states", *places, state.depths)
        # What was recorded in float32 is kept in float32.
        state.pairs.add(own[texts], np.stack([tokens, means[texts].astype(tokens.dtype)], axis=2))

    def _sample_words(self, state: IsotropyState, piece: Piece, keys: Keys) -> None:
        """Offer every token but the special ones as an occurrence of its word."""
        texts = piece.record.texts[piece.texts]
        words = np.array([[hashed(text.tokens[at], self.seed) for at in piece.kept] for text in texts], np.uint64)
        rows = np.concatenate([words[..., None], keys], axis=-1)
        ordinary = ~np.array([text.special for text in texts])[:, piece.kept]
        chosen, tokens = np.nonzero(ordinary & state.words.wanted(rows))
        places = chosen + piece.texts.start, piece.kept[tokens]
        state.words.add(rows[chosen, tokens], piece.record.of_tokens("hidden_states", *places, state.depths))

    def finalize(self, state: IsotropyState, record: ForwardRecord | None) -> Result:
        sums = state.covariance.whole()
        clouds = list(clouds_of(sums, state.depths, self.outliers))
        table = _table(state, clouds, sums.count)
        tables = [table, outlier_table(clouds)]
        if self.spectrum:
            tables.append(spectrum_table(clouds))
        headline = Table("isotropy-depth", "Isotropy over depth", table.frame[_shown(table)], table.columns)
        note = _baseline(state, self.seed)
        return Result(headline, tuple(tables), _figures(table, clouds, note, self._about()), (note,))

    def _about(self) -> str:
        """What a reader of the figure must know."""
        kept = "kept" if self.special == "keep" else "dropped"
        outlier = f"|mean| or variance beyond mean + {self.outliers} standard deviations over dimensions"
        return f"Special tokens {kept}. Outliers: dimensions with {outlier}. Depth 0 is the first layer's input."


def _add_cosines(state: IsotropyState, piece: Piece) -> Floats:
    """Add every text's sum of unit vectors and its mean cosine with its mean vector: (text, depth, width)."""
    found = [_directions(piece.vectors("hidden_states", depths)) for depths in piece.layer_runs(state.depths)]
    sums, n, means = (np.concatenate(parts).swapaxes(0, 1) for parts in zip(*found, strict=True))
    squares = np.stack([n, n**2, (sums**2).sum(axis=-1)], axis=-1)
    for own, of_own in zip(sums, squares, strict=True):
        state.directions.add(own)
        state.squares.add(of_own)
    length = lengths(means)
    there = (n > 0) & (length > 0)
    cosine = np.einsum("tdw,tdw->td", sums, means) / np.where(there, n * length, 1.0)
    state.intra.add(np.where(there, np.clip(cosine, -1.0, 1.0), np.nan))
    return means


def _directions(vectors: Floats) -> tuple[Floats, Floats, Floats]:
    """Sum of unit vectors (depth, text, width), their number (depth, text), as zero vectors have none, mean vector."""
    sums, n = direction_sums(vectors, lengths(vectors), np.ones((1, vectors.shape[2])))
    return sums[..., 0, :], n[..., 0], np.einsum("dtkw->dtw", vectors) / vectors.shape[2]


def _table(state: IsotropyState, clouds: list[Cloud], tokens: int) -> Table:
    exact = between_texts_cosine((state.directions.values**2).sum(axis=-1), *state.squares.values.T)[0]
    pairs, words = state.pairs.settled(), state.words.settled()
    rows = []
    for cloud in clouds:
        at, whole = state.depths.index(cloud.depth), cloud.dimensions == "all"
        row = {"depth": cloud.depth, "dimensions": cloud.dimensions, "texts": state.counts.texts, "tokens": tokens}
        row |= {"dimension_count": int(cloud.left.sum()), "sampled": len(pairs.keys)}
        row |= _cosines(pairs, words, at, cloud.left)
        row["between_texts_cosine"] = exact[at] if whole else np.nan
        row["intra_similarity_exact"] = state.intra.mean[at] if whole else np.nan
        if len(cloud.variances):
            row |= dict(zip(SPECTRUM, spectrum_values(cloud.variances).tolist(), strict=True))
        rows.append(row | _dimension(pairs.vectors[:, at, 0][:, cloud.left]))
    spectrum = SPECTRUM if any(len(cloud.variances) for cloud in clouds) else {}
    columns = KEYS | COUNTS | COSINES | dict(spectrum) | TWO_NN
    frame = pd.DataFrame(rows)[list(columns)]
    floats = dict.fromkeys([*COSINES, *spectrum, *TWO_NN], float)
    return Table("isotropy", "Isotropy by depth", frame.astype(floats), columns, tuple(COUNTS))


def _cosines(pairs: VectorSample, words: VectorSample, at: int, left: Flags) -> dict[str, float]:
    """Cosines of the samples at one depth in some dimensions, raw and less the baseline."""
    tokens, means = (pairs.vectors[:, at, which][:, left].astype(float) for which in (0, 1))
    baseline = random_pair_cosine(tokens)
    cosines = paired_cosines(tokens, means)
    intra = float(np.nanmean(cosines)) if np.isfinite(cosines).any() else np.nan
    own, count = _self_similarity(words, at, left)
    return {
        "random_pair_cosine": baseline,
        "intra_similarity": intra,
        "intra_similarity_adjusted": intra - baseline,
        "self_similarity": own,
        "self_similarity_adjusted": own - baseline,
        "words": count,
    }


def _self_similarity(words: VectorSample, at: int, left: Flags) -> tuple[float, int]:
    """Mean over words of the mean cosine of their occurrences, and how many words have two."""
    vectors = words.vectors[:, at][:, left].astype(float)
    starts = np.flatnonzero(np.diff(words.keys[:, 0], prepend=words.keys[:1, 0] + np.uint64(1)))
    found = [random_pair_cosine(own) for own in np.split(vectors, starts[1:])]
    known = [value for value in found if np.isfinite(value)]
    return (float(np.mean(known)) if known else np.nan), len(known)


def _dimension(vectors: Floats) -> dict[str, float]:
    points, first = np.unique(vectors, axis=0, return_index=True)
    points = points[np.argsort(first)].astype(float)  # in the order of their hashes
    return {"two_nn": two_nn(points), "two_nn_half": two_nn(points[::2]), "two_nn_points": len(points)}


def _shown(table: Table) -> list[str]:
    usual = ["random_pair_cosine", "intra_similarity_adjusted", "self_similarity_adjusted", "isoscore", "two_nn"]
    return ["depth", "dimensions", *(name for name in usual if name in table.frame)]


def _baseline(state: IsotropyState, seed: int) -> str:
    sampled = len(state.pairs.settled().keys)
    if sampled < 2:
        return "No random pairs: they take two texts, so there is no baseline."
    pairs = f"{sampled * (sampled - 1) // 2} pairs of {sampled} tokens"
    return f"Random pairs: all {pairs}, each of another text, drawn by hash with seed {seed}."


LABELS = {"all": "all dimensions", "without_outliers": "without outliers"}
CURVES = {"random_pair_cosine": "random pairs", "intra_similarity": "own text's mean", "self_similarity": "same word"}
PANELS = {
    "isoscore": ("IsoScore", "IsoScore"),
    "first_component": ("First principal component", "share of the variance"),
    "effective_rank": ("Effective rank of the covariance", "rank"),
    "two_nn": ("Intrinsic dimension of sampled tokens", "dimension (TwoNN)"),
}


def _figures(table: Table, clouds: Sequence[Cloud], baseline: str, note: str) -> tuple[Figure, ...]:
    lowest = min(0.0, *table.frame[list(CURVES)].fillna(0.0).min())
    cosines = tuple(
        Lines(
            tuple(_curve(table, name, dimensions, curve) for name, curve in CURVES.items()),
            "depth",
            "mean cosine",
            label.capitalize(),
            low=lowest,
            high=1.0,
        )
        for dimensions, label in LABELS.items()
    )
    even = tuple(
        Lines(tuple(_curve(table, name, *item) for item in LABELS.items()), "depth", unit, title, low=0.0)
        for name, (title, unit) in PANELS.items()
        if name in table.frame
    )
    title = "How evenly token vectors fill their space"
    figures = [
        Figure("isotropy-cosines", "Token vectors and their contexts", cosines, 2, f"{baseline} {note}"),
        Figure("isotropy", title, even, min(len(even), 2), note),
    ]
    if len(even) == len(PANELS):
        figures.append(Figure("isotropy-spectrum", "Spectrum of the covariance", (_cumulative(clouds),), note=note))
    return tuple(figures)


def _curve(table: Table, name: str, dimensions: str, label: str) -> Series:
    rows = table.frame[table.frame["dimensions"] == dimensions]
    dashed = label == LABELS["without_outliers"]
    return Series(label, rows["depth"].to_numpy(float), rows[name].to_numpy(), dashed=dashed)


def _cumulative(clouds: Sequence[Cloud]) -> Lines:
    """Share of the variance that the first components hold, with all dimensions."""
    series = []
    for cloud in clouds:
        if cloud.dimensions == "all" and cloud.variances.any():
            held = cloud.variances[::-1].cumsum() / cloud.variances.sum()
            series.append(Series(f"depth {cloud.depth}", np.arange(1.0, len(held) + 1), held))
    unit, title = "share of the variance", "Variance of the first components, all dimensions"
    return Lines(tuple(series), "components", unit, title, low=0.0)
