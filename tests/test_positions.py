"""Is order seen: exact permutations in every family, planted order, by hand, and against plain float64 passes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import tiny
import torch
from command import Run, assert_error, content

from analyses.kit.analysis import SettingsError
from analyses.kit.position_geometry import SPECTRUM, Places, geometry_tables
from analyses.kit.position_tables import WITH, WITHOUT, Reordering, positions_result, verdict
from analyses.kit.record import TokenizedText
from analyses.kit.word_order import DIFFERENCES, differences, reordered, shuffled, swapped, token_differences
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.families import position_vectors
from bertgeo_cli.models import LoadedModel, in_float64, load_model
from bertgeo_cli.recording import record
from bertgeo_cli.studies.positions import _states
from bertgeo_cli.surgery import without_positions

TEXT = "the old cats sat on a mat by the river"
STATES = frozenset({"hidden_states"})


def encode(loaded: LoadedModel, text: str = TEXT, pair: str | None = None, **how: Any) -> TokenizedText:
    return Encoder(loaded.tokenizer, loaded.max_tokens, **how).encode(text, pair)


def read(loaded: LoadedModel, text: TokenizedText, order: Sequence[int]) -> Reordering:
    model = in_float64(loaded)
    pair = [text, reordered(text, order)]
    states = {name: _states(model, pair, name, "eager") for name in (WITHOUT, WITH)}
    return Reordering(text, tuple(order), states, "")


def largest(seen: Reordering, positions: str) -> np.ndarray:
    """The largest relative difference at every depth, from the definition."""
    given, other = seen.states[positions]
    return np.array(
        [np.abs(b - a[list(seen.order)]).max() / np.abs(a).max() for a, b in zip(given, other, strict=True)]
    )


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny.tiny_family(request.param, tmp_path_factory.mktemp("models") / request.param)
    return load_model(str(folder), device="cpu", offline=True)


# Without positions outputs are permuted, and nothing else


@pytest.mark.parametrize("how", ["swap", "shuffle", "any"])
def test_without_positions_every_family_permutes_its_outputs_exactly(family: LoadedModel, how: str) -> None:
    text = encode(family)
    any_order = tuple(np.random.default_rng(7).permutation(len(text)).tolist())  # special tokens move too
    order = {
        "swap": lambda: swapped(text, "cats,river"),
        "shuffle": lambda: shuffled(text, 0),
        "any": lambda: any_order,
    }
    seen = read(family, text, order[how]())
    assert largest(seen, WITHOUT).max() < 1e-13
    assert largest(seen, WITH).min() > 1e-3
    assert "proved to 1e-06" in verdict({name: seen.measured(name) for name in seen.states})


def test_a_pair_is_permuted_with_its_segments(family: LoadedModel) -> None:
    text = encode(family, "the old cats sat", "a dog ran to the river")
    seen = read(family, text, swapped(text, "cats,dog"))
    assert largest(seen, WITHOUT).max() < 1e-13
    assert largest(seen, WITH).min() > 1e-3


def test_without_positions_minilm_is_a_plain_float64_pass_without_them(minilm: LoadedModel) -> None:
    seen = read(minilm, encode(minilm), shuffled(encode(minilm), 0))
    tokens = reference.tokenize(TEXT)
    for name, positions in ((WITHOUT, False), (WITH, True)):
        for at, order in enumerate((range(len(tokens)), seen.order)):
            ids, segments = ([values[old] for old in order] for values in (tokens.ids, tokens.segments))
            expected = reference.forward(ids, segments, positions=positions)["hidden_states"]
            np.testing.assert_allclose(seen.states[name][at], expected, atol=1e-9)


def test_a_pass_without_positions_leaves_nothing_behind(family: LoadedModel) -> None:
    text = encode(family)
    before = record(family, [text], needs=STATES).hidden_states
    with without_positions(family):
        inside = record(family, [text], needs=STATES).hidden_states
    assert not torch.allclose(inside, before)
    with pytest.raises(IndexError), without_positions(family):
        family.model(input_ids=torch.tensor([[10**6]]))
    assert torch.equal(record(family, [text], needs=STATES).hidden_states, before)


def test_the_double_is_a_copy(tiny_model: LoadedModel) -> None:
    double = in_float64(tiny_model)
    assert {parameter.dtype for parameter in double.model.parameters()} == {torch.float64}
    assert {parameter.dtype for parameter in tiny_model.model.parameters()} == {torch.float32}
    assert (double.dtype, tiny_model.dtype) == ("float64", "float32")


# Order that is seen in another way must be found


@pytest.fixture
def planted(tiny_folder: Path) -> LoadedModel:
    """A tiny model of the test's own, to be changed."""
    return load_model(str(tiny_folder), device="cpu", offline=True)


