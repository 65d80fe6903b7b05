"""States kept on disk while a corpus is run: killed at any moment, the run goes on from the shards that are whole.

A node holds what the passes over 2^level neighbouring shards gave. Two neighbours are merged as soon as both are there,
so that a corpus of any length leaves few files, and the tree depends on the number of shards alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import pandas as pd

from . import states
from .errors import BertgeoError, UsageError
from .observation import Observed

MANIFEST = "manifest.json"
TABLES = "per-text"
SUFFIX = ".state"
LOCK = "lock"


@dataclass(frozen=True, order=True)
class Node:
    """2^level neighbouring shards, from number index 2^level on."""

    level: int
    index: int

    @property
    def shards(self) -> range:
        """The shards below."""
        return range(self.index << self.level, (self.index + 1) << self.level)

    @property
    def sibling(self) -> Node:
        """The node with which this one has its parent in common."""
        return Node(self.level, self.index ^ 1)

    @property
    def parent(self) -> Node:
        """The node above."""
        return Node(self.level + 1, self.index >> 1)


class Checkpoint:
    """The nodes in a folder, each in a file whose name holds its SHA-256: a damaged one is as good as none.

    Tables of per-text values lie beside the nodes, a file a shard; a node knows their checksums.
    """

    def __init__(self, folder: Path, modules: Sequence[str]):
        self.folder = folder
        self.modules = tuple(modules)
        self.nodes = {node: path for node, path in _files(folder) if _sound(path)}
        self._drop_covered()
        self._stale = self._shards_without_tables()

    def holds(self, shard: int) -> bool:
        """Whether nothing of this shard is missing."""
        return shard not in self._stale and self._covers(shard)

    @property
    def shards(self) -> list[int]:
        """Numbers of the shards that are whole."""
        return sorted(shard for node in self.nodes for shard in node.shards if shard not in self._stale)

    def add(self, shard: int, observed: Observed, tables: Mapping[str, pd.DataFrame]) -> None:
        """Keep what one shard gave, its tables first, and merge it with its neighbours."""
        for name, table in tables.items():
            path = f"{name}/shard-{shard:06}.parquet"
            digest = _write_whole(self.folder / TABLES / path, _parquet(table))
            observed.tables[path] = digest
        self._stale.discard(shard)
        if not self._covers(shard):
            self._put(Node(0, shard), observed)

    def adopt(self, other: Checkpoint) -> None:
        """Take over the nodes of another folder. Raises BertgeoError when both hold the same shard."""
        for node in sorted(other.nodes):
            if any(self._covers(shard) for shard in node.shards):
                raise BertgeoError(f"two parts hold shard {node.shards[0]}", "Give each part once.")
            self._put(node, other.read(node))

    def read(self, node: Node) -> Observed:
        """What a node holds."""
        observed = states.from_bytes(self.nodes[node].read_bytes(), [*self.modules, Observed.__module__])
        assert isinstance(observed, Observed)
        return observed

    def merged(self) -> Observed | None:
        """Everything, the rest of the tree merged from the right; None when there is no shard."""
        nodes = sorted(self.nodes, key=lambda node: node.shards[0])
        read = (self.read(node) for node in reversed(nodes))
        return reduce(lambda right, left: left.merge(right), read) if nodes else None

    def settle(self) -> None:
        """Merge the neighbours that a kill between writing the second and their parent has left."""
        while pairs := [node for node in sorted(self.nodes) if node.index % 2 == 0 and node.sibling in self.nodes]:
            self._merge_up(pairs[0])

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _put(self, node: Node, observed: Observed) -> None:
        self._write(node, observed)
        self._merge_up(node)

    def _merge_up(self, node: Node) -> None:
        while node.sibling in self.nodes:
            first, second = sorted((node, node.sibling))
            self._write(node.parent, self.read(first).merge(self.read(second)))
            for child in (first, second):
                self.nodes.pop(child).unlink()
            node = node.parent

    def _write(self, node: Node, observed: Observed) -> None:
        data = states.to_bytes(observed)
        path = self.folder / f"{node.level:02}-{node.index:08}-{_digest(data)}{SUFFIX}"
        _write_whole(path, data)
        self.nodes[node] = path

    def _covers(self, shard: int) -> bool:
        return any(shard in node.shards for node in self.nodes)

    def _drop_covered(self) -> None:
        """Children that a kill between writing the parent and deleting them has left."""
        for node in sorted(self.nodes):
            if any(other.level > node.level and node.shards[0] in other.shards for other in self.nodes):
                with suppress(OSError):
                    self.nodes.pop(node).unlink()

    def _shards_without_tables(self) -> set[int]:
        if not (self.folder / TABLES).is_dir():
            return set()
        tables = {path: digest for node in self.nodes for path, digest in self.read(node).tables.items()}
        return {
            int(path.rpartition("-")[2].split(".")[0])
            for path, digest in tables.items()
            if not _is(self.folder / TABLES / path, digest)
        }


@contextmanager
def opened(
    folder: Path, manifest: Mapping[str, Any], modules: Sequence[str], *, resume: bool, force: bool
) -> Iterator[Checkpoint]:
    """The checkpoint of one run, for this process alone; it stays behind unless `remove` was called.

    Raises UsageError when an unfinished run is there and neither `resume` nor `force` was given, when the run that is
    to be resumed was another one, or when another process is at it.
    """
    with _locked(folder):
        former = _manifest(folder)
        if former is None and not force and any(path.name != LOCK for path in folder.iterdir()):
            raise UsageError(f"{folder.name} holds files of no run", "Move them away, or delete them by --force.")
        if former is None or (force and not resume):
            _clear(folder)
            _write_whole(folder / MANIFEST, _json(manifest))
        elif not resume:
            raise UsageError(
                "an unfinished run of this report was kept", "--resume goes on with it, --force starts anew."
            )
        else:
            _refuse_changed(former, json.loads(_json(manifest)))
        checkpoint = Checkpoint(folder, modules)
        checkpoint.settle()
        try:
            yield checkpoint
        finally:
            if not checkpoint.nodes:
                checkpoint.remove()


def _refuse_changed(former: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    before, now = _flat(former), _flat(present)
    changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if changed:
        told = "; ".join(f"{name} was {before.get(name)}, is {now.get(name)}" for name in changed[:4])
        raise UsageError(f"--resume: {told}", "Run it as before, or start anew by --force.")


def _flat(content: Any, above: str = "") -> dict[str, Any]:
    if not isinstance(content, Mapping):
        return {above: content}
    return {
        key: value
        for name, item in content.items()
        for key, value in _flat(item, f"{above}.{name}".lstrip(".")).items()
    }


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise UsageError(f"cannot write {folder.name}: {error.strerror}", "Choose another --output folder.") from None
    with lock:
        _lock(lock.fileno())
        yield


def _lock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two runs into one folder are then the user's care
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError("another run is writing this report", "Wait for it, or choose another --output.") from None


def _files(folder: Path) -> Iterator[tuple[Node, Path]]:
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with suppress(ValueError):
            level, index, _ = path.name.split("-")
            yield Node(int(level), int(index)), path


def _sound(path: Path) -> bool:
    return _is(path, path.name.removesuffix(SUFFIX).rpartition("-")[2])


def _is(path: Path, digest: str) -> bool:
    try:
        return _digest(path.read_bytes()) == digest
    except OSError:
        return False


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False).encode()


def _parquet(table: pd.DataFrame) -> bytes:
    return table.to_parquet(None, index=False, engine="pyarrow")


def _write_whole(path: Path, data: bytes) -> str:
    """Write to a neighbour, flush, rename: a kill leaves the file whole or not at all. Returns its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    return _digest(data)
