"""The recorded pass is the model's own pass, in every family; it leaves nothing behind, and it fails loudly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from analyses.attention import Attention
from analyses.kit.record import AXES, NotRecordedError, TokenizedText
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.recording import BACKENDS, EVERYTHING, RecordingError, record, record_batch, records, run_pass, twin
from bertgeo_cli.run import Pass, analyse_text

TEXT = "The cats sat on the mat."
PATTERN = frozenset({"attention", "hidden_states"})

# Names of one block's modules in each family's own checkpoint: block, W_O, the two LayerNorms.
USUAL = ("encoder.layer.{}", "attention.output.dense", "attention.output.LayerNorm", "output.LayerNorm")
NAMES = {
    "distilbert": ("transformer.layer.{}", "attention.out_lin", "sa_layer_norm", "output_layer_norm"),
    "albert": (
        "encoder.albert_layer_groups.0.albert_layers.0",
        "attention.dense",
        "attention.LayerNorm",
        "full_layer_layer_norm",
    ),
}


@dataclass(frozen=True)
class Case:
    """A family's model as bertgeo loads it, and once more as transformers does."""

    family: str
    loaded: LoadedModel
    plain: Any

    def inputs(self, mask: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, segments and mask of three texts of nine tokens; `padded` ones have 9, 7 and 4."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(7, self.plain.config.vocab_size, (3, 9), generator=generator)
        segments = (torch.arange(9) > 4).long().expand(3, 9)
        if mask == "none":
            return ids, segments, None
        lengths = torch.tensor([9, 7, 4] if mask == "padded" else [9, 9, 9])
        kept = torch.arange(9) < lengths[:, None]
        return torch.where(kept, ids, self.plain.config.pad_token_id), segments, kept.long()

    def plain_pass(self, ids: Tensor, segments: Tensor, mask: Tensor | None) -> Any:
        extra = {"token_type_ids": segments} if self.loaded.segments else {}
        with torch.no_grad():
            return self.plain(ids, attention_mask=mask, output_attentions=True, output_hidden_states=True, **extra)

    def module(self, layer: int, part: int) -> nn.Module:
        names = NAMES.get(self.family, USUAL)
        return self.plain.get_submodule(f"{names[0].format(layer)}.{names[part]}")


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tiny.tiny_family(request.param, tmp_path_factory.mktemp("models") / request.param)
    model_class = tiny.MODELS[request.param][0]
    plain = model_class.from_pretrained(folder, attn_implementation="eager").eval()
    return Case(request.param, load_model(str(folder), device="cpu"), plain)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture
def bert(folder: Path) -> LoadedModel:
    """A tiny BERT that a test may spoil."""
    return load_model(str(folder), device="cpu")


def encode(loaded: LoadedModel, text: str = TEXT) -> Any:
    return Encoder(loaded.tokenizer, loaded.max_tokens).encode(text)


def everything(loaded: LoadedModel) -> dict[str, Tensor]:
    recorded = record(loaded, [encode(loaded)], needs=EVERYTHING)
    return {name: getattr(recorded, name) for name in AXES}


def assert_same_bits(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert set(found) == set(wanted)
    for name in wanted:
        assert len(found[name]) == len(wanted[name]), name
        assert all(torch.equal(one, other) for one, other in zip(found[name], wanted[name], strict=True)), name


# The pass of all eight families


@pytest.mark.parametrize("mask", ["none", "ones", "padded"])
def test_attention_and_hidden_states_are_transformers_own_bit_for_bit(case: Case, mask: str) -> None:
    inputs = case.inputs(mask)
    found = run_pass(case.loaded, *inputs, needs=PATTERN)
    wanted = case.plain_pass(*inputs)
    assert_same_bits(found, {"attention": wanted.attentions, "hidden_states": wanted.hidden_states})


def test_recording_everything_changes_no_bit(case: Case) -> None:
    inputs = case.inputs("padded")
    found = run_pass(case.loaded, *inputs, needs=EVERYTHING)
    assert torch.equal(found["layer_outputs"][-1], case.plain_pass(*inputs).last_hidden_state)


def test_segments_and_mask_matter_where_the_model_has_them(case: Case) -> None:
    ids, segments, mask = case.inputs("padded")
    whole = run_pass(case.loaded, ids, segments, None, needs=PATTERN)
    masked = run_pass(case.loaded, ids, segments, mask, needs=PATTERN)
    first = run_pass(case.loaded, ids, torch.zeros_like(segments), None, needs=PATTERN)
    assert not torch.equal(whole["attention"][0], masked["attention"][0])
    assert masked["attention"][0][1, :, :, 7:].max() == 0
    assert torch.equal(whole["attention"][0], first["attention"][0]) is not case.loaded.segments


def test_axes_have_the_lengths_of_the_model(case: Case) -> None:
    config = case.plain.config
    sizes = {"batch": 1, "layer": config.num_hidden_layers, "depth": config.num_hidden_layers + 1}
    sizes |= {"head": config.num_attention_heads, "width": config.hidden_size}
    sizes["channel"] = config.hidden_size // config.num_attention_heads
    sizes |= dict.fromkeys(("token", "query", "key"), len(encode(case.loaded)))
    for name, tensor in everything(case.loaded).items():
        assert tensor.shape == tuple(sizes[axis] for axis in AXES[name]), name


def test_attention_is_the_softmax_of_scaled_products_and_head_outputs_are_a_v(case: Case) -> None:
    found = {name: tensor.double() for name, tensor in everything(case.loaded).items()}
    scores = found["q"] @ found["k"].transpose(-1, -2) / found["q"].shape[-1] ** 0.5
    torch.testing.assert_close(found["scores"], scores, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["attention"], scores.softmax(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["head_outputs"], found["attention"] @ found["v"], rtol=1e-5, atol=1e-5)


def test_the_inner_points_satisfy_their_relations(case: Case) -> None:
    found = everything(case.loaded)
    assert torch.equal(found["layer_outputs"], found["hidden_states"][:, 1:])
    assert torch.equal(found["attention_sum"], found["hidden_states"][:, :-1] + found["attention_projection"])
    assert torch.equal(found["mlp_sum"], found["attention_norm"] + found["mlp_output"])
    concatenated = found["head_outputs"].transpose(2, 3).flatten(3)
    for layer in range(case.loaded.shape.layers):
        for part, entering, leaving in (
            (1, concatenated, "attention_projection"),
            (2, found["attention_sum"], "attention_norm"),
            (3, found["mlp_sum"], "layer_outputs"),
        ):
            with torch.no_grad():
                wanted = case.module(layer, part)(entering[:, layer])
            torch.testing.assert_close(found[leaving][:, layer], wanted, rtol=1e-5, atol=1e-5)


def test_depth_zero_is_the_first_layers_input(case: Case) -> None:
    inputs = case.inputs("none")
    entering: list[Tensor] = []
    query = next(module for name, module in case.plain.named_modules() if name.endswith(("query", "q_lin")))
    with query.register_forward_pre_hook(lambda _, arguments: entering.append(arguments[0])):
        case.plain_pass(*inputs)
    found = run_pass(case.loaded, *inputs, needs=frozenset({"hidden_states"}))["hidden_states"]
    assert len(found) == case.loaded.shape.layers + 1
    assert torch.equal(found[0], entering[0])


@pytest.mark.parametrize("mask", ["none", "padded"])
def test_sdpa_gives_equal_attention(case: Case, mask: str) -> None:
    eager, sdpa = (run_pass(case.loaded, *case.inputs(mask), needs=PATTERN, backend=name) for name in ("eager", "sdpa"))
    for name in PATTERN:
        assert len(sdpa[name]) == len(eager[name])
        for one, other in zip(sdpa[name], eager[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_shared_layers_have_one_set_of_weights_and_a_record_for_each_run(tmp_path: Path) -> None:
    loaded = load_model(str(tiny.tiny_family("albert", tmp_path / "albert", layers=4)), device="cpu")
    assert (loaded.shape.layers, loaded.shape.weight_layers) == (4, 1)
    assert loaded.head_weights().query.shape[0] == 1
    found = everything(loaded)
    assert found["attention"].shape[1] == found["attention_norm"].shape[1] == 4
    assert not torch.equal(found["attention"][:, 0], found["attention"][:, 1])


# What a tiny BERT gives


def test_depths_of_a_two_layer_bert_start_at_the_embeddings(bert: LoadedModel) -> None:
    text = encode(bert)
    found = record(bert, [text], needs=frozenset({"hidden_states"})).hidden_states
    assert found.shape[1] == 3
    with torch.no_grad():
        assert torch.equal(found[:, 0], bert.model.get_submodule("embeddings")(torch.tensor([text.ids])))


def test_attention_edited_to_go_from_token_0_to_token_2_is_found_there(bert: LoadedModel) -> None:
    text, head, width = encode(bert), 1, bert.shape.head_width
    inputs = record(bert, [text], needs=frozenset({"hidden_states"})).hidden_states[0, 0].double()
    attention = bert.model.get_submodule("encoder.layer.0.attention.self")
    for name, token in (("query", 0), ("key", 2)):
        # The first channel of this head is 100 at one token and 0 at all others; the other channels are 0.
        linear, wanted = attention.get_submodule(name), torch.zeros(len(text), dtype=torch.float64)
        wanted[token] = 100
        rows = slice(head * width, (head + 1) * width)
        linear.weight[rows], linear.bias[rows] = 0, 0
        linear.weight[head * width] = torch.linalg.lstsq(inputs, wanted[:, None], driver="gelsd").solution[:, 0].float()
    result = analyse_text([Attention()], bert, text, Pass())[0]
    frame = next(table.frame for table in result.tables if table.name == "attention-weights")
    chosen = frame[(frame["layer"] == 0) & (frame["head"] == head)].set_index(["query", "key"])["weight"]
    assert chosen[0, 2] == 1.0
    assert chosen[2, 0] == pytest.approx(1 / len(text), abs=1e-3)
    figure = next(figure for figure in result.figures if figure.name == "attention-maps")
    panel: Any = next(panel for panel in figure.panels if panel.title == f"L0H{head}")
    assert panel.values[0, 2] == 1.0
    assert ("query" in panel.row_label, "key" in panel.column_label) == (True, True)


# Refusals


def test_reading_what_was_not_recorded_says_so(bert: LoadedModel) -> None:
    recorded = record(bert, [encode(bert)], needs=frozenset({"attention"}))
    for name in EVERYTHING - {"attention"}:
        for read in (
            lambda name=name: getattr(recorded, name),
            lambda name=name: recorded.layer(name, 0),
            lambda name=name: recorded.of_text(name, 0),
        ):
            with pytest.raises(NotRecordedError, match=name):
                read()


def test_unknown_tensors_are_refused(bert: LoadedModel) -> None:
    with pytest.raises(ValueError, match="attentions"):
        record(bert, [encode(bert)], needs=frozenset({"attentions"}))


def test_texts_of_different_lengths_make_no_batch(bert: LoadedModel) -> None:
    with pytest.raises(ValueError, match="token count"):
        record(bert, [encode(bert, "the cat"), encode(bert, "the")], needs=PATTERN)


def layer_attention(loaded: LoadedModel, layer: int) -> nn.Module:
    return loaded.model.get_submodule(f"encoder.layer.{layer}.attention.self")


def report_nothing(hidden_states: Tensor, *arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
    return hidden_states, None


def twice(forward: Any) -> Any:
    def report_twice(*arguments: Any, **keywords: Any) -> Any:
        forward(*arguments, **keywords)
        return forward(*arguments, **keywords)

    return report_twice


@pytest.mark.parametrize("needs", [PATTERN, frozenset({"hidden_states"}), EVERYTHING])
def test_a_layer_that_does_not_report_fails_loudly(bert: LoadedModel, needs: frozenset[str]) -> None:
    layer_attention(bert, 1).forward = report_nothing
    with pytest.raises(RecordingError) as raised:
        record(bert, [encode(bert)], needs=needs)
    assert raised.value.exit_code == 4


def test_a_layer_that_reports_twice_fails_loudly(bert: LoadedModel) -> None:
    attention = layer_attention(bert, 1)
    attention.forward = twice(attention.forward)
    with pytest.raises(RecordingError):
        record(bert, [encode(bert)], needs=PATTERN)


def test_one_layer_reporting_twice_does_not_stand_in_for_a_silent_one(bert: LoadedModel) -> None:
    attention = layer_attention(bert, 0)
    attention.forward = twice(attention.forward)
    layer_attention(bert, 1).forward = report_nothing
    with pytest.raises(RecordingError):
        record(bert, [encode(bert)], needs=PATTERN)


# Nothing is left behind


def traces(model: Any) -> tuple[Any, ...]:
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    registries = [dict(registry._global_mapping) for registry in (AttentionInterface, AttentionMaskInterface)]
    return hooks, registries, model.config._attn_implementation


def test_a_pass_leaves_no_trace(bert: LoadedModel) -> None:
    before = traces(bert.model)
    everything(bert)
    assert traces(bert.model) == before


@pytest.mark.parametrize("path", ["embeddings", "encoder.layer.1.attention.self", "encoder.layer.1.output.dense"])
def test_an_exception_in_the_middle_of_a_pass_leaves_no_trace(
    bert: LoadedModel, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    wanted, before = everything(bert), traces(bert.model)

    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise MemoryError("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(bert.model.get_submodule(path), "forward", fail)
        with pytest.raises(MemoryError, match="in the middle"):
            everything(bert)
    assert traces(bert.model) == before
    assert_same_bits(everything(bert), wanted)


def test_a_model_in_training_mode_is_put_in_eval(bert: LoadedModel) -> None:
    wanted = everything(bert)
    bert.model.train()
    first = everything(bert)
    bert.model.get_submodule("encoder.layer.1").train()
    second = everything(bert)
    assert_same_bits(first, wanted)
    assert_same_bits(second, wanted)
    torch.testing.assert_close(first["attention"].sum(-1), torch.ones(first["attention"].shape[:-1]))


# Threads and batches leave no trace in the bits


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def equal_lengths() -> Tensor:
    """Thirty-two texts of eleven tokens."""
    ids = torch.randint(1000, 30000, (32, 11), generator=torch.Generator().manual_seed(3))
    ids[:, 0], ids[:, -1] = 101, 102
    return ids


needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the promise holds for builds with MKL")


@needs_mkl
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("texts", [1, 5, 32])
def test_one_and_two_threads_give_the_same_bits(minilm: LoadedModel, equal_lengths: Tensor, texts: int) -> None:
    passes = []
    for count in (1, 2):
        torch.set_num_threads(count)
        passes.append(run_pass(minilm, equal_lengths[:texts], needs=EVERYTHING))
    assert_same_bits(*passes)


@needs_mkl
def test_batches_of_one_and_of_thirty_two_give_the_same_bits(minilm: LoadedModel, equal_lengths: Tensor) -> None:
    together = run_pass(minilm, equal_lengths, needs=EVERYTHING)
    for at, ids in enumerate(equal_lengths):
        alone = run_pass(minilm, ids[None], needs=EVERYTHING)
        assert_same_bits(alone, {name: [tensor[at : at + 1] for tensor in layers] for name, layers in together.items()})


# Texts of any token counts in one pass


def of_ids(loaded: LoadedModel, rows: Sequence[Sequence[int]]) -> list[TokenizedText]:
    some = encode(loaded)
    return [
        replace(
            some,
            line=line,
            ids=tuple(ids),
            segment=tuple(int(at > 3) for at in range(len(ids))),
            tokens=("",) * len(ids),
        )
        for line, ids in enumerate(rows, start=1)
    ]


@needs_mkl
@pytest.mark.parametrize("backend", BACKENDS)
def test_texts_of_any_lengths_in_one_pass_are_those_alone_bit_for_bit(case: Case, backend: str) -> None:
    ids, _, _ = case.inputs("none")
    padding = int(case.plain.config.pad_token_id)
    rows = [ids[0, :4].tolist(), ids[1, :4].tolist(), ids[2, :6].tolist(), [*ids[0, :5].tolist(), padding, 9, 8, 7]]
    found = record_batch(case.loaded, of_ids(case.loaded, rows), needs=EVERYTHING, backend=backend)
    assert [[text.ids for text in recorded.texts] for recorded in found] == [
        [tuple(rows[0]), tuple(rows[1])],
        [tuple(rows[2])],
        [tuple(rows[3])],
    ]
    for recorded in found:
        for at, text in enumerate(recorded.texts):
            alone = run_pass(
                case.loaded, torch.tensor([text.ids]), torch.tensor([text.segment]), needs=EVERYTHING, backend=backend
            )
            own = {
                name: [recorded.layer(name, layer)[at : at + 1] for layer in range(len(alone[name]))] for name in alone
            }
            assert_same_bits(own, alone)


def test_more_tokens_than_a_model_has_positions_go_through_in_one_pass(minilm: LoadedModel) -> None:
    texts = [encode(minilm, "the cat sat on the mat " * 30)] * 4
    found = record_batch(minilm, texts, needs=frozenset({"hidden_states"}))
    assert sum(map(len, texts)) > minilm.max_tokens
    assert torch.equal(found[0].hidden_states[0], found[0].hidden_states[3])


# Passes side by side


SIDE_BY_SIDE = ["the cat sat on the mat", "a dog ran home", "she sat by the river", "the old green boat", "money"] * 3


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def alone(loaded: LoadedModel) -> list[list[TokenizedText]]:
    encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
    return [[encoder.encode(text, line=number)] for number, text in enumerate(SIDE_BY_SIDE, start=1)]


def test_passes_side_by_side_are_those_one_after_the_other_bit_for_bit(
    tiny_model: LoadedModel, two_threads: None
) -> None:
    batches = alone(tiny_model)
    found = list(records(tiny_model, batches, needs=EVERYTHING))
    assert [recorded.texts for recorded in found] == [tuple(batch) for batch in batches]
    for recorded, batch in zip(found, batches, strict=True):
        expected = record(tiny_model, batch, needs=EVERYTHING)
        for name in EVERYTHING:
            assert torch.equal(getattr(recorded, name), getattr(expected, name)), name


def test_passes_side_by_side_leave_model_and_threads_as_they_were(tiny_model: LoadedModel, two_threads: None) -> None:
    config: Any = tiny_model.model.config
    before = config._attn_implementation
    stream = records(tiny_model, alone(tiny_model), needs=EVERYTHING)
    next(stream)
    assert torch.get_num_threads() == 1
    stream.close()
    assert torch.get_num_threads() == 2
    assert config._attn_implementation == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tiny_model.model.modules())


def test_an_error_in_a_pass_beside_others_comes_through(tiny_model: LoadedModel, two_threads: None) -> None:
    batches = alone(tiny_model)
    batches[2] = [replace(text, ids=(10**6, *text.ids[1:])) for text in batches[2]]  # no such token
    with pytest.raises(IndexError):
        list(records(tiny_model, batches, needs=EVERYTHING))
    assert torch.get_num_threads() == 2


def test_a_twin_has_modules_of_its_own_and_the_same_weights(tiny_model: LoadedModel) -> None:
    other = twin(tiny_model)
    assert other.model is not tiny_model.model
    assert other.model.config is not tiny_model.model.config
    for one, two in zip(tiny_model.model.parameters(), other.model.parameters(), strict=True):
        assert one.data_ptr() == two.data_ptr()
    assert not {id(module) for module in other.model.modules()} & {id(module) for module in tiny_model.model.modules()}
