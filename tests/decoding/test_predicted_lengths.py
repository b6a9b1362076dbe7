"""The length predictor, and the policy that goes by it: trusted where prompts tell, else first come, first served."""

import math
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest

from specax.decoding.policies import Policy, make_policy
from specax.decoding.policies.base import DECODE_COST
from specax.decoding.policies.length_predictor import MIN_SEEN, LengthPredictor
from specax.decoding.policies.predicted import PredictedPolicy
from specax.decoding.request import Sequence
from tests.decoding.policy_sequences import context, drain, sequence


def by_last_token(rng: np.random.Generator) -> tuple[Sequence, int]:
    """A prompt whose last tokens tell how long the output will be, within a factor of 1.2 or so."""
    kind = int(rng.integers(8))
    prompt = [*rng.integers(0, 1000, rng.integers(1, 200)).tolist(), *[kind] * 4]
    return sequence(0.0, prompt, 2000), int(np.exp(1 + kind * 0.7 + rng.normal(0, 0.2))) + 1


def noise(rng: np.random.Generator) -> tuple[Sequence, int]:
    """Nothing tells."""
    s = sequence(0.0, rng.integers(0, 1000, rng.integers(1, 200)), 2000, tenant=str(rng.integers(20)))
    return s, int(np.exp(rng.normal(4, 1))) + 1


def test_predictor_is_trusted_where_it_knows_and_not_on_noise(rng: np.random.Generator):
    knows, guesses = LengthPredictor(), LengthPredictor()
    for seen in range(1, 1501):
        for predictor, draw in ((knows, by_last_token), (guesses, noise)):
            s, length = draw(rng)
            predictor.learn(s.request, length)
            assert seen >= MIN_SEEN or not predictor.trusted
        assert not guesses.trusted
        assert seen < 300 or knows.trusted
    assert knows.error < 0.35 * knows.mean_error  # the noise alone is 0.12; hashes collide
    assert guesses.error < 1.15 * guesses.mean_error  # nor does it get lost
    trusted = []
    for _ in range(1500):  # the world turns round: trust is lost, and won again
        s, length = by_last_token(rng)
        knows.learn(s.request, 1 + 1500 // length)
        trusted.append(knows.trusted)
    assert not any(trusted[300:500]) and all(trusted[-100:])
    assert knows.error < 0.5 * knows.mean_error


def test_predictor_respects_limits_and_survives_odd_requests(rng: np.random.Generator):
    predictor = LengthPredictor()
    odd = [
        sequence(prompt=[], max_tokens=0),
        sequence(prompt=[], max_tokens=-3, tenant="\ud800"),
        sequence(prompt=[2**31 - 1] * 3, max_tokens=10**400),
    ]
    for at in range(600):
        s, length = by_last_token(rng)
        s.request.max_tokens = int(rng.integers(1, 50))
        predictor.learn(s.request, min(length, s.request.max_tokens))
        assert 0 <= predictor.predict(s.request) <= s.request.max_tokens * (1 + 1e-9)
        predictor.learn(odd[at % 3].request, [0, -5, 10**400][at % 3])
        assert all(math.isfinite(predictor.predict(s.request)) for s in odd)
    predictor._covariance[:] = math.nan  # rounding gone wrong
    predictor.learn(odd[2].request, 7)
    assert not predictor.trusted and predictor.predict(odd[2].request) == 0


def test_predictor_learns_through_limits(rng: np.random.Generator):
    """Outputs that the limit cuts say nothing against a long prediction, so others are not predicted too short."""
    predictor = LengthPredictor()
    for _ in range(1500):
        s, length = by_last_token(rng)
        if rng.random() < 0.5:
            s.request.max_tokens = int(np.exp(rng.uniform(0, 4)))
            length = min(length, s.request.max_tokens)
        predictor.learn(s.request, length)
    errors = []
    for _ in range(200):
        s, length = by_last_token(rng)
        errors.append(abs(math.log1p(predictor.predict(s.request)) - math.log1p(length)))
    assert np.mean(errors) < 0.5  # (0.72 if cut lengths are taken for whole ones)


def mean_completion(policy: Policy, jobs: list[tuple[Sequence, int]], servers: int = 2) -> float:
    """All jobs wait at time 0; each of a few servers decodes one at a time, to its end. Mean steps to completion."""
    lengths = dict(jobs)
    for waiting in lengths:
        policy.add(waiting)
    free, ends = [0] * servers, []
    for s in drain(policy):
        free[0] += lengths[s]
        ends.append(free[0])
        free.sort()
    return float(np.mean(ends))


@pytest.mark.parametrize("draw", [by_last_token, noise])
def test_predicted_beats_fcfs_where_it_can_and_is_fcfs_where_it_cannot(
    draw: Callable[[np.random.Generator], tuple[Sequence, int]], rng: np.random.Generator
):
    predicted = make_policy("predicted", context())
    for _ in range(400):
        s, length = draw(rng)
        s.tokens.extend([0] * length)
        predicted.finished(s, "length")
    jobs = [draw(rng) for _ in range(300)]
    ratio = mean_completion(predicted, jobs) / mean_completion(make_policy("fcfs", context()), jobs)
    assert ratio == 1 if draw is noise else ratio < 0.6


def test_predicted_ranks_those_who_wait_again():
    """Who joined before the predictor knew better is not stuck at its first rank."""
    policy = make_policy("predicted", context())
    assert isinstance(policy, PredictedPolicy)
    length = {"a": 1, "b": 10}
    policy.predictor = mock.Mock(trusted=True, predict=lambda request: length[request.tenant])
    waiting = [sequence(at, tenant="ab"[at % 2]) for at in range(20)]
    for s in waiting:
        policy.add(s)
    length["a"] = 100
    for _ in range(3):
        policy.served([], [])
    assert drain(policy) == waiting[1::2] + waiting[::2]


def test_an_output_that_outgrew_its_prediction_is_a_long_one():
    policy = PredictedPolicy(context())
    policy.predictor = mock.Mock(trusted=True, predict=lambda request: 10)
    outputs = [0, 6, 9, 10, 40, 95]  # of 100 at most; left: 10, 4, 1, then as many again, or up to the limit
    running = [sequence(at, max_tokens=100) for at in range(len(outputs))]
    for s, output in zip(running, outputs, strict=True):
        s.tokens.extend([0] * output)
        s.computed = len(s.tokens)
    assert [policy.remaining(s, 0) / DECODE_COST for s in running] == [10, 4, 1, 10, 40, 5]
    assert policy.victim(running) is running[4]
    policy.predictor.trusted = False
    assert policy.victim(running) is running[5]
