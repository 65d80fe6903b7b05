"""How much more memory ten times the texts take: `python benchmarks/memory.py CORPUS`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import cycle, islice
from pathlib import Path

BOUND = 60


def peak(corpus: Path, folder: Path, options: list[str]) -> float:
    """Peak resident memory of a run over a corpus, in MB."""
    command = [sys.executable, "-m", "bertgeo_cli", "run", str(corpus), "-o", str(folder / "report"), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"bertgeo ended with status {status}")
    return usage.ru_maxrss / 1024


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
