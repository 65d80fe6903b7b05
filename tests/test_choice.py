"""Which analyses a run holds: names, settings, plans, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from command import Run, assert_error, content, files_of

from analyses.attention import Attention
from analyses.kit.analysis import Selection
from bertgeo_cli import registry
from bertgeo_cli.choice import analysis_of, chosen_analyses, settings_of
from bertgeo_cli.options import ChoiceOptions


def test_all_are_all_and_names_come_in_the_order_of_the_listing() -> None:
    assert list(chosen_analyses(ChoiceOptions())) == list(registry.entries())
    assert list(chosen_analyses(ChoiceOptions("flow, attention,flow"))) == ["attention", "flow"]


def test_settings_have_the_types_of_their_fields() -> None:
    given = ["attention.layers=0-1", "attention.words=true", "attention.sample=7", "attention.special=drop"]
    chosen = chosen_analyses(ChoiceOptions("attention,flow", [*given, "flow.from=all"]))
    assert chosen["attention"] == Attention(layers=Selection("0-1"), words=True, sample=7, special="drop")
    assert settings_of(chosen["flow"])["source"] == "all"


def test_settings_go_to_a_record_and_back() -> None:
    for name, entry in registry.entries().items():
        analysis = entry.load()()
        assert analysis_of(name, settings_of(analysis)) == analysis


def test_a_plan_names_analyses_and_set_goes_over_it(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[attention]\nlayers = "0"\nsample = 5\nwords = true\n\n[cone-index]\n', encoding="utf-8")
    chosen = chosen_analyses(ChoiceOptions("all", ["attention.sample=6"], plan))
    assert list(chosen) == ["attention", "cone-index"]
    assert chosen["attention"] == Attention(layers=Selection("0"), words=True, sample=6)
    assert list(chosen_analyses(ChoiceOptions("attention,flow,cone-index", None, plan))) == [
        "attention",
        "cone-index",
        "flow",
    ]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--analyses", "atention"), ("'atention'", "cone-index, flow")),
        (("--analyses", ","), ("names none",)),
        (("--set", "flow.special=keep"), ("flow has no setting 'special'", "layers, methods, from")),
        (("--set", "attention.sample=many"), ("attention.sample cannot be 'many'", "whole number")),
        (("--set", "attention.sample=-1"), ("attention.sample cannot be -1", "0 or more")),
        (("--set", "attention.special=no"), ("attention.special cannot be 'no'", "keep, drop, renormalise")),
        (("--set", "attention.words=perhaps"), ("attention.words cannot be 'perhaps'", "true")),
        (("--set", "attention"), ("'attention' is no setting", "ANALYSIS.SETTING=VALUE")),
        (("--set", "nothing.a=1"), ("no analysis 'nothing'",)),
        (("--analyses", "flow", "--set", "attention.sample=1"), ("attention, which is not run", "flow")),
        (("--set", "attention.layers=9"), ("layer 9 does not exist", "0 to 1")),
        (("--plan", "nope.toml"), ("nope.toml", "TOML")),
        (("--plan", "loose.toml"), ("layers stands in no table", "[cone-index]")),
        (("--plan", "unknown.toml"), ("no analysis 'atention'",)),
        (("--plan", "empty.toml"), ("it is empty",)),
        (("--shard", "3/2"), ("--shard '3/2'", "i/n")),
        (("--shard", "one"), ("--shard 'one'",)),
        (("nope.txt",), ("nope.txt",)),
    ],
)
def test_what_cannot_be_run_is_explained(
    fast: Run, tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    (tmp_path / "loose.toml").write_text('layers = "0"\n')
    (tmp_path / "unknown.toml").write_text("[atention]\n")
    (tmp_path / "empty.toml").write_text("")
    before = files_of(tmp_path)
    assert_error(fast("run", *arguments), 2, *parts)
    assert files_of(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("option", [("--resume",), ("--workers", "2"), ("--shard", "1/2"), ("--per-text",)])
def test_options_of_a_corpus_run_are_refused_with_a_text(fast: Run, option: tuple[str, ...]) -> None:
    assert_error(fast("attention", "the cat", *option), 2, f"{option[0]} is for a corpus")
    assert_error(fast("heads", *option), 2, f"{option[0]} is for a corpus")


def test_standard_input_runs_but_cannot_be_resumed_or_split(fast: Run) -> None:
    assert_error(fast("run", "-", "--resume", stdin=b"the cat\n"), 2, "standard input cannot be read again")
    assert_error(fast("run", "-", "--shard", "1/2", stdin=b"the cat\n"), 2, "standard input cannot be read again")
    assert_error(fast("attention", "--corpus", "-", "--resume", stdin=b"the cat\n"), 2, "cannot be read again")


GROUPED = """id\ttext\tkind
1\tthe cat sat\tpets
2\ta dog ran home\tpets
3\tthe old river\tplaces
4\ta green mat\tplaces
5\tmoney\t
"""


def test_tables_by_group_are_those_of_the_group_alone(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "all.tsv").write_text(GROUPED, encoding="utf-8")
    rows = [line.split("\t") for line in GROUPED.splitlines()]
    options = ("--analyses", "attention,cone-index,rank-collapse,flow,heads", "--id-column", "id")
    assert fast("run", "all.tsv", *options, "--group-column", "kind", "-o", "all").exit_code == 0
    assert fast("run", "all.tsv", *options, "-o", "plain").exit_code == 0
    for kind in ("pets", "places"):
        chosen = "".join("\t".join(row) + "\n" for row in rows if row[2] in (kind, "kind"))
        (tmp_path / f"{kind}.tsv").write_text(chosen, encoding="utf-8")
        assert fast("run", f"{kind}.tsv", *options, "-o", kind).exit_code == 0
    stacked = sorted((tmp_path / "all").rglob("*-by-group.csv"))
    assert len(stacked) == 8
    for path in stacked:
        name = path.name.replace("-by-group", "")
        found = pd.read_csv(path)
        assert sorted(set(found["group"])) == ["pets", "places"]
        for kind in ("pets", "places"):
            expected = pd.read_csv(tmp_path / kind / path.parent.name / name).drop(columns="line", errors="ignore")
            own = found[found["group"] == kind].drop(columns=["group", "line"], errors="ignore").reset_index(drop=True)
            pd.testing.assert_frame_equal(own[list(expected)], expected, rtol=1e-12, atol=1e-12)
        whole, plain = (pd.read_csv(tmp_path / run / path.parent.name / name) for run in ("all", "plain"))
        pd.testing.assert_frame_equal(whole, plain, rtol=1e-9, atol=1e-9)
    assert len(list((tmp_path / "all").rglob("*-group-differences.csv"))) == 4
    assert content(tmp_path / "all")["input"]["columns"] == {"text": "text", "id": "id", "group": "kind"}


def test_groups_survive_workers_and_jobs(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "all.tsv").write_text(GROUPED, encoding="utf-8")
    options = ("all.tsv", "--analyses", "attention", "--group-column", "kind", "--shard-texts", "2", "--per-text")
    assert fast("run", *options, "-o", "serial").exit_code == 0
    for job in (1, 2):
        assert fast("run", *options, "--shard", f"{job}/2", "-o", f"part-{job}").exit_code == 0
    assert fast("merge", "part-1", "part-2", "-o", "merged").exit_code == 0
    assert files_of(tmp_path / "merged") == files_of(tmp_path / "serial")
    tables = sorted((tmp_path / "serial").rglob("*.parquet"))
    assert pd.concat(map(pd.read_parquet, tables))["group"].drop_duplicates().tolist() == ["pets", "places", ""]


def test_the_estimated_size_is_about_the_real_one(fast: Run, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("the cat sat on the mat\n" * 60, encoding="utf-8")
    told = fast("run", "c.txt", "--analyses", "attention,cone-index,flow", "--dry-run", "--json")
    assert fast("run", "c.txt", "--analyses", "attention,cone-index,flow", "-o", "out").exit_code == 0
    size = sum(map(len, files_of(tmp_path / "out").values()))
    assert '"shards": 1' in told.stdout
    estimated = int(told.stdout.rpartition(": ")[2].strip(" \n}"))
    assert 0.6 < estimated / size < 1.4
