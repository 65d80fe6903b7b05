"""Published values beside measured ones: verdicts, reasons for skipping, and the file that bertgeo brings."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from command import Run, assert_error, content, files_of
from safetensors.numpy import load_file

from bertgeo_cli import registry
from bertgeo_cli.choice import analysis_of
from bertgeo_cli.families import FAMILIES
from bertgeo_cli.models import LoadedModel
from bertgeo_cli.published import PUBLISHED, Published, read_published
from bertgeo_cli.run import analyse_weights
from bertgeo_cli.verdicts import Measurement, result_of

NOT_YET = {"dependencies"}
"""Analyses whose published values wait for them."""
SETTINGS_NOT_YET: set[str] = set()
PAIRS = {"metric": "projection-kernel", "subspaces": "QQ"}
HEADER = """
[models.tiny]
family = "bert"
[models.elsewhere]
family = "bert"
[models.gpt2]
family = "gpt2"
[corpora.cats]
about = "lines about cats"
[sources.plain]
cite = "Plain NumPy 2026, arXiv 0000.00000: table 1"
precision = "every digit"
unit = "1"
"""
TEXTS = ("the cats sat on the mat .", "she ran to the old river .", "a dog is old")
ENTRY: dict[str, Any] = {"source": "plain", "model": "tiny", "quantity": "something", "tolerance": 1e-6}
Write = Callable[..., str]


def toml(entry: Mapping[str, Any]) -> str:
    """An entry as TOML, whose strings, lists and numbers are those of JSON."""
    lines = ["[[published]]"]
    for name, value in entry.items():
        if isinstance(value, dict):
            value = "{" + ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) + "}"
            lines.append(f"{name} = {value}")
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file of values and give its name."""

    def written(*entries: Mapping[str, Any], header: str = HEADER) -> str:
        (tmp_path / "values.toml").write_text(header + "".join(map(toml, entries)))
        return "values.toml"

    return written


def kernels(folder: Path, layer: int = 0) -> Any:
    """|U^T U'|_F^2 of the query subspaces of every two heads of a layer, by scipy-free NumPy."""
    weight = load_file(folder / "model.safetensors")[f"encoder.layer.{layer}.attention.self.query.weight"]
    bases = [np.linalg.qr(rows.T)[0] for rows in weight.astype(np.float64).reshape(4, 12, 48)]
    return np.array([[(np.linalg.svd(a.T @ b)[1] ** 2).sum() for b in bases] for a in bases])


def kernel_entry(values: list[float], **others: Any) -> dict[str, Any]:
    """Projection kernels of head 0 of layer 0 with heads 1 and 2."""
    rows = {"layer": 0, "other_layer": 0, "head": 0, "other_head": [1, 2]}
    return {
        "name": "kernels",
        **ENTRY,
        "analysis": "heads",
        "settings": PAIRS,
        "table": "heads-pairs",
        "column": "value",
        "rows": rows,
        "values": values,
    } | others


def residual_entry(values: list[float], **others: Any) -> dict[str, Any]:
    return {
        "name": "residuals",
        **ENTRY,
        "analysis": "rank-collapse",
        "settings": {"metrics": "residual_frobenius"},
        "table": "rank-collapse",
        "column": "residual_frobenius",
        "rows": {"depth": [0, 1, 2]},
        "values": values,
        "corpus": "cats",
    } | others


def table(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "bertgeo-report" / "reproduce" / "reproduce.csv", keep_default_na=False, na_values=[""])


@pytest.fixture
def reproduce(fast: Run, tiny_folder: Path) -> Run:
    """`bertgeo reproduce` with the tiny model under its name in the values."""
    return lambda *given: fast("reproduce", "--values", "values.toml", "--model", f"tiny={tiny_folder}", *given)


