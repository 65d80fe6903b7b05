"""A recorded pass as a safetensors file: every tensor, the factors of every bilinear form, and what they are."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from analyses.kit.record import AXES, TokenizedText

from .errors import UsageError
from .models import LoadedModel
from .recording import EVERYTHING, record

FACTOR_AXES = ("weight_layer", "head", "channel", "width_and_bias")
METADATA_KEY = "bertgeo"
"""One key with JSON in it: safetensors writes several keys in random order, and equal runs must give equal bytes."""


def save_record(
    loaded: LoadedModel, text: TokenizedText, path: Path, *, backend: str = "eager"
) -> dict[str, list[int]]:
    """Write the pass over one text; returns the shape of every tensor.

    `query_factors` and `key_factors` are [W_Q b_Q] and [W_K b_K] of each head: M~ = query_factors^T key_factors, and
    scores = x~ M~ x~^T / sqrt(channel) with x~ = (x, 1), x the layer's input. Raises UsageError when the file cannot
    be written.
    """
    recorded = record(loaded, [text], needs=EVERYTHING, backend=backend)
    tensors = {name: getattr(recorded, name).cpu().contiguous() for name in AXES}
    factors = loaded.head_weights().bilinear_factors()
    dtype = next(loaded.model.parameters()).dtype
    tensors |= {f"{name}_factors": factor.to(dtype) for name, factor in zip(("query", "key"), factors, strict=True)}
    _write(tensors, {METADATA_KEY: json.dumps(_metadata(loaded, text, backend), sort_keys=True)}, path)
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def load_record(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file that `save_record` wrote, and their metadata: axes, text, model, arithmetic."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return tensors, json.loads(file.metadata()[METADATA_KEY])


def _metadata(loaded: LoadedModel, text: TokenizedText, backend: str) -> dict[str, Any]:
    axes = {name: list(axes) for name, axes in AXES.items()}
    return {
        "axes": axes | {"query_factors": list(FACTOR_AXES), "key_factors": list(FACTOR_AXES)},
        "weight_layer": list(loaded.shape.weight_layer),
        "text": asdict(text),
        "model": dict(loaded.identity),
        "arithmetic": {"dtype": loaded.dtype, "device": loaded.device, "attention_backend": backend},
        "torch": str(torch.__version__),
    }


def _write(tensors: dict[str, Tensor], metadata: dict[str, str], path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder", "Name a file in it, such as record.safetensors.")
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(save(tensors, metadata))
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}", "Choose another --output file.") from None
    finally:
        with suppress(OSError):
            temporary.unlink()
