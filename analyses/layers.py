"""Depth against depth: how alike the same tokens are at two depths of the stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .kit.accumulators import Counts
from .kit.analysis import ALL, Analysis, Selection, SettingsError, State, setting
from .kit.covariance import linear_cka, principal_bases, shared_directions
from .kit.isotropy_metrics import varies
from .kit.kept import pieces
from .kit.maths import lengths, paired_cosines
from .kit.record import ForwardRecord, HeadWeights, ModelShape
from .kit.result import Figure, Heatmap, Result, Table
from .kit.similarity import debiased_cka, svcca, unbiased_hsic, whitening
from .kit.vector_sample import VectorSample, token_keys

Floats = NDArray[np.float64]
VALUES: Mapping[str, str] = {
    "cka": "linear CKA (Kornblith et al. 2019), 0 to 1; with few tokens high by chance",
    "cka_chance": "the same with the tokens of the other depth exchanged: what chance gives",
    "cka_debiased": "linear CKA of unbiased HSIC (Song et al. 2012; Nguyen et al. 2021): 0 on average for unrelated "
    "depths, at most about 1",
    "svcca": "mean canonical correlation of the directions that hold the chosen share of variance (SVCCA, Raghu et al. "
    "2017), 0 to 1",
    "svcca_chance": "the same with the tokens of the other depth exchanged: what chance gives",
    "principal_cosine": "mean cos^2 of the principal angles of both principal subspaces, 0 to 1",
    "principal_angle": "their largest principal angle in degrees, 0 to 90",
    "token_cosine": "mean cosine of a token at one depth with itself at the other, -1 to 1",
    "other_token_cosine": "mean cosine of a token at one depth with a different token at the other, over all pairs: "
    "the baseline",
}
KEYS = {
    "depth": "0 is the first layer's input, l + 1 the output of layer l",
    "other": "the other depth",
    "texts": "texts measured",
    "tokens": "tokens measured",
    "sampled": "tokens of the sample",
    "svcca_directions": "directions that SVCCA keeps of the depth that keeps fewer",
}
COUNTS = ("texts", "tokens", "sampled", "svcca_directions")


@dataclass
class LayersState(State):
    """Vectors (token, depth, width) of a sample of tokens."""

    sample: VectorSample
    counts: Counts
    depths: tuple[int, ...]


@dataclass(frozen=True)
class Layers(Analysis[LayersState]):
    """Depth against depth: how alike the same tokens are at two depths: CKA, SVCCA, principal angles, cosines.

    Linear CKA, plain (Kornblith et al. 2019) and debiased; SVCCA (Raghu et al. 2017); the principal angles between
    principal subspaces; the mean cosine of a token with itself. Cosines have as baseline that of different tokens; CKA
    and SVCCA the value with tokens exchanged, this project's own. All from a sample of tokens drawn by hash, the same
    under any order and cut of the corpus; a smaller corpus is measured whole.

    The sample takes tokens x depths x width x 4 bytes (MiniLM 44 MB, BERT-base 164 MB), a quarter more while it
    grows, twice as much again in float64 at the end. Nothing else grows with the corpus.

    Example: bertgeo layers --special drop
    """

    layers: Selection = setting(
        ALL, "Layers, from 0: all, or such as 0,3-5,-1. Layer l leads from depth l to depth l + 1."
    )
    special: Literal["keep", "drop"] = setting("keep", "Special tokens: keep them, or drop them.")
    tokens: int = setting(4096, "Tokens of the sample.", least=4)
    variance: int = setting(99, "Percent of the variance that SVCCA keeps, 1 to 100.", least=1)
    principal: int = setting(10, "Dimensions of the principal subspaces.", least=1)
    seed: int = setting(0, "Seed of the sample's hash.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"hidden_states"})

    def listing(self) -> Table | None:
        if self.variance > 100:
            raise SettingsError(f"SVCCA cannot keep {self.variance} % of the variance", "Give --variance 1 to 100.")
        return None

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> LayersState:
        self.listing()
        if self.principal > shape.width:
            raise SettingsError(
                f"hidden states of width {shape.width} have no {self.principal} principal dimensions",
                f"Give --principal 1 to {shape.width}.",
            )
        layers = self.layers.resolve(shape.layers, "layer")
        depths = tuple(sorted({depth for layer in layers for depth in (layer, layer + 1)}))
        sample = VectorSample.empty(1, self.tokens, (len(depths), shape.width), identity=3)
        return LayersState(sample, Counts(), depths)

    def update(self, state: LayersState, record: ForwardRecord) -> None:
        for piece in pieces(record, special=self.special == "keep"):
            state.counts.add([len(piece.kept)] * len(piece))
            keys = token_keys(record.texts[piece.texts], piece.kept, self.seed)
            keys = np.insert(keys, 0, 0, axis=-1)
            texts, tokens = np.nonzero(state.sample.wanted(keys))
            places = texts + piece.texts.start, piece.kept[tokens]
            state.sample.add(keys[texts, tokens], record.of_tokens("hidden_states", *places, state.depths))

    def finalize(self, state: LayersState, record: ForwardRecord | None) -> Result:
        vectors = state.sample.settled().vectors.astype(float)
        depths = [depth_of(vectors[:, at], self.variance / 100, self.principal) for at in range(len(state.depths))]
        table = _table(state, depths)
        note = f"{len(vectors)} of {state.counts.tokens} tokens, drawn by hash with seed {self.seed}."
        about = (
            f"Special tokens {'kept' if self.special == 'keep' else 'dropped'}. SVCCA keeps {self.variance} % of the "
            f"variance; principal subspaces have {self.principal} dimensions. Depth 0 is the first layer's input."
        )
        return Result(_headline(table), (table,), (_figure(table, f"{note} {about}"),), (note,))


def _headline(table: Table) -> Table:
    """Every depth with the next."""
    order = table.frame["depth"].unique()
    following = dict(pairwise(order))
    shown = ["depth", "other", "cka_debiased", "svcca", "principal_cosine", "token_cosine", "other_token_cosine"]
    frame = table.frame[table.frame["other"] == table.frame["depth"].map(following)][shown]
    return Table("layers-neighbours", "Neighbouring depths", frame, table.columns)


@dataclass(frozen=True)
class Depth:
    """The sample at one depth: vectors (token, width), their mean, and what every comparison needs of them."""

    vectors: Floats
    mean: Floats
    products: Floats
    hsic: float
    whitened: Floats
    basis: Floats | None
    varies: bool

    @property
    def centred(self) -> Floats:
        """The vectors less their mean, made anew: of all depths at once they would fill as much memory again."""
        return self.vectors - self.mean


def depth_of(vectors: Floats, variance: float, principal: int) -> Depth:
    """One depth's vectors (token, width); SVCCA keeps the share `variance`, subspaces have `principal` dimensions."""
    mean = vectors.mean(axis=0) if len(vectors) else np.zeros(vectors.shape[1])
    centred = vectors - mean
    products = centred.T @ centred
    known = bool(varies(np.trace(products) / max(len(vectors) - 1, 1), mean))
    whitened = whitening(products, variance) if known else products[:, :0]
    bases, spread = principal_bases(products[None], principal)
    basis = bases[0] if known and spread[0] else None
    return Depth(vectors, mean, products, unbiased_hsic(centred, centred, products), whitened, basis, known)


