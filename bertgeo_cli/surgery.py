"""Passes that lack something: parts of every block, or the position embeddings.

As Dong et al. 2021 (arXiv 2103.03404) cut them out of BERT: `skip` removes the residual around attention alone, W_O's
output goes straight into the first LayerNorm; `mlp` makes the MLP the identity: it, its LayerNorm and its residual
vanish, and the block ends with the first LayerNorm; `both` does both. Or residuals alone: that around `attention`,
that around the `mlp`, which stays, or `both`. Everything is done through the adapter table, so for every family, and
shared blocks are cut once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from analyses.kit.record import ABLATIONS

from .families import Family
from .models import LoadedModel

Cut = Callable[[nn.Module, Family, ExitStack], None]


@contextmanager
def ablated(loaded: LoadedModel, ablation: str) -> Iterator[None]:
    """A pass run inside lacks these parts of every block; on leaving, the model is as it was before.

    Hooks that are set inside see the altered pass. Raises ValueError for an ablation that is not in ABLATIONS.
    """
    if ablation not in ABLATIONS:
        raise ValueError(f"unknown ablation {ablation!r}; choose from {', '.join(ABLATIONS)}")
    with _cut(loaded, CUTS[ablation]):
        yield


@contextmanager
def without_residuals(loaded: LoadedModel, kind: str) -> Iterator[None]:
    """A pass run inside lacks the residual connections of this kind; on leaving, the model is as it was before.

    Raises ValueError for a kind that is not in RESIDUALS.
    """
    if kind not in RESIDUALS:
        raise ValueError(f"unknown kind of residual {kind!r}; choose from {', '.join(RESIDUALS)}")
    with _cut(loaded, RESIDUALS[kind]):
        yield


@contextmanager
def _cut(loaded: LoadedModel, cuts: tuple[Cut, ...]) -> Iterator[None]:
    blocks = {id(block): block for block in loaded.family.blocks(loaded.model)}.values()
    with ExitStack() as undo:
        for block in blocks:
            for cut in cuts:
                cut(block, loaded.family, undo)
        yield


@contextmanager
def without_positions(loaded: LoadedModel) -> Iterator[None]:
    """A pass run inside adds 0 to every token instead of a position embedding; on leaving, all is as it was before."""
    embedding = loaded.model.get_submodule(loaded.family.position_embedding)
    handle = embedding.register_forward_hook(lambda module, arguments, output: torch.zeros_like(output))
    try:
        yield
    finally:
        handle.remove()


def _without_skip(block: nn.Module, family: Family, undo: ExitStack) -> None:
    """The first LayerNorm reads W_O's output, not its sum with the block's input."""
    _past_the_sum(block, family.attention_output, family.first_norm, undo)


def _without_mlp_skip(block: nn.Module, family: Family, undo: ExitStack) -> None:
    """The second LayerNorm reads the MLP's output, not its sum with the MLP's input."""
    _past_the_sum(block, family.mlp_output, family.second_norm, undo)


def _past_the_sum(block: nn.Module, output: str, norm: str, undo: ExitStack) -> None:
    held: list[Tensor] = []
    _hook(undo, block.get_submodule(output).register_forward_hook(_holding(held)))
    _hook(undo, block.get_submodule(norm).register_forward_pre_hook(lambda *_: (held.pop(),)))


def _without_mlp(block: nn.Module, family: Family, undo: ExitStack) -> None:
    """The second LayerNorm gives back what the first gave; the MLP's matrices are not multiplied."""
    held: list[Tensor] = []
    for path in (family.mlp_input, family.mlp_output):
        undo.callback(block.set_submodule, path, block.get_submodule(path))
        block.set_submodule(path, nn.Identity())
    _hook(undo, block.get_submodule(family.first_norm).register_forward_hook(_holding(held)))
    _hook(undo, block.get_submodule(family.second_norm).register_forward_hook(lambda *_: held.pop()))


def _holding(held: list[Tensor]) -> Callable[[nn.Module, Any, Tensor], None]:
    def hook(module: nn.Module, arguments: Any, output: Tensor) -> None:
        held[:] = [output]

    return hook


def _hook(undo: ExitStack, handle: torch.utils.hooks.RemovableHandle) -> None:
    undo.callback(handle.remove)


CUTS: Mapping[str, tuple[Cut, ...]] = {
    "none": (),
    "skip": (_without_skip,),
    "mlp": (_without_mlp,),
    "both": (_without_skip, _without_mlp),
}

RESIDUALS: Mapping[str, tuple[Cut, ...]] = {
    "none": (),
    "attention": (_without_skip,),
    "mlp": (_without_mlp_skip,),
    "both": (_without_skip, _without_mlp_skip),
}
"""Which residual connections a pass can lack; nothing else is taken away."""
