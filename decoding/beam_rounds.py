"""What a round of beam search does to the sequences of a request. The rules of the search are in `beam_search`."""

from collections.abc import Callable

from specax.decoding.beam_search import Beam, Candidates
from specax.decoding.outputs import CompletionOutput, completed
from specax.decoding.request import Request, Sequence, Status
from specax.decoding.scheduler import Scheduler


class BeamRounds:
    """Plays the rounds of all requests with beams. `load_slot` readies the sampler for a beam in a new slot."""

    def __init__(self, scheduler: Scheduler, load_slot: Callable[[Sequence], None]):
        self._scheduler, self._load_slot = scheduler, load_slot

    def advance(self, beam: Sequence, candidates: Candidates) -> list[CompletionOutput]:
        """A beam's next tokens are known. Once all beams' are, they go on; returns the outputs if that was the end."""
        request, group = beam.request, beam.request.beams
        assert group is not None
        if group.suspended:
            for child in self._regroup(group.resume()):
                self._scheduler.catch_up(child)
            return []
        if not group.offer(beam, candidates):
            return []
        try:
            children = group.advance()
        except Exception as error:
            return self.end(request, group.nothing("error", f"{type(error).__name__}: {error}"))
        if not children:
            return self.end(request, group.best())
        for child, (_, content) in zip(self._regroup([parent for parent, _ in children]), children, strict=True):
            content.put(child)
        return []

    def _regroup(self, parents: list[Sequence]) -> list[Sequence]:
        loaded = {sample.slot for sample in parents[0].request.sequences}
        children = self._scheduler.regroup(parents)
        for child in children:
            if child.slot not in loaded:  # (all beams of a request have the same settings)
                self._load_slot(child)
        return children

    def end(self, request: Request, best: list[Beam]) -> list[CompletionOutput]:
        """Ends a beam search; the request's sequences become its outputs."""
        for sample in request.live:
            running = sample.status is Status.RUNNING
            self._scheduler.finish(sample, (best[0].finish_reason or "abort") if running else "abort")
        del request.sequences[len(best) :]
        for index, (sample, beam) in enumerate(zip(request.sequences, best, strict=True)):
            sample.index = index
            beam.put(sample)
        return completed(request).outputs
