"""One token's nine steps: against plain NumPy, against transformers' own outputs, and two examples by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import tiny
import torch
import transformers
from command import Run, assert_error, content
from numpy.typing import NDArray

from analyses.kit.trace import STEPS

Floats = NDArray[np.float64]
TEXT, LAYER, HEAD, QUERY = "The river bank and the old tree.", 4, 7, 2


def vector(values: pd.DataFrame, symbol: str, token: int, of: str = "value") -> Floats:
    return values.query("quantity == @symbol and token == @token")[of].to_numpy()


def full(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "trace-values.csv", keep_default_na=False, na_values=[""])


# The real model against plain NumPy


@pytest.fixture(scope="module")
def minilm_steps() -> dict[str, Floats]:
    """Every quantity of the query in float64, from the checkpoint alone: no input of a step is a recorded one."""
    text = reference.tokenize(TEXT)
    word, place, kind = (reference.weights(f"embeddings.{n}_embeddings.weight") for n in KINDS)
    rows = {"word": word[text.ids], "position": place[: len(text)], "segment": kind[text.segments]}
    every = {name: np.asarray(tensor) for name, tensor in reference.forward(text.ids, text.segments).items()}
    name = f"encoder.layer.{LAYER}"
    x, inside = every["hidden_states"][LAYER], {part: tensor[LAYER] for part, tensor in every.items()}
    h = reference.linear(inside["attention_norm"], f"{name}.intermediate.dense")
    q, k, v, s, a, z = (inside[part][HEAD] for part in ("q", "k", "v", "scores", "attention", "head_outputs"))
    channels = slice(HEAD * 32, HEAD * 32 + 32)
    w, b = (
        [reference.weights(f"{name}.attention.self.{part}.{what}")[channels] for part in ("query", "key")]
        for what in ("weight", "bias")
    )
    form = np.block([[w[0].T @ w[1], (w[0].T @ b[1])[:, None]], [b[0] @ w[1], b[0] @ b[1]]])
    u = np.append(x, np.ones((len(x), 1)), axis=1) @ form
    found = rows | {
        "e": sum(rows.values()),
        "x0": every["hidden_states"][0],
        "x": x,
        **dict(zip("qkvsaz", (q, k, v, s, a, z), strict=True)),
        **dict.fromkeys(("r", "r~"), q @ k.T),
        "u": u,
        "c": np.concatenate(list(inside["head_outputs"]), axis=1),
        "o": inside["attention_projection"],
        "y": inside["attention_sum"],
        "n": inside["attention_norm"],
        "h": h,
        "g": reference.gelu(h),
        "f": inside["mlp_output"],
        "t": inside["mlp_sum"],
        "x'": inside["layer_outputs"],
    }
    ids = {"word id": text.ids, "position id": list(range(len(text))), "segment id": text.segments}
    return {symbol: tensor[QUERY] for symbol, tensor in found.items()} | {
        name: np.array(row) for name, row in ids.items()
    }


KINDS = ("word", "position", "token_type")


@pytest.fixture
def minilm_values(run: Run, tmp_path: Path) -> pd.DataFrame:
    options = ("--layer", str(LAYER), "--head", str(HEAD), "--query", "river", "--full", "--figures", "none")
    done = run("trace", TEXT, *options, "-o", "report")
    assert done.exit_code == 0, done.output
    return full(tmp_path / "report")


def test_every_quantity_is_that_of_plain_numpy(minilm_values: pd.DataFrame, minilm_steps: dict[str, Floats]) -> None:
    assert set(minilm_values["quantity"]) == set(minilm_steps)
    for symbol, expected in minilm_steps.items():
        np.testing.assert_allclose(vector(minilm_values, symbol, QUERY), expected, rtol=1e-5, atol=1e-5, err_msg=symbol)


def test_what_was_recorded_is_that_of_plain_numpy_too(
    minilm_values: pd.DataFrame, minilm_steps: dict[str, Floats]
) -> None:
    for symbol in minilm_steps.keys() - {"x", "u"}:
        recorded = vector(minilm_values, symbol, QUERY, "recorded")
        np.testing.assert_allclose(recorded, minilm_steps[symbol], rtol=1e-5, atol=1e-5, err_msg=symbol)
    assert minilm_values.query("quantity in ['x', 'u']")["recorded"].isna().all()


def test_the_printed_error_is_that_of_the_entries(minilm_values: pd.DataFrame, tmp_path: Path) -> None:
    values, recorded = minilm_values["value"], minilm_values["recorded"]
    apart = (values - recorded).abs() / recorded.abs().clip(lower=1)
    np.testing.assert_allclose(minilm_values["error"], apart)
    assert apart.max() < 1e-5
    largest = apart.groupby(minilm_values["quantity"]).max()
    steps = pd.read_csv(tmp_path / "report" / "trace-steps.csv").set_index("quantity")
    np.testing.assert_allclose(steps["error"], largest[steps.index])


def test_the_rows_of_the_tables_are_those_of_the_query(
    minilm_values: pd.DataFrame, minilm_steps: dict[str, Floats], tmp_path: Path
) -> None:
    formulas = pd.read_csv(tmp_path / "report" / "trace-steps.csv").set_index("quantity")["formula"]
    for what in ("word", "position", "segment"):
        assert formulas[what] == f"row {minilm_steps[f'{what} id'][QUERY]} of table"


def test_keys_and_values_stand_there_for_every_token(minilm_values: pd.DataFrame) -> None:
    tokens = len(reference.tokenize(TEXT))
    counted = minilm_values.groupby("quantity")["token"].nunique()
    assert {symbol for symbol in counted.index if counted[symbol] == tokens} == {"x", "k", "v"}
    k, q = (np.array([vector(minilm_values, symbol, token) for token in rows]) for symbol, rows in
            (("k", range(tokens)), ("q", [QUERY])))  # fmt: skip
    np.testing.assert_allclose(vector(minilm_values, "r", QUERY), (k @ q[0]), rtol=1e-5, atol=1e-5)


def test_the_table_of_tokens_says_what_each_is_to_the_query(
    minilm_values: pd.DataFrame, minilm_steps: dict[str, Floats], tmp_path: Path
) -> None:
    tokens = pd.read_csv(tmp_path / "report" / "trace-tokens.csv")
    assert tokens["text"].tolist() == ["[CLS]", "The", "river", "bank", "and", "the", "old", "tree", ".", "[SEP]"]
    for column, symbol in (("raw", "r"), ("bilinear", "r"), ("scaled", "s"), ("weight", "a")):
        np.testing.assert_allclose(tokens[column], minilm_steps[symbol], rtol=1e-5, atol=1e-5, err_msg=column)
    np.testing.assert_allclose(tokens["unscaled"], reference.softmax(minilm_steps["r"]), rtol=1e-4, atol=1e-6)
    sizes = [math.sqrt(sum(vector(minilm_values, "v", token) ** 2)) for token in range(len(tokens))]
    np.testing.assert_allclose(tokens["value_length"], sizes)
    np.testing.assert_allclose(tokens["weighted_length"], minilm_steps["a"] * sizes, rtol=1e-4)


def test_a_length_is_euclidean(minilm_values: pd.DataFrame, minilm_steps: dict[str, Floats], tmp_path: Path) -> None:
    steps = pd.read_csv(tmp_path / "report" / "trace-steps.csv").set_index("quantity")
    for symbol in ("x0", "c", "f", "x'"):
        assert steps.loc[symbol, "length"] == pytest.approx(math.sqrt(sum(minilm_steps[symbol] ** 2)), rel=1e-5)


# Every family against transformers


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("layer", [0, -1])
def test_every_step_of_every_family_is_what_was_recorded(family: str, layer: int, run: Run, tmp_path: Path) -> None:
    folder = tiny.tiny_family(family, tmp_path / family, layers=3)
    values = traced_at(run, tmp_path, folder, "--layer", str(layer), "--head", "2", "--query", "3")
    assert values["error"].max() < 1e-5
    assert set(values["step"]) == set(STEPS)
    unrecorded = set(values.loc[values["recorded"].isna(), "quantity"])
    assert unrecorded == {"x", "u"}
    agree_with_transformers(values, folder, layer, head=2, token=3)


def traced_at(run: Run, tmp_path: Path, folder: Path, *options: str, text: str = "the cat sat on the old mat") -> Any:
    done = run("trace", text, "--model", str(folder), "--full", "--figures", "none", *options, "-o", "report")
    assert done.exit_code == 0, done.output
    return full(tmp_path / "report")


def agree_with_transformers(values: pd.DataFrame, folder: Path, layer: int, head: int, token: int) -> None:
    """Weights and hidden states as the library's own options give them, on the ids that the report names."""
    model: Any = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.tensor([vector(values, "word id", token).astype(int).tolist()])
    with torch.inference_mode():
        given = model(ids, output_attentions=True, output_hidden_states=True)
    states, at = given.hidden_states, layer % len(given.attentions)
    expected = {
        "x0": states[0][0, token],
        "x": states[at][0, token],
        "a": given.attentions[at][0, head, token],
        "x'": states[at + 1][0, token],
    }
    for symbol, tensor in expected.items():
        np.testing.assert_allclose(vector(values, symbol, token), tensor.numpy(), rtol=1e-5, atol=1e-5, err_msg=symbol)


