"""What was kept of the stream of vectors, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .accumulators import Counts, Moments
from .distribution import histogram
from .head_spectra import SPECTRA
from .mixing import MIXING
from .result import Table
from .stream_points import POINTS, Distributions, Points, outlier_channels
from .sublayers import LAYER_NORMS, NORMS, STEPS, SUBLAYERS
from .tables import moment_columns

Floats = NDArray[np.float64]

LAYER = {"layer": "layer, from 0"}
POINT = {"point": "; ".join(f"{name}: {meaning}" for name, meaning in POINTS.items())}
HEAD = {"head": "head, from 0"}
TEXTS = {"texts": "texts measured"}
ENTRIES = {
    "mean": "mean of the entries of all vectors of all texts",
    "std": "standard deviation of the entries (n), 0 or more",
    "skewness": "m3 / m2^1.5 of the entries, 0 for symmetric ones; empty for constant ones",
    "excess_kurtosis": "m4 / m2^2 - 3 of the entries, -2 or more, 0 for normal ones; empty for constant ones",
    "jarque_bera_per_entry": "skewness^2 / 6 + excess_kurtosis^2 / 24: the Jarque-Bera statistic divided by the number "
    "of entries, 0 for normal ones",
    "norm_mean": "mean length of the vectors, over all tokens",
    "norm_std": "standard deviation of their lengths (n), over all tokens",
    "norm_skewness": "skewness of their lengths; empty for constant ones",
}
OUTLIERS = {
    "mean": "mean of the channel over tokens",
    "mean_bound": "what |mean| has to exceed: mean + k standard deviations over channels",
    "variance": "variance of the channel over tokens",
    "variance_bound": "what it has to exceed, likewise",
    "variance_share": "share of the summed variance of all channels, 0 to 1",
}
BINS = {
    "low": "lower edge of the bin",
    "high": "upper edge; edges are powers of two and seven between each two, the same for all data",
    "density": "share of all entries per unit of length: its area is 1",
}


@dataclass(frozen=True)
class Part:
    """The table of a part: its title, what a row is beside its layer (None: nothing more), its values."""

    title: str
    rows: Mapping[str, str] | None
    names: tuple[str, ...]
    values: Mapping[str, str]


PARTS = {
    "steps": Part(
        "How far sublayers move a token (mean over texts of means over tokens)",
        {"sublayer": "attention or mlp, without its LayerNorm; block: from layer input to layer output"},
        tuple(SUBLAYERS),
        STEPS,
    ),
    "layernorms": Part(
        "What each LayerNorm does (mean over texts)",
        {"norm": "attention: behind the attention's residual; mlp: behind the MLP's"},
        tuple(NORMS),
        LAYER_NORMS,
    ),
    "mixing": Part("Share of a token's new vector that comes from other tokens", None, (), MIXING),
    "spectra": Part("Spectra of attention, scores and head outputs by head", HEAD, (), SPECTRA),
}


@dataclass(frozen=True)
class Kept:
    """How much was seen, where, and from how many standard deviations on a channel is an outlier."""

    counts: Counts
    points: Points
    deviations: int


def distribution_tables(seen: Distributions, kept: Kept) -> list[Table]:
    """Moments by point and head, outlier channels, histograms."""
    return [_moments_table(seen, kept), _outlier_table(seen, kept), _histogram_table(seen, kept)]


def _moments_table(seen: Distributions, kept: Kept) -> Table:
    rows = [
        (layer, point, head, at)
        for layer in kept.points.layers
        for point, stack in kept.points.block(layer)
        for at, (*own, head) in enumerate(kept.points.cells)
        if tuple(own) == stack
    ]
    frame = pd.DataFrame(rows, columns=["layer", "point", "head", "at"]).astype({"head": "Int64"})
    chosen = seen.moments.at(frame.pop("at").to_numpy())
    entries, norms = chosen.at(np.s_[:, 0]), chosen.at(np.s_[:, 1])
    frame["texts"], frame["tokens"], frame["entries"] = kept.counts.texts, norms.count, entries.count
    found = (entries.mean, entries.std, entries.skewness, entries.excess_kurtosis, entries.jarque_bera)
    for name, values in zip(ENTRIES, (*found, norms.mean, norms.std, norms.skewness), strict=True):
        frame[name] = values
    counts = TEXTS | {"tokens": "vectors measured", "entries": "their entries"}
    columns = LAYER | POINT | {"head": "head, from 0; empty for points of the model's width"} | counts | ENTRIES
    return Table("stream", "Entries and norms of vectors by layer and point", frame, columns, tuple(counts))


def _outlier_table(seen: Distributions, kept: Kept) -> Table:
    rows: list[tuple[object, ...]] = []
    for layer in kept.points.layers:
        for point, stack in kept.points.block(layer):
            if stack in kept.points.wide:
                rows += [(layer, point, *row) for row in _outliers(seen, kept, stack)]
    columns = LAYER | POINT | {"channel": "channel of the vectors, from 0"} | OUTLIERS
    kinds = dict.fromkeys(columns, float) | {"layer": int, "channel": int, "point": object}
    frame = pd.DataFrame(rows, columns=list(columns)).astype(kinds)
    title = f"Outlier channels: |mean| or variance beyond {kept.deviations} standard deviations over channels"
    return Table("stream-outliers", title, frame, columns)


def _outliers(seen: Distributions, kept: Kept, stack: tuple[str, int]) -> list[tuple[float, ...]]:
    tokens = int(seen.moments.count[kept.points.cells.index((*stack, None)), 1])
    sums = seen.channels.values[kept.points.wide.index(stack)]
    mean, variance, (low, high), beyond = outlier_channels(sums, tokens, kept.deviations)
    total = max(variance.sum(), np.finfo(float).tiny)
    return [(channel, mean[channel], low, variance[channel], high, variance[channel] / total) for channel in beyond]


def _histogram_table(seen: Distributions, kept: Kept) -> Table:
    frames = []
    for layer in kept.points.layers:
        for point, stack in kept.points.block(layer):
            found = histogram(seen.histograms.values[kept.points.stacks.index(stack)])
            values = {"entries": found.counts.astype(np.int64), "low": found.low, "high": found.high}
            at = {"layer": layer, "point": point, "bin": np.arange(len(found.counts))}
            frames.append(pd.DataFrame(at | values | {"density": found.density}))
    counted = {"bin": "number of the bin among those of this point, from 0", "entries": "entries in it"}
    frame = pd.concat(frames, ignore_index=True)
    title = "Histograms of entries, heads together, on bins that no data move"
    return Table("stream-histograms", title, frame, LAYER | POINT | counted | BINS, ("entries",))


def part_table(name: str, moments: Moments, kept: Kept) -> Table:
    """The values of a part by layer (and sublayer, or head)."""
    part = PARTS[name]
    rows = part.names or (kept.points.heads if part.rows else (None,))
    frame = pd.DataFrame({"layer": np.repeat(kept.points.layers, len(rows))})
    for column in part.rows or ():
        frame[column] = list(rows) * len(kept.points.layers)
    frame["texts"] = kept.counts.texts
    values, columns = moment_columns(moments, list(part.values), part.values)
    columns = LAYER | dict(part.rows or {}) | TEXTS | columns
    return Table(f"stream-{name}", part.title, pd.concat([frame, values], axis=1), columns)


def output_table(conditions: Floats, kept: Kept) -> Table:
    """The condition number of W_O by layer."""
    finite = np.where(np.isfinite(conditions), conditions, np.nan)
    frame = pd.DataFrame({"layer": kept.points.layers, "output_condition": finite})
    meaning = "sigma_1 / sigma_d of W_O, all heads joined, 1 or more; empty where it is singular"
    return Table("stream-weights", "Condition of W_O", frame, LAYER | {"output_condition": meaning})


def headline(tables: Sequence[Table], layers: Sequence[int]) -> Table:
    """A few values of each part, a row a layer."""
    frame, columns = pd.DataFrame({"layer": layers}), dict(LAYER)
    for table in tables:
        for name, (about, value, meaning) in _told(table).items():
            frame[name] = about.groupby("layer", sort=True)[value].mean().to_numpy()
            columns[name] = meaning
    return Table("stream-layers", "The stream by layer", frame, columns)


TOLD: Mapping[str, tuple[tuple[str, str, str, str], ...]] = {
    "stream": (
        ("norm", "point", "layer_output", "norm_mean"),
        ("excess_kurtosis", "point", "layer_output", "excess_kurtosis"),
    ),
    "stream-steps": (
        ("attention_update", "sublayer", "attention", "update_ratio"),
        ("mlp_update", "sublayer", "mlp", "update_ratio"),
    ),
    "stream-layernorms": (
        ("attention_norm_scale", "norm", "attention", "scale"),
        ("mlp_norm_scale", "norm", "mlp", "scale"),
    ),
    "stream-mixing": tuple((name, "", "", name) for name in MIXING),
    "stream-spectra": (
        ("attention_entropy_share", "", "", "attention_entropy_share"),
        ("output_effective_rank", "", "", "output_effective_rank"),
    ),
}
"""What the headline says of each table: its own name for it, the rows chosen (column, value), and the value."""


def _told(table: Table) -> dict[str, tuple[pd.DataFrame, str, str]]:
    return {
        name: (
            table.frame[table.frame[column] == chosen] if column else table.frame,
            value,
            f"{meaning(table, value, chosen)}",
        )
        for name, column, chosen, value in TOLD.get(table.name, ())
    }


def meaning(table: Table, value: str, chosen: str) -> str:
    """A column's description with the rows it is taken from."""
    where = f" ({chosen})" if chosen else " (mean over heads)" if "head" in table.frame else ""
    return f"{table.columns[value]}{where}"
