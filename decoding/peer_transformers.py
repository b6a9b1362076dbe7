"""The other side of `specax-bench --peer=transformers`: Hugging Face transformers, driven over a pipe.

A standalone script (no specax) for Python 3.10 or later with torch and transformers 4.56 or later:

    PEER_PYTHON peer_transformers.py --model=PATH --threads=N

PATH is a .gguf file (which needs the gguf package too) or a Hugging Face directory. The network runs on the
CPU in float32 with transformers' default attention (sdpa) under `torch.inference_mode`. The first line on
stdout is `{"ready": true, ...}` with the fields of the info job; then every line of stdin is one job in JSON,
answered by one line of JSON on stdout (all else goes to stderr). A job that fails is answered
`{"error": "..."}`. The end of stdin ends the script.

    {"job": "info"}
        versions, threads, dtype, attention, parameters (a tied embedding counted once)
    {"job": "prefill", "tokens": [[...], ...], "repeats": k}
        seconds [k]: a forward over the prompts, filling a new cache, logits at the last position only
    {"job": "decode", "tokens": [[...], ...], "steps": n, "repeats": k, "generate": true}
        tokens [batch, n + 1] and seconds [k]: n single-token forwards after an untimed prefill, which gives
        the first token; with "generate", also generate_seconds [k]: `model.generate` of n + 1 tokens less
        `model.generate` of one, which is as many forwards and leaves out what generate spends at its start;
        "best" names the faster of "loop" and "generate" by their medians, "tokens_per_second" is its rate
    {"job": "logits", "tokens": [[...]], "out": "file.npz"}
        saves `logits` [len, vocab], float32
    {"job": "greedy", "tokens": [...], "steps": n}
        ids [n] and gaps [n] (top-1 minus top-2 logit); EOS is no stop, here as in decode

Every timed job runs once untimed first. All prompts of a job have one length, so there is no padding.
"""

from __future__ import annotations

import argparse
import copy
import functools
import inspect
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers


class Peer:
    """A transformers model and the jobs that it answers."""

    def __init__(self, path: str, threads: int) -> None:
        torch.set_num_threads(threads)
        source: dict[str, Any] = {"pretrained_model_name_or_path": path}
        if path.endswith(".gguf"):
            folder, file = os.path.split(os.path.abspath(path))
            source = {"pretrained_model_name_or_path": folder, "gguf_file": file}
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        self.model = model.eval()
        # transformers 5.24 renamed the argument.
        renamed = "cache" in inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if renamed else "past_key_values"
        # Without an EOS id generate never stops early, and need not mask EOS at every step to get there.
        self.model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)

    def info(self) -> dict[str, Any]:
        """Answers the info job."""
        return {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
            "parameters": self.model.num_parameters(),
        }

    def prefill(self, tokens: list[list[int]], repeats: int) -> dict[str, Any]:
        """Answers the prefill job."""
        prompts = torch.tensor(tokens)

        def prefill() -> None:
            self._forward(prompts, self._new_cache())

        prefill()
        return {"seconds": [_timed(prefill)[0] for _ in range(repeats)]}

    def decode(
        self, tokens: list[list[int]], steps: int, repeats: int, generate: bool = False
    ) -> dict[str, Any]:
        """Answers the decode job."""
        prompts = torch.tensor(tokens)
        prefilled = self._new_cache()
        first = self._forward(prompts, prefilled).argmax(-1, keepdim=True)

        def loop(cache: transformers.DynamicCache) -> torch.Tensor:
            ids = [first]
            for _ in range(steps):
                ids.append(self._forward(ids[-1], cache).argmax(-1, keepdim=True))
            return torch.cat(ids, dim=1)

        seconds = []
        for _ in range(1 + repeats):
            cache = copy.deepcopy(prefilled)
            elapsed, ids = _timed(functools.partial(loop, cache))
            seconds.append(elapsed)
        answer = {"tokens": ids.tolist(), "seconds": seconds[1:]}
        rates = {"loop": statistics.median(answer["seconds"])}
        if generate:
            answer["generate_seconds"] = self._generate_seconds(prompts, steps, repeats)
            rates["generate"] = statistics.median(answer["generate_seconds"])
        best = min(rates, key=lambda name: rates[name])
        return answer | {"best": best, "tokens_per_second": len(tokens) * steps / rates[best]}

    def logits(self, tokens: list[list[int]], out: str) -> dict[str, Any]:
        """Answers the logits job."""
        if len(tokens) != 1:
            raise ValueError(f"logits: one prompt at a time, got {len(tokens)}")
        logits = self.model(torch.tensor(tokens), use_cache=False).logits[0]
        np.savez(out, logits=logits.numpy())
        return {"out": out, "shape": list(logits.shape)}

    def greedy(self, tokens: list[int], steps: int) -> dict[str, Any]:
        """Answers the greedy job."""
        ids: list[int] = []
        gaps: list[float] = []
        inputs, cache = torch.tensor([tokens]), self._new_cache()
        for _ in range(steps):
            last = self._forward(inputs, cache)[0]
            top = last.topk(2).values
            gaps.append(float(top[0] - top[1]))
            inputs = last.argmax().view(1, 1)
            ids.append(int(inputs))
        return {"ids": ids, "gaps": gaps}

    def _new_cache(self) -> transformers.DynamicCache:
        return transformers.DynamicCache(config=self.model.config)

    def _forward(self, ids: torch.Tensor, cache: transformers.DynamicCache) -> torch.Tensor:
        """Logits [batch, vocab] after the last of `ids`, which are appended to `cache`."""
        arguments = {self.cache_argument: cache}
        return self.model(ids, use_cache=True, logits_to_keep=1, **arguments).logits[:, -1]

    def _generate_seconds(self, prompts: torch.Tensor, steps: int, repeats: int) -> list[float]:
        mask = torch.ones_like(prompts)

        def generate(count: int) -> None:
            ids = self.model.generate(prompts, attention_mask=mask, max_new_tokens=count)
            if ids.shape[1] != prompts.shape[1] + count:
                raise RuntimeError(f"generate gave {ids.shape[1] - prompts.shape[1]} tokens, not {count}")

        generate(steps + 1)
        pairs = [
            (_timed(lambda: generate(1))[0], _timed(lambda: generate(steps + 1))[0]) for _ in range(repeats)
        ]
        return [whole - start for start, whole in pairs]


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that `call` took, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def main() -> None:
    """Serves jobs from stdin until it ends."""
    parser = argparse.ArgumentParser(description="Answers specax-bench's jobs with transformers.")
    parser.add_argument("--model", required=True, help="a .gguf file or a Hugging Face directory")
    parser.add_argument("--threads", type=int, required=True, help="torch's intra-op threads")
    flags = parser.parse_args()
    # Answers own the real stdout; whatever a library prints goes to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    peer = Peer(flags.model, flags.threads)
    jobs = {job.__name__: job for job in (peer.info, peer.prefill, peer.decode, peer.logits, peer.greedy)}
    print(json.dumps({"ready": True, **peer.info()}), file=answers, flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            try:
                request = json.loads(line)
                answer = jobs[request.pop("job")](**request)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
