"""What a user can cause: a message that names the value, a hint that says what to do, an exit code."""

from __future__ import annotations


class BertgeoError(Exception):
    """Shown as two lines on stderr: what happened, then what to do. `exit_code` 1: failed at run time."""

    exit_code = 1

    def __init__(self, message: str, hint: str):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """The way back from a worker process, for an exception whose arguments are two."""
        return type(self), (self.message, self.hint)


class StoppedError(BertgeoError):
    """Ctrl-C."""

    exit_code = 130


class UsageError(BertgeoError):
    """Wrong usage or configuration."""

    exit_code = 2


class IncompleteError(BertgeoError):
    """Finished, but some lines were skipped, truncated or failed and `--strict` was given."""

    exit_code = 3


class UntrustedModelError(BertgeoError):
    """The model cannot be trusted: missing weights, no real tokenizer, failed self-check."""

    exit_code = 4