def test_a_narrow_embedding_is_projected_and_a_wide_one_is_not(run: Run, tmp_path: Path) -> None:
    narrow = traced_at(run, tmp_path, tiny.tiny_family("electra", tmp_path / "narrow"), "--query", "1")
    assert [len(vector(narrow, symbol, 1)) for symbol in ("word", "e", "l", "x0")] == [24, 24, 24, 48]
    folder = tiny.tiny_family("electra", tmp_path / "wide", embedding_size=48)
    wide = traced_at(run, tmp_path, folder, "--query", "1")
    assert "l" not in set(wide["quantity"])
    assert wide["error"].max() < 1e-5
    agree_with_transformers(wide, folder, 0, head=0, token=1)


def test_positions_are_those_of_the_family(run: Run, tmp_path: Path) -> None:
    for family, first in (("roberta", 2), ("bert", 0), ("distilbert", 0)):
        values = traced_at(run, tmp_path, tiny.tiny_family(family, tmp_path / family), "--query", "1")
        places = vector(values, "position id", 1)
        assert places.tolist() == [first + at for at in range(len(places))]
        assert ("segment" in set(values["quantity"])) == (family != "distilbert")


def test_the_second_text_of_a_pair_has_the_other_segment(run: Run, tmp_path: Path, tiny_folder: Path) -> None:
    values = traced_at(run, tmp_path, tiny_folder, "--pair", "she ran", "--query", "she", text="the cat sat")
    assert vector(values, "segment id", 5).tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert values["error"].max() < 1e-5


