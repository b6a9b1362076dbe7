"""From the hidden states of a step to what the host gets: sampled tokens, candidates of beams, log-probabilities."""

import jax
import numpy as np

from specax.decoding.batch import Batch
from specax.decoding.beam_search import Candidates
from specax.decoding.logprobs import on_host, row_logprobs
from specax.decoding.outputs import Logprob
from specax.decoding.request import Sequence
from specax.decoding.runner import Runner
from specax.decoding.sampler import SamplerOutput
from specax.decoding.sampling_table import SamplingTable
from specax.decoding.scheduler import Plan, Scheduler, Work, forking
from specax.decoding.stats import EngineStats
from specax.decoding.validation import Limits, bias_row

type BeamRows = list[tuple[Sequence, Candidates]]
type Round = list[tuple[Sequence, int, dict[int, Logprob] | None]]  # each sequence's new token


class StepSampler:
    """The sampling part of an engine's steps, on the device and around it."""

    def __init__(self, runner: Runner, scheduler: Scheduler, limits: Limits, stats: EngineStats):
        self._runner, self._scheduler, self._limits, self._stats = runner, scheduler, limits, stats
        self._table = SamplingTable(limits.max_rows, limits.vocab_size)

    def load_slot(self, sample: Sequence) -> None:
        """Hands the settings of a sequence that starts to run, and its tokens where they matter, to the sampler."""
        assert sample.slot is not None  # it runs
        bias = bias_row(sample.request, self._limits)
        self._table.load(sample, biased=bias is not None)
        if bias is not None or sample.request.params.penalised:
            tokens = np.zeros(self._limits.max_len, np.int32)
            tokens[: len(sample.tokens)] = sample.tokens
            prompt_len = len(sample.request.prompt)
            blank = np.zeros(self._limits.vocab_size, np.float32)
            self._runner.load_slot(sample.slot, tokens, prompt_len, len(sample.tokens), blank if bias is None else bias)

    def sample(self, batch: Batch, rows: jax.Array) -> tuple[list[Round], BeamRows]:
        """Samples every logit row once, and once more for each further fork of its sequence.

        Returns rounds of (sequence, token, logprobs), and what may come next in the rows of beams, which sample
        nothing. Forks start here: their prompt is computed.
        """
        if not batch.sampling:
            return [], []
        logits = self._runner.logits(rows)
        beams = self._beam_rows(batch, logits)
        current: list[Sequence | None] = [None if w.sequence.request.beams else w.sequence for w in batch.sampling]
        if not any(current):
            return [], beams
        children = {row: self._fork(w) for row, w in enumerate(batch.sampling) if current[row] and forking(w.sequence)}
        dispatched = []
        for i in range(1 + max(map(len, children.values()), default=0)):
            if i:
                current = [None] * len(batch.sampling)
                for row, forks in children.items():
                    current[row] = forks[i - 1] if i <= len(forks) else None
            with self._stats.timed("build"):
                inputs = self._table.inputs(current, batch.shape.logit_rows)
            dispatched.append((current, self._runner.sample(logits, inputs)))
        return [self._fetch(samples, logits, out) for samples, out in dispatched], beams

    def _beam_rows(self, batch: Batch, logits: jax.Array) -> BeamRows:
        """The likeliest next tokens of each beam that has caught up."""
        current = [w.sequence if w.sequence.request.beams else None for w in batch.sampling]
        beams = [(row, beam) for row, beam in enumerate(current) if beam is not None]
        if not beams:
            return []
        with self._stats.timed("build"):
            inputs = self._table.inputs(current, batch.shape.logit_rows)
        tokens, logprobs = self._runner.candidates(logits, inputs)
        asked = {row for row, beam in beams if beam.request.params.logprobs is not None}
        whole = dict(enumerate(self._runner.log_softmax(logits))) if asked else {}
        return [
            (beam, Candidates(tokens[row], logprobs[row], whole[row] if row in asked else None)) for row, beam in beams
        ]

    def _fork(self, work: Work) -> list[Sequence]:
        """Starts the forks of a sequence whose prompt this step computes."""
        work.sequence.computed = work.stop
        forks = self._scheduler.fork(work.sequence)
        for fork in forks:
            work.sequence.request.metrics.cached_tokens += fork.computed
            self.load_slot(fork)
        return forks

    def _fetch(self, samples: list[Sequence | None], logits: jax.Array, out: SamplerOutput) -> Round:
        """Brings one round of results to the host."""
        wanted = [s.request.params.logprobs for s in samples if s is not None and s.request.params.logprobs is not None]
        scores = on_host(out.logprobs, out.ranks, out.top_tokens, out.top_logprobs) if wanted else None
        top = scores[2].shape[1] if scores else 0
        whole = self._runner.log_softmax(logits) if any(k < 0 or k > top for k in wanted) else None
        got = []
        for i, (sample, token) in enumerate(zip(samples, np.asarray(out.tokens).tolist(), strict=False)):
            if sample is None:
                continue
            k = sample.request.params.logprobs
            got.append((sample, token, None if k is None or not scores else row_logprobs(token, k, i, scores, whole)))
        return got

    def score_prompts(self, batch: Batch, plan: Plan, hidden: jax.Array) -> None:
        """Log-probabilities of prompt tokens, for the requests that asked for them."""
        for index, work in enumerate(plan.decodes + plan.prefills):
            request = work.sequence.request
            k = request.params.prompt_logprobs
            if request.prompt_logprobs is None or k is None or work.sequence.index:
                continue
            # The hidden state at position p scores the prompt token at p + 1. (None yet of the recomputed ones.)
            first = max(work.start, len(request.prompt_logprobs) - 1)
            last = min(work.stop, len(request.prompt) - 1)
            if first >= last:
                continue
            at = batch.first_token.get(id(work), index) - work.start
            rows = np.arange(first + at, last + at)
            targets = np.asarray(request.prompt[first + 1 : last + 1])
            for block, (scores, whole) in enumerate(self._runner.score(hidden, rows, targets)):
                host = on_host(*scores)
                full = np.asarray(whole) if k < 0 or k > host[2].shape[1] else None
                part = targets[block * len(host[0]) :][: len(host[0])]
                for i, token in enumerate(part.tolist()):
                    request.prompt_logprobs.append(row_logprobs(token, k, i, host, full))
