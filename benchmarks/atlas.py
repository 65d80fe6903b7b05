"""The atlas of a checkpoint's heads against the dense way: `OMP_NUM_THREADS=1 python benchmarks/atlas.py`.

Random weights of BERT-base's shape (144 heads, width 768). Each of PARTS is done by bertgeo in full, and by the dense
way on some pairs or heads, counted up to all of them; rounds go in turn, and of each side the quickest counts. Peak
memory is that of a process of its own which does bertgeo's side of the part alone, the interpreter, torch and the
weights in float64 included.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from timing import seconds

from analyses.bilinear import Bilinear
from analyses.kit.head_metrics import SUBSPACES
from analyses.kit.record import HeadWeights, ModelShape
from analyses.kit.result import Result
from analyses.kit.subspaces import kernels_by_kind, orthonormal_bases, thin_factors

Floats = NDArray[np.float64]
Dense = tuple[Callable[[], object], float]
"""Something to be timed, and how many times it would have to be done for the whole."""
RATIO, GIGABYTES = 20, 3
SAMPLE = 200
FORMS = 3
"""Without biases, homogeneous, value-output."""


@dataclass(frozen=True)
class Part:
    """One part of the atlas: bertgeo's side of it, the dense one, and by how much they differ."""

    about: str
    dense_about: str
    ours: Callable[[HeadWeights], object]
    dense: Callable[[HeadWeights], Dense]
    difference: Callable[[HeadWeights], float]


def random_weights(layers: int, heads: int, width: int) -> HeadWeights:
    """Gaussian weights in float32's values, as float64."""
    generator = torch.Generator().manual_seed(0)
    channels = width // heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).double()

    read = [draw(layers, heads, channels, width) for _ in range(3)]
    biases = [draw(layers, heads, channels) for _ in range(3)]
    output = draw(layers, heads, width, channels)
    return HeadWeights(*read, output, *biases, output_bias=draw(layers, width), norm_gain=draw(layers, width))


# Projection kernels


def all_kernels(weights: HeadWeights) -> dict[str, Floats]:
    """Every projection kernel of every pair of letters, from the weights."""
    layers, heads = weights.query.shape[:2]
    at = np.array(list(itertools.product(range(layers), range(heads)))).T
    factors = thin_factors(weights, at[0].tolist(), at[1].tolist())
    return kernels_by_kind({letter: orthonormal_bases(factors[letter])[0] for letter in factors}, SUBSPACES)


def dense_kernels(matrices: Floats, pairs: NDArray[np.intp]) -> list[float]:
    """Kernels of pairs of matrices (width x channel), one QR and one product a pair: the first one's basis is kept."""
    bases: dict[int, Floats] = {}
    found = []
    for one, other in pairs:
        if one not in bases:
            bases = {one: np.linalg.qr(matrices[one])[0]}
        found.append(float(((bases[one].T @ np.linalg.qr(matrices[other])[0]) ** 2).sum()))
    return found


def sampled(weights: HeadWeights) -> tuple[Floats, NDArray[np.intp]]:
    """W_Q^T of every head, and random pairs of the first head with others: the dense way costs the same for all."""
    layers, heads, channels, width = weights.query.shape
    matrices = weights.query.transpose(2, 3).reshape(-1, width, channels).numpy()
    others = np.random.default_rng(0).integers(1, layers * heads, SAMPLE)
    return matrices, np.column_stack([np.zeros_like(others), others])


def some_dense_kernels(weights: HeadWeights) -> Dense:
    """The dense way on the sample, and how many samples all pairs are."""
    heads = weights.query.shape[0] * weights.query.shape[1]
    return partial(dense_kernels, *sampled(weights)), len(SUBSPACES) * heads**2 / SAMPLE


def difference_of_kernels(weights: HeadWeights) -> float:
    """The largest difference between both ways on the sample."""
    matrices, pairs = sampled(weights)
    return float(np.abs(all_kernels(weights)["QQ"][tuple(pairs.T)] - dense_kernels(matrices, pairs)).max())