def test_ernie_adds_a_row_for_the_task(run: Run, tmp_path: Path) -> None:
    folder = tiny.tiny_family("ernie", tmp_path / "ernie", use_task_id=True)
    values = traced_at(run, tmp_path, folder, "--query", "1")
    summed = sum(vector(values, what, 1) for what in ("word", "position", "segment", "task"))
    np.testing.assert_allclose(vector(values, "e", 1, "recorded"), summed, rtol=1e-5, atol=1e-6)
    assert values["error"].max() < 1e-5


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("relu", lambda h: np.maximum(h, 0)),
        ("gelu", reference.gelu),
        ("gelu_new", lambda h: h / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))),
    ],
)
def test_the_activation_is_that_of_the_configuration(name: str, formula: Any, run: Run, tmp_path: Path) -> None:
    values = traced_at(run, tmp_path, tiny.tiny_bert(tmp_path / "tiny", hidden_act=name), "--query", "1")
    h, g = (vector(values, symbol, 1, "recorded") for symbol in "hg")
    np.testing.assert_allclose(vector(values, "g", 1), formula(h), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(g, formula(h), rtol=1e-5, atol=1e-6)
    assert f"{name}(h) =" in run("trace", "the cat", "--model", str(tmp_path / "tiny"), "--figures", "none").stdout


# What is shown


def test_the_terminal_shows_nine_steps_in_a_hundred_columns(run: Run) -> None:
    done = run("trace", TEXT, "--layer", "3", "--head", "5", "--query", "bank", "--figures", "none")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].strip() == "L3H5, query 3 'bank': nine steps"
    titles = [line.split(":")[0] for line in lines if line.startswith("Step ")]
    assert titles == [f"Step {step}" for step in STEPS]
    table = lines[lines.index(next(line for line in lines if line.startswith("Step 3"))) :]
    row = next(line for line in table if "W_Q" in line)
    assert [part.strip() for part in row.split("│")][1:4] == ["q", "x W_Q^T + b_Q", "384 -> 32"]
    assert row.split("│")[4].split()[-1] == "…"
    assert float(row.split("│")[5]) < 1e-5


def test_entries_of_the_terminal_are_those_of_the_file(fast: Run, tmp_path: Path) -> None:
    done = fast("trace", "the old cat", "--query", "old", "-o", "report", "--json")
    told = json.loads(done.stdout)
    values = full(tmp_path / "report")
    rows = [row for step in list(STEPS)[1:] for row in told["details"][f"step-{step}"]]
    assert len(rows) == 24
    for row in rows:
        shown = [float(entry) for entry in row["first entries"].split()[:3]]
        np.testing.assert_allclose(shown, vector(values, row["quantity"], 2), atol=5.1e-5)
    assert [row["step"] for row in told["headline"]] == list(STEPS)
    assert max(row["error"] for row in told["headline"]) == pytest.approx(values["error"].max(), abs=1e-5)


