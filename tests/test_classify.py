"""`bertgeo classify`: contributions that add up, and the labels of transformers' own class."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
import transformers
from command import Run, assert_error
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import load_file

from analyses.kit.contributions import Decomposition, difference, on_channels
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import load_model
from bertgeo_cli.task_heads import CLASSIFICATION

TEXT = "The old cat sat by the river."
NUMBERS = st.floats(-10, 10)


def table(folder: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(folder / f"{name}.csv")


def ok(run: Run, *arguments: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 0, done.output


@pytest.fixture
def classify(fast: Run, classifier_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line with a classifier."""
    monkeypatch.setenv("BERTGEO_MODEL", str(classifier_folder))
    return fast


def by_transformers(folder: Path, model_class: str, text: str, pair: str | None = None) -> np.ndarray:
    """The logits of the class of transformers."""
    loaded = load_model(str(folder))
    read = Encoder(loaded.tokenizer, loaded.max_tokens).encode(text, pair)
    whole = getattr(transformers, model_class).from_pretrained(folder, attn_implementation="eager").eval()
    segments = {"token_type_ids": torch.tensor([read.segment])} if loaded.segments else {}
    with torch.no_grad():
        return whole(torch.tensor([read.ids]), **segments).logits[0].double().numpy()


# Formulas


@given(arrays(np.float64, (3, 6), elements=NUMBERS), arrays(np.float64, 3, elements=NUMBERS), st.integers(1, 8))
def test_contributions_add_up_to_the_logit(weight: np.ndarray, bias: np.ndarray, count: int) -> None:
    features = np.array([1.0, -2.0, 0.5, 3.0, 0.0, -1.5])
    parts = Decomposition.of(weight, bias, features, count)
    np.testing.assert_allclose(parts.logits, weight @ features + bias, atol=1e-12)
    np.testing.assert_allclose(parts.contributions.sum(axis=1) + parts.remainder + parts.bias, parts.logits, atol=1e-12)
    np.testing.assert_array_equal(parts.weights * parts.features, parts.contributions)
    assert parts.channels.shape == (3, min(count, 6))
    for label, channels in enumerate(parts.channels):
        every = np.abs(weight[label] * features)
        assert np.abs(parts.contributions[label]).tolist() == sorted(every, reverse=True)[:count]
        others = [channel for channel in range(6) if channel not in channels]
        assert parts.remainder[label] == pytest.approx((weight[label] * features)[others].sum(), abs=1e-12)
    apart = difference(weight, bias, features, 2, 0, count)
    assert apart.logits[0] == pytest.approx(parts.logits[2] - parts.logits[0], abs=1e-10)
    np.testing.assert_allclose(on_channels(weight, features, [4, 1]).sum(axis=1), weight @ features, atol=1e-12)


def test_a_logit_by_hand() -> None:
    parts = Decomposition.of(np.array([[2.0, -3.0, 1.0]]), np.array([0.25]), np.array([1.0, 2.0, 0.5]), 1)
    assert parts.channels.tolist() == [[1]]
    assert parts.contributions.tolist() == [[-6.0]]
    assert parts.remainder.tolist() == [2.5]
    assert parts.logits.tolist() == [-3.25]


# The command


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_labels_are_those_of_the_class_of_transformers(family: str, fast: Run, tmp_path: Path) -> None:
    name = CLASSIFICATION.names[family].model_class
    folder = tiny.tiny_head(name, family, tmp_path / "model", num_labels=3)
    ok(fast, "classify", TEXT, "--pair", "it was wet", "--model", str(folder), "-o", "report")
    expected = by_transformers(folder, name, TEXT, "it was wet")
    labels = table(tmp_path / "report", "classify")
    np.testing.assert_allclose(labels["logit"], expected, atol=2e-5)
    np.testing.assert_allclose(labels["probability"], np.exp(expected) / np.exp(expected).sum(), atol=1e-5)
    stages = table(tmp_path / "report", "classify-stages")
    activation = {"electra": "gelu", "distilbert": "relu"}.get(family, "tanh")
    assert stages["formula"].tolist()[1:] == ["a = W h + b", f"g = {activation}(a)", "z = W g + b"]
    assert stages["module"].tolist()[1] == CLASSIFICATION.names[family].dense


