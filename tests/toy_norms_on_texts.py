"""The companion of the toy analysis: what it asks of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analyses.kit.accumulators import Counts, Moments
from analyses.kit.analysis import Analysis, State, derived, setting
from analyses.kit.record import ForwardRecord, HeadWeights, ModelShape
from analyses.kit.result import Figure, Heatmap, Result, Table


@dataclass
class ToyTextsState(State):
    """Per-text mean length of q - b_Q by head, and the biases."""

    moments: Moments
    counts: Counts
    biases: Any = derived()


@dataclass(frozen=True)
class ToyNormsOnTexts(Analysis[ToyTextsState]):
    """Lengths of queries without their biases."""

    layer: int = setting(0, "The layer.", least=0)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"q"})

    @property
    def needs_weights(self) -> bool:
        return True

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> ToyTextsState:
        assert weights is not None
        return ToyTextsState(Moments.empty(shape.heads), Counts(), weights.query_bias[self.layer])

    def update(self, state: ToyTextsState, record: ForwardRecord) -> None:
        for index, text in enumerate(record.texts):
            queries = record.of_text("q", index, [self.layer])[0] - state.biases.numpy()[:, None]
            state.moments.add(np.linalg.norm(queries, axis=-1).mean(axis=-1)[None])
            state.counts.add([len(text)])

    def finalize(self, state: ToyTextsState, record: ForwardRecord | None) -> Result:
        lengths = state.moments.mean
        frame = pd.DataFrame({"head": range(len(lengths)), "texts": state.counts.texts, "length": lengths})
        columns = {"head": "head, from 0", "texts": "texts measured", "length": "mean length, 0 or more"}
        table = Table("toy-queries", "Queries", frame, columns)
        figure = Figure("toy-queries", "Queries", (Heatmap(lengths[None], high=None),))
        return Result(table, (table,), (figure,), ("Lengths of queries.",))