def test_without_full_the_first_entries_of_the_query_are_written(fast: Run, tmp_path: Path) -> None:
    fast("trace", "the old cat", "-o", "few")
    fast("trace", "the old cat", "--full", "-o", "all")
    few, everything = full(tmp_path / "few"), full(tmp_path / "all")
    assert few["token"].unique().tolist() == [1]
    assert few["index"].max() == 2
    kept = everything.query("token == 1 and index < 3").reset_index(drop=True)
    pd.testing.assert_frame_equal(few, kept)


def test_a_long_text_shows_the_tokens_around_the_query_and_the_largest_weights(run: Run, tmp_path: Path) -> None:
    text = "the river bank and the old tree by the water in the cat and dogs on a mat"
    done = run("trace", text, "--query", "water", "--figures", "none", "-o", "report", "--json")
    told = json.loads(done.stdout)["details"]
    assert "water" in [row["text"] for row in told["step-1"]]
    weights = pd.read_csv(tmp_path / "report" / "trace-tokens.csv")["weight"]
    shown = [row["token"] for row in told["steps-4-to-6"]]
    assert shown == sorted(weights.sort_values(ascending=False).index[:12])


def test_the_figures_show_the_softmax_row_and_lengths(fast: Run, tmp_path: Path) -> None:
    done = fast("trace", "the old cat", "--figures", "svg", "-o", "report")
    assert done.exit_code == 0, done.output
    assert set(content(tmp_path / "report")["figures"]) == {"trace-attention", "trace-residual"}


# Which token, layer and head


@pytest.mark.parametrize(
    ("query", "token"), [(None, 1), ("sat", 3), ("##ing", 6), ("5", 5), ("-1", 7), ("[SEP]", 7), ("ing", 6)]
)
def test_a_token_is_named_by_its_text_its_piece_or_its_position(query: str | None, token: int, fast: Run) -> None:
    done = fast("trace", "the cat sat on playing", *(() if query is None else ("--query", query)))
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0].startswith(f"L0H0, query {token} ")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--query", "the"), "the token 'the' stands at positions 1, 5"),
        (("--query", "dog"), "the text has no token 'dog'"),
        (("--query", "dog"), "Choose a position from 0 to 7, or one of: [CLS], the, cat"),
        (("--query", "8"), "--query 8: the text has 8 tokens"),
        (("--query", "-9"), "--query -9: the text has 8 tokens"),
        (("--layer", "2"), "layer 2 does not exist in a model with 2 layers Choose from 0 to 1"),
        (("--layer", "-3"), "Choose from 0 to 1, or -2 to -1"),
        (("--head", "4"), "head 4 does not exist in a model with 4 heads Choose from 0 to 3"),
        (("--weights", "1"), "--weights belongs to --example classify"),
        (("--bias", "1"), "--bias belongs to --example classify"),
    ],
)
def test_what_the_text_or_the_model_lacks_is_said_in_two_lines(options: tuple[str, ...], told: str, fast: Run) -> None:
    assert_error(fast("trace", "the cat sat on the mat", *options), 2, told)


def test_layers_and_heads_count_from_the_end_too(fast: Run) -> None:
    done = fast("trace", "the cat", "--layer", "-1", "--head", "-1")
    assert done.stdout.splitlines()[0].startswith("L1H3, ")


# The examples by hand

E, ROOT = math.e, math.sqrt(math.e)
X = [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]]
SCORES = {"unscaled": [[2, 0, 1], [0, 2, 1], [1, 1, 2]], "scaled": [[1, 0, 0.5], [0, 1, 0.5], [0.5, 0.5, 1]]}
RAISED = {
    "unscaled": [[E * E, 1, E], [1, E * E, E], [E, E, E * E]],
    "scaled": [[E, 1, ROOT], [1, E, ROOT], [ROOT, ROOT, E]],
}
PRINTED = {"unscaled": [0.665, 0.090, 0.245], "scaled": [0.506, 0.186, 0.307]}


