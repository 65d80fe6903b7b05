"""Each formula worked by hand on a case small enough to follow on paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats
from torch import nn

from analyses.attention import Attention
from analyses.cone_index import ConeIndex
from analyses.kit.analysis import SettingsError
from analyses.kit.maths import entropy, entropy_of_shares, keys_to_reach
from analyses.kit.record import ForwardRecord, ModelShape, TokenizedText
from bertgeo_cli.recording import Recorder

LN2 = math.log(2)
FOUR = ("[CLS]", "cat", ".", "[SEP]")
SHAPE = ModelShape("bert", heads=1, width=4, head_width=4, weight_layer=(0,))


def text_of(labels: Sequence[str], words: Sequence[int | None] | None = None, line: int = 1) -> TokenizedText:
    """A text whose tokens are the given labels, a space between; a bracketed one is a special token."""
    special = tuple(label.startswith("[") for label in labels)
    text = " ".join(label for label in labels if not label.startswith("["))
    at, spans = 0, []
    for label, new in zip(labels, special, strict=True):
        spans.append((None, None) if new else (at, at + len(label)))
        at += 0 if new else len(label) + 1
    return TokenizedText(
        line=line,
        text=text,
        pair=None,
        ids=tuple(range(len(labels))),
        tokens=tuple(labels),
        labels=tuple(labels),
        start=tuple(start for start, _ in spans),
        end=tuple(end for _, end in spans),
        segment=(0,) * len(labels),
        word=tuple(words or (None if new else at for at, new in enumerate(special))),
        special=special,
        unknown=(False,) * len(labels),
        cls=0 if special[0] else None,
        sep=tuple(at for at, label in enumerate(labels) if label == "[SEP]"),
    )


def updated(analysis: Any, layers: dict[str, list[torch.Tensor]], text: TokenizedText) -> Any:
    """The state of an analysis that saw one text."""
    state = analysis.start(SHAPE, None)
    analysis.update(state, ForwardRecord(SHAPE, [text], layers))
    return state


def attention_frame(
    rows: Any, text: TokenizedText, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[dict[str, float], pd.DataFrame]:
    """The attention analysis of one head with these weights: its row of values, and the table of weights."""
    layers = {"attention": [torch.tensor(np.array(rows), dtype=dtype)[None, None]]}
    analysis = Attention(**options)
    result = analysis.finalize(updated(analysis, layers, text), ForwardRecord(SHAPE, [text], layers))
    tables = {table.name: table.frame for table in result.tables}
    return tables["attention-heads"].iloc[0].to_dict(), tables["attention-weights"]


def cone_frame(*texts: Any) -> pd.DataFrame:
    """The cone-index table of texts given as lists of vectors, the same at every point of one layer of one head."""
    analysis = ConeIndex()
    state = analysis.start(SHAPE, None)
    record = None
    for line, vectors in enumerate(texts, start=1):
        tensor = torch.tensor(vectors, dtype=torch.float32)[None]
        labels = [f"w{at}" for at in range(len(vectors))]
        layers = {"hidden_states": [tensor, tensor], "head_outputs": [tensor[:, None]], "attention_norm": [tensor]}
        record = ForwardRecord(SHAPE, [text_of(labels, line=line)], layers)
        analysis.update(state, record)
    return analysis.finalize(state, record if len(texts) == 1 else None).tables[0].frame


def cone_row(*texts: Any) -> dict[str, float]:
    """The values of the first row; every point holds the same vectors, so every row must hold the same values."""
    frame = cone_frame(*texts)
    values = frame.drop(columns=["layer", "depth", "point", "head", "special"])
    assert (values.nunique(dropna=False) == 1).all()
    return values.iloc[0].to_dict()


# Three tokens in four dimensions, W = I

X = ((1, 0, 1, 0), (0, 1, 0, 1), (1, 1, 0, 0))
PRODUCTS = ((2, 0, 1), (0, 2, 1), (1, 1, 2))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("scaling", [0.5, None])
def test_three_tokens_by_hand(backend: str, scaling: float | None) -> None:
    recorder = Recorder(frozenset({"scores", "attention", "head_outputs"}), backend)
    x = torch.tensor(X, dtype=torch.float64)[None, None]
    output, _ = recorder.attend(nn.Identity(), x, x, x, None, scaling=scaling)

    e, root = math.e, math.sqrt(math.e)
    first, last = e + 1 + root, root + root + e
    weights = [
        [e / first, 1 / first, root / first],
        [1 / first, e / first, root / first],
        [root / last, root / last, e / last],
    ]
    # A X: token 2 is (1, 1, 0, 0), so the first two columns get its weight besides their own token's.
    outputs = [[a + c, b + c, a, b] for a, b, c in weights]

    np.testing.assert_allclose(
        np.round(weights, 3), [[0.506, 0.186, 0.307], [0.186, 0.506, 0.307], [0.274, 0.274, 0.452]]
    )
    np.testing.assert_allclose(recorder.layers[0]["scores"][0][0, 0], np.array(PRODUCTS) / 2, rtol=1e-12)
    np.testing.assert_allclose(recorder.layers[0]["attention"][0][0, 0], weights, rtol=1e-12)
    np.testing.assert_allclose(recorder.layers[0]["head_outputs"][0][0, 0], outputs, rtol=1e-12)
    np.testing.assert_allclose(output[0, :, 0], outputs, rtol=1e-12)


# Entropy


def test_a_certain_row_has_entropy_zero_and_not_minus_zero() -> None:
    values = entropy(np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    assert values.tolist() == [0.0, 0.0]
    assert not np.signbit(values).any()


def test_half_and_half_has_entropy_ln_2() -> None:
    assert entropy(np.array([0.5, 0.5, 0.0])) == pytest.approx(LN2, rel=1e-15)


def test_entropy_in_the_table_is_the_mean_over_rows_and_never_minus_zero() -> None:
    certain, _ = attention_frame(np.eye(4), text_of(FOUR))
    assert math.copysign(1, certain["entropy"]) == 1
    assert (certain["entropy"], certain["cls_entropy"]) == (0, 0)
    rows = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4, [0, 0, 0.5, 0.5]]
    mixed, _ = attention_frame(rows, text_of(FOUR))
    assert mixed["entropy"] == pytest.approx((0 + LN2 + 2 * LN2 + LN2) / 4)
    assert mixed["entropy_share"] == pytest.approx((0 + 1 + 2 + 1) / 8)
    assert mixed["cls_entropy"] == 0


def entropies(rows: Any, special: Any = "keep") -> tuple[float, float]:
    """Entropy and entropy share of one head, straight from the state: a row a query, the first and last special."""
    labels = ["[CLS]", *("w" for _ in rows[2:]), "[SEP]"][: len(rows)]
    analysis = Attention(metrics="entropy,entropy_share", special=special)
    state = updated(analysis, {"attention": [torch.tensor(np.array(rows))[None, None]]}, text_of(labels))
    entropy_mean, share_mean = state.moments.mean[0, 0, -2:]
    return float(entropy_mean), float(share_mean)


def test_uniform_float32_rows_of_every_size_have_at_most_entropy_ln_n() -> None:
    for n in range(1, 301):
        value, share = entropies(np.full((n, n), np.float32(1) / np.float32(n)))
        assert value == pytest.approx(math.log(n), rel=1e-6)
        assert value <= math.log(n), n
        assert not share > 1, n


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, st.integers(2, 20).map(lambda n: (n, n)), elements=st.floats(-40, 40, width=32)))
def test_entropy_is_never_above_ln_keys_nor_below_zero(scores: np.ndarray) -> None:
    value, share = entropies(torch.from_numpy(scores).softmax(-1).numpy())
    assert 0 <= value <= math.log(len(scores))
    assert 0 <= share <= 1


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, st.integers(3, 20).map(lambda n: (n, n)), elements=st.sampled_from([0.0, 1.0, 200.0])))
def test_entropy_of_renormalised_rows_is_bounded_too(scores: np.ndarray) -> None:
    attention = torch.from_numpy(scores).softmax(-1).numpy()
    value, share = entropies(attention, "renormalise")
    nothing_left = not attention[1:-1, 1:-1].any()
    assert math.isnan(value) if nothing_left else 0 <= value <= math.log(len(scores) - 2)
    assert not share < 0
    assert not share > 1


def test_float16_attention_with_exact_zeros_has_finite_entropy() -> None:
    rows = torch.tensor([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4, [2**-24, 0, 0, 1]]).half()
    values, _ = attention_frame(rows.numpy(), text_of(FOUR), torch.float16)
    tiny = 2**-24 / (1 + 2**-24)
    last = -tiny * math.log(tiny) - (1 - tiny) * math.log(1 - tiny)
    assert values["entropy"] == pytest.approx((0 + LN2 + 2 * LN2 + last) / 4, rel=1e-12)
    assert all(math.isfinite(value) for name, value in values.items() if not name.startswith("mass_"))


# k90


def test_ten_keys_of_a_tenth_need_nine() -> None:
    assert keys_to_reach(np.full((1, 10), 0.1)).tolist() == [9]
    assert keys_to_reach(np.full((1, 10), np.float32(0.1), np.float64)).tolist() == [9]


@pytest.mark.parametrize("n", [1, 2, 3, 9, 10, 11, 19, 20, 30, 100, 128, 300])
def test_a_uniform_row_needs_nine_tenths_of_its_keys(n: int) -> None:
    wanted = -(-9 * n // 10)
    assert keys_to_reach(np.full((1, n), 1 / n)).tolist() == [wanted]
    values, _ = attention_frame(np.full((n, n), 1 / n), text_of(["[CLS]", *("w" for _ in range(n - 1))]))
    assert values["k90"] == wanted


def test_k90_counts_the_largest_first_wherever_they_stand() -> None:
    rows = [[0.95, 0.05, 0, 0], [0.05, 0.05, 0.05, 0.85], [0.1, 0.2, 0.3, 0.4], [0, 0.45, 0.45, 0.1]]
    assert keys_to_reach(np.array(rows)).tolist() == [1, 2, 3, 2]
    assert attention_frame(rows, text_of(FOUR))[0]["k90"] == 2


# Masses, distance, confidence: [CLS] cat . [SEP]

MATRIX = (
    (0.1, 0.2, 0.3, 0.4),
    (0.5, 0.25, 0.125, 0.125),
    (0.7, 0.1, 0.1, 0.1),
    (0.0, 0.0, 0.5, 0.5),
)


def test_masses_of_a_4_by_4_matrix() -> None:
    values, _ = attention_frame(MATRIX, text_of(FOUR))
    assert values["mass_cls"] == pytest.approx((0.1 + 0.5 + 0.7 + 0.0) / 4)
    assert values["mass_other"] == pytest.approx((0.2 + 0.25 + 0.1 + 0.0) / 4)
    assert values["mass_punctuation"] == pytest.approx((0.3 + 0.125 + 0.1 + 0.5) / 4)
    assert values["mass_sep"] == pytest.approx((0.4 + 0.125 + 0.1 + 0.5) / 4)


def test_self_previous_and_next_divide_by_n() -> None:
    values, _ = attention_frame(MATRIX, text_of(FOUR))
    assert values["mass_self"] == pytest.approx((0.1 + 0.25 + 0.1 + 0.5) / 4)
    assert values["mass_previous"] == pytest.approx((0.5 + 0.1 + 0.5) / 4)
    assert values["mass_next"] == pytest.approx((0.2 + 0.125 + 0.1) / 4)


def test_mean_distance_and_confidence_of_a_4_by_4_matrix() -> None:
    values, _ = attention_frame(MATRIX, text_of(FOUR))
    # row 0: .2 + 2 x .3 + 3 x .4; row 1: .5 + .125 + 2 x .125; row 2: 2 x .7 + .1 + .1; row 3: .5
    assert values["distance"] == pytest.approx((2.0 + 0.875 + 1.6 + 0.5) / 4)
    assert values["confidence"] == pytest.approx((0.4 + 0.5 + 0.7 + 0.5) / 4)


def test_dropped_special_tokens_leave_the_weights_as_they_were() -> None:
    values, weights = attention_frame(MATRIX, text_of(FOUR), special="drop")
    assert weights[["query", "key"]].to_numpy().tolist() == [[1, 1], [1, 2], [2, 1], [2, 2]]
    assert weights["weight"].tolist() == pytest.approx([0.25, 0.125, 0.1, 0.1])
    assert values["n"] == 2
    assert values["mass_cls"] == pytest.approx((0.5 + 0.7) / 2)
    assert values["mass_self"] == pytest.approx((0.25 + 0.1) / 2)
    terms = [0.25 * math.log(4) + 0.125 * math.log(8), 2 * 0.1 * math.log(10)]
    assert values["entropy"] == pytest.approx(sum(terms) / 2)
    assert math.isnan(values["cls_entropy"])
    assert math.isnan(values["k90"])


def test_renormalised_rows_sum_to_one_over_what_is_left() -> None:
    values, weights = attention_frame(MATRIX, text_of(FOUR), special="renormalise")
    assert weights["weight"].tolist() == pytest.approx([2 / 3, 1 / 3, 1 / 2, 1 / 2])
    assert values["mass_cls"] == pytest.approx((0.5 + 0.7) / 2)
    assert values["confidence"] == pytest.approx((2 / 3 + 1 / 2) / 2)


def test_one_token_between_special_ones_attends_to_itself_when_renormalised() -> None:
    rows = [[0.2, 0.5, 0.3], [0.25, 0.25, 0.5], [0.1, 0.1, 0.8]]
    values, weights = attention_frame(rows, text_of(["[CLS]", "cat", "[SEP]"]), special="renormalise")
    assert weights["weight"].tolist() == [1]
    assert [values[name] for name in ("entropy", "confidence", "distance", "k90", "mass_self")] == [0, 1, 0, 1, 1]
    assert math.isnan(values["entropy_share"])
    assert values["mass_sep"] == 0.5


@pytest.mark.parametrize("special", ["drop", "renormalise"])
def test_special_tokens_alone_leave_empty_cells_when_dropped(special: Any) -> None:
    values, weights = attention_frame([[0.5, 0.5], [0.25, 0.75]], text_of(["[CLS]", "[SEP]"]), special=special)
    assert len(weights) == 0
    assert all(math.isnan(value) for name, value in values.items() if name not in ("layer", "head", "texts"))


def test_the_mean_weight_is_refused_with_the_reason() -> None:
    for name in ("mean", "entropy,mean"):
        with pytest.raises(SettingsError, match=r"rows? sums? to 1"):
            Attention(metrics=name).start(SHAPE, None)


# Words: [CLS] play ##ing cat ##s [SEP]


def test_words_sum_over_key_pieces_and_average_over_query_pieces() -> None:
    rows = [
        [0.1, 0.2, 0.3, 0.1, 0.1, 0.2],
        [0.0, 0.5, 0.1, 0.2, 0.2, 0.0],
        [0.4, 0.0, 0.2, 0.1, 0.2, 0.1],
        [0.2, 0.2, 0.2, 0.2, 0.1, 0.1],
        [0.6, 0.0, 0.0, 0.0, 0.4, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    ]
    text = text_of(["[CLS]", "play", "ing", "cat", "s", "[SEP]"], words=[None, 0, 0, 1, 1, None])
    values, weights = attention_frame(rows, text, words=True)
    wanted = [
        [0.1, 0.5, 0.2, 0.2],
        [0.2, 0.4, 0.35, 0.05],
        [0.4, 0.2, 0.35, 0.05],
        [0.0, 0.0, 0.0, 1.0],
    ]
    assert weights["weight"].to_numpy().reshape(4, 4) == pytest.approx(np.array(wanted), abs=1e-7)
    assert values["mass_self"] == pytest.approx((0.1 + 0.4 + 0.35 + 1.0) / 4)
    assert values["distance"] == pytest.approx((0.5 + 0.4 + 0.6 + 0.2 + 0.35 + 0.1 + 0.8 + 0.2 + 0.05) / 4)


# Cone index


def test_orthogonal_tokens_have_index_root_n_and_mean_cosine_zero() -> None:
    row = cone_row([[3, 0, 0, 0], [0, 5, 0, 0], [0, 0, 0, 0.1]])
    assert row["cone_index"] == pytest.approx(math.sqrt(3))
    assert row["cone_per_token"] == pytest.approx(1 / math.sqrt(3))
    assert row["mean_cosine"] == pytest.approx(0, abs=1e-12)
    assert row["isotropic"] == pytest.approx(math.sqrt(3))


def test_equal_directions_have_index_n_and_mean_cosine_one() -> None:
    row = cone_row([[1, 2, 0, 0], [2, 4, 0, 0], [0.5, 1, 0, 0]])
    assert (row["cone_index"], row["cone_per_token"], row["mean_cosine"]) == pytest.approx((3, 1, 1))
    assert row["cone_per_token"] <= 1
    assert row["mean_cosine"] <= 1


def test_opposite_directions_have_index_zero_and_mean_cosine_minus_one() -> None:
    row = cone_row([[1, 1, 0, 0], [-3, -3, 0, 0]])
    assert (row["cone_index"], row["cone_per_token"], row["mean_cosine"]) == pytest.approx((0, 0, -1))


def test_a_zero_vector_has_no_direction_and_is_not_counted() -> None:
    row = cone_row([[1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
    assert row["n"] == 2
    assert row["cone_index"] == pytest.approx(math.sqrt(2))
    assert row["mean_cosine"] == pytest.approx(0, abs=1e-12)


def test_only_zero_vectors_give_empty_cells() -> None:
    row = cone_row([[0, 0, 0, 0], [0, 0, 0, 0]])
    assert row["n"] == 0
    assert all(math.isnan(row[name]) for name in ("cone_index", "cone_per_token", "mean_cosine"))


def test_a_text_without_directions_moves_neither_the_mean_index_nor_its_isotropic_baseline() -> None:
    row = cone_row([[0, 0, 0, 0]], [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    assert (row["cone_index"], row["isotropic"]) == pytest.approx((2, 2))
    assert (row["cone_per_token"], row["isotropic_per_token"]) == pytest.approx((0.5, 0.5))


def test_a_text_without_directions_has_no_pairs_with_other_texts() -> None:
    row = cone_row([[0, 0, 0, 0]], [[1, 0, 0, 0]], [[1, 1, 0, 0]])
    assert (row["between_texts_cosine"], row["between_texts_pairs"]) == pytest.approx((math.sqrt(0.5), 1))


def test_one_token_has_index_one_and_no_mean_cosine() -> None:
    row = cone_row([[0, 2, 0, 0]])
    assert (row["n"], row["cone_index"], row["cone_per_token"]) == (1, 1, 1)
    assert math.isnan(row["mean_cosine"])


def test_tokens_of_different_texts_are_compared_over_all_their_pairs() -> None:
    # (1,0,0,0), (0,1,0,0) with (1,1,0,0): cos 45 degrees twice; with (-1,0,0,0): -1 and 0; (1,1,0,0) with (-1,0,0,0).
    row = cone_row([[1, 0, 0, 0], [0, 1, 0, 0]], [[1, 1, 0, 0]], [[-1, 0, 0, 0]])
    half = math.sqrt(0.5)
    assert row["between_texts_pairs"] == 5
    assert row["between_texts_cosine"] == pytest.approx((half + half - 1 + 0 - half) / 5)
    assert row["cone_index"] == pytest.approx((math.sqrt(2) + 1 + 1) / 3)


def test_special_tokens_are_left_out_where_special_is_false() -> None:
    tensor = torch.tensor([[[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0]]])
    layers = {"hidden_states": [tensor, tensor], "head_outputs": [tensor[:, None]], "attention_norm": [tensor]}
    text = text_of(["[CLS]", "a", "cat", "[SEP]"])
    state = updated(ConeIndex(), layers, text)
    frame = ConeIndex().finalize(state, ForwardRecord(SHAPE, [text], layers)).tables[0].frame
    assert frame[frame["special"]]["cone_index"].tolist() == pytest.approx([math.sqrt(8)] * 5)
    assert frame[~frame["special"]]["cone_index"].tolist() == pytest.approx([2] * 5)


def test_the_entropy_of_shares_is_scipys_whatever_rows_sum_to_and_with_weights_of_zero() -> None:
    weights = np.random.default_rng(0).gamma(0.5, size=(5, 4, 9)) * np.array([1e-3, 1.0, 7.0, 1e4])[:, None]
    weights[0, :, :4] = 0.0
    for rows in (weights, weights[1:]):
        np.testing.assert_allclose(entropy_of_shares(rows), stats.entropy(rows, axis=-1), rtol=1e-12)
    assert entropy_of_shares(weights)[1:].tobytes() == entropy_of_shares(weights[1:]).tobytes()
