"""Texts -> shards -> observe -> merge -> finalize: one path for a sentence and a corpus of any length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from analyses.kit.analysis import Analysis, SettingsError, State
from analyses.kit.groups import tables_by_group
from analyses.kit.record import ForwardRecord, TokenizedText
from analyses.kit.result import Result, Table

from .corpus import shards
from .errors import BertgeoError, UsageError
from .models import LoadedModel
from .observation import Observed, Pass, Progress, merged_states, needs_of, observe, one_thread, silent, start
from .recording import record


def analyse_text(
    analyses: Sequence[Analysis[Any]], loaded: LoadedModel, text: TokenizedText, how: Pass
) -> list[Result]:
    """One text: its record goes to finalize too, for what only a single text has."""
    states = start(analyses, loaded)
    recorded = record(loaded, [text], needs=needs_of(analyses), backend=how.backend)
    with one_thread():
        for analysis, state in zip(analyses, states, strict=True):
            analysis.update(state, recorded)
        return finalize(analyses, states, recorded)


def analyse_corpus(
    analyses: Sequence[Analysis[Any]],
    loaded: LoadedModel,
    texts: Iterable[TokenizedText],
    how: Pass,
    progress: Progress = silent,
) -> list[Result]:
    """A stream of texts in this process and in memory. Raises BertgeoError when there is no text in it."""
    start(analyses, loaded)  # refuse settings before the first text is read
    states = merge_tree(observe(analyses, loaded, shard, how, progress) for shard in shards(texts))
    if states is None:
        raise nothing_read()
    return finalize(analyses, states, None)


def merge_tree(parts: Iterable[list[State]]) -> list[State] | None:
    """Neighbours merged pairwise as they come; the shape depends on how many there are, and on nothing else."""
    stack: list[tuple[int, list[State]]] = []
    for part in parts:
        level, states = 0, part
        while stack and stack[-1][0] == level:
            states = merged_states(stack.pop()[1], states)
            level += 1
        stack.append((level, states))
    merged = None
    for _, states in reversed(stack):
        merged = merged_states(states, merged)
    return merged


def nothing_read() -> BertgeoError:
    """The error for a corpus without texts."""
    return BertgeoError("the corpus holds no text to analyse", "Every line is empty, skipped, undecodable or failed.")


def analyse_weights(analyses: Sequence[Analysis[Any]], loaded: LoadedModel) -> list[Result]:
    """Analyses that read the checkpoint alone."""
    return finalize(analyses, start(analyses, loaded), None)


def finalize(
    analyses: Sequence[Analysis[Any]], states: Sequence[State], recorded: ForwardRecord | None
) -> list[Result]:
    """The answers. Raises UsageError for settings that the texts cannot satisfy."""
    try:
        with one_thread():
            return [analysis.finalize(state, recorded) for analysis, state in zip(analyses, states, strict=True)]
    except SettingsError as error:
        raise UsageError(str(error), error.hint) from None


def group_tables(analyses: Mapping[str, Analysis[Any]], observed: Observed) -> dict[str, list[Table]]:
    """By analysis: each table by group, and the differences between groups. Texts without a group are in none."""
    found = {}
    for at, (name, analysis) in enumerate(analyses.items()):
        groups: dict[str, dict[str, Table]] = {}
        for group, states in sorted(item for item in observed.groups.items() if item[0]):
            try:
                result = finalize([analysis], [states[at]], None)[0]
            except UsageError:  # say, a group none of whose texts has the token that was asked for
                continue
            groups[group] = {table.name: table for table in result.tables}
        found[name] = tables_by_group(groups)
    return found


def use_threads(count: int | None) -> int:
    """Set and return the number of threads of a forward pass."""
    if count is not None:
        torch.set_num_threads(count)
    return torch.get_num_threads()
