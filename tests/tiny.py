"""Small random models that the tests save to folders: real tokenizers, sharp attention, biases that matter."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

# fmt: off
WORDS = (
    "the", "a", "cat", "cats", "dog", "dogs", "play", "sat", "on", "in", "mat", "river", "bank", "money", "we", "i",
    "it", "is", "and", "by", "to", "of", "was", "very", "ran", "he", "she", "old", "not", "no", "water", "tree",
)
# fmt: on
PIECES = ("##ing", "##s", "##ed", "##er")
MARKS = (*string.punctuation, *string.digits)
LETTERS = tuple(string.ascii_lowercase)
CAPITALS = tuple(string.ascii_uppercase)

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "ernie")


def tiny_bert(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save a random BERT (2 layers, 4 heads, hidden 48, 64 positions, lower-case WordPiece) and give its folder back.

    `changes` go to BertConfig.
    """
    tokenizer = wordpiece_tokenizer()
    config = transformers.BertConfig(**{**SIZES, "vocab_size": len(tokenizer), **changes})
    return save(transformers.BertModel(config), tokenizer, folder, seed)


def tiny_family(family: str, folder: Path, *, layers: int = 2, seed: int = 0, **changes: Any) -> Path:
    """Save a random model of any supported family, with a tokenizer of the family's own kind.

    ALBERT has 4 layers that share one group of weights; ALBERT and ELECTRA embed into fewer channels than they hide.
    """
    tokenizer = TOKENIZERS[family]()
    model_class, sizes = MODELS[family]
    config = model_class.config_class(**{**sizes(layers), **ids_of(tokenizer), **changes})
    return save(model_class(config), tokenizer, folder, seed)


def tiny_head(model_class: str, family: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save a random model of any family with a head, by the name of its class in transformers."""
    tokenizer = TOKENIZERS[family]()
    build = getattr(transformers, model_class)
    config = build.config_class(**{**MODELS[family][1](2), **ids_of(tokenizer), **changes})
    return save(build(config), tokenizer, folder, seed)


def save(model: Any, tokenizer: Any, folder: Path, seed: int) -> Path:
    """Fill a model with seeded random weights and write it with its tokenizer."""
    randomise(model, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def randomise(model: Any, seed: int = 0) -> None:
    """Seeded weights: gains around 1, everything else wide enough that attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight.add_(1.0)


def ids_of(tokenizer: Any) -> dict[str, int]:
    return {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}


def wordpiece_tokenizer() -> Any:
    """[PAD] [UNK] [CLS] [SEP] [MASK], some words, marks, digits, letters: any English text becomes known pieces."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    inner = [f"##{piece}" for piece in LETTERS + tuple(string.digits)]
    tokens = list(dict.fromkeys((*special, *WORDS, *PIECES, *MARKS, *LETTERS, *inner)))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return transformers.BertTokenizer(vocab=vocabulary, do_lower_case=True, model_max_length=64)


def byte_level_tokenizer() -> Any:
    """RoBERTa's: all 256 bytes, and a merged token for each word after a space."""
    alphabet = sorted(ByteLevel.alphabet())
    merges = list(dict.fromkeys(merge for word in WORDS for merge in merges_of(f"\u0120{word}")))
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *alphabet, *("".join(merge) for merge in merges), "<mask>"]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return transformers.RobertaTokenizer(vocab=vocabulary, merges=merges)


def merges_of(word: str) -> list[tuple[str, str]]:
    """The merges that build a word from the left."""
    return [(word[:end], word[end]) for end in range(1, len(word))]


def unigrams(special: tuple[str, ...]) -> list[tuple[str, float]]:
    """Special tokens, then words (likely), then single characters (unlikely)."""
    words = [(f"\u2581{word}", -2.0) for word in WORDS if len(word) > 1]
    characters = [(mark, -8.0) for mark in ("\u2581", *LETTERS, *CAPITALS, *MARKS)]
    return [(token, 0.0) for token in special] + words + characters


def xlm_roberta_tokenizer() -> Any:
    return transformers.XLMRobertaTokenizer(vocab=[*unigrams(("<s>", "<pad>", "</s>", "<unk>")), ("<mask>", 0.0)])


def camembert_tokenizer() -> Any:
    special = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>")
    return transformers.CamembertTokenizer(vocab=[*unigrams(special), ("<mask>", 0.0)])


def albert_tokenizer() -> Any:
    return transformers.AlbertTokenizer(vocab=unigrams(("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")))


def usual(layers: int) -> dict[str, Any]:
    return {**SIZES, "num_hidden_layers": layers}


def embedded(layers: int) -> dict[str, Any]:
    return {**usual(layers), "embedding_size": 24}


def shared(layers: int) -> dict[str, Any]:
    return {**embedded(max(layers, 4)), "num_hidden_groups": 1}


def after_padding(layers: int) -> dict[str, Any]:
    return {**usual(layers), "type_vocab_size": 1, "bos_token_id": 0, "eos_token_id": 2}


def distilled(layers: int) -> dict[str, Any]:
    return {"dim": 48, "n_layers": layers, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 64}


MODELS: dict[str, tuple[Any, Any]] = {
    "bert": (transformers.BertModel, usual),
    "roberta": (transformers.RobertaModel, after_padding),
    "xlm-roberta": (transformers.XLMRobertaModel, after_padding),
    "camembert": (transformers.CamembertModel, after_padding),
    "electra": (transformers.ElectraModel, embedded),
    "distilbert": (transformers.DistilBertModel, distilled),
    "albert": (transformers.AlbertModel, shared),
    "ernie": (transformers.ErnieModel, usual),
}
TOKENIZERS: dict[str, Any] = {
    "bert": wordpiece_tokenizer,
    "roberta": byte_level_tokenizer,
    "xlm-roberta": xlm_roberta_tokenizer,
    "camembert": camembert_tokenizer,
    "electra": wordpiece_tokenizer,
    "distilbert": wordpiece_tokenizer,
    "albert": albert_tokenizer,
    "ernie": wordpiece_tokenizer,
}
