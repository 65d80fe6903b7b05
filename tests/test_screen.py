"""Tables in the terminal: whole numbers at any width."""

from __future__ import annotations

import pytest

from bertgeo_cli import screen

NAMES = ["layer", "kind", *(f"a measured value {at}" for at in range(12))]
ROWS = [[layer, "without_outliers", *(0.012345 * (at + 1) + layer for at in range(12))] for layer in range(2)]


@pytest.mark.parametrize("width", [60, 80, 100, 160, 400])
def test_no_number_and_no_name_is_cut_and_each_stands_once(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen, "FILE_WIDTH", width)
    screen.print_rows("Values", NAMES, ROWS)
    out = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    assert max(map(len, out.splitlines())) <= width
    cells = out.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split()
    for row in ROWS:
        for value in row[2:]:
            assert cells.count(f"{value:.4g}") == 1


def test_a_continued_table_names_its_rows_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen, "FILE_WIDTH", 80)
    screen.print_rows("Values", NAMES, ROWS)
    parts = capsys.readouterr().out.split("continued")
    assert len(parts) > 1
    assert all(part.count("without_outliers") == len(ROWS) for part in parts)


def test_what_fits_is_one_table_with_names_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen, "FILE_WIDTH", 400)
    screen.print_rows("Values", NAMES, ROWS)
    out = capsys.readouterr().out
    assert "continued" not in out
    assert "a measured value 11" in out
