"""Predicts how long an output will be, learning online from those that ended.

What says most is how long earlier answers to the same conversation were (on a production trace the logarithms of
successive lengths correlate with 0.65, those of prompt and output with 0.05), so prompts are looked up by the longest
prefix that was seen before.

A linear model of log(1 + output tokens), fitted by recursive least squares. Forgetting is a Kalman filter's: the
weights in use drift a little between requests. (The usual forgetting factor inflates the covariance of weights
that no request uses, without bound: here, of the buckets that no hash hits.) Haykin, "Adaptive Filter Theory",
chapters on RLS and its state-space model; hashed features: Weinberger et al., ICML 2009.
"""

import math
import zlib
from collections import OrderedDict
from weakref import WeakKeyDictionary

import numpy as np

from specax.decoding.request import Request

BUCKETS = 16  # per hashed feature. Few: each needs to be hit often before it says something
# Tokens hashed: the system prompt tells one application from another, the end what it asks. Two lengths each, so
# that two prompts whose hashes collide in one of them are still told apart by the other.
HEADS, TAILS = (4, 32), (1, 4)
# 1, log prompt length, log max_tokens, what the conversation and what its like had so far; tenant, heads, tails
FIXED = 5
SIZE = FIXED + (1 + len(HEADS) + len(TAILS)) * BUCKETS
BLOCK = 256  # tokens: prefixes of multiples of it are remembered
MOST_BLOCKS = 512  # of a prompt
REMEMBERED = 100_000  # prefixes, least recently used forgotten
PRIVATE = 8  # a prefix with more answers than this is not one conversation's, but a prompt that many share
RECENT = 0.5  # weight of a conversation's newest answer in its average
LONGEST = 2**40  # tokens; the logarithm of anything longer is that of this
DRIFT = 1e-4  # variance added per use. With noise of variance 1, a weight remembers its last √(1 / DRIFT) = 100 uses
MIN_SEEN = 100  # requests: about the number of features
ERROR_RATE = 0.005  # errors are averaged over the last 200 requests or so
# Trusted when its error falls below 0.9 of the error of predicting the mean, until it rises above 0.96. On noise the
# ratio stays above 1 (the fit adds error there) but for a few percent; the gap keeps trust, and with it the order of
# the queue, from flapping.
TRUST, DISTRUST = 0.9, 0.96

type Features = tuple[list[float], list[int]]  # the fixed ones, and the places of the ones


