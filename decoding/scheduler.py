"""The scheduler: which sequences compute how many tokens in the next step.

Every iteration plans under one token budget: running decodes first, then prefill chunks of running
sequences, then new ones. When pages run out, the newest running sequence is preempted: it gives back its
pages and recomputes later. The oldest is never a victim of a newer one, so something always finishes.
"""

import dataclasses
from collections import deque

from specax.decoding.request import Request, Sequence, Status
from specax.paged import PagePool
from specax.paged.page_table import PageCopy


@dataclasses.dataclass
class Work:
    """Tokens start..stop−1 of a sequence, to compute in this step; all of them have slots."""

    sequence: Sequence
    start: int
    stop: int
    copies: list[PageCopy]
    samples: bool = dataclasses.field(init=False)  # it catches up with the known tokens: the next one is sampled

    def __post_init__(self) -> None:
        self.samples = self.stop == len(self.sequence.tokens)


@dataclasses.dataclass
class Plan:
    decodes: list[Work] = dataclasses.field(default_factory=list)
    prefills: list[Work] = dataclasses.field(default_factory=list)
    preempted: list[Sequence] = dataclasses.field(default_factory=list)
    short_of_pages: bool = False  # a running sequence had to wait, or to be preempted

    @property
    def work(self) -> list[Work]:
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        return sum(w.stop - w.start for w in self.work)

    def drop(self, sequence: Sequence) -> int:
        """Takes a sequence out again; returns the tokens that this gives back to the budget."""
        gone = [w for w in self.work if w.sequence is sequence]
        for segment in (self.decodes, self.prefills):  # in place: the scheduler is filling one of them
            segment[:] = [w for w in segment if w.sequence is not sequence]
        return sum(w.stop - w.start for w in gone)


class Scheduler:
    """First come, first served, over a page pool, `max_rows` sequences and a budget of tokens per step."""

    def __init__(self, pool: PagePool, page_size: int, max_rows: int, max_tokens: int, prefill_rows: int):
        self.pool, self.page_size = pool, page_size
        self.max_rows, self.max_tokens, self.prefill_rows = max_rows, max_tokens, prefill_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.preemptions = 0
        self._slots = list(range(max_rows - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queues a request; its samples beyond the first fork from it once the prompt is computed."""
        self.waiting.append(request.sequences[0])

    @property
    def rows_used(self) -> int:
        """Rows of running sequences, and those kept for their forks."""
        return sum(1 + len(forking(s)) for s in self.running)

    def schedule(self) -> Plan:
        """Plans one step and reserves its pages. An empty plan means that nothing can run."""
        plan, budget = Plan(), self.max_tokens
        behind = []
        for sequence in list(self.running):  # decodes first: one token each
            if sequence.status is not Status.RUNNING:
                continue  # it was preempted a moment ago
            if sequence.pending == 1:
                budget -= self._plan(plan, plan.decodes, sequence, 1)
            else:
                behind.append(sequence)
        for sequence in behind:  # then prefill chunks, oldest first
            if sequence.status is not Status.RUNNING:
                continue
            if budget <= 0 or len(plan.prefills) >= self.prefill_rows:
                break
            budget -= self._plan(plan, plan.prefills, sequence, min(budget, sequence.pending))
        if not plan.short_of_pages:
            self._admit(plan, budget)
        return plan

    def finish(self, sequence: Sequence) -> None:
        """Gives back everything that a sequence holds, whatever its status. Idempotent."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def fork(self, leader: Sequence) -> list[Sequence]:
        """Starts the leader's forks on its computed prompt: they share all its pages."""
        children = forking(leader)
        at = self.running.index(leader) + 1
        for child in children:
            child.table = leader.table.fork()
            child.computed, child.status = leader.computed, Status.RUNNING
            child.slot = self._slots.pop()
        self.running[at:at] = children
        return children

    def _plan(self, plan: Plan, segment: list[Work], sequence: Sequence, count: int) -> int:
        """Adds work, preempting newer sequences for its pages if need be; returns the net budget it took."""
        assert count > 0
        start, back = sequence.computed, 0
        while (copies := sequence.table.reserve(start, start + count)) is None:
            victim, plan.short_of_pages = self.running[-1], True
            if victim is sequence and plan.work:
                return -back  # wait for the older ones to give pages back, keeping what is computed
            back += plan.drop(victim)
            self._preempt(plan, victim)
            if victim is sequence:
                return -back
        segment.append(Work(sequence, start, start + count, copies))
        return count - back

    def _preempt(self, plan: Plan, victim: Sequence) -> None:
        self.running.remove(victim)
        self._release(victim)
        victim.computed, victim.status = 0, Status.WAITING
        victim.request.metrics.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(victim)
        plan.preempted.append(victim)

    def _release(self, sequence: Sequence) -> None:
        sequence.table.release()
        if sequence.slot is not None:
            self._slots.append(sequence.slot)
            sequence.slot = None

    def _admit(self, plan: Plan, budget: int) -> None:
        while self.waiting and budget > 0 and len(plan.prefills) < self.prefill_rows:
            sequence = self.waiting[0]
            if self.rows_used + 1 + len(forking(sequence)) > self.max_rows:
                return
            # All of the known tokens must fit, with a page to grow for each row in use, or admission
            # would only cause preemption. (Alone, anything that submission let in may run.)
            whole = -(-len(sequence.tokens) // self.page_size)
            if self.running and whole + self.rows_used > self.pool.num_free:
                return
            count = min(budget, sequence.pending)
            copies = sequence.table.reserve(0, count)
            if copies is None:
                return
            self.waiting.popleft()
            sequence.status, sequence.slot = Status.RUNNING, self._slots.pop()
            self.running.append(sequence)
            plan.prefills.append(Work(sequence, 0, count, copies))
            budget -= count


def forking(sequence: Sequence) -> list[Sequence]:
    """The samples that still wait for this one to compute their common prompt."""
    if sequence.index > 0 or len(sequence.request.sequences) == 1:
        return []
    return [s for s in sequence.request.sequences if s.status is Status.FORKING]
