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


def build_batch(plan: Plan, buckets: Buckets, page_size: int, tables: np.ndarray) -> Batch:
    """Lays a plan out: decode tokens first, then prefill tokens; padding writes to the trash page.

    `tables`, int32 [slots, groups, max_pages], holds the page table of every running sequence.
    """
    decodes, prefills = plan.decodes, plan.prefills
    count = sum([w.stop - w.start for w in prefills])
    pages = max([len(w.sequence.table) for w in plan.work])
    shape = buckets.shape(len(decodes), count, len(prefills), pages)
    tokens, positions = (np.zeros(shape.tokens, np.int32) for _ in range(2))
    slots = np.zeros((tables.shape[1], shape.tokens), np.int32)
    logit_rows = np.zeros(shape.logit_rows, np.int32)
    sampling: list[Work] = []
    decode = prefill = None
    if shape.decode_rows:
        decode = _decode_segment(decodes, shape, tables)
        n = len(decodes)
        tokens[:n] = [w.sequence.tokens[-1] for w in decodes]  # a decode step catches up by definition
        positions[:n] = decode.context_lens[:n]
        page, offset = np.divmod(positions[:n], page_size)
        slots[:, :n] = decode.page_table[:, np.arange(n), page] * page_size + offset
        logit_rows[:n] = np.arange(n)
        sampling += decodes
    first_token: dict[int, int] = {}
    if shape.prefill_tokens:
        starts = np.zeros(shape.prefill_rows + 1, np.int32)
        table = np.zeros((tables.shape[1], shape.prefill_rows, shape.pages), np.int32)
        context = np.zeros(shape.prefill_rows, np.int32)
        at = shape.decode_rows
        for i, work in enumerate(prefills):
            sequence, end = work.sequence, at + work.stop - work.start
            first_token[id(work)] = at
            tokens[at:end] = sequence.tokens[work.start : work.stop]
            positions[at:end] = np.arange(work.start, work.stop)
            slots[:, at:end] = sequence.table.slots(work.start, work.stop)
            table[:, i, : len(sequence.table)] = sequence.table.pages
            context[i], starts[i + 1] = work.start, end - shape.decode_rows
            if work.samples:
                logit_rows[len(sampling)] = end - 1
                sampling.append(work)
            at = end
        starts[len(prefills) + 1 :] = starts[len(prefills)]
        prefill = PrefillSegment(starts, table, context)
    forward = ForwardBatch(tokens, positions, slots, logit_rows, decode, prefill)
    return Batch(shape, forward, sampling, first_token)


def _decode_segment(decodes: list[Work], shape: Shape, tables: np.ndarray) -> DecodeSegment:
    n = len(decodes)
    table = np.zeros((tables.shape[1], shape.decode_rows, shape.pages), np.int32)
    rows = np.asarray([w.sequence.slot for w in decodes], np.int32)
    table[:, :n] = tables[rows, :, : shape.pages].swapaxes(0, 1)
    context = np.full(shape.decode_rows, -1, np.int32)  # −N: a padding row
    context[:n] = [w.start for w in decodes]
    return DecodeSegment(table, context)


def empty_batch(shape: Shape, groups: int = 1) -> ForwardBatch:
    """A batch of nothing but padding: what warm-up runs."""

    def ints(*dims: int) -> np.ndarray:
        return np.zeros(dims, np.int32)

    decode = prefill = None
    if shape.decode_rows:
        decode = DecodeSegment(ints(groups, shape.decode_rows, shape.pages), np.full(shape.decode_rows, -1, np.int32))
    if rows := shape.prefill_rows:
        prefill = PrefillSegment(ints(rows + 1), ints(groups, rows, shape.pages), ints(rows))
    tokens, positions = (ints(shape.tokens) for _ in range(2))
    return ForwardBatch(tokens, positions, ints(groups, shape.tokens), ints(shape.logit_rows), decode, prefill)
