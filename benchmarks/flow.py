"""Attention flow timed against networkx and scipy, and on a corpus against the forward pass that it follows.

    python benchmarks/flow.py                               # random layers, 12 x 32
    python benchmarks/flow.py --corpus texts.txt --texts 300

Both sides of a ratio run in this process, in turns, the best of a few each: on a shared machine only ratios mean
anything.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

import networkx
import numpy as np
import torch
from networkx.algorithms.flow import edmonds_karp
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import maximum_flow

from analyses.kit.maths import normalised_rows
from analyses.kit.maxflow import UNIT, attained, attention_flow, flow_ceiling, saturated
from analyses.kit.record import TokenizedText
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.recording import record

Floats = NDArray[np.float64]
BATCH_TOKENS = 1024


def seconds(work: Callable[[], object], times: int = 3) -> float:
    """The shortest of a few runs."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def random_layers(depth: int, tokens: int, seed: int = 0) -> Floats:
    """Rows from a Dirichlet distribution of concentration 0.3, half of each the identity."""
    attention = np.random.default_rng(seed).dirichlet(np.full(tokens, 0.3), size=(depth, tokens))
    return 0.5 * attention + 0.5 * np.eye(tokens)


def edges(layers: Floats) -> Iterator[tuple[int, int, float]]:
    """Tail, head and capacity of every edge; node (depth, token) is depth * tokens + token."""
    tokens = layers.shape[-1]
    for depth, i, j in np.argwhere(layers > 0):
        yield int((depth + 1) * tokens + i), int(depth * tokens + j), float(layers[depth, i, j])


def networkx_graph(layers: Floats) -> networkx.DiGraph:
    graph = networkx.DiGraph()
    graph.add_weighted_edges_from(edges(layers), weight="capacity")
    return graph


def scipy_graph(layers: Floats) -> csr_array:
    tails, heads, weights = (np.array(column) for column in zip(*edges(layers), strict=True))
    nodes = (len(layers) + 1) * layers.shape[-1]
    capacities = np.rint(weights * UNIT).astype(np.int32)
    return csr_array(coo_array((capacities, (tails, heads)), shape=(nodes, nodes)))


def against_networkx(depth: int, tokens: int, pairs: int) -> None:
    """A pair: at the top depth for networkx and scipy, on average over all sinks and depths for attention_flow."""
    layers = random_layers(depth, tokens)
    graph, matrix, source = networkx_graph(layers), scipy_graph(layers), depth * tokens
    values: list[float] = []

    def by_networkx() -> None:
        values[:] = [networkx.maximum_flow_value(graph, source, v, flow_func=edmonds_karp) for v in range(pairs)]

    slow = seconds(by_networkx, 1) / pairs
    alone = seconds(lambda: [maximum_flow(matrix, source, sink) for sink in range(pairs)]) / pairs
    quick = seconds(lambda: attention_flow(layers, [0])) / (depth * tokens)
    error = np.abs(attention_flow(layers, [0])[-1, 0, :pairs] - values).max()
    print(f"{depth} layers x {tokens} tokens, a pair of source and sink:")
    print(f"  networkx edmonds_karp {slow * 1e3:9.3f} ms")
    print(f"  scipy maximum_flow    {alone * 1e3:9.3f} ms   {slow / alone:7.0f} times faster than networkx")
    print(f"  attention_flow        {quick * 1e3:9.3f} ms   {slow / quick:7.0f} times faster than networkx")
    print(f"  largest difference from networkx {error:.1e}")


def batches(loaded: LoadedModel, lines: list[str]) -> list[list[TokenizedText]]:
    """Texts of one length, about 1024 tokens to a batch."""
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
    cut: list[list[TokenizedText]] = []
    for length, group in groupby(sorted((encoder.encode(line) for line in lines), key=len), key=len):
        texts, size = list(group), max(BATCH_TOKENS // length, 1)
        cut.extend(texts[first : first + size] for first in range(0, len(texts), size))
    return cut


def with_residual(attention: Floats) -> Floats:
    """Heads averaged, half of it the identity: (layer, head, query, key) to (layer, query, key)."""
    return 0.5 * normalised_rows(attention.mean(axis=1)) + 0.5 * np.eye(attention.shape[-1])


def flows_of_first_token(layered: list[Floats]) -> list[Floats]:
    return [attention_flow(layers, [0]) for layers in layered]


def against_the_pass(lines: list[str]) -> None:
    """The flow of every text's first token against the recorded pass, and how many problems each step settles."""
    loaded, passes, flows = load_model("minilm"), 0.0, 0.0
    layered: list[Floats] = []
    for texts in batches(loaded, lines):
        passes += seconds(partial(record, loaded, texts, needs=frozenset({"attention"})))
        recorded = record(loaded, texts, needs=frozenset({"attention"}))
        layers = [with_residual(recorded.of_text("attention", index)) for index in range(len(texts))]
        flows += seconds(partial(flows_of_first_token, layers))
        layered.extend(layers)
    tokens = np.array([layers.shape[-1] for layers in layered])
    print(
        f"{len(layered)} texts, {tokens.mean():.1f} tokens on average, {torch.get_num_threads()} threads to the pass:"
    )
    print(f"  forward pass {passes / len(layered) * 1e3:8.3f} ms a text")
    print(f"  flow         {flows / len(layered) * 1e3:8.3f} ms a text   {flows / passes:.2f} of the pass")
    settled(layered)


def settled(layered: list[Floats]) -> None:
    """Shares of problems a depth: settled by a feasible flow, and saturated."""
    proven, full = [], []
    for layers in layered:
        proven.append(attained(layers, 0, flow_ceiling(layers)[:, 0]))
        full.append(saturated(attention_flow(layers, [0]), layers)[:, 0])
    for depth, (quick, most) in enumerate(zip(np.hstack(proven), np.hstack(full), strict=True), start=1):
        print(f"  depth {depth}: {quick.mean():7.2%} settled without Dinic, {most.mean():7.2%} saturated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3, help="pairs that networkx solves; 0 leaves this out")
    parser.add_argument("--corpus", type=Path, help="a text a line; needs MiniLM")
    parser.add_argument("--texts", type=int, default=300, help="lines of the corpus to take")
    parser.add_argument("--threads", type=int, default=2, help="threads of the forward pass")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.pairs:
        against_networkx(chosen.layers, chosen.tokens, chosen.pairs)
    if chosen.corpus:
        lines = [line.strip() for line in chosen.corpus.read_text(encoding="utf-8").splitlines() if line.strip()]
        against_the_pass(lines[: chosen.texts])


if __name__ == "__main__":
    main()