def test_values_that_agree_and_that_differ(reproduce: Run, write: Write, tiny_folder: Path, tmp_path: Path) -> None:
    right = [float(value) for value in kernels(tiny_folder)[0, 1:3]]
    write(kernel_entry(right), kernel_entry([right[0], right[1] + 1e-3], name="wrong"))
    done = reproduce()
    assert done.exit_code == 4, done.output
    assert "Error: not as published: wrong\n" in done.stderr
    found = table(tmp_path)
    assert found["verdict"].tolist() == ["agrees", "agrees", "agrees", "differs"]
    assert found["measured"].to_numpy() == pytest.approx([*right, *right], rel=1e-6)
    assert found["difference"].iloc[3] == pytest.approx(-1e-3, rel=1e-3)
    assert found["place"].iloc[1] == "layer 0 other_layer 0 head 0 other_head 2"
    write(kernel_entry(right))
    assert reproduce().exit_code == 0


def test_a_difference_is_open_where_the_source_leaves_something_open(
    reproduce: Run, write: Write, tmp_path: Path
) -> None:
    write(kernel_entry([0.0, 0.0], doubt="which model it was is not stated"))
    done = reproduce()
    assert done.exit_code == 0, done.output
    assert table(tmp_path)["verdict"].tolist() == ["open", "open"]
    assert set(table(tmp_path)["why"]) == {"which model it was is not stated"}
    assert "2 open" in done.stderr


@pytest.mark.parametrize(("over", "of"), [("mean", np.mean), ("median", np.median), ("min", np.min), ("max", np.max)])
def test_one_value_may_be_published_of_many_rows(
    reproduce: Run, write: Write, tiny_folder: Path, tmp_path: Path, over: str, of: Callable[[Any], Any]
) -> None:
    others = [float(of(kernels(tiny_folder)[head])) for head in (0, 3)]  # a head with itself among them
    rows = {"layer": 0, "other_layer": 0, "head": [0, 3]}
    write(kernel_entry(others, rows=rows, over=over, tolerance=1e-5))
    done = reproduce()
    assert done.exit_code == 0, done.output
    assert table(tmp_path)["verdict"].tolist() == ["agrees", "agrees"]
    assert table(tmp_path)["place"].iloc[1].endswith(f"head 3 {over}")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (residual_entry([0.1, 0.1, 0.1]), "needs texts, by --corpus: lines about cats"),
        (kernel_entry([1.0, 1.0], model="elsewhere"), "model elsewhere is not in the local cache"),
        (kernel_entry([1.0, 1.0], model="gpt2"), "gpt2 is of the family gpt2, which bertgeo does not read"),
        (kernel_entry([1.0, 1.0], analysis="sharpness"), "no analysis sharpness in this version"),
        (kernel_entry([1.0, 1.0], settings={"sharp": "yes"}), "heads has no setting 'sharp'"),
        (kernel_entry([1.0, 1.0], table="heads-sharpness"), "heads has no table heads-sharpness"),
        (kernel_entry([1.0, 1.0], column="sharpness"), "heads-pairs has no column sharpness"),
        (kernel_entry([1.0, 1.0], rows={"sharpness": [1, 2]}), "heads-pairs has no column sharpness"),
        (kernel_entry([1.0, 1.0], rows={"head": 0, "layer": [7, 8]}), "no rows of heads-pairs have head 0 layer 7"),
        (kernel_entry([1.0, 1.0], rows={"layer": 0, "head": [1, 2]}), "rows of heads-pairs have layer 0 head 1"),
    ],
)
def test_what_cannot_be_measured_is_skipped_with_the_reason(
    fast: Run, write: Write, tiny_folder: Path, tmp_path: Path, entry: dict[str, Any], why: str
) -> None:
    write(entry)
    given = ("--model", f"tiny={tiny_folder}") if entry["model"] == "tiny" else ()
    done = fast("reproduce", "--values", "values.toml", *given)
    assert done.exit_code == 0, done.output
    found = table(tmp_path)
    assert found["verdict"].tolist() == ["skipped"] * len(entry["values"])
    assert why in found["why"].iloc[0]
    assert found["measured"].isna().all()
    assert "skipped:" in " ".join(done.stdout.split())


