"""Predicts how long an output will be, learning online from those that ended.

A linear model of log(1 + output tokens), fitted by recursive least squares. Forgetting is a Kalman filter's: the
weights in use drift a little between requests. (The usual forgetting factor inflates the covariance of weights
that no request uses, without bound: here, of the buckets that no hash hits.) Haykin, "Adaptive Filter Theory",
chapters on RLS and its state-space model; hashed features: Weinberger et al., ICML 2009.
"""

import math
import zlib

import numpy as np

from specax.decoding.request import Request

BUCKETS = 16  # per hashed feature. Few: each needs to be hit often before it says something
# Tokens hashed: the system prompt tells one application from another, the end what it asks. Two lengths each, so
# that two prompts whose hashes collide in one of them are still told apart by the other.
HEADS, TAILS = (4, 32), (1, 4)
SIZE = 3 + (1 + len(HEADS) + len(TAILS)) * BUCKETS  # 1, log prompt length, log max_tokens; tenant, heads, tails
LONGEST = 2**40  # tokens; the logarithm of anything longer is that of this
DRIFT = 1e-4  # variance added per use. With noise of variance 1, a weight remembers its last √(1 / DRIFT) = 100 uses
MIN_SEEN = 100  # requests: about the number of features
ERROR_RATE = 0.01  # errors are averaged over the last 100 requests or so
# Trusted when its error falls below 0.8 of the error of predicting the mean, until it rises above 0.9. On noise the
# ratio stays near or above 1 (the fit adds error there), within a few percent over 100 requests, so 0.8 is far
# outside chance; the gap keeps trust, and with it the order of the queue, from flapping.
TRUST, DISTRUST = 0.8, 0.9

type Features = tuple[float, float, list[int]]  # the two logarithms, and the places of the ones


class LengthPredictor:
    """`predict` costs a few µs, `learn` a few dozen; neither raises on odd requests."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.seen = 0
        self.trusted = False
        self.error = self.mean_error = 0.0  # average |log error|: of the prediction, of the running mean
        self._mean = 0.0  # of log(1 + output tokens)
        self._weights = [0.0] * SIZE  # plain floats: eight of them are read per prediction
        # Prior variances: lengths differ by some e-folds overall, by less between buckets.
        self._prior = np.array([10.0] * 3 + [0.3] * (SIZE - 3))
        self._covariance = np.diag(self._prior)

    def predict(self, request: Request) -> float:
        """Output tokens to expect, within 0…max_tokens."""
        cap = log_tokens(request.max_tokens)
        return math.expm1(self._predict(features(request), cap))

    def learn(self, request: Request, output_len: int) -> None:
        """Learns from an output that ended by itself; errors are taken before (prequential: Dawid 1984)."""
        x, cap, truth = features(request), log_tokens(request.max_tokens), log_tokens(output_len)
        predicted = self._predict(x, cap)
        self.seen += 1
        rate = max(ERROR_RATE, 1 / self.seen)
        self.error += rate * (abs(predicted - truth) - self.error)
        self.mean_error += rate * (abs(min(self._mean, cap) - truth) - self.mean_error)
        self._mean += max(math.sqrt(DRIFT), 1 / self.seen) * (truth - self._mean)
        if truth < cap or predicted < cap:  # else the limit cut it: no evidence against a longer prediction
            self._update(x, truth)
        limit = (DISTRUST if self.trusted else TRUST) * self.mean_error
        self.trusted = self.seen >= MIN_SEEN and self.error < limit

    def _predict(self, x: Features, cap: float) -> float:
        w = self._weights
        raw = w[0] + w[1] * x[0] + w[2] * x[1] + sum(w[place] for place in x[2])
        return min(max(raw, 0.0), cap)

    def _update(self, x: Features, truth: float) -> None:
        active, values = np.array([0, 1, 2, *x[2]]), np.array([1.0, x[0], x[1], *[1.0] * len(x[2])])
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


def features(request: Request) -> Features:
    prompt = request.prompt_array
    parts = [str(request.tenant).encode("utf-8", "replace")]
    parts += [prompt[:length].tobytes() for length in HEADS] + [prompt[-length:].tobytes() for length in TAILS]
    places = [bucket(group, part) for group, part in enumerate(parts)]
    return log_tokens(len(prompt)) / 10, log_tokens(request.max_tokens) / 10, places


def bucket(group: int, data: bytes) -> int:
    """The place of a hashed feature's one. Python's own hash of text would differ between processes.

    CRC-32 is linear, so its low bits collide for similar inputs: a multiplication mixes all into the high bits
    (Fibonacci hashing: Knuth, TAOCP 3, section 6.4).
    """
    mixed = zlib.crc32(data) * 0x9E3779B1 & 0xFFFFFFFF
    return 3 + group * BUCKETS + mixed * BUCKETS // 2**32


def log_tokens(count: float) -> float:
    """log(1 + count); 0 for what is no count (NaN too)."""
    return math.log1p(min(count, LONGEST)) if count > 0 else 0.0
