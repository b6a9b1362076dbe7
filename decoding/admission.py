"""Admission: whether the pages allow that a waiting sequence runs, and what it starts from.

All of its known tokens must fit beside what running sequences were promised. Rows, budget and the order in which
sequences are tried are the scheduler's.
"""

from collections.abc import Iterable

from specax.decoding.request import Sequence
from specax.paged import KVMemory, Match

WATERMARK = 0.02  # of the pages: with fewer left, only light requests are admitted


def missing_pages(memory: KVMemory, sequences: Iterable[Sequence]) -> list[int]:
    """Pages per KV group that sequences don't have yet for the tokens that are known of them."""
    missing = [0] * len(memory.pools)
    for sequence in sequences:
        for group in range(len(missing)):
            missing[group] += max(0, memory.pages_needed(group, len(sequence.tokens)) - sequence.table.held(group))
    return missing


def admit(
    memory: KVMemory,
    sequence: Sequence,
    match: Match,
    budget: int,
    rows: int,
    promised: list[int],
    alone: bool,
) -> int:
    """Gives a waiting sequence what the cache has of it, and pages for its first chunk of at most `budget` tokens.

    Args:
      match: what the cache has of it.
      rows: those in use; each may need a page soon.
      promised: pages per KV group that running sequences need for the rest of their prompts.
      alone: nothing runs, so that there is nobody to leave room for.

    Returns:
      The tokens of the chunk; 0: it has to wait, and holds nothing.
    """
    request, known = sequence.request, len(sequence.tokens)
    # Scoring the prompt needs the hidden state of every token.
    scored = request.prompt_logprobs is not None and len(request.prompt_logprobs) < len(request.prompt)
    if not scored and memory.prefetch(match):
        return 0  # it comes back from disk: worth a few steps
    limits = [0 if scored else known - 1]
    if alone:  # it must get in: if need be, without the cache, whose pages can't be shared and make room at once
        limits.append(0)
    for limit in limits:
        admission = memory.consider(match, known, limit)
        needed = tuple(need + _tails(memory, sequence, group) for group, need in enumerate(admission.needed))
        if not alone and not _has_room(memory, needed, admission.available, rows, promised):
            return 0
        node, cached = memory.admit(sequence.table, admission)
        count = min(budget, known - cached)
        if memory.reserve(sequence.table, cached, cached + count):
            break
        memory.tree.unlock(node)
        sequence.table.release()
    else:
        return 0
    sequence.node = memory.relax(node, cached)
    _note_hit(memory, sequence, known, cached)
    sequence.computed, sequence.match = cached, None
    return count


def catch_up(memory: KVMemory, beam: Sequence, match: Match) -> bool:
    """Takes from the cache what it has of a running beam beyond what that computed; whether there was something."""
    admission = memory.consider(match, len(beam.tokens), len(beam.tokens) - 1)
    if admission.length <= beam.computed:
        return False
    before = beam.computed
    if beam.node is not None:
        memory.tree.unlock(beam.node)
    beam.table.release()
    beam.node, beam.computed = memory.admit(beam.table, admission)
    memory.counters.recovered_tokens += max(0, beam.computed - before)
    return True


def _tails(memory: KVMemory, leader: Sequence, group: int) -> int:
    """Pages that the beams which will fork from a waiting leader had beyond what it computes."""
    if (beams := leader.request.beams) is None:
        return 0
    prefix = len(leader.tokens)
    shared = memory.pages_shared(group, prefix)
    whole = shared + beams.live * (memory.pages_needed(group, beams.length) - shared)
    return max(0, whole - memory.pages_needed(group, prefix))


def _has_room(
    memory: KVMemory, needed: tuple[int, ...], available: tuple[int, ...], rows: int, promised: list[int]
) -> bool:
    """Whether pages allow an admission. All of the known tokens must fit, with a page to grow for each row.

    In between (fewer than WATERMARK left) a request comes in only if it is light: an eighth of what is there.
    """
    for pool, need, have, owed in zip(memory.pools, needed, available, promised, strict=True):
        spare = have - owed - rows
        if need > spare:
            return False
        if spare - need < WATERMARK * pool.num_pages and 8 * need > spare:
            return False
    return True


def _note_hit(memory: KVMemory, sequence: Sequence, known: int, cached: int) -> None:
    counters, metrics = memory.counters, sequence.request.metrics
    if sequence.request.admitted:
        counters.recovered_tokens += cached
    else:
        sequence.request.admitted = True
        counters.query_tokens += known
        counters.hit_tokens += cached
        metrics.cached_tokens += cached
