"""`bertgeo mlm`: its formulas by other hands, transformers' own model in plain loops, and how texts are masked."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import tiny
import torch
import transformers
from command import Run, assert_error, content, files_of
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from trained import SENTENCES, Trained

from analyses.kit.masking import KEPT, MASKED, SWAPPED, WAYS, Masking, predictable
from analyses.kit.prediction import Leading, Scores, joined
from analyses.kit.record import TokenizedText
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.task_heads import MASKED_LM

TEXT = "The fisherman sat down by the river bank."
LOGITS = arrays(np.float64, (3, 7), elements=st.floats(-30, 30))
TRUTH = torch.tensor([0, 3, 6])


def table(folder: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(folder / f"{name}.csv", keep_default_na=False, na_values=[""])


def ok(run: Run, *arguments: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 0, done.output


@pytest.fixture
def lm(run: Run, masked_lm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line with the trained model and without figures."""
    monkeypatch.setenv("BERTGEO_MODEL", str(masked_lm_folder))
    monkeypatch.setenv("BERTGEO_FIGURES", "none")
    return run


@pytest.fixture(scope="module")
def model(masked_lm_folder: Path) -> LoadedModel:
    return load_model(str(masked_lm_folder), device="cpu")


# Formulas


@given(LOGITS)
def test_cross_entropy_is_that_of_torch_and_of_scipy(logits: np.ndarray) -> None:
    scores = Scores.of(torch.from_numpy(logits), TRUTH)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    y = np.eye(7)[TRUTH.numpy()]
    by_torch = torch.nn.functional.cross_entropy(torch.from_numpy(logits), TRUTH, reduction="none").numpy()
    np.testing.assert_allclose(scores.surprisal, by_torch, atol=1e-12)
    np.testing.assert_allclose(scores.divergence, scipy.stats.entropy(y, p, axis=1), atol=1e-9)
    np.testing.assert_allclose(scores.surprisal, scores.divergence + scipy.stats.entropy(y, axis=1), atol=1e-12)
    np.testing.assert_allclose(scores.entropy, scipy.stats.entropy(p, axis=1), atol=1e-9)
    np.testing.assert_allclose(scores.probability, p[np.arange(3), TRUTH], atol=1e-12)
    assert scores.rank.tolist() == [1 + sum(row > row[true]) for row, true in zip(logits, TRUTH.tolist(), strict=True)]


@given(LOGITS)
def test_the_gradient_is_that_of_autograd_and_its_norm_has_a_closed_form(logits: np.ndarray) -> None:
    z = torch.from_numpy(logits.copy()).requires_grad_()
    torch.nn.functional.cross_entropy(z, TRUTH, reduction="sum").backward()
    assert z.grad is not None
    norms = z.grad.norm(dim=1).numpy()
    scores, leading = Scores.of(z.detach(), TRUTH), Leading.of(z.detach(), TRUTH, 7)
    np.testing.assert_allclose(scores.gradient, norms, atol=1e-12)
    np.testing.assert_allclose(scores.gradient_closed, norms, atol=1e-7)  # which loses digits near 0
    np.testing.assert_allclose(leading.gradient, np.take_along_axis(z.grad.numpy(), leading.ids, axis=1), atol=1e-12)
    np.testing.assert_allclose(
        leading.steepest, np.take_along_axis(z.grad.numpy(), leading.steepest_ids, 1), atol=1e-12
    )
    assert (np.diff(np.abs(leading.steepest), axis=1) <= 0).all()
    assert (np.diff(leading.probability, axis=1) <= 0).all()


def test_a_prediction_by_hand() -> None:
    scores = Scores.of(torch.tensor([[1.0, 2.0, 4.0, 1.0]]).log(), torch.tensor([1]))
    assert scores.probability.tolist() == pytest.approx([0.25])
    assert scores.surprisal.tolist() == pytest.approx([2 * math.log(2)])
    assert scores.entropy.tolist() == pytest.approx([1.75 * math.log(2)])
    assert scores.rank.tolist() == [2]
    assert scores.gradient.tolist() == pytest.approx([math.sqrt((1 + 36 + 16 + 1) / 64)])


