"""What several test modules share: loading a model costs seconds."""

import os
from pathlib import Path

import pytest

# Tests that run beside each other on few cores would spend their time waiting in each other's thread pools; NumPy
# and torch read these once, when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import tiny
import trained
from command import Run
from typer.testing import CliRunner, Result

from bertgeo_cli.cli import app
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


@pytest.fixture(scope="session")
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> trained.Trained:
    """A masked-LM model trained on the sample sentences; it is shared, so leave it as it is."""
    return trained.train_masked_lm(tmp_path_factory.mktemp("models") / "masked-lm")


@pytest.fixture(scope="session")
def masked_lm_folder(masked_lm: trained.Trained) -> Path:
    """Its folder."""
    return masked_lm.folder


@pytest.fixture(scope="session")
def classifier_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT classifier of three labels; it is shared, so leave it as it is."""
    folder = tmp_path_factory.mktemp("models") / "classifier"
    labels = {0: "negative", 1: "neutral", 2: "positive"}
    return tiny.tiny_head("BertForSequenceClassification", "bert", folder, id2label=labels)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in an empty folder, without settings of the person who runs the tests."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("BERTGEO_")]:
        monkeypatch.delenv(name)

    def call(*arguments: str, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return call


@pytest.fixture
def fast(run: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The same with the tiny model and without figures, unless options say otherwise."""
    monkeypatch.setenv("BERTGEO_MODEL", str(tiny_folder))
    monkeypatch.setenv("BERTGEO_FIGURES", "none")
    return run
