"""Versions of everything that a number or a picture depends on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("bertgeo", "torch", "transformers", "tokenizers", "numpy", "scipy", "scikit-learn", "pandas", "matplotlib")


def versions() -> dict[str, str]:
    """Versions of Python and of every package that a number or a picture depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found
