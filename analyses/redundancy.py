"""How redundant the heads of a layer are: directions that they need, and keys and queries that they could share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .kit.analysis import ALL, Analysis, Selection, SettingsError, State, setting
from .kit.captured import MATRICES, captured_by_matrix, together
from .kit.record import ForwardRecord, HeadWeights, ModelShape
from .kit.redundancy_figures import captured_figures, components_figure, shared_figure
from .kit.redundancy_tables import (
    captured_table,
    components_table,
    headline,
    shared_heads_table,
    shared_table,
    summary_table,
)
from .kit.result import Result, Table
from .kit.shared_attention import SharedAttention
from .kit.sharing import (
    LARGEST_SEED,
    LayerTensor,
    Shared,
    Sharing,
    layer_tensors,
    refuse_missing_tensorly,
    refuse_no_size,
    shared,
)

Floats = NDArray[np.float64]


@dataclass
class RedundancyState(State):
    """The layers asked for, by the first that runs each one's weights, and the weights."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    tensors: tuple[LayerTensor, ...]


@dataclass(frozen=True)
class Redundancy(Analysis[RedundancyState]):
    """How redundant the heads of a layer are: directions that they need, keys and queries that they could share.

    Captured variance of W_Q W_K^T, W_K and W_Q over their principal components, per head and with all heads side by
    side, where W_Q W_K^T is the sum of the heads' products, and the components that reach given shares (Cordonnier,
    Loukas and Jaggi 2020, arXiv 2006.16362, figure 1). Rows are input dimensions, biases are left out; whether the
    paper centres the rows is not known, so they are not unless --center says so.

    With --shared-size D, the heads' queries and keys are replaced by D that all share, mixed by a vector a head: a
    CP (PARAFAC) decomposition of the layer's W_Q W_K^T by alternating least squares, as the paper re-parametrises
    trained models. Beside its error stands that of D singular directions of which no two heads share any (this
    project's own). The decomposition is a local optimum: --initial random with other seeds may find another.

    Of a text or corpus it also tells what the replacement changes in logits and attention weights, and the
    Jensen-Shannon divergence of attention rows. Logits stay divided by sqrt(dk), where the paper's code divides by
    sqrt(D / heads); b_Q stays as the content bias, b_K is left out, since the softmax does not see it.

    Example: bertgeo redundancy --corpus corpus.txt --shared-size 96,192
    """

    layers: Selection = setting(ALL, "Layers, from 0: all, or such as 0,3-5,-1.")
    heads: Selection = setting(ALL, "Heads, from 0: all, or such as 0,3-5,-1; others count as if they were not there.")
    center: bool = setting(False, "Take the mean row off every matrix first, as principal component analysis does.")
    shares: str = setting("0.5,0.9,0.95,0.99", "Shares of the variance to be reached, separated by commas.")
    components: str = setting("all", "Numbers of components to tabulate, separated by commas, or all.")
    shared_size: str = setting("none", "Sizes D of shared keys and queries, separated by commas; heads x dk is exact.")
    initial: Literal["directions", "random"] = setting(
        "directions",
        "Start of the decomposition: singular directions of the heads, each chosen for what those before it leave "
        "(this project's own), or random (the paper's).",
    )
    solver: Literal["factored", "tensorly"] = setting(
        "factored",
        "factored: the same steps from the thin factors; tensorly: its parafac on the dense tensor, as the paper's "
        "code has it (slow, over twice 8 width^2 D bytes).",
    )
    iterations: int = setting(100, "Most iterations of the decomposition (100 in the paper's code).", least=1)
    tolerance: float = setting(
        1e-6, "It ends when the relative error changes by less (1e-6 in the paper's code).", least=0
    )
    seed: int = setting(0, "Seed of --initial random.", least=0)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def on_texts(self) -> Analysis[Any] | None:
        return SharedAttention(tuple(self._sharings()), self.layers, self.heads) if self._sizes() else None

    def listing(self) -> Table | None:
        self._shares()
        self._counted()
        if self._sizes() and self.solver == "tensorly":
            refuse_missing_tensorly()
        if self.seed > LARGEST_SEED:
            raise SettingsError(f"--seed {self.seed} is too large", f"Choose from 0 to {LARGEST_SEED}.")
        return None

    def start(self, shape: ModelShape, weights: HeadWeights | None) -> RedundancyState:
        assert weights is not None
        self.listing()
        layers, heads = self.layers.resolve(shape.layers, "layer"), self.heads.resolve(shape.heads, "head")
        tensors = layer_tensors(weights, [shape.weight_layer[layer] for layer in layers], heads)
        for size in self._sizes():
            refuse_no_size(size, len(heads), shape.head_width)
        self._refuse_past(min(shape.width, len(heads) * shape.head_width))
        first = {shape.weight_layer[layer]: layer for layer in reversed(layers)}
        return RedundancyState(tuple(sorted(first.values())), heads, tensors)

    def finalize(self, state: RedundancyState, record: ForwardRecord | None) -> Result:
        curves = {scope: self._curves(state, scope) for scope in ("head", "layer")}
        places, shares = (state.layers, state.heads), self._shares()
        summary = summary_table(curves, shares)
        tables = [summary, components_table(curves, *places, shares), captured_table(curves, *places, self._counted())]
        figures = [*captured_figures(curves, state.layers), components_figure(curves, state.layers, shares)]
        notes = ["Rows centred." if self.center else "Rows not centred: shares of |W|_F^2."]
        if self._sizes():
            found = [[shared(tensor, how) for how in self._sharings()] for tensor in state.tensors]
            own = shared_table(state.layers, state.tensors, found)
            tables += [own, shared_heads_table(*places, state.tensors, found)]
            figures.append(shared_figure(own.frame))
            notes.append(_convergence(found))
        return Result(headline(summary, shares), tuple(tables), tuple(figures), tuple(notes))

    def _curves(self, state: RedundancyState, scope: str) -> dict[str, Floats]:
        layers = []
        for tensor in state.tensors:
            pair = (tensor.query, tensor.key)
            query, key = map(together, pair) if scope == "layer" else pair
            layers.append(captured_by_matrix(query, key, center=self.center))
        return {matrix: np.stack([layer[matrix] for layer in layers]) for matrix in MATRICES}

    def _shares(self) -> tuple[float, ...]:
        hint = "Give shares above 0 and below 1, such as 0.5,0.9."
        try:
            shares = tuple(dict.fromkeys(float(part) for part in self.shares.split(",")))
        except ValueError:
            raise SettingsError(f"--shares {self.shares!r} are no numbers", hint) from None
        wrong = [share for share in shares if not 0 < share < 1]
        if wrong:
            raise SettingsError(f"no component captures a share of {wrong[0]:g} of the variance", hint)
        return shares

    def _counted(self) -> tuple[int, ...] | None:
        return None if self.components == "all" else _wholes(self.components, "component")

    def _refuse_past(self, most: int) -> None:
        counted = self._counted()
        if counted and counted[0] > most:
            told = f"there are no {counted[0]} components in matrices of rank {most} or less"
            raise SettingsError(told, f"Choose --components from 1 to {most}.")

    def _sizes(self) -> tuple[int, ...]:
        return () if self.shared_size == "none" else _wholes(self.shared_size, "shared size")

    def _sharings(self) -> list[Sharing]:
        settings = (self.iterations, self.tolerance, self.initial, self.seed, self.solver)
        return [Sharing(size, *settings) for size in self._sizes()]


def _convergence(found: Sequence[Sequence[Shared]]) -> str:
    every = [one.converged for layer in found for one in layer]
    told = f"{sum(every)} of {len(every)} decompositions converged."
    return told if all(every) else f"{told} More --iterations may lower the error of the others."


def _wholes(text: str, what: str) -> tuple[int, ...]:
    """Rising whole numbers from 1 in a comma-separated list, each once. Raises SettingsError for others."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise SettingsError(f"{text!r} is no {what}", "Give whole numbers separated by commas.") from None
    if numbers[0] < 1:
        raise SettingsError(f"{what} {numbers[0]} does not exist", "Count from 1.")
    return tuple(numbers)
