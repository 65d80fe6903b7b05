"""Proofs of what was loaded: the record recomputed from its parts in float64, and the pass against itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from analyses.kit.block import deviation
from analyses.kit.record import AXES, ForwardRecord, HeadWeights

from .corpus import Encoder
from .families import activation_of, affine_of, norm_of
from .models import LoadedModel, vocabulary_report
from .recording import EVERYTHING, record, run_pass
from .samples import SAMPLE_CORPUS

Reader = Callable[[str], Tensor]
"""Gives a recorded tensor of one layer and one text by its name; `hidden_states` is the layer's input."""

TOLERANCE = 1e-5
SCORE_TOLERANCE = 2e-7
"""float32 scores as large as s are uncertain by about 2e-7 s, and attention with them."""
PADDING_TOLERANCE = 1e-4
"""Padding changes the order of float32 sums in every layer; a model that ignores its mask is off by 0.01 or more."""


@dataclass(frozen=True)
class Proof:
    """A statement, the worst deviation from it, and the bound that it must stay within."""

    name: str
    what: str
    measured: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the deviation is within the bound (NaN is not)."""
        return self.measured <= self.bound


def check_model(loaded: LoadedModel) -> list[Proof]:
    """Every proof, on the sample sentences. The model must compute in float32."""
    case = Case(loaded)
    return [
        _load_proof(loaded),
        _vocabulary_proof(loaded),
        *_recomputation_proofs(case),
        _bilinear_proof(case),
        _row_sum_proof(case),
        _determinism_proof(case),
        _batch_proof(case),
        _padding_proof(case),
    ]


class Case:
    """The model, its weights, and the recorded passes over the sample sentences, one text at a time."""

    def __init__(self, loaded: LoadedModel):
        self.loaded = loaded
        encoder = Encoder(loaded.tokenizer, loaded.max_tokens)
        lines = SAMPLE_CORPUS.read_text(encoding="utf-8").splitlines()
        encoded = (encoder.encode(line, line=number) for number, line in enumerate(lines, start=1))
        self.texts = [text if len(text) <= encoder.max_tokens else encoder.truncate(text) for text in encoded]

    @cached_property
    def weights(self) -> HeadWeights:
        """The head weights under proof."""
        return self.loaded.head_weights()

    @cached_property
    def records(self) -> list[ForwardRecord]:
        """Each sentence's record of everything."""
        return [record(self.loaded, [text], needs=EVERYTHING) for text in self.texts]

    def layers(self) -> Iterator[tuple[int, Reader]]:
        """Every layer of every sentence: the layer's number and a reader of its recorded tensors in float64."""
        for recorded in self.records:
            for layer in range(self.loaded.shape.layers):
                yield layer, _reader(recorded, layer)


def _reader(recorded: ForwardRecord, layer: int) -> Reader:
    return lambda name: recorded.layer(name, layer)[0].double().cpu()


def _load_proof(loaded: LoadedModel) -> Proof:
    report = loaded.load_report
    what = f"encoder tensors missing ({len(report.loaded)} read; {len(report.unused)} without use, such as heads)"
    return Proof("weights", what, float(len(report.missing)), 0.0)


def _vocabulary_proof(loaded: LoadedModel) -> Proof:
    report = vocabulary_report(loaded)
    absent = [name for name, present in report.special.items() if not present and name in ("cls", "sep", "unk")]
    what = f"ids beyond the embedding or special tokens missing ({report.tokens} ids, {report.embedding_rows} rows)"
    return Proof("vocabulary", what, float(report.out_of_range + len(absent)), 0.0)


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _recomputation_proofs(case: Case) -> list[Proof]:
    """Every recorded tensor of every layer from the recorded ones before it, in float64 from the weights."""
    steps = _steps(case)
    worst: dict[str, list[float]] = {name: [] for name in steps}
    for layer, of in case.layers():
        for name, (_, step) in steps.items():
            worst[name].append(deviation(step(layer, of), of(name)))
    return [Proof(f"recomputed {name}", steps[name][0], _largest(worst[name]), TOLERANCE) for name in steps]


Step = Callable[[int, Reader], Tensor]


def _steps(case: Case) -> dict[str, tuple[str, Step]]:
    loaded, weights = case.loaded, case.weights
    shape, family = loaded.shape, loaded.family
    blocks = family.blocks(loaded.model)
    at = shape.weight_layer

    def linear(path: str) -> Callable[[int, Tensor], Tensor]:
        held = {layer: affine_of(block.get_submodule(path)) for layer, block in enumerate(blocks)}
        return lambda layer, x: held[layer](x)

    def norm(path: str, name: str) -> Step:
        return lambda layer, of: norm_of(blocks[layer].get_submodule(path))(of(name))

    def head(weight: Tensor, bias: Tensor) -> Step:
        return lambda layer, of: of("hidden_states") @ weight[at[layer]].mT + bias[at[layer]][:, None]

    def projection(layer: int, of: Reader) -> Tensor:
        per_head = of("head_outputs") @ weights.output[at[layer]].mT
        return per_head.sum(dim=0) + weights.output_bias[at[layer]]

    widen, narrow, activation = linear(family.mlp_input), linear(family.mlp_output), activation_of(_config(loaded))

    def mlp(layer: int, of: Reader) -> Tensor:
        return narrow(layer, activation(widen(layer, of("attention_norm"))))

    scale = shape.head_width**-0.5
    return {
        "q": ("x W_Q^T + b_Q, by head", head(weights.query, weights.query_bias)),
        "k": ("x W_K^T + b_K, by head", head(weights.key, weights.key_bias)),
        "v": ("x W_V^T + b_V, by head", head(weights.value, weights.value_bias)),
        "scores": ("Q K^T / sqrt(dk)", lambda layer, of: of("q") @ of("k").mT * scale),
        "attention": ("softmax of the scores", lambda layer, of: of("scores").softmax(dim=-1)),
        "head_outputs": ("A V", lambda layer, of: of("attention") @ of("v")),
        "attention_projection": ("head outputs W_O^T + b_O", projection),
        "attention_sum": ("x + projection", lambda layer, of: of("hidden_states") + of("attention_projection")),
        "attention_norm": ("first LayerNorm of the sum", norm(family.first_norm, "attention_sum")),
        "mlp_output": ("MLP", mlp),
        "mlp_sum": ("normed + MLP", lambda layer, of: of("attention_norm") + of("mlp_output")),
        "layer_outputs": ("second LayerNorm of the sum", norm(family.second_norm, "mlp_sum")),
    }


