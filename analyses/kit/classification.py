"""From a [CLS] vector to logits and probabilities: the stages of a classification head as tables and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import expit, softmax

from .contributions import Decomposition, difference, on_channels
from .result import Figure, Heatmap, Result, Table

Floats = NDArray[np.float64]
CHANNELS, LABELS = 8, 12
"""Channels and labels that the figure draws."""

PROBLEMS: Mapping[str, str] = {
    "single_label_classification": "one label of several: p = softmax(z)",
    "multi_label_classification": "each label for itself: p = sigmoid(z)",
    "regression": "a regression: z is the value itself",
}
"""What the logits mean, by the configuration's `problem_type`."""


@dataclass(frozen=True)
class Stage:
    """What one module of the head gives for the [CLS] vector, with its formula and its name in the checkpoint."""

    name: str
    module: str
    formula: str
    values: Floats


@dataclass(frozen=True)
class Classified:
    """One text through a classification head: stages up to the features g, then z = W g + b.

    `weight` is W (label, channel), `bias` b, `logits_of_pass` z in the model's own arithmetic; all else is float64.
    """

    stages: Sequence[Stage]
    weight: Floats
    bias: Floats
    logits_of_pass: Floats
    output: str
    labels: Sequence[str]
    problem: str
    top: int

    @property
    def features(self) -> Floats:
        """g, what the last matrix reads."""
        return self.stages[-1].values

    @cached_property
    def parts(self) -> Decomposition:
        """Every logit as a sum."""
        return Decomposition.of(self.weight, self.bias, self.features, self.top)

    @property
    def probabilities(self) -> Floats | None:
        """softmax(z), sigmoid(z), or None for a regression."""
        return probabilities(self.parts.logits, self.problem)

    @property
    def order(self) -> list[int]:
        """The labels by falling logit."""
        return np.argsort(-self.parts.logits, kind="stable").tolist()


def probabilities(logits: Floats, problem: str) -> Floats | None:
    """What the logits (label,) say of each label, 0 to 1; None for a regression.

    >>> probabilities(np.array([0.0, 0.0]), "single_label_classification").tolist()
    [0.5, 0.5]
    >>> probabilities(np.array([0.0, 0.0, 0.0]), "multi_label_classification").tolist()
    [0.5, 0.5, 0.5]
    """
    if problem == "regression":
        return None
    return softmax(logits) if problem == "single_label_classification" else expit(logits)


def result_of(classified: Classified) -> Result:
    """The answer: labels, stages, contributions, what sets the first two labels apart, and a figure."""
    labels = _labels_table(classified)
    tables = [labels, _stages_table(classified), _channels_table(classified), _contributions_table(classified)]
    if classified.problem == "single_label_classification" and len(classified.labels) > 1:
        tables.append(_difference_table(classified))
    return Result(labels, tuple(tables), (_figure(classified),), (_rounding(classified),))


def _labels_table(classified: Classified) -> Table:
    parts, p = classified.parts, classified.probabilities
    frame = pd.DataFrame(
        {
            "label": range(len(classified.labels)),
            "name": list(classified.labels),
            "logit": parts.logits,
            "from_features": parts.logits - parts.bias,
            "bias": parts.bias,
        }
    )
    columns = {
        "label": "label, from 0",
        "name": "its name, as config.json has it",
        "logit": "z = w.g + b",
        "from_features": "w.g, the sum of all contributions w_i g_i",
        "bias": "b",
        "probability": "what z says of the label, 0 to 1",
    }
    if p is not None:
        frame["probability"] = p
    columns = {str(name): columns[str(name)] for name in frame}
    return Table("classify", f"Classification: {PROBLEMS[classified.problem]}", frame, columns)


def _stages_table(classified: Classified) -> Table:
    rows = [
        (stage.name, stage.module, stage.formula, len(stage.values), float(np.linalg.norm(stage.values)))
        for stage in classified.stages
    ]
    logits = classified.parts.logits
    rows.append(("z", classified.output, "z = W g + b", len(logits), float(np.linalg.norm(logits))))
    columns = {
        "stage": "name of the vector",
        "module": "the module that gives it, as the checkpoint calls it",
        "formula": "how it follows from the vector before",
        "entries": "its length",
        "norm": "its Euclidean norm",
    }
    return Table("classify-stages", "From [CLS] to logits", pd.DataFrame(rows, columns=list(columns)), columns)


