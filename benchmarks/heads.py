"""Projection kernels of all heads, all at once against pair by pair: `OMP_NUM_THREADS=1 python benchmarks/heads.py`.

Random weights of BERT-base's shape: 144 heads, all sixteen pairs of {Q, K, V, O}. Pair by pair means two QR
decompositions and one product a pair, or one of each where a loop keeps the first basis; some hundred pairs are timed
and counted up. Both sides run in this process, with the same threads.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from timing import seconds

from analyses.kit.comparison import places_of
from analyses.kit.head_metrics import SUBSPACES, by_composition
from analyses.kit.record import HeadWeights
from analyses.kit.subspaces import kernels_by_kind, orthonormal_bases, thin_factors

Floats = NDArray[np.float64]


def random_weights(layers: int, heads: int, width: int) -> HeadWeights:
    """Gaussian weights in float32's values, as float64."""
    generator = torch.Generator().manual_seed(0)
    channels = width // heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).double()

    read = [draw(layers, heads, channels, width) for _ in range(3)]
    biases = [draw(layers, heads, channels) for _ in range(3)]
    return HeadWeights(*read, draw(layers, heads, width, channels), *biases, draw(layers, width))


def all_at_once(weights: HeadWeights) -> dict[str, Floats]:
    """Every kernel of every kind, from the weights."""
    layers, heads = weights.query.shape[:2]
    at = np.array(list(itertools.product(range(layers), range(heads)))).T
    factors = thin_factors(weights, at[0].tolist(), at[1].tolist())
    return kernels_by_kind({letter: orthonormal_bases(factors[letter])[0] for letter in factors}, SUBSPACES)


def pair_by_pair(matrices: Floats, both: bool) -> list[float]:
    """Kernels of neighbours, with a decomposition of both sides or of one."""
    first = np.linalg.qr(matrices[0])[0]
    found = []
    for one, other in itertools.pairwise(matrices):
        if both:
            first = np.linalg.qr(one)[0]
        found.append(float(((first.T @ np.linalg.qr(other)[0]) ** 2).sum()))
    return found


def main() -> None:
    """Print both sides, their ratio, and the largest difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    weights = random_weights(chosen.layers, chosen.heads, chosen.width)
    with threadpool_limits(chosen.threads):
        compare(weights)


def compare(weights: HeadWeights) -> None:
    """Three rounds, each side in turn."""
    layers, heads, channels, width = weights.query.shape
    matrices = weights.query.transpose(2, 3).reshape(-1, width, channels).numpy()
    pairs = 16 * (layers * heads) ** 2
    rounds = [
        (
            seconds(lambda: all_at_once(weights)),
            *(a_pair(matrices, lambda both=both: pair_by_pair(matrices, both)) for both in (True, False)),
        )
        for _ in range(3)
    ]
    found = np.diagonal(all_at_once(weights)["QQ"], 1)
    quick, two, one = (statistics.median(side) for side in zip(*rounds, strict=True))
    print(f"{layers * heads} heads, {width} wide, {pairs} projection kernels:")
    print(f"  all at once              {quick:8.1f} s")
    for name, slow in (("two QR and a product", two), ("one QR and a product", one)):
        print(f"  {name} a pair {slow * 1e3:6.2f} ms, {slow * pairs:8.1f} s in all: {slow * pairs / quick:6.0f} times")
    print(f"  largest difference {np.abs(found - pair_by_pair(matrices, True)).max():.1e}")
    places = places_of(range(layers), range(heads), range(layers))
    print(f"  composition, Q, K and V  {seconds(lambda: by_composition(places, weights, ('Q', 'K', 'V'))):8.1f} s")


def a_pair(matrices: Floats, action: Callable[[], object]) -> float:
    return seconds(action) / (len(matrices) - 1)


if __name__ == "__main__":
    main()
