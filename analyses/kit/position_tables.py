"""Whether a model sees order, and the geometry of its positions, as tables, figures and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .position_geometry import Places, geometry_tables
from .record import TokenizedText
from .result import Figure, Heatmap, Lines, Result, Series, Table
from .word_order import DIFFERENCES, differences, token_differences

Floats = NDArray[np.float64]

WITHOUT, WITH = "without", "with"
PROVED = 1e-6
"""Largest relative difference that counts as none."""
EQUAL = 1e-17
"""Where exactly equal outputs stand on a logarithmic axis."""
KEYS = {
    "positions": "without: rows of 0 instead of position embeddings; with: the model as it is",
    "depth": "0 is the first layer's input, l + 1 the output of layer l",
}


@dataclass(frozen=True)
class Reordering:
    """A text, the order of its tokens in another, and hidden states (depth, token, width) of both, by `positions`."""

    text: TokenizedText
    order: tuple[int, ...]
    states: Mapping[str, tuple[Floats, Floats]]
    what: str

    def measured(self, positions: str) -> Floats:
        """The values of DIFFERENCES: (depth, value)."""
        return differences(*self.states[positions], self.order)


def verdict(found: Mapping[str, Floats]) -> str:
    """What the largest relative differences over all depths, without and with positions, prove."""
    largest = {name: values[:, list(DIFFERENCES).index("largest_relative")] for name, values in found.items()}
    without, with_them = (float(largest[name].max()) for name in (WITHOUT, WITH))
    if not without <= PROVED:
        depth = int(largest[WITHOUT].argmax())
        return (
            f"Not proved: without positions outputs still differ by {without:.2g} of the largest entry (depth {depth})."
            " This model also sees order in another way."
        )
    if not with_them > PROVED:
        return f"Order is not seen here: with positions, too, outputs differ by {with_them:.2g} of the largest entry."
    return (
        f"Order is seen only through positions: proved to {PROVED:g} on this text, in float64. Without them outputs "
        f"follow their tokens to {without:.2g} of the largest entry; with them they differ by up to {with_them:.2g}."
    )


def positions_result(seen: Reordering, places: Places) -> Result:
    """The answer: the order test, and the geometry of the embeddings."""
    found = {name: seen.measured(name) for name in seen.states}
    depths, tokens = _depths(found), _tokens(seen)
    last = dict(zip(DIFFERENCES, found[WITH][-1].tolist(), strict=True))
    geometry = geometry_tables(places)
    notes = (
        verdict(found),
        f"{seen.what} With positions the last depth differs by {last['distance']:.3g} of its norm; mean cosine of a "
        f"token with itself {last['cosine']:.3g}, least {last['cosine_least']:.3g}.",
        _geometry_note(geometry[0].frame),
    )
    figures = _order_figure(found, seen), _token_figure(tokens, seen), _geometry_figure(places)
    return Result(_headline(found), (depths, tokens, *geometry), figures, notes)


def _geometry_note(frame: pd.DataFrame) -> str:
    raw, centred = frame.iloc[0], frame.iloc[1]
    return (
        f"Position embeddings ({raw['positions']} x {raw['width']}): 90 % of sum sigma^2 in {raw['directions_90']:.0f} "
        f"directions ({centred['directions_90']:.0f} less the mean), participation ratio "
        f"{raw['participation_ratio']:.3g} ({centred['participation_ratio']:.3g}); the nearest by cosine is adjacent "
        f"for {raw['adjacent_share']:.1%} of positions."
    )


def _depths(found: Mapping[str, Floats]) -> Table:
    frames = []
    for name, values in found.items():
        frame = pd.DataFrame(values, columns=list(DIFFERENCES))
        frame.insert(0, "positions", name)
        frame.insert(1, "depth", np.arange(len(values)))
        frames.append(frame)
    title = "Outputs of the reordered text against the given one's, reordered alike"
    return Table("positions-depths", title, pd.concat(frames, ignore_index=True), KEYS | dict(DIFFERENCES))


def _headline(found: Mapping[str, Floats]) -> Table:
    shown = {WITHOUT: ("largest", "largest_relative"), WITH: ("largest_relative", "distance", "cosine")}
    depths = len(found[WITH])
    frame, columns = pd.DataFrame({"depth": range(depths)}), {"depth": KEYS["depth"]}
    for name, values in shown.items():
        for value in values:
            frame[f"{name}_{value}"] = found[name][:, list(DIFFERENCES).index(value)]
            columns[f"{name}_{value}"] = f"{name} positions: {DIFFERENCES[value]}"
    title = "Each token in the other order against itself in the given one, without and with position embeddings"
    return Table("positions-order", title, frame, columns)


def _tokens(seen: Reordering) -> Table:
    cosine, distance = token_differences(*seen.states[WITH], seen.order)
    depths, tokens = cosine.shape
    at = np.array(seen.order)
    frame = pd.DataFrame(
        {
            "depth": np.repeat(np.arange(depths), tokens),
            "token": np.tile(np.arange(tokens), depths),
            "text": np.tile(np.array([seen.text.labels[old] for old in at], dtype=object), depths),
            "was": np.tile(at, depths),
            "cosine": cosine.ravel(),
            "distance": distance.ravel(),
        }
    )
    columns = {
        "depth": KEYS["depth"],
        "token": "place in the reordered text, from 0",
        "text": "the token",
        "was": "its place in the text as given",
        "cosine": DIFFERENCES["cosine"].removeprefix("mean over tokens of the "),
        "distance": "|h' - h| / |h| of its vectors, 0 or more",
    }
    return Table("positions-tokens", "Every token with positions, against itself in the given text", frame, columns)


def _order_figure(found: Mapping[str, Floats], seen: Reordering) -> Figure:
    x = np.arange(float(len(found[WITH])))
    column = dict(zip(DIFFERENCES, range(len(DIFFERENCES)), strict=True))
    logs = {
        f"{name} positions": np.log10(np.maximum(values[:, column["largest_relative"]], EQUAL))
        for name, values in found.items()
    }
    largest = tuple(Series(name, x, y, dashed=name.startswith(WITHOUT)) for name, y in logs.items())
    apart = Series("distance", x, found[WITH][:, column["distance"]])
    alike = Series("cosine", x, found[WITH][:, column["cosine"]])
    panels = (
        Lines(largest, "depth", "log10 of the largest difference", "Largest difference / largest entry"),
        Lines((apart, alike), "depth", "|H' - P H| / |H|, mean cosine", "With positions", low=0.0),
    )
    equal = " Exactly equal outputs stand at -17." if any((y <= np.log10(EQUAL)).any() for y in logs.values()) else ""
    note = f"{seen.what} H': outputs of the reordered text; P H: those of the given text, reordered alike.{equal}"
    return Figure("positions-order", "Is order seen?", panels, 2, note)


def _token_figure(tokens: Table, seen: Reordering) -> Figure:
    values = 1 - tokens.frame.pivot(index="depth", columns="token", values="cosine").to_numpy()
    labels = [seen.text.labels[old] + "*" * (old != new) for new, old in enumerate(seen.order)]
    depths = tuple(map(str, range(len(values))))
    panel = Heatmap(values, "", depths, tuple(labels), "depth", "token, reordered", "1 - cosine", high=None)
    note = f"{seen.what} *: the token has another place than in the text as given. With positions."
    return Figure("positions-tokens", "How far each token turns in the other order", (panel,), note=note)


def _geometry_figure(places: Places) -> Figure:
    kinds: Sequence[tuple[str, Places]] = (("raw", places), ("centred", places.centred))
    held, alike = [], []
    for name, own in kinds:
        mean, deviation = own.by_distance()
        held.append(Series(name, np.arange(1.0, len(own.shares) + 1), own.shares.cumsum()))
        alike.append(Series(name, np.arange(1.0, len(mean) + 1), mean, mean - deviation, mean + deviation))
    panels = (
        Heatmap(places.cosines, "Cosine, raw", (), (), "position", "position", "cosine", None, None, diverging=True),
        Heatmap(
            kinds[1][1].cosines, "Cosine, centred", (), (), "position", "position", "cosine", None, None, diverging=True
        ),
        Lines(tuple(held), "singular directions", "share of sum sigma^2", "Spectrum", False, 0.0, 1.0, log_x=True),
        Lines(tuple(alike), "places apart", "mean cosine", "Cosine by distance"),
    )
    note = "Centred: less the mean over positions. Bands: one standard deviation over pairs either side."
    return Figure("positions-geometry", "Geometry of the position embeddings", panels, 2, note)
