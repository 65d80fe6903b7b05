"""Which analyses a run holds, with their settings: from options, a plan, or the record of an earlier run."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from analyses.kit.analysis import Analysis, Selection

from . import registry
from .errors import UsageError
from .options import ChoiceOptions

Analyses = dict[str, Analysis[Any]]
TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def chosen_analyses(choice: ChoiceOptions) -> Analyses:
    """The analyses by name, in the order of the listing. Raises UsageError for unknown names, settings and values."""
    plan = _plan(choice.plan) if choice.plan else {}
    settings = _joined(plan, choice.set or [])
    names = _names(choice.analyses, list(plan) if choice.plan else None)
    strangers = [name for name in settings if name not in names]
    if strangers:
        raise UsageError(f"settings of {', '.join(strangers)}, which is not run", f"Run are: {', '.join(names)}.")
    return {name: analysis_of(name, settings.get(name, {})) for name in names}


def analysis_of(name: str, given: Mapping[str, Any]) -> Analysis[Any]:
    """One analysis by the name of its command, with settings as texts or as what TOML makes of them."""
    kind = _entry(name).load()
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    by_option = fields | {option: field for field in fields.values() for option in _options(field)}
    values = {}
    for key, value in given.items():
        field = by_option.get(key) or by_option.get(key.replace("-", "_"))
        if field is None:
            known = ", ".join(next(iter(_options(field)), name.replace("_", "-")) for name, field in fields.items())
            raise UsageError(f"{name} has no setting {key!r}", f"It has: {known}.")
        values[field.name] = _typed(f"{name}.{key}", value, hints[field.name], field.metadata.get("extra", {}))
    analysis: Analysis[Any] = kind(**values)
    return analysis


def _options(field: dataclasses.Field[Any]) -> list[str]:
    """The names of a field's option where it has one of its own."""
    return [name.removeprefix("--") for name in field.metadata.get("names", ())]


def asked_of_texts(analyses: Analyses, *, given: bool) -> Analyses:
    """What is asked of texts: the analyses that read them, and the companions of those that read weights.

    Companions are asked when there are texts: `given` by the user, or read by another analysis anyway.
    """
    if not given and not any(analysis.needs for analysis in analyses.values()):
        return {}
    asked = {name: analysis if analysis.needs else analysis.on_texts() for name, analysis in analyses.items()}
    return {name: analysis for name, analysis in asked.items() if analysis is not None}


def settings_of(analysis: Any) -> dict[str, Any]:
    """The settings as `analysis_of` takes them back."""
    return {name: getattr(value, "text", value) for name, value in vars(analysis).items()}


def _entry(name: str) -> registry.Entry:
    known = registry.entries()
    if name not in known:
        raise UsageError(f"there is no analysis {name!r}", f"Choose from {', '.join(known)}, or all.")
    return known[name]


def _names(listed: str, planned: Sequence[str] | None) -> list[str]:
    if listed == "all":
        return list(planned or registry.entries())
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if not names:
        raise UsageError("--analyses names none", f"Choose from {', '.join(registry.entries())}, or all.")
    return [name for name in registry.entries() if name in {_entry(name).name for name in names}]


def _plan(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--plan {path}: {error}", "Give a TOML file with a table for each analysis.") from None
    stray = [key for key, value in content.items() if not isinstance(value, dict)]
    if stray or not content:
        told = f"{', '.join(stray)} stands in no table" if stray else "it is empty"
        raise UsageError(f"--plan {path}: {told}", "Write a table for each analysis, such as [cone-index].")
    return {_entry(name).name: dict(table) for name, table in content.items()}


def _joined(plan: Mapping[str, Mapping[str, Any]], given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The plan's settings, and over them those of --set."""
    settings = {name: dict(table) for name, table in plan.items()}
    for text in given:
        place, equals, value = text.partition("=")
        name, dot, key = place.strip().partition(".")
        if not (equals and dot and key):
            raise UsageError(f"--set {text!r} is no setting", "Write ANALYSIS.SETTING=VALUE, such as flow.from=all.")
        settings.setdefault(_entry(name).name, {})[key.strip()] = value.strip()
    return settings


def _typed(what: str, value: Any, hint: Any, extra: Mapping[str, Any]) -> Any:
    text = str(value)
    if hint is Selection:
        return Selection(text)
    if hint is bool:
        return _one_of(what, text.lower(), TRUTH)
    if hint is int:
        return int(_number(what, text, extra.get("min"), int, "a whole number"))
    if hint is float:
        return _number(what, text, extra.get("min"), float, "a number")
    options = typing.get_args(hint)
    return _one_of(what, text, {option: option for option in options}) if options else text


def _one_of(what: str, text: str, values: Mapping[str, Any]) -> Any:
    if text not in values:
        raise UsageError(f"{what} cannot be {text!r}", f"Choose from {', '.join(values)}.")
    return values[text]


def _number(what: str, text: str, least: float | None, kind: Callable[[str], float], name: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        raise UsageError(f"{what} cannot be {text!r}", f"Give {name}.") from None
    if least is not None and not value >= least:
        raise UsageError(f"{what} cannot be {value}", f"Give {least} or more.")
    return value
