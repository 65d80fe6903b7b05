"""The shape of a question that no recorded pass answers by itself: settings, what it reads, an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from analyses.kit.analysis import SettingsError
from analyses.kit.result import Result

from .intake import Intake
from .models import LoadedModel, load_chosen
from .options import InputOptions, ModelOptions, StudyInput


@dataclass(frozen=True)
class Study(ABC):
    """A question that alters the pass, follows gradients, reads a head of the checkpoint, or shows single steps.

    As with an Analysis the class docstring is the command's help and the dataclass fields, made by `setting`, are its
    options; the file's name in `bertgeo_cli/studies` is the command's. The formulas belong into `analyses.kit`.
    """

    reads: ClassVar[type[Any]] = StudyInput
    """The options of what is read: StudyInput (a text or a corpus), TextInput (a text), or a class of one's own with
    `as_input`."""

    groups: ClassVar[bool] = False
    """Whether the groups of texts mean something to it; otherwise --group-column is refused."""

    def refuse_given(self, names: Sequence[str], where: str) -> None:
        """Raise SettingsError for a setting of these that is not at its default: it would be read by nothing."""
        for name in names:
            if getattr(self, name) != getattr(type(self), name):
                raise SettingsError(f"--{name.replace('_', '-')} is not read {where}", "Leave it out.")

    def load(self, chosen: ModelOptions) -> LoadedModel:
        """The model that the options name; a study of a checkpoint's head loads that too, or raises UsageError."""
        return load_chosen(chosen)

    def reading(self, texts: InputOptions, loaded: LoadedModel) -> InputOptions:
        """How the texts are read: as the options say, unless the question reads [MASK] and the like as special tokens.

        Raises SettingsError for what this study does not read.
        """
        return texts

    def without_model(self) -> Result | None:
        """An answer that reads neither model nor texts, such as a worked example; None where these settings ask others.

        Raises SettingsError for settings that no model can satisfy.
        """
        return None

    def check(self, loaded: LoadedModel) -> None:
        """Raise SettingsError for settings that this model cannot satisfy, before any text is read."""
        return

    @abstractmethod
    def answer(self, loaded: LoadedModel, texts: Intake) -> Result:
        """The answer: reads `texts.single()` once, or `texts.batches()` to its end; `texts.how` is how passes go."""
