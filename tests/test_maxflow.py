"""Attention flow against networkx, against flows worked out by hand, and against what every flow must obey."""

from __future__ import annotations

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from networkx.algorithms.flow import edmonds_karp
from numpy.typing import NDArray

from analyses.kit.maxflow import attained, attention_flow, flow_bound, flow_ceiling, saturated

Floats = NDArray[np.float64]


def graph(layers: Floats) -> networkx.DiGraph:
    """Nodes (depth, token); networkx would read a missing capacity as infinite, so zeros are left out as edges."""
    edges = networkx.DiGraph()
    edges.add_nodes_from((depth, token) for depth in range(len(layers) + 1) for token in range(layers.shape[-1]))
    for depth, i, j in zip(*np.nonzero(layers), strict=True):
        edges.add_edge((depth + 1, i), (depth, j), capacity=layers[depth, i, j])
    return edges


def by_networkx(layers: Floats, source: int) -> Floats:
    depths, tokens = range(1, len(layers) + 1), range(layers.shape[-1])
    edges = graph(layers)
    return np.array(
        [
            [networkx.maximum_flow_value(edges, (depth, source), (0, sink), flow_func=edmonds_karp) for sink in tokens]
            for depth in depths
        ]
    )


def residual(attention: Floats) -> Floats:
    """Half the attention, half the identity."""
    return 0.5 * attention + 0.5 * np.eye(attention.shape[-1])


def dirichlet(seed: int, depth: int, tokens: int, concentration: float) -> Floats:
    weights = np.random.default_rng(seed).gamma(concentration, size=(depth, tokens, tokens)) + 1e-300
    return residual(weights / weights.sum(axis=-1, keepdims=True))


def sparse(seed: int, depth: int, tokens: int) -> Floats:
    generator = np.random.default_rng(seed)
    weights = generator.random((depth, tokens, tokens)) * (generator.random((depth, tokens, tokens)) < 0.4)
    weights[:, np.arange(tokens), generator.integers(tokens, size=tokens)] += 0.1
    return weights / weights.sum(axis=-1, keepdims=True)


def one_hot(seed: int, depth: int, tokens: int) -> Floats:
    favourite = np.random.default_rng(seed).integers(tokens, size=(depth, tokens))
    return residual((1 - 1e-6) * np.eye(tokens)[favourite] + 1e-6 / tokens)


def chained(depth: int, tokens: int) -> Floats:
    """As in MiniLM: [CLS] keeps nearly all to itself, the others give it a third."""
    attention = np.random.default_rng(9).dirichlet(np.full(tokens, 0.5), size=(depth, tokens))
    attention = 0.66 * attention + 0.34 * np.eye(tokens)[0]
    attention[:, 0] = 0.97 * np.eye(tokens)[0] + 0.03 * attention[:, 0]
    return residual(attention)


def blocks(depth: int) -> Floats:
    parts = np.zeros((depth, 5, 5))
    parts[:, :2, :2], parts[:, 2:, 2:] = dirichlet(3, depth, 2, 0.5), dirichlet(4, depth, 3, 0.5)
    return parts


