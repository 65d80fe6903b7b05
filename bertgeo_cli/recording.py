"""The hooked forward pass: the one place that meets transformers' attention.

A function registered with transformers' AttentionInterface receives each layer's query, key, value and mask already
split into heads; forward hooks on four modules of each block give its six inner points. Both are in place only while
a pass runs.
"""

from __future__ import annotations

import os

# MKL picks its summation order by thread count and matrix size unless told not to, and reads this once, before its
# first product: with it, 1 and 2 threads and batches of 1 and 32 give the same bits in float32.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

import copy
import ctypes
import mmap
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from analyses.kit.record import AXES, ForwardRecord, TokenizedText, by_pass, under

from .cores import cores
from .errors import BertgeoError
from .models import LoadedModel
from .surgery import ablated

BACKENDS = ("eager", "sdpa")
ATTENTION_TENSORS = frozenset({"q", "k", "v", "scores", "attention", "head_outputs"})
BLOCK_TENSORS = frozenset(AXES) - ATTENTION_TENSORS
EVERYTHING = frozenset(AXES)


def _keep_freed_memory() -> None:
    """Ask glibc's malloc to reuse freed memory instead of giving it back after every pass.

    A record holds what a plain pass frees layer by layer; fetching that memory anew from the system each time costs
    up to a third of a small batch's pass. Other C libraries have no mallopt, and nothing happens.
    """
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(mmap_threshold, 2**25)  # the most that glibc takes
    mallopt(trim_threshold, 2**30)
    mallopt(arena_max, 2)  # otherwise every new thread may get an arena, which then keeps what was freed in it


_keep_freed_memory()


SPARE = 2**26
"""Bytes of freed memory that a process keeps between passes: to fetch all of it anew costs an eighth of a pass."""
_HELD = {"after": 0}
"""Bytes that this process held when it last gave memory back."""


def give_back_memory(spare: int = 0) -> None:
    """Give freed memory back to the system after all: what lies scattered would add up.

    With `spare` only when the process has grown by more than so many bytes since it last did.
    """
    with suppress(AttributeError, OSError, TypeError):
        if not spare or _held() - _HELD["after"] > spare:
            ctypes.CDLL(None).malloc_trim(0)
            _HELD["after"] = _held()


