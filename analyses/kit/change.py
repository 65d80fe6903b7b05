"""Two checkpoints of one architecture side by side: what training between them moved, by head and by depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .accumulators import Counts, Moments
from .analysis import ALL, Selection, SettingsError, State, setting
from .change_tables import ATTENTION, Measured, Seen, result_of
from .comparison import places_of
from .covariance import Covariance
from .divergence import divergence_of_rows
from .maths import mean_of_rows, normalised_rows, paired_cosines
from .record import ForwardRecord, HeadWeights, ModelShape
from .result import Result
from .weight_change import weight_changes

Floats = NDArray[np.float64]


@dataclass
class ChangeState(State):
    """Over the texts: attention of A against B (layer, head, value), each token against itself (depth, 1).

    `joint` is, at every depth, the covariance of the vectors of A and B laid end to end.
    """

    attention: Moments
    tokens: Moments
    joint: Covariance
    counts: Counts
    layers: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """What is compared between two checkpoints A and B, whose records of the same texts `update` takes."""

    needs: ClassVar[frozenset[str]] = frozenset({"attention", "hidden_states"})

    layers: Selection = setting(ALL, "Layers, from 0: all, or such as 0,3-5,-1.")
    heads: Selection = setting(ALL, "Heads, from 0: all, or such as 0,3-5,-1.")
    principal: int = setting(10, "Dimensions of the principal subspaces of hidden states.", least=1)

    def start(self, shape: ModelShape) -> ChangeState:
        """The empty state. Raises SettingsError for settings that the models cannot satisfy."""
        if self.principal > shape.width:
            raise SettingsError(
                f"hidden states of width {shape.width} have no {self.principal} principal dimensions",
                f"Give --principal 1 to {shape.width}.",
            )
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        depths = tuple(sorted({depth for layer in layers for depth in (layer, layer + 1)}))
        attention, tokens = Moments.empty(len(layers), len(heads), len(ATTENTION)), Moments.empty(len(depths), 1)
        joint = Covariance.empty(len(depths), 2 * shape.width)
        return ChangeState(attention, tokens, joint, Counts(), layers, depths, heads)

    def update(self, state: ChangeState, first: ForwardRecord, second: ForwardRecord) -> None:
        """Add a batch, as A and as B recorded it, text by text."""
        for at, text in enumerate(first.texts):
            state.attention.add(attention_change(*(_attention(state, record, at) for record in (first, second)))[None])
            vectors = [record.of_text("hidden_states", at, state.depths) for record in (first, second)]
            state.tokens.add(mean_of_rows(paired_cosines(*vectors))[None, :, None])
            state.joint.add(np.concatenate(vectors, axis=-1))
            state.counts.add([len(text)])

    def finalize(self, shape: ModelShape, first: HeadWeights, second: HeadWeights, state: ChangeState) -> Result:
        """The answer; of weights alone where the state has seen no text."""
        places = places_of(state.layers, state.heads, shape.weight_layer)
        weights, subspaces = weight_changes(first, second, places)
        measured = Measured(state.layers, state.heads, state.depths, shape.weight_layer, weights, subspaces)
        seen = Seen(state.attention, state.tokens, state.joint, state.counts) if state.counts.texts else None
        return result_of(measured, seen, self.principal)


def _attention(state: ChangeState, record: ForwardRecord, at: int) -> Floats:
    return normalised_rows(record.of_text("attention", at, state.layers)[:, list(state.heads)])


def attention_change(first: Floats, second: Floats) -> Floats:
    """The values of ATTENTION on a last axis: cosine and Jensen-Shannon divergence of rows, mean over query rows.

    Shapes (layer, head, query, key) twice, rows that sum to 1, to (layer, head, 2).

    >>> attention_change(np.array([[[[1.0, 0.0], [0.5, 0.5]]]]), np.array([[[[0.0, 1.0], [0.5, 0.5]]]])).round(4)
    array([[[0.5   , 0.3466]]])
    """
    return np.stack([mean_of_rows(paired_cosines(first, second)), divergence_of_rows(first, second)], axis=-1)
