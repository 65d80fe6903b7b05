"""`bertgeo --help` against the help of a Typer app with two empty commands: `python benchmarks/help.py`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from timing import pairs, report

EMPTY_APP = """
import typer
app = typer.Typer()
@app.command()
def one() -> None:
    "One."
@app.command()
def two() -> None:
    "Two."
app()
"""


def main() -> None:
    """Print both times and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "empty.py"
        script.write_text(EMPTY_APP)
        ours = [str(Path(sys.executable).with_name("bertgeo")), "--help"]
        empty = [sys.executable, str(script), "--help"]
        timed = pairs(lambda: _run(ours), lambda: _run(empty), 20)
        report("--help", timed, "bertgeo", "two empty commands", 1.3)


def _run(command: list[str]) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()
