"""One word in many contexts: found in every family, pulled as plain loops say, separated as scikit-learn says."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny
from command import Run, assert_error, content
from sklearn.metrics import silhouette_score

from analyses.kit.mixing import layer_weights
from analyses.kit.occurrences import Occurrence, Occurrences, Word
from analyses.kit.pull import pulls, word_contributions
from analyses.kit.record import TokenizedText
from analyses.kit.senses import (
    Directions,
    cosine_distance,
    divisions,
    mean_silhouettes,
    nearest_by_chance,
    nearest_sense,
    pair_cosines,
    permutation_p,
    plane,
    self_similarity,
    silhouettes,
    two_clusters,
)
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.recording import record
from bertgeo_cli.samples import SAMPLE_BANKS, sample_senses

CASED = ("roberta", "xlm-roberta", "camembert")
"""Families whose tiny tokenizer keeps capitals apart."""
RANDOM = np.random.default_rng(3)


def encoder(loaded: LoadedModel) -> Encoder:
    return Encoder(loaded.tokenizer, loaded.max_tokens)


def word(loaded: LoadedModel, name: str) -> Word:
    own = encoder(loaded)
    return Word.of(own.encode(name), own.normalised)


def written(text: TokenizedText, place: tuple[int, ...]) -> str:
    first, last = text.start[place[0]], text.end[place[-1]]
    return text.text[first:last].strip()


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny.tiny_family(request.param, tmp_path_factory.mktemp("models") / request.param)
    return load_model(str(folder), device="cpu", offline=True)


# ------------------------------------------------------------------------------------------------------- finding words


def test_a_word_is_found_beside_punctuation_and_never_inside_another(family: LoadedModel) -> None:
    text = encoder(family).encode("bank: the banks, river bank; (bank) embankment bank.")
    places = word(family, "bank").places(text)
    assert [written(text, place) for place in places] == ["bank"] * 4
    assert [text.start[place[0]] for place in places] == sorted(text.start[place[0]] for place in places)


def test_case_is_as_the_tokenizer_sees_it(family: LoadedModel) -> None:
    text = encoder(family).encode("Bank and bank")
    cased = family.shape.family in CASED
    assert len(word(family, "bank").places(text)) == (1 if cased else 2)
    assert len(word(family, "BANK").places(text)) == (0 if cased else 2)


def test_all_pieces_of_a_word_and_all_words_of_a_phrase_belong_to_it(family: LoadedModel) -> None:
    text = encoder(family).encode("we play by the old river bank, playing on")
    for name in ("playing", "river bank", "bank, playing"):
        (place,) = word(family, name).places(text)
        assert written(text, place) == name
    inside = [at for at in range(len(text)) if (text.end[at] or 0) > 31 and (text.start[at] or 0) < 38]
    assert set(word(family, "playing").places(text)[0]) <= set(inside)


def test_a_word_of_the_second_text_is_found_too(tiny_model: LoadedModel) -> None:
    text = encoder(tiny_model).encode("the bank", "a river bank")
    places = word(tiny_model, "bank").places(text)
    assert [text.segment[place[0]] for place in places] == [0, 1]


def test_nothing_is_no_word(tiny_model: LoadedModel) -> None:
    with pytest.raises(ValueError, match="holds no word"):
        word(tiny_model, " ")


# ------------------------------------------------------------------------------------------------------- contributions


def test_contributions_are_those_of_plain_loops_and_add_up(family: LoadedModel) -> None:
    text = encoder(family).encode("she was playing by the river")
    (place,) = word(family, "playing").places(text)
    needs = frozenset({"hidden_states", "attention", "v", "attention_projection"})
    found = record(family, [text], needs=needs)
    shape, weights = family.shape, layer_weights(family.head_weights(), family.shape, range(family.shape.layers))
    for layer, block in enumerate(family.family.blocks(family.model)):
        value: Any = block.get_submodule(family.family.value)
        output: Any = block.get_submodule(family.family.attention_output)
        x, attention = (found.layer(name, layer)[0].double() for name in ("hidden_states", "attention"))
        parts = np.zeros((len(text), shape.width))
        for token, head, at in itertools.product(range(len(text)), range(shape.heads), place):
            rows = slice(head * shape.head_width, (head + 1) * shape.head_width)
            inner = value.weight[rows].double() @ x[token] + value.bias[rows].double()
            mapped = output.weight[:, rows].double() @ inner
            parts[token] += (attention[head, at, token] / len(place) * mapped).numpy()
        own = word_contributions(found, 0, place, layer, weights[layer])
        np.testing.assert_allclose(own, parts, atol=1e-4, rtol=1e-5)
        update = found.layer("attention_projection", layer)[0, list(place)].double().mean(dim=0).numpy()
        np.testing.assert_allclose(own.sum(axis=0) + output.bias.double().numpy(), update, atol=1e-4, rtol=1e-5)
        norms, shares, rest = pulls(own, output.bias.double().numpy())
        np.testing.assert_allclose(norms, [np.linalg.norm(part) for part in parts], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(shares, parts @ update / (update @ update), rtol=1e-3, atol=1e-4)
        assert shares.sum() + rest == pytest.approx(1.0)


def test_an_update_of_zero_has_no_direction() -> None:
    _, shares, rest = pulls(np.array([[1.0, 0.0], [-1.0, 0.0]]), np.zeros(2))
    assert np.isnan([*shares, rest]).all()


# -------------------------------------------------------------------------------------------------------------- senses

VECTORS = RANDOM.normal(size=(3, 9, 5)) + np.repeat(RANDOM.normal(size=(3, 3, 5)), 3, axis=1)


@pytest.mark.parametrize("senses", [[0] * 4 + [1] * 5, [0, 1, 2] * 3, [0] * 8 + [1], [0, 0, 1, 2, 3, 4, 5, 6, 7]])
def test_silhouettes_are_scikit_learns_of_the_raw_vectors(senses: list[int]) -> None:
    labels = np.array(senses)
    expected = [silhouette_score(own, labels, metric="cosine") for own in VECTORS]
    distances = cosine_distance(VECTORS)
    np.testing.assert_allclose(silhouettes(distances, labels).mean(axis=1), expected, atol=1e-12)
    np.testing.assert_allclose(mean_silhouettes(distances, labels), expected, atol=1e-12)


def test_a_silhouette_by_hand() -> None:
    # On a line at 0, 1 | 4: a = 1, b = 4 and a = 1, b = 3; the lone item has 0 by definition.
    places = np.array([0.0, 1.0, 4.0])
    distances = np.abs(places[:, None] - places)[None]
    np.testing.assert_allclose(silhouettes(distances, np.array([0, 0, 1]))[0], [3 / 4, 2 / 3, 0])
    for senses in ([0, 0, 0], [0, 1, 2]):
        assert np.isnan(silhouettes(distances, np.array(senses))).all()


def test_p_is_the_share_of_all_deals_that_separate_as_well() -> None:
    vectors, senses = VECTORS[:, :6], np.array([0, 0, 1, 1, 1, 0])
    own = np.array([silhouette_score(part, senses, metric="cosine") for part in vectors])
    deals = [senses[list(order)] for order in itertools.permutations(range(6))]
    every = np.array([[silhouette_score(part, deal, metric="cosine") for part in vectors] for deal in deals[::6]])
    exact = (every >= own - 1e-9).mean(axis=0)
    best = (every[:, 1:].max(axis=1) >= own[1:].max() - 1e-9).mean()
    p, of_best = permutation_p(cosine_distance(vectors), senses, np.arange(6), 4000, 0)
    np.testing.assert_allclose(p, exact, atol=0.06)
    assert of_best == pytest.approx(best, abs=0.06)
    assert (permutation_p(cosine_distance(vectors), senses, np.arange(6), 0, 0)[0] == 1).all()


def test_senses_are_dealt_to_texts_not_to_occurrences() -> None:
    apart = np.concatenate([RANDOM.normal(size=(10, 4)) + 9, RANDOM.normal(size=(10, 4)) - 9])
    distances, senses = cosine_distance(np.stack([apart, apart])), np.repeat([0, 1], 10)
    assert permutation_p(distances, senses, np.repeat([0, 1], 10), 50, 0)[1] == 1  # two texts: one way to deal
    assert permutation_p(distances, senses, np.arange(20), 50, 0)[1] == pytest.approx(1 / 51)


def test_divisions_are_those_that_can_be_listed() -> None:
    for senses in (["a", "a", "b", "b"], ["a", "b", "b", "b"], ["a", "a", "b", "b", "c"], ["a", "b", "c"]):
        parts = {
            frozenset(frozenset(at for at, name in enumerate(deal) if name == sense) for sense in set(senses))
            for deal in itertools.permutations(senses)
        }
        assert divisions(senses) == len(parts)


def test_neighbours_and_pairs_are_those_of_loops_over_other_texts() -> None:
    senses, text_of = np.array([0, 0, 1, 1, 1, 0, 2, 2, 0]), np.array([0, 0, 1, 1, 2, 3, 4, 5, 6])
    distances = cosine_distance(VECTORS)
    right, same, other = np.zeros((3, 9)), [[] for _ in VECTORS], [[] for _ in VECTORS]  # type: ignore[var-annotated]
    chance = []
    for one in range(9):
        others = [at for at in range(9) if text_of[at] != text_of[one]]
        chance.append(np.mean([senses[at] == senses[one] for at in others]))
        for depth, own in enumerate(VECTORS):
            cosines = [own[one] @ own[at] / np.linalg.norm(own[one]) / np.linalg.norm(own[at]) for at in others]
            right[depth, one] = senses[others[int(np.argmax(cosines))]] == senses[one]
            for at, cosine in zip(others, cosines, strict=True):
                (same if senses[at] == senses[one] else other)[depth].append(cosine)
    np.testing.assert_allclose(nearest_sense(distances, senses, text_of), right.mean(axis=1))
    assert nearest_by_chance(senses, text_of) == pytest.approx(np.mean(chance))
    found = pair_cosines(distances, senses, text_of)
    np.testing.assert_allclose(found[0], [np.mean(values) for values in same])
    np.testing.assert_allclose(found[1], [np.mean(values) for values in other])
    every = [np.mean(one + two) for one, two in zip(same, other, strict=True)]
    np.testing.assert_allclose(self_similarity(VECTORS, text_of), every)


def test_a_neighbour_in_the_same_text_does_not_count() -> None:
    vectors = np.array([[[1.0, 0.0], [1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]])
    senses, text_of = np.array([0, 0, 1, 0]), np.array([0, 0, 1, 2])
    assert nearest_sense(cosine_distance(vectors), senses, text_of).tolist() == [0.0]


def test_depth_0_is_not_among_those_to_choose_from() -> None:
    senses, texts = np.array([0, 1] * 4), np.arange(8)
    others = RANDOM.normal(size=(2, 8, 5))
    found = [
        permutation_p(cosine_distance(np.concatenate([first[None], others])), senses, texts, 200, 0)[1]
        for first in (np.eye(5)[senses] + 1e-3, RANDOM.normal(size=(8, 5)))
    ]
    assert found[0] == found[1] > 0.05


def test_one_text_has_no_others() -> None:
    distances, one = cosine_distance(VECTORS), np.zeros(9, np.int64)
    assert np.isnan(nearest_sense(distances, one, one)).all()
    assert np.isnan(nearest_by_chance(one, one))
    assert np.isnan(self_similarity(VECTORS, one)).all()


def test_the_baseline_is_the_mean_cosine_of_tokens_of_different_texts() -> None:
    seen, texts = Directions.empty(3, 5), [VECTORS[:, :2], VECTORS[:, 2:5], VECTORS[:, 5:]]
    for text in texts:
        seen.add(text)
    units = [text / np.linalg.norm(text, axis=-1, keepdims=True) for text in texts]
    for depth in range(3):
        pairs = [one @ two for a, b in itertools.combinations(units, 2) for one in a[depth] for two in b[depth]]
        assert seen.between_texts()[depth] == pytest.approx(np.mean(pairs))


def test_a_plane_is_that_of_the_singular_value_decomposition() -> None:
    places, shares = plane(VECTORS[0])
    centred = VECTORS[0] - VECTORS[0].mean(axis=0)
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(np.abs(places), np.abs(left[:, :2] * singular[:2]), atol=1e-10)
    np.testing.assert_allclose(shares, (singular**2 / (singular**2).sum())[:2])
    places, shares = plane(np.ones((3, 4)))
    assert not places.any()
    assert np.isnan(shares).all()


def test_clusters_are_found_by_direction_and_named_by_the_first() -> None:
    assert two_clusters(np.array([[9.0, 0.1], [0.0, 1.0], [1.0, 0.0], [0.1, 5.0]]), 0).tolist() == [0, 1, 0, 1]
    assert two_clusters(np.ones((3, 2)), 0).tolist() == [0, 0, 0]
    assert two_clusters(np.eye(2), 2**70).tolist() == [0, 1]  # more than scikit-learn takes


# --------------------------------------------------------------------------------------------------------- the command

CORPUS = (
    "text\tsense",
    "we sat by the river bank\triver",
    "the old bank and the water\triver",
    "she ran to the bank of the river\triver",
    "it is a money bank\tmoney",
    "the bank was not by the river, the bank and money\tmoney",
    "no money in the old bank\tmoney",
    "a bank\t",
    "the cat sat on the mat\triver",
)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "texts.tsv"
    path.write_text("\n".join(CORPUS) + "\n", encoding="utf-8")
    return path


def table(folder: Path, name: str = "context") -> pd.DataFrame:
    return pd.read_csv(folder / f"{name}.csv", keep_default_na=False, na_values=[""])


def test_the_report_of_a_corpus_with_senses(fast: Run, corpus: Path, tmp_path: Path, tiny_model: LoadedModel) -> None:
    ran = fast("context", "bank", "--texts", corpus.name, "--group-column", "sense", "--vectors", "-o", "out")
    assert ran.exit_code == 0, ran.output
    assert "8 occurrences of 'bank' in 7 of 8 texts." in ran.stderr
    assert "Senses: money 4, river 3." in ran.stderr
    by_depth, vectors = table(tmp_path / "out"), table(tmp_path / "out", "context-vectors")
    where = table(tmp_path / "out", "context-occurrences")
    assert where["sense"].fillna("").tolist() == ["river"] * 3 + ["money"] * 4 + [""]
    known = where["sense"].notna().to_numpy()
    for depth, own in vectors.groupby("depth"):
        raw = own.drop(columns=["depth", "occurrence"]).to_numpy()
        expected = silhouette_score(raw[known], where["sense"][known], metric="cosine")
        assert by_depth["silhouette"][depth] == pytest.approx(expected, rel=1e-6)
    text = encoder(tiny_model).encode("it is a money bank", line=5)
    states = record(tiny_model, [text], needs=frozenset({"hidden_states"})).of_text("hidden_states", 0)
    np.testing.assert_allclose(vectors.query("occurrence == 3").iloc[:, 2:], states[:, 5], rtol=1e-5, atol=1e-6)
    settings = content(tmp_path / "out")["settings"]
    assert settings["word"] == "bank"


def test_tokens_that_pulled_are_listed_and_kinds_add_up(fast: Run, corpus: Path, tmp_path: Path) -> None:
    assert (
        fast("context", "bank", "--texts", corpus.name, "--column", "text", "-o", "out", "--top", "99").exit_code == 0
    )
    pulled, kinds = table(tmp_path / "out", "context-pull"), table(tmp_path / "out", "context-pull-kinds")
    sums = pulled.groupby(["occurrence", "layer"])["norm_share"].sum()
    np.testing.assert_allclose(sums, 1, rtol=1e-6)
    np.testing.assert_allclose(kinds.groupby("layer")["update_share"].sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(kinds.groupby("layer")["norm_share"].sum(), 1, rtol=1e-6)
    own = pulled[pulled["own"]].groupby("layer")["update_share"].sum() / 8
    np.testing.assert_allclose(kinds.query("kind == 'own'")["update_share"], own, rtol=1e-6)
    special = pulled[pulled["special"]].groupby("layer")["norm_share"].sum() / 8
    np.testing.assert_allclose(kinds.query("kind == 'special'")["norm_share"], special, rtol=1e-6)
    means = table(tmp_path / "out", "context-pull-means").query("piece == 'river' and layer == 1").iloc[0]
    river = pulled.query("token_text == 'river' and layer == 1")
    assert means["occurrences"] == river["occurrence"].nunique() == 4
    assert means["norm"] == pytest.approx(river["norm"].sum() / 8, rel=1e-6)
    assert means["update_share"] == pytest.approx(river["update_share"].sum() / 8, rel=1e-6)
    assert (pulled.query("place == 1")["norm"].to_numpy() >= pulled.query("place == 2")["norm"].to_numpy()).all()


def test_without_senses_clusters_are_called_ours_and_nothing_is_claimed(
    fast: Run, corpus: Path, tmp_path: Path
) -> None:
    ran = fast("context", "bank", "--texts", corpus.name, "--column", "text", "-o", "out")
    assert "no evidence of senses" in ran.stderr
    assert "silhouette" not in table(tmp_path / "out")
    assert table(tmp_path / "out", "context-map")["silhouette"].isna().all()
    assert set(table(tmp_path / "out", "context-occurrences")["cluster"]) == {0, 1}


def test_typed_texts_are_read_as_the_lines_of_a_file(fast: Run, tmp_path: Path) -> None:
    lines = ["the river bank", "a money bank", "we play"]
    (tmp_path / "lines.txt").write_text("\n".join(lines) + "\n")
    assert fast("context", "bank", *lines, "-o", "typed").exit_code == 0
    assert fast("context", "bank", "--texts", "lines.txt", "-o", "read").exit_code == 0
    for path in sorted((tmp_path / "read").glob("*.csv")):
        assert path.read_bytes() == (tmp_path / "typed" / path.name).read_bytes(), path.name
    assert content(tmp_path / "typed")["input"]["texts"] == lines


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("tree", "the river bank", "a cat"), 1, "in none of the 2 texts that were read"),
        (("\udcff", "the bank"), 2, "is no valid Unicode"),
        (("[SEP]", "the bank", "--special-tokens-in-text"), 2, "is no word but special tokens"),
        (("",), 2, "the word '' is empty"),
        (("bank", "the bank", "--texts", "texts.tsv"), 2, "both texts and --texts"),
        (("bank", "the bank", ""), 2, "the text '' is empty"),
        (("bank", "the bank", "--group-column", "sense"), 2, "--group-column was given"),
        (("bank", "--texts", "nowhere.txt"), 2, "nowhere.txt"),
        (("bank", "the bank " * 70), 1, "line 1 has 142 tokens"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_two_lines(
    fast: Run, corpus: Path, arguments: tuple[str, ...], code: int, told: str
) -> None:
    assert_error(fast("context", *arguments), code, told)


def test_single_occurrences_have_no_similarity(fast: Run, tmp_path: Path) -> None:
    ran = fast("context", "bank", "the river bank", "--figures", "png", "-o", "out")
    assert ran.exit_code == 0, ran.output
    assert table(tmp_path / "out")["self_similarity"].isna().all()
    assert "Its similarity to itself needs two texts" in ran.output
    several = fast("context", "bank", "the river bank", "a bank of mud", "-o", "several")
    assert "needs two texts" not in several.output


def occurrence(line: int, text: str, token: int) -> Occurrence:
    own = TokenizedText(line, text, None, *[()] * 10, None, ())  # type: ignore[arg-type]
    nothing = np.zeros((1, 1))
    return Occurrence(own, (token,), "", nothing, nothing, nothing, nothing)


def test_the_occurrences_kept_do_not_depend_on_the_order_of_texts() -> None:
    every = [occurrence(at, f"text {at}", at % 3) for at in range(300)]
    forwards, backwards = Occurrences(20, 5), Occurrences(20, 5)
    for one, other in zip(every, reversed(every), strict=True):
        forwards.add([one])
        backwards.add([other])
    kept = [item.text.line for item in forwards.kept()]
    assert kept == [item.text.line for item in backwards.kept()] == sorted(kept)
    assert len(kept) == 20
    assert (forwards.seen, forwards.texts) == (300, 300)
    assert [item.text.line for item in Occurrences(20, 6, items=every).kept()] != kept
    keys = [f"5\0text {at}\0\0{at % 3}".encode() for at in range(300)]
    ranks = [int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") for key in keys]
    assert kept == sorted(sorted(range(300), key=ranks.__getitem__)[:20])


def test_more_occurrences_than_are_kept_is_said(fast: Run, corpus: Path, tmp_path: Path) -> None:
    ran = fast("context", "bank", "--texts", corpus.name, "--column", "text", "--most", "3", "-o", "out")
    assert "Kept are 3, those of smallest hash with seed 0." in ran.stderr
    assert len(table(tmp_path / "out", "context-occurrences")) == 3


# ------------------------------------------------------------------------------------------------------ the real model


def test_the_sample_knows_its_senses() -> None:
    assert sample_senses("Bank") == {1: "riverside", 2: "finance", 3: "riverside", 4: "finance"}
    assert sample_senses("the") == {}
    assert sample_senses("") == {}


def test_river_and_money_banks_of_the_sample_separate_far_beyond_chance(run: Run, tmp_path: Path) -> None:
    ran = run("context", "--figures", "none", "-o", "out")
    assert ran.exit_code == 0, ran.output
    assert "They separate best at depth 4: silhouette 0.447, nearest neighbour of the same sense 100%" in ran.stderr
    assert content(tmp_path / "out")["input"]["name"] == "bank.tsv"
    by_depth = table(tmp_path / "out")
    assert (by_depth["silhouette"][1:] > 0.3).all()
    assert (by_depth["nearest_sense"][1:] >= 0.95).all()
    assert (by_depth["p"][1:] < 0.005).all()
    assert by_depth["silhouette"][0] < 0.1  # before any context there is only the position


def test_four_banks_are_too_few_to_tell(run: Run, tmp_path: Path) -> None:
    texts = [line.split("\t") for line in SAMPLE_BANKS.read_text(encoding="utf-8").splitlines()[:5]]
    (tmp_path / "four.tsv").write_text("".join("\t".join(row) + "\n" for row in texts))
    ran = run("context", "--texts", "four.tsv", "--column", "text", "--group-column", "sense", "-o", "out")
    assert "only 3 ways: no p below 0.33 is possible" in ran.stderr
