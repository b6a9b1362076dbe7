"""Makes smollm2_beams.npz: what Hugging Face transformers' beam search finds on the smollm2_tied checkpoint.

Usage, from the repository root, with an interpreter that has torch and transformers:

    PEER_PYTHON tests/goldens/make_beams.py

README.md says what the arrays are.
"""

import itertools
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
BEAMS, STEPS, EOS_TOKENS = 4, 16, 3
PAD = -1  # after the end of a sequence


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        HERE / "smollm2_tied", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with np.load(HERE / "smollm2_tied" / "golden.npz") as data:
        prompts, greedy = data["tokens"], data["greedy"]
    # Frequent tokens of the greedy outputs end the output, so that beams finish early, at different lengths.
    eos = sorted(np.bincount(greedy.ravel()).argsort()[::-1][:EOS_TOKENS].tolist())
    cases = list(itertools.product((0.0, 1.0, 2.0), (0, 1, 2)))  # length penalty, place in `stopping`
    stopping = (False, True, "never")
    tokens = np.full((len(cases), len(prompts), BEAMS, STEPS), PAD, np.int32)
    scores = np.zeros(tokens.shape[:-1], np.float32)
    for i, (length_penalty, early) in enumerate(cases):
        for j, prompt in enumerate(prompts):
            out = model.generate(
                torch.tensor(prompt[None].astype(np.int64)),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                do_sample=False, num_beams=BEAMS, num_return_sequences=BEAMS, max_new_tokens=STEPS,
                length_penalty=length_penalty, early_stopping=stopping[early], eos_token_id=eos, pad_token_id=0,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
            for k, sequence in enumerate(out.sequences[:, len(prompt) :].tolist()):
                end = next((n for n, token in enumerate(sequence, 1) if token in eos), STEPS)
                tokens[i, j, k, :end] = sequence[:end]
            scores[i, j] = out.sequences_scores.numpy()
    lengths = (tokens != PAD).sum(-1)
    print(f"eos {eos}, lengths {np.bincount(lengths.ravel(), minlength=STEPS + 1).tolist()}")
    np.savez_compressed(
        HERE / "smollm2_beams.npz", eos=np.array(eos, np.int32), length_penalty=np.array([c[0] for c in cases]),
        early_stopping=np.array([str(stopping[c[1]]) for c in cases]), tokens=tokens, scores=scores,
    )  # fmt: skip


if __name__ == "__main__":
    main()
