"""What each analysis adds to the bare forward passes of a corpus: `python benchmarks/added_cost.py CORPUS`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timing import least_by_part

from analyses.kit.analysis import Analysis
from analyses.kit.record import TokenizedText
from bertgeo_cli import registry
from bertgeo_cli.corpus import Encoder, batches, shards
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.observation import Pass, needs_of, start, updating
from bertgeo_cli.recording import record_batch

BOUNDS = {"rank-collapse": 0.25, "flow": 1.0}


def added(
    analyses: Sequence[Analysis[Any]], loaded: LoadedModel, texts: Sequence[TokenizedText], how: Pass, rounds: int
) -> tuple[float, float]:
    """Seconds of the bare passes, and what the analyses add as a share of them.

    Both sides in turn, batch by batch, the least of `rounds` each: so neither other work on the machine nor its
    drift falls on one side.
    """
    states, needs, count = start(analyses, loaded), needs_of(analyses), torch.get_num_threads()

    def bare(batch: Sequence[TokenizedText]) -> None:
        record_batch(loaded, batch, needs=frozenset(), backend=how.backend)

    def whole(batch: Sequence[TokenizedText]) -> None:
        found = record_batch(loaded, batch, needs=needs, backend=how.backend)
        with updating(analyses, count, how.batch_tokens) as update:
            for recorded in found:
                update(states, recorded)

    parts = [batch for shard in shards(texts) for batch in batches(shard, how.batch_tokens)]
    plain, observed = least_by_part(bare, whole, parts, rounds)
    return plain, observed / plain - 1


def encoded(loaded: LoadedModel, lines: Sequence[str]) -> list[TokenizedText]:
    """The lines as texts, cut to what fits."""
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
    texts = (encoder.encode(line, line=number) for number, line in enumerate(lines, start=1))
    return [text if len(text) <= encoder.max_tokens else encoder.truncate(text) for text in texts]


def main() -> None:
    """Print, for each analysis with default settings, its time beyond the passes as a share of the bare passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="analyses, separated by commas")
    options = parser.parse_args()
    loaded = load_model(options.model, device="cpu")
    texts = encoded(loaded, options.corpus.read_text(encoding="utf-8").splitlines()[: options.limit])
    for name in options.only.split(",") if options.only else registry.entries():
        analysis = registry.entries()[name].load()()
        if not analysis.needs:
            continue
        plain, share = added([analysis], loaded, texts, Pass(), options.rounds)
        bound = f" (at most {BOUNDS[name]})" if name in BOUNDS else ""
        print(f"{name}: {len(texts)} texts, bare passes {plain:.2f} s, the analysis adds {share:.3f} of that{bound}")


if __name__ == "__main__":
    main()
