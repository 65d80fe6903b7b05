"""Isotropy: against plain loops, scikit-learn and the published steps, on given vectors and on MiniLM."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import reference
from command import Run, files_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ortho_group
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from vectors import Text, answer, corpus, record_of, state_of, text_of

from analyses.isotropy import Isotropy
from analyses.kit import vector_sample
from analyses.kit.accumulators import Floats
from analyses.kit.analysis import Selection
from analyses.kit.isotropy_metrics import spectrum_values, two_nn
from analyses.kit.vector_sample import VectorSample, text_keys, token_keys
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.run import Pass, analyse_corpus

LENGTHS = (3, 5, 1, 7, 4, 6, 2, 9, 5, 3, 8, 4)


def cosine(x: Floats, y: Floats) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True)) / math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def by_loops(texts: list[Text], depth: int, left: list[int]) -> dict[str, float]:
    """What needs no sample: over all tokens, pair by pair."""
    vectors = [own[depth][:, left] for _, own in texts]
    occurrences = defaultdict(list)
    for (about, _), own in zip(texts, vectors, strict=True):
        for token, vector in zip(about.tokens, own, strict=True):
            if not token.startswith("["):
                occurrences[token].append(vector)
    repeated = [own for own in occurrences.values() if len(own) > 1]
    every = np.concatenate(vectors)
    variances = np.linalg.eigvalsh(np.cov(every, rowvar=False))
    shares = [value / sum(variances) for value in variances]
    return {
        "between_texts_cosine": mean([cosine(x, y) for a, b in combinations(vectors, 2) for x in a for y in b]),
        "intra_similarity_exact": mean([mean([cosine(x, own.mean(axis=0)) for x in own]) for own in vectors]),
        "self_similarity": mean([mean([cosine(x, y) for x, y in combinations(own, 2)]) for own in repeated]),
        "words": len(repeated),
        "first_component": PCA().fit(every).explained_variance_ratio_[0],
        "isoscore": published_isoscore(every),
        "participation_ratio": sum(variances) ** 2 / sum(value**2 for value in variances),
        "effective_rank": math.exp(-sum(share * math.log(share) for share in shares)),
    }


def published_isoscore(points: Floats) -> float:
    """Rudman et al. 2022, step by step: rotate, variances, normalise, defect, score."""
    rotated = PCA().fit_transform(points)
    n = rotated.shape[1]
    variances = rotated.var(axis=0, ddof=1)
    normed = variances * math.sqrt(n) / np.linalg.norm(variances)
    defect = np.linalg.norm(normed - 1) / math.sqrt(2 * (n - math.sqrt(n)))
    return ((n - defect**2 * (n - math.sqrt(n))) ** 2 - n) / (n * (n - 1))


def rows(frame, dimensions: str):
    return frame[frame["dimensions"] == dimensions].set_index("depth")


def table(texts: list[Text], **settings) -> dict:
    return {one.name: one.frame for one in answer(Isotropy(**settings), texts).tables}


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    """Few enough tokens of a word that every occurrence is kept, and one dimension that is an outlier."""
    made = corpus(LENGTHS, 3, 20, words=25)
    for _, vectors in made:
        vectors[1:, :, 7] *= 50
    return made


def test_every_value_over_all_tokens_is_that_of_loops(texts: list[Text]) -> None:
    frame = table(texts)["isotropy"]
    for dimensions in ("all", "without_outliers"):
        for depth, row in rows(frame, dimensions).iterrows():
            gone = {7} if dimensions != "all" and depth else set()
            expected = by_loops(texts, depth, [at for at in range(20) if at not in gone])
            assert row["dimension_count"] == 20 - len(gone)
            for name, value in expected.items():
                exact = name in ("between_texts_cosine", "intra_similarity_exact")
                if exact and dimensions != "all":
                    assert np.isnan(row[name])
                else:
                    assert row[name] == pytest.approx(value, rel=1e-9), name


def test_the_sampled_values_are_those_of_a_token_a_text(texts: list[Text]) -> None:
    analysis = Isotropy()
    state = state_of(analysis, texts, texts[0])
    sample, frame = state.pairs.settled(), analysis.finalize(state, None).tables[0].frame
    by_line = {about.line: vectors for about, vectors in texts}
    assert sorted(sample.keys[:, 2].tolist()) == sorted(by_line)
    for line, held in zip(sample.keys[:, 2].tolist(), sample.vectors, strict=True):
        own = by_line[line]
        assert any(np.array_equal(held[:, 0], own[:, at]) for at in range(own.shape[1]))
        np.testing.assert_allclose(held[:, 1], own.mean(axis=1), rtol=1e-5, atol=1e-6)
    for depth, row in rows(frame, "without_outliers").iterrows():
        left = [at for at in range(20) if at != 7 or not depth]
        tokens, means = (sample.vectors[:, depth, at][:, left].astype(float) for at in (0, 1))
        baseline = mean([cosine(x, y) for x, y in combinations(tokens, 2)])
        intra = mean([cosine(x, y) for x, y in zip(tokens, means, strict=True)])
        assert row["random_pair_cosine"] == pytest.approx(baseline, rel=1e-9)
        assert row["intra_similarity"] == pytest.approx(intra, rel=1e-9)
        assert row["intra_similarity_adjusted"] == pytest.approx(intra - baseline, rel=1e-9)
        assert row["self_similarity_adjusted"] == pytest.approx(row["self_similarity"] - baseline, rel=1e-9)
        assert row["two_nn"] == pytest.approx(two_nn_by_neighbours(tokens), rel=1e-9)
        assert row["two_nn_half"] == pytest.approx(two_nn_by_neighbours(tokens[::2]), rel=1e-9)
        assert (row["sampled"], row["two_nn_points"]) == (len(texts), len(texts))


def test_special_tokens_can_be_dropped(texts: list[Text]) -> None:
    bare = [(text_of(about.line, about.tokens[1:-1]), vectors[:, 1:-1]) for about, vectors in texts]
    dropped, expected = table(texts, special="drop")["isotropy"], table(bare)["isotropy"]
    exact = ["between_texts_cosine", "intra_similarity_exact", "isoscore", "self_similarity", "tokens"]
    np.testing.assert_allclose(dropped[exact], expected[exact], rtol=1e-12)


# N4: outlier dimensions


def test_n4_a_dimension_enlarged_by_50_is_reported_and_the_rest_is_as_without_it() -> None:
    usual = corpus(LENGTHS, 2, 20, words=25, seed=3)
    enlarged = [(about, vectors * np.where(np.arange(20) == 4, 50.0, 1.0)) for about, vectors in usual]
    deleted = [(about, np.delete(vectors, 4, axis=2)) for about, vectors in usual]
    assert not len(table(usual)["isotropy-outliers"])
    found, expected = table(enlarged), rows(table(deleted)["isotropy"], "all")
    outliers = found["isotropy-outliers"]
    assert outliers[["depth", "dimension"]].to_numpy().tolist() == [[0, 4], [1, 4]]
    assert (outliers["variance_share"] > 0.9).all()
    every = np.concatenate([vectors[0] for _, vectors in enlarged])
    spread = every.var(axis=0, ddof=1)
    assert outliers["variance"][0] == pytest.approx(spread[4], rel=1e-9)
    assert outliers["variance_bound"][0] == pytest.approx(spread.mean() + 3 * spread.std(), rel=1e-9)
    assert outliers["mean_bound"][0] == pytest.approx(
        np.abs(every.mean(axis=0)).mean() + 3 * np.abs(every.mean(axis=0)).std(), rel=1e-9
    )
    own = rows(found["isotropy"], "without_outliers")
    same = [name for name in own.select_dtypes("float") if not name.endswith(("exact", "texts_cosine"))]
    np.testing.assert_allclose(own[same], expected[same], rtol=1e-6)
    assert (rows(found["isotropy"], "all")["isoscore"] < 0.05).all()


def test_the_bound_of_outliers_is_an_option(texts: list[Text]) -> None:
    assert len(table(texts, outliers=1)["isotropy-outliers"]) > len(table(texts)["isotropy-outliers"]) == 2
    assert not len(table(texts, outliers=9)["isotropy-outliers"])


@pytest.mark.parametrize(("shift", "scale", "by"), [(30.0, 1.0, "mean"), (0.0, 50.0, "variance"), (30.0, 50.0, "both")])
def test_what_makes_a_dimension_an_outlier_is_named(shift: float, scale: float, by: str) -> None:
    points = np.random.default_rng(0).normal(size=(200, 20))
    points -= points.mean(axis=0)
    points[:, 2] = points[:, 2] * scale + shift
    points += np.linspace(0.5, 1.0, 20)
    outliers = table([(text_of(1, ["w"] * 200), np.stack([points] * 2))])["isotropy-outliers"]
    assert outliers["by"].tolist() == [by] * 2


# N3: degenerate clouds


def test_n3_identical_tokens_have_cosine_1_and_no_spectrum() -> None:
    same = [(text_of(line, ["a", "b", "a"]), np.full((2, 3, 5), 1 / 3)) for line in (1, 2, 3)]
    found = table(same)
    frame = found["isotropy"]
    cosines = ["random_pair_cosine", "between_texts_cosine", "intra_similarity", "self_similarity"]
    np.testing.assert_allclose(rows(frame, "all")[cosines], 1.0, rtol=1e-12)
    assert (
        frame[["first_component", "isoscore", "participation_ratio", "effective_rank", "two_nn"]].isna().all(axis=None)
    )
    assert (frame["two_nn_points"] == 1).all()
    assert (found["isotropy-spectrum"]["variance"] == 0).all()


def test_n3_collinear_tokens_have_one_component_and_one_token_has_none() -> None:
    line = np.outer([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 2.0])
    row = rows(table([(text_of(1, ["a", "b", "c", "d"]), np.stack([line] * 2))])["isotropy"], "all").loc[0]
    assert row[["first_component", "participation_ratio", "effective_rank"]].tolist() == pytest.approx([1.0] * 3)
    assert row["isoscore"] == pytest.approx(0.0, abs=1e-12)
    assert row["intra_similarity_exact"] == pytest.approx(1.0)
    alone = rows(table([(text_of(1, ["a"]), np.ones((2, 1, 3)))])["isotropy"], "all").loc[0]
    assert alone[["random_pair_cosine", "self_similarity", "isoscore", "two_nn"]].isna().all()
    assert alone["intra_similarity_exact"] == pytest.approx(1.0)


# Formulas


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=30))
@settings(max_examples=30, deadline=None)
def test_isoscore_is_the_participation_ratio_brought_to_0_and_1(variances: list[float]) -> None:
    n, values = len(variances), np.array(variances)
    normed = values * math.sqrt(n) / np.linalg.norm(values)
    defect = np.linalg.norm(normed - 1) / math.sqrt(2 * (n - math.sqrt(n)))
    score = ((n - defect**2 * (n - math.sqrt(n))) ** 2 - n) / (n * (n - 1))
    assert spectrum_values(values)[1] == pytest.approx(score, abs=1e-9)


def two_nn_by_neighbours(points: Floats) -> float:
    """Facco et al. 2017 with scikit-learn's neighbours."""
    distances = NearestNeighbors(n_neighbors=3, algorithm="kd_tree").fit(points).kneighbors(points)[0]
    mu = sorted(distances[:, 2] / distances[:, 1])
    kept = int(len(points) * 0.9)
    x = [math.log(value) for value in mu[:kept]]
    y = [-math.log(1 - at / len(points)) for at in range(kept)]
    return sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)


