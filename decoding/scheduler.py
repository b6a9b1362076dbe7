"""The scheduler: which sequences compute how many tokens in the next step.

Every iteration plans under one token budget: running decodes first, then prefill chunks of running sequences,
then new ones, in the order of a `Policy`. A new one starts from what the prefix cache has of it. When pages run
out, the policy names a victim: what it has computed goes to the cache, where it finds it again unless somebody
needed the pages. The running sequence that arrived first is never a victim, so something always finishes.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from specax.decoding import admission
from specax.decoding.policies import Policy
from specax.decoding.request import Request, Sequence, Status
from specax.paged import KVMemory, Match, PageOp
from specax.paged.namespaces import Namespace, private_namespace

RETRY = 8  # steps until those that did not fit are tried again, if nothing seems to have changed
LOOKAHEAD = 4  # waiting sequences that are tried beyond one that does not fit


class Work:
    """Tokens start..stop−1 of a sequence, to compute in this step; all of them have slots."""

    __slots__ = ("samples", "sequence", "start", "stop")

    def __init__(self, sequence: Sequence, start: int, stop: int):
        self.sequence, self.start, self.stop = sequence, start, stop
        self.samples = stop == len(sequence.tokens)  # it catches up with what is known: the next token is sampled


@dataclasses.dataclass
class Plan:
    decodes: list[Work] = dataclasses.field(default_factory=list)
    prefills: list[Work] = dataclasses.field(default_factory=list)
    admitted: list[Sequence] = dataclasses.field(default_factory=list)
    preempted: list[Sequence] = dataclasses.field(default_factory=list)
    ops: list[PageOp] = dataclasses.field(default_factory=list)  # for the device, before the forward pass, in order
    short_of_pages: bool = False  # a running sequence had to wait, or to be preempted

    @property
    def work(self) -> list[Work]:
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(w.stop - w.start for w in self.prefills)

    def drop(self, sequence: Sequence) -> int:
        """Takes a sequence out again; returns the tokens that this gives back to the budget."""
        gone = [w for w in self.work if w.sequence is sequence]
        for segment in (self.decodes, self.prefills):  # in place: the scheduler is filling one of them
            segment[:] = [w for w in segment if w.sequence is not sequence]
        if sequence in self.admitted:
            self.admitted.remove(sequence)
        return sum(w.stop - w.start for w in gone)


class Scheduler:
    """Plans steps over KV memory, `max_rows` sequences and a budget of tokens per step."""

    def __init__(
        self,
        memory: KVMemory,
        make_policy: Callable[["Scheduler"], Policy],
        max_rows: int,
        max_tokens: int,
        prefill_rows: int,
        max_pages: int,
        worth_swapping: Callable[[int], bool] = lambda tokens: True,
    ):
        self.memory, self.max_rows, self.max_tokens, self.prefill_rows = memory, max_rows, max_tokens, prefill_rows
        self.worth_swapping = worth_swapping  # whether loading so many tokens' KV is cheaper than computing it
        self.running: list[Sequence] = []  # in order of admission
        self.preemptions = self._steps = 0
        # Before this step nobody is tried again while so many wait and no more pages are available.
        self._blocked: tuple[int, int, list[int]] = (0, 0, [])
        # Page tables of running sequences by slot, int32 [slots, groups, max_pages]: batches are cut out of it.
        self.tables = np.zeros((max_rows, len(memory.pools), max_pages), np.int32)
        self._slots = list(range(max_rows - 1, -1, -1))
        self.policy = make_policy(self)

    def add(self, request: Request) -> None:
        """Queues a request; its samples beyond the first fork from it once the prompt is computed."""
        leader = request.sequences[0]
        leader.rows = len(request.sequences)
        if self.memory.disk is not None:
            self.memory.prefetch(self.match(leader))
        self.policy.add(leader)

    @property
    def waiting(self) -> list[Sequence]:
        """Who waits, in order of arrival (a copy)."""
        return list(self.policy)

    @property
    def num_waiting(self) -> int:
        return len(self.policy)

    @property
    def rows_used(self) -> int:
        """Rows of running sequences, and those kept for their forks."""
        return sum([s.rows for s in self.running])

    def prefilling(self) -> Iterator[Sequence]:
        """Running sequences with more than one known token to compute."""
        return (s for s in self.running if len(s.tokens) - s.computed > 1)

    def cached_tokens(self, sequence: Sequence) -> int:
        """How much of a waiting sequence the cache has now."""
        return min(self.match(sequence).length, len(sequence.tokens) - 1)

    def match(self, sequence: Sequence) -> Match:
        """The cache's longest prefix of a sequence, looked up again only if it may have changed."""
        match = sequence.match
        if match is None or not match.fresh:
            namespace = self.namespace(sequence.request)
            match = sequence.match = self.memory.match(sequence.known(len(sequence.tokens)), namespace)
        return match

    def namespace(self, request: Request) -> Namespace:
        """Where a request's KV is kept: its own corner if there is no prefix cache."""
        return request.namespace if self.memory.prefix_cache else private_namespace(request.id)

    # --- a step

    def schedule(self) -> Plan:
        """Plans one step and reserves its pages. An empty plan means that nothing can run."""
        memory = self.memory
        memory.poll()
        self._steps += 1
        plan, behind = Plan(), []
        decodes = plan.decodes
        for sequence in list(self.running):  # decodes first: one token each
            start = sequence.computed
            pending = len(sequence.tokens) - start
            if pending == 1:
                if sequence.status is not Status.RUNNING:
                    continue  # it was preempted a moment ago
                if start < sequence.table.writable:
                    decodes.append(Work(sequence, start, start + 1))
                else:
                    self._plan(plan, decodes, sequence, 1)
            elif pending:
                behind.append(sequence)
        budget = self.max_tokens - len(decodes)
        for sequence in behind:  # then prefill chunks, oldest first
            if sequence.status is not Status.RUNNING:
                continue
            if budget <= 0 or len(plan.prefills) >= self.prefill_rows:
                break
            budget -= self._plan(plan, plan.prefills, sequence, min(budget, sequence.pending))
        if not plan.short_of_pages and len(self.policy):
            self._admit(plan, budget)
            if not plan.work and memory.reading:  # nothing to do but to wait for the disk
                memory.poll(wait=True)
                self._admit(plan, budget)
        plan.ops = memory.take_ops()
        return plan

    def advance(self, plan: Plan) -> None:
        """Books what a step computed, and lets others share the prompts' pages."""
        for work in plan.decodes:
            work.sequence.computed = work.stop
        for work in plan.prefills:
            sequence = work.sequence
            sequence.computed = work.stop
            if self.memory.prefix_cache and not self.memory.windowed:
                self._share(sequence)
        if self.memory.windowed:
            for work in plan.work:
                self._leave_behind(work.sequence)
        prefilled = ((w.sequence, w.stop - w.start) for w in plan.prefills)
        self.policy.served(prefilled, (w.sequence for w in plan.decodes))

    def _leave_behind(self, sequence: Sequence) -> None:
        """Gives back what windows have passed, and the lock once they have passed all of what it keeps."""
        memory, node, computed = self.memory, sequence.node, sequence.computed
        memory.leave_behind(sequence.table, computed)
        if node is not None and all(w is not None and w.start(computed) >= node.stop for w in memory.windows):
            memory.tree.unlock(node)
            sequence.node = None

    def fork(self, leader: Sequence) -> list[Sequence]:
        """Starts the leader's forks on its computed prompt: they share all its pages."""
        children = forking(leader)
        if self.memory.prefix_cache and not self.memory.windowed:
            self._share(leader)  # so that they lock all of it
        at = self.running.index(leader) + 1
        leader.rows = 1
        for child in children:
            self._start_fork(leader, child)
        self.running[at:at] = children
        return children

    def _start_fork(self, parent: Sequence, child: Sequence) -> None:
        child.table = parent.table.fork()
        child.computed, child.status = parent.computed, Status.RUNNING
        child.slot = self._slots.pop()
        child.table.bind(self.tables[child.slot])
        if parent.node is not None:
            child.node = parent.node
            self.memory.tree.lock(parent.node)

    def regroup(self, parents: list[Sequence]) -> list[Sequence]:
        """Gives the next beams of a request the KV of their parents, without moving any.

        The first child of a parent goes on in its place, further ones fork from it. Beams without a child end; they
        and others that are not in use keep their rows. The request's sequences are put in the order of `parents`.

        Returns:
          The children, one per parent.
        """
        request = parents[0].request
        spare = [s for s in request.sequences if s not in parents]
        for sequence in spare:
            if sequence.status is Status.RUNNING:
                self.running.remove(sequence)
                self._release(sequence, keep=False)
                sequence.computed, sequence.status = 0, Status.FORKING
        children: list[Sequence] = []
        for parent in parents:
            child = parent
            if parent in children:
                child = spare.pop(0)
                self._start_fork(parent, child)
                self.running.insert(self.running.index(parent) + 1, child)
            children.append(child)
        request.sequences[:] = children + spare
        for index, sequence in enumerate(request.sequences):
            sequence.index, sequence.rows = index, 1
        children[0].rows += len(spare)
        return children

    def catch_up(self, beam: Sequence) -> None:
        """Takes from the cache what it has of a beam beyond what it computed, after a preemption."""
        assert beam.slot is not None
        if admission.catch_up(self.memory, beam, self.match(beam)):
            beam.table.bind(self.tables[beam.slot])
        beam.match = None

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Gives back everything that a sequence holds, whatever its status. Idempotent.

        What it computed stays in the cache, unless the reason is "error".
        """
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._release(sequence, keep=reason != "error" and self.memory.prefix_cache)
        elif sequence.status is Status.WAITING:
            self.policy.remove(sequence)
        elif sequence.status is Status.FORKING:
            sequence.request.sequences[0].rows -= 1
        else:
            return
        sequence.status = Status.FINISHED
        self.policy.finished(sequence, reason)
        if not self.memory.prefix_cache and sequence.request.finished:
            self.memory.forget(self.namespace(sequence.request))

    # --- pages for running sequences

    def _plan(self, plan: Plan, segment: list[Work], sequence: Sequence, count: int) -> int:
        """Adds work, preempting others for its pages if need be; returns the net budget it took."""
        start, back = sequence.computed, 0
        while not self.memory.reserve(sequence.table, start, start + count):
            plan.short_of_pages = True
            victim = self._victim()
            if victim is None and (self._let_go(self._together(sequence)) or self.memory.squeeze()):
                continue
            if victim is None or (sequence in self._together(victim) and plan.work):
                return -back  # wait for others to give pages back, keeping what is computed
            for gone in self._together(victim):
                back += plan.drop(gone)
            self._preempt(plan, victim)
            if sequence.status is not Status.RUNNING:
                return -back
        segment.append(Work(sequence, start, start + count))
        return count - back

    def _let_go(self, sequences: list[Sequence]) -> bool:
        """Unlocks what sequences use of the cache; whether there was something.

        A locked node can hold a page that its sequence has copied, or left for another with the same content. When
        nobody else has a page to give, these must go; tables keep what they need.
        """
        locked = [s for s in sequences if s.node is not None]
        for sequence in locked:
            assert sequence.node is not None
            self.memory.tree.unlock(sequence.node)
            sequence.node = None
        return bool(locked)

    def _victim(self) -> Sequence | None:
        """Whom the policy preempts; never the one that arrived first, whose beams stay together."""
        oldest = min(self.running, key=lambda s: (s.request.metrics.arrival, s.request.number, s.index))
        spared = self._together(oldest)
        others = [s for s in self.running if s not in spared]
        return self.policy.victim(others) if others else None

    def _together(self, sequence: Sequence) -> list[Sequence]:
        """The running sequences that only make sense together: a request's beams."""
        if sequence.request.beams is None:
            return [sequence]
        return [s for s in sequence.request.sequences if s.status is Status.RUNNING]

    def _preempt(self, plan: Plan, victim: Sequence) -> None:
        plan.preempted.append(self._requeue(victim, keep=True))
        victim.request.metrics.preemptions += 1
        self.preemptions += 1

    def restart(self, sequence: Sequence) -> None:
        """Sends a running sequence (all of a request's beams) back to the queue; nothing computed is kept."""
        self._requeue(sequence, keep=False)

    def renew(self, live: Iterable[Sequence]) -> None:
        """After `KVMemory.reset`: nobody has pages, and everybody who waits is in the queue.

        That also holds of those whom an exception caught between the queue and the running.
        """
        running = set(self.running)
        for sequence in live:
            sequence.table = self.memory.new_table()
            sequence.node = sequence.match = None
            sequence.computed = 0
            if sequence in running:
                continue
            sequence.slot = None
            if sequence.status is Status.RUNNING or (sequence.status is Status.FORKING and sequence.index == 0):
                sequence.status = Status.WAITING
            if sequence.status is Status.WAITING and sequence not in self.policy:
                self.policy.add(sequence)
        used = {sequence.slot for sequence in running}
        self._slots = [slot for slot in range(self.max_rows - 1, -1, -1) if slot not in used]

    def _requeue(self, sequence: Sequence, keep: bool) -> Sequence:
        """Beams come back as one leader, from which the others fork again. Returns who waits now."""
        gone = self._together(sequence)
        for beam in gone:
            self.running.remove(beam)
            swap = keep and self.memory.host is not None and self.worth_swapping(beam.computed)
            self._release(beam, keep=keep, swap=swap if keep else None)
            beam.computed, beam.status = 0, Status.FORKING
        if (beams := sequence.request.beams) is not None:
            beams.suspend()
            gone[0].rows = len(sequence.request.sequences)
        gone[0].status = Status.WAITING
        self.policy.add(gone[0])
        return gone[0]

    def _release(self, sequence: Sequence, keep: bool, swap: bool | None = None) -> None:
        """Takes pages, lock and slot away; `keep`: what is computed goes to the cache first."""
        memory = self.memory
        node = None
        if keep and sequence.computed:
            request = sequence.request
            tokens = sequence.known(sequence.computed)
            node = memory.store(sequence.table, tokens, self.namespace(request), request.tenant, running=False)
        if sequence.node is not None:
            memory.tree.unlock(sequence.node)
        if node is not None and swap is not None:
            memory.mark(node, swap)
        sequence.node = sequence.match = None
        sequence.table.release()
        if sequence.slot is not None:
            self._slots.append(sequence.slot)
            sequence.slot = None

    def _share(self, sequence: Sequence) -> None:
        """Puts the full pages of a running sequence into the cache."""
        memory = self.memory
        count = sequence.computed // memory.page_size * memory.page_size
        if not count or (sequence.node is not None and sequence.node.stop >= count):
            return
        request = sequence.request
        tokens = sequence.known(count)
        namespace, since = self.namespace(request), sequence.node
        node = memory.store(sequence.table, tokens, namespace, request.tenant, running=True, since=since)
        memory.tree.lock(node)
        if sequence.node is not None:
            memory.tree.unlock(sequence.node)
        sequence.node = node

    # --- admission

    def _admit(self, plan: Plan, budget: int) -> None:
        rows = self.rows_used
        if rows >= self.max_rows or self._still_blocked():
            return
        tried: list[Sequence] = []
        # What running sequences will need for the rest of their prompts is promised to them.
        promised = admission.missing_pages(self.memory, self.prefilling())
        while budget > 0 and len(plan.prefills) < self.prefill_rows and len(tried) <= LOOKAHEAD:
            sequence = self.policy.pop()
            if sequence is None:
                break
            taken = self._try(plan, sequence, budget, rows, promised)
            if not taken:
                tried.append(sequence)
                if rows + sequence.rows > self.max_rows or self.policy.is_aged(sequence):
                    break  # nobody overtakes one that waited too long
                continue
            rows += sequence.rows
            budget -= taken
            more = admission.missing_pages(self.memory, [sequence])
            promised = [a + b for a, b in zip(promised, more, strict=True)]
        for sequence in tried:
            self.policy.add(sequence)
        if tried and not plan.admitted:
            self._blocked = (self._steps + RETRY, len(self.policy), self._available())

    def _available(self) -> list[int]:
        return [self.memory.available(group) for group in range(len(self.memory.pools))]

    def _still_blocked(self) -> bool:
        """Whether those who did not fit would not fit now either: no page came back, and nobody came or left.

        (What the cache has of them may have grown: now and then they are tried all the same.)
        """
        again, waiting, available = self._blocked
        if not self.running or self._steps >= again or waiting != len(self.policy):
            return False
        return all(now <= then for now, then in zip(self._available(), available, strict=True))

    def _try(self, plan: Plan, sequence: Sequence, budget: int, rows: int, promised: list[int]) -> int:
        """Admits a sequence if rows and pages allow; returns the tokens that it takes of the budget."""
        if rows + sequence.rows > self.max_rows:
            return 0
        match, alone = self.match(sequence), not self.running
        count = admission.admit(self.memory, sequence, match, budget, rows, promised, alone)
        if count:
            sequence.status, sequence.slot = Status.RUNNING, self._slots.pop()
            sequence.table.bind(self.tables[sequence.slot])
            self.running.append(sequence)
            plan.admitted.append(sequence)
            plan.prefills.append(Work(sequence, sequence.computed, sequence.computed + count))
        return count


def forking(sequence: Sequence) -> list[Sequence]:
    """The samples that still wait for this one to compute their common prompt."""
    if sequence.index > 0 or len(sequence.request.sequences) == 1:
        return []
    return [s for s in sequence.request.sequences if s.status is Status.FORKING]
