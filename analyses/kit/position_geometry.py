"""The geometry of position embeddings: how alike places are, in how many directions they lie, which are neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .isotropy_metrics import spectrum_values
from .maths import cosines, keys_to_reach, ratio
from .result import Table
from .spectra import singular_values_by_gram

Floats = NDArray[np.float64]

VECTORS = {"vectors": "raw: the embeddings as they are; centred: less their mean over positions, which they all share"}
SPECTRUM: Mapping[str, str] = {
    "participation_ratio": "(sum sigma^2)^2 / sum sigma^4 of the singular values, 1 to their number",
    "directions_90": "least number of singular directions that hold 0.9 of sum sigma^2",
    "first_share": "share of sum sigma^2 along the first direction, 0 to 1",
    "adjacent_share": "share of positions whose nearest other by cosine is a neighbour (one place before or after)",
    "adjacent_cosine": "mean cosine of neighbours, -1 to 1",
    "mean_cosine": "mean cosine of all pairs of different positions, -1 to 1",
}
"""Values of the embeddings, raw and centred. All are this project's choice."""


@dataclass(frozen=True)
class Places:
    """Position embeddings (position, width), in the order of positions."""

    vectors: Floats

    @property
    def centred(self) -> Places:
        """The same less their mean."""
        return Places(self.vectors - self.vectors.mean(axis=0))

    @cached_property
    def cosines(self) -> Floats:
        """Cosine of every two positions (position, position), -1 to 1; NaN where one is zero."""
        return cosines(self.vectors @ self.vectors.T)

    @cached_property
    def squares(self) -> Floats:
        """Squares of the singular values, falling."""
        return singular_values_by_gram(self.vectors)[::-1] ** 2

    @property
    def shares(self) -> Floats:
        """Their shares of the sum."""
        return ratio(self.squares, np.broadcast_to(self.squares.sum(), self.squares.shape))

    @cached_property
    def nearest(self) -> NDArray[np.intp]:
        """For every position the other with the largest cosine, the first of equal ones; -1 where there is none."""
        others = np.where(np.isnan(self.cosines), -np.inf, self.cosines)
        np.fill_diagonal(others, -np.inf)
        return np.where(others.max(axis=1) > -np.inf, others.argmax(axis=1), -1)

    @property
    def values(self) -> Floats:
        """The values of SPECTRUM: (6,); NaN where they are undefined."""
        shape = spectrum_values(self.squares)
        known = self.nearest >= 0
        adjacent = (np.abs(self.nearest - np.arange(len(self.nearest))) == 1)[known]
        beside, apart = np.diagonal(self.cosines, 1), self.cosines[np.triu_indices(len(self.cosines), 1)]
        values = shape[2], keys_to_reach(self.shares), shape[0], _mean(adjacent), _mean(beside), _mean(apart)
        return np.array(values, dtype=float)

    def by_distance(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation (n) of the cosines of positions so far apart: (distance,) each, from 1."""
        bands = [np.diagonal(self.cosines, distance) for distance in range(1, len(self.vectors))]
        return np.array([_mean(band) for band in bands]), np.array([_deviation(band) for band in bands])


def _mean(values: NDArray[np.generic]) -> float:
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
    return float(known.mean()) if len(known) else float("nan")


def _deviation(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.std()) if len(known) else float("nan")


def geometry_tables(places: Places) -> list[Table]:
    """What the embeddings' geometry is: values, spectrum, nearest neighbours, cosines by distance."""
    kinds = {"raw": places, "centred": places.centred}
    return [_values(kinds), _spectrum(kinds), _neighbours(places), _distances(kinds)]


def _values(kinds: Mapping[str, Places]) -> Table:
    frame = pd.DataFrame({"vectors": list(kinds)})
    frame["positions"], frame["width"] = next(iter(kinds.values())).vectors.shape
    frame[list(SPECTRUM)] = np.stack([own.values for own in kinds.values()])
    counts = {"positions": "positions that a token can have", "width": "channels of an embedding"}
    columns = VECTORS | counts | dict(SPECTRUM)
    return Table("positions-geometry", "Geometry of the position embeddings", frame, columns, tuple(counts))


def _spectrum(kinds: Mapping[str, Places]) -> Table:
    columns = VECTORS | {
        "component": "singular direction, from 0, by falling singular value",
        "singular_value": "sigma of the embeddings (position, width)",
        "share": "its share of sum sigma^2",
        "cumulative_share": "share of the directions as far as this one",
    }
    frames = []
    for name, own in kinds.items():
        values = (name, np.arange(len(own.squares)), np.sqrt(own.squares), own.shares, own.shares.cumsum())
        frames.append(pd.DataFrame(dict(zip(columns, values, strict=True))))
    frame = pd.concat(frames, ignore_index=True)
    return Table("positions-spectrum", "Singular values of the position embeddings", frame, columns)


def _neighbours(places: Places) -> Table:
    at = np.arange(len(places.vectors))
    known = places.nearest >= 0
    nearest = pd.array(np.where(known, places.nearest, 0), dtype="Int64")
    nearest[~known] = pd.NA
    cosine = np.where(known, places.cosines[at, places.nearest], np.nan)
    frame = pd.DataFrame({"position": at, "nearest": nearest, "apart": abs(nearest - at), "cosine": cosine})
    columns = {
        "position": "position in a text, from 0",
        "nearest": "the other position with the largest cosine (raw embeddings)",
        "apart": "how many places it lies away: 1 is adjacent",
        "cosine": "their cosine, -1 to 1",
    }
    return Table("positions-neighbours", "Nearest neighbour of every position", frame, columns)


def _distances(kinds: Mapping[str, Places]) -> Table:
    frames = []
    for name, own in kinds.items():
        mean, deviation = own.by_distance()
        values = {"vectors": name, "apart": np.arange(1, len(mean) + 1), "cosine": mean, "cosine_std": deviation}
        frames.append(pd.DataFrame(values))
    columns = VECTORS | {
        "apart": "places between two positions: 1 for neighbours",
        "cosine": "mean cosine over all such pairs, -1 to 1",
        "cosine_std": "standard deviation (n) over them",
    }
    frame = pd.concat(frames, ignore_index=True)
    return Table("positions-distances", "Cosine of positions by their distance", frame, columns)
