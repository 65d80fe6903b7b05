"""The pages: each has a formula, a command and the file that computes it; all are built, and their commands run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

HOME = Path(__file__).parents[1]
SETTINGS = HOME / "docs" / "mkdocs.yml"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((HOME / "docs" / "pages").glob("*.md"))}
CONCEPTS = [name for name in PAGES if name != "index.md"]
COMMAND = re.compile(r"^``` bertgeo[^\n]*\n(bertgeo [^\n]+)\n```$", re.MULTILINE)


def built(settings: Path, site: Path) -> dict[str, str]:
    build(load_config(str(settings), site_dir=str(site)))
    return {path.stem: path.read_text(encoding="utf-8") for path in site.glob("*.html")}


@pytest.mark.parametrize("name", CONCEPTS)
def test_a_page_has_a_formula_a_command_a_figure_and_the_file_that_computes_it(name: str) -> None:
    page = PAGES[name]
    assert "$$" in page
    assert COMMAND.search(page)
    assert " figure=" in page
    files = re.findall(r"`((?:analyses|bertgeo_cli)/[a-z_/]+\.py)`", page.partition("\nComputed by ")[2])
    assert files
    assert all((HOME / file).is_file() for file in files)


def test_every_block_of_a_command_is_one_that_is_run() -> None:
    for name, page in PAGES.items():
        assert page.count("``` bertgeo") == len(COMMAND.findall(page)), name


def test_all_pages_stand_in_the_list_and_in_the_overview() -> None:
    settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))
    assert sorted(settings["nav"]) == sorted(PAGES)
    assert all(f"]({name})" in PAGES["index.md"] for name in CONCEPTS)


def test_the_pages_are_built_with_real_answers_and_nothing_fetched(tmp_path: Path) -> None:
    site = built(SETTINGS, tmp_path / "site")
    for name in CONCEPTS:
        made, page = site[Path(name).stem], PAGES[name]
        assert made.count("<math") == page.count("$$") // 2 + page.count(r"\(")
        assert made.count('class="gp">$ </span>bertgeo') == len(COMMAND.findall(page))
        figures = re.findall(r'<img alt="([^"]+)" src="(figures/[^"]+)"', made)
        assert len(figures) == page.count(" figure=")
        assert all((tmp_path / "site" / path).stat().st_size for _, path in figures)
        fetched = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//([^"]+)"', made)
        assert not fetched
        assert str(tmp_path) not in made


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ('``` bertgeo\nbertgeo attention "the bank" --layers 99\n```', "layer 99 does not exist"),
        ("``` bertgeo figure=no.png\nbertgeo bilinear\n```", "leaves no no.png"),
    ],
)
def test_a_page_whose_command_fails_is_not_built(
    block: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text(f"# A page\n\n{block}\n")
    (tmp_path / "mkdocs.yml").write_text(
        f"site_name: one\ndocs_dir: pages\ntheme: {{name: material, font: false}}\nhooks: [{HOME}/docs/commands.py]\n"
    )
    with pytest.raises(Abort):
        built(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert told in caplog.text
