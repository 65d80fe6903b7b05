"""The command line: options in, one call, paths out. Importing this loads neither torch, pandas nor matplotlib."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import cleandoc
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from . import registry
from .errors import BertgeoError
from .registry import BUILT_IN


class Group(TyperGroup):
    """Commands are listed from docstrings and built only when chosen."""

    def list_commands(self, ctx: Any) -> list[str]:
        return registry.commands()

    def get_command(self, ctx: Any, name: str) -> Any:
        """The command as listings show it: its help, and no options yet."""
        entry = _entry(name)
        text = entry.help if entry else BUILT_IN.get(name)
        if text is None:
            return None
        text = cleandoc(text)
        return TyperCommand(name, short_help=text.partition("\n")[0], help=text, params=[])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and _command(str(name), _entry(str(name))), rest

    def make_context(self, *args: Any, **keywords: Any) -> Any:
        with _broken_pipe(), _usage_errors():
            return super().make_context(*args, **keywords)

    def invoke(self, ctx: Any) -> Any:
        with _broken_pipe(), _usage_errors():
            return super().invoke(ctx)


class Command(TyperCommand):
    """A command some of whose options may stand without a value, which is then `implied`."""

    implied: Mapping[str, str] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from . import options

        return super().parse_args(ctx, options.with_implied_values(args, self.implied))


@contextmanager
def _broken_pipe() -> Iterator[None]:
    """The reader of stdout has gone (`| head -1`): end quietly with 141, as the shell's own tools do."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None
    except SystemExit as end:
        # rich meets the broken pipe first and would exit with 1.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        raise typer.Exit(141) from None


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Two lines for a wrong option or argument, which Typer would draw in a box."""
    try:
        yield
    except Exception as error:
        wrong: Any = error
        if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise
        where = wrong.ctx.command_path if getattr(wrong, "ctx", None) else "bertgeo"
        typer.echo(f"Error: {' '.join(wrong.format_message().split())}\nSee {where} --help.", err=True)
        raise typer.Exit(wrong.exit_code) from None


@contextmanager
def _errors(debug: bool) -> Iterator[None]:
    """Two lines for what a user can cause; a traceback only with --debug."""
    try:
        yield
    except BertgeoError as error:
        if debug:
            raise
        typer.echo(f"Error: {error.message}\n{error.hint}", err=True)
        raise typer.Exit(error.exit_code) from None
    except (typer.Exit, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        typer.echo("Error: stopped\nNothing was written.", err=True)
        raise typer.Exit(130) from None
    except Exception as error:
        if debug:
            raise
        typer.echo(
            f"Error: {type(error).__name__}: {error}\nThis is a fault of bertgeo: run again with --debug.", err=True
        )
        raise typer.Exit(1) from None


def _entry(name: str) -> registry.Entry | None:
    return registry.entries().get(name) or registry.studies().get(name)


def _command(name: str, entry: registry.Entry | None) -> Any:
    """The whole command, with its options; only now is its analysis or study imported."""
    from . import options

    question = entry.load() if entry else None
    act = partial(_act, "study" if name in registry.studies() else "analyse", name) if entry else partial(_act, name)
    function = options.command_function(options.groups_of(name, question), act, name)
    command = _typer_command(name, function, entry.help if entry else BUILT_IN[name])
    command.implied = getattr(question, "optional_values", {})
    return command


def _typer_command(name: str, function: Callable[..., None], text: str) -> Any:
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_show_locals=False)
    single.command(name, cls=Command, help=text, context_settings=SETTINGS)(function)
    return typer.main.get_command(single)


def _act(action: str, *chosen: Any) -> None:
    """Call `commands.<action>` with the objects that hold the chosen options; the last of them knows --debug."""
    with _errors(chosen[-1].debug):
        from . import commands

        getattr(commands, action)(*chosen)


SETTINGS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    cls=Group,
    context_settings=SETTINGS,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"bertgeo {version('bertgeo')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """The geometry of BERT: record a forward pass, prove the record, measure it.

    Example: bertgeo attention "The fisherman sat down by the river bank."
    """


def main() -> None:
    """The entry point."""
    try:
        app()
    finally:
        # All is said and kept. While Python takes itself down, one more Ctrl-C would print a traceback.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
