"""Every head's bilinear form M_h = W_Q^T W_K, and what it copies: spectra, symmetry, subspaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .kit.analysis import ALL, Analysis, Selection, SettingsError, State, setting
from .kit.bilinear_texts import SIDES, BilinearOnTexts
from .kit.bilinear_weights import PLACE, Atlas
from .kit.comparison import Place, places_of
from .kit.forms import MEASURES, copying
from .kit.maths import mean_of_rows, ratio
from .kit.record import ForwardRecord, HeadWeights, ModelShape
from .kit.result import Figure, Heatmap, Lines, Panel, Result, Series, Table
from .kit.spectra import frobenius_norm, singular_values_by_gram
from .kit.vocabulary import nearest_entries

Floats = NDArray[np.float64]
FORM = (
    "without-biases (W_Q^T W_K), homogeneous ([W_Q b_Q]^T [W_K b_K]), or value-output (W_V^T W_O^T, which acts on "
    "row vectors)"
)
OVERLAP = (
    "|U_r^T V_r|_F^2 / r of the first r left and right singular vectors, 0 to 1 (this project's own); r is the "
    "numerical rank where that is less, empty where it is 0"
)
OUTPUT = {
    "copying": "sum of eigenvalues of W_V^T W_O^T over the sum of their absolute values, -1 to 1: whether a head "
    "writes what it reads, or its opposite (Elhage et al. 2021, here without the embeddings)",
    "expansion_rate": "|[W_V b_V]^T W_O^T|_F / sqrt(width + 1), 0 or more: root mean square stretching of (x, 1) by f "
    "of this head (after Kobayashi et al. 2021, who measure whole layers)",
}
NORMS = {
    **{
        f"{name}_{norm}": f"{kind} norm of the head's {matrix}, 0 or more"
        for name, matrix in (("query", "W_Q"), ("key", "W_K"), ("value", "W_V"), ("output", "W_O"))
        for norm, kind in (("frobenius", "Frobenius"), ("spectral", "spectral"))
    },
    "query_bias": "|b_Q|, 0 or more",
    "key_bias": "|b_K|, 0 or more",
    "content_bias": "|b_Q^T W_K|: the query-independent term of a score is its product with a key's vector (Cordonnier "
    "et al. 2020), 0 or more",
}
LAYER = {
    **{name: text for name, text in MEASURES.items() if name != "max_entry"},
    "symmetry": "tr(M^2) / |M|_F^2, -1 to 1: the score of Saponati et al. (arXiv 2502.10927)",
    "directionality": "directionality of Saponati et al., -1 to 1, with the published sign: negative where norms of "
    "columns (of keys) have the greater outliers",
    "expansion_rate": "|T|_F / sqrt(width + 1) of (x, 1) T = ((x W_V + b_V) W_O + b_O, 1), all heads, 0 or more (after "
    "Kobayashi et al. 2021)",
    "expansion_rate_published": "the same with b_O as a column of T, as their code has it, for their published values",
}
SPECTRUM = {
    "component": "by falling singular value, from 1",
    "singular_value": "singular value, 0 or more",
    "cumulated_share": "sum of squares up to this one over |M|_F^2, 0 to 1",
}
SCORE, SHARE = (-1.0, 1.0, True), (0.0, 1.0, False)
SIZE = (0.0, None, False)
DRAWN: Mapping[str, tuple[str, tuple[float, float | None, bool]]] = {
    "symmetry": ("score", SCORE),
    "directionality": ("score", SCORE),
    "trace_share": ("share", SCORE),
    "effective_rank": ("rank", SIZE),
    "stable_rank": ("rank", SIZE),
    "subspace_overlap": ("overlap", SHARE),
    "spectral": ("norm", SIZE),
    "content_bias": ("length", SIZE),
    "copying": ("score", SCORE),
}
"""What the overview draws, of the form without biases where it is of one: unit, limits, and whether 0 is the middle."""


@dataclass
class BilinearState(State):
    """The heads, each once, and the weights."""

    places: tuple[Place, ...]
    heads: int
    weights: HeadWeights


@dataclass(frozen=True)
class Bilinear(Analysis[BilinearState]):
    """Every head's bilinear form M_h = W_Q^T W_K: spectrum, symmetry, subspaces; and W_V W_O, what a head copies.

    From the weights alone. Forms: without biases, homogeneous ([W_Q b_Q]^T [W_K b_K], which scores x~ = (x, 1)), and
    value-output. By layer, for the sum over all of its heads, symmetry and directionality as Saponati et al. (arXiv
    2502.10927) publish them, and the expansion rate of Kobayashi et al. (2021); by head the same formulas. This
    project's own definitions: left singular vectors span what a head searches with, right ones what it searches for;
    their overlap and principal angles at --rank r; tr(M) / sum of singular values; the positive share of eigenvalues
    of (M + M^T) / 2 (almost every such M has as many positive and as many negative ones as a head has channels).

    With a text, --pair or --corpus, also: how much the term b_Q^T W_K x_j, the same for every query, moves scores
    beside x_i^T M_h x_j, and which tokens lie in the two subspaces. Layers that share weights stand once.

    Example: bertgeo bilinear --layers 0-2 --tokens 10
    """

    layers: Selection = setting(ALL, "Layers, from 0: all, or such as 0,3-5,-1.")
    heads: Selection = setting(ALL, "Heads, from 0: all, or such as 0,3-5,-1. Sums over a layer hold all heads.")
    rank: int = setting(8, "Singular vectors that span the searching and the searched subspace.", least=1)
    tokens: int = setting(
        0, "Vocabulary entries nearest (by cosine) to each head's top directions, at both of their ends.", least=0
    )
    directions: int = setting(1, "Top directions of each head to look up in the vocabulary.", least=1)
    top: int = setting(10, "On texts: tokens that lie deepest in each subspace.", least=0)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def on_texts(self) -> Analysis[Any]:
        return BilinearOnTexts(self.layers, self.heads, self.rank, self.top)

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> BilinearState:
        assert weights is not None
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        for what, count in (("rank", self.rank), ("directions", self.directions)):
            if count > shape.head_width:
                told = f"--{what} {count} is more than the {shape.head_width} channels of a head"
                raise SettingsError(told, f"Give --{what} 1 to {shape.head_width}.")
        return BilinearState(places_of(layers, heads, shape.weight_layer), len(heads), weights)

    def finalize(self, state: BilinearState, record: ForwardRecord | None) -> Result:
        atlas = Atlas(state.places, state.weights, self.rank)
        heads, layers = _heads_table(atlas), _layers_table(atlas)
        output, norms = _output_table(atlas), _norms_table(atlas)
        tables = [
            heads,
            output,
            norms,
            layers,
            _spectra_table(atlas),
            _layer_spectra_table(atlas),
            _angles_table(atlas),
        ]
        if self.tokens:
            tables.append(_tokens_table(atlas, self.tokens, self.directions))
        plain = heads.frame[heads.frame["form"] == "without-biases"]
        drawn = plain.merge(output.frame, on=list(PLACE)).merge(norms.frame, on=list(PLACE))
        figures = (_overview(atlas, drawn, state.heads), _spectra_figure(atlas))
        return Result(_headline(layers, heads), tuple(tables), figures)


def _heads_table(atlas: Atlas) -> Table:
    frames = []
    for name, form in atlas.forms.items():
        overlap = mean_of_rows(atlas.cosines[name] ** 2)
        frames.append(atlas.index.assign(form=name, **form.measures(), subspace_overlap=overlap))
    columns = PLACE | {"form": FORM} | MEASURES | {"subspace_overlap": OVERLAP}
    return Table("bilinear-heads", "Bilinear forms by head", pd.concat(frames, ignore_index=True), columns)


def _output_table(atlas: Atlas) -> Table:
    form, width = atlas.forms["value-output"], atlas.factors["V"].shape[1]
    bias = np.linalg.norm(np.einsum("hwc,hc->hw", atlas.factors["O"], atlas.biases["V"]), axis=1)
    values = {"copying": copying(form.mixed), "expansion_rate": np.hypot(form.frobenius, bias) / np.sqrt(width + 1)}
    return Table("bilinear-output", "What heads copy and stretch", atlas.index.assign(**values), PLACE | OUTPUT)


def _norms_table(atlas: Atlas) -> Table:
    factors, biases, values = atlas.factors, atlas.biases, {}
    for name, letter in (("query", "Q"), ("key", "K"), ("value", "V"), ("output", "O")):
        values[f"{name}_frobenius"] = frobenius_norm(factors[letter])
        values[f"{name}_spectral"] = singular_values_by_gram(factors[letter])[:, -1]
    values |= {f"{name}_bias": np.linalg.norm(biases[name[0].upper()], axis=1) for name in ("query", "key")}
    values["content_bias"] = np.linalg.norm(np.einsum("hwc,hc->hw", factors["K"], biases["Q"]), axis=1)
    return Table("bilinear-norms", "Norms of weights and biases by head", atlas.index.assign(**values), PLACE | NORMS)


def _layers_table(atlas: Atlas) -> Table:
    rows = [{"layer": layer, **measures} for layer, (measures, _) in atlas.layers.items()]
    columns = {"layer": "layer, from 0; values are of the sum over all of its heads"} | LAYER
    title = "Bilinear forms by layer, W_Q^T W_K summed over all heads"
    return Table("bilinear-layers", title, pd.DataFrame(rows), {name: columns[name] for name in rows[0]})


def _spectra_table(atlas: Atlas) -> Table:
    frames = []
    for name, form in atlas.forms.items():
        frames.append(_by_component(atlas, name, _spectrum(form.singular)))
    frame = pd.concat(frames, ignore_index=True)
    return Table("bilinear-spectra", "Singular values of bilinear forms", frame, PLACE | {"form": FORM} | SPECTRUM)


def _layer_spectra_table(atlas: Atlas) -> Table:
    singular = np.array([singular for _, singular in atlas.layers.values()])
    count = singular.shape[1]
    index = {"layer": np.repeat(list(atlas.layers), count), "component": np.tile(range(1, count + 1), len(singular))}
    frame = pd.DataFrame(index | {name: values.ravel() for name, values in _spectrum(singular).items()})
    title = "Singular values of W_Q^T W_K summed over all heads of a layer"
    return Table("bilinear-layer-spectra", title, frame, {"layer": PLACE["layer"]} | SPECTRUM)


def _spectrum(singular: Floats) -> dict[str, Floats]:
    squares = np.cumsum(singular**2, axis=1)
    return {"singular_value": singular, "cumulated_share": ratio(squares, squares[:, -1:])}


def _angles_table(atlas: Atlas) -> Table:
    frames = [
        _by_component(atlas, name, {"cosine": cosines, "angle": np.degrees(np.arccos(cosines))})
        for name, cosines in atlas.cosines.items()
    ]
    columns = PLACE | {
        "form": FORM,
        "component": "by rising angle, from 1",
        "cosine": "cosine of the principal angle, 0 to 1",
        "angle": "principal angle between the left and the right singular subspace of rank r, 0 to 90 degrees; empty "
        "past the numerical rank",
    }
    title = f"Principal angles between searching and searched subspace, rank {atlas.rank} (this project's own)"
    return Table("bilinear-angles", title, pd.concat(frames, ignore_index=True), columns)


def _by_component(atlas: Atlas, form: str, values: Mapping[str, Floats]) -> pd.DataFrame:
    count = next(iter(values.values())).shape[1]
    frame = atlas.index.loc[np.repeat(np.arange(len(atlas.places)), count)].reset_index(drop=True)
    frame["form"], frame["component"] = form, np.tile(np.arange(1, count + 1), len(atlas.places))
    return frame.assign(**{name: value.ravel() for name, value in values.items()})


def _tokens_table(atlas: Atlas, count: int, directions: int) -> Table:
    assert atlas.weights.vocabulary is not None
    vocabulary, rows = atlas.weights.vocabulary(), list(_ends(atlas, directions))
    vectors = np.array([row.pop("vector") for row in rows]).reshape(len(rows), atlas.factors["Q"].shape[1])
    found = nearest_entries(vocabulary, vectors, count)
    entries = found.ids.shape[1]
    frame = pd.DataFrame([row for row in rows for _ in range(entries)], columns=[*PLACE, "side", "direction", "end"])
    frame["place"] = np.tile(np.arange(1, entries + 1), len(rows))
    frame["token"] = np.array([vocabulary.tokens[token] for token in found.ids.ravel()], dtype=object)
    frame["id"], frame["cosine"] = found.ids.ravel(), found.cosines.ravel()
    columns = PLACE | {
        "side": "searching (left singular vector of M_h = W_Q^T W_K) or searched (right)",
        "direction": "by falling singular value, from 1",
        "end": "+ or -: tokens at + of searching look for those at + of searched, those at - for those at -",
        "place": "by falling cosine, from 1",
        "token": "vocabulary entry",
        "id": "its row in the embedding",
        "cosine": "cosine of the word embedding (projected where it is narrower) and the direction, -1 to 1",
    }
    return Table("bilinear-tokens", "Vocabulary entries nearest to top directions", frame, columns)


def _ends(atlas: Atlas, directions: int) -> Iterator[dict[str, Any]]:
    """Both ends of every top direction of every head that has it."""
    sides = dict(zip(SIDES, atlas.forms["without-biases"].directions(directions), strict=True))
    for at, place in enumerate(atlas.places):
        for side, vectors in sides.items():
            for direction in range(directions):
                vector = vectors[at, :, direction]
                for end, sign in (("+", 1.0), ("-", -1.0)) if vector.any() else ():
                    where = {"layer": place.layer, "head": place.head, "side": side}
                    yield {**where, "direction": direction + 1, "end": end, "vector": sign * vector}


def _headline(layers: Table, heads: Table) -> Table:
    plain = heads.frame[heads.frame["form"] == "without-biases"].groupby("layer", as_index=False)
    means = plain[["symmetry", "effective_rank", "trace_share", "subspace_overlap"]].mean()
    frame = layers.frame[["layer", "symmetry", "directionality"]].merge(means, on="layer", suffixes=("", "_of_heads"))
    columns = {**heads.columns, **layers.columns, "symmetry_of_heads": "mean over heads of their own symmetry"}
    title = "Bilinear forms by layer: of the sum over heads, then means over heads"
    return Table("bilinear", title, frame, {name: columns[name] for name in map(str, frame)})


def _overview(atlas: Atlas, values: pd.DataFrame, heads: int) -> Figure:
    rows = tuple(str(layer) for layer in atlas.held)
    columns = tuple(str(place.head) for place in atlas.places[:heads])
    panels = []
    for name, (unit, (low, high, diverging)) in DRAWN.items():
        grid = values[name].to_numpy(dtype=np.float64).reshape(-1, heads)
        title = {"spectral": "spectral norm"}.get(name, name.replace("_", " "))
        panels.append(Heatmap(np.array(grid), title, rows, columns, "layer", "head", unit, low, high, diverging))
    note = (
        f"M_h = W_Q^T W_K without biases; overlap at rank {atlas.rank}; content bias |b_Q^T W_K|; copying of W_V W_O."
    )
    return Figure("bilinear-heads", "Bilinear forms by layer and head", tuple(panels), 3, note)


def _spectra_figure(atlas: Atlas) -> Figure:
    panels: list[Panel] = []
    for name, form in atlas.forms.items():
        shares = ratio(form.singular, form.singular[:, :1]).reshape(len(atlas.held), -1, form.singular.shape[1])
        x = np.arange(1.0, form.singular.shape[1] + 1)
        series = tuple(
            Series(f"layer {layer}", x, one.mean(axis=0)) for layer, one in zip(atlas.held, shares, strict=True)
        )
        panels.append(Lines(series, "component", "singular value / largest", name, low=0.0, high=1.0))
    note = "Mean over heads of singular values divided by each head's largest."
    return Figure("bilinear-spectra", "Singular spectra of bilinear forms", tuple(panels), 3, note)
