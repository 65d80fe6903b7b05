"""Head against head: shared subspaces, composition, and how alike two heads attend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .kit.accumulators import Moments
from .kit.analysis import ALL, Analysis, Selection, SettingsError, State, setting
from .kit.comparison import (
    Place,
    closest_table,
    nearest_table,
    pairs_table,
    places_of,
    runs_before,
    summary_table,
)
from .kit.head_figures import arranged
from .kit.head_metrics import (
    COMPOSITIONS,
    OF_TEXT,
    SUBSPACES,
    Answer,
    by_attention,
    by_composition,
    by_projection_kernel,
    canonical,
    kinds_of,
    known_metric,
    metrics_table,
)
from .kit.maths import normalised_rows
from .kit.record import ForwardRecord, HeadWeights, ModelShape
from .kit.result import Result, Table


@dataclass
class HeadsState(State):
    """Which heads are compared; values of texts (head, other head), or the weights that the answer is made of."""

    places: tuple[Place, ...]
    moments: Moments
    weights: HeadWeights | None


@dataclass(frozen=True)
class HeadsAgainstHeads(Analysis[HeadsState]):
    """Head against head: shared subspaces, composition, and how alike two heads attend.

    Every metric gives all pairs, each head's nearest, a clustered heat map and a map of heads. From the weights:
    projection-kernel (Yamagiwa et al., arXiv 2601.10266; beside it the mean, standard deviation and z of random
    subspaces) and composition (Elhage et al. 2021; earlier to later layers). From a text or corpus: jensen-shannon
    (Clark et al. 2019, here a mean over rows without smoothing) and correlation (our own choice), special tokens
    kept, mean over rows, then over texts; both cost heads^2 / 2 times tokens^2 operations a text, logarithms for the
    former. `--metric` alone lists them.

    Example: bertgeo heads --metric projection-kernel --subspaces OQ
    """

    optional_values: ClassVar[Mapping[str, str]] = {"metric": "list"}

    layers: Selection = setting(ALL, "Layers, from 0: all, or such as 0,3-5,-1.")
    heads: Selection = setting(ALL, "Heads, from 0: all, or such as 0,3-5,-1.")
    metric: str = setting("projection-kernel", "projection-kernel, composition, jensen-shannon or correlation.")
    subspaces: str = setting(
        "QQ",
        "Subspaces of the projection kernel: pairs of Q, K, V, O separated by commas, the head's first (OQ: what one "
        "writes in what the other's queries read), or all sixteen.",
    )
    composition: str = setting("all", "Q, K or V composition, separated by commas, or all three.")
    nearest: int = setting(5, "Nearest heads to list for each head.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention"} if canonical(self.metric) in OF_TEXT else ())

    @property
    def needs_weights(self) -> bool:
        return not self.needs

    def listing(self) -> Table | None:
        if self.metric == "list":
            return metrics_table()
        known_metric(self.metric)
        for metric in ("projection-kernel", "composition"):
            self._kinds(metric)  # a wrong --composition is refused even where another metric would not read it
        if self.nearest < 1:
            raise SettingsError(f"{self.nearest} nearest heads are no list", "Give --nearest 1 or more.")
        return None

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> HeadsState:
        self.listing()
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        places = places_of(layers, heads, range(shape.layers) if self.needs else shape.weight_layer)
        _refuse_too_few(places, known_metric(self.metric))
        count = len(places) if self.needs else 0
        return HeadsState(places, Moments.empty(count, count), weights)

    def update(self, state: HeadsState, record: ForwardRecord) -> None:
        layers = list(dict.fromkeys(place.layer for place in state.places))
        heads = list(dict.fromkeys(place.head for place in state.places))
        for index, _ in enumerate(record.texts):
            attention = normalised_rows(record.of_text("attention", index, layers)[:, heads])
            state.moments.add(OF_TEXT[canonical(self.metric)](attention.reshape(-1, *attention.shape[2:]))[None])

    def finalize(self, state: HeadsState, record: ForwardRecord | None) -> Result:
        answer = self._answer(state)
        places, figures = arranged(answer.heads)
        pairs, nearest = pairs_table(answer.heads, answer.others), nearest_table(answer.heads, self.nearest)
        tables = (pairs, nearest, summary_table(answer.heads), places)
        return Result(closest_table(answer.heads), tables, figures, answer.notes)

    def _kinds(self, metric: str) -> tuple[str, ...]:
        """The kinds of value that a metric has by these settings. Raises SettingsError for unknown ones."""
        if metric == "projection-kernel":
            return kinds_of(self.subspaces, SUBSPACES, "pair of subspaces")
        return kinds_of(self.composition, COMPOSITIONS, "composition") if metric == "composition" else ()

    def _answer(self, state: HeadsState) -> Answer:
        metric = known_metric(self.metric)
        if state.weights is None:
            return by_attention(metric, state.places, state.moments)
        by = by_projection_kernel if metric == "projection-kernel" else by_composition
        return by(state.places, state.weights, self._kinds(metric))


def _refuse_too_few(places: tuple[Place, ...], metric: str) -> None:
    if len(places) < 2:
        raise SettingsError("there is one head and nothing to compare it with", "Choose more --layers or --heads.")
    if metric == "composition" and not runs_before(places).any():
        raise SettingsError("composition needs an earlier and a later layer", "Choose more --layers.")