def test_an_almost_sure_prediction_keeps_its_digits() -> None:
    scores = Scores.of(torch.tensor([[40.0, 0.0]]), torch.tensor([0]))
    assert scores.gradient.tolist() == pytest.approx([math.sqrt(2) * math.exp(-40)], rel=1e-9)
    assert Scores.of(torch.tensor([[0.0, 900.0]]), torch.tensor([0])).divergence.tolist() == [900.0]


def test_an_unknown_truth_leaves_the_uncertainty_alone() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 1.0]])
    scores = joined([Scores.of(logits[:1], None), Scores.of(logits[1:], None)])
    np.testing.assert_array_equal(scores.entropy, Scores.of(logits, torch.tensor([0, 0])).entropy)
    assert np.isnan(scores.surprisal).all()
    assert Leading.of(logits, None, 2).ids.tolist() == [[1, 0], [0, 1]]


# What is masked


def encode(model: LoadedModel, text: str, pair: str | None = None, **options: Any) -> TokenizedText:
    return Encoder(model.tokenizer, model.max_tokens, **options).encode(text, pair)


def masking(model: LoadedModel, **changes: Any) -> Masking:
    return Masking(model.tokenizer.mask_token_id, range(5, len(model.tokenizer)), **changes)


def test_each_masks_every_token_once_and_no_special_one(model: LoadedModel) -> None:
    text, mask = encode(model, TEXT, "It was old."), model.tokenizer.mask_token_id
    probes = masking(model).each(text)
    assert [probe.positions for probe in probes] == [(at,) for at, special in enumerate(text.special) if not special]
    for probe in probes:
        changed = [at for at in range(len(text)) if probe.read.ids[at] != text.ids[at]]
        assert changed == list(probe.positions)
        assert probe.read.ids[changed[0]] == mask
        assert probe.text is text


def test_random_draws_a_share_and_follows_the_text_alone(model: LoadedModel) -> None:
    for sentence in SENTENCES:
        text = encode(model, sentence)
        (probe,) = masking(model, share=0.15, seed=3).random(text)
        there = predictable(text)
        assert len(probe.positions) == max(1, round(0.15 * len(there)))
        assert set(probe.positions) <= set(there)
        assert masking(model, share=0.15, seed=3).random(text) == [probe]
        untouched = set(range(len(text))) - set(probe.positions)
        assert all(probe.read.ids[at] == text.ids[at] for at in untouched)
    text = encode(model, TEXT)
    drawn = {masking(model, share=0.3, seed=seed).random(text)[0].positions for seed in range(20)}
    assert len(drawn) > 10
    alike = [encode(model, " ".join(["a"] * 20 + [mark])) for mark in "bcdefghijk"]
    assert len({masking(model).random(text)[0].positions for text in alike}) > 5


def test_random_masks_as_bert_was_trained(model: LoadedModel) -> None:
    fates: Counter[str] = Counter()
    mask = model.tokenizer.mask_token_id
    for seed in range(200):
        text = encode(model, TEXT)
        (probe,) = masking(model, share=0.5, seed=seed).random(text)
        fates.update(probe.inputs)
        for at, fate in zip(probe.positions, probe.inputs, strict=True):
            read, true = probe.read.ids[at], text.ids[at]
            assert {MASKED: read == mask, SWAPPED: read >= 5, KEPT: read == true}[fate]
    total = fates.total()
    # Within four standard deviations of the binomial.
    for fate, share in ((MASKED, 0.8), (SWAPPED, 0.1), (KEPT, 0.1)):
        assert abs(fates[fate] / total - share) < 4 * math.sqrt(share * (1 - share) / total)


def test_random_may_mask_all_that_it_draws(model: LoadedModel) -> None:
    (probe,) = masking(model, share=1.0, corruption="mask").random(encode(model, TEXT))
    assert set(probe.inputs) == {MASKED}
    assert len(probe.positions) == len(predictable(encode(model, TEXT)))


@pytest.mark.parametrize("way", WAYS)
def test_a_text_of_special_tokens_alone_has_nothing_to_predict(way: str, model: LoadedModel) -> None:
    assert WAYS[way](masking(model), encode(model, "[SEP]", special_tokens_in_text=True)) == []


# Training


