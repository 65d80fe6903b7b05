"""Where the sample corpus lies: beside the checkout, or inside the installed package."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent
FOLDER = next(
    (folder for folder in (PACKAGE / "sample_data", PACKAGE.parent / "sample_data") if folder.is_dir()),
    PACKAGE / "sample_data",
)
SAMPLE_CORPUS = FOLDER / "sentences.txt"


def first_sample() -> str:
    """The first sentence of the sample corpus."""
    with SAMPLE_CORPUS.open(encoding="utf-8") as lines:
        return next(lines).strip()
