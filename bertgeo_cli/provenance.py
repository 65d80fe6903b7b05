"""What run.json says, so that a number can be traced: versions, model, input, options. No times, hosts or paths."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from analyses.kit.analysis import Analysis
from analyses.kit.record import TokenizedText
from analyses.kit.result import Result

from .formats import Layout, is_rereadable, name_of
from .models import LoadedModel
from .options import InputOptions
from .report import LinesLog
from .run import Pass
from .samples import SAMPLE_CORPUS

PACKAGES = ("bertgeo", "torch", "transformers", "tokenizers", "numpy", "scipy", "scikit-learn", "pandas", "matplotlib")


def versions() -> dict[str, str]:
    """Versions of Python and of every package that a number or a picture depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def text_source(text: TokenizedText) -> dict[str, Any]:
    """What was read when one text was given."""
    return {"kind": "text", "text": text.text, "pair": text.pair, "tokens": len(text)}


def corpus_source(path: Path | str, log: LinesLog, encoding: str, layout: Layout) -> dict[str, Any]:
    """What was read of a corpus: its name, hash, format, columns, lines by status, tokens."""
    sample = path == SAMPLE_CORPUS
    return {
        "kind": "sample" if sample else "corpus",
        "name": name_of(path),
        "sha256": file_hash(Path(path)) if is_rereadable(path) else None,
        "format": layout.format,
        "columns": dict(layout.columns),
        "encoding": encoding,
        "lines": log.lines,
        "status": dict(sorted(log.counts.items())),
        "tokens": log.tokens,
        "unknown_tokens": log.unknown,
    }


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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


def describe(
    command: str,
    analysis: Analysis[Any],
    loaded: LoadedModel,
    texts: InputOptions,
    source: Mapping[str, Any],
    how: Pass,
) -> dict[str, Any]:
    """Where a result comes from: command, settings, input, model, arithmetic, versions."""
    read = ("limit", "long", "on_error", "special_tokens_in_text", "encoding", "literal_quotes", "kmer", "stride")
    return {
        "command": command,
        "settings": {name: getattr(value, "text", value) for name, value in vars(analysis).items()},
        "input": dict(source),
        "input_options": {name: getattr(texts, name) for name in read},
        "model": dict(loaded.identity),
        "arithmetic": arithmetic(loaded, how),
        "versions": versions(),
    }


def describe_result(result: Result) -> dict[str, Any]:
    """What each table's columns mean, and what each figure shows."""
    return {
        "tables": {table.name: {"title": table.title, "columns": dict(table.columns)} for table in result.tables},
        "figures": {figure.name: {"title": figure.title, "note": figure.note} for figure in result.figures},
    }