def _config(loaded: LoadedModel) -> Any:
    return loaded.model.config


def _bilinear_proof(case: Case) -> Proof:
    """softmax(x~ M~ x~^T / sqrt(dk)) against the recorded attention, over all heads of all sentences."""
    query, key = case.weights.bilinear_factors()
    at, scale = case.loaded.shape.weight_layer, case.loaded.shape.head_width**-0.5
    excess, largest = [], 0.0
    for layer, of in case.layers():
        x = torch.nn.functional.pad(of("hidden_states"), (0, 1), value=1.0)
        scores = (x @ query[at[layer]].mT) @ (x @ key[at[layer]].mT).mT * scale
        excess.append(float((scores.softmax(dim=-1) - of("attention")).abs().max()))
        largest = max(largest, float(of("scores").abs().max()))
    bound = max(TOLERANCE, SCORE_TOLERANCE * largest)
    return Proof("bilinear forms", "softmax(x~ M~ x~^T / sqrt(dk)) against attention", _largest(excess), bound)


def _row_sum_proof(case: Case) -> Proof:
    sums = [float((of("attention").sum(dim=-1) - 1).abs().max()) for _, of in case.layers()]
    return Proof("row sums", "attention rows sum to 1", _largest(sums), TOLERANCE)


def _determinism_proof(case: Case) -> Proof:
    again = (record(case.loaded, [text], needs=EVERYTHING) for text in case.texts)
    differing = sum(not _same(first, second) for first, second in zip(case.records, again, strict=True))
    return Proof("determinism", "sentences whose second pass differs in a bit", float(differing), 0.0)


def _same(first: ForwardRecord, second: ForwardRecord) -> bool:
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in AXES)


def _batch_proof(case: Case) -> Proof:
    """Sentences of one length together against each alone."""
    by_length: dict[int, list[int]] = {}
    for index, text in enumerate(case.texts):
        by_length.setdefault(len(text), []).append(index)
    worst = [0.0]
    for indices in by_length.values():
        batch = record(case.loaded, [case.texts[index] for index in indices], needs=EVERYTHING)
        for row, index in enumerate(indices):
            worst.extend(
                deviation(getattr(batch, name)[row].double(), getattr(case.records[index], name)[0].double())
                for name in AXES
            )
    return Proof("batch invariance", "every tensor, alone against in a batch", _largest(worst), TOLERANCE)


def _padding_proof(case: Case) -> Proof:
    """All sentences in one padded and masked batch against each alone: does the model obey its mask?"""
    loaded, longest = case.loaded, max(map(len, case.texts))
    filler = loaded.tokenizer.pad_token_id or 0
    ids, segments, mask = (
        torch.tensor([[*values(text), *[blank] * (longest - len(text))] for text in case.texts], device=loaded.device)
        for values, blank in (
            (lambda text: text.ids, filler),
            (lambda text: text.segment, 0),
            (lambda text: [1] * len(text), 0),
        )
    )
    depths = run_pass(loaded, ids, segments, mask, needs=frozenset({"hidden_states"}))["hidden_states"]
    worst = [
        deviation(state[row, : len(text)].double(), case.records[row].layer("hidden_states", depth)[0].double())
        for depth, state in enumerate(depths)
        for row, text in enumerate(case.texts)
    ]
    return Proof(
        "padding invariance", "hidden states, alone against padded and masked", _largest(worst), PADDING_TOLERANCE
    )


def describe_model(loaded: LoadedModel) -> dict[str, Any]:
    """What `bertgeo info` prints: architecture, shapes, parameters, hashes."""
    shape, config = loaded.shape, _config(loaded)
    report = vocabulary_report(loaded)
    parameters = {id(p): p.numel() for p in loaded.model.parameters()}
    embeddings = sum(p.numel() for name, p in loaded.model.named_parameters() if name.startswith("embeddings"))
    return {
        "family": shape.family,
        "layers": shape.layers,
        "layers with weights of their own": shape.weight_layers,
        "heads per layer": shape.heads,
        "width d": shape.width,
        "head width dk": shape.head_width,
        "MLP width": getattr(config, "intermediate_size", None) or config.hidden_dim,
        "activation": activation_of(config).name,
        "W_Q, W_K, W_V of a head": f"{shape.head_width} x {shape.width} (rows of the stored matrix)",
        "W_O of a head": f"{shape.width} x {shape.head_width} (columns of the stored matrix)",
        "M_h = W_Q^T W_K": f"{shape.width} x {shape.width}, rank at most {shape.head_width}",
        "parameters": sum(parameters.values()),
        "of these in embeddings": embeddings,
        "vocabulary": report.tokens,
        "longest text (tokens)": loaded.max_tokens,
        "segment ids": loaded.segments,
        "device": loaded.device,
        "dtype": loaded.dtype,
        **{name.replace("_", " "): value for name, value in loaded.identity.items()},
    }