def causal(module: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
    tokens = (arguments[0] if arguments else keywords["hidden_states"]).shape[1] // 2  # two texts lie end to end
    mask = torch.full((1, 1, tokens, tokens), -1e9, dtype=torch.float64).triu(1)
    return arguments, {**keywords, "attention_mask": mask}


def test_a_causal_mask_fails_the_proof(planted: LoadedModel) -> None:
    for block in planted.family.blocks(planted.model):
        block.get_submodule("attention.self").register_forward_pre_hook(causal, with_kwargs=True)
    seen = read(planted, encode(planted), swapped(encode(planted), "cats,river"))
    assert largest(seen, WITHOUT)[0] == 0
    assert largest(seen, WITHOUT)[1:].min() > 1e-3
    told = verdict({name: seen.measured(name) for name in seen.states})
    assert told.startswith("Not proved")
    assert "proved to" not in told


def test_a_trace_of_the_place_in_the_embedding_fails_the_proof(planted: LoadedModel) -> None:
    def trace(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 1e-5 * torch.arange(output.shape[1])[:, None]

    planted.model.get_submodule("embeddings").register_forward_hook(trace)
    seen = read(planted, encode(planted), swapped(encode(planted), "cats,river"))
    assert verdict({name: seen.measured(name) for name in seen.states}).startswith("Not proved")


def test_a_model_without_positions_of_its_own_sees_no_order(planted: LoadedModel) -> None:
    planted.model.get_submodule("embeddings.position_embeddings").weight.zero_()
    seen = read(planted, encode(planted), swapped(encode(planted), "cats,river"))
    assert verdict({name: seen.measured(name) for name in seen.states}).startswith("Order is not seen here")


@pytest.mark.parametrize(
    ("without", "with_them", "told"),
    [
        (1e-6, 0.1, "Order is seen only"),
        (1.1e-6, 0.1, "Not proved"),
        (np.nan, 0.1, "Not proved"),
        (0, 1e-6, "not seen"),
    ],
)
def test_the_verdict_is_decided_by_the_worst_depth(without: float, with_them: float, told: str) -> None:
    found = {}
    for name, value in ((WITHOUT, without), (WITH, with_them)):
        found[name] = np.zeros((3, len(DIFFERENCES)))
        found[name][1, list(DIFFERENCES).index("largest_relative")] = value
    assert told in verdict(found)


# Orders


def tokens_of(text: TokenizedText, order: Sequence[int]) -> list[str]:
    return [text.tokens[at] for at in order]


def test_all_pieces_of_a_word_move(tiny_model: LoadedModel) -> None:
    text = encode(tiny_model, "the playing dog sat")
    assert list(text.tokens) == ["[CLS]", "the", "play", "##ing", "dog", "sat", "[SEP]"]
    order = swapped(text, "sat, the")
    assert tokens_of(text, order) == ["[CLS]", "sat", "play", "##ing", "dog", "the", "[SEP]"]
    order = swapped(text, "Sat,playing")
    assert order == (0, 1, 5, 4, 2, 3, 6)
    assert tokens_of(text, order) == ["[CLS]", "the", "sat", "dog", "play", "##ing", "[SEP]"]


def test_the_first_occurrence_moves_and_marks_do_not_count(tiny_model: LoadedModel) -> None:
    text = encode(tiny_model, "the cat, the dog.")
    assert tokens_of(text, swapped(text, "the,DOG")) == ["[CLS]", "dog", "cat", ",", "the", "the", ".", "[SEP]"]
    assert tokens_of(text, swapped(text, "cat,.")) == ["[CLS]", "the", ".", ",", "the", "dog", "cat", "[SEP]"]


def test_a_reordered_text_keeps_what_is_said_of_its_tokens(tiny_model: LoadedModel) -> None:
    text = encode(tiny_model, "the cat sat", "a dog ran")
    found = reordered(text, swapped(text, "cat,dog"))
    assert list(found.tokens) == ["[CLS]", "the", "dog", "sat", "[SEP]", "a", "cat", "ran", "[SEP]"]
    assert found.segment == (0, 0, 1, 0, 0, 1, 0, 1, 1)
    assert (found.cls, found.sep) == (0, (4, 8))
    assert found.ids == tuple(text.ids[at] for at in (0, 1, 6, 3, 4, 5, 2, 7, 8))
    assert found.labels == found.tokens
    back = reordered(found, [0, 1, 6, 3, 4, 5, 2, 7, 8])
    assert back == text
    moved = reordered(text, [4, *range(4), *range(5, 9)])
    assert (moved.cls, moved.sep) == (1, (0, 8))


@pytest.mark.parametrize("seed", range(8))
def test_a_shuffle_keeps_special_tokens_texts_and_words(tiny_model: LoadedModel, seed: int) -> None:
    text = encode(tiny_model, "the playing cat sat [MASK] by", "a dog jumped", special_tokens_in_text=True)
    order = shuffled(text, seed)
    found = reordered(text, order)
    assert sorted(order) == list(range(len(text)))
    assert found.ids != text.ids
    assert found.segment == text.segment
    assert found.sep == text.sep
    for part in (0, 1):
        words, special = [], []
        for one in (text, found):
            own = [at for at in range(len(one)) if one.segment[at] == part]
            words.append(Counter(one.tokens[at] for at in own))
            special.append([one.tokens[at] for at in own if one.special[at]])
        assert words[0] == words[1]
        assert special[0] == special[1]
    at = found.tokens.index("play")
    assert found.tokens[at + 1] == "##ing"
    assert shuffled(text, seed) == order


def test_seeds_give_different_orders_but_never_the_same_text(tiny_model: LoadedModel) -> None:
    text = encode(tiny_model)
    assert len({shuffled(text, seed) for seed in range(5)}) == 5
    two = encode(tiny_model, "cat cat cat dog")
    for seed in range(20):
        assert reordered(two, shuffled(two, seed)).ids != two.ids


@pytest.mark.parametrize(
    ("words", "told", "hint"),
    [
        ("cats,horse", "the text has no word 'horse'", "Its words: the old cats sat on a mat by river"),
        ("cats", "'cats' is not two words", "--swap dog,man"),
        ("cats,", "is not two words", "--swap dog,man"),
        ("a,cats,old", "is not two words", "--swap dog,man"),
        ("the,The", "exchanges equal words", "Its words"),
        ("[CLS],the", "no word '[CLS]'", "Its words"),
    ],
)
def test_words_that_cannot_be_exchanged(tiny_model: LoadedModel, words: str, told: str, hint: str) -> None:
    with pytest.raises(SettingsError) as raised:
        swapped(encode(tiny_model), words)
    assert told in str(raised.value)
    assert hint in raised.value.hint


def test_a_text_of_equal_words_has_no_other_order(tiny_model: LoadedModel) -> None:
    for text in (encode(tiny_model, "cat cat"), encode(tiny_model, "cat"), encode(tiny_model, "cat", "dog")):
        with pytest.raises(SettingsError, match="no two different words"):
            shuffled(text, 0)


# What is measured


def test_differences_are_those_of_plain_loops() -> None:
    draw = np.random.default_rng(0)
    given, other, order = draw.normal(size=(2, 4, 3)), draw.normal(size=(2, 4, 3)), [2, 0, 3, 1]
    cosine, distance = token_differences(given, other, order)
    for depth, found in enumerate(differences(given, other, order)):
        apart, cosines = [], []
        for new, old in enumerate(order):
            h, own = other[depth, new], given[depth, old]
            apart.append(h - own)
            cosines.append(h @ own / math.sqrt((h @ h) * (own @ own)))
            assert cosine[depth, new] == pytest.approx(cosines[-1])
            assert distance[depth, new] == pytest.approx(np.linalg.norm(h - own) / np.linalg.norm(own))
        most = np.abs(apart).max()
        whole = np.linalg.norm(np.ravel(apart)) / np.linalg.norm(given[depth])
        expected = [most, most / np.abs(given[depth]).max(), whole, np.mean(cosines), min(cosines)]
        assert found.tolist() == pytest.approx(expected)


def test_tables_say_which_token_stands_where(tiny_model: LoadedModel) -> None:
    text = encode(tiny_model, "the cat sat")
    seen = read(tiny_model, text, swapped(text, "cat,sat"))
    result = positions_result(seen, Places(position_vectors(tiny_model.model).numpy()))
    tables = {table.name: table.frame for table in result.tables}
    depths = tables["positions-depths"].set_index(["positions", "depth"])
    for name in (WITHOUT, WITH):
        assert depths.loc[name]["largest_relative"].tolist() == pytest.approx(largest(seen, name).tolist())
    tokens = tables["positions-tokens"].query("depth == 1")
    assert tokens["text"].tolist() == ["[CLS]", "the", "sat", "cat", "[SEP]"]
    assert tokens["was"].tolist() == [0, 1, 3, 2, 4]
    given, other = seen.states[WITH]
    assert tokens["cosine"].tolist()[2] == pytest.approx(
        float(np.dot(other[1, 2], given[1, 3]) / np.linalg.norm(other[1, 2]) / np.linalg.norm(given[1, 3]))
    )
    # At depth 0 a token at its old place is what it was.
    first = tables["positions-tokens"].query("depth == 0")["distance"].to_numpy()
    assert first[[0, 1, 4]].tolist() == [0, 0, 0]
    assert first[[2, 3]].min() > 0.01


# Geometry


def test_places_are_the_rows_that_tokens_can_have(family: LoadedModel) -> None:
    config: Any = family.model.config
    weight = family.model.state_dict()["embeddings.position_embeddings.weight"].double()
    first = config.pad_token_id + 1 if config.model_type in ("roberta", "xlm-roberta", "camembert") else 0
    found = position_vectors(family.model)
    assert torch.equal(found, weight[first:])
    assert found.shape == (
        family.family.usable_positions(config),
        24 if config.model_type in ("electra", "albert") else 48,
    )
    embedding = family.model.get_submodule("embeddings.position_embeddings")
    rows: list[torch.Tensor] = []
    handle = embedding.register_forward_hook(lambda module, arguments, output: rows.append(output))
    record(family, [encode(family)], needs=STATES)
    handle.remove()
    assert torch.equal(rows[0].double().reshape(-1, found.shape[1]), found[: len(encode(family))])


def test_the_geometry_is_that_of_plain_loops() -> None:
    vectors = np.random.default_rng(0).normal(size=(9, 5)) + 1.0
    tables = {table.name: table.frame for table in geometry_tables(Places(vectors))}
    values = tables["positions-geometry"].set_index("vectors")
    spectrum = tables["positions-spectrum"].set_index("vectors")
    for name, own in (("raw", vectors), ("centred", vectors - vectors.mean(axis=0))):
        cosines = [[a @ b / math.sqrt((a @ a) * (b @ b)) for b in own] for a in own]
        nearest = [max((j for j in range(9) if j != i), key=lambda j, i=i: cosines[i][j]) for i in range(9)]
        sigma = np.linalg.svd(own, compute_uv=False)
        shares = sigma**2 / (sigma**2).sum()
        expected = {
            "participation_ratio": (sigma**2).sum() ** 2 / (sigma**4).sum(),
            "directions_90": next(count for count in range(1, 6) if shares[:count].sum() >= 0.9),
            "first_share": shares[0],
            "adjacent_share": np.mean([abs(i - j) == 1 for i, j in enumerate(nearest)]),
            "adjacent_cosine": np.mean([cosines[i][i + 1] for i in range(8)]),
            "mean_cosine": np.mean([cosines[i][j] for i in range(9) for j in range(9) if i != j]),
        }
        assert values.loc[name, list(SPECTRUM)].to_dict() == pytest.approx(expected)
        assert spectrum.loc[name, "singular_value"].tolist() == pytest.approx(sigma.tolist(), abs=1e-7)
        assert spectrum.loc[name, "cumulative_share"].tolist() == pytest.approx(np.cumsum(shares).tolist())
        apart = tables["positions-distances"].query("vectors == @name").set_index("apart")
        for distance in range(1, 9):
            band = [cosines[i][i + distance] for i in range(9 - distance)]
            assert apart.loc[distance, "cosine"] == pytest.approx(np.mean(band))
            assert apart.loc[distance, "cosine_std"] == pytest.approx(np.std(band), abs=1e-12)
        if name == "raw":
            found = tables["positions-neighbours"]
            assert found["nearest"].tolist() == nearest
            assert found["apart"].tolist() == [abs(i - j) for i, j in enumerate(nearest)]
            assert found["cosine"].tolist() == pytest.approx([cosines[i][j] for i, j in enumerate(nearest)])


def test_places_on_a_circle_lie_in_two_directions_and_beside_each_other() -> None:
    angles = 2 * np.pi * np.arange(12) / 12
    places = Places(np.column_stack([np.cos(angles), np.sin(angles), np.zeros(12)]))
    found = dict(zip(SPECTRUM, places.values, strict=True))
    assert found["participation_ratio"] == pytest.approx(2)
    assert found["directions_90"] == 2
    assert found["first_share"] == pytest.approx(0.5)
    assert found["adjacent_cosine"] == pytest.approx(math.cos(math.pi / 6))
    assert found["mean_cosine"] == pytest.approx(-1 / 11)
    assert places.by_distance()[0].tolist() == pytest.approx(np.cos(angles[1:]).tolist())


def test_a_zero_row_has_no_direction_and_no_neighbour() -> None:
    places = Places(np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]))
    assert places.nearest.tolist() == [2, -1, 0]
    frame = geometry_tables(places)[2].frame
    assert frame["nearest"].isna().tolist() == [False, True, False]
    assert frame["cosine"].tolist() == pytest.approx([math.sqrt(0.5), np.nan, math.sqrt(0.5)], nan_ok=True)
    assert dict(zip(SPECTRUM, places.values, strict=True))["adjacent_share"] == 0


