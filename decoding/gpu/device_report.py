"""The record of a run on a device: on disk after every entry, so that a run that is killed or hangs loses nothing.

Needs no more than jax.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from specax.model.errors import SpecaxError
from specax.pallas_kernels.dispatch import HOPPER

# What a kernel, its compiler or a module that is not there may raise; the rest of a run is of interest all the same.
FAILURES = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError, ImportError, AttributeError)


class NoDeviceError(SpecaxError):
    """There is no GPU that the kernels run on."""


class DeviceLost(RuntimeError):
    """The device answers no more: an error that stays, such as an illegal address."""


def need_hopper(program: str) -> None:
    """Raises NoDeviceError unless the first device is a Hopper GPU."""
    needs = f"{program} needs a Hopper GPU (H100, H200) that jax sees (pip install 'jax[cuda13]' for its plugin)"
    try:
        found = jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # JAX_PLATFORMS=cuda without a plugin, without a driver
        why = first_lines(error) or "no platform starts"
        raise NoDeviceError(f"{needs}; jax {jax.__version__} finds no device: {why}") from error
    if found.platform != "gpu" or not HOPPER.search(found.device_kind):
        raise NoDeviceError(f"{needs}; jax {jax.__version__} found {found.device_kind!r} on {found.platform!r}")


@dataclasses.dataclass(frozen=True)
class Deadline:
    """A moment of a clock."""

    at: float
    clock: Callable[[], float] = time.monotonic

    @property
    def left(self) -> float:
        """Seconds; below 0 when it has passed."""
        return self.at - self.clock()

    @property
    def passed(self) -> bool:
        return self.left <= 0


class Report:
    """Entries of each part, each a dictionary; one with "wrong" in it is a failure.

    With a path, the JSON there always has everything up to now, and under "running" what has begun and not ended.
    """

    def __init__(self, path: pathlib.Path | None = None):
        self.facts = facts()
        self.parts: dict[str, list[dict[str, Any]]] = {}
        self.not_run: list[str] = []  # "PART: what, why"
        self.left_out: list[str] = []  # "PART: NAME" of each entry that is not there for it
        self.running = ""
        self._path = path
        self.write()

    @contextlib.contextmanager
    def entry(self, part: str, name: str) -> Iterator[dict[str, Any]]:
        """An entry to be filled in; an error inside becomes its "wrong".

        Raises:
          DeviceLost: after an error, the device does not even add two numbers.
        """
        self.running = f"{part}: {name}"
        self.write()
        entry: dict[str, Any] = {"name": name}
        start = time.monotonic()
        self.parts.setdefault(part, []).append(entry)
        try:
            yield entry
        except FAILURES as error:
            entry["wrong"] = f"{type(error).__name__}: {first_lines(error)}"
            check_alive()
        finally:
            entry["seconds"] = round(time.monotonic() - start, 3)
            self.running = ""
            self.write()

    def skip(self, part: str, what: str, why: str, names: Sequence[str] = ()) -> None:
        """`names`: of the entries that there would be, for the JSON, where `what` is short."""
        self.not_run.append(f"{part}: {what}: {why}")
        self.left_out += [f"{part}: {name}" for name in names]
        self.write()

    @property
    def failures(self) -> list[str]:
        return [f"{part}: {e['name']}: {e['wrong']}" for part, es in self.parts.items() for e in es if "wrong" in e]

    @property
    def exit_code(self) -> int:
        """1: something is wrong; 4: nothing is, but not everything ran."""
        return 1 if self.failures else 4 if self.not_run else 0

    def record(self) -> dict[str, Any]:
        return {
            "device": self.facts,
            "running": self.running,
            "failures": self.failures,
            "not_run": self.not_run,
            "left_out": self.left_out,
            "parts": self.parts,
        }

    def write(self) -> None:
        if self._path is None:
            return
        new = self._path.with_name(self._path.name + ".new")
        new.write_text(json.dumps(self.record(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(new, self._path)


def first_lines(error: BaseException, most: int = 500) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:most]


def check_alive() -> None:
    """Raises DeviceLost if the device does not compute any more."""
    try:
        alive = float(jnp.full((2,), 1.5).sum()) == 3.0
    except RuntimeError as error:
        raise DeviceLost(f"the device is lost: {first_lines(error)}") from error
    if not alive:
        raise DeviceLost("the device is lost: 1.5 + 1.5 is not 3")


def facts() -> dict[str, Any]:
    """What the figures were measured on and with."""
    device = jax.devices()[0]
    return {
        "kind": device.device_kind,
        "platform": device.platform,
        "count": jax.device_count(),
        "cores": getattr(device, "core_count", None),
        "driver": _driver() if device.platform == "gpu" else None,
        "runtime": getattr(device.client, "platform_version", "").splitlines(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _driver() -> str | None:
    """The driver's version; None where nobody can say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