@pytest.mark.parametrize("dimension", [1, 2, 5])
def test_two_nn_finds_the_dimension_of_cubes_however_they_lie_in_space(dimension: int) -> None:
    cube = np.random.default_rng(dimension).uniform(size=(1500, dimension))
    points = cube @ ortho_group.rvs(20, random_state=0)[:dimension] + 3.0
    assert two_nn(points) == pytest.approx(dimension, rel=0.08)
    assert two_nn(points) == pytest.approx(two_nn_by_neighbours(points), rel=1e-6)


def test_rotating_the_space_changes_no_value_of_all_dimensions() -> None:
    usual = corpus(LENGTHS, 2, 20, words=25)
    turn = ortho_group.rvs(20, random_state=1)
    before, after = (rows(table(some)["isotropy"], "all") for some in (usual, [(a, v @ turn) for a, v in usual]))
    floats = list(before.select_dtypes("float"))
    np.testing.assert_allclose(before[floats], after[floats], rtol=1e-4, atol=1e-6)


# Samples and sums


def test_hashes_of_tokens_are_the_numbers_of_splitmix64(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first five of seed 1234567, as Rosetta Code has them.
    monkeypatch.setattr(vector_sample, "hashed", lambda text, seed: 1234567)
    keys = token_keys([text_of(9, ["a"] * 5)], np.arange(5), 0)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert keys[0, :, 0].tolist() == [*published, 4593380528125082431, 16408922859458223821]
    assert keys[0, :, 1:].tolist() == [[9, 0, at] for at in range(5)]


def test_pairs_of_the_same_first_text_have_hashes_of_their_own() -> None:
    first, second = (replace(text_of(1, ["a"]), pair=pair) for pair in ("b", "c"))
    assert text_keys([first], 0)[0, 0] != text_keys([second], 0)[0, 0]


@pytest.mark.parametrize("special", ["keep", "drop"])
def test_the_token_of_a_text_is_the_one_of_smallest_hash(texts: list[Text], special: Literal["keep", "drop"]) -> None:
    sample = state_of(Isotropy(special=special, seed=3), texts, texts[0]).pairs.settled()
    by_line = {about.line: (about, vectors) for about, vectors in texts}
    for line, held in zip(sample.keys[:, 2].tolist(), sample.vectors, strict=True):
        about, own = by_line[line]
        hashes = token_keys([about], np.arange(len(about)), 3)[0, :, 0].tolist()
        kept = [at for at, added in enumerate(about.special) if special == "keep" or not added]
        np.testing.assert_array_equal(held[:, 0], own[:, min(kept, key=hashes.__getitem__)])


def test_a_full_sample_takes_of_a_batch_what_it_takes_of_single_texts() -> None:
    many = corpus([4] * 200, 2, 6, words=12)
    many[150][1][:, 2] = 0.0
    analysis = Isotropy(pairs=5, words=3)
    alone, batched = (analysis.start(record_of(many[0]).shape, None) for _ in range(2))
    for text in many:
        analysis.update(alone, record_of(text))
    for first in range(0, 200, 100):
        analysis.update(batched, record_of(*many[first : first + 100]))
    for name in ("pairs", "words"):
        one, other = (getattr(state, name).settled() for state in (alone, batched))
        assert one.keys.tolist() == other.keys.tolist()
        np.testing.assert_array_equal(one.vectors, other.vectors)
    assert alone.intra.mean.tolist() == batched.intra.mean.tolist()


def test_a_text_without_directions_has_no_part_in_the_exact_cosines() -> None:
    usual = corpus((3, 5, 4), 2, 6, words=9)
    nothing = text_of(4, ["a", "b"]), np.zeros((2, 2, 6))
    exact = ["between_texts_cosine", "intra_similarity_exact"]
    some, every = (rows(table(given)["isotropy"], "all")[exact] for given in (usual, [*usual, nothing]))
    assert every.equals(some)


@given(
    drawn=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=60),
    cut=st.integers(0, 60),
    groups=st.integers(1, 3),
    each=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_a_sample_is_what_sorting_everything_gives(
    drawn: list[tuple[int, int]], cut: int, groups: int, each: int
) -> None:
    rows = [(*row, at) for row, at in zip(drawn, np.random.default_rng(cut).permutation(len(drawn)), strict=True)]
    keys = np.array(rows, np.uint64).reshape(-1, 3)
    values = keys[:, 2:].astype(float)
    parts = []
    for part in (slice(0, cut), slice(cut, None)):
        sample = VectorSample.empty(groups, each, (1,))
        for key, value in zip(keys[part], values[part], strict=True):
            if sample.wanted(key[None])[0]:
                sample.add(key[None], value[None])
            sample = sample.settled()
        parts.append(sample)
    expected = []
    for group in sorted({row[0] for row in rows})[:groups]:
        expected += sorted(row for row in rows if row[0] == group)[:each]
    merged = parts[1].merge(parts[0])
    assert merged.keys.tolist() == [list(row) for row in expected]
    assert merged.vectors[:, 0].tolist() == [row[2] for row in expected]


def test_small_samples_do_not_depend_on_order_or_cuts_and_follow_the_seed() -> None:
    many = corpus([4] * 60, 2, 6, words=12)
    analysis = Isotropy(pairs=7, words=3)
    whole = analysis.finalize(state_of(analysis, many, many[0]), None).tables[0].frame
    first, second = (state_of(analysis, part, many[0]) for part in (many[40:][::-1], many[:40]))
    merged = analysis.finalize(first.merge(second), None).tables[0].frame
    np.testing.assert_allclose(merged.select_dtypes("number"), whole.select_dtypes("number"), rtol=1e-9)
    assert (whole[["sampled", "words"]] == [7, 3]).all(axis=None)
    other = answer(Isotropy(pairs=7, words=3, seed=1), many).tables[0].frame
    assert (other["random_pair_cosine"] != whole["random_pair_cosine"]).all()
    assert other["isoscore"].equals(whole["isoscore"])


def test_chosen_layers_have_the_rows_they_have_among_all(texts: list[Text]) -> None:
    every, some = table(texts), table(texts, layers=Selection("1"))
    for name, frame in some.items():
        assert set(frame["depth"]) == {1, 2}
        assert frame.equals(every[name][every[name]["depth"] > 0].reset_index(drop=True))


def test_covariances_of_several_blocks_are_those_of_the_whole_array_with_or_without_merging() -> None:
    many = corpus([40] * 50, 2, 5, words=9)
    analysis = Isotropy()
    merged = state_of(analysis, many[:17], many[0]).merge(state_of(analysis, many[17:], many[0]))
    for state in (state_of(analysis, many, many[0]), merged):
        sums = state.covariance.whole()
        for depth in range(2):
            every = np.concatenate([vectors[depth] for _, vectors in many])
            assert sums.count == len(every) == 2100
            np.testing.assert_allclose(sums.products[depth] / (len(every) - 1), np.cov(every, rowvar=False), rtol=1e-10)


def test_without_spectrum_there_are_still_cosines_and_outliers(texts: list[Text]) -> None:
    bare, whole = table(texts, spectrum=False), table(texts)
    assert list(bare) == ["isotropy", "isotropy-outliers"]
    np.testing.assert_allclose(
        bare["isotropy-outliers"]["variance"], whole["isotropy-outliers"]["variance"], rtol=1e-12
    )
    gone = {"first_component", "isoscore", "participation_ratio", "effective_rank"}
    assert set(whole["isotropy"]) - set(bare["isotropy"]) == gone
    assert bare["isotropy"].equals(whole["isotropy"].drop(columns=list(gone)))


def test_the_figure_of_the_spectrum_shows_the_cumulative_shares_of_the_table(texts: list[Text]) -> None:
    analysis = Isotropy()
    result = analysis.finalize(state_of(analysis, texts, texts[0]), None)
    spectrum = next(table.frame for table in result.tables if table.name == "isotropy-spectrum")
    curves = next(figure for figure in result.figures if figure.name == "isotropy-spectrum").panels[0].series
    for depth, curve in enumerate(curves):
        whole = spectrum[(spectrum["depth"] == depth) & (spectrum["dimensions"] == "all")]
        np.testing.assert_allclose(curve.y, whole["variance"].cumsum() / whole["variance"].sum(), rtol=1e-12)
        np.testing.assert_allclose(whole["cumulative_share"], curve.y, rtol=1e-12)


def test_the_command_can_do_without_the_spectrum(fast: Run, tmp_path: Path) -> None:
    assert fast("isotropy", "the cat sat on the mat", "--no-spectrum", "-o", "bare").exit_code == 0
    assert fast("isotropy", "the cat sat on the mat", "-o", "whole").exit_code == 0
    bare, whole = (set(files_of(tmp_path / name)) for name in ("bare", "whole"))
    assert whole - bare == {"isotropy-spectrum.csv"}
    assert "--no-spectrum" in fast("isotropy", "-h").output


def test_one_text_has_no_baseline_and_the_note_says_why(fast: Run) -> None:
    done = fast("isotropy", "the cat sat on the mat", "-o", "out")
    assert "no baseline" in done.stderr
    assert "0 pairs" not in done.output


# MiniLM


def test_minilm_has_the_values_of_the_reference_pass(minilm: LoadedModel) -> None:
    lines = ["The fisherman sat down by the river bank.", "The bank was closed.", "He rowed to the other bank."]
    encoder = Encoder(minilm.tokenizer, minilm.max_tokens)
    encoded = [encoder.encode(line, line=number) for number, line in enumerate(lines, start=1)]
    frame = rows(analyse_corpus([Isotropy()], minilm, encoded, Pass())[0].tables[0].frame, "all")
    passes = [reference.tokenize(line) for line in lines]
    hidden = [reference.forward(one.ids, one.segments)["hidden_states"] for one in passes]
    given = [(text_of(at, one.pieces), own) for at, (one, own) in enumerate(zip(passes, hidden, strict=True), start=1)]
    for depth in (0, 3, 6):
        expected = by_loops_of_few(given, depth)
        for name, value in expected.items():
            assert frame.loc[depth, name] == pytest.approx(value, abs=1e-5), name


def by_loops_of_few(texts: list[Text], depth: int) -> dict[str, float]:
    """What does not hang on eigenvalues that are 0 but for rounding: there are fewer tokens than dimensions."""
    every = np.concatenate([vectors[depth] for _, vectors in texts])
    ratios = PCA().fit(every).explained_variance_ratio_
    words = defaultdict(list)
    for about, vectors in texts:
        for token, vector in zip(about.tokens, vectors[depth], strict=True):
            words[token].append(vector)
    repeated = [own for token, own in words.items() if len(own) > 1 and not token.startswith("[")]
    return {
        "first_component": ratios[0],
        "participation_ratio": 1 / (ratios**2).sum(),
        "self_similarity": mean([mean([cosine(x, y) for x, y in combinations(own, 2)]) for own in repeated]),
    }
