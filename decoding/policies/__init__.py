"""Scheduling policies: who is admitted next, and who gives way when memory runs out."""

from specax.decoding.errors import InvalidRequestError
from specax.decoding.policies.base import Policy, PolicyContext
from specax.decoding.policies.fair import FairPolicy
from specax.decoding.policies.fcfs import FCFSPolicy
from specax.decoding.policies.lpm import LPMPolicy
from specax.decoding.policies.predicted import PredictedPolicy
from specax.decoding.policies.priority import PriorityPolicy
from specax.decoding.policies.sjf import SJFPolicy

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (FCFSPolicy, PriorityPolicy, SJFPolicy, FairPolicy, LPMPolicy, PredictedPolicy)
}

__all__ = ["POLICIES", "Policy", "PolicyContext", "make_policy"]


def make_policy(name: str, context: PolicyContext) -> Policy:
    """A policy by its name, with an empty queue; InvalidRequestError for a name that is none."""
    if name not in POLICIES:
        raise InvalidRequestError(f"unknown scheduling policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name](context)
