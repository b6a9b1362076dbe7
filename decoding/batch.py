"""From a plan to arrays: builds the ForwardBatch, padded to its bucket."""

import dataclasses

import numpy as np

from specax.decoding.buckets import Buckets, Shape
from specax.decoding.scheduler import Plan, Work
from specax.model.batch import DecodeSegment, ForwardBatch, PrefillSegment


@dataclasses.dataclass(frozen=True)
class Batch:
    """A step's arrays, and which work each logit row belongs to."""

    shape: Shape
    forward: ForwardBatch
    sampling: list[Work]  # work of logit row i
    first_token: dict[int, int]  # id of prefill work → index of its first token in the flat stream


def build_batch(plan: Plan, buckets: Buckets, page_size: int, groups: int = 1) -> Batch:
    """Lays a plan out: decode tokens first, then prefill tokens; padding writes to the trash page.

    Every KV group of the model has the same pages.
    """
    decodes, prefills = plan.decodes, plan.prefills
    count = sum(w.stop - w.start for w in prefills)
    pages = max(len(w.sequence.table) for w in plan.work)
    shape = buckets.shape(len(decodes), count, len(prefills), pages)
    tokens, positions, slots = (np.zeros(shape.tokens, np.int32) for _ in range(3))
    logit_rows = np.zeros(shape.logit_rows, np.int32)
    sampling: list[Work] = []
    decode = prefill = None
    if shape.decode_rows:
        decode = _decode_segment(decodes, shape, groups)
        n = len(decodes)
        tokens[:n] = [w.sequence.tokens[w.start] for w in decodes]
        positions[:n] = [w.start for w in decodes]
        page, offset = np.divmod(positions[:n], page_size)
        slots[:n] = decode.page_table[0, np.arange(n), page] * page_size + offset
        logit_rows[:n] = np.arange(n)  # a decode step catches up by definition
        sampling += decodes
    first_token: dict[int, int] = {}
    if shape.prefill_tokens:
        starts = np.zeros(shape.prefill_rows + 1, np.int32)
        table = np.zeros((shape.prefill_rows, shape.pages), np.int32)
        context = np.zeros(shape.prefill_rows, np.int32)
        at = shape.decode_rows
        for i, work in enumerate(prefills):
            sequence, end = work.sequence, at + work.stop - work.start
            first_token[id(work)] = at
            tokens[at:end] = sequence.tokens[work.start : work.stop]
            positions[at:end] = np.arange(work.start, work.stop)
            slots[at:end] = sequence.table.slots(work.start, work.stop)
            table[i, : len(sequence.table)] = sequence.table.pages
            context[i], starts[i + 1] = work.start, end - shape.decode_rows
            if work.samples:
                logit_rows[len(sampling)] = end - 1
                sampling.append(work)
            at = end
        starts[len(prefills) + 1 :] = starts[len(prefills)]
        prefill = PrefillSegment(starts, _per_group(table, groups), context)
    forward = ForwardBatch(tokens, positions, _per_group(slots, groups), logit_rows, decode, prefill)
    return Batch(shape, forward, sampling, first_token)


def _per_group(values: np.ndarray, groups: int) -> np.ndarray:
    return np.broadcast_to(values, (groups, *values.shape))


def _decode_segment(decodes: list[Work], shape: Shape, groups: int) -> DecodeSegment:
    table = np.zeros((shape.decode_rows, shape.pages), np.int32)
    context = np.full(shape.decode_rows, -1, np.int32)  # −N: a padding row
    for i, work in enumerate(decodes):
        pages = work.sequence.table.pages
        table[i, : len(pages)] = pages
        context[i] = work.start
    return DecodeSegment(_per_group(table, groups), context)


def empty_batch(shape: Shape, groups: int = 1) -> ForwardBatch:
    """A batch of nothing but padding: what warm-up runs."""

    def ints(*dims: int) -> np.ndarray:
        return np.zeros(dims, np.int32)

    decode = prefill = None
    if shape.decode_rows:
        decode = _decode_segment([], shape, groups)
    if rows := shape.prefill_rows:
        prefill = PrefillSegment(ints(rows + 1), ints(groups, rows, shape.pages), ints(rows))
    tokens, positions, slots = ints(shape.tokens), ints(shape.tokens), ints(groups, shape.tokens)
    return ForwardBatch(tokens, positions, slots, ints(shape.logit_rows), decode, prefill)
