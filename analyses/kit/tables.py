"""Columns that many tables share, with their descriptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .accumulators import Moments, Sample
from .record import TokenizedText
from .result import Table


def moment_columns(
    moments: Moments, names: Sequence[str], meanings: Mapping[str, str]
) -> tuple[pd.DataFrame, dict[str, str]]:
    """Mean and standard deviation of every value over texts: cells (..., value) as rows, two columns a value.

    The deviation columns are there when some cell has two texts.
    """
    frame = pd.DataFrame(moments.mean.reshape(-1, len(names)), columns=list(names))
    columns = {name: meanings[name] for name in names}
    if (moments.count > 1).any():
        deviations = moments.std.reshape(-1, len(names))
        for index, name in enumerate(names):
            frame[f"{name}_std"] = deviations[:, index]
            columns[f"{name}_std"] = f"standard deviation of {name} over texts (n - 1)"
    return frame, columns


def sample_table(
    name: str,
    title: str,
    sample: Sample,
    index: pd.DataFrame,
    index_columns: Mapping[str, str],
    value_columns: Mapping[str, str],
    rows: Callable[[NDArray[np.float64]], NDArray[np.float64]] = lambda values: values,
) -> Table:
    """The sampled texts' own values: for each text the rows of `index` with its values beside them."""
    items = sample.rows()
    frame = pd.concat([index] * len(items), ignore_index=True) if items else index.iloc[:0].copy()
    text_columns = {"line": "line of the corpus, from 1", "part": "part of a split line, from 0"}
    for at, column in enumerate(text_columns):
        numbers = np.array([getattr(item, column) for item in items], dtype=np.int64)
        frame.insert(at, column, np.repeat(numbers, len(index)))
    if any(item.id for item in items):
        frame.insert(2, "id", np.repeat(np.array([item.id for item in items], dtype=object), len(index)))
        text_columns["id"] = "the line's id, as the corpus gives it"
    names = list(value_columns)
    values = [rows(item.values).reshape(len(index), len(names)) for item in items]
    frame[names] = np.concatenate(values) if values else np.empty((0, len(names)))
    return Table(name, title, frame, text_columns | dict(index_columns) | dict(value_columns))


def token_frame(text: TokenizedText) -> tuple[pd.DataFrame, dict[str, str]]:
    """The tokens of a text, a row each."""
    frame = pd.DataFrame(
        {
            "token": range(len(text)),
            "text": text.labels,
            "piece": text.tokens,
            "id": text.ids,
            "start": pd.array(text.start, dtype="Int64"),
            "end": pd.array(text.end, dtype="Int64"),
            "segment": text.segment,
            "word": pd.array(text.word, dtype="Int64"),
            "special": text.special,
            "unknown": text.unknown,
        }
    )
    columns = {
        "token": "position, from 0",
        "text": "the token as it stands in the text",
        "piece": "the token as it stands in the vocabulary",
        "id": "its row in the embedding",
        "start": "first character in the text, from 0; empty for special tokens",
        "end": "one past the last character",
        "segment": "0 for the first text, 1 for the second",
        "word": "number of its word in the segment, from 0",
        "special": "whether the tokenizer added it (or it was typed with --special-tokens-in-text)",
        "unknown": "whether the vocabulary lacks it",
    }
    return frame, columns
