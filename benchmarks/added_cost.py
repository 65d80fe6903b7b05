"""What each analysis adds to the bare forward passes of a corpus: `python benchmarks/added_cost.py CORPUS`."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from timing import seconds

from bertgeo_cli import registry
from bertgeo_cli.corpus import Encoder, batches, shards
from bertgeo_cli.models import load_model
from bertgeo_cli.recording import record
from bertgeo_cli.run import Pass, observe

BOUNDS = {"rank-collapse": 0.25, "flow": 1.0}


def main() -> None:
    """Print, for each analysis with default settings, its time beyond the passes as a share of the bare passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="analyses, separated by commas")
    options = parser.parse_args()
    loaded, how = load_model(options.model, device="cpu"), Pass()
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
    lines = options.corpus.read_text(encoding="utf-8").splitlines()[: options.limit]
    texts = [encoder.truncate(encoder.encode(line, line=number)) for number, line in enumerate(lines, start=1)]

    def bare() -> None:
        for shard in shards(texts):
            for batch in batches(shard, how.batch_tokens):
                record(loaded, batch, needs=frozenset(), backend=how.backend)

    chosen = options.only.split(",") if options.only else list(registry.entries())
    for name in chosen:
        analysis = registry.entries()[name].load()()
        if not analysis.needs:
            continue

        def whole(analysis: object = analysis) -> None:
            for shard in shards(texts):
                observe([analysis], loaded, shard, how)

        timed = [(seconds(whole), seconds(bare)) for _ in range(options.rounds)]
        added = statistics.median(one / other - 1 for one, other in timed)
        plain = statistics.median(other for _, other in timed)
        bound = f" (at most {BOUNDS[name]})" if name in BOUNDS else ""
        print(f"{name}: {len(texts)} texts, bare passes {plain:.2f} s, the analysis adds {added:.3f} of that{bound}")


if __name__ == "__main__":
    main()
