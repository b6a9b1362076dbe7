"""specax-generate: answers to prompts from a flag, a file or standard input."""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import rich.table
from absl import flags

from specax.decoding import cli
from specax.decoding.errors import InvalidRequestError
from specax.decoding.llm import LLM
from specax.decoding.outputs import RequestOutput, completed
from specax.decoding.sampling_params import SamplingParams
from specax.model.errors import SpecaxError

ABOUT = """specax-generate: answers prompts with a language model.

  specax-generate --model=smollm2 --chat --prompt="Why is the sky blue?"
  specax-generate --model=DIR --prompts_file=prompts.jsonl --json > answers.jsonl
  echo "Once upon a time" | specax-generate --max_tokens=64"""

MODEL = cli.define_model_flags()
PROMPT = flags.DEFINE_multi_string("prompt", [], "A prompt; may be repeated. Without any: standard input, whole.")
PROMPTS_FILE = flags.DEFINE_string(
    "prompts_file",
    None,
    'A prompt per line, or JSON lines with "prompt", "prompt_token_ids" or "messages"; "-" is standard input.',
)
CHAT = flags.DEFINE_boolean("chat", False, "Prompts are user messages, put through the model's chat template.")
SYSTEM = flags.DEFINE_string("system", None, "System message for --chat.")

MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "Tokens to generate at most.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the smallest set with this probability.")
TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from the k likeliest tokens; 0: all.")
MIN_P = flags.DEFINE_float("min_p", 0.0, "Drop tokens less likely than this, relative to the likeliest.")
REPETITION = flags.DEFINE_float("repetition_penalty", 1.0, "Above 1: discourages what was said already.")
N = flags.DEFINE_integer("n", 1, "Samples per prompt (needs --temperature above 0).", lower_bound=1)
SEED = flags.DEFINE_integer("seed", None, "Same seed, same samples.")
STOP = flags.DEFINE_multi_string("stop", [], "Text that ends an answer; may be repeated.")
IGNORE_EOS = flags.DEFINE_boolean("ignore_eos", False, "Go on to --max_tokens.")

CONFIG = cli.define_config_flag()

JSON = flags.DEFINE_boolean("json", False, "One JSON object per prompt on standard output.")
STREAM = flags.DEFINE_boolean("stream", True, "Print a single answer as it comes.")
STATS = flags.DEFINE_boolean("stats", False, "Print a table of speed and memory at the end.")

GROUPS: dict[str, Sequence[Any]] = {
    "Model": MODEL,
    "Prompts": (PROMPT, PROMPTS_FILE, CHAT, SYSTEM),
    "Sampling": (MAX_TOKENS, TEMPERATURE, TOP_P, TOP_K, MIN_P, REPETITION, N, SEED, STOP, IGNORE_EOS),
    "Engine": (CONFIG,),
    "Output": (JSON, STREAM, STATS),
}

type Prompt = str | list[int]


def main() -> None:
    entries = read_entries()
    params = SamplingParams(
        n=N.value, temperature=TEMPERATURE.value, top_p=TOP_P.value, top_k=TOP_K.value, min_p=MIN_P.value,
        repetition_penalty=REPETITION.value, seed=SEED.value, stop=STOP.value or None,
        ignore_eos=IGNORE_EOS.value, max_tokens=MAX_TOKENS.value,
    )  # fmt: skip
    llm = cli.load_llm(MODEL, CONFIG.value)
    prompts = [to_prompt(llm, entry) for entry in entries]
    try:
        outputs = answer(llm, prompts, entries, params)
    finally:
        llm.close()
    if errors := {str(o.stop_reason) for out in outputs for o in out.outputs if o.finish_reason == "error"}:
        raise SpecaxError(f"generation failed: {'; '.join(sorted(errors))}")


def answer(
    llm: LLM, prompts: list[Prompt], entries: list[dict[str, Any]], params: SamplingParams
) -> list[RequestOutput]:
    """Generates and prints, with a table of figures if it was asked for."""
    if STATS.value:  # so that the times below are the model's and not the compiler's, nor those of cached prompts
        with cli.progress_bar("compiling"):
            llm.generate(prompts, dataclasses.replace(params, max_tokens=2, stop=None, ignore_eos=True))
        llm.engine.reset_prefix_cache(keep_files=True)
    start = time.monotonic()
    if len(prompts) == 1 and STREAM.value and params.n == 1 and not JSON.value and llm.tokenizer is not None:
        outputs = [stream(llm, prompts[0], params)]
    else:
        with cli.progress_bar("answering") as report:
            outputs = llm.generate(prompts, params, progress=report)
        show(llm, outputs, entries)
    if STATS.value:
        cli.stderr.print(stats_table(llm, outputs, time.monotonic() - start))
    return outputs


