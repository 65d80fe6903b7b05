"""What stands behind the pages: their commands are run and answered in place, their formulas become MathML.

A block

    ``` bertgeo figure=attention-maps.png
    bertgeo attention "The river bank." --layers 0
    ```

becomes the command, what it prints, and a figure of its report; `rows=8` shows only so many lines of the output.
Nothing is fetched: neither fonts nor scripts.
"""

from __future__ import annotations

import atexit
import html
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from trained import train_masked_lm
from typer.testing import CliRunner

from bertgeo_cli.cli import app

BLOCK = re.compile(r"^``` bertgeo(?P<options>[^\n]*)\n(?P<line>bertgeo [^\n]+)\n```$", re.MULTILINE)
TRAINED = "tiny-masked-lm"
"""The model folder that commands of pages may name; it is trained when first asked for."""
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """What a command printed, its tables and its notes on them, and the files of its report."""

    printed: list[str]
    notes: list[str]
    files: dict[str, bytes]


@cache
def answer(line: str) -> Answer:
    """Run a command line in an empty folder. Raises PluginError when it fails."""
    with tempfile.TemporaryDirectory() as folder, _inside(Path(folder)):
        if TRAINED in line:
            shutil.copytree(_trained(), TRAINED)
        done = CliRunner().invoke(app, [*shlex.split(line)[1:], *_report(line)])
        if done.exit_code:
            raise PluginError(f"{line}\n{done.output}")
        report = Path("report")
        files = {path.name: path.read_bytes() for path in report.iterdir() if path.is_file()} if report.is_dir() else {}
    printed = [shown.rstrip() for shown in done.stdout.splitlines() if not shown.startswith("report/")]
    notes = [shown for shown in done.stderr.splitlines() if not shown.startswith("Model: ") and "lines/s" not in shown]
    return Answer(printed, notes, files)


@cache
def _trained() -> Path:
    """A masked-LM model, trained once."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return train_masked_lm(folder / TRAINED).folder


def _report(line: str) -> list[str]:
    """Where the report goes, for commands that write one."""
    return [] if line.split()[1] in ("check", "info") else ["-o", "report"]


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a folder, without settings of the person who builds."""
    before, home = dict(os.environ), Path.cwd()
    for name in [name for name in os.environ if name.startswith("BERTGEO_")]:
        del os.environ[name]
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(home)
        os.environ.update(before)


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Every command of the page with its answer."""

    def answered(found: re.Match[str]) -> str:
        line = found["line"]
        options = dict(option.split("=") for option in found["options"].split())
        printed, notes = answer(line).printed, answer(line).notes
        rows = int(options.get("rows", len(printed)))
        shown = "\n".join([f"$ {line}", *printed[:rows], *(["..."] if rows < len(printed) else []), *notes])
        return f"```console\n{shown}\n```\n{_figure(line, options.get('figure'), config, files)}"

    return BLOCK.sub(answered, markdown)


def _figure(line: str, name: str | None, config: Any, files: Files) -> str:
    if name is None:
        return ""
    if name not in answer(line).files:
        raise PluginError(f"{line} leaves no {name}, but {', '.join(sorted(answer(line).files))}")
    uri = f"figures/{line.split()[1]}-{name}"
    files.append(File.generated(config, uri, content=answer(line).files[name]))
    title = json.loads(answer(line).files["run.json"])["figures"][Path(name).stem]["title"]
    return f"\n![{title}]({uri})\n"


def on_page_content(content: str, page: Page, config: Any, files: Files) -> str:
    """Formulas as MathML, which browsers draw themselves."""

    def drawn(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        return convert(html.unescape(found[2]).strip(), display=display)

    return FORMULA.sub(drawn, content)