def _channels_table(classified: Classified) -> Table:
    names = [stage.name for stage in classified.stages]
    frame = pd.DataFrame({"channel": range(len(classified.features))})
    for stage in classified.stages:
        frame[stage.name] = stage.values
    columns = {"channel": "channel, from 0"} | {
        name: stage.formula for name, stage in zip(names, classified.stages, strict=True)
    }
    return Table("classify-channels", "The vectors before the last matrix, channel by channel", frame, columns)


PARTS = {
    "part": "channel, the remainder of all other channels, or the bias: a label's parts add up to its logit",
    "channel": "channel of g, from 0; empty for the remainder and the bias",
    "weight": "w_i",
    "feature": "g_i",
    "contribution": "w_i g_i, the remainder, or b",
}


def _parts_frame(parts: Decomposition, label: int) -> pd.DataFrame:
    """The parts of one logit, the largest contributions first."""
    count, absent = parts.channels.shape[1], [np.nan, np.nan]
    ends = [parts.remainder[label], parts.bias[label]]
    return pd.DataFrame(
        {
            "part": ["channel"] * count + ["remainder", "bias"],
            "channel": pd.array([*parts.channels[label].tolist(), None, None], dtype="Int64"),
            "weight": [*parts.weights[label], *absent],
            "feature": [*parts.features[label], *absent],
            "contribution": [*parts.contributions[label], *ends],
        }
    )


def _contributions_table(classified: Classified) -> Table:
    frames = []
    for label, name in enumerate(classified.labels):
        frame = _parts_frame(classified.parts, label)
        frame.insert(0, "label", label)
        frame.insert(1, "name", name)
        frames.append(frame)
    columns = {"label": "label, from 0", "name": "its name"} | PARTS
    return Table("classify-contributions", "Each logit as a sum", pd.concat(frames, ignore_index=True), columns)


def _difference_table(classified: Classified) -> Table:
    first, second = classified.order[:2]
    parts = difference(classified.weight, classified.bias, classified.features, first, second, classified.top)
    frame = _parts_frame(parts, 0)
    frame.insert(0, "first", classified.labels[first])
    frame.insert(1, "second", classified.labels[second])
    columns = {"first": "label of the largest logit", "second": "label of the next", **PARTS} | {
        "part": "channel, remainder or bias: the parts add up to the difference of the two logits",
        "weight": "w_i of the first label less that of the second",
        "contribution": "their difference times g_i, the remainder, or the difference of the biases",
    }
    return Table("classify-difference", "What sets the first two labels apart", frame, columns)


def _rounding(classified: Classified) -> str:
    apart = np.abs(classified.parts.logits - classified.logits_of_pass).max()
    return f"The sums, in float64, and the logits of the pass differ by {apart:.1g} at most."


def _figure(classified: Classified) -> Figure:
    """Logits as sums: the channels that matter most to any label, the rest, the bias, and what they add up to."""
    shown = classified.order[:LABELS]
    largest = np.abs(classified.weight[shown] * classified.features).max(axis=0)
    channels = np.argsort(-largest, kind="stable")[:CHANNELS].tolist()
    parts = on_channels(classified.weight[shown], classified.features, channels)
    values = np.column_stack([parts, classified.bias[shown], classified.parts.logits[shown]])
    bound = float(np.abs(values).max())
    panel = Heatmap(
        values,
        rows=tuple(classified.labels[label] for label in shown),
        columns=(*(f"channel {channel}" for channel in channels), "rest", "bias", "logit"),
        row_label="label",
        column_label="part of the sum",
        unit="contribution",
        low=-bound,
        high=bound,
        diverging=True,
        written=".2f",
    )
    left = len(classified.labels) - len(shown)
    note = "Each row adds up to its logit." + (f" {left} more labels in the tables." if left else "")
    return Figure("classify-contributions", "Each logit as a sum", (panel,), note=note)
