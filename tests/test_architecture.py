"""The house: imports go one way, files stay short and documented, the folder is the registry."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bertgeo_cli import registry
from bertgeo_cli.cli import BUILT_IN

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("analyses/**/*.py"), *ROOT.glob("bertgeo_cli/**/*.py")])
ANALYSES = sorted(ROOT.glob("analyses/[!_]*.py"))
LONGEST_ANALYSIS = 350


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


each_source = pytest.mark.parametrize("path", SOURCES, ids=named)
each_analysis = pytest.mark.parametrize("path", ANALYSES, ids=named)


def test_import_contracts_are_kept() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def undocumented(tree: ast.AST, owner: str = "") -> Iterator[str]:
    """Classes and functions with a public name and no docstring; overridden methods have their parent's."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None and not (owner and node.name in INHERITED):
            yield f"{owner}{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node, f"{node.name}.")


INHERITED = {
    *(
        "needs",
        "needs_weights",
        "start",
        "update",
        "finalize",
        "merge",
        "listing",
        "per_text",
        "on_texts",
    ),  # of Analysis and State
    *("load", "check", "reading", "without_model", "answer"),  # of Study
    *("list_commands", "get_command", "resolve_command", "make_context", "invoke", "parse_args"),  # of Typer's
}


@each_source
def test_modules_classes_and_public_functions_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "the module"
    assert list(undocumented(tree)) == []


@each_analysis
def test_an_analysis_is_one_short_file(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_ANALYSIS


def test_every_file_of_the_folder_is_a_command_and_no_other() -> None:
    files = {path.stem.replace("_", "-"): f"analyses.{path.stem}" for path in ANALYSES}
    assert {name: entry.module for name, entry in registry.entries().items()} == files


def test_no_analysis_takes_the_name_of_a_built_in_command() -> None:
    assert not set(registry.entries()) & set(BUILT_IN)


@pytest.mark.parametrize("name", registry.entries())
def test_the_help_of_an_analysis_is_its_docstring_with_an_example(name: str) -> None:
    entry = registry.entries()[name]
    assert entry.help.splitlines()[0].endswith((".", ":"))
    assert f"Example: bertgeo {name}" in entry.help
    assert entry.load().__doc__.split() == entry.help.split()


NEW_ANALYSIS = '''
"""How many tokens a text has."""

from dataclasses import dataclass

from .kit.analysis import Analysis, State


@dataclass(frozen=True)
class Length(Analysis[State]):
    """How many tokens a text has.

    Example: bertgeo length
    """

    needs = frozenset()

    def start(self, shape, weights):
        return State()

    def finalize(self, state, record):
        raise NotImplementedError
'''


def test_a_file_dropped_into_the_folder_is_a_command_with_help(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "analyses", tmp_path / "analyses")
    (tmp_path / "analyses" / "text_length.py").write_text(NEW_ANALYSIS, encoding="utf-8")
    code = "from bertgeo_cli import registry; print(registry.entries()['text-length'].help.splitlines()[0])"
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; {code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "How many tokens a text has.\n", done.stderr


TEXT_FILES = (".py", ".toml", ".md", ".txt", ".tsv", ".yml", ".yaml", ".cfg")
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:home|Users|root|work|mnt|tmp|opt|srv|scratch)/\w|\b[A-Z]:\\\\?Users")


def files_of_the_project() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    names = listed.stdout.splitlines() if listed.returncode == 0 else map(str, ROOT.glob("*/*"))
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_no_file_names_a_path_of_some_machine() -> None:
    files = [path for path in files_of_the_project() if path.suffix in TEXT_FILES or path.parent.name == ".ci"]
    assert len(files) > len(SOURCES)
    found = [
        f"{named(path)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []
