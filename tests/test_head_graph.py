"""The graph of the strongest pairs of heads: against networkx, ties, its file, and what the report says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pandas as pd
import pytest
import tiny
from command import Run, content, files_of

from analyses.heads import HeadsAgainstHeads
from analyses.kit.analysis import Selection
from analyses.kit.comparison import Heads, Pairing, Place, Words, closest_table, comparison
from analyses.kit.head_graph import edge_count, strongest
from analyses.kit.result import Graph, Network, Result
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.report import write_graph
from bertgeo_cli.run import analyse_weights

METRICS = ("projection-kernel", "principal-angles", "bilinear-cosine", "content-bias-cosine", "composition")


def tables_of(result: Result) -> dict[str, pd.DataFrame]:
    return {table.name: table.frame for table in result.tables}


def answer(loaded: LoadedModel, **settings: Any) -> Result:
    return analyse_weights([HeadsAgainstHeads(**settings)], loaded)[0]


def built(graph: Graph) -> networkx.MultiDiGraph:
    made = networkx.MultiDiGraph()
    made.add_nodes_from(graph.nodes["node"])
    for edge in graph.edges.itertuples():
        made.add_edge(edge.source, edge.target, weight=edge.weight)
    return made


def name(layer: int, head: int) -> str:
    return f"L{layer}H{head}"


@pytest.mark.parametrize("metric", METRICS)
def test_edges_are_the_strongest_pairs_from_earlier_to_later(minilm: LoadedModel, metric: str) -> None:
    result = answer(minilm, metric=metric, composition="K")
    (graph,), pairs = result.graphs, tables_of(result)["heads-pairs"]
    pairs = pairs[pairs["layer"] < pairs["other_layer"]]
    assert len(graph.edges) == int(0.03 * len(pairs)) == 64
    strongest = pairs.sort_values("value", ascending=metric == "principal-angles")[:64]
    wanted = {
        (name(row.layer, row.head), name(row.other_layer, row.other_head)): row.value for row in strongest.itertuples()
    }
    assert {(edge.source, edge.target): edge.weight for edge in graph.edges.itertuples()} == wanted
    assert graph.edges["weight"].is_monotonic_increasing or graph.edges["weight"].is_monotonic_decreasing


@pytest.mark.parametrize("metric", METRICS)
def test_hubs_have_the_degrees_of_networkx(minilm: LoadedModel, metric: str) -> None:
    result = answer(minilm, metric=metric, composition="V", edges="5%")
    made, hubs = built(result.graphs[0]), tables_of(result)["heads-hubs"]
    assert len(hubs) == len(made) == 72
    for row in hubs.itertuples():
        node = name(row.layer, row.head)
        assert (row.in_degree, row.out_degree, row.degree) == (
            made.in_degree(node), made.out_degree(node), made.degree(node),
        )  # fmt: skip
        assert row.in_weight == pytest.approx(made.in_degree(node, weight="weight"))
        assert row.out_weight == pytest.approx(made.out_degree(node, weight="weight"))
    assert hubs["degree"].is_monotonic_decreasing
    assert networkx.is_directed_acyclic_graph(made)


def made_heads(values: list[list[float]], layers: list[int], **words: bool) -> Heads:
    places = tuple(Place(layer, layer, layer, head) for head, layer in enumerate(layers))
    pairing = Pairing.of(places, only_later=False)
    matrix = np.array(values)
    one = comparison("", matrix, pairing, np.abs(matrix), {})
    return Heads("made", None, Words("made", "made", "made", **words), places, (one,), pairing)


VALUES = [[9.0, 0.5, 0.2, 0.7], [8.0, 9.0, 0.7, 0.6], [8.0, 8.0, 9.0, 8.0], [8.0, 8.0, 8.0, 9.0]]
"""Heads 0 and 1 run in layer 0, 2 and 3 in layer 1: four pairs run forward, 0.2, 0.7, 0.7 and 0.6."""


def edges_of(heads: Heads, edges: str) -> list[tuple[str, str, float]]:
    found = strongest(heads, edges).graphs[0].edges
    return list(found[["source", "target", "weight"]].itertuples(index=False, name=None))


def test_edges_by_hand_with_ties_in_the_order_of_heads() -> None:
    heads = made_heads(VALUES, [0, 0, 1, 1])
    tied = [("L0H0", "L1H3", 0.7), ("L0H1", "L1H2", 0.7)]
    assert edges_of(heads, "1") == tied[:1]
    assert edges_of(heads, "75%") == [*tied, ("L0H1", "L1H3", 0.6)]
    assert edges_of(heads, "99") == [*tied, ("L0H1", "L1H3", 0.6), ("L0H0", "L1H2", 0.2)]
    nearly = [[*row] for row in VALUES]
    nearly[1][2] += 1e-15  # what rounding alone decides
    assert [edge[:2] for edge in edges_of(made_heads(nearly, [0, 0, 1, 1]), "1")] == [("L0H0", "L1H3")]


def test_where_smaller_is_closer_the_smallest_are_strongest() -> None:
    heads = made_heads(VALUES, [0, 0, 1, 1], falling=True)
    assert edges_of(heads, "2") == [("L0H0", "L1H2", 0.2), ("L0H1", "L1H3", 0.6)]
    assert strongest(heads, "2").figures[0].panels[0].falling  # type: ignore[union-attr]


def test_pairs_without_a_value_are_no_edges() -> None:
    values = [[*row] for row in VALUES]
    values[0][3] = float("nan")
    assert len(edges_of(made_heads(values, [0, 0, 1, 1]), "100%")) == 3


def test_a_pair_without_a_value_is_not_listed_before_one_that_is_as_far_apart() -> None:
    values = np.ones((3, 3))
    values[0, 1] = values[1, 0] = float("nan")
    closest = closest_table(made_heads(values.tolist(), [0, 0, 0])).frame
    assert closest[["head", "other_head"]].to_numpy().tolist() == [[0, 2], [1, 2]]


@pytest.mark.parametrize(
    ("text", "pairs", "count"),
    [("3%", 9504, 285), ("100%", 7, 7), ("1%", 7, 1), ("5%", 50, 2), ("12", 7, 7), (" 2 ", 7, 2)],
)
def test_edges_are_counted_by_share_or_number(text: str, pairs: int, count: int) -> None:
    assert edge_count(text, pairs) == count


def test_without_an_earlier_and_a_later_head_there_is_no_graph(tiny_model: LoadedModel, tmp_path: Path) -> None:
    albert = load_model(str(tiny.tiny_family("albert", tmp_path)), device="cpu", offline=True)
    for result in (answer(tiny_model, layers=Selection("1")), answer(albert)):
        assert result.graphs == ()
        assert "heads-hubs" not in tables_of(result)
        assert any("no graph" in note for note in result.notes)


def test_the_figure_shows_the_edges_and_names_the_largest_hubs(minilm: LoadedModel) -> None:
    result = answer(minilm, subspaces="OQ,OK")
    figure = next(figure for figure in result.figures if figure.name == "heads-graph")
    hubs, edges = tables_of(result)["heads-hubs"], result.graphs[0].edges
    for kind, panel in zip(("OQ", "OK"), figure.panels, strict=True):
        assert isinstance(panel, Network)
        assert panel.title == kind
        largest = hubs[hubs["subspaces"] == kind].head(8)
        assert {label for label in panel.labels if label} == {name(row.layer, row.head) for row in largest.itertuples()}
        assert len(panel.edges) == (edges["subspaces"] == kind).sum() == 64
        for start, end, _ in panel.edges:
            assert panel.layers[start] < panel.layers[end]


# The file


def test_the_file_is_read_back_by_networkx_as_it_was(minilm: LoadedModel, tmp_path: Path) -> None:
    graph = answer(minilm, subspaces="OQ,OK,OV").graphs[0]
    assert write_graph(graph, tmp_path) == "heads-graph.graphml"
    read = networkx.read_graphml(tmp_path / "heads-graph.graphml", force_multigraph=True)
    assert read.is_directed()
    assert dict(read.nodes(data=True)) == {
        row["node"]: {"layer": row["layer"], "head": row["head"]} for row in graph.nodes.to_dict("records")
    }
    found = sorted((*edge[:2], edge[2]["subspaces"], edge[2]["weight"]) for edge in read.edges(data=True))
    wanted = graph.edges[["source", "target", "subspaces", "weight"]].itertuples(index=False, name=None)
    assert found == sorted(wanted)
    ids = [key for *_, key in read.edges(keys=True)]
    assert len(set(ids)) == len(ids) == 3 * 64


def test_a_graph_whose_columns_are_not_described_is_refused() -> None:
    nodes, edges = pd.DataFrame({"node": ["a"]}), pd.DataFrame({"source": ["a"], "to": ["a"]})
    with pytest.raises(ValueError, match=r"\['target'\].*\['node', 'source', 'to'\]"):
        Graph("made", "Made", nodes, edges, {})


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_the_report_holds_the_graph_whatever_the_formats(fast: Run, form: str) -> None:
    done = fast("heads", "--subspaces", "OQ,OK", "--edges", "5", "--format", form, "-o", "out")
    assert done.exit_code == 0, done.output
    said = content(Path("out"))
    assert "heads-graph.graphml" in said["files"]
    assert str(Path("out/heads-graph.graphml")) in done.stdout.splitlines()
    assert set(said["graphs"]["heads-graph"]["columns"]) == {
        *("node", "layer", "head", "source", "target", "weight", "subspaces")
    }
    assert networkx.read_graphml("out/heads-graph.graphml").number_of_nodes() == 8


def test_the_same_run_writes_the_same_bytes(fast: Run) -> None:
    for folder in ("a", "b"):
        assert fast("heads", "--figures", "png", "--subspaces", "OQ", "-o", folder).exit_code == 0
    assert files_of(Path("a")) == files_of(Path("b"))
    assert "heads-graph.png" in files_of(Path("a"))


def test_a_run_of_texts_and_weights_in_parts_keeps_the_graph(fast: Run) -> None:
    Path("texts.txt").write_text("a cat\nthe dog\n", encoding="utf-8")
    common = ("run", "texts.txt", "--analyses", "heads,cone-index", "--shard-texts", "1")
    for job in ("1", "2"):
        assert fast(*common, "--shard", f"{job}/2", "-o", job).exit_code == 0
    assert fast("merge", "1", "2", "-o", "merged").exit_code == 0
    assert fast(*common, "-o", "whole").exit_code == 0
    merged, whole = files_of(Path("merged")), files_of(Path("whole"))
    assert "heads/heads-graph.graphml" in whole
    assert merged["heads/heads-graph.graphml"] == whole["heads/heads-graph.graphml"]
    assert "graphs" in json.loads(merged["run.json"])["analyses"]["heads"]


def test_metrics_of_texts_have_a_graph_too(fast: Run) -> None:
    done = fast("heads", "the old cat sat", "--metric", "jensen-shannon", "--edges", "3", "-o", "out")
    assert done.exit_code == 0, done.output
    pairs = pd.read_csv("out/heads-pairs.csv")
    least = pairs[pairs["layer"] < pairs["other_layer"]]["value"].nsmallest(3)
    read = networkx.read_graphml("out/heads-graph.graphml")
    weights = sorted(weight for *_, weight in read.edges(data="weight"))
    np.testing.assert_allclose(weights, least, rtol=1e-12)
