"""Ablated passes: against a plain float64 pass of MiniLM's checkpoint, in every family, and undone without trace."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import tiny
import torch
from command import Run
from scipy.special import erf
from torch import Tensor, nn

from analyses.kit.record import ABLATIONS, ForwardRecord, NotRecordedError, by_pass, under
from analyses.rank_collapse import RankCollapse
from bertgeo_cli.corpus import Encoder
from bertgeo_cli.models import LoadedModel, load_model
from bertgeo_cli.recording import record, record_batch
from bertgeo_cli.run import Pass, analyse_corpus, analyse_text
from bertgeo_cli.surgery import ablated

TEXT = "Was the cat's mat wet, or did it only look wet?"
CUT = [name for name in ABLATIONS if name != "none"]
POINTS = ("q", "hidden_states", "attention", "attention_projection", "attention_sum", "attention_norm", "layer_outputs")


def encode(loaded: LoadedModel, text: str = TEXT, line: int = 1) -> Any:
    return Encoder(loaded.tokenizer, loaded.max_tokens).encode(text, line=line)


def by_numpy(weights: dict[str, np.ndarray], x: np.ndarray, ablation: str, heads: int = 12) -> list[np.ndarray]:
    """Hidden states by depth of a BERT that lacks what the ablation cuts, from its checkpoint's own tensors."""
    depths, n = [x], len(x)
    for layer in range(6):
        part = {name.split(f"layer.{layer}.")[1]: value for name, value in weights.items() if f"layer.{layer}." in name}

        def linear(name: str, values: np.ndarray, part: dict[str, np.ndarray] = part) -> np.ndarray:
            return values @ part[f"{name}.weight"].T + part[f"{name}.bias"]

        def norm(name: str, values: np.ndarray, part: dict[str, np.ndarray] = part) -> np.ndarray:
            rest = values - values.mean(axis=1, keepdims=True)
            scaled = rest / np.sqrt((rest**2).mean(axis=1, keepdims=True) + 1e-12)
            return scaled * part[f"{name}.weight"] + part[f"{name}.bias"]

        q, k, v = (
            linear(f"attention.self.{name}", x).reshape(n, heads, -1).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        raised = np.exp(q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1]))
        mixed = (raised / raised.sum(axis=-1, keepdims=True) @ v).swapaxes(0, 1).reshape(n, -1)
        attended = linear("attention.output.dense", mixed)
        x = norm("attention.output.LayerNorm", attended if ablation in ("skip", "both") else attended + x)
        if ablation in ("none", "skip"):
            inner = linear("intermediate.dense", x)
            x = norm("output.LayerNorm", linear("output.dense", inner / 2 * (1 + erf(inner / math.sqrt(2)))) + x)
        depths.append(x)
    return depths


@pytest.fixture(scope="module")
def checkpoint(minilm: LoadedModel) -> dict[str, np.ndarray]:
    return {name: value.double().numpy() for name, value in minilm.model.state_dict().items()}


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_hidden_states_are_those_of_a_plain_float64_pass(
    minilm: LoadedModel, checkpoint: dict[str, np.ndarray], ablation: str
) -> None:
    name = under(ablation, "hidden_states")
    found = record(minilm, [encode(minilm)], needs=frozenset({name})).of_text(name, 0)
    tokens = reference.tokenize(TEXT)
    embedded = reference.forward(tokens.ids, tokens.segments)["hidden_states"][0]
    for depth, expected in enumerate(by_numpy(checkpoint, embedded, ablation)):
        np.testing.assert_allclose(found[depth], expected, atol=2e-5, err_msg=f"depth {depth}")


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny.tiny_family(request.param, tmp_path_factory.mktemp("models") / request.param)
    return load_model(str(folder), device="cpu", offline=True)


