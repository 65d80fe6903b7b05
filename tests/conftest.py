"""What several test modules share: loading a model costs seconds."""

import os

# Tests that run beside each other on few cores would spend their time waiting in each other's thread pools.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from bertgeo_cli.models import LoadedModel, load_model


@pytest.fixture(scope="session")
def minilm() -> LoadedModel:
    """The embedded model: real weights, on the CPU."""
    return load_model("minilm", device="cpu", offline=True)