def test_every_table_adds_up(classify: Run, tmp_path: Path) -> None:
    ok(classify, "classify", TEXT, "--top", "4", "-o", "report")
    labels = table(tmp_path / "report", "classify")
    parts = table(tmp_path / "report", "classify-contributions")
    sums = parts.groupby("label")["contribution"].sum()
    np.testing.assert_allclose(sums, labels["logit"], atol=1e-12)
    np.testing.assert_allclose(labels["from_features"] + labels["bias"], labels["logit"], atol=1e-12)
    assert parts.groupby("label")["part"].apply(list).tolist() == [["channel"] * 4 + ["remainder", "bias"]] * 3
    named = parts[parts["part"] == "channel"]
    np.testing.assert_allclose(named["weight"] * named["feature"], named["contribution"], atol=1e-12)
    apart = table(tmp_path / "report", "classify-difference")
    first, second = labels.sort_values("logit", ascending=False)[["name", "logit"]].to_numpy()[:2]
    assert apart["contribution"].sum() == pytest.approx(first[1] - second[1], abs=1e-12)
    assert (set(apart["first"]), set(apart["second"])) == ({first[0]}, {second[0]})
    assert labels["name"].tolist() == ["negative", "neutral", "positive"]


def test_stages_follow_from_the_checkpoint(classify: Run, classifier_folder: Path, tmp_path: Path) -> None:
    ok(classify, "classify", TEXT, "-o", "report")
    weights = {
        name: tensor.astype(np.float64) for name, tensor in load_file(classifier_folder / "model.safetensors").items()
    }
    vectors = table(tmp_path / "report", "classify-channels")
    dense = weights["bert.pooler.dense.weight"] @ vectors["h"] + weights["bert.pooler.dense.bias"]
    np.testing.assert_allclose(vectors["a"], dense, atol=1e-5)
    np.testing.assert_allclose(vectors["g"], np.tanh(dense), atol=1e-5)
    logits = weights["classifier.weight"] @ vectors["g"] + weights["classifier.bias"]
    np.testing.assert_allclose(table(tmp_path / "report", "classify")["logit"], logits, atol=1e-12)


def test_several_labels_at_once_have_a_sigmoid_each(fast: Run, tmp_path: Path) -> None:
    name = "BertForSequenceClassification"
    changes = {"num_labels": 4, "problem_type": "multi_label_classification"}
    folder = tiny.tiny_head(name, "bert", tmp_path / "model", **changes)
    ok(fast, "classify", TEXT, "--model", str(folder), "-o", "report")
    labels = table(tmp_path / "report", "classify")
    expected = [1 / (1 + math.exp(-logit)) for logit in by_transformers(folder, name, TEXT)]
    np.testing.assert_allclose(labels["probability"], expected, atol=1e-5)
    assert labels["name"].tolist() == ["LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3"]
    assert not (tmp_path / "report" / "classify-difference.csv").exists()


@pytest.mark.parametrize("changes", [{"num_labels": 1}, {"num_labels": 2, "problem_type": "regression"}])
def test_a_regression_has_values_and_no_probabilities(changes: dict[str, object], fast: Run, tmp_path: Path) -> None:
    folder = tiny.tiny_head("BertForSequenceClassification", "bert", tmp_path / "model", **changes)
    ok(fast, "classify", TEXT, "--model", str(folder), "-o", "report")
    labels = table(tmp_path / "report", "classify")
    assert "probability" not in labels
    expected = by_transformers(folder, "BertForSequenceClassification", TEXT)
    np.testing.assert_allclose(labels["logit"], expected, atol=1e-5)
    assert "regression" in json.loads((tmp_path / "report" / "run.json").read_text())["tables"]["classify"]["title"]


def test_the_figure_is_drawn(classify: Run, tmp_path: Path) -> None:
    ok(classify, "classify", TEXT, "--figures", "png", "-o", "report")
    assert (tmp_path / "report" / "classify-contributions.png").exists()


def test_a_corpus_is_not_read(classify: Run) -> None:
    assert_error(classify("classify", ""), 2, "is empty")
    assert classify("classify", "--corpus", "corpus.txt").exit_code == 2
