"""A small masked-LM model trained on the sample data, for pages and tests: there is no embedded one to show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

SENTENCES = (Path(__file__).parents[1] / "sample_data" / "sentences.txt").read_text(encoding="utf-8").splitlines()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
STEPS, TEXTS, LENGTH = 200, 16, 32


@dataclass(frozen=True)
class Trained:
    """Where the model is, and its loss at every step of the training (nats a masked token)."""

    folder: Path
    losses: list[float]


def train_masked_lm(folder: Path, *, steps: int = STEPS) -> Trained:
    """Train BertForMaskedLM (2 layers, width 64) on the sample sentences, 15 % masked, and save it; some seconds."""
    torch.manual_seed(0)
    tokenizer = wordpiece_of_the_sample()
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    model = transformers.BertForMaskedLM(config)
    ids = tokenizer(SENTENCES, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = [step(model, ids[torch.randperm(len(ids))[:TEXTS]], optimizer) for _ in range(steps)]
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Trained(folder, losses)


def step(model: torch.nn.Module, ids: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    """One step on some sentences, newly masked."""
    chosen = (torch.rand(ids.shape) < 0.15) & (ids >= len(SPECIAL))
    masked = torch.where(chosen, SPECIAL.index("[MASK]"), ids)
    out = model(masked, attention_mask=(ids != 0).long(), labels=torch.where(chosen, ids, -100))
    optimizer.zero_grad()
    out.loss.backward()
    optimizer.step()
    return float(out.loss.detach())


def wordpiece_of_the_sample() -> transformers.BertTokenizer:
    """A lower-case WordPiece vocabulary of some 500 pieces, learned from the sentences."""
    learned = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    learned.normalizer, learned.pre_tokenizer = BertNormalizer(lowercase=True), BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False)
    learned.train_from_iterator(SENTENCES, trainer)
    return transformers.BertTokenizer(vocab=learned.get_vocab(), do_lower_case=True, model_max_length=64)
