"""What transformers computes with SmolLM2-135M-Instruct on Spec-Bench prompts: smollm2_spec_bench.npz.

    PEER_PYTHON tests/goldens/make_smollm2.py --model=FILE.gguf --data=spec_bench.jsonl

PEER_PYTHON has torch, transformers and gguf. The prompts themselves are not stored, only where they stand in
the data file and a hash of their token ids. float32, CPU, sdpa; for each of 20 prompts:

    line [20]            0-based line of the data file (first turn, default system message of the template)
    sha256 [20]          of the prompt's token ids as little-endian int32
    greedy [20, 128]     greedy ids (EOS is no stop), and gap [20, 128], top-1 minus top-2 logit
    columns [64]         a sample of the vocabulary
    logits_0 … logits_2  prompt logits of the first three prompts at these columns [prompt, 64]
    last_0 … last_2      and of their last position, whole [vocab]
"""

import argparse
import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

PROMPTS, STRIDE, MAX_PROMPT, STEPS, WITH_LOGITS, COLUMNS = 20, 24, 900, 128, 3, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    args = parser.parse_args()
    folder, file = os.path.split(os.path.abspath(args.model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    # transformers ignores `tokenizer.ggml.pre`, here "smollm": each digit apart, then GPT-2's pattern.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    lines = [json.loads(line) for line in pathlib.Path(args.data).read_text(encoding="utf-8").splitlines()]

    def prompt(number: int) -> list[int]:
        messages = [{"role": "user", "content": lines[number]["turns"][0]}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer(text, add_special_tokens=False).input_ids

    columns = np.random.default_rng(0).choice(model.config.vocab_size, COLUMNS, replace=False)
    used, hashes, greedy, gaps = [], [], [], []
    arrays: dict[str, Any] = {"columns": columns.astype(np.int32)}
    for i in range(PROMPTS):
        number = next(n for n in range(i * STRIDE, (i + 1) * STRIDE) if len(prompt(n)) <= MAX_PROMPT)
        ids = prompt(number)
        used.append(number)
        hashes.append(hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest())
        row, gap, logits = decode(model, ids)
        greedy.append(row)
        gaps.append(gap)
        if i < WITH_LOGITS:
            arrays |= {f"logits_{i}": logits[:, columns], f"last_{i}": logits[-1]}
        print(i, number, len(ids), min(gap), flush=True)
    arrays |= {"line": np.array(used, np.int32), "sha256": np.array(hashes)}
    arrays |= {"greedy": np.array(greedy, np.int32), "gap": np.array(gaps, np.float32)}
    np.savez_compressed(pathlib.Path(__file__).with_name("smollm2_spec_bench.npz"), **arrays)


@torch.inference_mode()
def decode(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], list[float], np.ndarray]:
    """Greedy ids, their gaps, and the prompt's logits [prompt, vocab]."""
    result = model(torch.tensor([ids]), use_cache=True)
    prompt_logits = result.logits[0].numpy()
    greedy, gaps = [], []
    while True:
        top = result.logits[0, -1].topk(2)
        greedy.append(int(result.logits[0, -1].argmax()))
        gaps.append(float(top.values[0] - top.values[1]))
        if len(greedy) == STEPS:
            return greedy, gaps, prompt_logits
        cache = result.past_key_values
        result = model(torch.tensor([greedy[-1:]]), past_key_values=cache, use_cache=True)


if __name__ == "__main__":
    main()
