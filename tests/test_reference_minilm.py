"""What bertgeo records of MiniLM, and every table made of it, equal a float64 reference that shares no code with it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference

from analyses.attention import Attention
from analyses.cone_index import ConeIndex
from analyses.kit.record import TokenizedText
from analyses.kit.result import Table
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.recording import EVERYTHING, record
from bertgeo_cli.run import Pass, analyse_corpus, analyse_text

TOLERANCE = 1e-5
RIVER = "The fisherman sat down by the river bank."
PIECES = "goldfish unhappily"
MARKS = "Unbelievably, it's (really) raining — isn't it?"
TEXTS: tuple[tuple[str, str | None], ...] = ((RIVER, None), (PIECES, None), (MARKS, "Was the cat's mat wet?"))
CORPUS = (RIVER, PIECES, "She deposited the cheque at the savings bank.", MARKS, "Hello.")
# fmt: off
METRICS = ("n", "entropy", "entropy_share", "cls_entropy", "confidence", "distance", "mass_self", "mass_previous",
           "mass_next", "mass_cls", "mass_sep", "mass_punctuation", "mass_other", "mass_a_to_b", "mass_b_to_a")
# fmt: on
CONE_VALUES = ("n", "cone_index", "cone_per_token", "mean_cosine", "isotropic", "isotropic_per_token")
CONE_KEYS = ["layer", "point", "head", "special"]


def encode(loaded: LoadedModel, text: str, pair: str | None = None, line: int = 1) -> TokenizedText:
    return Encoder(loaded.tokenizer, loaded.max_tokens).encode(text, pair, line=line)


@cache
def expected(text: str, pair: str | None = None) -> dict[str, Any]:
    tokens = reference.tokenize(text, pair)
    return reference.forward(tokens.ids, tokens.segments)


def tables(result: Any) -> dict[str, Table]:
    return {table.name: table for table in (result.headline, *result.tables)}


def close(found: Any, wanted: Any, name: str = "") -> None:
    found, wanted = np.asarray(found, float), np.asarray(wanted, float)
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


# The recorded pass


@pytest.mark.parametrize(("text", "pair"), TEXTS)
def test_every_recorded_tensor_is_the_reference_pass(minilm: LoadedModel, text: str, pair: str | None) -> None:
    recorded = record(minilm, [encode(minilm, text, pair)], needs=EVERYTHING)
    wanted = expected(text, pair)
    assert recorded.recorded == set(wanted)
    for name, values in wanted.items():
        found = getattr(recorded, name)[0]
        assert found.shape == values.shape, name
        close(found, values, name)


def test_the_second_text_of_a_pair_has_segment_1(minilm: LoadedModel) -> None:
    text, pair = TEXTS[2]
    tokens, encoded = reference.tokenize(text, pair), encode(minilm, text, pair)
    assert encoded.segment == tuple(tokens.segments)
    assert {0, 1} == set(encoded.segment)


@pytest.mark.parametrize(("text", "pair"), TEXTS)
def test_the_tokens_table_is_the_tokenizers_own(minilm: LoadedModel, text: str, pair: str | None) -> None:
    tokens = reference.tokenize(text, pair)
    frame = tables(analyse_text([Attention()], minilm, encode(minilm, text, pair), Pass())[0])["tokens"].frame
    spans = [span or (pd.NA, pd.NA) for span in tokens.spans]
    wanted = {
        "token": range(len(tokens)),
        "text": tokens.texts,
        "piece": tokens.pieces,
        "id": tokens.ids,
        "start": pd.array([span[0] for span in spans], dtype="Int64"),
        "end": pd.array([span[1] for span in spans], dtype="Int64"),
        "segment": tokens.segments,
        "word": pd.array(tokens.words, dtype="Int64"),
        "special": tokens.special,
        "unknown": [identifier == 100 for identifier in tokens.ids],
        "unit": range(len(tokens)),
    }
    pd.testing.assert_frame_equal(frame, pd.DataFrame(wanted), check_dtype=False)


# Attention


def assert_k90(found: Sequence[float], texts: Sequence[Sequence[Any]]) -> None:
    """Each mean over texts lies between those of a threshold a little lower and a little higher."""
    for value, *matrices in zip(found, *texts, strict=True):
        low, high = (statistics.fmean(mean_k90(rows, shift) for rows in matrices) for shift in (-TOLERANCE, TOLERANCE))
        assert low - 1e-9 <= value <= high + 1e-9 or (math.isnan(low) and math.isnan(value))


def mean_k90(rows: Sequence[Sequence[float]], shift: float) -> float:
    """Over the rows that reach 0.9 at all: some do not when special tokens were dropped."""
    counts = [reference.k90(row, 0.9 - 1e-6 + shift) for row in rows]
    return reference.mean([count for count in counts if not math.isnan(count)])


@cache
def heads(text: str, pair: str | None = None, special: str = "keep", words: bool = False) -> pd.DataFrame:
    """The reference's values, a row a head, and the rows of attention themselves."""
    tokens = reference.tokenize(text, pair)
    members = reference.word_members(tokens) if words else [[at] for at in range(len(tokens))]
    kinds, segments = ([values[of[0]] for of in members] for values in (tokens.kinds(), tokens.segments))
    rows = []
    for layer, matrices in enumerate(expected(text, pair)["attention"]):
        for head, pieces in enumerate(matrices):
            matrix = reference.between_words(pieces, members) if words else pieces
            values = reference.head_values(matrix, kinds, segments, special)
            kept = reference.kept_rows(matrix, kinds, special)
            rows.append({"layer": layer, "head": head, **values, "rows": kept})
    return pd.DataFrame(rows)


