"""Attention, rollout and flow: worked by hand, against networkx, and against the float64 reference pass of MiniLM."""

from __future__ import annotations

import networkx
import numpy as np
import pytest
import reference

from analyses.flow import Flow, Paths
from analyses.kit.rollout import mean_over_heads, mixing_matrices, rollout
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.errors import UsageError
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.run import Pass, analyse_corpus, analyse_text

RIVER = "The fisherman sat by the river bank."
TEXTS = (RIVER, "Hello.", "Was the cat's mat wet?")


def flow_by_networkx(mixing: np.ndarray, source: int, sink: int) -> float:
    """Maximum flow through a graph built edge by edge."""
    graph = networkx.DiGraph()
    for layer, matrix in enumerate(mixing, start=1):
        for i, row in enumerate(matrix):
            for j, weight in enumerate(row):
                graph.add_edge((layer, i), (layer - 1, j), capacity=float(weight))
    return float(networkx.maximum_flow_value(graph, (len(mixing), source), (0, sink)))


def mixing_by_loops(attention: np.ndarray) -> np.ndarray:
    layers, heads, n, _ = attention.shape
    mixing = np.zeros((layers, n, n))
    for layer in range(layers):
        for i in range(n):
            for j in range(n):
                mean = sum(attention[layer, head, i, j] for head in range(heads)) / heads
                mixing[layer, i, j] = 0.5 * mean + (0.5 if i == j else 0.0)
    return mixing


def encoded(loaded: LoadedModel, text: str, line: int = 1):
    return Encoder(loaded.tokenizer, loaded.max_tokens).encode(text, line=line)


def pairs(loaded: LoadedModel, text: str, **settings: str):
    result = analyse_text([Flow(**settings)], loaded, encoded(loaded, text), Pass())[0]
    return next(table.frame for table in result.tables if table.name == "flow")


def test_in_the_first_layer_flow_and_rollout_are_half_attention_half_identity() -> None:
    rng = np.random.default_rng(0)
    attention = rng.dirichlet(np.ones(5), size=(3, 2, 5))
    paths = Paths(mean_over_heads(attention), tuple(range(5)))
    expected = 0.5 * attention[0].mean(axis=0) + 0.5 * np.eye(5)
    np.testing.assert_allclose(paths.flow[0], expected, atol=1e-12)
    np.testing.assert_allclose(paths.rollout[0], expected, atol=1e-12)


def test_two_tokens_by_hand() -> None:
    # One head; A_1 mixes to (.75 .25), (.5 .5), A_2 to (.5 .5), (.25 .75).
    attention = np.array([[[[0.5, 0.5], [1.0, 0.0]]], [[[0.0, 1.0], [0.5, 0.5]]]])
    mixing = mixing_matrices(mean_over_heads(attention))
    np.testing.assert_allclose(mixing, [[[0.75, 0.25], [0.5, 0.5]], [[0.5, 0.5], [0.25, 0.75]]])
    # Rollout from token 0: .5 (.75 .25) + .5 (.5 .5). Flow: min(.5, .75) + min(.5, .5), min(.5, .25) + min(.5, .5).
    paths = Paths(mean_over_heads(attention), (0,))
    np.testing.assert_allclose(paths.rollout[1, 0], [0.625, 0.375])
    np.testing.assert_allclose(paths.flow[1, 0], [1.0, 0.75])
    np.testing.assert_allclose(paths.share("flow")[1, 0], [4 / 7, 3 / 7])
    np.testing.assert_allclose(paths.bound, [1.0, 0.75])
    assert paths.saturated[1, 0].tolist() == [True, True]
    assert paths.saturated[0, 0].tolist() == [False, False]


def test_rollout_rows_sum_to_one_after_every_layer() -> None:
    attention = np.random.default_rng(1).dirichlet(np.full(7, 0.2), size=(12, 3, 7))
    np.testing.assert_allclose(rollout(mixing_matrices(mean_over_heads(attention))).sum(axis=-1), 1.0, atol=1e-14)


def test_rollout_is_the_product_of_all_layers() -> None:
    mixing = mixing_matrices(np.random.default_rng(2).dirichlet(np.ones(4), size=(3, 4)))
    np.testing.assert_allclose(rollout(mixing)[2], mixing[2] @ mixing[1] @ mixing[0])


