"""Two checkpoints side by side: NumPy, scipy, and a copy of which one head was changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import tiny
import transformers
from command import Run, assert_error, content, files_of
from safetensors.numpy import load_file, save_file
from scipy.linalg import subspace_angles
from scipy.spatial.distance import cosine, jensenshannon
from scipy.stats import ortho_group

from analyses.kit.change import attention_change
from analyses.kit.change_tables import _most, hidden_change
from analyses.kit.covariance import Covariance, linear_cka, principal_bases, shared_directions
from analyses.kit.divergence import divergence_of_rows
from analyses.kit.subspaces import orthonormal_bases
from analyses.kit.weight_change import product_change, product_cosine, relative_change
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.options import BATCH_TOKENS
from bertgeo_cli.recording import record

Tensors = dict[str, Any]
DK = 12
LAYER, HEAD = 1, 2
ROWS = slice(HEAD * DK, (HEAD + 1) * DK)
TEXTS = ("the cats sat on the mat .", "she ran to the old river .", "a dog", "we play by the bank , and it is old")


def changed(source: Path, target: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of a model's folder with other tensors."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def move_one_head(tensors: Tensors) -> None:
    rng = np.random.default_rng(5)
    for part in ("query", "key", "value"):
        weight = tensors[f"encoder.layer.{LAYER}.attention.self.{part}.weight"]
        weight[ROWS] += rng.normal(size=(DK, 48)).astype(np.float32) / 5
    tensors[f"encoder.layer.{LAYER}.attention.self.query.bias"][ROWS] += 1
    output = tensors[f"encoder.layer.{LAYER}.attention.output.dense.weight"]
    output[:, ROWS] += rng.normal(size=(48, DK)).astype(np.float32) / 5


@pytest.fixture(scope="module")
def moved(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with one head changed in all of its weights."""
    return changed(tiny_folder, tmp_path_factory.mktemp("moved") / "moved", move_one_head)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS) + "\n")
    return "corpus.txt"


def table(folder: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(folder / f"compare-{name}.csv")


@pytest.fixture
def compared(fast: Run, tiny_folder: Path, moved: Path, corpus: str, tmp_path: Path) -> Path:
    """The report of TINY against its copy with one head changed."""
    done = fast("compare", str(tiny_folder), str(moved), "--corpus", corpus, "-o", "out", "--principal", "5")
    assert done.exit_code == 0, done.output
    return tmp_path / "out"


# Formulas


def thin(rng: np.random.Generator, heads: int = 3) -> tuple[Any, Any]:
    left, right = rng.normal(size=(2, heads, 20, 4))
    return left, right


def test_changes_of_products_are_those_of_the_dense_matrices() -> None:
    rng = np.random.default_rng(0)
    first, second = thin(rng), thin(rng)
    for at in range(3):
        a, b = (left[at] @ right[at].T for left, right in (first, second))
        assert product_change(first, second)[at] == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-12)
        assert product_cosine(first, second)[at] == pytest.approx(1 - cosine(a.ravel(), b.ravel()), rel=1e-12)


def test_a_small_change_of_a_product_keeps_its_digits() -> None:
    left, right = thin(np.random.default_rng(1))
    shifted = (left, right * (1 + 1e-12))
    assert product_change((left, right), shifted) == pytest.approx(np.full(3, 1e-12), rel=1e-3)


def test_what_gives_the_same_product_has_not_changed_it() -> None:
    left, right = thin(np.random.default_rng(2))
    mixed = np.random.default_rng(3).normal(size=(4, 4))
    same = (left @ mixed, right @ np.linalg.inv(mixed).T)
    assert product_change((left, right), same).max() < 1e-12
    assert product_cosine((left, right), same).min() > 1 - 1e-12


def test_rotating_the_residual_space_changes_no_change() -> None:
    rng = np.random.default_rng(4)
    first, second = thin(rng), thin(rng)
    turn = ortho_group.rvs(20, random_state=0)
    turned = [tuple(turn @ factor for factor in pair) for pair in (first, second)]
    assert product_change(*turned) == pytest.approx(product_change(first, second), rel=1e-12)
    assert product_cosine(*turned) == pytest.approx(product_cosine(first, second), rel=1e-10)


