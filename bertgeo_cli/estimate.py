"""What a run would do and leave on disk, without doing it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from analyses.kit.analysis import Analysis
from analyses.kit.record import TokenizedText

from .corpus import batches, shards
from .models import LoadedModel
from .observation import Pass, observe
from .run import finalize

FIGURE_BYTES = 150_000
"""A usual PNG of ours."""
EDGE_BYTES = 200
"""A usual edge of a GraphML file."""
LINE_BYTES = 24
"""A usual row of lines.csv."""


def plan(texts: Iterable[TokenizedText], how: Pass, shard_texts: int) -> dict[str, int]:
    """Texts, tokens, forward passes and shards of a run."""
    counts = {"texts": 0, "tokens": 0, "batches": 0, "shards": 0}
    for shard in shards(texts, shard_texts):
        counts["shards"] += 1
        for batch in batches(shard, how.batch_tokens):
            counts["texts"] += len(batch)
            counts["tokens"] += sum(len(text) for text in batch)
            counts["batches"] += 1
    return counts


def bytes_on_disk(
    analyses: Sequence[Analysis[Any]],
    loaded: LoadedModel,
    example: TokenizedText | None,
    texts: int,
    *,
    how: Pass,
    per_text: bool,
    figures: bool,
) -> int:
    """About how many bytes the report will have: measured on one text, the sampled and per-text rows multiplied."""
    total = LINE_BYTES * texts
    for analysis in analyses:
        read = [example] if example and analysis.needs else []
        state = observe([analysis], loaded, read, how)[0]
        result, of_text = finalize([analysis], [state], None)[0], analysis.per_text(state)
        rows = min(texts, getattr(analysis, "sample", 0))
        for table in result.tables:
            sampled = of_text is not None and table.name == of_text.name
            total += len(table.frame.to_csv(index=False)) * (rows if sampled else 1)
        total += EDGE_BYTES * sum(len(graph.edges) for graph in result.graphs)
        total += FIGURE_BYTES * len(result.figures) * figures
        if per_text and of_text is not None:
            total += 8 * of_text.frame.size * texts
    return total


def first_and_all(texts: Iterable[TokenizedText]) -> tuple[TokenizedText | None, Iterable[TokenizedText]]:
    """The first text, and all of them."""
    stream = iter(texts)
    first = next(stream, None)
    return first, chain([] if first is None else [first], stream)
