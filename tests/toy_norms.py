"""A toy analysis of weights with a companion on texts: the lengths of query biases, and of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
import toy_norms_on_texts

from analyses.kit.analysis import Analysis, State, setting
from analyses.kit.record import ForwardRecord, HeadWeights, ModelShape
from analyses.kit.result import Figure, Heatmap, Result, Table


@dataclass
class ToyState(State):
    """The weights."""

    weights: HeadWeights


@dataclass(frozen=True)
class ToyNorms(Analysis[ToyState]):
    """Lengths of query biases; of a text or corpus, lengths of queries without them.

    Example: bertgeo toy-norms
    """

    layer: int = setting(0, "The layer.", least=0)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def on_texts(self) -> Analysis[Any]:
        return toy_norms_on_texts.ToyNormsOnTexts(self.layer)

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> ToyState:
        assert weights is not None
        return ToyState(weights)

    def finalize(self, state: ToyState, record: ForwardRecord | None) -> Result:
        biases = state.weights.query_bias[self.layer].norm(dim=-1).numpy()
        frame = pd.DataFrame({"head": range(len(biases)), "bias": biases})
        table = Table("toy-biases", "Biases", frame, {"head": "head, from 0", "bias": "length of b_Q, 0 or more"})
        figure = Figure("toy-biases", "Biases", (Heatmap(biases[None], high=None),))
        return Result(table, (table,), (figure,), ("Lengths of biases.",))
