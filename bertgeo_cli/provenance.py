"""What run.json says, so that a number can be traced: versions, model, input, options. No times, hosts or paths."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from analyses.kit.record import TokenizedText
from analyses.kit.result import Result

from .choice import settings_of
from .errors import UsageError
from .formats import Layout, is_rereadable, name_of
from .models import LoadedModel
from .observation import Pass
from .options import CorpusOptions
from .report import LinesLog, file_hash
from .samples import SAMPLE_CORPUS
from .versions import versions

READ = (
    *("limit", "long", "on_error", "special_tokens_in_text", "encoding", "input_format"),
    *("column", "pair_column", "id_column", "group_column", "literal_quotes", "kmer", "stride"),
)


def text_source(text: TokenizedText) -> dict[str, Any]:
    """What was read when one text was given."""
    return {"kind": "text", "text": text.text, "pair": text.pair, "tokens": len(text)}


def texts_identity(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """Which texts were typed."""
    return {"kind": "texts", "name": name, "texts": list(texts)}


def corpus_identity(path: Path | str, encoding: str) -> dict[str, Any]:
    """Which corpus it is: its name and hash. Raises UsageError for a file that cannot be read."""
    try:
        digest = file_hash(Path(path)) if is_rereadable(path) else None
    except OSError as error:
        raise UsageError(f"cannot read the corpus {path}: {error.strerror}", "Check the path of the corpus.") from None
    return {
        "kind": "sample" if path == SAMPLE_CORPUS else "corpus",
        "name": name_of(path),
        "sha256": digest,
        "encoding": encoding,
    }


def corpus_source(identity: Mapping[str, Any], layout: Layout, log: LinesLog) -> dict[str, Any]:
    """What was read of a corpus: its format, columns, lines by status, tokens."""
    return {
        **identity,
        "format": layout.format,
        "columns": dict(layout.columns),
        "lines": log.lines,
        "status": dict(sorted(log.counts.items())),
        **({"groups": dict(sorted(log.groups.items()))} if log.groups else {}),
        "tokens": log.tokens,
        "unknown_tokens": log.unknown,
    }


def reading(texts: CorpusOptions) -> dict[str, Any]:
    """The options that say how lines became texts."""
    return {name: getattr(texts, name) for name in READ}


def count_lines(path: Path) -> int:
    """Lines of a file, for the progress bar."""
    try:
        with path.open("rb") as stream:
            return sum(block.count(b"\n") for block in iter(lambda: stream.read(1 << 20), b"")) or 1
    except OSError:
        return 1


def arithmetic(loaded: LoadedModel, how: Pass) -> dict[str, Any]:
    """What the last bits of a float depend on."""
    return {
        "dtype": loaded.dtype,
        "device": loaded.device,
        "attention_backend": how.backend,
        "threads": torch.get_num_threads(),
        "batch_tokens": how.batch_tokens,
        "mkl": torch.backends.mkl.is_available(),
        "mkl_cbwr": os.environ.get("MKL_CBWR"),
    }


def lasting_arithmetic(loaded: LoadedModel, how: Pass) -> dict[str, Any]:
    """The part of it that a resumed run must share: in float32 on MKL neither threads nor batches leave a trace."""
    found = arithmetic(loaded, how)
    if loaded.dtype == "float32" and loaded.device == "cpu" and found["mkl"] and found["mkl_cbwr"]:
        del found["threads"], found["batch_tokens"]
    return found


def contents(results: Mapping[str, Result]) -> dict[str, dict[str, Any]]:
    """By analysis: what the columns of each table and graph mean, what each figure shows, and the answer's notes."""
    return {
        name: {
            "tables": {table.name: {"title": table.title, "columns": dict(table.columns)} for table in result.tables},
            "graphs": {graph.name: {"title": graph.title, "columns": dict(graph.columns)} for graph in result.graphs},
            "figures": {figure.name: {"title": figure.title, "note": figure.note} for figure in result.figures},
            "notes": list(result.notes),
        }
        for name, result in results.items()
    }


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of two answers of one analysis."""
    parts = {part: dict(first[part]) | dict(second[part]) for part in ("tables", "graphs", "figures")}
    return parts | {"notes": [*first["notes"], *second["notes"]]}


def describe_analyses(
    analyses: Mapping[str, Any], answers: Mapping[str, Mapping[str, Any]], notes: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """By analysis its settings and the contents of its answer; `notes` about figures follow the answer's own."""
    described: dict[str, Any] = {}
    for name, analysis in analyses.items():
        described[name] = {"settings": settings_of(analysis), **answers.get(name, {})}
        if name in answers:
            described[name]["notes"] = [*answers[name]["notes"], *notes.get(name, [])]
    return described


def model_and_arithmetic(loaded: LoadedModel, how: Pass) -> dict[str, Any]:
    """Where every number of a run comes from, its texts aside."""
    return {"model": dict(loaded.identity), "arithmetic": arithmetic(loaded, how), "versions": versions()}


def run_content(
    command: str,
    analyses: Mapping[str, Any],
    source: Mapping[str, Any],
    options: Mapping[str, Any],
    origin: Mapping[str, Any],
    formats: Mapping[str, str],
    remarks: Sequence[str],
    files: Sequence[str],
) -> dict[str, Any]:
    """What run.json says; `analyses` as `describe_analyses` gives them, one of them being the command itself."""
    content = {
        "command": command,
        "input": dict(source),
        "input_options": dict(options),
        **origin,
        "formats": dict(formats),
        "notes": list(remarks),
        "files": sorted(files),
    }
    if command in analyses:
        own = dict(analyses[command])
        return content | own | {"notes": [*remarks, *own.get("notes", [])]}
    return content | {"analyses": dict(analyses)}