def test_values_of_texts_are_measured_on_the_corpus_cut_as_published(
    reproduce: Run, fast: Run, write: Write, tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "cats.txt").write_text("\n".join(TEXTS) + "\n")
    fast("rank-collapse", "--corpus", "cats.txt", "-o", "whole", "--metrics", "residual_frobenius")
    whole = pd.read_csv(tmp_path / "whole" / "rank-collapse.csv")["residual_frobenius"].tolist()
    write(residual_entry(whole), residual_entry(whole, name="cut", tokens=4))
    done = reproduce("--corpus", "cats.txt")
    assert done.exit_code == 4, done.output
    found = table(tmp_path)
    assert found["measured"].tolist()[:3] == whole
    assert found["verdict"].tolist()[:3] == ["agrees"] * 3
    assert "not as published: cut" in done.stderr
    cut = [text.split()[:2] for text in TEXTS]  # [CLS], two words, [SEP]
    (tmp_path / "short.txt").write_text("\n".join(map(" ".join, cut)) + "\n")
    fast("rank-collapse", "--corpus", "short.txt", "-o", "short", "--metrics", "residual_frobenius")
    short = pd.read_csv(tmp_path / "short" / "rank-collapse.csv")["residual_frobenius"].tolist()
    assert found["measured"].tolist()[3:] == pytest.approx(short, rel=1e-6)
    said = content(tmp_path / "bertgeo-report" / "reproduce")
    assert said["input"]["texts"] == {"tiny, all tokens": 3, "tiny, cut to 4 tokens": 3}
    assert said["input"]["name"] == "cats.txt"


def test_only_and_model_choose_entries(reproduce: Run, fast: Run, write: Write, tmp_path: Path) -> None:
    write(kernel_entry([0.0, 0.0]), kernel_entry([0.0, 0.0], name="others", model="elsewhere"))
    assert reproduce("--only", "kernels").exit_code == 4
    assert set(table(tmp_path)["entry"]) == {"kernels"}
    assert fast("reproduce", "--values", "values.toml", "--model", "elsewhere").exit_code == 0
    assert set(table(tmp_path)["entry"]) == {"others"}
    assert_error(fast("reproduce", "--values", "values.toml", "--model", "nope"), 2, "nope", "tiny", "elsewhere")
    assert_error(fast("reproduce", "--values", "values.toml", "--only", "nope"), 2, "nope", "plain")


def test_a_folder_that_was_named_must_hold_the_model(fast: Run, write: Write) -> None:
    write(kernel_entry([0.0, 0.0]))
    assert_error(fast("reproduce", "--values", "values.toml", "--model", "tiny=./nope"), 2, "./nope")


def test_a_folder_of_another_size_is_told_which_model_it_was_named(reproduce: Run, write: Write) -> None:
    write(kernel_entry([0.0, 0.0]) | {"settings": {"layers": "11", "subspaces": "QQ"}})
    assert_error(reproduce(), 2, "cannot be measured as tiny", "layer 11", "the folder of tiny itself")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--limit", "3"), "--limit"),
        (("--encoding", "latin-1"), "--encoding"),
        (("--corpus", "-"), "as a file"),
        (("--corpus", "nope.txt"), "nope.txt"),
        (("--corpus", "cats.txt", "--column", "text"), "--column"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    reproduce: Run, write: Write, tmp_path: Path, given: tuple[str, ...], named: str
) -> None:
    (tmp_path / "cats.txt").write_text("the cat\n")
    write(kernel_entry([0.0, 0.0]))
    assert_error(reproduce(*given), 2, named)


def test_the_report_says_what_was_measured_on_what(
    reproduce: Run, write: Write, tiny_model: LoadedModel, tmp_path: Path
) -> None:
    write(kernel_entry([0.0, 0.0]))
    shown = json.loads(reproduce("--json", "--figures", "png").stdout)
    assert [row["verdict"] for row in shown["headline"]] == ["differs", "differs"]
    assert all(Path(file).is_file() for file in shown["files"])
    folder = tmp_path / "bertgeo-report" / "reproduce"
    said = content(folder)
    assert said["models"]["tiny"]["model"] == dict(tiny_model.identity)
    assert said["settings"]["values"] == "values.toml"
    assert re.fullmatch("[0-9a-f]{64}", said["settings"]["values_sha256"])
    assert (folder / "reproduce.png").stat().st_size > 5000
    before = files_of(folder)
    reproduce("--figures", "png")
    assert files_of(folder) == before