def test_the_loss_falls_while_the_model_is_trained(masked_lm: Trained) -> None:
    first, last = np.mean(masked_lm.losses[:20]), np.mean(masked_lm.losses[-20:])
    assert masked_lm.losses[0] == pytest.approx(math.log(500), abs=0.5)  # it knows nothing of 500 entries
    assert last < first - 1.5


def test_a_trained_model_is_less_perplexed_by_language_than_by_noise(lm: Run, tmp_path: Path) -> None:
    (tmp_path / "noise.txt").write_text("\n".join(" ".join(line.split()[::-1]) for line in SENTENCES[:20]))
    (tmp_path / "language.txt").write_text("\n".join(SENTENCES[:20]))
    for name in ("noise", "language"):
        ok(lm, "mlm", "--corpus", f"{name}.txt", "-o", name)
    language, noise = (table(tmp_path / name, "mlm")["pseudo_perplexity"][0] for name in ("language", "noise"))
    assert 1 < language < 150 < 500  # which all entries alike would give
    assert noise > 2 * language


# Against the class of transformers


def by_transformers(folder: Path, ids: list[int], *, attend_to_itself: bool = False) -> np.ndarray:
    """ln p (position, vocabulary) of every position between the special tokens, masked one at a time, in float64."""
    whole = transformers.BertForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    rows = []
    for at in range(1, len(ids) - 1):
        read = list(ids)
        read[at] = ids[at] if attend_to_itself else 4
        with torch.no_grad():
            rows.append(whole(torch.tensor([read])).logits[0, at].double().numpy())
    logits = np.array(rows)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("way", ["each", "none"])