def read_entries() -> list[dict[str, Any]]:
    """The prompts as given, each a dict with "prompt", "prompt_token_ids" or "messages".

    Raises:
      InvalidRequestError: no prompt, an unreadable file, or a line that is none of these.
    """
    texts = [{"prompt": text} for text in PROMPT.value]
    if PROMPTS_FILE.value is not None:
        texts += read_file(PROMPTS_FILE.value)
    elif not texts:
        if sys.stdin.isatty():
            raise InvalidRequestError("no prompt: give --prompt, --prompts_file, or pipe one in (see --help)")
        texts = [{"prompt": sys.stdin.read().rstrip("\n")}]
    if not texts:
        raise InvalidRequestError(f"{PROMPTS_FILE.value} holds no prompt")
    return texts


def read_file(name: str) -> list[dict[str, Any]]:
    """Lines of text, or of JSON objects (recognised by the first line)."""
    try:
        text = sys.stdin.read() if name == "-" else pathlib.Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"--prompts_file: {error}") from error
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines or not lines[0][1].lstrip().startswith("{"):
        return [{"prompt": line} for _, line in lines]
    entries = []
    for number, line in lines:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise InvalidRequestError(f"{name}, line {number}: not JSON: {error}") from error
        if not isinstance(entry, dict) or not {"prompt", "prompt_token_ids", "messages"} & entry.keys():
            raise InvalidRequestError(f'{name}, line {number}: needs "prompt", "prompt_token_ids" or "messages"')
        entries.append(entry)
    return entries


def to_prompt(llm: LLM, entry: dict[str, Any]) -> Prompt:
    if "prompt_token_ids" in entry:
        return entry["prompt_token_ids"]
    if "messages" in entry:
        return llm.chat_tokens(entry["messages"])
    if not CHAT.value:
        return entry["prompt"]
    system = [{"role": "system", "content": SYSTEM.value}] if SYSTEM.value else []
    return llm.chat_tokens([*system, {"role": "user", "content": entry["prompt"]}])


def stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Prints the answer as it comes, and returns it whole."""
    tokens = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt  # type: ignore[union-attr]
    request = llm.engine.request(llm.engine.submit(tokens, params))
    assert request is not None
    while not request.finished:
        for out in llm.engine.step():
            print("".join(o.text for o in out.outputs), end="", flush=True)
    print()
    return completed(request)


def show(llm: LLM, outputs: list[RequestOutput], entries: list[dict[str, Any]]) -> None:
    for index, (out, entry) in enumerate(zip(outputs, entries, strict=True)):
        samples = [
            {key: getattr(o, key) for key in ("index", "text", "token_ids", "finish_reason", "stop_reason")}
            for o in out.outputs
        ]
        if JSON.value:
            record = {"index": index, **entry, "prompt_tokens": len(out.prompt_token_ids), "outputs": samples}
            print(json.dumps(record, ensure_ascii=False), flush=True)
            continue
        for sample in samples:
            if len(outputs) > 1 or len(samples) > 1:
                cli.stderr.rule(f"prompt {index}, sample {sample['index']} ({sample['finish_reason']})")
            print(sample["text"] if llm.tokenizer else sample["token_ids"])


def stats_table(llm: LLM, outputs: list[RequestOutput], seconds: float) -> rich.table.Table:
    """TTFT and TPOT as medians over requests, throughput, memory, compile time."""
    first = sorted(o.metrics.first_token - o.metrics.arrival for o in outputs if o.metrics.first_token is not None)
    if not first:
        return rich.table.Table(title="nothing was generated")
    per_token = sorted(
        (o.metrics.finish - o.metrics.first_token) / (n - 1)  # type: ignore[operator]
        for o in outputs
        if (n := max(len(s.token_ids) for s in o.outputs)) > 1
    )
    tokens = sum(len(s.token_ids) for o in outputs for s in o.outputs)
    stats = llm.stats()
    table = rich.table.Table(show_header=False, title=f"{tokens} tokens in {seconds:.2f} s")
    rows = {
        "time to first token (TTFT)": f"{1e3 * first[len(first) // 2]:.0f} ms",
        "time per output token (TPOT)": f"{1e3 * per_token[len(per_token) // 2]:.1f} ms" if per_token else "–",
        "throughput": f"{tokens / seconds:.1f} tokens/s",
        "prompt tokens from the cache": f"{sum(o.metrics.cached_tokens for o in outputs)}",
        "KV pages used, at most": f"{stats['pages_peak']} of {stats['pages_total']}",
        "compile time": f"{stats['compile_seconds']:.1f} s ({stats['compilations']} programs)",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def run() -> None:
    """Console entry point."""
    cli.run_program(main, ABOUT, GROUPS)


if __name__ == "__main__":
    run()
