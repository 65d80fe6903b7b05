"""Attention flow: the exact maximum flow from a token above to an input token below (Abnar and Zuidema 2020).

The graph has a node for every token at each depth 0 to L and an edge from (l, i) to (l - 1, j) of capacity A_l[i, j],
where A_l is row-stochastic: half the mean attention of layer l, half the identity. The source is one node (l, u), the
sink one input token (0, v); nodes have no capacity of their own. Each step settles what the one before it left:

1. a ceiling by dynamic programming, as if paths that meet did not compete: the maximum flow at depths 1 and 2;
2. a feasible flow from greedy routing, all sinks and depths at once: where it attains the ceiling, both are maximal;
3. Dinic's algorithm in whole numbers, many problems joined into one graph: first along the strongest edges, which is
   enough where it attains the ceiling, then along all.

Arrays of layers may have an axis of texts after the first: for short texts most time goes to the number of calls, and
what a text gets does not depend on those beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Integers = NDArray[np.int64]
Whole = NDArray[np.int32]

ATTAINED = 1e-9
"""A feasible flow this near its ceiling attains it: float64 rounding stays far below."""
SATURATED = 1e-6
ROUNDED = 1e-7
"""The same in whole numbers, where every edge of a cut may be off by half a unit."""
STRONGEST = 12
"""Edges out of a node that nearly always suffice: of MiniLM's [CLS] flows that get so far, 19 of 20."""
UNIT = 2**30
"""Whole numbers to a capacity of 1: then no residual capacity leaves the 32 bits that scipy's max-flow has."""
BLOCK_ENTRIES = 2**16
"""Numbers to an array over (sink, node, node), edges to a joined graph: few calls, and still in a core's cache."""


def attention_flow(layers: Floats, sources: Sequence[int]) -> Floats:
    """Maximum flow to every input token from each source token at each depth 1 to L.

    Shape (layer, [text,] token, token), rows summing to 1, to (layer, [text,] source, token): entry [l - 1, s, v]
    flows from (l, sources[s]) to (0, v). From 0 to `flow_bound` (above depth 1). Raw values: Abnar and Zuidema 2020
    then divide by the sum over v. Depth 1 is the row of A_1 itself, depth 2 is sum_i min(A_2[u, i], A_1[i, v]).

    Error at most 1e-9 where greedy routing attains the ceiling, 1e-7 where Dinic's algorithm does. Elsewhere capacities
    are multiples of 2^-30: at most 2^-31 for every edge of the minimum cut, of which there are fewer than L n^2 / 4;
    1e-8 is typical.

    >>> attention_flow(np.array([[[0.75, 0.25], [0.5, 0.5]], [[0.5, 0.5], [0.25, 0.75]]]), [0]).tolist()
    [[[0.75, 0.25]], [[1.0, 0.75]]]
    """
    if layers.ndim == 3:
        return attention_flow(layers[:, None], sources)[:, 0]
    found = [_by_greed(layers[:, texts], sources) for texts in _runs(layers.shape[1], layers.shape[-1] ** 3)]
    flows, left = (np.ascontiguousarray(np.concatenate(parts, axis=1)) for parts in zip(*found, strict=True))
    # Whole numbers: however many texts go into one graph, each gets the same flow.
    for depth in np.flatnonzero(left.any(axis=(1, 2, 3))):
        _settle(layers[: depth + 1], sources, flows[depth], left[depth])
    return flows


def _by_greed(layers: Floats, sources: Sequence[int]) -> tuple[Floats, Flags]:
    """The ceiling of every flow, and where greedy routing does not attain it: (layer, text, source, token) each."""
    flows = flow_ceiling(layers)[..., list(sources), :]
    left = np.zeros(flows.shape, dtype=bool)
    for at, source in enumerate(sources):
        left[..., at, :] = ~attained(layers, source, flows[..., at, :])
    return flows, left


