"""specax-bench: decode, prefill and mixed-load rates of the engine, beside a peer in the same run."""

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import rich.table
from absl import flags

from specax.decoding import cli
from specax.decoding.engine import Engine
from specax.decoding.errors import InvalidRequestError
from specax.decoding.sampling_params import SamplingParams
from specax.model.errors import SpecaxError
from specax.model.loading import resolve

ABOUT = """specax-bench: measures the engine, and a peer beside it on the same prompts.

  specax-bench --model=smollm2
  specax-bench --model=smollm2 --peer=transformers --peer_python=PATH --out=bench.json

Both sides run alternately in one go, idle while the other is timed; rates are medians over --repeats.
Figures of different runs or machines don't compare, ratios within a run do."""

MODEL = cli.define_model_flags()
WORKLOAD = flags.DEFINE_list("workload", ["decode", "prefill", "mixed"], "Which of decode, prefill, mixed to run.")
BATCH = flags.DEFINE_list("batch", ["1", "32", "64"], "Sequences that decode together, one measurement each.")
PROMPT_LEN = flags.DEFINE_integer("prompt_len", 32, "Prompt tokens of the decode workload.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 32, "Decode steps that are timed.", lower_bound=1)
PREFILL_LEN = flags.DEFINE_list("prefill_len", ["512"], "Prompt tokens of the prefill workload.")
REQUESTS = flags.DEFINE_integer("requests", 64, "Requests of the mixed workload.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 3, "Timed repetitions.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Of the random prompts.")
CONFIG = cli.define_config_flag()
PEER = flags.DEFINE_enum("peer", None, ["transformers"], "Measure this one too.")
PEER_PYTHON = flags.DEFINE_string("peer_python", None, "Interpreter that has the peer (torch and transformers).")
JSON = flags.DEFINE_boolean("json", True, "Print the results as JSON on standard output, too.")
OUT = flags.DEFINE_string("out", None, "Write the JSON to this file.")

GROUPS: dict[str, Sequence[Any]] = {
    "Model": MODEL,
    "Workload": (WORKLOAD, BATCH, PROMPT_LEN, STEPS, PREFILL_LEN, REQUESTS, REPEATS, SEED),
    "Engine": (CONFIG,),
    "Peer": (PEER, PEER_PYTHON),
    "Output": (JSON, OUT),
}

WORKLOADS = ("decode", "prefill", "mixed")


@dataclasses.dataclass
class Result:
    """One line of the table; rates in tokens per second."""

    workload: str
    size: int
    rate: float
    host_ms: float  # schedule + build + commit, per step
    peer_rate: float | None = None
    same_tokens: float | None = None  # share of the peer's greedy tokens that are ours too
    detail: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        return None if self.peer_rate is None else self.rate / self.peer_rate


class Peer:
    """The peer's process: a JSON job per line in, an answer per line out (see peer_transformers.py)."""

    def __init__(self, python: str, model: pathlib.Path):
        script = pathlib.Path(__file__).with_name("peer_transformers.py")
        threads = len(os.sched_getaffinity(0))
        self._process = subprocess.Popen(
            [python, str(script), f"--model={model}", f"--threads={threads}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.info = self._read()

    def ask(self, **job: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SpecaxError(f"the peer's process ended with code {self._process.wait()}; its output is above")
        answer = json.loads(line)
        if "error" in answer:
            raise SpecaxError(f"the peer failed: {answer['error']}")
        return answer


def main() -> None:
    if unknown := set(WORKLOAD.value) - set(WORKLOADS):
        raise InvalidRequestError(f"--workload: {', '.join(sorted(unknown))} unknown; there are {', '.join(WORKLOADS)}")
    if bool(PEER.value) != bool(PEER_PYTHON.value):
        raise InvalidRequestError(
            "--peer and --peer_python go together; --peer_python names an interpreter with torch and transformers"
        )
    engine = cli.load_llm(MODEL, CONFIG.value).engine
    peer = Peer(PEER_PYTHON.value, resolve(MODEL[0].value)) if PEER_PYTHON.value else None
    rng = np.random.default_rng(SEED.value)
    results = []
    jobs = [("decode", int(b)) for b in BATCH.value] + [("prefill", int(n)) for n in PREFILL_LEN.value]
    jobs = [job for job in jobs if job[0] in WORKLOAD.value]
    if (most := max([size for name, size in jobs if name == "decode"], default=0)) > engine.config.max_rows:
        raise InvalidRequestError(f"--batch has {most}, beyond the engine's --config.max_rows={engine.config.max_rows}")
    with cli.progress_bar("measuring") as report:
        total = len(jobs) + ("mixed" in WORKLOAD.value)
        for i, (workload, size) in enumerate(jobs):
            results.append((decode if workload == "decode" else prefill)(engine, peer, size, rng))
            report(i + 1, total)
        if "mixed" in WORKLOAD.value:
            results.append(mixed(engine, rng))
    if peer:
        peer.close()
    cli.stderr.print(table(results))
    record = {
        "model": MODEL[0].value,
        "dtype": str(engine.runner.kv.k[0].dtype),
        "devices": [str(jax.devices()[0].device_kind), jax.device_count()],
        "jax": jax.__version__,
        "peer": peer.info if peer else None,
        "results": [{**dataclasses.asdict(r), "ratio": r.ratio} for r in results],
        "engine": engine.stats(),
    }
    text = json.dumps(record, indent=1)
    if JSON.value:
        print(text)
    if OUT.value:
        pathlib.Path(OUT.value).write_text(text + "\n", encoding="utf-8")


def decode(engine: Engine, peer: Peer | None, batch: int, rng: np.random.Generator) -> Result:
    """Steps with `batch` running sequences and nothing else, from PROMPT_LEN tokens of context on."""
    prompts = random_prompts(engine, rng, batch, PROMPT_LEN.value)
    timed_decode(engine, prompts, 2)  # compiles
    ours, host, theirs = [], [], []
    same = None
    for _ in range(REPEATS.value):
        seconds, host_ms, tokens = timed_decode(engine, prompts, STEPS.value)
        ours.append(batch * STEPS.value / seconds)
        host.append(host_ms)
        if peer:
            answer = peer.ask(job="decode", tokens=prompts, steps=STEPS.value, repeats=1, generate=True)
            theirs.append(answer["tokens_per_second"])
            same = float(np.mean(np.asarray(answer["tokens"]) == np.asarray(tokens)))
    peer_rate = statistics.median(theirs) if theirs else None
    return Result("decode", batch, statistics.median(ours), statistics.median(host), peer_rate, same)


def timed_decode(engine: Engine, prompts: list[list[int]], steps: int) -> tuple[float, float, list[list[int]]]:
    """Seconds of `steps` decode steps of all prompts, host milliseconds per step, and the tokens."""
    slack = len(prompts)  # the first ones decode while the last ones prefill
    params = SamplingParams(temperature=0, max_tokens=steps + 1 + slack, ignore_eos=True)
    requests = [engine.request(engine.submit(prompt, params)) for prompt in prompts]
    samples = [r.sequences[0] for r in requests if r is not None]
    while not all(s.output_len for s in samples):
        engine.step()
    before, start = host_seconds(engine), time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = time.perf_counter() - start
    host = 1e3 * (host_seconds(engine) - before) / steps
    for sample in samples:
        engine.abort(sample.request.id)
    engine.step()
    return seconds, host, [s.output[: steps + 1] for s in samples]


def prefill(engine: Engine, peer: Peer | None, length: int, rng: np.random.Generator) -> Result:
    """One prompt from submission to its first token."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    ours, theirs, host = [], [], []
    for i in range(REPEATS.value + 1):
        prompts = random_prompts(engine, rng, 1, length)
        before, steps = host_seconds(engine), engine.stats()["steps"]
        start = time.perf_counter()
        engine.submit(prompts[0], params)
        while engine.has_work:
            engine.step()
        seconds = time.perf_counter() - start
        if i:  # the first one compiles
            ours.append(length / seconds)
            host.append(1e3 * (host_seconds(engine) - before) / (engine.stats()["steps"] - steps))
            if peer:
                theirs.append(length / peer.ask(job="prefill", tokens=prompts, repeats=1)["seconds"][0])
    peer_rate = statistics.median(theirs) if theirs else None
    return Result("prefill", length, statistics.median(ours), statistics.median(host), peer_rate)


def mixed(engine: Engine, rng: np.random.Generator) -> Result:
    """Random requests, all submitted at once: prompts of 8–256 tokens (or what fits), outputs of 8–64."""
    longest = max(8, min(256, engine.limits.max_len - 65))
    lengths = np.exp(rng.uniform(np.log(8), np.log(longest), REQUESTS.value)).astype(int)
    outputs = rng.integers(8, 65, REQUESTS.value)
    for _ in ("compile", "time"):
        requests = []
        before, steps, start = host_seconds(engine), engine.stats()["steps"], time.perf_counter()
        for length, output in zip(lengths.tolist(), outputs.tolist(), strict=True):
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            (prompt,) = random_prompts(engine, rng, 1, length)
            requests.append(engine.request(engine.submit(prompt, params)))
        while engine.has_work:
            engine.step()
        seconds = time.perf_counter() - start
    metrics = [r.metrics for r in requests if r is not None]
    ttft = [1e3 * (m.first_token - m.arrival) for m in metrics if m.first_token is not None]
    tpot = [
        1e3 * (m.finish - m.first_token) / (n - 1)
        for m, n in zip(metrics, outputs.tolist(), strict=True)
        if m.finish is not None and m.first_token is not None
    ]
    host = 1e3 * (host_seconds(engine) - before) / (engine.stats()["steps"] - steps)
    detail = {"prompt_tokens": int(lengths.sum()), "seconds": seconds}
    for name, values in (("ttft_ms", ttft), ("tpot_ms", tpot)):
        detail |= {f"{name}_p{p}": float(np.percentile(values, p)) for p in (50, 95, 99)}
    return Result("mixed", REQUESTS.value, float(outputs.sum() / seconds), host, detail=detail)


def random_prompts(engine: Engine, rng: np.random.Generator, count: int, length: int) -> list[list[int]]:
    return rng.integers(engine.limits.vocab_size // 50, engine.limits.vocab_size, (count, length)).tolist()


def host_seconds(engine: Engine) -> float:
    """Host time of all steps so far: schedule, build, commit."""
    stats = engine.stats()
    return sum(stats["host_ms_per_step"].values()) * max(1, stats["steps"]) / 1e3


def table(results: list[Result]) -> rich.table.Table:
    out = rich.table.Table(title="specax-bench (tokens/s; decode and mixed: generated, prefill: prompt)")
    for name in ("workload", "size", "specax", "peer", "ratio", "same tokens", "host ms/step"):
        out.add_column(name, justify="left" if name == "workload" else "right")
    for r in results:
        out.add_row(
            r.workload,
            str(r.size),
            f"{r.rate:.1f}",
            "–" if r.peer_rate is None else f"{r.peer_rate:.1f}",
            "–" if r.ratio is None else f"{r.ratio:.2f}",
            "–" if r.same_tokens is None else f"{100 * r.same_tokens:.1f}%",
            f"{r.host_ms:.2f}",
        )
    return out


def run() -> None:
    """Console entry point."""
    cli.run_program(main, ABOUT, GROUPS)


if __name__ == "__main__":
    run()