def test_a_matrix_of_zeros_has_no_relative_change() -> None:
    zero, ones = np.zeros((1, 5, 2)), np.ones((1, 5, 2))
    assert np.isnan(relative_change(zero, ones)).all()
    assert np.isnan(product_change((zero, ones), (ones, ones))).all()
    assert np.isnan(product_cosine((zero, ones), (ones, ones))).all()


@pytest.mark.parametrize("tilt", [1.0, 0.1, 1e-4, 1e-9])
def test_shared_directions_are_those_of_scipy_down_to_small_angles(tilt: float) -> None:
    rng = np.random.default_rng(6)
    matrices = rng.normal(size=(4, 20, 5))
    tilted = matrices + tilt * rng.normal(size=(4, 20, 5))
    share, largest = shared_directions(*(orthonormal_bases(each)[0] for each in (matrices, tilted)))
    for at in range(4):
        angles = subspace_angles(matrices[at], tilted[at])
        assert share[at] == pytest.approx((np.cos(angles) ** 2).mean(), rel=1e-12)
        assert np.radians(largest[at]) == pytest.approx(angles.max(), rel=1e-5, abs=1e-14)


def test_subspaces_of_different_dimensions_are_compared_over_the_smaller() -> None:
    rng = np.random.default_rng(7)
    whole, thinner = rng.normal(size=(20, 5)), rng.normal(size=(20, 5))
    thinner[:, 3:] = thinner[:, :2]
    bases = [orthonormal_bases(each[None])[0] for each in (whole, thinner)]
    angles = subspace_angles(whole, thinner[:, :3])
    for pair in (bases, bases[::-1]):
        share, largest = shared_directions(*pair)
        assert share[0] == pytest.approx((np.cos(angles) ** 2).mean(), rel=1e-12)
        assert np.radians(largest[0]) == pytest.approx(angles.max(), rel=1e-12)


def test_jensen_shannon_of_rows_is_the_square_of_scipys_distance() -> None:
    rows, others = np.random.default_rng(8).dirichlet(np.full(7, 0.2), size=(2, 50))
    rows[0], others[0] = np.eye(7)[0], np.eye(7)[1]
    rows[1] = others[1]
    found = divergence_of_rows(rows[:, None], others[:, None])
    assert found == pytest.approx(jensenshannon(rows, others, axis=1) ** 2, abs=1e-14)
    assert found[0] == pytest.approx(np.log(2), rel=1e-15)
    assert found[1] == 0


def test_jensen_shannon_keeps_the_digits_of_small_differences() -> None:
    row, step = np.full(4, 0.25), 1e-9 * np.array([1.0, -1.0, 1.0, -1.0])
    expected = (step**2 / 0.25).sum() / 8  # the second order of JS
    assert divergence_of_rows(row[None], row[None] + step) == pytest.approx(expected, rel=1e-4)


def centred(values: Any) -> Any:
    return values - values.mean(axis=0)


def plain_cka(x: Any, y: Any) -> float:
    """Through the token x token Gram matrices, as Kornblith et al. write HSIC."""
    centring = np.eye(len(x)) - 1 / len(x)
    k, l = (centring @ v @ v.T @ centring for v in (x, y))  # noqa: E741
    return float((k * l).sum() / np.sqrt((k * k).sum() * (l * l).sum()))


def joint_of(*texts: Any) -> Any:
    """Centred products of (A, B) end to end, streamed text by text."""
    seen = Covariance.empty(1, texts[0].shape[-1])
    for text in texts:
        seen.add(text[None])
    return seen.products[0]


def test_streamed_cka_is_that_of_the_whole_array() -> None:
    rng = np.random.default_rng(9)
    x = rng.normal(size=(60, 6)) + 5
    y = x @ rng.normal(size=(6, 6)) + rng.normal(size=(60, 6))
    both = np.hstack([x, y])
    products = joint_of(both[:1], both[1:20], both[20:20], both[20:])
    assert hidden_change(products, 2)[0] == pytest.approx(plain_cka(x, y), rel=1e-12)