def assert_heads(loaded: LoadedModel, text: str, pair: str | None, **options: Any) -> None:
    result = analyse_text([Attention(**options)], loaded, encode(loaded, text, pair), Pass())[0]
    frame, wanted = tables(result)["attention-heads"].frame, heads(text, pair, **options)
    assert list(frame) == ["layer", "head", "texts", *METRICS, "k90"]
    assert (frame["texts"] == 1).all()
    for name in ("layer", "head", *METRICS):
        close(frame[name], wanted[name], name)
    assert_k90(frame["k90"], [wanted["rows"]])


@pytest.mark.parametrize(("text", "pair"), TEXTS)
def test_attention_of_one_text_equals_the_loops(minilm: LoadedModel, text: str, pair: str | None) -> None:
    assert_heads(minilm, text, pair)


def test_word_attention_equals_the_loops(minilm: LoadedModel) -> None:
    text, pair = TEXTS[2]
    assert len(reference.word_members(reference.tokenize(text, pair))) < len(reference.tokenize(text, pair))
    assert_heads(minilm, text, pair, words=True)


@pytest.mark.parametrize("special", ["drop", "renormalise"])
def test_attention_without_special_tokens_equals_the_loops(minilm: LoadedModel, special: str) -> None:
    assert_heads(minilm, *TEXTS[2], special=special)


def test_crossing_masses_are_empty_without_a_pair(minilm: LoadedModel) -> None:
    frame = tables(analyse_text([Attention()], minilm, encode(minilm, RIVER), Pass())[0])["attention-heads"].frame
    assert frame[["mass_a_to_b", "mass_b_to_a"]].isna().all(axis=None)


def test_attention_weights_name_their_query_and_key(minilm: LoadedModel) -> None:
    tokens, wanted = reference.tokenize(MARKS), expected(MARKS)["attention"]
    result = analyse_text([Attention()], minilm, encode(minilm, MARKS), Pass())[0]
    frame = tables(result)["attention-weights"].frame
    assert len(frame) == wanted.size
    index = (frame["layer"], frame["head"], frame["query"], frame["key"])
    assert len(set(zip(*index, strict=True))) == wanted.size
    close(frame["weight"], wanted[index])
    for side in ("query", "key"):
        assert list(frame[f"{side}_token"]) == [tokens.texts[at] for at in frame[side]]
        for end, of in (("start", 0), ("end", 1)):
            spans = [(tokens.spans[at] or (None, None))[of] for at in frame[side]]
            assert [None if pd.isna(value) else value for value in frame[f"{side}_{end}"]] == spans


@pytest.fixture(scope="module")
def corpus(minilm: LoadedModel) -> dict[str, Table]:
    """Every table of both analyses over the corpus."""
    texts = [encode(minilm, text, line=line) for line, text in enumerate(CORPUS, start=1)]
    first, second = analyse_corpus([Attention(), ConeIndex()], minilm, texts, Pass())
    return tables(first) | tables(second)


def test_attention_of_a_corpus_is_mean_and_deviation_over_texts(corpus: dict[str, Table]) -> None:
    frame = corpus["attention-heads"].frame
    names = {f"{name}{end}" for name in (*METRICS, "k90") for end in ("", "_std")}
    assert set(frame) == {"layer", "head", "texts", *names}
    assert (frame["texts"] == len(CORPUS)).all()
    for name in METRICS:
        by_head = list(zip(*(heads(text)[name] for text in CORPUS), strict=True))
        close(frame[name], [statistics.fmean(values) for values in by_head], name)
        close(frame[f"{name}_std"], [deviation(values) for values in by_head], name)
    assert_k90(frame["k90"], [heads(text)["rows"] for text in CORPUS])


def deviation(values: Sequence[float]) -> float:
    return math.nan if math.isnan(values[0]) else statistics.stdev(values)


def test_attention_by_text_has_every_text(corpus: dict[str, Table]) -> None:
    frame = corpus["attention-texts"].frame
    wanted = pd.concat([heads(text).assign(line=line, part=0) for line, text in enumerate(CORPUS, start=1)])
    assert set(frame) == {"line", "part", "layer", "head", *METRICS, "k90"}
    for name in ("line", "part", "layer", "head", *METRICS):
        close(frame[name], wanted[name], name)
    assert_k90(frame["k90"], [wanted["rows"]])
    corpus_heads = corpus["attention-heads"].frame
    spread = frame.groupby(["layer", "head"])["k90"].std().to_numpy()
    close(corpus_heads["k90_std"], spread, "k90_std")


