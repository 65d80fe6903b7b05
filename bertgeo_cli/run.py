"""Texts -> shards -> observe -> merge -> finalize: one path for a sentence and a corpus of any length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from threadpoolctl import ThreadpoolController

from analyses.kit.analysis import Analysis, SettingsError, State
from analyses.kit.record import ForwardRecord, TokenizedText
from analyses.kit.result import Result

from .corpus import batches, shards
from .errors import BertgeoError, UsageError
from .models import LoadedModel
from .recording import record

BATCH_TOKENS = 1024
"""Tokens to a batch: on two cores larger batches gain nothing and hold more memory."""

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Pass:
    """How texts go through the model."""

    batch_tokens: int = BATCH_TOKENS
    backend: str = "eager"


def needs_of(analyses: Sequence[Analysis[Any]]) -> frozenset[str]:
    """What one forward pass must record to serve all analyses."""
    return frozenset[str]().union(*(analysis.needs for analysis in analyses))


def start(analyses: Sequence[Analysis[Any]], loaded: LoadedModel) -> list[State]:
    """The empty states. Raises UsageError for settings that the model cannot satisfy."""
    weights = loaded.head_weights() if any(analysis.needs_weights for analysis in analyses) else None
    with _settings_errors():
        return [analysis.start(loaded.shape, weights if analysis.needs_weights else None) for analysis in analyses]


@contextmanager
def _settings_errors() -> Iterator[None]:
    try:
        yield
    except SettingsError as error:
        raise UsageError(str(error), error.hint) from None


def observe(
    analyses: Sequence[Analysis[Any]],
    loaded: LoadedModel,
    shard: Sequence[TokenizedText],
    how: Pass,
    progress: Progress = lambda texts: None,
) -> list[State]:
    """The states of one shard: every analysis sees each forward pass. Batches never cross a shard."""
    states = start(analyses, loaded)
    needs = needs_of(analyses)
    blas = ThreadpoolController()
    for batch in batches(shard, how.batch_tokens):
        recorded = record(loaded, batch, needs=needs, backend=how.backend)
        # BLAS and LAPACK split their sums by thread count, which would show in the last bits.
        with blas.limit(limits=1, user_api="blas"):
            for analysis, state in zip(analyses, states, strict=True):
                analysis.update(state, recorded)
        progress(len(batch))
    return states


def merge_tree(parts: Iterable[list[State]]) -> list[State] | None:
    """Neighbours merged pairwise as they come; the shape depends on how many there are, and on nothing else."""
    stack: list[tuple[int, list[State]]] = []
    for part in parts:
        level, states = 0, part
        while stack and stack[-1][0] == level:
            states = _merge(stack.pop()[1], states)
            level += 1
        stack.append((level, states))
    merged = None
    for _, states in reversed(stack):
        merged = states if merged is None else _merge(states, merged)
    return merged


def _merge(first: list[State], second: list[State]) -> list[State]:
    return [one.merge(other) for one, other in zip(first, second, strict=True)]


def analyse_text(
    analyses: Sequence[Analysis[Any]], loaded: LoadedModel, text: TokenizedText, how: Pass
) -> list[Result]:
    """One text: its record goes to finalize too, for what only a single text has."""
    states = start(analyses, loaded)
    recorded = record(loaded, [text], needs=needs_of(analyses), backend=how.backend)
    with ThreadpoolController().limit(limits=1, user_api="blas"):
        for analysis, state in zip(analyses, states, strict=True):
            analysis.update(state, recorded)
        return _finalize(analyses, states, recorded)


def analyse_corpus(
    analyses: Sequence[Analysis[Any]],
    loaded: LoadedModel,
    texts: Iterable[TokenizedText],
    how: Pass,
    progress: Progress = lambda texts: None,
) -> list[Result]:
    """A stream of texts in constant memory. Raises BertgeoError when there is no text in it."""
    start(analyses, loaded)  # refuse settings before the first text is read
    states = merge_tree(observe(analyses, loaded, shard, how, progress) for shard in shards(texts))
    if states is None:
        raise BertgeoError("the corpus holds no text to analyse", "Every line is empty, skipped or undecodable.")
    return _finalize(analyses, states, None)


def analyse_weights(analyses: Sequence[Analysis[Any]], loaded: LoadedModel) -> list[Result]:
    """Analyses that read the checkpoint alone."""
    states = start(analyses, loaded)
    with ThreadpoolController().limit(limits=1, user_api="blas"):
        return _finalize(analyses, states, None)


def _finalize(
    analyses: Sequence[Analysis[Any]], states: Sequence[State], recorded: ForwardRecord | None
) -> list[Result]:
    with _settings_errors():
        return [analysis.finalize(state, recorded) for analysis, state in zip(analyses, states, strict=True)]


def plan(texts: Iterable[TokenizedText], how: Pass) -> dict[str, int]:
    """What a run would do: texts, tokens and forward passes, without doing it."""
    counts = {"texts": 0, "tokens": 0, "batches": 0}
    for batch in _all_batches(texts, how):
        counts["texts"] += len(batch)
        counts["tokens"] += sum(len(text) for text in batch)
        counts["batches"] += 1
    return counts


def _all_batches(texts: Iterable[TokenizedText], how: Pass) -> Iterator[list[TokenizedText]]:
    for shard in shards(texts):
        yield from batches(shard, how.batch_tokens)


def use_threads(count: int | None) -> int:
    """Set and return the number of threads of a forward pass."""
    if count is not None:
        torch.set_num_threads(count)
    return torch.get_num_threads()