def test_cka_knows_no_rotation_shift_or_scale() -> None:
    rng = np.random.default_rng(10)
    x, y = rng.normal(size=(2, 40, 6))
    turned = 3 * y @ ortho_group.rvs(6, random_state=1) + 7
    before, after = (hidden_change(joint_of(np.hstack([x, other])), 2)[0] for other in (y, turned))
    assert after == pytest.approx(before, rel=1e-10)
    assert hidden_change(joint_of(np.hstack([x, 3 * x @ ortho_group.rvs(6, random_state=1)])), 2)[0] > 1 - 1e-12


def test_cka_of_constant_vectors_is_undefined() -> None:
    assert np.isnan(linear_cka(np.zeros((2, 2)), np.zeros((2, 2)), np.eye(2)))


def test_principal_subspaces_are_those_of_the_svd() -> None:
    rng = np.random.default_rng(11)
    x, y = rng.normal(size=(2, 50, 6)) * np.array([9.0, 5.0, 3.0, 1.0, 0.5, 0.1])
    _, share, largest = hidden_change(joint_of(np.hstack([x, y])), 3)
    angles = subspace_angles(*(np.linalg.svd(centred(v))[2][:3].T for v in (x, y)))
    assert share == pytest.approx((np.cos(angles) ** 2).mean(), rel=1e-9)
    assert np.radians(largest) == pytest.approx(angles.max(), rel=1e-9)


def test_there_is_no_principal_subspace_beyond_the_rank() -> None:
    x = np.random.default_rng(12).normal(size=(3, 6))  # centred: rank 2
    assert principal_bases((centred(x).T @ centred(x))[None], 2)[1].tolist() == [True]
    assert principal_bases((centred(x).T @ centred(x))[None], 3)[1].tolist() == [False]
    assert np.isnan(hidden_change(joint_of(np.hstack([x, x])), 3)[1:]).all()


def test_covariances_add_and_merge_like_the_whole_and_the_empty_one_is_the_identity() -> None:
    x = np.random.default_rng(13).normal(size=(2, 30, 4)) + 3
    parts = [Covariance.empty(2, 4) for _ in range(3)]
    for part, cut in zip(parts, (slice(0, 7), slice(7, 8), slice(8, 30)), strict=True):
        part.add(x[:, cut])
    merged = parts[0].merge(parts[1].merge(parts[2]))
    expected = np.stack([np.cov(own, rowvar=False) * 29 for own in x])
    assert merged.count == 30
    assert merged.products == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert merged.mean == pytest.approx(x.mean(axis=1), rel=1e-12)
    empty = Covariance.empty(2, 4)
    for same in (parts[0].merge(empty), empty.merge(parts[0])):
        assert same.count == 7
        assert same.mean.tobytes() == parts[0].mean.tobytes()
        assert same.products.tobytes() == parts[0].products.tobytes()
        assert not np.shares_memory(same.mean, parts[0].mean)


# A copy with one head changed


def test_only_the_changed_head_moves_in_the_weights(compared: Path) -> None:
    weights = table(compared, "weights")
    ours = (weights["layer"] == LAYER) & (weights["head"] == HEAD)
    changes = [name for name in weights if name.endswith("_change")]
    assert len(changes) == 7
    assert len(weights) == 8
    assert (weights.loc[ours, changes] > 0.01).all(axis=None)
    assert (weights.loc[~ours, changes] == 0).all(axis=None)
    cosines = [name for name in weights if name.endswith("_cosine")]
    assert (weights.loc[~ours, cosines] == 1).all(axis=None)
    assert (weights.loc[ours, cosines] < 0.999).all(axis=None)
    subspaces = table(compared, "subspaces")
    there = (subspaces["layer"] == LAYER) & (subspaces["head"] == HEAD)
    assert (subspaces.loc[there, "largest_angle"] > 1).all()
    assert (subspaces.loc[~there, "largest_angle"] < 1e-12).all()
    assert subspaces.loc[~there, "kernel_share"].to_numpy() == pytest.approx(np.ones(28), abs=1e-12)
    assert (subspaces[["dimension_a", "dimension_b"]] == DK).all(axis=None)


