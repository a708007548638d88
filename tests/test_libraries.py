"""Scripts of other libraries with one more line: their numbers are those of PyTorch; ``make recipes`` runs all."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.one_line import extended

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import libraries as module  # type: ignore[import-not-found]

    return module  # type: ignore[no-any-return]


def test_lines_stand_after_what_they_need() -> None:
    source = "a, b = 1, 2\nif a:\n    a.x = 3\n    c = a\na.x = 4"
    added = extended(source, ["a.x = f(a.x)", "b[0].y = f(b[0].y)"]).splitlines()
    assert added[1:5] == ["a, b = 1, 2", "b[0].y = f(b[0].y)", "if a:", "    a.x = 3"]
    assert added[5] == "    a.x = f(a.x)"
    with pytest.raises(ValueError, match="nothing assigns to 'd.x'"):
        extended(source, ["d.x = 1"])


def test_every_script_has_a_row_and_takes_its_line(libraries: ModuleType) -> None:
    scripts = {f"libraries/{path.stem}" for path in (ROOT / "examples" / "libraries").glob("*.py")}
    assert scripts - {"libraries/text_encoder"} == {row.script for row in libraries.ROWS if "libraries/" in row.script}
    for row in libraries.ROWS:
        source = (ROOT / "examples" / f"{row.script}.py").read_text(encoding="utf-8")
        assert "ort_trainer" not in source
        added = extended(source, row.lines)
        ast.parse(added)
        assert all(line in added for line in row.lines)
    assert len({row.name for row in libraries.ROWS}) == len(libraries.ROWS)


def test_losses_are_those_of_pytorch(libraries: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (row,) = (row for row in libraries.ROWS if row.name == "accelerate")
    result = libraries.measure(row, 1, tmp_path)
    assert result.is_equal and result.difference[1] < 1e-4
    assert result.graphs == 40 and not result.reasons
    assert 0 < result.after_rounding[0] < 1e-4
    assert f"| {result.ratio:.2f} |" in libraries.table({row: result})