GRAPHS = {
    "even": dirichlet(0, 5, 5, 1.0),
    "peaked": dirichlet(1, 6, 5, 0.1),
    "spiked": dirichlet(2, 5, 6, 0.02),
    "sparse": sparse(5, 5, 5),
    "sparser": sparse(6, 4, 6),
    "one-hot": one_hot(7, 5, 5),
    "cls-chain": chained(6, 6),
    "cls-columns": residual(np.broadcast_to(np.eye(4)[0], (4, 4, 4))),
    "blocks": blocks(4),
    "identity": np.broadcast_to(np.eye(4), (4, 4, 4)).copy(),
    "permutations": np.eye(4)[np.array([[1, 2, 3, 0], [3, 2, 1, 0], [0, 2, 1, 3], [1, 0, 3, 2]])],
    "ties": np.full((5, 4, 4), 0.25),
    "residual ties": residual(np.full((5, 4, 4), 0.25)),
    "one token": np.ones((4, 1, 1)),
    "two tokens": dirichlet(8, 5, 2, 0.3),
    "three tokens": dirichlet(9, 5, 3, 0.3),
    "one layer": dirichlet(10, 1, 4, 0.5),
    "two layers": dirichlet(11, 2, 5, 0.5),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_flow_is_that_of_networkx(name: str) -> None:
    layers = GRAPHS[name]
    tokens = range(layers.shape[-1])
    expected = np.stack([by_networkx(layers, source) for source in tokens], axis=1)
    np.testing.assert_allclose(attention_flow(layers, tokens), expected, rtol=0, atol=1e-6)


def test_flow_of_two_tokens_worked_out_by_hand() -> None:
    # A_1 = A_2 = A_3 = [[3/4, 1/4], [1/2, 1/2]], from token 0 at depth 3.
    # To token 0: A_1 lets 3/4 + 1/2 in, the source only 1 out. 3/4 go 0-0-0-0; 1/4 goes 0-1 at layer 3, then 1-1 at
    # layer 2 and 1-0 at layer 1, where 1/2 is free each. So 1, the bound.
    # To token 1: A_1 lets 1/4 + 1/2 = 3/4 in. 1/4 goes 0-0-0-1. The 1/2 over node (1, 1) come from (2, 0), which
    # passes it 1/4 of layer 2, and from (2, 1), which has 1/4 and may pass 1/2. So 3/4, the bound.
    # At depth 2, to token 1: 1/4 over (1, 0) and min(1/4, 1/2) over (1, 1). So 1/2, not the bound.
    layers = np.array([[[0.75, 0.25], [0.5, 0.5]]] * 3)
    flows = attention_flow(layers, [0])
    np.testing.assert_allclose(flows[:, 0], [[0.75, 0.25], [1.0, 0.5], [1.0, 0.75]], rtol=0, atol=1e-8)
    assert saturated(flows, layers)[:, 0].tolist() == [[False, False], [True, False], [True, True]]


def test_paths_that_meet_share_a_bottleneck() -> None:
    # Source 0 sends 1/2 each to tokens 0 and 1 of depth 2; both may pass 1/2 to token 0 and 1/2 to token 2 of depth 1.
    # Down to token 0, the first has an edge of 1/4 and the second one of 1/2: 3/4, whoever comes over them.
    third = np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    second = np.array([[0.5, 0.0, 0.5], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0]])
    first = np.array([[0.25, 0.75, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    layers = np.array([first, second, third])
    assert attention_flow(layers, [0])[2, 0, 0] == pytest.approx(0.75, abs=1e-8)
    # Now both halves must come over (1, 0), of 3/4, while token 1 offers the sink 1/4 that none of them reaches. The
    # ceiling gives each half the 3/4 for itself.
    layers[:2] = [[[0.75, 0.25, 0.0], [0.25, 0.75, 0.0], [0.0, 0.0, 1.0]], [[1, 0, 0], [1, 0, 0], [0, 0, 1]]]
    assert flow_ceiling(layers)[2, 0, 0] == 1.0
    assert attention_flow(layers, [0])[2, 0, 0] == pytest.approx(0.75, abs=1e-8)


@pytest.mark.parametrize("name", GRAPHS)
def test_first_depth_is_the_first_layer_and_second_the_sum_of_minima(name: str) -> None:
    layers = GRAPHS[name]
    flows = attention_flow(layers, range(layers.shape[-1]))
    np.testing.assert_array_equal(flows[0], layers[0])
    if len(layers) > 1:
        sums = np.minimum(layers[1][:, :, None], layers[0][None]).sum(axis=1)
        np.testing.assert_allclose(flows[1], np.minimum(sums, flow_bound(layers)), rtol=0, atol=1e-12)


def test_settled_without_dinic_or_with_it_the_flow_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = chained(6, 7)
    assert attained(layers, 0, flow_ceiling(layers)[:, 0]).all()
    quick = attention_flow(layers, range(7))
    monkeypatch.setattr("analyses.kit.maxflow.attained", lambda layers, source, ceiling: np.zeros(ceiling.shape, bool))
    np.testing.assert_allclose(quick, attention_flow(layers, range(7)), rtol=0, atol=1e-7)


@pytest.mark.parametrize("strongest", [1, 2, 3])
def test_strongest_edges_settle_only_what_all_edges_would(strongest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flows = {name: attention_flow(layers, range(layers.shape[-1])) for name, layers in GRAPHS.items()}
    monkeypatch.setattr("analyses.kit.maxflow.STRONGEST", strongest)
    for name, layers in GRAPHS.items():
        thin = attention_flow(layers, range(layers.shape[-1]))
        np.testing.assert_allclose(thin, flows[name], rtol=0, atol=2e-7, err_msg=name)


def test_flow_does_not_depend_on_other_sources_nor_on_the_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = dirichlet(12, 5, 6, 0.3)
    together = attention_flow(layers, [4, 0, 4])
    assert attention_flow(layers, [4]).tobytes() == together[:, [0]].tobytes() == together[:, [2]].tobytes()
    monkeypatch.setattr("analyses.kit.maxflow.BLOCK_ENTRIES", 40)
    assert attention_flow(layers, [4, 0, 4]).tobytes() == together.tobytes()


def test_no_source_no_flow() -> None:
    assert attention_flow(dirichlet(0, 3, 4, 1.0), []).shape == (3, 0, 4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    depth=st.integers(1, 6),
    tokens=st.integers(1, 7),
    concentration=st.sampled_from([0.02, 0.1, 0.5, 2.0]),
)
def test_what_every_flow_obeys(seed: int, depth: int, tokens: int, concentration: float) -> None:
    layers = dirichlet(seed, depth, tokens, concentration)
    flows = attention_flow(layers, range(tokens))
    bound = flow_bound(layers)
    assert flows.shape == (depth, tokens, tokens)
    assert (flows >= 0).all()
    assert (flows <= bound).all()
    # At least what attention brings: every weight of A_l ... A_1 is carried by a feasible flow.
    rollout = layers[0]
    for layer, flow in zip(layers[1:], flows[1:], strict=True):
        rollout = layer @ rollout
        assert (flow >= rollout - 1e-7).all()
    # Renaming the tokens renames the flows.
    order = np.random.default_rng(seed).permutation(tokens)
    renamed = attention_flow(layers[:, order][:, :, order], range(tokens))
    np.testing.assert_allclose(renamed, flows[:, order][:, :, order], rtol=0, atol=1e-7)
    # One source and sink of the deepest, by networkx.
    source, sink = (int(token) for token in order[[0, -1]])
    value = networkx.maximum_flow_value(graph(layers), (depth, source), (0, sink), flow_func=edmonds_karp)
    assert flows[-1, source, sink] == pytest.approx(value, abs=1e-6)


def test_what_a_text_gets_does_not_depend_on_the_texts_beside_it() -> None:
    texts = [dirichlet(seed, 5, 6, 0.3) for seed in range(9)]
    together = attention_flow(np.stack(texts, axis=1), [0, 3])
    for at, layers in enumerate(texts):
        assert attention_flow(layers, [0, 3]).tobytes() == together[:, at].tobytes()