def test_the_attention_headline_is_the_mean_over_heads(corpus: dict[str, Table]) -> None:
    headline, by_head = corpus["attention-layers"].frame, corpus["attention-heads"].frame
    assert list(headline["layer"]) == list(range(6))
    names = set(headline) - {"layer"}
    assert names >= {"entropy", "entropy_share", "confidence", "distance", "mass_cls", "mass_sep", "k90"}
    for name in names:
        close(headline[name], [by_head[name][by_head["layer"] == layer].sum() / 12 for layer in range(6)], name)


# Cone index


@cache
def cone_points(text: str) -> dict[tuple[int, str, int | None, bool], np.ndarray]:
    """Token vectors by layer, point, head, and whether special tokens count."""
    kept = ~np.array(reference.tokenize(text).special)
    return {
        (*at, special): vectors if special else vectors[kept]
        for at, vectors in reference.cone_points(expected(text)).items()
        for special in (True, False)
    }


@cache
def cone_values(text: str) -> dict[tuple[int, str, int | None, bool], dict[str, float]]:
    return {at: reference.cone_values(vectors) for at, vectors in cone_points(text).items()}


def cone_keys(frame: pd.DataFrame) -> list[tuple[Any, ...]]:
    rows = frame[CONE_KEYS].astype(object).where(frame[CONE_KEYS].notna(), None)
    return list(rows.itertuples(index=False, name=None))


def test_cone_index_of_one_text_equals_the_loops(minilm: LoadedModel) -> None:
    result = analyse_text([ConeIndex()], minilm, encode(minilm, MARKS), Pass())[0]
    frame, wanted = tables(result)["cone-index"].frame, cone_values(MARKS)
    assert cone_keys(frame) == list(wanted)
    assert set(frame) == {*CONE_KEYS, "depth", "texts", *CONE_VALUES}
    assert (frame["texts"] == 1).all()
    assert list(frame["n"]) == [values["n"] for values in wanted.values()]
    for name in CONE_VALUES:
        close(frame[name], [values[name] for values in wanted.values()])


def test_depth_counts_hidden_states_and_is_empty_inside_a_block(minilm: LoadedModel) -> None:
    result = analyse_text([ConeIndex()], minilm, encode(minilm, RIVER), Pass())[0]
    for row in tables(result)["cone-index"].frame.itertuples():
        wanted = {"layer_input": row.layer, "layer_output": row.layer + 1}.get(row.point)
        assert pd.isna(row.depth) if wanted is None else row.depth == wanted


def test_cone_index_of_a_corpus_equals_the_loops(corpus: dict[str, Table]) -> None:
    frame = corpus["cone-index"].frame
    assert cone_keys(frame) == list(cone_values(RIVER))
    names = {f"{name}{end}" for name in CONE_VALUES for end in ("", "_std")}
    assert set(frame) == {*CONE_KEYS, "depth", "texts", "between_texts_cosine", "between_texts_pairs", *names}
    assert (frame["texts"] == len(CORPUS)).all()
    for name in CONE_VALUES:
        by_place = [[cone_values(text)[at][name] for text in CORPUS] for at in cone_keys(frame)]
        close(frame[name], [statistics.fmean(values) for values in by_place], name)
        close(frame[f"{name}_std"], [statistics.stdev(values) for values in by_place], name)


@cache
def between(at: tuple[int, str, int | None, bool]) -> tuple[float, int]:
    return reference.between_texts([cone_points(text)[at] for text in CORPUS])


def test_between_texts_cosine_is_the_mean_over_all_pairs_of_tokens_of_different_texts(corpus: dict[str, Table]) -> None:
    frame = corpus["cone-index"].frame
    wanted = [between(at) for at in cone_keys(frame)]
    close(frame["between_texts_cosine"], [cosine for cosine, _ in wanted])
    assert list(frame["between_texts_pairs"]) == [pairs for _, pairs in wanted]


def test_cone_index_by_text_has_every_text(corpus: dict[str, Table]) -> None:
    frame = corpus["cone-index-texts"].frame
    wanted = [(line, values) for line, text in enumerate(CORPUS, start=1) for values in cone_values(text).values()]
    assert set(frame) == {"line", "part", "depth", *CONE_KEYS, *CONE_VALUES}
    assert list(frame["line"]) == [line for line, _ in wanted]
    assert cone_keys(frame) == [at for text in CORPUS for at in cone_values(text)]
    for name in CONE_VALUES:
        close(frame[name], [values[name] for _, values in wanted], name)


def test_the_cone_headline_has_each_depth_once(corpus: dict[str, Table]) -> None:
    headline = corpus["cone-index-depth"].frame
    places = [(depth, special) for depth in range(7) for special in (True, False)]
    assert [tuple(row) for row in headline[["depth", "special"]].to_numpy()] == places
    keys = [(depth, "layer_input") if depth < 6 else (5, "layer_output") for depth, _ in places]
    keys = [(*key, None, special) for key, (_, special) in zip(keys, places, strict=True)]
    for name in set(CONE_VALUES) & set(headline):
        close(headline[name], [statistics.fmean(cone_values(text)[at][name] for text in CORPUS) for at in keys], name)
    close(headline["between_texts_cosine"], [between(at)[0] for at in keys])
