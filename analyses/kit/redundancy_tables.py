"""Redundancy as tables: components that reach a share, captured variance, and what shared keys and queries cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .accumulators import Moments
from .captured import components_to_reach, crossings
from .maths import ratio
from .result import Table
from .sharing import LayerTensor, Shared

Floats = NDArray[np.float64]
Curves = Mapping[str, Mapping[str, Floats]]
"""Captured variance (layer, head, component) by scope and matrix; in the scope `layer` one head stands for all."""
COLUMNS = {
    "scope": "head: every head by itself; layer: the chosen heads side by side, W_Q W_K^T then being their sum",
    "layer": "layer, from 0; layers that share weights stand once",
    "head": "head, from 0; empty where heads stand together",
    "matrix": "QK: W_Q W_K^T, K: W_K, Q: W_Q; rows are input dimensions, without biases",
}
SHARED = {
    "layer": COLUMNS["layer"],
    "head": "head, from 0",
    "shared_size": "D, the dimension of shared keys and queries; heads x dk is exact, found without iterations",
}


def parts_of(curves: Curves, layers: Sequence[int], heads: Sequence[int]) -> Iterator[tuple[pd.DataFrame, Floats]]:
    """Keys (scope, layer, head, matrix) and curves (row, component) of every scope and matrix."""
    for scope, matrices in curves.items():
        chosen = heads if scope == "head" else [pd.NA]
        index = pd.DataFrame([(scope, layer, head) for layer in layers for head in chosen])
        index.columns = pd.Index(["scope", "layer", "head"])
        for matrix, values in matrices.items():
            keys = index.astype({"head": "Int64"}).assign(matrix=matrix)
            yield keys, values.reshape(len(keys), -1)


def captured_table(
    curves: Curves, layers: Sequence[int], heads: Sequence[int], counted: tuple[int, ...] | None
) -> Table:
    """Captured variance at every number of components, or at those `counted`."""
    frames = []
    for keys, values in parts_of(curves, layers, heads):
        numbers = np.arange(1, values.shape[1] + 1)
        kept = numbers if counted is None else numbers[np.isin(numbers, counted)]
        frame = keys.loc[keys.index.repeat(len(kept))].reset_index(drop=True)
        frames.append(frame.assign(components=np.tile(kept, len(keys)), captured=values[:, kept - 1].ravel()))
    columns = COLUMNS | {
        "components": "number of the strongest components, from 1",
        "captured": "share of the squared singular values that they hold, 0 to 1; empty for a zero matrix",
    }
    return Table("redundancy-captured", "Captured variance", pd.concat(frames, ignore_index=True), columns)


def components_table(curves: Curves, layers: Sequence[int], heads: Sequence[int], shares: Sequence[float]) -> Table:
    """The components that reach each share, a row for each matrix."""
    frames = []
    for keys, values in parts_of(curves, layers, heads):
        reached = components_to_reach(values, shares)
        frames.append(keys.assign(**{f"components_{share:g}": reached[:, at] for at, share in enumerate(shares)}))
    frame = pd.concat(frames, ignore_index=True)
    columns = COLUMNS | {f"components_{share:g}": _reaching(share) for share in shares}
    return Table("redundancy-components", "Components that reach a share of the variance", frame, columns)


def _reaching(share: float) -> str:
    return f"least number of components that capture {share:g} of the variance, 1 or more; empty for a zero matrix"


def summary_table(curves: Curves, shares: Sequence[float]) -> Table:
    """The same over all layers (and heads): mean and deviation, and where the mean curve crosses each share."""
    rows, columns = [], {name: COLUMNS[name] for name in ("scope", "matrix")} | {"of": "components that there are"}
    for scope, matrices in curves.items():
        for matrix, values in matrices.items():
            row: dict[str, object] = {"scope": scope, "matrix": matrix, "of": values.shape[-1]}
            rows.append(row | _over_layers(values.reshape(-1, values.shape[-1]), shares))
    for share in shares:
        columns[f"components_{share:g}"] = f"mean over layers (and heads): {_reaching(share)}"
        columns[f"components_{share:g}_std"] = "its standard deviation over layers (and heads) (n - 1)"
        columns[f"mean_curve_{share:g}"] = f"where the mean curve crosses {share:g}, interpolated between components"
    title = "Components that reach a share of the variance, over layers"
    return Table("redundancy", title, pd.DataFrame(rows), columns, counts=("of",))


def _over_layers(curves: Floats, shares: Sequence[float]) -> dict[str, float]:
    reached, mean = moments_of(components_to_reach(curves, shares)), moments_of(curves).mean
    row = {}
    for at, share in enumerate(shares):
        row[f"components_{share:g}"], row[f"components_{share:g}_std"] = reached.mean[at], reached.std[at]
        row[f"mean_curve_{share:g}"] = crossings(mean, [share])[0]
    return row


def moments_of(rows: Floats) -> Moments:
    """Moments over the first axis; NaN is left out."""
    moments = Moments.empty(*rows.shape[1:])
    moments.add(rows)
    return moments


def headline(summary: Table, shares: Sequence[float]) -> Table:
    """What of the summary fits the terminal: the means."""
    shown = ["scope", "matrix", "of", *(f"components_{share:g}" for share in shares)]
    return Table(summary.name, summary.title, summary.frame[shown], summary.columns, summary.counts)


def shared_table(layers: Sequence[int], tensors: Sequence[LayerTensor], found: Sequence[Sequence[Shared]]) -> Table:
    """Every layer's decompositions (layer, size): error, error without sharing, iterations."""
    rows = []
    for layer, tensor, sizes in zip(layers, tensors, found, strict=True):
        for one in sizes:
            size = one.factors.size
            sides = (tensor.errors(one.factors), tensor.norms)
            error = ratio(*(np.linalg.norm(side, axis=0, keepdims=True) for side in sides)).item()
            rows.append((layer, size, error, tensor.error_apart(size), one.iterations, one.converged))
    columns = {
        "layer": SHARED["layer"],
        "shared_size": SHARED["shared_size"],
        "error": "|T - decomposition|_F / |T|_F, T the stack of the heads' W_Q W_K^T; 0 (exact) to 1; empty for zero",
        "error_apart": "the same of the D strongest singular directions of all heads, none shared; 0 to 1",
        "iterations": "iterations taken; 0 where none was needed",
        "converged": "whether the error changed by less than the tolerance at last",
    }
    frame = pd.DataFrame(rows, columns=list(columns))
    counts = ("iterations", "converged")
    return Table("redundancy-shared", "Keys and queries shared by all heads", frame, columns, counts)


def shared_heads_table(
    layers: Sequence[int], heads: Sequence[int], tensors: Sequence[LayerTensor], found: Sequence[Sequence[Shared]]
) -> Table:
    """Every head's own error in the decompositions (layer, size)."""
    rows = []
    for layer, tensor, sizes in zip(layers, tensors, found, strict=True):
        for one in sizes:
            errors = ratio(tensor.errors(one.factors), tensor.norms)
            rows += [(layer, head, one.factors.size, value) for head, value in zip(heads, errors, strict=True)]
    columns = SHARED | {"error": "|M_h - A diag(b_h) C^T|_F / |M_h|_F with M_h = W_Q W_K^T, 0 or more; empty for zero"}
    frame = pd.DataFrame(rows, columns=list(columns))
    return Table("redundancy-shared-heads", "Shared keys and queries by head", frame, columns)