class LengthPredictor:
    """Dozens of µs per request, and some more for long prompts; odd requests raise nothing."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.seen = 0
        self.trusted = False
        self.error = self.mean_error = 0.0  # average |log error|: of the prediction, of the running mean
        self._mean = 0.0  # of log(1 + output tokens)
        self._weights = [0.0] * SIZE  # plain floats: ten of them are read per prediction
        # Prior variances: lengths differ by some e-folds overall, by less between buckets.
        self._prior = np.array([10.0] * 3 + [1.0] * (FIXED - 3) + [0.3] * (SIZE - FIXED))
        self._covariance = np.diag(self._prior)
        self._digests: WeakKeyDictionary[Request, list[int]] = WeakKeyDictionary()
        self._history: OrderedDict[int, tuple[float, int]] = OrderedDict()  # prefix → average log length, answers

    def predict(self, request: Request) -> float:
        """Output tokens to expect, within 0…max_tokens."""
        cap = log_tokens(request.max_tokens)
        return math.expm1(self._predict(self._features(request), cap))

    def learn(self, request: Request, output_len: int) -> None:
        """Learns from an output that ended by itself; errors are taken before (prequential: Dawid 1984)."""
        x, cap, truth = self._features(request), log_tokens(request.max_tokens), log_tokens(output_len)
        predicted = self._predict(x, cap)
        self.seen += 1
        rate = max(ERROR_RATE, 1 / self.seen)
        self.error += rate * (abs(predicted - truth) - self.error)
        self.mean_error += rate * (abs(min(self._mean, cap) - truth) - self.mean_error)
        self._mean += max(math.sqrt(DRIFT), 1 / self.seen) * (truth - self._mean)
        if truth < cap or predicted < cap:  # else the limit cut it: no evidence against a longer prediction
            self._update(x, truth)
        self._remember(request, truth)
        limit = (DISTRUST if self.trusted else TRUST) * self.mean_error
        self.trusted = self.seen >= MIN_SEEN and self.error < limit

    def _predict(self, x: Features, cap: float) -> float:
        w, (fixed, places) = self._weights, x
        raw = sum(weight * value for weight, value in zip(w, fixed)) + sum(w[place] for place in places)
        return min(max(raw, 0.0), cap)

    def _update(self, x: Features, truth: float) -> None:
        fixed, places = x
        active, values = np.array([*range(FIXED), *places]), np.array([*fixed, *[1.0] * len(places)])
        p, weights = self._covariance, np.array(self._weights)
        diagonal = p[active, active]
        p[active, active] = np.maximum(diagonal, np.minimum(diagonal + DRIFT, self._prior[active]))
        px = p[:, active] @ values
        variance = 1.0 + float(values @ px[active])  # of the prediction; the noise is the unit
        weights += px / variance * (truth - float(values @ weights[active]))
        p -= np.outer(px, px) / variance
        if variance < 1.0 or not np.isfinite(weights).all() or not math.isfinite(variance):
            self._reset()  # rounding won: start anew, not trusted
        else:
            self._weights = weights.tolist()


    def _features(self, request: Request) -> Features:
        prompt = request.prompt_array
        parts = [str(request.tenant).encode("utf-8", "replace")]
        parts += [prompt[:length].tobytes() for length in HEADS] + [prompt[-length:].tobytes() for length in TAILS]
        places = [bucket(group, part) for group, part in enumerate(parts)]
        conversation, like = self._recall(request)
        return [1.0, log_tokens(len(prompt)) / 10, log_tokens(request.max_tokens) / 10, conversation, like], places

    def _recall(self, request: Request) -> tuple[float, float]:
        """How much longer than the mean answers were to the longest known prefix that is one conversation's, and
        to the longest that many share; 0 where there is none. In logarithms."""
        conversation = like = 0.0
        for digest in reversed(self._prefixes(request)):
            average, count = self._history.get(digest, (0.0, 0))
            if count > PRIVATE:
                like = average - self._mean
                break
            if count and not conversation:
                conversation = average - self._mean
        return conversation, like

    def _remember(self, request: Request, truth: float) -> None:
        for digest in self._prefixes(request):
            average, count = self._history.pop(digest, (truth, 0))
            weight = max(RECENT if count < PRIVATE else ERROR_RATE, 1 / (count + 1))
            self._history[digest] = average + weight * (truth - average), count + 1
        while len(self._history) > REMEMBERED:
            self._history.popitem(last=False)

    def _prefixes(self, request: Request) -> list[int]:
        if (known := self._digests.get(request)) is None:
            known = self._digests[request] = prefixes(request)
        return known


def prefixes(request: Request) -> list[int]:
    """A digest of each prefix of the prompt that is a multiple of BLOCK tokens, shortest first."""
    prompt, digest, out = request.prompt_array, 0, []
    for at in range(0, min(len(prompt), BLOCK * MOST_BLOCKS) // BLOCK * BLOCK, BLOCK):
        digest = hash((digest, prompt[at : at + BLOCK].tobytes()))
        out.append(digest)
    return out


def bucket(group: int, data: bytes) -> int:
    """The place of a hashed feature's one. Python's own hash of text would differ between processes.

    CRC-32 is linear, so its low bits collide for similar inputs: a multiplication mixes all into the high bits
    (Fibonacci hashing: Knuth, TAOCP 3, section 6.4).
    """
    mixed = zlib.crc32(data) * 0x9E3779B1 & 0xFFFFFFFF
    return FIXED + group * BUCKETS + mixed * BUCKETS // 2**32


def log_tokens(count: float) -> float:
    """log(1 + count); 0 for what is no count (NaN too)."""
    return math.log1p(min(count, LONGEST)) if count > 0 else 0.0