def _settle(layers: Floats, sources: Sequence[int], flows: Floats, left: Flags) -> None:
    """Write the maximum flow through all `layers` where it is `left`, in place of its ceiling: (text, source, sink)."""
    texts, where, sinks = np.nonzero(left)
    starts = np.asarray(sources, dtype=np.int64)[where]
    flows[texts, where, sinks] = _exact(layers, Pairs(texts, starts, sinks), flows[texts, where, sinks])


def flow_bound(layers: Floats) -> Floats:
    """What no flow from depth 2 or above exceeds: min(1, sum_i A_1[i, v]), out of the source and into the sink.

    Shape (layer, [text,] token, token) to ([text,] token). At depth 1 the flow is A_1[u, v], below this as well.

    >>> flow_bound(np.array([[[0.75, 0.25], [0.5, 0.5]]])).tolist()
    [1.0, 0.75]
    """
    return np.minimum(1.0, layers[0].sum(axis=-2))


def saturated(flows: Floats, layers: Floats) -> Flags:
    """Whether a flow is its bound (to 1e-6), so that it says nothing about the layers between. Shape of `flows`.

    >>> saturated(np.array([[[0.9, 0.75]]]), np.array([[[0.75, 0.25], [0.5, 0.5]]])).tolist()
    [[[False, True]]]
    """
    return flows >= flow_bound(layers)[..., None, :] - SATURATED


def flow_ceiling(layers: Floats) -> Floats:
    """Upper bound c_l(u, v) = min(b_v, sum_i min(A_l[u, i], c_{l-1}(i, v))) with c_1 = A_1 and b = `flow_bound`.

    Every node uses the edges below it as if for itself alone, so flows that meet do not compete. The maximum flow
    itself for l = 1 and 2, where each node below the source has one way to the sink. Shape
    (layer, [text,] token, token) to (layer, [text,] source, sink).

    >>> flow_ceiling(np.array([[[0.75, 0.25], [0.5, 0.5]], [[0.5, 0.5], [0.25, 0.75]]]))[1].tolist()
    [[1.0, 0.75], [0.75, 0.75]]
    """
    bound = flow_bound(layers)
    ceiling = np.concatenate([_unshared(layers, sinks) for sinks in _blocks(layers)], axis=-2)
    ceiling[1:] = np.minimum(ceiling[1:], bound[..., None])
    return ceiling.swapaxes(-1, -2)