def compared(first: Depth, second: Depth) -> dict[str, float]:
    """The values of VALUES that are defined. Tokens are exchanged by half the sample, whose order is random."""
    values = _cosines(first.vectors, second.vectors)
    if first.varies and second.varies:
        x, y = first.centred, second.centred
        between = x.T @ y
        for suffix, product in (("", between), ("_chance", x.T @ np.roll(y, len(y) // 2, axis=0))):
            values[f"cka{suffix}"] = linear_cka(first.products, product, second.products).item()
            values[f"svcca{suffix}"] = svcca(first.whitened, product, second.whitened)
        values["cka_debiased"] = debiased_cka(unbiased_hsic(x, y, between), first.hsic, second.hsic)
    if first.basis is not None and second.basis is not None:
        shared = shared_directions(first.basis[None], second.basis[None])
        values["principal_cosine"], values["principal_angle"] = (value.item() for value in shared)
    return values


def _cosines(first: Floats, second: Floats) -> dict[str, float]:
    """Mean cosine of every token with its counterpart, and with all others; zero vectors have no direction."""
    cosines = paired_cosines(first, second)
    there = np.isfinite(cosines)
    count = int(there.sum())
    if not count:
        return {}
    one, other = (vectors[there] / lengths(vectors[there])[:, None] for vectors in (first, second))
    values = {"token_cosine": float(cosines[there].mean())}
    if count > 1:
        total = one.sum(axis=0) @ other.sum(axis=0)
        values["other_token_cosine"] = float((total - cosines[there].sum()) / (count * (count - 1)))
    return values


def _table(state: LayersState, depths: Sequence[Depth]) -> Table:
    at = range(len(depths))
    pairs = {(i, j): compared(depths[i], depths[j]) for i in at for j in at if i <= j}
    rows = [
        {
            "depth": state.depths[i],
            "other": state.depths[j],
            "texts": state.counts.texts,
            "tokens": state.counts.tokens,
            "sampled": len(depths[i].vectors),
            "svcca_directions": min(depths[i].whitened.shape[1], depths[j].whitened.shape[1]),
            **pairs[min(i, j), max(i, j)],
        }
        for i in at
        for j in at
    ]
    columns = KEYS | dict(VALUES)
    frame = pd.DataFrame(rows, columns=list(columns)).astype(dict.fromkeys(VALUES, float))
    return Table("layers", "Depth against depth", frame, columns, COUNTS)


MAPS = {
    "cka_debiased": ("Linear CKA, debiased", "CKA", 1.0),
    "cka": ("Linear CKA", "CKA", 1.0),
    "svcca": ("SVCCA", "mean correlation", 1.0),
    "principal_cosine": ("Principal subspaces", "mean cos^2", 1.0),
    "principal_angle": ("Largest principal angle", "degrees", 90.0),
    "token_cosine": ("A token with itself", "mean cosine", 1.0),
}
"""Title, unit and upper limit of every map."""


def _figure(table: Table, note: str) -> Figure:
    frame = table.frame
    names = tuple(map(str, frame["depth"].unique()))
    panels = tuple(
        Heatmap(
            frame.pivot(index="depth", columns="other", values=name).to_numpy(),
            title,
            names,
            names,
            "depth",
            "other depth",
            unit,
            low=None if name == "token_cosine" else 0.0,
            high=high,
        )
        for name, (title, unit, high) in MAPS.items()
    )
    return Figure("layers", "Depth against depth", panels, columns=3, note=note)
