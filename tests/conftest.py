"""What several test modules share: loading a model costs seconds."""

import os
from pathlib import Path

import pytest

# Tests that run beside each other on few cores would spend their time waiting in each other's thread pools; NumPy
# and torch read these once, when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import tiny

from bertgeo_cli.models import LoadedModel, load_model


@pytest.fixture(scope="session")
def minilm() -> LoadedModel:
    """The embedded model: real weights, on the CPU."""
    return load_model("minilm", device="cpu", offline=True)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of TINY, a random BERT; it is shared, so leave it as it is."""
    return tiny.tiny_bert(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> LoadedModel:
    """TINY, loaded on the CPU; it is shared, so leave it as it is."""
    return load_model(str(tiny_folder), device="cpu", offline=True)