@pytest.mark.parametrize("way", ["unscaled", "scaled"])
@pytest.mark.parametrize("options", [("--example",), ("--example", "attention")])
def test_three_tokens_by_hand(way: str, options: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    done = run("trace", *options, "-o", "report", "--figures", "none")
    assert done.exit_code == 0, done.output
    table = pd.read_csv(tmp_path / "report" / "trace-example.csv")
    found = {
        symbol: np.array(rows.pivot(index="token", columns="index", values=way))
        for symbol, rows in table.groupby("quantity")
    }
    weights = [[cell / sum(row) for cell in row] for row in RAISED[way]]
    # x1 = (1, 0, 1, 0), x2 = (0, 1, 0, 1) and x3 = (1, 1, 0, 0): who adds to which channel.
    outputs = [[a + c, b + c, a, b] for a, b, c in weights]
    for symbol, expected in {**dict.fromkeys("xqkv", X), "s": SCORES[way], "a": weights, "z": outputs}.items():
        np.testing.assert_allclose(found[symbol], expected, rtol=1e-14, err_msg=symbol)
    np.testing.assert_allclose(found["a"][0], PRINTED[way], atol=5e-4)
    assert set(found) == set("xqkvsaz")


def test_the_example_prints_every_row_in_a_hundred_columns(run: Run) -> None:
    lines = run("trace", "--example", "--figures", "none").stdout.splitlines()
    assert max(map(len, lines)) <= 100
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert len(cells) == 21
    assert ["s", "q . k_j (scaled: / 2)", "1", "2 0 1", "1 0 0.5"] in cells
    assert ["a", "softmax(s)", "1", "0.665 0.090 0.245", "0.506 0.186 0.307"] in cells


def classified(run: Run, tmp_path: Path, *options: str) -> pd.DataFrame:
    done = run("trace", "--example", "classify", *options, "-o", "report", "--figures", "none")
    assert done.exit_code == 0, done.output
    return pd.read_csv(tmp_path / "report" / "trace-classify.csv")


def test_the_classifier_by_hand(run: Run, tmp_path: Path) -> None:
    table = classified(run, tmp_path)
    added = [[0.5, 0, 0, 0.8], [0, -0.2, 0.1, 0]]
    np.testing.assert_allclose(table.filter(regex="^w"), added, atol=1e-15)
    np.testing.assert_allclose(table["logit"], [1.3, -0.1])
    probability = 1 / (1 + math.exp(-1.4))
    np.testing.assert_allclose(table["probability"], [probability, 1 - probability])
    np.testing.assert_allclose(table["cross_entropy"], [math.log1p(math.exp(-1.4)), math.log1p(math.exp(1.4))])


def test_the_classifier_with_weights_of_ones_own(run: Run, tmp_path: Path) -> None:
    table = classified(run, tmp_path, "--weights", "-1,2,0,0;0,0,10,1;1,1,1,1", "--bias", "0.5,-1,0")
    np.testing.assert_allclose(table.filter(regex="^w").iloc[0], [-0.5, -0.4, 0, 0])
    np.testing.assert_allclose(table["logit"], [-0.4, 0.8, 1.2])
    raised = [math.exp(-0.4), math.exp(0.8), math.exp(1.2)]
    np.testing.assert_allclose(table["probability"], [part / sum(raised) for part in raised])


def test_very_large_weights_leave_finite_numbers(run: Run, tmp_path: Path) -> None:
    table = classified(run, tmp_path, "--weights", "1e9,0,0,0;0,0,0,0")
    assert table["probability"].tolist() == [1.0, 0.0]
    assert table["cross_entropy"].tolist() == [0.0, 5e8]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("classify", "--weights", "1,2,3;1,2,3,4"), "has a row of 3 numbers"),
        (("classify", "--weights", "1,2,3,4"), "has one row"),
        (("classify", "--weights", "1,2,3,four;1,2,3,4"), "no number"),
        (("classify", "--weights", "1,2,3,nan;1,2,3,4"), "no number"),
        (("classify", "--weights", "1,2,3,1e300;1,2,3,4"), "too large"),
        (("classify", "--weights", ""), "no number"),
        (("classify", "--bias", "1"), "has 1 numbers Give 2"),
        (("attention", "--weights", "1,0,0,1;0,1,1,0"), "--weights belongs to --example classify"),
        (("attention", "--layer", "1"), "--layer was given, and --example"),
        (("classify", "--query", "cat"), "--query was given, and --example"),
        (("classify", "--full"), "--full was given, and --example"),
        (("regress",), "regress"),
    ],
)
def test_examples_refuse_what_they_do_not_read(options: tuple[str, ...], told: str, run: Run) -> None:
    assert_error(run("trace", "--example", *options), 2, told)


def test_an_example_reads_no_text(run: Run) -> None:
    assert_error(run("trace", "the cat", "--example"), 2, "a text was given")
