"""Shortest predicted work first."""

from collections import OrderedDict
from collections.abc import Iterable

from specax.decoding.policies.base import DECODE_COST, PolicyContext, RankedPolicy, arrival, prefill_work
from specax.decoding.policies.heap import Key
from specax.decoding.policies.length_predictor import LengthPredictor
from specax.decoding.request import Sequence

REFRESH = 8  # waiting sequences ranked again in each step, as the predictor learns: a bounded cost, under 0.1 ms


class PredictedPolicy(RankedPolicy):
    """The least predicted remaining work first, from a length predictor trained on the engine's own history.

    While the predictor is not clearly better than the mean (`LengthPredictor.trusted`) this is first come, first
    served, victims included. When it is, the victim has the longest predicted work left.
    """

    name = "predicted"

    def __init__(self, context: PolicyContext):
        super().__init__(context)
        self.predictor = LengthPredictor()
        self._turns: OrderedDict[Sequence, None] = OrderedDict()  # waiting; who was ranked longest ago is first

    def rank(self, sequence: Sequence) -> Key:
        return (self.remaining(sequence, self.context.cached_tokens(sequence)), *arrival(sequence))

    def remaining(self, sequence: Sequence, cached: int) -> float:
        """Predicted work left, in units of one prefill token, when `cached` tokens need no computing.

        An output that outgrew its prediction is expected to double, within its limit: all that is known of it is
        that it is a long one.
        """
        request, done = sequence.request, sequence.output_len
        predicted = self.predictor.predict(request)
        total = predicted if done < predicted else min(2 * done, request.max_tokens)
        return prefill_work(sequence, cached) + DECODE_COST * max(0.0, total - done)

    def victim(self, running: list[Sequence]) -> Sequence:
        if not self.predictor.trusted:
            return max(running, key=arrival)
        return max(running, key=lambda s: (self.remaining(s, 0), *arrival(s)))

    def served(self, prefilled: Iterable[tuple[Sequence, int]], decoded: Iterable[Sequence]) -> None:
        if self.predictor.trusted:
            for _ in range(min(REFRESH, len(self._turns))):
                sequence = next(iter(self._turns))
                self._turns.move_to_end(sequence)
                self._ranks.put(sequence, self.rank(sequence))

    def finished(self, sequence: Sequence, reason: str) -> None:
        if reason in ("stop", "length"):  # by itself
            self.predictor.learn(sequence.request, sequence.output_len)

    def _next(self) -> Sequence | None:
        return (self._ranks if self.predictor.trusted else self._arrivals).first()

    def _joined(self, sequence: Sequence) -> None:
        super()._joined(sequence)
        self._turns[sequence] = None

    def _left(self, sequence: Sequence) -> None:
        super()._left(sequence)
        del self._turns[sequence]