def test_every_number_of_a_text(way: str, lm: Run, masked_lm_folder: Path, model: LoadedModel, tmp_path: Path) -> None:
    ok(lm, "mlm", TEXT, "--mask", way, "--top", "3", "-o", "report")
    ids = list(encode(model, TEXT).ids)
    log_p = by_transformers(masked_lm_folder, ids, attend_to_itself=way == "none")
    true, own = np.array(ids[1:-1]), np.arange(len(ids) - 2)
    tokens = table(tmp_path / "report", "mlm-tokens")
    surprisal = -log_p[own, true]
    assert tokens["token"].tolist() == list(range(1, len(ids) - 1))
    assert tokens["id"].tolist() == true.tolist()
    entropy = -(np.exp(log_p) * log_p).sum(axis=1)
    expected = {
        "probability": np.exp(-surprisal),
        "cross_entropy": surprisal,
        "bits": surprisal / np.log(2),
        "kl": surprisal,
        "gradient": np.linalg.norm(np.exp(log_p) - np.eye(log_p.shape[1])[true], axis=1),
        "entropy": entropy,
        "uncertainty": entropy / np.log(2),
        "uncertainty_share": entropy / np.log(log_p.shape[1]),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(tokens[name], values, atol=1e-5, err_msg=name)
    assert tokens["rank"].tolist() == [1 + (row > row[at]).sum() for row, at in zip(log_p, true, strict=True)]
    top = table(tmp_path / "report", "mlm-top")
    best = np.argsort(-log_p, axis=1)[:, :3]
    assert top["id"].tolist() == best.ravel().tolist()
    assert top["piece"].tolist() == model.tokenizer.convert_ids_to_tokens(best.ravel().tolist())
    np.testing.assert_allclose(top["probability"], np.exp(np.take_along_axis(log_p, best, 1)).ravel(), atol=1e-5)
    steepest = table(tmp_path / "report", "mlm-gradient").query("place == 0")
    assert steepest["id"].tolist() == true.tolist()  # p < 1/2 here or p - y of the truth is the largest
    headline = table(tmp_path / "report", "mlm").iloc[0]
    name = "pseudo_perplexity" if way == "each" else "perplexity"
    assert headline[name] == pytest.approx(math.exp(surprisal.mean()), rel=1e-5)
    assert headline["first"] == pytest.approx((tokens["rank"] == 1).mean())
    assert (headline["tokens"], headline["predictions"]) == (len(ids), len(ids) - 2)
    assert headline["uncertainty"] == pytest.approx(entropy.mean() / math.log(2), rel=1e-5)
    assert headline["uncertainty_share"] == pytest.approx(entropy.mean() / math.log(log_p.shape[1]), rel=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_predicts_what_its_class_in_transformers_does(family: str, fast: Run, tmp_path: Path) -> None:
    name = MASKED_LM.names[family].model_class
    folder = tiny.tiny_head(name, family, tmp_path / "model")
    text = "the cat sat on the mat"
    ok(fast, "mlm", text, "--model", str(folder), "-o", "report")
    whole = getattr(transformers, name).from_pretrained(folder, attn_implementation="eager").eval()
    loaded = load_model(str(folder))
    tokens = table(tmp_path / "report", "mlm-tokens")
    ids = list(encode(loaded, text).ids)
    assert len(tokens) == len(ids) - 2
    for at, found in zip(tokens["token"], tokens["cross_entropy"], strict=True):
        read = torch.tensor([[*ids[:at], loaded.tokenizer.mask_token_id, *ids[at + 1 :]]])
        with torch.no_grad():
            logits = whole(read).logits[0, at].double()
        expected = torch.nn.functional.cross_entropy(logits[None], torch.tensor([ids[at]])).item()
        assert found == pytest.approx(expected, abs=1e-4)


def test_given_masks_are_predicted_from_their_surroundings(
    lm: Run, masked_lm_folder: Path, model: LoadedModel, tmp_path: Path
) -> None:
    text = "The [MASK] sat down by the river [MASK]."
    ok(lm, "mlm", text, "-o", "report")
    ids = model.tokenizer(text)["input_ids"]
    whole = transformers.BertForMaskedLM.from_pretrained(masked_lm_folder, attn_implementation="eager").eval()
    with torch.no_grad():
        p = torch.softmax(whole(torch.tensor([ids])).logits[0], dim=-1)
    there = [at for at, token in enumerate(ids) if token == 4]
    found = table(tmp_path / "report", "mlm")
    assert found["token"].tolist() == there
    assert found["piece"].tolist() == model.tokenizer.convert_ids_to_tokens(p[there].argmax(dim=-1).tolist())
    np.testing.assert_allclose(found["probability"], p[there].amax(dim=-1).numpy(), atol=1e-5)
    assert not {"cross_entropy", "probability"} & set(table(tmp_path / "report", "mlm-tokens"))
    assert content(tmp_path / "report")["input_options"]["special_tokens_in_text"] is True


def test_masks_beside_what_is_masked_stay_masks(lm: Run, model: LoadedModel, tmp_path: Path) -> None:
    ok(lm, "mlm", "the [MASK] sat", "--mask", "each", "-o", "report")
    assert table(tmp_path / "report", "mlm-tokens")["text"].tolist() == ["the", "sat"]


def test_a_pair_is_predicted_on_both_sides(lm: Run, tmp_path: Path) -> None:
    ok(lm, "mlm", "the river", "--pair", "the bank", "-o", "report")
    tokens = table(tmp_path / "report", "mlm-tokens")
    assert set(tokens["segment"]) == {0, 1}
    assert not tokens["special"].any()


# A corpus


@pytest.mark.parametrize("way", ["each", "random", "none"])
def test_a_corpus_is_its_texts(way: str, lm: Run, tmp_path: Path) -> None:
    lines, how = [*SENTENCES[3:7], SENTENCES[3]], ("--mask", way, *(("--share", "0.4") if way == "random" else ()))
    (tmp_path / "corpus.txt").write_text("\n".join(lines))
    ok(lm, "mlm", "--corpus", "corpus.txt", *how, "-o", "corpus")
    texts = table(tmp_path / "corpus", "mlm-texts")
    surprisals = []
    for number, line in enumerate(lines):
        ok(lm, "mlm", line, *how, "-o", "text")
        own = table(tmp_path / "text", "mlm-tokens")["cross_entropy"]
        surprisals.append(own)
        assert texts["predictions"][number] == len(own)
        assert texts["cross_entropy"][number] == pytest.approx(own.mean(), abs=1e-6)
    every = np.concatenate(surprisals)
    headline = table(tmp_path / "corpus", "mlm").iloc[0]
    name = "pseudo_perplexity" if way == "each" else "perplexity"
    assert headline["predictions"] == len(every)
    assert headline["cross_entropy"] == pytest.approx(every.mean(), abs=1e-6)
    assert headline[name] == pytest.approx(math.exp(every.mean()), rel=1e-6)
    assert headline["texts"] == len(lines)
    bins = table(tmp_path / "corpus", "mlm-distribution")
    counted = Counter(math.floor(own.mean() * 4) / 4 for own in surprisals)
    assert dict(zip(bins["low"], bins["texts"], strict=True)) == counted


def test_how_texts_are_batched_leaves_no_trace(lm: Run, tmp_path: Path) -> None:
    for tokens in ("16", "300", "4000"):
        ok(lm, "mlm", "--limit", "8", "--batch-tokens", tokens, "-o", tokens)
    tables = [
        {name: held for name, held in files_of(tmp_path / tokens).items() if name.endswith(".csv")}
        for tokens in ("16", "300", "4000")
    ]
    assert tables[0] == tables[1] == tables[2]


def test_order_does_not_change_what_is_drawn(lm: Run, tmp_path: Path) -> None:
    for name, lines in (("forward", SENTENCES[:6]), ("backward", SENTENCES[:6][::-1])):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
        ok(lm, "mlm", "--corpus", f"{name}.txt", "--mask", "random", "-o", name)
    forward, backward = (table(tmp_path / name, "mlm-texts").drop(columns="line") for name in ("forward", "backward"))
    pd.testing.assert_frame_equal(forward, backward[::-1].reset_index(drop=True))


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        ((), ("--mask", "none")),
        (("--mask", "random"), ("--share", "0.5")),
        (("--mask", "random", "--share", "0.9"), ("--corruption", "mask")),
        (("--mask", "random"), ("--seed", "1")),
        ((), ("--sample", "1")),
        (("--sample", "2"), ("--seed", "1")),
        ((TEXT,), ("--top", "3")),
    ],
)
def test_no_setting_is_read_and_ignored(
    base: tuple[str, ...], changed: tuple[str, ...], lm: Run, tmp_path: Path
) -> None:
    limit = () if TEXT in base else ("--limit", "5")
    for folder, options in (("before", base), ("after", (*base, *changed))):
        ok(lm, "mlm", *limit, *options, "-o", folder)
    before, after = (
        {name: held for name, held in files_of(tmp_path / folder).items() if name.endswith(".csv")}
        for folder in ("before", "after")
    )
    assert before != after