@pytest.mark.parametrize("source", ["cls", "all", "3", "bank"])
def test_the_table_of_a_text_equals_the_reference_pass(minilm: LoadedModel, source: str) -> None:
    frame = pairs(minilm, RIVER, source=source)
    tokens = reference.tokenize(RIVER)
    attention = reference.forward(tokens.ids, tokens.segments)["attention"]
    mixing, n = mixing_by_loops(attention), len(tokens.ids)
    sources = {"cls": [0], "all": list(range(n)), "3": [3], "bank": [7]}[source]
    assert len(frame) == 6 * len(sources) * n
    product = np.eye(n)
    for layer in range(6):
        product = mixing[layer] @ product
        for start in sources:
            rows = frame[(frame["layer"] == layer) & (frame["source"] == start)].sort_values("token")
            np.testing.assert_allclose(rows["attention"], attention[layer, :, start].mean(axis=0), atol=1e-5)
            np.testing.assert_allclose(rows["rollout"], product[start], atol=1e-5)
            if source != "all" or start % 4 == 0:
                flow = np.array([flow_by_networkx(mixing[: layer + 1], start, sink) for sink in range(n)])
                np.testing.assert_allclose(rows["flow_value"], flow, atol=1e-5)
                np.testing.assert_allclose(rows["flow_share"], flow / flow.sum(), atol=1e-5)
    bound = np.minimum(1.0, mixing[0].sum(axis=0))
    np.testing.assert_allclose(frame[frame["layer"] == 0]["bound"][:n], bound, atol=1e-5)
    saturated = frame["flow_value"] >= frame["bound"] - 1e-6
    assert frame["saturated"].tolist() == saturated.tolist()


def test_the_layers_table_is_the_mean_over_sources_and_texts(minilm: LoadedModel) -> None:
    texts = [encoded(minilm, text, number) for number, text in enumerate(TEXTS, start=1)]
    frame = analyse_corpus([Flow(source="all")], minilm, texts, Pass())[0].tables[0].frame
    values = [_by_loops(pairs(minilm, text, source="all"), reference.tokenize(text)) for text in TEXTS]
    assert frame["texts"].tolist() == [3] * 18
    for row in frame.itertuples():
        for name in values[0][row.layer, row.method]:
            wanted = np.mean([value[row.layer, row.method][name] for value in values])
            assert getattr(row, name) == pytest.approx(wanted, rel=1e-9, abs=1e-12), name
        assert np.isnan(row.saturated) == (row.method != "flow")


def _by_loops(frame, tokens) -> dict:
    kinds, n = tokens.kinds(), len(tokens.ids)
    columns = {"attention": "attention", "rollout": "rollout", "flow": "flow_share"}
    values = {}
    for layer, method in [(layer, method) for layer in range(6) for method in columns]:
        rows = frame[frame["layer"] == layer].sort_values(["source", "token"])
        matrix = rows[columns[method]].to_numpy().reshape(n, n)
        mass = {kind: [j for j in range(n) if kinds[j] == kind] for kind in ("cls", "sep", "punctuation", "other")}
        here = {f"mass_{kind}": np.mean([sum(row[j] for j in at) for row in matrix]) for kind, at in mass.items()}
        here["entropy"] = np.mean([reference.entropy(row) for row in matrix])
        here["mass_self"] = np.mean([matrix[i, i] for i in range(n)])
        if method == "flow":
            here["flow_total"] = rows["flow_value"].to_numpy().reshape(n, n).sum(axis=1).mean()
            here["saturated"] = rows["saturated"].mean()
        values[layer, method] = here
    return values


def test_texts_without_the_source_are_counted_out(minilm: LoadedModel) -> None:
    texts = [encoded(minilm, text, number) for number, text in enumerate(TEXTS, start=1)]
    result = analyse_corpus([Flow(source="bank")], minilm, texts, Pass())[0]
    assert set(result.tables[0].frame["texts"]) == {1}
    assert result.tables[1].frame.groupby("line")["entropy"].count().tolist() == [18, 0, 0]


def test_a_text_without_the_source_is_an_error_that_names_its_tokens(minilm: LoadedModel) -> None:
    with pytest.raises(UsageError, match="zebra") as raised:
        pairs(minilm, RIVER, source="zebra")
    assert "fisherman" in raised.value.hint
    with pytest.raises(UsageError, match="99"):
        pairs(minilm, RIVER, source="99")


def test_the_graph_is_drawn_for_short_texts_only(minilm: LoadedModel) -> None:
    def names(text: str) -> list[str]:
        result = analyse_text([Flow()], minilm, encoded(minilm, text), Pass())[0]
        return [figure.name for figure in result.figures]

    assert names(RIVER) == ["flow-layers", "flow-text", "flow-graph"]
    assert names(RIVER + " " + RIVER) == ["flow-layers", "flow-text"]