def _held() -> int:
    """Bytes that this process holds in memory (Linux)."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE


class RecordingError(BertgeoError):
    """The pass did not report what it should have: nothing that it gave can be used."""

    exit_code = 4


@dataclass(frozen=True)
class Part:
    """Neighbouring texts of one token count in a batch whose texts lie end to end."""

    texts: int
    tokens: int

    def __len__(self) -> int:
        return self.texts * self.tokens


def parts_of(texts: Sequence[TokenizedText]) -> list[tuple[Part, list[TokenizedText]]]:
    """The texts of a batch by token count, each run of neighbours that share one."""
    runs = ((tokens, list(alike)) for tokens, alike in groupby(texts, len))
    return [(Part(len(own), tokens), own) for tokens, own in runs]


class Recorder:
    """Collects references to the tensors of one pass, layer by layer, in the order in which layers report.

    With `parts`, the pass runs over texts that lie end to end; each part has layers of its own, and attention never
    crosses from one text into another. Without, the pass is a plain one over (batch, token).
    """

    def __init__(self, needs: frozenset[str], backend: str, parts: Sequence[Part] | None = None):
        unknown = needs - EVERYTHING
        if unknown:
            raise ValueError(f"cannot record {sorted(unknown)}; choose from {sorted(EVERYTHING)}")
        self.needs = needs
        self.backend = backend
        self.parts = parts
        self.layers: list[dict[str, list[Tensor]]] = [
            {name: [] for name in sorted(needs)} for _ in range(1 if parts is None else len(parts))
        ]
        self.reporters: list[nn.Module] = []

    def keep(self, name: str, tensor: Tensor) -> None:
        """Keep a reference to a tensor of all texts (batch, token, width), if it was asked for."""
        if name in self.needs:
            for part, own in enumerate(self._cut(tensor)):
                self._keep(part, name, own)

    def _keep(self, part: int, name: str, tensor: Tensor) -> None:
        if name in self.needs:
            self.layers[part][name].append(tensor)

    def _cut(self, tensor: Tensor) -> list[Tensor]:
        """Views (text, token, ...) of the parts of (1, token, ...)."""
        if self.parts is None:
            return [tensor]
        rest = tensor.shape[2:]
        own = tensor[0].split([len(part) for part in self.parts])
        return [one.view(part.texts, part.tokens, *rest) for part, one in zip(self.parts, own, strict=True)]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Scaled dot-product attention that leaves a trace; the signature is transformers'."""
        self.reporters.append(module)
        scaling = query.size(-1) ** -0.5 if scaling is None else scaling
        output = query.new_empty(query.size(0), query.size(2), query.size(1), value.size(3))
        cuts = [self._cut(tensor.transpose(1, 2)) for tensor in (query, key, value)]
        for part, (queries, keys, values, target) in enumerate(zip(*cuts, self._cut(output), strict=True)):
            q, k, v = (tensor.transpose(1, 2) for tensor in (queries, keys, values))
            target.copy_(self._attend(part, q, k, v, attention_mask, scaling).transpose(1, 2))
        return output, None

    def _attend(
        self, part: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        """Head outputs (text, head, token, channel) of texts of one token count."""
        for name, tensor in (("q", query), ("k", key), ("v", value)):
            self._keep(part, name, tensor)
        if self.backend == "eager":
            output = torch.matmul(self._attention(part, query, key, mask, scaling), value)
        else:
            if self.needs & {"scores", "attention"}:
                self._attention(part, query, key, mask, scaling)
            output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        self._keep(part, "head_outputs", output)
        return output

    def _attention(self, part: int, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        # In place: the same bits as transformers' own, without two more matrices to fetch memory for.
        scores = torch.matmul(query, key.transpose(2, 3)).mul_(scaling)
        if mask is not None:
            scores.add_(mask)
        self._keep(part, "scores", scores)
        attention = nn.functional.softmax(scores, dim=-1)
        self._keep(part, "attention", attention)
        return attention


@contextmanager
def recording(loaded: LoadedModel, recorder: Recorder) -> Iterator[None]:
    """A pass run inside is recorded. On leaving, hooks, registry and configuration are as they were before."""
    name = f"bertgeo_{uuid.uuid4().hex}"
    config: Any = loaded.model.config
    before = config._attn_implementation
    handles: list[Any] = []
    AttentionInterface.register(name, recorder.attend)
    AttentionMaskInterface.register(name, eager_mask)
    try:
        config._attn_implementation = name
        handles.extend(_hook_blocks(loaded, recorder))
        loaded.model.eval()
        yield
    finally:
        for handle in handles:
            handle.remove()
        config._attn_implementation = before
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def _hook_blocks(loaded: LoadedModel, recorder: Recorder) -> Iterator[Any]:
    """Hooks for the points asked for. A shared block is hooked once and reports at every call."""
    if not recorder.needs & BLOCK_TENSORS:
        return
    family, blocks = loaded.family, loaded.family.blocks(loaded.model)
    points = {
        family.attention_output: (None, "attention_projection"),
        family.first_norm: ("attention_sum", "attention_norm"),
        family.mlp_output: (None, "mlp_output"),
        family.second_norm: ("mlp_sum", "layer_outputs"),
    }
    for block in {id(block): block for block in blocks}.values():
        for path, (entering, leaving) in points.items():
            kept = {entering, leaving, "hidden_states" if leaving == "layer_outputs" else leaving}
            if not kept & recorder.needs:
                continue
            yield block.get_submodule(path).register_forward_hook(_keeper(recorder, entering, leaving))
    if "hidden_states" in recorder.needs:
        yield blocks[0].register_forward_pre_hook(_depth_zero(recorder), with_kwargs=True)


def _keeper(recorder: Recorder, entering: str | None, leaving: str) -> Any:
    def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        if entering:
            recorder.keep(entering, arguments[0])
        recorder.keep(leaving, output)
        if leaving == "layer_outputs":
            recorder.keep("hidden_states", output)

    return hook


def _depth_zero(recorder: Recorder) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not recorder.layers[0]["hidden_states"]:
            recorder.keep("hidden_states", arguments[0] if arguments else keywords["hidden_states"])

    return hook


Calls = Mapping[str, list[tuple[Tensor, Tensor]]]
"""What went into some modules and what came out, by the name that each was given, call by call."""


@contextmanager
def watching(modules: Mapping[str, nn.Module]) -> Iterator[Calls]:
    """The calls of these modules by the passes run inside: for points that have no name in a record."""
    calls: Calls = {name: [] for name in modules}
    handles = [module.register_forward_hook(_noting(calls[name])) for name, module in modules.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _noting(calls: list[tuple[Tensor, Tensor]]) -> Any:
    def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((arguments[0], output))

    return hook


def run_pass(
    loaded: LoadedModel,
    ids: Tensor,
    segments: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    needs: frozenset[str],
    backend: str = "eager",
    differentiable: bool = False,
) -> dict[str, list[Tensor]]:
    """One recorded pass over token ids (batch, token); a mask is for proofs only, analyses never pad.

    With `differentiable` what is recorded hangs on one graph that begins at the word embeddings: gradients of any of
    it by any of it are there; parameters have none.

    Raises: RecordingError when a layer did not report exactly once.
    """
    recorder = Recorder(needs, backend)
    with _followed(loaded) if differentiable else torch.inference_mode():
        _pass(loaded, recorder, ids, segments, mask)
    return recorder.layers[0]


@contextmanager
def _followed(loaded: LoadedModel) -> Iterator[None]:
    """Gradients are kept of a pass run inside, from the word embeddings on."""
    embedding = loaded.model.get_submodule(loaded.family.embedding)
    handle = embedding.register_forward_hook(lambda module, ids, output: output.detach().requires_grad_())
    try:
        with torch.enable_grad():
            yield
    finally:
        handle.remove()


def _pass(
    loaded: LoadedModel,
    recorder: Recorder,
    ids: Tensor,
    segments: Tensor | None,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
) -> None:
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    if loaded.segments:
        inputs["token_type_ids"] = torch.zeros_like(ids) if segments is None else segments
    with recording(loaded, recorder):
        loaded.model(**inputs)
    _check_complete(recorder, loaded)


def _check_complete(recorder: Recorder, loaded: LoadedModel) -> None:
    """Every layer must have reported once, in the order of the pass, and every hook once a layer."""
    inside = loaded.family.query.rpartition(".")[0]
    expected = [block.get_submodule(inside) for block in loaded.family.blocks(loaded.model)]
    wrong = [
        f"attention of layer {layer}"
        for layer, (reporter, module) in enumerate(zip_longest(recorder.reporters, expected))
        if reporter is not module
    ]
    layers = loaded.shape.layers
    wrong += [
        f"{name}: {len(tensors)} of {layers + (name == 'hidden_states')}"
        for part in recorder.layers
        for name, tensors in part.items()
        if len(tensors) != layers + (name == "hidden_states")
    ]
    if wrong:
        raise RecordingError(
            f"the model's layers did not each report once ({'; '.join(wrong)})",
            "Its attention does not go through transformers' AttentionInterface; use an unmodified supported encoder.",
        )


def record(
    loaded: LoadedModel, texts: Sequence[TokenizedText], *, needs: frozenset[str], backend: str = "eager"
) -> ForwardRecord:
    """The recorded pass over texts of one token count. Raises ValueError when their lengths differ."""
    lengths = {len(text) for text in texts}
    if len(lengths) != 1:
        raise ValueError(f"a record holds texts of one token count, not {sorted(lengths)}: there is no padding")
    return record_batch(loaded, texts, needs=needs, backend=backend)[0]


def record_batch(
    loaded: LoadedModel, texts: Sequence[TokenizedText], *, needs: frozenset[str], backend: str = "eager"
) -> list[ForwardRecord]:
    """One pass over texts of any token counts, a record for each run of neighbours that share one.

    Tensors named for an ablation (`skip/attention`) come from a pass of their own; where only such are asked for, the
    plain pass is not run.

    There is no padding: the texts lie end to end, positions begin anew with each, and attention stays inside. What
    works token by token then gets matrices of one good size, however rare a length is.
    """
    parts, alike = zip(*parts_of(texts), strict=True)
    inputs = {
        "ids": _end_to_end([text.ids for text in texts], loaded),
        "segments": _end_to_end([text.segment for text in texts], loaded),
        "positions": _end_to_end([loaded.family.positions(loaded.model, text.ids) for text in texts], loaded),
    }
    layers: list[dict[str, list[Tensor]]] = [{} for _ in parts]
    for ablation, names in by_pass(needs).items():
        recorder = Recorder(names, backend, parts)
        with torch.inference_mode(), ablated(loaded, ablation):
            _pass(loaded, recorder, **inputs)
        for held, found in zip(layers, recorder.layers, strict=True):
            held.update({under(ablation, name): tensors for name, tensors in found.items()})
    return [ForwardRecord(loaded.shape, own, held) for own, held in zip(alike, layers, strict=True)]


def _end_to_end(values: Iterable[Sequence[int]], loaded: LoadedModel) -> Tensor:
    return torch.tensor([[value for own in values for value in own]], device=loaded.device)


def records(
    loaded: LoadedModel,
    batches: Iterable[Sequence[TokenizedText]],
    *,
    needs: frozenset[str],
    backend: str = "eager",
    count: int | None = None,
) -> Iterator[ForwardRecord]:
    """The records of many batches, in their order, `count` passes at a time: by default as many as torch has threads.

    On a CPU a pass on each core is faster than all cores on one pass, and the caller's work on a record goes on beside
    the next passes. While this runs, torch has one thread here too.
    """
    count = count or torch.get_num_threads()
    if loaded.device != "cpu" or count < 2:
        for batch in batches:
            yield from record_batch(loaded, batch, needs=needs, backend=backend)
            give_back_memory(SPARE)
        return
    waiting: deque[_Recorded] = deque()
    with threads(1):
        try:
            for batch in batches:
                waiting.append(cores(count).submit(_on_a_twin, loaded, batch, needs, backend))
                if len(waiting) >= count:
                    yield from waiting.popleft().result()
                give_back_memory()  # pass by pass: a corpus of ten times the texts then takes hardly more
            while waiting:
                yield from waiting.popleft().result()
        finally:
            wait([future for future in waiting if not future.cancel()])


_Recorded = Future[list[ForwardRecord]]
_HERE = threading.local()


def _on_a_twin(
    loaded: LoadedModel, batch: Sequence[TokenizedText], needs: frozenset[str], backend: str
) -> list[ForwardRecord]:
    """The pass on this thread's own twin of the model, for hooks know of no threads."""
    twins = vars(_HERE).setdefault("twins", WeakKeyDictionary())
    if loaded.model not in twins:
        twins[loaded.model] = twin(loaded)
    return record_batch(twins[loaded.model], batch, needs=needs, backend=backend)


def twin(loaded: LoadedModel) -> LoadedModel:
    """The same model with modules of its own for hooks and settings; the weights are shared, not copied."""
    tensors = (*loaded.model.parameters(), *loaded.model.buffers())
    return replace(loaded, model=copy.deepcopy(loaded.model, {id(tensor): tensor for tensor in tensors}))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch works with so many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
