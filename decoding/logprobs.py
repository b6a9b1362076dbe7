"""Log-probabilities from the device's arrays to what the caller gets."""

from typing import Any

import numpy as np

from specax.decoding.outputs import Logprob

type Scores = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # own, ranks, top tokens, top logprobs


def on_host(own: Any, ranks: Any, top_tokens: Any, top: Any) -> Scores:
    """Brings a block of scores to the host."""
    return np.asarray(own), np.asarray(ranks), np.asarray(top_tokens), np.asarray(top)


def row_logprobs(token: int, k: int, row: int, scores: Scores, whole: np.ndarray | None) -> dict[int, Logprob]:
    """The token's own log-probability and the k likeliest (k < 0: all), the token first.

    Args:
      whole: log-probabilities [rows, vocab]; needed when k is negative or beyond the top list.
    """
    own, ranks, top_tokens, top = scores
    out = {token: Logprob(float(own[row]), int(ranks[row]))}
    if whole is not None and (k < 0 or k > top_tokens.shape[1]):
        values = whole[row]
        order = np.argsort(-values, kind="stable")[: len(values) if k < 0 else k]
        likeliest = zip(order.tolist(), values[order].tolist(), strict=True)
    else:
        likeliest = zip(top_tokens[row, :k].tolist(), top[row, :k].tolist(), strict=True)
    for rank, (other, value) in enumerate(likeliest, start=1):
        out.setdefault(other, Logprob(value, rank))
    return out


def vocab_logprobs(token: int, k: int, logprobs: np.ndarray) -> dict[int, Logprob]:
    """The same as `row_logprobs` from the log-probabilities of the whole vocabulary, float32 [vocab]."""
    own = np.array([logprobs[token]])
    ranks = np.array([1 + np.count_nonzero(logprobs > own)])
    none = np.zeros((1, 0))
    return row_logprobs(token, k, 0, (own, ranks, none, none), logprobs[None])
