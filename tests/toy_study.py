"""A study for the tests of the machine: how long texts are, or how long a row of the settings is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pandas as pd

from analyses.kit.analysis import SettingsError, setting
from analyses.kit.result import Result, Table
from bertgeo_cli.intake import Intake
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.options import InputOptions
from bertgeo_cli.study import Study


@dataclass(frozen=True)
class ToyStudy(Study):
    """Tokens of texts, or of numbers.

    Example: bertgeo toy-study
    """

    reads: ClassVar[type] = InputOptions

    row: str = setting("", "Numbers instead of texts.")
    least: int = setting(0, "Least layers of the model.")

    def without_model(self) -> Result | None:
        if not self.row:
            return None
        if not self.row.replace(",", "").isdecimal():
            raise SettingsError(f"--row {self.row} holds no numbers", "Write 1,2.")
        return _result([len(self.row.split(","))])

    def check(self, loaded: LoadedModel) -> None:
        if loaded.shape.layers < self.least:
            raise SettingsError(f"{loaded.shape.layers} layers are too few", "Choose another model.")

    def answer(self, loaded: LoadedModel, texts: Intake) -> Result:
        return _result([len(text) for batch in texts.batches() for text in batch])


def _result(tokens: list[int]) -> Result:
    table = Table("toy-study", "Tokens", pd.DataFrame({"tokens": tokens}), {"tokens": "how many"})
    return Result(table, (table,))
