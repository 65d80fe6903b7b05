"""What happens to token vectors along the stack: their distribution, how far they move, what they mix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .kit.accumulators import Counts, Maxima, Moments
from .kit.analysis import ALL, Analysis, Selection, State, chosen_names, derived, setting
from .kit.head_spectra import SPECTRA, output_conditions, spectra
from .kit.kept import Piece, pieces
from .kit.mixing import MIXING, LayerWeights, layer_weights, mixing
from .kit.record import ForwardRecord, HeadWeights, ModelShape
from .kit.result import Figure, Result, Table
from .kit.stream_figures import distribution_figure, histogram_figure, part_figure
from .kit.stream_points import OF_HEADS, WIDE, Distributions, Points
from .kit.stream_tables import Kept, distribution_tables, headline, output_table, part_table
from .kit.sublayers import LAYER_NORMS, NORMS, STEPS, SUBLAYERS, layer_norms, steps

Floats = NDArray[np.float64]

NEEDS: Mapping[str, frozenset[str]] = {
    "moments": frozenset({*OF_HEADS.values(), *WIDE.values()}),
    "steps": frozenset({"hidden_states", "attention_projection", "attention_norm", "mlp_output"}),
    "layernorms": frozenset({"hidden_states", "attention_sum", "attention_norm", "mlp_sum"}),
    "mixing": frozenset({"hidden_states", "attention", "v", "attention_projection"}),
    "spectra": frozenset({"attention", "q", "k", "head_outputs"}),
}
"""The parts of the answer, and what each reads."""
USUAL = "moments,steps,mixing"


@dataclass
class StreamState(State):
    """Of `moments` what `Distributions` keeps; of every other part the values of texts (layer, ..., value).

    `conditions` holds those of W_O, as a maximum: two machines may differ in its last bits.
    """

    counts: Counts
    distributions: Distributions
    values: dict[str, Moments]
    conditions: Maxima
    points: Points
    weights: dict[int, LayerWeights] | None = derived()


@dataclass(frozen=True)
class Stream(Analysis[StreamState]):
    """What happens to token vectors along the stack: norms and distribution of entries, moves, mixing of contexts.

    moments: for every point of a block (queries, keys, values and outputs of heads; attention and MLP outputs, sums,
    LayerNorms, hidden states) mean, standard deviation, skewness, excess kurtosis, Jarque-Bera per entry
    (skewness^2 / 6 + kurtosis^2 / 24), norms, histograms on fixed bins, and outlier channels, whose |mean| or variance
    exceeds the mean over channels by k standard deviations. steps: |update| / |input| and angles of attention, MLP and
    block. mixing: the norm-based mixing ratios of Kobayashi et al. 2020, 2021 (attention, residual, LayerNorm; value
    bias in, output bias out). On request, since they cost most: layernorms: scale, what is lost along (1, ..., 1),
    affine rank of the token matrix before and after, measured; spectra: von Neumann entropy with
    p = sigma^2 / sum sigma^2 of attention, Q K^T and its symmetric part, ranks of head outputs, k90, the condition of
    W_O. But for the mixing ratios all criteria are this project's own.

    Example: bertgeo stream --parts steps,mixing
    """

    layers: Selection = setting(ALL, "Layers, from 0: all, or such as 0,3-5,-1.")
    heads: Selection = setting(ALL, "Heads of moments and spectra, from 0: all, or such as 0,3-5,-1.")
    parts: str = setting(
        USUAL, "What to measure, separated by commas: moments, steps, layernorms, mixing, spectra; or all."
    )
    special: Literal["keep", "drop"] = setting(
        "keep", "Special tokens: keep them, or leave their own vectors (rows) unmeasured; others still mix them in."
    )
    outliers: int = setting(3, "k: standard deviations beyond which a channel is an outlier.", least=1)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(NEEDS[part] for part in self._parts()))

    @property
    def needs_weights(self) -> bool:
        return bool({"mixing", "spectra"} & set(self._parts()))

    def listing(self) -> Table | None:
        self._parts()
        return None

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> StreamState:
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        parts, points = self._parts(), Points(layers, heads)
        sizes = {
            "steps": (len(SUBLAYERS), len(STEPS)),
            "layernorms": (len(NORMS), len(LAYER_NORMS)),
            "mixing": (len(MIXING),),
            "spectra": (len(heads), len(SPECTRA)),
        }
        values = {part: Moments.empty(len(layers), *size) for part, size in sizes.items() if part in parts}
        distributions = Distributions.empty(points if "moments" in parts else Points((), ()), shape.width)
        conditions = Maxima.empty(len(layers))
        if weights is not None and "spectra" in parts:
            conditions.add(output_conditions(weights, shape, layers))
        mixed = layer_weights(weights, shape, layers) if weights is not None and "mixing" in parts else None
        return StreamState(Counts(), distributions, values, conditions, points, mixed)

    def update(self, state: StreamState, record: ForwardRecord) -> None:
        for piece in pieces(record, special=self.special == "keep"):
            if "moments" in self._parts():
                state.distributions.add(piece, state.points)
            for part, moments in state.values.items():
                moments.add(piece.over_layers(state.points.layers, self._measure(part, state)))
        state.counts.add([len(text) for text in record.texts])

    def _measure(self, part: str, state: StreamState) -> Callable[[Piece, Sequence[int]], Floats]:
        """What gives a part's values of some layers, (layer, text, ..., value)."""
        if part == "mixing":
            assert state.weights is not None, "a state without weights is finished and not updated"
            return partial(mixing, weights=state.weights)
        if part == "spectra":
            return partial(spectra, heads=state.points.heads)
        return steps if part == "steps" else layer_norms

    def _parts(self) -> tuple[str, ...]:
        asked = chosen_names(self.parts, NEEDS, "part")
        return tuple(part for part in NEEDS if part in asked)

    def finalize(self, state: StreamState, record: ForwardRecord | None) -> Result:
        parts, kept = self._parts(), Kept(state.counts, state.points, self.outliers)
        tables: list[Table] = []
        figures: list[Figure] = []
        if "moments" in parts:
            tables += distribution_tables(state.distributions, kept)
            figures += [distribution_figure(state.distributions, kept), histogram_figure(state.distributions, kept)]
        for part, moments in state.values.items():
            tables.append(part_table(part, moments, kept))
            figures.append(part_figure(part, moments, kept))
        if "spectra" in parts:
            tables.append(output_table(state.conditions.values, kept))
        note = f"Special tokens {'measured too' if self.special == 'keep' else 'not measured'}."
        return Result(headline(tables, state.points.layers), tuple(tables), tuple(figures), (note,))
