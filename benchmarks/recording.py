"""What recording everything costs, against the plain eager forward pass: `python benchmarks/recording.py`."""

from __future__ import annotations

import argparse

import torch
from timing import pairs, report

from bertgeo_cli.models import load_model
from bertgeo_cli.recording import EVERYTHING, run_pass


def main() -> None:
    """Print the ratio for a batch of 8 x 32 and 1 x 128 tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    loaded = load_model(options.model, device="cpu")
    torch.manual_seed(0)
    for batch, length in ((8, 32), (1, 128)):
        ids = torch.randint(5, loaded.model.config.vocab_size - 5, (batch, length))

        def plain(ids: torch.Tensor = ids) -> None:
            with torch.inference_mode():
                loaded.model(input_ids=ids)

        def recorded(ids: torch.Tensor = ids) -> None:
            run_pass(loaded, ids, needs=EVERYTHING)

        timed = pairs(recorded, plain, options.pairs)
        report(f"{batch} x {length}", timed, "recording everything", "plain eager", 1.10)


if __name__ == "__main__":
    main()
