"""Sequences as policies see them, shared by their tests."""

import itertools
from collections.abc import Iterable

from specax.decoding.outputs import RequestMetrics
from specax.decoding.policies import Policy, PolicyContext
from specax.decoding.request import Request, Sequence
from specax.decoding.sampling_params import SamplingParams
from specax.paged import PagePool, PageTable

TABLE, PARAMS = PageTable((PagePool(2),), 4), SamplingParams()  # (policies look at neither)
NUMBERS = itertools.count()


def sequence(
    arrival: float = 0.0,
    prompt: Iterable[int] = (1, 2, 3),
    max_tokens: int = 16,
    priority: int = 0,
    tenant: str | None = None,
    ttft_target: float | None = None,
) -> Sequence:
    """A new request's only sequence; numbers go up from call to call."""
    request = Request("r", list(prompt), PARAMS, max_tokens, frozenset(), (), (), next(NUMBERS), priority, tenant)
    request.ttft_target, request.metrics = ttft_target, RequestMetrics(arrival)
    request.sequences.append(Sequence(request, 0, TABLE, seed=0))
    return request.sequences[0]


def context(**options: object) -> PolicyContext:
    """A clock that stands at 0."""
    return PolicyContext(clock=lambda: 0.0, **options)  # type: ignore[arg-type]


def drain(policy: Policy) -> list[Sequence]:
    return list(iter(policy.pop, None))