def normalised(norm: Any, values: Tensor) -> Tensor:
    return nn.functional.layer_norm(values, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


@pytest.mark.parametrize("ablation", CUT)
def test_every_layer_of_every_family_lacks_its_parts(family: LoadedModel, ablation: str) -> None:
    names = {name: under(ablation, name) for name in POINTS}
    found = record(family, [encode(family, "the old cat sat on a mat")], needs=frozenset(names.values()))
    blocks = family.family.blocks(family.model)
    for layer, block in enumerate(blocks):
        at = {name: found.layer(full, layer) for name, full in names.items()}
        following = found.layer(names["hidden_states"], layer + 1)
        summed = at["attention_projection"] + (0 if ablation in ("skip", "both") else at["hidden_states"])
        assert torch.equal(at["attention_sum"], summed)
        assert torch.equal(at["attention_norm"], normalised(block.get_submodule(family.family.first_norm), summed))
        assert torch.equal(at["layer_outputs"], following)
        assert torch.equal(following, at["attention_norm"]) == (ablation in ("mlp", "both"))
        query = block.get_submodule(family.family.query)
        flat = at["q"].transpose(1, 2).flatten(2)
        torch.testing.assert_close(flat, query(at["hidden_states"]))


def anatomy(model: nn.Module) -> dict[str, Any]:
    """Every module by name, and its hooks."""
    return {
        name: (module, list(module._forward_hooks), list(module._forward_pre_hooks), type(module))
        for name, module in model.named_modules(remove_duplicate=False)
    }


@pytest.mark.parametrize("ablation", CUT)
def test_a_pass_leaves_nothing_behind(family: LoadedModel, ablation: str) -> None:
    text = encode(family, "the old cat sat on a mat")
    before, plain = anatomy(family.model), record(family, [text], needs=frozenset({"hidden_states"}))
    both = record(family, [text], needs=frozenset({"hidden_states", under(ablation, "hidden_states")}))
    after = record(family, [text], needs=frozenset({"hidden_states"}))
    assert anatomy(family.model) == before
    for other in (both, after):
        assert torch.equal(other.hidden_states, plain.hidden_states)
    assert not torch.allclose(both.layer(under(ablation, "hidden_states"), 1), plain.layer("hidden_states", 1))


def test_an_error_inside_undoes_the_cut_too(tiny_model: LoadedModel) -> None:
    before = anatomy(tiny_model.model)
    with pytest.raises(IndexError), ablated(tiny_model, "both"):
        tiny_model.model(input_ids=torch.tensor([[10**6]]))
    assert anatomy(tiny_model.model) == before


def test_what_a_pass_lacks_cannot_be_asked_of_it(tiny_model: LoadedModel) -> None:
    for wrong in ("mlp/mlp_output", "both/mlp_sum", "gate/attention", "skip/thoughts"):
        with pytest.raises(ValueError, match=r"there is no|cannot record"):
            record(tiny_model, [encode(tiny_model)], needs=frozenset({wrong}))
    with pytest.raises(ValueError, match="unknown ablation"), ablated(tiny_model, "gate"):
        pass


def test_only_the_passes_that_are_asked_for_are_run(tiny_model: LoadedModel) -> None:
    passes: list[nn.Module] = []
    handle = tiny_model.model.register_forward_hook(lambda module, *_: passes.append(module))
    try:
        found = record(tiny_model, [encode(tiny_model)], needs=frozenset({"skip/q", "skip/k", "both/q"}))
    finally:
        handle.remove()
    assert len(passes) == 2
    with pytest.raises(NotRecordedError):
        found.layer("q", 0)
    assert list(by_pass(["both/q", "q", "skip/k"])) == ["none", "skip", "both"]


def test_texts_that_lie_end_to_end_are_cut_alike(tiny_model: LoadedModel) -> None:
    texts = [encode(tiny_model, text, line) for line, text in enumerate(("a cat", "the old dog ran"), start=1)]
    needs = frozenset({"both/hidden_states"})
    for together, text in zip(record_batch(tiny_model, texts, needs=needs), texts, strict=True):
        alone: ForwardRecord = record(tiny_model, [text], needs=needs)
        assert torch.equal(together.layer("both/hidden_states", 2), alone.layer("both/hidden_states", 2))


def test_the_table_has_the_residuals_of_every_ablation(minilm: LoadedModel, checkpoint: dict[str, np.ndarray]) -> None:
    table = analyse_text([RankCollapse(ablate="all")], minilm, encode(minilm), Pass())[0].tables[0].frame
    tokens = reference.tokenize(TEXT)
    embedded = reference.forward(tokens.ids, tokens.segments)["hidden_states"][0]
    assert list(table["ablation"].unique()) == list(ABLATIONS)
    for ablation, rows in table.groupby("ablation"):
        for found, x in zip(rows["residual_frobenius"], by_numpy(checkpoint, embedded, str(ablation)), strict=True):
            expected = np.linalg.norm(x - x.mean(axis=0)) / np.linalg.norm(x)
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_curves_over_texts_are_means_and_deviations(minilm: LoadedModel) -> None:
    texts = [encode(minilm, text, line) for line, text in enumerate((TEXT, "Hello.", "We ran."), start=1)]
    settings = RankCollapse(ablate="both,none", metrics="residual_composite")
    whole = analyse_corpus([settings], minilm, texts, Pass())[0]
    single = [analyse_text([settings], minilm, text, Pass())[0].tables[0].frame for text in texts]
    values = np.array([frame["residual_composite"] for frame in single])
    np.testing.assert_allclose(whole.tables[0].frame["residual_composite"], values.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(whole.tables[0].frame["residual_composite_std"], values.std(axis=0, ddof=1), rtol=1e-9)
    curves = whole.figures[0].panels[0].series
    assert [curve.label.split(":")[0] for curve in curves] == ["transformer", "SAN"]
    assert curves[1].y == pytest.approx(values[:, 7:].mean(axis=0))


def test_without_residuals_and_mlps_random_layers_collapse_doubly_exponentially(tmp_path: Path) -> None:
    # As published for random BERTs: one layer without attention residual leaves little, and what is left falls with an
    # exponent that itself grows about threefold a layer (the bound has 3^L), until float64 rounds it away.
    folder = tiny.tiny_bert(tmp_path / "deep", num_hidden_layers=6)
    loaded = load_model(str(folder), device="cpu", offline=True)
    loaded.model.double()
    text = encode(loaded, "the old cat sat on a mat by the river")
    frame = analyse_text([RankCollapse(ablate="all")], loaded, text, Pass())[0].tables[0].frame
    curves = {name: rows["residual_frobenius"].to_numpy() for name, rows in frame.groupby("ablation")}
    steps = np.diff(np.log(curves["both"][curves["both"] > 1e-12]))
    growing = steps[1:] / steps[:-1]
    assert (growing > 1.5).all()
    assert growing[-1] == pytest.approx(3, rel=0.1)
    assert curves["both"][-1] < 1e-12
    assert curves["none"][-1] > 1e8 * curves["both"][-1]


@pytest.mark.parametrize("workers", [(), ("--workers", "2")])
def test_the_command_measures_one_ablation_of_a_corpus(fast: Run, tmp_path: Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "corpus.txt").write_text("the cat\na dog ran\nwe play\n", encoding="utf-8")
    ran = fast(
        "rank-collapse", "--corpus", "corpus.txt", "--ablate", "skip", "--shard-texts", "2", "-o", "out", *workers
    )
    assert ran.exit_code == 0, ran.output
    lines = (tmp_path / "out" / "rank-collapse.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[:3] for line in lines[1:]] == [["skip", str(depth), "3"] for depth in range(3)]


def test_an_unknown_ablation_is_refused(fast: Run) -> None:
    ran = fast("rank-collapse", "a cat", "--ablate", "heads")
    assert ran.exit_code == 2
    assert "none, skip, mlp, both" in ran.output
