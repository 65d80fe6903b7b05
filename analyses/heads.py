"""Head against head: shared subspaces, composition, and how alike two heads attend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from .kit.accumulators import Moments
from .kit.analysis import ALL, Analysis, Selection, SettingsError, State, setting
from .kit.comparison import (
    Pairing,
    Place,
    closest_table,
    nearest_table,
    pairs_table,
    places_of,
    runs_before,
    summary_table,
)
from .kit.head_answers import BY_WEIGHTS, Answer, by_attention
from .kit.head_figures import arranged
from .kit.head_graph import edge_count, strongest
from .kit.head_metrics import METRICS, OF_TEXT, canonical, chosen_kinds, known_metric, metrics_table
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

    Every metric gives all pairs, each head's nearest, a clustered heat map, a map of heads, and the strongest pairs as
    a directed graph from earlier to later layers (GraphML) with its hubs.

    From the weights: projection-kernel (Yamagiwa et al., arXiv 2601.10266; beside it the mean, standard deviation and
    z of random subspaces, and their informativeness, KL(random || empirical) in nats, whose estimator is our own
    choice: a normal density against a kernel density); principal-angles of the same subspaces, in degrees;
    bilinear-cosine of W_Q^T W_K and content-bias-cosine of b_Q^T W_K (Cordonnier et al. 2020), as cosines our own
    choice; composition (Elhage et al. 2021; always earlier to later). From a text or corpus: jensen-shannon
    (Clark et al. 2019, here a mean over rows without smoothing) and correlation (our own choice), special tokens
    kept, mean over rows, then over texts; both cost heads^2 / 2 times tokens^2 operations a text, logarithms for the
    former. `--metric` alone lists them.

    Example: bertgeo heads --metric projection-kernel --subspaces OQ --direction earlier-to-later
    """

    optional_values: ClassVar[Mapping[str, str]] = {"metric": "list"}

    layers: Selection = setting(ALL, "Layers, from 0: all, or such as 0,3-5,-1.")
    heads: Selection = setting(ALL, "Heads, from 0: all, or such as 0,3-5,-1.")
    metric: str = setting("projection-kernel", "Which metric; without a value, lists them.")
    subspaces: str = setting(
        "QQ",
        "Subspaces of projection-kernel and principal-angles: pairs of Q, K, V, O separated by commas, the head's "
        "first (OQ: what one writes in what the other's queries read), or all sixteen.",
    )
    composition: str = setting("all", "Q, K or V composition, separated by commas, or all three.")
    direction: Literal["all", "earlier-to-later"] = setting(
        "all",
        "Ordered pairs of heads: all, or, as published for projection kernels, from a head to one of a strictly later "
        "layer.",
    )
    nearest: int = setting(5, "Nearest heads to list for each head.")
    edges: str = setting(
        "3%", "Strongest earlier-to-later pairs that are the graph, of each kind: a share (published: 3%) or a number."
    )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention"} if canonical(self.metric) in OF_TEXT else ())

    def listing(self) -> Table | None:
        if self.metric == "list":
            return metrics_table()
        known_metric(self.metric)
        for metric in METRICS:
            self._kinds(metric)  # a wrong --composition is refused even where another metric would not read it
        edge_count(self.edges, 1)
        if self.nearest < 1:
            raise SettingsError(f"{self.nearest} nearest heads are no list", "Give --nearest 1 or more.")
        return None

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> HeadsState:
        self.listing()
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        places = places_of(layers, heads, range(shape.layers) if self.needs else shape.weight_layer)
        _refuse_too_few(places, self._only_later)
        if weights is not None and canonical(self.metric) == "content-bias-cosine":
            _refuse_without_bias(weights)
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
        graph = strongest(answer.heads, self.edges)
        pairs, nearest = pairs_table(answer.heads, answer.others), nearest_table(answer.heads, self.nearest)
        tables = (pairs, nearest, summary_table(answer.heads), places, *answer.tables, *graph.tables)
        figures, notes = (*figures, *answer.figures, *graph.figures), (*answer.notes, *graph.notes)
        return Result(closest_table(answer.heads), tables, figures, notes, graphs=graph.graphs)

    @property
    def _only_later(self) -> bool:
        return self.direction != "all" or canonical(self.metric) == "composition"

    def _kinds(self, metric: str) -> tuple[str, ...]:
        """The kinds of value that a metric has by these settings. Raises SettingsError for unknown ones."""
        kinds = METRICS[metric].kinds
        return chosen_kinds(kinds, getattr(self, kinds.setting)) if kinds else ()

    def _answer(self, state: HeadsState) -> Answer:
        metric, pairing = known_metric(self.metric), Pairing.of(state.places, only_later=self._only_later)
        if state.weights is None:
            return by_attention(metric, state.places, state.moments, pairing)
        return BY_WEIGHTS[metric](state.places, state.weights, self._kinds(metric), pairing)


def _refuse_too_few(places: tuple[Place, ...], only_later: bool) -> None:
    if len(places) < 2:
        raise SettingsError("there is one head and nothing to compare it with", "Choose more --layers or --heads.")
    if only_later and not runs_before(places).any():
        raise SettingsError("earlier-to-later pairs need an earlier and a later layer", "Choose more --layers.")


def _refuse_without_bias(weights: HeadWeights) -> None:
    if not weights.query_bias.any():
        raise SettingsError("the model's queries have no bias, so there is no content bias", "Choose another --metric.")
