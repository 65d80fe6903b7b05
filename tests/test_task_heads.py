"""Task heads: the logits of transformers' own class in every family, and nothing that the checkpoint does not hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from command import Run, assert_error, files_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertgeo_cli.corpus import Encoder
from bertgeo_cli.errors import UntrustedModelError, UsageError
from bertgeo_cli.models import load_model
from bertgeo_cli.recording import record
from bertgeo_cli.task_heads import CLASSIFICATION, MASKED_LM, Kind, LoadedWithHead, with_head

TEXT = "The old cat sat by the river."
KINDS = {"masked-LM": MASKED_LM, "classification": CLASSIFICATION}
Tensors = dict[str, Tensor]


@pytest.fixture
def lm(tmp_path: Path) -> Path:
    """A random BertForMaskedLM, to be changed."""
    return tiny.tiny_head("BertForMaskedLM", "bert", tmp_path / "lm")


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """A random BertForSequenceClassification of three labels, to be changed."""
    return tiny.tiny_head("BertForSequenceClassification", "bert", tmp_path / "classifier", num_labels=3)


def change(folder: Path, edit: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def configure(folder: Path, **changes: object) -> Path:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))
    return folder


def loaded(folder: Path, kind: Kind, dtype: str = "float32") -> LoadedWithHead:
    return with_head(load_model(str(folder), device="cpu", dtype=dtype), kind)


def logits(model: LoadedWithHead, kind: Kind) -> Tensor:
    text = Encoder(model.tokenizer, model.max_tokens).encode(TEXT)
    last = record(model, [text], needs=frozenset({"hidden_states"})).layer("hidden_states", model.shape.layers)
    return model.head.logits(last if kind is MASKED_LM else last[:, 0])


def by_transformers(folder: Path, model_class: str, model: LoadedWithHead) -> Tensor:
    ids = Encoder(model.tokenizer, model.max_tokens).encode(TEXT).ids
    whole = getattr(transformers, model_class).from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return whole(torch.tensor([ids])).logits


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_are_those_of_the_class_of_transformers(family: str, kind: Kind, tmp_path: Path) -> None:
    name = kind.names[family].model_class
    folder = tiny.tiny_head(name, family, tmp_path / "model", num_labels=3)
    model = loaded(folder, kind)
    torch.testing.assert_close(logits(model, kind), by_transformers(folder, name, model), atol=1e-5, rtol=1e-6)
    assert model.head.tied == (kind is MASKED_LM)


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "distilbert", "albert"])
def test_an_output_of_its_own_is_not_the_embedding(family: str, tmp_path: Path) -> None:
    name = MASKED_LM.names[family].model_class
    folder = tiny.tiny_head(name, family, tmp_path / "model", tie_word_embeddings=False)
    model = loaded(folder, MASKED_LM)
    assert not model.head.tied
    expected = by_transformers(folder, name, model)
    torch.testing.assert_close(logits(model, MASKED_LM), expected, atol=1e-5, rtol=1e-6)


def test_a_tied_output_that_is_stored_is_the_same(lm: Path) -> None:
    expected = logits(loaded(lm, MASKED_LM), MASKED_LM)
    change(lm, lambda tensors: tensors.update({DECODER: tensors[EMBEDDING].clone()}))
    assert torch.equal(logits(loaded(lm, MASKED_LM), MASKED_LM), expected)


EMBEDDING, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"


def test_a_tied_output_that_differs_is_refused(lm: Path) -> None:
    change(lm, lambda tensors: tensors.update({DECODER: tensors[EMBEDDING] + 1}))
    with pytest.raises(UntrustedModelError, match=DECODER):
        loaded(lm, MASKED_LM)


def test_an_untied_output_must_be_there(lm: Path) -> None:
    with pytest.raises(UntrustedModelError, match=f"lacks {DECODER}"):
        loaded(configure(lm, tie_word_embeddings=False), MASKED_LM)


def test_a_bias_goes_by_either_name_but_is_one(lm: Path) -> None:
    expected = logits(loaded(lm, MASKED_LM), MASKED_LM)
    own, other = "cls.predictions.decoder.bias", "cls.predictions.bias"
    change(lm, lambda tensors: tensors.update({own: tensors.pop(other)}))
    assert torch.equal(logits(loaded(lm, MASKED_LM), MASKED_LM), expected)
    change(lm, lambda tensors: tensors.update({other: tensors[own] + 1}))
    with pytest.raises(UntrustedModelError, match="differ"):
        loaded(lm, MASKED_LM)


@pytest.mark.parametrize(
    "name",
    [
        "cls.predictions.bias",
        "cls.predictions.transform.dense.weight",
        "cls.predictions.transform.dense.bias",
        "cls.predictions.transform.LayerNorm.weight",
        "cls.predictions.transform.LayerNorm.bias",
    ],
)
def test_no_tensor_of_a_masked_lm_head_is_made_up(name: str, lm: Path) -> None:
    with pytest.raises(UntrustedModelError) as caught:
        loaded(change(lm, lambda tensors: tensors.pop(name)), MASKED_LM)
    assert caught.value.exit_code == 4
    assert "lacks cls.predictions" in caught.value.message


@pytest.mark.parametrize("name", ["classifier.weight", "classifier.bias", "bert.pooler.dense.weight"])
def test_no_tensor_of_a_classifier_is_made_up(name: str, classifier: Path) -> None:
    with pytest.raises(UntrustedModelError, match=f"lacks {name.removeprefix('bert.')}"):
        loaded(change(classifier, lambda tensors: tensors.pop(name)), CLASSIFICATION)


def test_another_shape_is_refused_with_both(classifier: Path) -> None:
    with pytest.raises(UntrustedModelError, match=r"classifier.weight has shape \(2, 48\).*\(3, 48\)"):
        loaded(
            change(classifier, lambda tensors: tensors.update({"classifier.weight": torch.ones(2, 48)})), CLASSIFICATION
        )


def test_whole_numbers_are_no_weights(classifier: Path) -> None:
    whole = torch.ones(3, 48, dtype=torch.int8)
    with pytest.raises(UntrustedModelError, match="int8"):
        loaded(change(classifier, lambda tensors: tensors.update({"classifier.weight": whole})), CLASSIFICATION)


def test_overflow_in_float16_is_refused(classifier: Path) -> None:
    change(classifier, lambda tensors: tensors["classifier.weight"].fill_(1e6))
    loaded(classifier, CLASSIFICATION)
    with pytest.raises(UntrustedModelError, match=r"NaN or infinity in classifier\.weight"):
        loaded(classifier, CLASSIFICATION, "float16")


def test_old_names_and_pickles_are_read(lm: Path) -> None:
    expected = logits(loaded(lm, MASKED_LM), MASKED_LM)
    tensors = load_file(lm / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    torch.save(old, lm / "pytorch_model.bin")
    (lm / "model.safetensors").unlink()
    assert torch.equal(logits(loaded(lm, MASKED_LM), MASKED_LM), expected)


@pytest.mark.parametrize(
    ("saved_as", "family", "kind", "told"),
    [
        ("BertModel", "bert", MASKED_LM, "a pooler (saved as BertModel)"),
        ("BertModel", "bert", CLASSIFICATION, "a pooler (saved as BertModel)"),
        ("BertForMaskedLM", "bert", CLASSIFICATION, "a masked-LM head (saved as BertForMaskedLM)"),
        ("BertForSequenceClassification", "bert", MASKED_LM, "a classifier and a pooler"),
        ("BertForTokenClassification", "bert", CLASSIFICATION, "a classifier (saved as BertForTokenClassification)"),
        ("BertForMultipleChoice", "bert", CLASSIFICATION, "saved as BertForMultipleChoice"),
        ("BertForQuestionAnswering", "bert", CLASSIFICATION, "a question-answering head"),
        ("RobertaForTokenClassification", "roberta", CLASSIFICATION, "a classifier"),
        ("ElectraForPreTraining", "electra", MASKED_LM, "a head that tells replaced tokens"),
        ("DistilBertModel", "distilbert", MASKED_LM, "holds nothing (saved as DistilBertModel)"),
        ("AlbertForMaskedLM", "albert", CLASSIFICATION, "a masked-LM head"),
    ],
)
def test_a_checkpoint_without_that_head_is_refused_by_what_it_has(
    saved_as: str, family: str, kind: Kind, told: str, tmp_path: Path
) -> None:
    folder = tiny.tiny_head(saved_as, family, tmp_path / "model")
    with pytest.raises(UsageError) as caught:
        loaded(folder, kind)
    assert caught.value.exit_code == 2
    assert told in caught.value.message
    assert kind.names[family].model_class in caught.value.hint


def test_a_checkpoint_of_pretraining_has_a_masked_lm_head(tmp_path: Path) -> None:
    folder = tiny.tiny_head("BertForPreTraining", "bert", tmp_path / "model")
    model = loaded(folder, MASKED_LM)
    text = Encoder(model.tokenizer, model.max_tokens).encode(TEXT)
    whole = transformers.BertForPreTraining.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = whole(torch.tensor([text.ids])).prediction_logits
    torch.testing.assert_close(logits(model, MASKED_LM), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("command", ["mlm", "classify"])
def test_the_embedded_model_has_no_head_and_says_so(command: str, run: Run) -> None:
    assert_error(run(command, "x"), 2, "minilm has no", "holds a pooler (saved as BertModel)")


def test_r9_one_encoder_saved_as_three_models_gives_the_same_tables(run: Run, tmp_path: Path) -> None:
    tokenizer = tiny.wordpiece_tokenizer()
    config = transformers.BertConfig(**{**tiny.SIZES, "vocab_size": len(tokenizer)})
    encoder = transformers.BertModel(config)
    tiny.save(encoder, tokenizer, tmp_path / "model", 0)
    for name in ("BertForMaskedLM", "BertForSequenceClassification"):
        whole = getattr(transformers, name)(config)
        tiny.randomise(whole, seed=1)
        whole.bert.load_state_dict(encoder.state_dict(), strict=False)
        whole.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    reports = []
    for name in ("model", "BertForMaskedLM", "BertForSequenceClassification"):
        for command in ("attention", "cone-index"):
            done = run(command, TEXT, "--model", f"./{name}", "-o", f"{name}-{command}")
            assert done.exit_code == 0, done.output
        reports.append(
            {
                f"{command}/{file}": content
                for command in ("attention", "cone-index")
                for file, content in files_of(tmp_path / f"{name}-{command}").items()
                if file != "run.json"  # which names the checkpoint
            }
        )
    assert len(reports[0]) > 4
    assert reports[0] == reports[1] == reports[2]
