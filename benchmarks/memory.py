"""How much more memory ten times the texts take: `python benchmarks/memory.py CORPUS`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

BOUND = 60
LOOK = 0.05
"""Seconds between two looks."""


def peak(corpus: Path, folder: Path, options: list[str]) -> float:
    """Peak memory of a run over a corpus with all its processes, in MB."""
    command = [sys.executable, "-m", "bertgeo_cli", "run", str(corpus), "-o", str(folder / "report"), *options]
    most = 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, sum(map(held, family(process.pid))))
            time.sleep(LOOK)
    if process.returncode:
        raise SystemExit(f"bertgeo ended with status {process.returncode}")
    return most


def family(process: int) -> list[int]:
    """A process and all that it has begun."""
    children = [int(child) for task in Path(f"/proc/{process}/task").glob("*/children") for child in read(task).split()]
    return [process, *(one for child in children for one in family(child))]


def held(process: int) -> float:
    """Memory of a process in MB; what several share counts once, in parts (proportional set size, Linux)."""
    sizes = [line.split()[1] for line in read(Path(f"/proc/{process}/smaps_rollup")).splitlines() if line[:4] == "Pss:"]
    return sum(map(int, sizes)) / 1024


def read(path: Path) -> str:
    """A file of /proc; nothing of a process that has just ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def main() -> None:
    """Print the peak memory of both runs and what lies between them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="its lines are repeated as often as needed")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--analyses", default="all")
    options, more = parser.parse_known_args()
    lines = options.corpus.read_text(encoding="utf-8").splitlines()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (options.texts, 10 * options.texts):
            corpus = Path(folder) / f"{count}.txt"
            corpus.write_text("\n".join(islice(cycle(lines), count)) + "\n", encoding="utf-8")
            found.append(peak(corpus, Path(folder), ["--analyses", options.analyses, *more]))
            print(f"{count} texts: peak {found[-1]:.0f} MB", flush=True)
    print(f"ten times the texts take {found[1] - found[0]:.0f} MB more (at most {BOUND})")


if __name__ == "__main__":
    main()
