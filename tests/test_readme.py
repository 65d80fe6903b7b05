"""The README does what it says: each of its commands runs, and each command stands in its table."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bertgeo_cli import registry
from bertgeo_cli.cli import app

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
COMMANDS = registry.commands()


def code_lines() -> list[str]:
    """Lines of code blocks, continued ones joined."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def command_lines() -> list[list[str]]:
    """The arguments of every `bertgeo ...`, on its own or after `&&` or `|`; shell comments are left out."""
    found = []
    for line in code_lines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words:
            end = next((at for at, word in enumerate(words) if word in ("&&", ";", "|", ">")), len(words))
            if Path(words[0]).name == "bertgeo":
                found.append(words[1:end])
            words = words[end + 1 :]
    return found


def test_the_readme_has_commands() -> None:
    assert len(command_lines()) >= 3
    assert command_lines()[0][0] == "attention"


@pytest.mark.parametrize("arguments", command_lines(), ids=" ".join)
def test_a_command_of_the_readme_runs(
    arguments: list[str], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat\nshe ran to the river\n")
    monkeypatch.setenv("BERTGEO_MODEL", str(tiny_folder))
    chosen = for_the_tiny_model(arguments)
    done = CliRunner().invoke(app, chosen)
    assert done.exit_code == 0, done.output


SIZES = {"--layers": 2, "--heads": 4}


def for_the_tiny_model(arguments: list[str]) -> list[str]:
    """Without a model of its own, and with layers and heads that the tiny model has."""
    chosen, words = [], iter(arguments)
    for word in words:
        if word == "--model":
            next(words)
        elif word in SIZES:
            chosen += [word, re.sub(r"\d+", partial(_smaller, SIZES[word]), next(words))]
        else:
            chosen.append(word)
    return chosen


def _smaller(size: int, number: re.Match[str]) -> str:
    return str(int(number[0]) % size)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_stands_in_the_table_of_commands(name: str) -> None:
    rows = [line for line in README.splitlines() if line.startswith("|")]
    assert any(re.match(rf"\|\s*`(bertgeo )?{re.escape(name)}\b", row) for row in rows), "not in the README's table"


def test_every_command_in_the_table_exists() -> None:
    rows = re.findall(r"^\|\s*`(?:bertgeo )?([\w-]+)", README, flags=re.MULTILINE)
    assert set(rows) <= set(COMMANDS)