def test_figures_are_drawn(lm: Run, tmp_path: Path) -> None:
    for arguments in ((TEXT,), ("the [MASK] sat",), ("--limit", "3")):
        ok(lm, "mlm", *arguments, "--figures", "png", "-o", "report")
        assert len(list((tmp_path / "report").glob("*.png"))) == 1


# What cannot be asked


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("the cat", "--mask", "given"), "holds no [MASK]"),
        (("--mask", "given"), "reads one text"),
        (("the cat", "--share", "0"), "--share 0 is no share"),
        (("the cat", "--share", "1.5"), "--share 1.5 is no share"),
        (("[SEP]", "--special-tokens-in-text"), "no token to predict"),
        (("--corpus", "c.tsv", "--group-column", "g"), "no tables by group"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: tuple[str, ...], told: str, lm: Run, tmp_path: Path) -> None:
    (tmp_path / "c.tsv").write_text("text\tg\nthe cat\ta\n")
    assert_error(lm("mlm", *arguments), 2, told)


def test_a_tokenizer_without_a_mask_token_is_refused_unless_nothing_is_masked(fast: Run, tmp_path: Path) -> None:
    tokenizer = tiny.wordpiece_tokenizer()
    folder = tiny.tiny_head("BertForMaskedLM", "bert", tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        if (folder / file).exists():
            changed = (folder / file).read_text(encoding="utf-8").replace(tokenizer.mask_token, "[GAP]")
            (folder / file).write_text(changed.replace('"mask_token": "[GAP]"', '"x": 1'), encoding="utf-8")
    assert_error(fast("mlm", "the cat", "--model", str(folder)), 2, "no mask token")
    ok(fast, "mlm", "the cat", "--mask", "none", "--model", str(folder))
