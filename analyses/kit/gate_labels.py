"""From the scores of an attention map to its gate and its pattern: thresholds, in this project's own order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .gate_scores import SCORES, SLACK

Floats = NDArray[np.float64]
GATES = (
    "closed",
    "directional",
    "backward contextual",
    "forward contextual",
    "symmetric context",
    "instance",
    "cluster",
    "open",
    "mixed",
)
"""The gates in the order in which they are decided."""
PATTERNS = ("vertical", "diagonal", "vertical+diagonal", "block", "heterogeneous")
"""The classes of Kovaleva et al. 2019, who had people and a network tell them; the rules here are our own."""


class Criterion(NamedTuple):
    """What makes a label: whether each map meets it, and the score that says how well."""

    label: int
    met: NDArray[np.bool_]
    score: Floats
    threshold: float


@dataclass(frozen=True)
class Rules:
    """Thresholds of every label, and which of two readings "open" and "directional" have."""

    closed: float = 0.9
    directional: float = 0.5
    contextual: float = 0.5
    instance: float = 0.5
    column_spread: float = 0.15
    cluster: float = 0.3
    open: float = 0.9
    pattern: float = 0.5
    open_as: Literal["uniform", "identity"] = "uniform"
    directional_as: Literal["diagonal", "column"] = "diagonal"

    def gates(self, scores: Floats) -> Floats:
        """The gate of each map, as its place in GATES. Shape (..., score), in the order of SCORES, to (...).

        NaN below two units that are not special. The first criterion that is met decides, else the gate is mixed.
        """
        return _decide(self.criteria(scores), scores, len(GATES) - 1)

    def strengths(self, scores: Floats) -> Floats:
        """How far each map is from being another gate: shape (..., score) to (..., gate).

        The deciding score of each gate; for mixed, how far the map stays below the nearest threshold.
        """
        found = np.full((*scores.shape[:-1], len(GATES)), np.nan)
        nearest = np.full(scores.shape[:-1], np.inf)
        for label, _, score, threshold in self.criteria(scores):
            found[..., label] = score
            nearest = np.fmin(nearest, threshold - score)
        found[..., -1] = nearest
        return found

    def patterns(self, scores: Floats) -> Floats:
        """The pattern of each map, as its place in PATTERNS; shapes and NaN as in `gates`.

        Both of vertical and diagonal: each holds at least half of what one alone must.
        """
        of, least = _reader(scores), self.pattern
        both = np.minimum(of("vertical"), of("adjacent"))
        criteria = [
            _criterion(PATTERNS.index("vertical+diagonal"), both, least / 2),
            *(
                _criterion(PATTERNS.index(label), of(score), least)
                for label, score in (("vertical", "vertical"), ("diagonal", "adjacent"), ("block", "block"))
            ),
        ]
        return _decide(criteria, scores, len(PATTERNS) - 1)

    def criteria(self, scores: Floats) -> list[Criterion]:
        """What each gate asks for, in the order of decision."""
        of = _reader(scores)
        back, ahead = of("backward"), of("forward")
        few = _criterion(GATES.index("instance"), of("columns"), self.instance)
        alike = _reached(-of("column_spread"), -self.column_spread)
        pointing = of("column" if self.directional_as == "column" else "diagonal")
        identity = [_criterion(GATES.index("open"), of("self"), self.directional)]
        uniform = [_criterion(GATES.index("open"), of("entropy_share"), self.open)]
        return [
            _criterion(GATES.index("closed"), of("sink"), self.closed),
            *(identity if self.open_as == "identity" else []),
            _criterion(GATES.index("directional"), pointing, self.directional),
            *self._contextual(back, ahead),
            few._replace(met=few.met & alike),
            _criterion(GATES.index("cluster"), of("cluster"), self.cluster),
            *(uniform if self.open_as == "uniform" else []),
        ]

    def _contextual(self, back: Floats, ahead: Floats) -> list[Criterion]:
        before, behind = back > 2 * ahead + SLACK, ahead > 2 * back + SLACK
        found = []
        for label, score, also in (
            ("backward contextual", back, before),
            ("forward contextual", ahead, behind),
            ("symmetric context", back + ahead, ~before & ~behind),
        ):
            plain = _criterion(GATES.index(label), score, self.contextual)
            found.append(plain._replace(met=plain.met & also))
        return found


def _reader(scores: Floats) -> Callable[[str], Floats]:
    names = list(SCORES)
    return lambda name: scores[..., names.index(name)]


def _criterion(label: int, score: Floats, threshold: float) -> Criterion:
    return Criterion(label, _reached(score, threshold), score, threshold)


def _reached(score: Floats, threshold: float) -> NDArray[np.bool_]:
    return score >= threshold - SLACK


def _decide(criteria: Sequence[Criterion], scores: Floats, otherwise: int) -> Floats:
    met, labels = [criterion.met for criterion in criteria], [float(criterion.label) for criterion in criteria]
    return np.where(_reader(scores)("n") >= 2, np.select(met, labels, float(otherwise)), np.nan)