# The command


def test_the_command_proves_it_on_minilm_and_draws(run: Run, tmp_path: Path) -> None:
    done = run("positions", "The dog bit the man.", "--swap", "dog,man", "-o", "out")
    assert done.exit_code == 0, done.output
    assert "Order is seen only through positions: proved to 1e-06 on this text, in float64." in done.stderr
    depths = pd.read_csv(tmp_path / "out" / "positions-depths.csv").set_index("positions")
    assert depths.loc[WITHOUT, "largest_relative"].max() < 1e-13
    assert depths.loc[WITH, "largest_relative"].min() > 0.01
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == {
        "positions-order",
        "positions-tokens",
        "positions-geometry",
    }
    assert len(pd.read_csv(tmp_path / "out" / "positions-neighbours.csv")) == 512
    assert content(tmp_path / "out")["settings"]["swap"] == "dog,man"


def test_words_are_shuffled_unless_two_are_named(fast: Run, tmp_path: Path) -> None:
    for folder, arguments in (("plain", ()), ("asked", ("--shuffle",)), ("other", ("--seed", "5"))):
        assert fast("positions", TEXT, *arguments, "-o", folder).exit_code == 0
    plain, asked, other = (
        (tmp_path / folder / "positions-tokens.csv").read_text() for folder in ("plain", "asked", "other")
    )
    assert plain == asked != other


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((TEXT, "--swap", "cats,horse"), "the text has no word 'horse'"),
        ((TEXT, "--swap", "cats,river", "--shuffle"), "--swap and --shuffle were both given"),
        (("cat",), "no two different words"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_two_lines(fast: Run, arguments: tuple[str, ...], told: str) -> None:
    assert_error(fast("positions", *arguments), 2, told)


def test_a_half_precision_model_is_read_in_float64_all_the_same(tiny_folder: Path) -> None:
    loaded = load_model(str(tiny_folder), device="cpu", offline=True, dtype="bfloat16")
    text = encode(loaded)
    assert largest(read(loaded, text, shuffled(text, 0)), WITHOUT).max() < 1e-13
    assert loaded.dtype == "bfloat16"
