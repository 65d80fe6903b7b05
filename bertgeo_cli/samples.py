"""Where the sample corpus lies: beside the checkout, or inside the installed package."""

from __future__ import annotations

import csv
from pathlib import Path

PACKAGE = Path(__file__).parent
FOLDER = next(
    (folder for folder in (PACKAGE / "sample_data", PACKAGE.parent / "sample_data") if folder.is_dir()),
    PACKAGE / "sample_data",
)
SAMPLE_CORPUS = FOLDER / "sentences.txt"
SAMPLE_BANKS = FOLDER / "bank.tsv"
"""Sentences with the word bank, and in which sense."""


def first_sample() -> str:
    """The first sentence of the sample corpus."""
    with SAMPLE_CORPUS.open(encoding="utf-8") as lines:
        return next(lines).strip()


def sample_senses(word: str) -> dict[int, str]:
    """By line of the sample corpus the sense that its labels give this word, in whatever case it is written."""
    with (FOLDER / "labels.tsv").open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return {int(row["line"]): row["sense"] for row in rows if row["word"] and row["word"] == word.casefold()}
