"""What tests of the command line share: how it is called, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import Result

Run = Callable[..., Result]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def content(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def assert_error(done: Result, code: int, *parts: str) -> None:
    """Exit code, and exactly two lines: the error (after the model's line, where one was loaded) and what to do."""
    assert done.exit_code == code, done.output
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Model: ")]
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith("Error: ")
    assert "Traceback" not in done.output
    assert "fault of bertgeo" not in done.output
    for part in parts:
        assert part in " ".join(lines), done.stderr
    assert done.stdout == ""