def _runs(count: int, entries: int) -> Iterator[Integers]:
    """0 to `count` in runs small enough that arrays with so many entries to each stay in the cache."""
    size = max(BLOCK_ENTRIES // max(entries, 1), 1)
    return (np.arange(first, min(first + size, count)) for first in range(0, count, size))


def _blocks(layers: Floats) -> Iterator[Integers]:
    """The sinks in runs; they depend on the number of tokens alone."""
    tokens = layers.shape[-1]
    return _runs(tokens, tokens**2)


def _unshared(layers: Floats, sinks: Integers) -> Floats:
    """The ceiling without its bound, (depth, [text,] sink, node)."""
    ceilings = [layers[0][..., sinks].swapaxes(-1, -2)]
    for layer in layers[1:]:
        ceilings.append(np.minimum(layer[..., None, :, :], ceilings[-1][..., None, :]).sum(axis=-1))
    return np.stack(ceilings)


def attained(layers: Floats, source: int, ceiling: Floats) -> Flags:
    """Where a feasible flow from `source` proves its ceiling (layer, [text,] sink) to be the maximum. Shape of that.

    The feasible flow comes from greedy routing; where it falls short, nothing is known.

    >>> layers = np.array([[[0.75, 0.25], [0.5, 0.5]], [[0.5, 0.5], [0.25, 0.75]]])
    >>> attained(layers, 0, flow_ceiling(layers)[:, 0]).tolist()
    [[True, True], [True, True]]
    """
    proven = np.ones(ceiling.shape, dtype=bool)
    if len(layers) > 2:
        feasible = np.concatenate([_greedy_flow(layers, source, sinks) for sinks in _blocks(layers)], axis=-1)
        proven[2:] = feasible >= ceiling[2:] - ATTAINED
    return proven


def _greedy_flow(layers: Floats, source: int, sinks: Integers) -> Floats:
    """Flow that greedy routing brings from `source` at depths 3 to L to `sinks`: (depth, [text,] sink), feasible.

    All depths share one descent; the flow from depth l joins at depth l - 1. What a node cannot pass on stays there:
    a preflow, whose excess could always return to the source without touching what has arrived.
    """
    below = _without_return(layers[:-1], source)
    ceilings = _unshared(below, sinks)
    preferences = _preferences(layers[:-2], sinks)
    flow = np.empty((*ceilings.shape[1:-1], 0, layers.shape[-1]))
    for depth in range(len(layers) - 1, 1, -1):
        joining = np.minimum(layers[depth][..., None, source, :], ceilings[depth - 1])
        flow = np.concatenate([flow, joining[..., None, :]], axis=-2)
        capacity = np.minimum(below[depth - 1][..., None, :, :], ceilings[depth - 2][..., None, :])
        flow = np.minimum(_descend(flow, capacity, preferences[depth - 2]), ceilings[depth - 2][..., None, :])
    return np.moveaxis(flow.sum(axis=-1), -1, 0)[::-1]


def _without_return(layers: Floats, source: int) -> Floats:
    """Layers without edges from other tokens into the source's, but for those into the sinks.

    Where the minimum cut leaves the source token at all depths above it, as it mostly does for [CLS], flow that came
    back to it would be lost.
    """
    below = layers.copy()
    below[1:, ..., source] = 0.0
    below[1:, ..., source, source] = layers[1:, ..., source, source]
    return below


def _preferences(layers: Floats, sinks: Integers) -> Floats:
    """In which order, and by how much, to fill the edges into each node: (depth, [text,] sink, turn, node).

    Turns sum to 1.

    First the sink's own token; then the others in proportion to attention rollout A_d ... A_1 from them to the sink;
    then whatever capacity is left.
    """
    own = (sinks[:, None] == np.arange(layers.shape[-1])).astype(np.float64)
    rollout, preferences = layers[0][..., sinks].swapaxes(-1, -2), []
    for depth in range(len(layers)):
        rollout = rollout @ layers[depth].swapaxes(-1, -2) if depth else rollout
        others = rollout * (1.0 - own)
        favoured = _ratio(others, others.max(axis=-1, keepdims=True))
        turns = np.broadcast_to(own, favoured.shape), favoured, 1.0 - own - favoured
        preferences.append(np.stack(turns, axis=-2))
    return np.stack(preferences)


def _descend(flow: Floats, capacity: Floats, preferences: Floats) -> Floats:
    """One layer down: flow ([text,] sink, depth, node) through capacities ([text,] sink, node, node), turn by turn.

    At each turn a node fills in proportion the edges that the turn opens. A turn scales the columns of the capacity,
    so that one product with it serves all turns.
    """
    room = capacity @ preferences.swapaxes(-1, -2)
    arrived = np.zeros_like(flow)
    for turn in range(preferences.shape[-2]):
        offered = room[..., None, :, turn]
        share = np.minimum(_ratio(flow, offered), 1.0)
        arrived += (share @ capacity) * preferences[..., None, turn, :]
        flow = np.maximum(flow - share * offered, 0.0)
    return arrived


def _ratio(part: Floats, whole: Floats) -> Floats:
    return part / np.where(whole > 0, whole, 1.0)


@dataclass(frozen=True)
class Pairs:
    """Problems of one depth: from a source to a sink of a text."""

    texts: Integers
    sources: Integers
    sinks: Integers

    def __len__(self) -> int:
        return len(self.sinks)

    def __getitem__(self, chosen: slice | Flags) -> Pairs:
        return Pairs(self.texts[chosen], self.sources[chosen], self.sinks[chosen])


def _exact(layers: Floats, pairs: Pairs, ceiling: Floats) -> Floats:
    """Maximum flow through all `layers` (layer, text, token, token) for pairs that have this ceiling: (pair)."""
    tokens = layers.shape[-1]
    hard = np.ones(len(pairs), dtype=bool)
    if tokens > STRONGEST:
        hard = _dinic(layers, pairs, STRONGEST) < ceiling - ROUNDED
    flows = ceiling.copy()
    flows[hard] = np.minimum(ceiling[hard], _dinic(layers, pairs[hard], tokens))
    return flows


def _dinic(layers: Floats, pairs: Pairs, strongest: int) -> Floats:
    """Maximum flow along the strongest edges out of every node, by scipy, as many pairs to a graph as fit."""
    depth, tokens = len(layers), layers.shape[-1]
    size = max(BLOCK_ENTRIES // (depth * tokens * min(strongest, tokens)), 1)
    flows = [np.empty(0)]
    for first in range(0, len(pairs), size):
        some = pairs[first : first + size]
        capacities = np.rint(layers[:, some.texts].swapaxes(0, 1) * UNIT).astype(np.int32)
        graph = _joined_graph(capacities, _kept_edges(capacities[:, 1:-1], some, strongest), some)
        flows.append(_joined_flows(graph, tokens))
    return np.concatenate(flows) / UNIT


def _kept_edges(capacities: Whole, pairs: Pairs, strongest: int) -> Flags:
    """A node's strongest edges, all out of the source's token and all into the sink's: (pair, layer, token, token)."""
    weak = max(capacities.shape[-1] - strongest, 0)
    kept = capacities >= np.partition(capacities, weak, axis=-1)[..., weak, None]
    every = np.arange(len(pairs))
    kept[every, :, pairs.sources] = True
    kept[every, :, :, pairs.sinks] = True
    return kept & (capacities > 0)


def _joined_graph(capacities: Whole, kept: Flags, pairs: Pairs) -> csr_matrix:
    """One graph of separate copies, a pair each, between a common source (first node) and a common sink (last).

    Capacities (pair, layer, token, token). Nodes in between: every copy's depth 1, then every copy's depths 2 to l - 1.
    Copies share no edge, so the largest flow through all is the largest through each.
    """
    count, between, tokens = kept.shape[:3]
    every = np.arange(count)
    lowest = np.arange(count * tokens).reshape(count, 1, tokens)
    higher = lowest.size + np.arange(count * between * tokens).reshape(count, between, tokens)
    nodes = 1 + np.concatenate([lowest, higher], axis=1)
    last = 1 + nodes.size
    outer = capacities[every, -1, pairs.sources].ravel(), capacities[every, 0, :, pairs.sinks].ravel()
    weights = np.concatenate([*outer, capacities[:, 1:-1][kept]])
    heads = np.broadcast_to(nodes[:, :-1, None], kept.shape)[kept]
    heads = np.concatenate([nodes[:, -1].ravel(), np.full(lowest.size, last), heads])
    degrees = np.concatenate([[0, lowest.size], np.ones(lowest.size), kept.sum(axis=-1).ravel(), [0]])
    starts = np.cumsum(degrees).astype(np.int32)
    return csr_matrix((weights, heads.astype(np.int32), starts), shape=(last + 1, last + 1))


def _joined_flows(graph: csr_matrix, tokens: int) -> Floats:
    """Flow out of the common source into each copy. The sum over all may exceed 32 bits; no single one does."""
    flow = maximum_flow(graph, 0, graph.shape[0] - 1, method="dinic").flow
    return flow.data[: flow.indptr[1]].astype(np.float64).reshape(-1, tokens).sum(axis=1)
