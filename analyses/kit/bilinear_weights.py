"""The bilinear forms of a checkpoint's heads, each decomposed once, and those of whole layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .comparison import Place
from .forms import (
    ThinForms,
    directionality,
    expansion_rates,
    principal_cosines,
    ranks_of,
    signature,
    symmetry_of,
)
from .maths import ratio
from .record import HeadWeights
from .spectra import frobenius_norm, singular_values_by_gram
from .subspaces import thin_factors

Floats = NDArray[np.float64]
PLACE = {"layer": "layer, from 0", "head": "head, from 0"}


@dataclass(frozen=True)
class Atlas:
    """The forms of some heads, each decomposed once."""

    places: tuple[Place, ...]
    weights: HeadWeights
    rank: int

    @cached_property
    def factors(self) -> dict[str, Floats]:
        """W_Q^T, W_K^T, W_V^T and W_O by letter, each (head, width, channel)."""
        return thin_factors(self.weights, *self._at)

    @cached_property
    def biases(self) -> dict[str, Floats]:
        """b_Q, b_K and b_V by letter, each (head, channel)."""
        named = {"Q": self.weights.query_bias, "K": self.weights.key_bias, "V": self.weights.value_bias}
        return {letter: bias[self._at].double().cpu().numpy() for letter, bias in named.items()}

    def homogeneous(self, letter: str) -> Floats:
        """A factor with its bias as a last row: (head, width + 1, channel)."""
        return np.concatenate([self.factors[letter], self.biases[letter][:, None]], axis=1)

    @cached_property
    def forms(self) -> Mapping[str, ThinForms]:
        """The three forms by name."""
        return {
            "without-biases": ThinForms(self.factors["Q"], self.factors["K"]),
            "homogeneous": ThinForms(self.homogeneous("Q"), self.homogeneous("K")),
            "value-output": ThinForms(self.factors["V"], self.factors["O"]),
        }

    @cached_property
    def cosines(self) -> dict[str, Floats]:
        """By form, cosines of the principal angles between left and right subspaces (head, rank)."""
        return {name: principal_cosines(*form.directions(self.rank)) for name, form in self.forms.items()}

    @cached_property
    def held(self) -> dict[int, int]:
        """The chosen layers, each with that of the checkpoint whose weights it runs."""
        return {place.layer: place.weight_layer for place in self.places}

    @cached_property
    def layers(self) -> dict[int, tuple[dict[str, float], Floats]]:
        """Of each chosen layer what `measures_of_layer` gives."""
        return {layer: measures_of_layer(self.weights, held) for layer, held in self.held.items()}

    @property
    def index(self) -> pd.DataFrame:
        """A row for each head."""
        return pd.DataFrame({name: [getattr(place, name) for place in self.places] for name in PLACE})

    @property
    def _at(self) -> tuple[list[int], list[int]]:
        return [place.weight_layer for place in self.places], [place.head for place in self.places]


def measures_of_layer(weights: HeadWeights, held: int) -> tuple[dict[str, float], Floats]:
    """Measures of M = W_Q^T W_K of all heads of one of the checkpoint's layers, and its singular values, falling.

    Here alone a matrix of width x width is formed, one a layer: this M has as many ranks as that.
    """
    query, key, value, output = (
        part[held].double().cpu().numpy() for part in (weights.query, weights.key, weights.value, weights.output)
    )
    width = query.shape[-1]
    form = query.reshape(-1, width).T @ key.reshape(-1, width)
    singular, eigenvalues = singular_values_by_gram(form)[None], np.linalg.eigvalsh((form + form.T) / 2)[None]
    frobenius = frobenius_norm(form[None])
    bias = weights.value_bias[held].double().cpu().numpy().reshape(1, -1)
    stretched = np.concatenate([value.reshape(-1, width).T, bias])[None]
    turned = output.transpose(0, 2, 1).reshape(1, -1, width)
    values = {
        **symmetry_of(np.array([np.sum(form * form.T)]), frobenius),
        "directionality": directionality(*(np.linalg.norm(form, axis=axis)[None] for axis in (1, 0))),
        "frobenius": frobenius,
        "spectral": singular[:, -1],
        **ranks_of(singular, width),
        **signature(eigenvalues, width),
        "trace_share": ratio(np.trace(form)[None], singular.sum(axis=-1)),
        **expansion_rates(stretched, turned, weights.output_bias[held].double().cpu().numpy()[None]),
    }
    return {name: float(found[0]) for name, found in values.items()}, singular[0, ::-1]
