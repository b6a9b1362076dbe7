"""The programs as a user starts them: flags, files, pipes, errors, machine-readable output."""

import json
import os
import pathlib
import stat
import subprocess
import sys

import pytest

from tests.conftest import GOLDENS

MODEL = str(GOLDENS / "smollm2_tied")  # no tokenizer: prompts are token ids
SMALL = ("--config.max_rows=4", "--config.max_batched_tokens=32", "--config.num_pages=64")


def program(name: str, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"specax.decoding.{name}", *args]
    root = pathlib.Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "100"}
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, env=environment, timeout=300, check=False
    )


def test_help_is_grouped() -> None:
    out = program("generate", "--help").stdout
    groups = ["Model:", "Prompts:", "Sampling:", "Engine:", "Output:"]
    assert [out.index(g) for g in groups] == sorted(out.index(g) for g in groups)
    assert "--prompts_file" in out and "--config" in out


def test_generate_jsonl(golden: dict, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt_token_ids": row.tolist()}) + "\n" for row in golden["tokens"])
    )
    args = (
        f"--model={MODEL}",
        f"--prompts_file={file}",
        "--json",
        "--max_tokens=32",
        "--ignore_eos",
        "--stats",
    )
    done = program("generate", *args, *SMALL)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["outputs"][0]["token_ids"] for r in records] == golden["greedy"].tolist()
    assert all(r["outputs"][0]["finish_reason"] == "length" for r in records)
    assert all(word in done.stderr for word in ("TTFT", "TPOT", "tokens/s", "KV pages", "compile time"))


@pytest.mark.parametrize(
    ("args", "stdin", "message"),
    [
        ((f"--model={MODEL}", "--config.page_sise=32", "--prompt=x"), "", "page_sise"),
        ((f"--model={MODEL}", "--config.page_size=0", "--prompt=x"), "", "page_size must be an integer ≥ 1, got 0"),
        ((f"--model={MODEL}", "--prompt=x", *SMALL), "", "no tokenizer"),
        (("--model=nowhere/at/all",), "hello", "nowhere/at/all"),
        ((f"--model={MODEL}", "--prompts_file=absent.txt"), "", "absent.txt"),
        ((f"--model={MODEL}", "--prompts_file=-"), '{"prompt": "x"}\nnonsense', "line 2: not JSON"),
        ((f"--model={MODEL}", "--top_p=0", "--prompt=x"), "", "top_p must be in (0, 1], got 0.0"),
    ],
)  # fmt: skip
def test_generate_errors(args: tuple[str, ...], stdin: str, message: str) -> None:
    done = program("generate", *args, stdin=stdin)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


FAKE_PEER = """#!{python}
import json, sys
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    tokens = [[0] * (job.get("steps", 0) + 1) for _ in job["tokens"]]
    print(json.dumps({{"seconds": [1.0], "tokens_per_second": 10.0, "tokens": tokens}}), flush=True)
"""


def test_bench_beside_a_peer(tmp_path: pathlib.Path) -> None:
    peer = tmp_path / "peer"
    peer.write_text(FAKE_PEER.format(python=sys.executable))
    peer.chmod(peer.stat().st_mode | stat.S_IXUSR)
    result = tmp_path / "bench.json"
    args = (f"--model={MODEL}", "--batch=1,4", "--prompt_len=8", "--steps=4", "--prefill_len=32", "--requests=6",
            "--repeats=1", "--peer=transformers", f"--peer_python={peer}", f"--out={result}")  # fmt: skip
    done = program("bench", *args, *SMALL)
    assert done.returncode == 0, done.stderr
    record = json.loads(result.read_text())
    assert json.loads(done.stdout) == record
    rows = {(r["workload"], r["size"]): r for r in record["results"]}
    assert set(rows) == {("decode", 1), ("decode", 4), ("prefill", 32), ("mixed", 6)}
    assert rows["decode", 4]["ratio"] == pytest.approx(rows["decode", 4]["rate"] / 10.0)
    assert rows["prefill", 32]["peer_rate"] == 32.0
    assert record["engine"]["pages_in_use"] == 0


def test_bench_needs_the_peer_interpreter() -> None:
    done = program("bench", "--peer=transformers")
    assert done.returncode == 2 and "--peer_python" in done.stderr