def test_a_dry_run_measures_and_writes_nothing(reproduce: Run, write: Write, tmp_path: Path) -> None:
    write(kernel_entry([0.0, 0.0]))
    done = reproduce("--dry-run")
    assert done.exit_code == 0, done.output
    assert "dry run" in " ".join(done.stdout.split())
    assert not (tmp_path / "bertgeo-report").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"values": []}, "values cannot be []"),
        ({"values": [1.0, math.nan]}, "values cannot be"),
        ({"values": ["much", 1.0]}, "values cannot be"),
        ({"values": [1.0]}, "1 values and 2 of other_head"),
        ({"tolerance": None}, "has no tolerance"),
        ({"tolerance": "little"}, "tolerance cannot be 'little'"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"quantity": 3}, "quantity cannot be 3"),
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"over": "sum"}, "over cannot be 'sum'"),
        ({"model": "nope"}, "model 'nope'"),
        ({"source": "nope"}, "source 'nope'"),
        ({"corpus": "nope"}, "corpus 'nope'"),
        ({"rows": {"layer": [1, 1]}}, "two values for the same rows"),
    ],
)
def test_a_file_of_values_is_valid_or_refused(fast: Run, write: Write, change: dict[str, Any], named: str) -> None:
    entry = {name: value for name, value in (kernel_entry([1.0, 2.0]) | change).items() if value is not None}
    file = Path(write(entry))
    file.write_text(file.read_text().replace("NaN", "nan"))
    assert_error(fast("reproduce", "--values", "values.toml"), 2, "values.toml", "kernels", named)


def test_broken_absent_and_empty_files_of_values_are_refused(fast: Run, write: Write, tmp_path: Path) -> None:
    write(kernel_entry([1.0, 2.0]), kernel_entry([1.0, 2.0]))
    assert_error(fast("reproduce", "--values", "values.toml"), 2, "two entries are called 'kernels'")
    write()
    assert_error(fast("reproduce", "--values", "values.toml"), 2, "no [[published]]")
    (tmp_path / "values.toml").write_text("[[published\n")
    assert_error(fast("reproduce", "--values", "values.toml"), 2, "values.toml")
    assert_error(fast("reproduce", "--values", "nope.toml"), 2, "nope.toml")


# The file that bertgeo brings

SHIPPED = read_published(PUBLISHED)
each_shipped = pytest.mark.parametrize("entry", SHIPPED, ids=lambda entry: entry.name)


def test_the_shipped_file_uses_all_that_it_defines() -> None:
    raw = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))
    assert set(raw) == {"models", "corpora", "sources", "published"}
    for kind in ("model", "source"):
        assert set(raw[f"{kind}s"]) == {getattr(entry, kind) for entry in SHIPPED}
    assert {about["about"] for about in raw["corpora"].values()} == {entry.corpus for entry in SHIPPED} - {""}
    assert len(SHIPPED) == len(raw["published"])
    cells = [
        (e.model, e.analysis, str(e.settings), e.table, e.column, e.over, *k.items()) for e in SHIPPED for k in e.keys
    ]
    assert len(set(cells)) == len(cells)


@each_shipped
def test_every_shipped_value_is_finite_and_within_what_it_can_be(entry: Published) -> None:
    assert all(math.isfinite(value) for value in entry.values)
    assert 0 < entry.tolerance < 2
    assert re.search(r"arXiv \d{4}\.\d{4,5}", entry.cite)
    assert all(len(text) > 0 for text in (entry.quantity, entry.unit, entry.precision, entry.family))