# Bilinear forms


def all_of_bilinear(weights: HeadWeights) -> Result:
    """Every table and figure of `bertgeo bilinear`."""
    layers, heads, channels, width = weights.query.shape
    shape = ModelShape("bert", heads, width, channels, tuple(range(layers)))
    return Bilinear().finalize(Bilinear().start(shape, weights), None)


def dense_form(weights: HeadWeights) -> Floats:
    """M_h of the first head, multiplied out."""
    return weights.query[0, 0].numpy().T @ weights.key[0, 0].numpy()


def one_dense_form(weights: HeadWeights) -> Dense:
    """One width x width SVD, and how many heads and forms need one; what else `bilinear` tells is left out."""
    form = dense_form(weights)
    return partial(np.linalg.svd, form), weights.query.shape[0] * weights.query.shape[1] * FORMS


def difference_of_forms(weights: HeadWeights) -> float:
    """The largest difference between singular values of the first head, relative to the largest."""
    table = next(table for table in all_of_bilinear(weights).tables if table.name == "bilinear-spectra").frame
    dense = np.linalg.svd(dense_form(weights), compute_uv=False)
    own = table[(table["form"] == "without-biases") & (table["layer"] == 0) & (table["head"] == 0)]["singular_value"]
    return float(np.abs(own.to_numpy() - dense[: len(own)]).max() / dense[0])


PARTS = {
    "kernels": Part(
        "sixteen projection kernels of every ordered pair of heads",
        f"one QR and one product a pair; {SAMPLE} random pairs, counted up to all",
        all_kernels,
        some_dense_kernels,
        difference_of_kernels,
    ),
    "bilinear": Part(
        "all of bilinear, every head and layer",
        f"one SVD a head and form, {FORMS} forms; one SVD, counted up to all",
        all_of_bilinear,
        one_dense_form,
        difference_of_forms,
    ),
}
"""The parts of the atlas."""


# Measuring


def main() -> None:
    """Print both sides of every part, their ratio, and the peak memory of ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", choices=PARTS, help="do bertgeo's side of one part once, and print nothing")
    chosen = parser.parse_args()
    weights = random_weights(chosen.layers, chosen.heads, chosen.width)
    with threadpool_limits(chosen.threads):
        if chosen.alone:
            PARTS[chosen.alone].ours(weights)
            return
        taken = []
        for name, part in PARTS.items():
            taken.append(compare(part, weights, chosen.rounds))
            print(f"  peak memory     {peak_gigabytes(name):8.2f} GB (at most {GIGABYTES})", flush=True)
        quick, slow = (sum(side) for side in zip(*taken, strict=True))
        print(
            f"together: bertgeo {quick:.2f} s, the dense way {slow:.2f} s, ratio {slow / quick:.1f} (at least {RATIO})"
        )


def compare(part: Part, weights: HeadWeights, rounds: int) -> tuple[float, float]:
    """Seconds of both sides, which go in turn, `rounds` times."""
    layers, heads, _, width = weights.query.shape
    print(f"{part.about}: {layers * heads} heads, width {width}")
    print(f"  largest difference {part.difference(weights):.1e}", flush=True)
    dense, times = part.dense(weights)
    timed = [(seconds(lambda: part.ours(weights)), seconds(dense) * times) for _ in range(rounds)]
    quick, slow = (min(side) for side in zip(*timed, strict=True))
    print(f"  bertgeo         {quick:8.2f} s")
    print(f"  the dense way   {slow:8.2f} s ({part.dense_about})")
    print(f"  ratio           {slow / quick:8.1f}", flush=True)
    return quick, slow


def peak_gigabytes(name: str) -> float:
    """Peak resident memory of a process that does bertgeo's side of one part, with this one's own options."""
    process = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--alone", name])
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the process for memory ended with status {status}")
    return usage.ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    main()
