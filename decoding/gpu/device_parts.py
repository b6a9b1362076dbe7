"""The parts of specax-device-check, each until its deadline, under a watchdog."""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from specax.decoding import cli
from specax.decoding.gpu.device_report import Deadline, DeviceLost, Report
from specax.pallas_kernels.dispatch import Implementation

PARTS = ("correctness", "engine", "timings")
SHARES = {"correctness": 0.4, "engine": 0.2, "timings": 0.4}  # of the time; what one part leaves, the next ones have


class watchdog:
    """Ends the process, exit code 3, if it is still inside after `seconds`: Python can't interrupt a GPU that hangs."""

    def __init__(self, report: Report, seconds: float):
        self._report = report
        self._timer = threading.Timer(seconds, self._bite)
        self._timer.daemon = True

    def _bite(self) -> None:
        try:
            self._report.write()
            print(f"the GPU hangs, or is far too slow, in: {self._report.running}", file=sys.stderr, flush=True)
        finally:
            os._exit(3)  # even if the disk is full

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


type Progress = Callable[[int, int], None]
type Run = Callable[[Report, Deadline, Progress], None]


def run_parts(report: Report, parts: Sequence[str], budget: float, programs: dict[str, Run]) -> None:
    """Each part until its deadline. One whose modules are not there is left out; a lost device ends everything."""
    start, whole = time.monotonic(), sum(SHARES[part] for part in parts)
    until = 0.0
    for number, part in enumerate(parts):
        until += SHARES[part] / whole
        deadline = Deadline(start + budget * until)
        if Deadline(start + budget).passed:
            report.skip(part, "everything", "out of time")
            continue
        try:
            with cli.progress_bar(part) as progress:
                programs[part](report, deadline, progress)
        except ImportError as error:
            report.skip(part, "everything", str(error))
        except DeviceLost as error:
            with report.entry(part, "the device") as entry:
                entry["wrong"] = str(error)
            for left in parts[number + 1 :]:
                report.skip(left, "everything", "the device is lost")
            return


def run_correctness(report: Report, deadline: Deadline, progress: Progress) -> None:
    from specax.decoding.gpu.device_kernels import all_checks, check_kernels

    check_kernels(report, deadline, all_checks(), progress=progress)


def run_engine(report: Report, deadline: Deadline, progress: Progress) -> None:
    from specax.decoding.gpu.device_engine import check_engine

    check_engine(report, deadline, progress=progress)


def run_timings(report: Report, deadline: Deadline, progress: Progress) -> None:
    """The kernels, the decode step, then what they are compared with."""
    from specax.decoding.gpu.device_timings import time_kernels

    ceilings = time_kernels(report, deadline, implementations=("mosaic_gpu",), progress=progress)
    try:
        from specax.decoding.gpu.device_engine import time_step
    except ImportError as error:
        report.skip("timings", "decode step", str(error))
    else:
        both: tuple[Implementation, ...] = ("mosaic_gpu", "xla")
        for implementation in both:
            if deadline.passed:
                report.skip("timings", f"decode step, {implementation}", "out of time")
            else:
                time_step(report, ceilings, implementation)
    time_kernels(report, deadline, implementations=("triton", "xla"), progress=progress, ceilings=ceilings)


PROGRAMS: dict[str, Run] = {"correctness": run_correctness, "engine": run_engine, "timings": run_timings}
