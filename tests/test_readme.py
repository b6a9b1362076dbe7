"""The README's Python examples run as they stand (but for the placeholder path)."""

import pathlib
import re

import pytest

from tests.conftest import GOLDENS

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, marks=[pytest.mark.slow] if '"smollm2"' in b else []) for b in BLOCKS],
)
def test_example(block: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = block.replace("path/to/checkpoint", str(GOLDENS / "smollm2_tied")).replace("path/to/cache", str(tmp_path))
    assert code.count("\n") <= 10
    exec(compile(code, "README.md", "exec"), {})
    if "print" in code:
        assert capsys.readouterr().out.strip()
