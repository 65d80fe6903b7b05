"""The command line, in process: what is printed, what is written, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from bertgeo_cli.cli import app

SENTENCE = "The fisherman sat down by the river bank."


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return call


def test_the_first_line_of_the_readme_works_on_the_real_model(run, tmp_path: Path) -> None:
    done = run("attention", SENTENCE)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "bertgeo-report" / "attention"
    heads = pd.read_csv(folder / "attention-heads.csv")
    assert len(heads) == 6 * 12
    assert (heads[["mass_cls", "mass_sep", "mass_punctuation", "mass_other"]].sum(axis=1) - 1).abs().max() < 1e-12
    weights = pd.read_csv(folder / "attention-weights.csv", keep_default_na=False)
    assert len(weights) == 6 * 12 * 11 * 11
    assert list(weights["key_token"][:11]) == ["[CLS]", *SENTENCE[:-1].split(), ".", "[SEP]"]
    assert json.loads((folder / "run.json").read_text())["model"]["name"] == "minilm"
    assert (folder / "attention-maps.png").stat().st_size > 10_000