@each_shipped
def test_shipped_entries_are_of_analyses_that_are_there_or_listed_as_not_yet(
    entry: Published, tiny_model: LoadedModel
) -> None:
    if entry.analysis not in registry.entries():
        assert entry.analysis in NOT_YET
        return
    unknown = entry.settings.keys() - {
        field.name for field in dataclasses.fields(registry.entries()[entry.analysis].load())
    }
    if unknown:
        assert unknown <= SETTINGS_NOT_YET
        return
    few = {"components": "1"} if "components" in entry.settings else {}  # the tiny model has fewer than were published
    analysis = analysis_of(entry.analysis, entry.settings | few)
    assert bool(analysis.needs) == bool(entry.corpus)
    if analysis.needs or entry.family not in FAMILIES:
        return
    frames = {table.name: table.frame for table in analyse_weights([analysis], tiny_model)[0].tables}
    assert {entry.column, *entry.rows} <= set(frames[entry.table])


def test_published_curves_are_those_of_the_papers() -> None:
    values = {entry.name: entry.values for entry in SHIPPED}
    assert values["dong-2021-bert"][-1] == 0.3096
    assert values["saponati-2025-bert-symmetry"][2] == -0.0929
    assert np.median(values["saponati-2025-bert-symmetry"]) == pytest.approx(0.51, abs=0.0051)
    assert np.median(values["saponati-2025-bert-directionality"]) == pytest.approx(-0.08, abs=0.0051)
    assert np.mean(values["kobayashi-2021-bert-expansion"]) == pytest.approx(0.877, abs=0.0006)
    assert np.mean(values["kobayashi-2021-bert-tiny-expansion"]) == pytest.approx(1.858, abs=0.0006)
    assert np.mean(values["kobayashi-2021-bert-mini-expansion"]) == pytest.approx(1.238, abs=0.0006)


def test_with_no_model_on_the_machine_the_shipped_values_are_skipped_with_their_reasons(
    fast: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertgeo_cli.models.hub.HF_HUB_CACHE", str(tmp_path / "cache"))
    done = fast("reproduce")
    assert done.exit_code == 0, done.output
    found = table(tmp_path)
    assert len(found) == sum(len(entry.values) for entry in SHIPPED)
    assert set(found["verdict"]) == {"skipped"}
    assert found.loc[found["model"] == "gpt2", "why"].str.contains("family gpt2").all()
    assert "0 agree" in done.stderr


def test_reproduce_with_a_corpus_says_which_models_are_not_here(
    fast: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertgeo_cli.models.hub.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bios.txt").write_text("the cat\n")
    done = fast("reproduce", "--corpus", "bios.txt", "--only", "dong-2021-bert")
    assert done.exit_code == 0, done.output
    assert table(tmp_path)["why"].str.contains("bert-base-cased is not in the local cache").all()


def test_the_dong_curve_is_measured_as_it_was_published(fast: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """The model is another here, so the depths that it lacks are skipped and the others differ."""
    shutil.copytree(tiny_folder, tmp_path / "copy")
    (tmp_path / "bios.txt").write_text("the cats sat on the mat\na dog ran\n")
    given = ("--model", "bert-base-cased=./copy", "--corpus", "bios.txt", "--only", "dong-2021-bert,dong-2021-bert-std")
    done = fast("reproduce", *given)
    assert done.exit_code == 4, done.output
    found = table(tmp_path)
    assert found["verdict"].tolist() == (["differs"] * 3 + ["skipped"] * 10) * 2
    assert found["why"].iloc[3] == "no rows of rank-collapse have depth 3"


def test_a_value_on_the_edge_of_the_tolerance_agrees() -> None:
    names = (
        "name",
        "source",
        "cite",
        "model",
        "family",
        "quantity",
        "analysis",
        "table",
        "column",
        "unit",
        "precision",
    )
    entry = Published(**dict.fromkeys(names, "x"), values=[0.3], tolerance=0.1)
    assert Measurement(entry, (0.1 + 0.1 + 0.2,)).verdict(0) == "agrees"
    assert Measurement(entry, (0.4001,)).verdict(0) == "differs"
    assert result_of([Measurement.skipped(entry, "why not")]).headline.frame["verdict"].tolist() == ["skipped: why not"]