def test_weights_of_the_changed_head_by_hand(compared: Path, tiny_folder: Path, moved: Path) -> None:
    forms = []
    for folder in (tiny_folder, moved):
        tensors = {name: each.astype(np.float64) for name, each in load_file(folder / "model.safetensors").items()}
        prefix = f"encoder.layer.{LAYER}.attention"
        w = {part: tensors[f"{prefix}.self.{part}.weight"][ROWS] for part in ("query", "key", "value")}
        b = {part: tensors[f"{prefix}.self.{part}.bias"][ROWS] for part in ("query", "key")}
        w["output"] = tensors[f"{prefix}.output.dense.weight"][:, ROWS]
        with_bias = {part: np.hstack([w[part], b[part][:, None]]) for part in b}
        products = {
            "bilinear": w["query"].T @ w["key"],
            "homogeneous": with_bias["query"].T @ with_bias["key"],
            "ov": w["value"].T @ w["output"].T,
        }
        forms.append(w | products)
    weights = table(compared, "weights").set_index(["layer", "head"]).loc[(LAYER, HEAD)]
    for name, a in forms[0].items():
        b = forms[1][name]
        assert weights[f"{name}_change"] == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-9)
        if f"{name}_cosine" in weights:
            assert weights[f"{name}_cosine"] == pytest.approx(1 - cosine(a.ravel(), b.ravel()), rel=1e-9)
    subspaces = table(compared, "subspaces").set_index(["layer", "head", "subspace"]).loc[(LAYER, HEAD)]
    for letter, part in zip("QKVO", ("query", "key", "value", "output"), strict=True):
        spans = [form[part] if letter == "O" else form[part].T for form in forms]
        angles = subspace_angles(*spans)
        assert subspaces.loc[letter, "kernel_share"] == pytest.approx((np.cos(angles) ** 2).mean(), rel=1e-9)
        assert subspaces.loc[letter, "largest_angle"] == pytest.approx(np.degrees(angles.max()), rel=1e-6)


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Attention (layer, head, query, key) and hidden states (depth, token, width) of every text, alone in its batch."""
    loaded = load_model(str(folder), device="cpu", offline=True)
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
    passes = [record(loaded, [encoder.encode(text)], needs=frozenset({"attention", "hidden_states"})) for text in TEXTS]
    return [
        {name: getattr(each, name)[0].double().numpy() for name in ("attention", "hidden_states")} for each in passes
    ]


def test_attention_and_hidden_states_by_plain_loops(compared: Path, tiny_folder: Path, moved: Path) -> None:
    first, second = recorded(tiny_folder), recorded(moved)
    attention = table(compared, "attention").set_index(["layer", "head"])
    for layer, head in attention.index:
        of_texts = []
        for a, b in zip(first, second, strict=True):
            rows = list(zip(a["attention"][layer, head], b["attention"][layer, head], strict=True))
            alike = [1 - cosine(p, q) for p, q in rows]
            apart = [jensenshannon(p, q) ** 2 for p, q in rows]
            of_texts.append((np.mean(alike), np.mean(apart)))
        means, deviations = np.mean(of_texts, axis=0), np.std(of_texts, axis=0, ddof=1)
        row = attention.loc[(layer, head)]
        assert row[["attention_cosine", "jensen_shannon"]].to_numpy() == pytest.approx(means, abs=1e-12)
        assert row[["attention_cosine_std", "jensen_shannon_std"]].to_numpy() == pytest.approx(deviations, abs=1e-12)
    hidden = table(compared, "hidden").set_index("depth")
    assert hidden.index.tolist() == [0, 1, 2]
    assert (hidden["tokens"] == sum(len(each["hidden_states"][0]) for each in first)).all()
    for depth in hidden.index:
        x, y = (np.concatenate([each["hidden_states"][depth] for each in side]) for side in (first, second))
        of_texts = [
            np.mean(
                [1 - cosine(p, q) for p, q in zip(a["hidden_states"][depth], b["hidden_states"][depth], strict=True)]
            )
            for a, b in zip(first, second, strict=True)
        ]
        angles = subspace_angles(*(np.linalg.svd(centred(v))[2][:5].T for v in (x, y)))
        row = hidden.loc[depth]
        assert row["linear_cka"] == pytest.approx(plain_cka(x, y), abs=1e-10)
        assert row["token_cosine"] == pytest.approx(np.mean(of_texts), abs=1e-12)
        assert row["principal_share"] == pytest.approx((np.cos(angles) ** 2).mean(), abs=1e-9)
        assert np.radians(row["principal_angle"]) == pytest.approx(angles.max(), abs=1e-7)


def test_what_comes_before_the_changed_head_has_not_moved_and_what_comes_after_has(compared: Path) -> None:
    attention = table(compared, "attention").set_index(["layer", "head"])["jensen_shannon"]
    assert attention[LAYER, HEAD] > 1e-3
    assert (attention.drop((LAYER, HEAD)) == 0).all()
    hidden = table(compared, "hidden").set_index("depth")
    assert hidden.loc[[0, 1], "token_cosine"].tolist() == [1, 1]
    assert hidden.loc[[0, 1], "linear_cka"].to_numpy() == pytest.approx([1, 1], abs=1e-12)
    assert hidden.loc[2, "token_cosine"] < 0.999
    assert hidden.loc[2, "linear_cka"] < 0.999


def test_the_table_by_layer_holds_the_means_of_the_others(compared: Path) -> None:
    layers, hidden = table(compared, "layers"), table(compared, "hidden")
    weights = table(compared, "weights").groupby("layer").mean()
    assert layers["homogeneous_change"].to_numpy() == pytest.approx(weights["homogeneous_change"].to_numpy())
    attention = table(compared, "attention").groupby("layer").mean()
    assert layers["jensen_shannon"].to_numpy() == pytest.approx(attention["jensen_shannon"].to_numpy())
    assert layers["linear_cka"].tolist() == hidden["linear_cka"].tolist()[1:]


def test_a_model_against_itself_has_not_changed(fast: Run, tiny_folder: Path, corpus: str, tmp_path: Path) -> None:
    done = fast("compare", str(tiny_folder), str(tiny_folder), "--corpus", corpus, "-o", "out", "--figures", "png")
    assert done.exit_code == 0, done.output
    weights, attention, hidden = (table(tmp_path / "out", name) for name in ("weights", "attention", "hidden"))
    assert (weights[[name for name in weights if name.endswith("_change")]] == 0).all(axis=None)
    assert (weights[[name for name in weights if name.endswith("_cosine")]] == 1).all(axis=None)
    assert (attention["attention_cosine"] == 1).all()
    assert (attention["jensen_shannon"] == 0).all()
    assert (hidden["token_cosine"] == 1).all()
    assert hidden[["linear_cka", "principal_share"]].to_numpy() == pytest.approx(np.ones((3, 2)), abs=1e-12)
    assert (hidden["principal_angle"] < 1e-5).all()
    figures = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert figures == [f"compare-{name}.png" for name in ("attention", "hidden", "subspaces", "weights")]
    notes = content(tmp_path / "out")["notes"]
    assert {"M~ is the same in A and B.", "Attention is the same in A and B."} <= set(notes)


def test_the_most_changed_head_is_named_only_where_one_changed() -> None:
    assert _most("M~", np.array([[0.0, 0.5], [np.nan, 0.25]]), (0, 3), (1, 2), "x") == "M~ changed most in L0H2: 0.5 x."
    assert _most("M~", np.full((1, 2), np.nan), (0,), (0, 1), "x") == (
        "M~ is zero in A, so that there is no relative change."
    )


# The command


def test_one_text_and_weights_alone(fast: Run, tiny_folder: Path, moved: Path, tmp_path: Path) -> None:
    done = fast("compare", str(tiny_folder), str(moved), TEXTS[0], "-o", "text", "--layers", "1", "--heads", "2,3")
    assert done.exit_code == 0, done.output
    assert table(tmp_path / "text", "hidden")["depth"].tolist() == [1, 2]
    assert table(tmp_path / "text", "attention")[["layer", "head"]].to_numpy().tolist() == [[1, 2], [1, 3]]
    done = fast("compare", str(tiny_folder), str(moved), "--weights-only", "-o", "weights")
    assert done.exit_code == 0, done.output
    names = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert names == ["compare-layers.csv", "compare-subspaces.csv", "compare-weights.csv", "run.json"]
    assert content(tmp_path / "weights")["input"] == {"kind": "weights"}


def test_run_json_names_both_models_and_every_column(compared: Path, tiny_model: LoadedModel) -> None:
    said = content(compared)
    assert said["model"] == dict(tiny_model.identity)
    assert said["other_model"]["name"] == "moved"
    assert said["other_model"]["weights_sha256"] != said["model"]["weights_sha256"]
    assert said["other_model"]["tokenizer_sha256"] == said["model"]["tokenizer_sha256"]
    assert said["settings"] == {"layers": "all", "heads": "all", "principal": 5}
    assert said["input"]["lines"] == 4
    assert sorted(said["files"]) == sorted(path.name for path in compared.iterdir() if path.name != "run.json")
    for name, about in said["tables"].items():
        assert list(about["columns"]) == list(pd.read_csv(compared / f"{name}.csv"))


def test_runs_repeat_byte_for_byte_whatever_the_batches(
    fast: Run, tiny_folder: Path, moved: Path, corpus: str, compared: Path, tmp_path: Path
) -> None:
    given = ("compare", str(tiny_folder), str(moved), "--corpus", corpus, "--principal", "5")
    for name, batch in (("again", str(BATCH_TOKENS)), ("small", "1")):
        assert fast(*given, "-o", name, "--batch-tokens", batch).exit_code == 0
    assert files_of(tmp_path / "again") == files_of(compared)
    tables = {name: data for name, data in files_of(compared).items() if name.endswith(".csv")}
    assert len(tables) == 6
    assert {name: files_of(tmp_path / "small")[name] for name in tables} == tables


def test_json_is_one_document_and_a_dry_run_writes_nothing(
    fast: Run, tiny_folder: Path, moved: Path, corpus: str, tmp_path: Path
) -> None:
    given = ("compare", str(tiny_folder), str(moved), "--corpus", corpus)
    done = fast(*given, "--dry-run", "--json")
    assert json.loads(done.stdout)["texts"] == 4
    assert not (tmp_path / "bertgeo-report").exists()
    shown = json.loads(fast(*given, "--json").stdout)
    assert [row["layer"] for row in shown["headline"]] == [0, 1]
    assert all(Path(file).is_file() for file in shown["files"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 3}, "layers 2 and 3"),
        ({"num_attention_heads": 2}, "heads 4 and 2"),
        ({"intermediate_size": 64}, "MLP width 96 and 64"),
        ({"type_vocab_size": 1}, "segment ids"),
    ],
)
def test_other_architectures_are_refused(
    fast: Run, tiny_folder: Path, tmp_path: Path, changes: dict[str, int], named: str
) -> None:
    other = tiny.tiny_bert(tmp_path / "other", **changes)
    assert_error(fast("compare", str(tiny_folder), str(other), "the cat"), 2, named, "architecture")


def test_another_family_is_refused(fast: Run, tiny_folder: Path, tmp_path: Path) -> None:
    other = tiny.tiny_family("electra", tmp_path / "other")
    assert_error(fast("compare", str(tiny_folder), str(other), "the cat"), 2, "family bert and electra")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("the cat", "--weights-only"), "a text was given"),
        (("--corpus", "corpus.txt", "--weights-only"), "--corpus was given"),
        (("the cat", "--corpus", "corpus.txt"), "both a text and --corpus"),
        (("--corpus", "corpus.tsv", "--group-column", "g"), "group"),
        (("the cat", "--principal", "49"), "width 48"),
        (("the cat", "--layers", "2"), "layer 2"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    fast: Run, tiny_folder: Path, corpus: str, given: tuple[str, ...], named: str
) -> None:
    assert_error(fast("compare", str(tiny_folder), str(tiny_folder), *given), 2, named)


def renumbered(source: Path, target: Path) -> Path:
    """The same weights with a vocabulary in which two words have changed places."""
    changed(source, target, lambda tensors: None)
    file = target / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["cat"], vocabulary["dog"] = vocabulary["dog"], vocabulary["cat"]
    file.write_text(json.dumps(content))
    return target


def test_texts_that_the_other_tokenizer_reads_otherwise_are_refused(
    fast: Run, tiny_folder: Path, tmp_path: Path
) -> None:
    other = renumbered(tiny_folder, tmp_path / "other")
    (tmp_path / "corpus.txt").write_text("the mat\nthe cat sat\n")
    done = fast("compare", str(tiny_folder), str(other), "--corpus", "corpus.txt")
    assert_error(done, 2, "line 2", "'cat'", "B's tokenizer")
    assert not (tmp_path / "bertgeo-report").exists()
    done = fast("compare", str(tiny_folder), str(other), "the mat")
    assert done.exit_code == 0, done.output
    assert "both gave the same ids" in done.stderr


def test_shared_layers_stand_once_in_the_weights(fast: Run, tmp_path: Path) -> None:
    folders = [str(tiny.tiny_family("albert", tmp_path / f"albert-{seed}", seed=seed)) for seed in (0, 1)]
    done = fast("compare", *folders, "the cat sat", "-o", "out")
    assert done.exit_code == 0, done.output
    assert len(table(tmp_path / "out", "weights")) == 4
    assert len(table(tmp_path / "out", "attention")) == 4 * 4
    assert table(tmp_path / "out", "layers")["homogeneous_change"].nunique() == 1


def test_a_line_that_is_cut_is_counted(fast: Run, tiny_folder: Path, moved: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("the cat " * 60 + "\nthe cat\n")
    given = ("compare", str(tiny_folder), str(moved), "--corpus", "corpus.txt", "--strict")
    done = fast(*given)
    assert done.exit_code == 3, done.output
    assert pd.read_csv(tmp_path / "bertgeo-report/compare/lines.csv")["status"].tolist() == ["truncated", "ok"]


def test_ctrl_c_leaves_nothing(
    fast: Run, tiny_folder: Path, moved: Path, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bertgeo_cli.compare.record_batch", stop)
    done = fast("compare", str(tiny_folder), str(moved), "--corpus", corpus)
    assert done.exit_code == 130
    assert not (tmp_path / "bertgeo-report").exists()


def test_the_real_model_against_a_copy_without_biases(fast: Run, tmp_path: Path) -> None:
    def drop_biases(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if name.endswith("self.query.bias"):
                tensor[:] = 0

    other = changed(reference.folder(), tmp_path / "unbiased", drop_biases)
    done = fast("compare", "minilm", str(other), "The river bank.", "-o", "out")
    assert done.exit_code == 0, done.output
    weights, attention = table(tmp_path / "out", "weights"), table(tmp_path / "out", "attention")
    assert (weights["bilinear_change"] == 0).all()
    assert (weights["homogeneous_change"] > 0).all()
    assert attention["jensen_shannon"].max() > 1e-3


def test_attention_change_averages_over_rows() -> None:
    rows = np.array([[[[1.0, 0.0], [0.5, 0.5]]]])
    assert attention_change(rows, rows[..., ::-1])[0, 0].tolist() == pytest.approx([0.5, np.log(2) / 2])


def test_models_of_transformers_with_a_head_are_compared_by_their_encoders(
    fast: Run, tiny_folder: Path, tmp_path: Path
) -> None:
    encoder = transformers.BertModel.from_pretrained(tiny_folder)
    classifier = transformers.BertForSequenceClassification(encoder.config)
    classifier.bert.load_state_dict(encoder.state_dict(), strict=False)
    classifier.save_pretrained(tmp_path / "classifier")
    tiny.wordpiece_tokenizer().save_pretrained(tmp_path / "classifier")
    done = fast("compare", str(tiny_folder), "./classifier", "the cat", "-o", "out")
    assert done.exit_code == 0, done.output
    assert (table(tmp_path / "out", "attention")["jensen_shannon"] == 0).all()
