"""Fair shares between tenants: virtual token counters.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2, and its weighted variant.
"""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from specax.decoding.policies.base import DECODE_COST, PREFILL_COST, Policy, PolicyContext, arrival, prefill_work
from specax.decoding.policies.heap import Heap
from specax.decoding.request import Sequence

KEEP = 1024  # accounts kept before those are looked for that can be forgotten


class Account:
    """What a tenant got, and who of its sequences waits."""

    def __init__(self, weight: float):
        self.weight = weight
        self.base = 0.0  # what lifts added up to
        self.work = 0  # cost of its tokens: an integer, so that a charge taken back leaves no trace
        self.waiting: Heap[Sequence] = Heap()

    @property
    def counter(self) -> float:
        """The virtual time: service received, over the tenant's weight."""
        return self.base + self.work / self.weight

    def lift(self, floor: float) -> None:
        if self.counter < floor:
            self.base = floor - self.work / self.weight


class FairPolicy(Policy):
    """The earliest sequence of the waiting tenant with the smallest counter.

    A counter grows by the tokens computed for its tenant, prefill and decode each at their cost, over the tenant's
    weight. As in the paper, the prompt is charged when it is admitted, or one tenant could fill a step with
    prompts before any is paid for; `served` then charges only what goes beyond (the cache may lose what it had),
    and what turns out to be cached is given back. A tenant that had nobody waiting is lifted to the smallest
    counter among those waiting, or if nobody waits, to that of the tenant that left the queue last: idle time
    earns nothing. Between tenants that always have somebody waiting, service over weight differs by at most
    2·max(PREFILL_COST·longest prompt, DECODE_COST·tokens that fit in memory) / smallest weight, the
    paper's bound.

    The age bound of the context overrules this like any policy: with queues longer than the bound, order of
    arrival takes over, and a tenant that floods the queue gains. Where fairness must hold then, raise the bound.
    """

    name = "fair"

    def __init__(self, context: PolicyContext):
        super().__init__(context)
        self._accounts: dict[str | None, Account] = {}
        self._tenants: Heap[Account] = Heap()  # those with somebody waiting
        self._last_left: Account | None = None
        # Work that was charged when a sequence was popped and is not computed yet. A sequence stays here, be it
        # with 0, until it ends: who is in here and joins again did not arrive anew. (Samples that were
        # forked come in when they first decode. Weak: nobody says when a running sequence is aborted.)
        self._charged: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._forget_at = KEEP

    def counter(self, tenant: str | None) -> float:
        """Service that a tenant received over its weight, lifts included; 0 for an unknown one."""
        return self._accounts[tenant].counter if tenant in self._accounts else 0.0

    def pop(self) -> Sequence | None:
        sequence = super().pop()
        if sequence is not None:
            account, work = self._account(sequence), prefill_work(sequence, self.context.cached_tokens(sequence))
            self._charged[sequence] = work
            account.work += work
            self._place(account)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self._charged.pop(sequence, None)

    def victim(self, running: list[Sequence]) -> Sequence:
        """The newest sequence of the running tenant with the largest counter."""
        return max(running, key=lambda s: (self.counter(s.request.tenant), *arrival(s)))

    def served(self, prefilled: Iterable[tuple[Sequence, int]], decoded: Iterable[Sequence]) -> None:
        touched: set[Account] = set()
        for sequence, count in prefilled:
            account, work, charged = self._account(sequence), PREFILL_COST * count, self._charged.get(sequence, 0)
            self._charged[sequence] = charged - min(charged, work)
            account.work += work - min(charged, work)
            touched.add(account)
        for sequence in decoded:
            account = self._account(sequence)
            if self._charged.get(sequence) != 0:
                self._refund(account, sequence)  # its prompt is done
            account.work += DECODE_COST
            touched.add(account)
        for account in touched:
            self._place(account)

    def finished(self, sequence: Sequence, reason: str) -> None:
        account = self._account(sequence)
        self._refund(account, sequence)
        self._charged.pop(sequence, None)
        self._place(account)

    def _next(self) -> Sequence | None:
        return self._tenants.first().waiting.first()

    def _joined(self, sequence: Sequence) -> None:
        account = self._account(sequence)
        if sequence in self._charged:
            self._refund(account, sequence)
        elif not account.waiting:
            if self._tenants:
                account.lift(self._tenants.first_key()[0])
            elif self._last_left is not None:
                account.lift(self._last_left.counter)
        account.waiting.put(sequence, arrival(sequence))
        self._place(account)

    def _left(self, sequence: Sequence) -> None:
        account = self._account(sequence)
        account.waiting.remove(sequence)
        if not account.waiting:
            self._last_left = account
        self._place(account)

    def _refund(self, account: Account, sequence: Sequence) -> None:
        account.work -= self._charged.get(sequence, 0)
        self._charged[sequence] = 0

    def _place(self, account: Account) -> None:
        """After any change: among tenants of equal counters, the one whose first sequence is older goes first."""
        if account.waiting:
            self._tenants.put(account, (account.counter, *account.waiting.first_key()))
        elif account in self._tenants:
            self._tenants.remove(account)

    def _account(self, sequence: Sequence) -> Account:
        tenant = sequence.request.tenant
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._forget_at:
                self._forget()
            account = self._accounts[tenant] = Account(1.0 if tenant is None else self.context.weights.get(tenant, 1.0))
        return account

    def _forget(self) -> None:
        """Drops idle tenants whom their next request would lift anyway; the names seen would pile up otherwise."""
        floor = self._tenants.first_key()[0] if self._tenants else self._last_left.counter if self._last_left else 0.0
        running = {s.request.tenant for s in self._charged}
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if account.waiting or tenant in running or account.counter > floor
        }
        self._forget_at = max(KEEP, 2 * len(self._accounts))
