"""Which commands there are: the files of two folders and entry points, listed without importing any."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

GROUP = "bertgeo.analyses"
STUDY = "bertgeo_cli.study:Study"
BUILT_IN = {
    "run": """Several analyses over a corpus in one pass of the model, in one report.

    Texts stream through in shards, so a corpus of any length needs the same memory. States are kept beside the report
    until it is done: a run that was stopped or killed goes on by --resume. Its report has the same bytes as that of a
    run that never stopped, and as those of --workers, --dask and the jobs of an array (--shard, then bertgeo merge).
    What analyses of weights ask of texts (bilinear, redundancy) they ask of the same corpus.

    Example: bertgeo run corpus.txt --analyses attention,cone-index --set cone-index.layers=0-3 -o report
    """,
    "compare": """What moved between two checkpoints A and B of one architecture: heads, attention, hidden states.

    Of every head, from the weights: relative Frobenius change and cosine of M_h = W_Q^T W_K without biases (bilinear)
    and with them (homogeneous, [W_Q b_Q]^T [W_K b_K]) and of W_V^T W_O^T; change of W_Q, W_K, W_V, W_O; projection
    kernel (Yamagiwa et al., arXiv 2601.10266) over the dimension and largest principal angle of its four subspaces in
    A and B. From the texts: cosine of attention rows (Kovaleva et al. 2019 take it of whole padded maps) and their
    Jensen-Shannon divergence in nats; by depth linear CKA over all tokens (Kornblith et al. 2019), angles between the
    leading principal directions, and the cosine of each token's vector with itself. Which of these are read side by
    side is our own choice. A's tokenizer reads the texts, and a text that B's reads otherwise is refused.

    Example: bertgeo compare bert-base-uncased ./finetuned --corpus texts.txt
    """,
    "reproduce": """Published values measured again, each beside its own: which agree within what the source allows.

    The values of papers that belong to a public model are data (published.toml in the package, or --values): each with
    its source, how exactly it is known, and the tolerance that follows. Values of weights need the model alone; the
    others the texts that they were measured on (--corpus, with --only for those of one paper). Models are looked for
    on this machine, unless --download. What cannot be measured is listed with the reason. Exit 4 when a value differs;
    where the source leaves something open, such as which checkpoint it was, a difference counts as open.

    Example: bertgeo reproduce --model bert-base-uncased
    """,
    "merge": """Join the reports that the jobs of an array left (--shard i/n) into that of the whole corpus.

    Example: bertgeo merge part-1 part-2 part-3 -o report
    """,
    "check": """Prove what was loaded: weights, vocabulary, and the recorded pass recomputed from its parts.

    Every recorded tensor of the sample sentences is computed again in float64 from those before it; attention also
    from the bilinear forms, softmax(x~ M~ x~^T / sqrt(dk)) with x~ = (x, 1) and M~ = [W_Q b_Q]^T [W_K b_K]. Then row
    sums, determinism, batches and padding. Exit 4 when a proof fails.

    Example: bertgeo check --model bert-base-uncased
    """,
    "info": """The model's architecture, shapes, parameters and hashes.

    Example: bertgeo info
    """,
    "record": """Write every recorded tensor of one text, and the factors of every bilinear form, to a file.

    A safetensors file whose metadata holds axis names, tokens and the model's identity; [W_Q b_Q] and [W_K b_K] of
    each head stand for M_h = W_Q^T W_K, biases included.

    Example: bertgeo record "The river bank." -o river.safetensors
    """,
}
"""Commands that are neither analyses nor studies, with their help."""


@dataclass(frozen=True)
class Entry:
    """An analysis or a study by its command's name, the module that holds it and the module that defines its kind."""

    name: str
    module: str
    kind: str = "analyses.kit.analysis:Analysis"

    @cached_property
    def help(self) -> str:
        """The docstring of its class, read from the source."""
        spec = find_spec(self.module)
        if spec is None or spec.origin is None:
            return ""
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        documented = [node for node in tree.body if isinstance(node, ast.ClassDef) and self._is_kind(node)]
        return ast.get_docstring(documented[0]) or "" if documented else ""

    def load(self) -> type:
        """Import the module and return its class."""
        home, _, name = self.kind.partition(":")
        kind: type = getattr(import_module(home), name)
        module = import_module(self.module)
        found = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, kind) and value.__module__ == self.module
        ]
        if len(found) != 1:
            raise TypeError(f"{self.module} must define one {name}, it defines {len(found)}")
        return found[0]

    def _is_kind(self, node: ast.ClassDef) -> bool:
        name = self.kind.rpartition(":")[2]
        return any(ast.unparse(base).split("[")[0].rpartition(".")[2] == name for base in node.bases)


@cache
def entries() -> dict[str, Entry]:
    """Every analysis by name: the files of `analyses`, then installed entry points, which may not take a taken name."""
    found = {name: Entry(name, module) for name, module in _files_of("analyses").items()}
    for name, module in _installed():
        found.setdefault(name, Entry(name, module))
    return found


@cache
def studies() -> dict[str, Entry]:
    """Every study by name: the files of `bertgeo_cli.studies`."""
    return {name: Entry(name, module, STUDY) for name, module in _files_of("bertgeo_cli.studies").items()}


def commands() -> list[str]:
    """Every command, in the order of listings."""
    return [*entries(), *studies(), *BUILT_IN]


def _files_of(package: str) -> dict[str, str]:
    """The modules of a package by the name of each one's command."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations or [] if spec else []
    stems = sorted(path.stem for folder in folders for path in Path(folder).glob("[!_]*.py"))
    return {stem.replace("_", "-"): f"{package}.{stem}" for stem in stems}


def _installed() -> list[tuple[str, str]]:
    """Names and modules that other distributions register."""
    # importlib.metadata costs a third of the time of `bertgeo --help`, and mostly there is nothing to find.
    files = (file for folder in sys.path for file in Path(folder).glob("*.*-info/entry_points.txt"))
    if not any(f"[{GROUP}]" in file.read_text(encoding="utf-8", errors="replace") for file in files):
        return []
    from importlib.metadata import entry_points

    return sorted((point.name, point.value.partition(":")[0]) for point in entry_points(group=GROUP))
