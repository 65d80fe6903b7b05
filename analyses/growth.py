"""How token vectors and the antisymmetric part of a head's bilinear form pull: the spectrum of sym(X^T X M_a)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from .kit.accumulators import Counts, Moments, Sample
from .kit.analysis import ALL, Analysis, Selection, State, derived, setting
from .kit.maths import ratio
from .kit.record import ForwardRecord, HeadWeights, ModelShape
from .kit.result import Figure, Heatmap, Result, Table
from .kit.tables import moment_columns, sample_table

Floats = NDArray[np.float64]
VALUES = {
    "largest": "largest eigenvalue of S = sym(X^T X M_a), 0 or more, since the trace is 0",
    "smallest": "smallest eigenvalue of S, 0 or less",
    "norm": "|S|_F, 0 or more",
    "largest_share": "largest / |S|_F, 0 to 1; empty where S is 0",
    "smallest_share": "smallest / |S|_F, -1 to 0; empty where S is 0",
}
PLACES = {"layer": "layer, from 0", "head": "head, from 0"}


@dataclass(frozen=True)
class Antisymmetric:
    """M_a = C J C^T of the heads of a layer: C (head, width, rank) has orthonormal columns, J is antisymmetric."""

    basis: Tensor
    core: Tensor

    @classmethod
    def of(cls, query: Tensor, key: Tensor) -> Antisymmetric:
        """The antisymmetric parts of M = W_Q^T W_K from the factors (head, channel, width); rank at most 2 channels."""
        basis, mixing = torch.linalg.qr(torch.cat([query, key], dim=1).mT)
        first, second = mixing.chunk(2, dim=-1)
        return cls(basis, (first @ second.mT - second @ first.mT) / 2)

    def spectra(self, x: Tensor) -> Tensor:
        """Eigenvalues of S of every head that need not be 0, rising: (token, width) to (head, value).

        With Y = X C, H = Y^T Y and the QR decomposition X^T - C Y^T = Q T, S lives in the columns of [C Q], where it is
        [[(H J - J H) / 2, N^T], [N, 0]] with N = T Y J / 2. For more tokens than columns of C, the R of N's like
        (X^T - C Y^T) Y serves: at most 2 rank x 2 rank, and never width x width.
        """
        y = x @ self.basis
        rest = x.T - self.basis @ y.mT
        few = x.shape[0] < self.basis.shape[-1]
        triangle = torch.linalg.qr(rest if few else rest @ y, mode="r").R
        below = (triangle @ y if few else triangle) @ self.core / 2
        product = (y.mT @ y) @ self.core
        corner = (product + product.mT) / 2
        empty = below.new_zeros(len(below), below.shape[1], below.shape[1])
        upper, lower = torch.cat([corner, below.mT], dim=-1), torch.cat([below, empty], dim=-1)
        return torch.linalg.eigvalsh(torch.cat([upper, lower], dim=-2))


def extremes(eigenvalues: Floats) -> Floats:
    """VALUES of the eigenvalues (..., value) of S that need not be 0; there are others, all 0, or the sum is 0.

    >>> extremes(np.array([-4.0, 1.0, 3.0])).round(6).tolist()
    [3.0, -4.0, 5.09902, 0.588348, -0.784465]
    """
    largest, smallest = np.maximum(eigenvalues.max(axis=-1), 0.0), np.minimum(eigenvalues.min(axis=-1), 0.0)
    norm = np.sqrt(np.einsum("...i,...i->...", eigenvalues, eigenvalues))
    return np.stack([largest, smallest, norm, ratio(largest, norm), ratio(smallest, norm)], axis=-1)


@dataclass
class GrowthState(State):
    """Per-text values (layer, head, value), and the antisymmetric forms of the layers."""

    moments: Moments
    sample: Sample
    counts: Counts
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    forms: tuple[Antisymmetric, ...] | None = derived()


@dataclass(frozen=True)
class Growth(Analysis[GrowthState]):
    """Experimental: the spectrum of sym(X^T X M_a) by head, its largest and smallest eigenvalues.

    X are a text's token vectors as the head's layer reads them, special tokens included; M_a is the antisymmetric part
    of the head's M = W_Q^T W_K, without biases and without the scale 1/sqrt(dk). Cirrincione (arXiv 2604.10703) grows
    and prunes heads in training by these eigenvalues after projection on what the other heads leave; here they are
    measured in a trained model without that projection and without thresholds, which is this project's own use. The
    trace is 0, so the largest is never below 0 and the smallest never above; mean and deviation over texts.

    Example: bertgeo growth --layers 0-2
    """

    layers: Selection = setting(ALL, "Layers, from 0: all, or such as 0,3-5,-1.")
    heads: Selection = setting(ALL, "Heads, from 0: all, or such as 0,3-5,-1.")
    sample: int = setting(1000, "Texts of a corpus whose own values are written (those of smallest hash).", least=0)
    seed: int = setting(0, "Seed of that sample's hash.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"hidden_states"})

    @property
    def needs_weights(self) -> bool:
        return True

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> GrowthState:
        assert weights is not None
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        held = [shape.weight_layer[layer] for layer in layers]
        rows = list(heads)
        made = {at: Antisymmetric.of(weights.query[at, rows], weights.key[at, rows]) for at in dict.fromkeys(held)}
        moments = Moments.empty(len(layers), len(heads), len(VALUES))
        sample = Sample.empty(self.sample, self.seed)
        return GrowthState(moments, sample, Counts(), layers, heads, tuple(made[at] for at in held))

    def update(self, state: GrowthState, record: ForwardRecord) -> None:
        assert state.forms is not None
        for index, text in enumerate(record.texts):
            inputs = torch.from_numpy(record.of_text("hidden_states", index, state.layers))
            spectra = [form.spectra(x) for form, x in zip(state.forms, inputs, strict=True)]
            values = extremes(torch.stack(spectra).numpy())[None]
            state.moments.add(values)
            state.sample.add([text], values)
            state.counts.add([len(text)])

    def per_text(self, state: GrowthState) -> Table:
        return sample_table("growth-texts", "Growth by text", state.sample, _places(state), PLACES, VALUES)

    def finalize(self, state: GrowthState, record: ForwardRecord | None) -> Result:
        frame = _places(state).assign(texts=state.counts.texts)
        values, columns = moment_columns(state.moments, list(VALUES), VALUES)
        about = PLACES | {"texts": "texts measured"} | columns
        table = Table("growth", "Extreme eigenvalues of sym(X^T X M_a)", pd.concat([frame, values], axis=1), about)
        tables = (table,) if record is not None else (table, self.per_text(state))
        note = "Experimental. Special tokens kept; M_a without biases and scale; its trace with X^T X is 0."
        return Result(_headline(table), tables, (_figure(state),), (note,))


def _places(state: GrowthState) -> pd.DataFrame:
    places = [(layer, head) for layer in state.layers for head in state.heads]
    return pd.DataFrame(places, columns=list(PLACES))


def _headline(table: Table) -> Table:
    """By layer: the mean over heads."""
    frame = table.frame.groupby(["layer", "texts"], as_index=False)[list(VALUES)].mean()
    columns = {**table.columns, **{name: f"mean over heads: {meaning}" for name, meaning in VALUES.items()}}
    return Table(
        table.name, f"{table.title}, mean over heads", frame, {name: columns[name] for name in map(str, frame)}
    )


PANELS = {
    "largest": ("Largest eigenvalue", "eigenvalue"),
    "smallest": ("Smallest eigenvalue", "eigenvalue"),
    "largest_share": ("Largest by the norm of S", "eigenvalue / |S|_F"),
    "smallest_share": ("Smallest by the norm of S", "eigenvalue / |S|_F"),
}


def _figure(state: GrowthState) -> Figure:
    panels = tuple(
        Heatmap(
            state.moments.mean[..., list(VALUES).index(name)],
            title,
            tuple(map(str, state.layers)),
            tuple(map(str, state.heads)),
            "layer",
            "head",
            unit,
            low=None,
            high=None,
            diverging=True,
        )
        for name, (title, unit) in PANELS.items()
    )
    texts = state.counts.texts
    note = f"Experimental. S = sym(X^T X M_a); mean over {texts} text{'s' * (texts != 1)}."
    return Figure("growth", "Growth: extreme eigenvalues by layer and head", panels, columns=2, note=note)
