"""The compiled sampler against exact probabilities, computed here in float64 with a sort."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specax.decoding import sampler
from specax.decoding.sampler import SamplerState
from specax.decoding.sampling_table import SamplerInputs

VOCAB = 50
DRAWS = 20_000
P_VALUE = 1e-4

sample = jax.jit(sampler.sample)
inverse_transform = jax.jit(sampler.inverse_transform)


def make_inputs(rows: int, vocab: int = VOCAB, **fields: Any) -> SamplerInputs:
    """Inert inputs, with `fields` broadcast over the rows."""
    columns: dict[str, tuple[Any, Any]] = {
        "slots": (np.arange(rows), np.int32),
        "seeds": (7, np.uint32),
        "output_index": (0, np.int32),
        "temperature": (0.0, np.float32),
        "top_k": (vocab, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "presence": (0.0, np.float32),
        "frequency": (0.0, np.float32),
        "repetition": (1.0, np.float32),
        "penalised": (False, np.bool_),
        "biased": (False, np.bool_),
    }
    banned = np.asarray(fields.pop("banned", np.full((rows, 4), vocab)), np.int32)
    logprobs = fields.pop("any_logprobs", False)
    assert fields.keys() <= columns.keys()
    made = {
        name: np.broadcast_to(np.asarray(fields.get(name, default), dtype), rows).copy()
        for name, (default, dtype) in columns.items()
    }
    any_banned = bool((banned < vocab).any())
    flags = {"any_banned": np.bool_(any_banned), "any_logprobs": np.bool_(logprobs)}
    return SamplerInputs(**made, banned=banned, **flags)


def probabilities(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Exact probabilities of one row; tokens that tie with the last one kept are kept."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    p[p < min_p * p.max()] = 0
    if top_k:
        p[p < np.sort(p)[-min(top_k, len(p))]] = 0
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        enough = np.searchsorted(np.cumsum(p[order]), top_p * p.sum())
        p[p < p[order[enough]]] = 0
    return p / p.sum()


def check_frequencies(tokens: np.ndarray, p: np.ndarray) -> None:
    """Chi-square of the draws against p; rare tokens are pooled, impossible ones must not occur."""
    counts = np.bincount(tokens, minlength=len(p))
    assert len(counts) == len(p)
    assert not counts[p == 0].any(), np.nonzero((p == 0) & (counts > 0))
    expected = p * len(tokens)
    rare = expected < 8
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(observed) > 1:
        assert stats.chisquare(observed, expected).pvalue > P_VALUE


def state_for(rows: int, vocab: int = VOCAB) -> SamplerState:
    return SamplerState.create(rows, vocab)


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature_1": {"temperature": 1.0},
    "temperature_low": {"temperature": 0.3},
    "temperature_high": {"temperature": 4.0},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_k_1": {"temperature": 1.0, "top_k": 1},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_p_low": {"temperature": 1.5, "top_p": 0.3},
    "top_p_almost_1": {"temperature": 1.0, "top_p": 0.9999},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "min_p_1": {"temperature": 1.0, "min_p": 1.0},
    "top_k_top_p": {"temperature": 1.3, "top_k": 12, "top_p": 0.7},
    "top_k_min_p": {"temperature": 2.0, "top_k": 20, "min_p": 0.2},
    "min_p_top_p": {"temperature": 1.0, "min_p": 0.03, "top_p": 0.9},
    "all": {"temperature": 1.7, "top_k": 15, "top_p": 0.85, "min_p": 0.04},
}


class TestFrequencies:
    """One token position, drawn 20,000 times: rows that differ in the output's index, or in the seed."""

    @pytest.mark.parametrize("options", OPTIONS)
    def test_over_output_positions(self, options):
        logits = np.random.default_rng(1).normal(scale=2.0, size=VOCAB).astype(np.float32)
        chosen = OPTIONS[options]
        inputs = make_inputs(DRAWS, output_index=np.arange(DRAWS), seeds=1234, **chosen)
        out, _ = sample(np.tile(logits, (DRAWS, 1)), state_for(DRAWS), inputs)
        check_frequencies(np.asarray(out.tokens), probabilities(logits, **chosen))

    @pytest.mark.parametrize("options", ["temperature_1", "all"])
    def test_over_seeds(self, options):
        logits = np.random.default_rng(2).normal(scale=2.0, size=VOCAB).astype(np.float32)
        chosen = OPTIONS[options]
        inputs = make_inputs(DRAWS, output_index=3, seeds=np.arange(DRAWS), **chosen)
        out, _ = sample(np.tile(logits, (DRAWS, 1)), state_for(DRAWS), inputs)
        check_frequencies(np.asarray(out.tokens), probabilities(logits, **chosen))

    def test_neighbouring_draws_are_independent(self):
        """Pairs (position i, i + 1) of one seed, and (seed s, s + 1) at one position: the product law."""
        p = np.array([0.1, 0.2, 0.3, 0.4])
        logits = np.full((DRAWS, VOCAB), -np.inf, np.float32)
        logits[:, :4] = np.log(p)
        for varied in ("output_index", "seeds"):
            fields: dict[str, Any] = {varied: np.arange(DRAWS)}
            inputs = make_inputs(DRAWS, temperature=1.0, **fields)
            tokens = np.asarray(sample(logits, state_for(DRAWS), inputs)[0].tokens)
            check_frequencies(4 * tokens[0::2] + tokens[1::2], np.outer(p, p).reshape(-1))

    def test_a_vocabulary_of_several_blocks(self):
        rows, vocab = 4000, 3 * sampler.BLOCK + 17
        logits = np.random.default_rng(3).normal(scale=3.0, size=vocab).astype(np.float32)
        chosen: dict[str, Any] = {"temperature": 1.0, "top_k": 600, "min_p": 0.001}
        inputs = make_inputs(rows, vocab, output_index=np.arange(rows), **chosen)
        out, _ = sample(np.tile(logits, (rows, 1)), state_for(rows, vocab), inputs)
        check_frequencies(np.asarray(out.tokens), probabilities(logits, **chosen))

    def test_each_row_has_its_own_options(self):
        """Rows of all settings side by side in one call."""
        logits = np.random.default_rng(4).normal(scale=2.0, size=VOCAB).astype(np.float32)
        chosen = [OPTIONS[name] for name in OPTIONS] + [{"temperature": 0.0}]
        of_row = np.arange(DRAWS) % len(chosen)
        columns: dict[str, Any] = {
            name: np.array([c.get(name, default) for c in chosen])[of_row]
            for name, default in (("temperature", 0.0), ("top_k", VOCAB), ("top_p", 1.0), ("min_p", 0.0))
        }
        inputs = make_inputs(DRAWS, output_index=np.arange(DRAWS), **columns)
        tokens = np.asarray(sample(np.tile(logits, (DRAWS, 1)), state_for(DRAWS), inputs)[0].tokens)
        for index, options in enumerate(chosen):
            mine = tokens[of_row == index]
            if options["temperature"] == 0:
                assert (mine == logits.argmax()).all()
            else:
                check_frequencies(mine, probabilities(logits, **options))


class TestFilters:
    @settings(deadline=None, derandomize=True, max_examples=60)
    @given(
        st.lists(st.integers(-12, 12), min_size=2, max_size=24),  # many ties
        st.integers(1, 26), st.sampled_from([0.01, 0.25, 0.5, 0.77, 0.95, 1.0]), st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    )  # fmt: skip
    def test_what_is_kept(self, values, top_k, top_p, min_p):
        vocab = 24
        logits = np.full(vocab, -np.inf, np.float32)
        logits[: len(values)] = np.array(values) / 3
        p = probabilities(logits, 1.0, min(top_k, vocab), 1.0, min_p)
        # Within rounding of a boundary of top_p either side is right.
        steps = np.cumsum(np.sort(p)[::-1])
        if top_p < 1 and np.abs(steps - top_p).min() < 1e-5:
            return
        inputs = make_inputs(1, vocab, temperature=1.0, top_k=min(top_k, vocab), top_p=top_p, min_p=min_p)
        weights = np.exp(logits - logits.max())[None]
        kept = np.asarray(jax.jit(sampler.filter_weights)(weights, inputs))[0]
        np.testing.assert_array_equal(kept > 0, probabilities(logits, 1.0, min(top_k, vocab), top_p, min_p) > 0)
        np.testing.assert_array_equal(kept[kept > 0], weights[0][kept > 0])

    def test_ties_with_the_last_of_top_k_are_kept(self):
        logits = np.full((DRAWS, VOCAB), -5.0, np.float32)
        logits[:, [3, 9, 20, 41]] = [2.0, 1.0, 1.0, 1.0]
        inputs = make_inputs(DRAWS, temperature=1.0, top_k=2, output_index=np.arange(DRAWS))
        tokens = np.asarray(sample(logits, state_for(DRAWS), inputs)[0].tokens)
        check_frequencies(tokens, probabilities(logits[0], 1.0, 2))
        assert set(tokens.tolist()) == {3, 9, 20, 41}

    @pytest.mark.parametrize("options", [{"top_p": 1e-7}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
    def test_the_tightest_filter_is_argmax(self, options, rng):
        logits = rng.normal(size=(DRAWS, VOCAB)).astype(np.float32)
        inputs = make_inputs(DRAWS, temperature=5.0, output_index=np.arange(DRAWS), **options)
        tokens = np.asarray(sample(logits, state_for(DRAWS), inputs)[0].tokens)
        np.testing.assert_array_equal(tokens, logits.argmax(-1))

    @pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-44])
    def test_a_tiny_temperature_is_argmax(self, temperature, rng):
        logits = (30 * rng.normal(size=(64, VOCAB))).astype(np.float32)
        logits[:, 5] = -np.inf
        inputs = make_inputs(64, temperature=temperature, output_index=np.arange(64))
        tokens = np.asarray(sample(logits, state_for(64), inputs)[0].tokens)
        np.testing.assert_array_equal(tokens, logits.argmax(-1))

    @pytest.mark.parametrize("temperature", [1e10, 3e38, np.inf])
    def test_a_huge_temperature_is_uniform_over_what_is_allowed(self, temperature, rng):
        """(A finite double can be infinite in float32.)"""
        logits = np.tile(rng.normal(size=VOCAB).astype(np.float32), (DRAWS, 1))
        logits[:, ::2] = -np.inf
        inputs = make_inputs(DRAWS, temperature=temperature, output_index=np.arange(DRAWS))
        tokens = np.asarray(sample(logits, state_for(DRAWS), inputs)[0].tokens)
        check_frequencies(tokens, np.where(np.arange(VOCAB) % 2, 2 / VOCAB, 0))


class TestProcessing:
    """Penalties, biases and bans, seen through greedy argmax and through what can be drawn."""

    ROWS = 64

    @pytest.fixture
    def history(self, rng) -> tuple[SamplerState, np.ndarray, np.ndarray, np.ndarray]:
        counts = rng.integers(0, 4, (self.ROWS, VOCAB)) * rng.integers(0, 2, (self.ROWS, VOCAB))
        in_prompt = rng.random((self.ROWS, VOCAB)) < 0.3
        bias = np.where(rng.random((self.ROWS, VOCAB)) < 0.2, -np.inf, rng.normal(size=(self.ROWS, VOCAB)))
        state = SamplerState(jnp.asarray(counts, jnp.int32), jnp.asarray(in_prompt), jnp.asarray(bias, jnp.float32))
        return state, counts, in_prompt, bias

    @staticmethod
    def processed(logits: np.ndarray, inputs: SamplerInputs, counts: Any, in_prompt: Any, bias: Any) -> np.ndarray:
        """Row by row and token by token, as the papers and vLLM say it."""
        out = logits.astype(np.float64)
        for row, slot in enumerate(np.asarray(inputs.slots)):
            for token in range(logits.shape[1]):
                x = out[row, token]
                if inputs.biased[row]:
                    x += bias[slot, token]
                if inputs.penalised[row]:
                    count = counts[slot, token]
                    if count > 0 or in_prompt[slot, token]:
                        x = x / inputs.repetition[row] if x > 0 else x * inputs.repetition[row]
                    x -= inputs.frequency[row] * count
                    x -= inputs.presence[row] if count > 0 else 0
                if token in np.asarray(inputs.banned[row]):
                    x = -np.inf
                out[row, token] = x
        return out

    @pytest.mark.parametrize(
        "used",
        [
            {"repetition": 1.4, "penalised": True},
            {"repetition": 0.7, "penalised": True},
            {"frequency": 0.9, "penalised": True},
            {"presence": 1.5, "penalised": True},
            {"presence": -1.5, "frequency": -0.4, "penalised": True},
            {"biased": True},
            {"repetition": 1.3, "frequency": 0.3, "presence": 0.6, "penalised": True, "biased": True},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("bans", [False, True])
    def test_greedy(self, used, bans, rng, history):
        state, *host = history
        logits = (2 * rng.normal(size=(self.ROWS, VOCAB))).astype(np.float32)
        slots = rng.permutation(self.ROWS)
        half = np.arange(self.ROWS) % 2 == 0  # the other half uses nothing, beside them
        used = {name: np.where(half, value, value if name == "repetition" else 0) for name, value in used.items()}
        fields: dict[str, Any] = {"slots": slots, **used}
        if bans:
            banned = np.full((self.ROWS, 4), VOCAB)
            banned[half, :3] = np.argsort(-logits, axis=1)[half, :3]
            fields["banned"] = banned
        inputs = make_inputs(self.ROWS, **fields)
        out, after = sample(logits, state, inputs)
        want = self.processed(logits, inputs, *host)
        np.testing.assert_array_equal(out.tokens, want.argmax(-1))
        # What is drawn is counted, once, for those rows alone that need it.
        counts = host[0].copy()
        counts[slots[inputs.penalised], np.asarray(out.tokens)[inputs.penalised]] += 1
        np.testing.assert_array_equal(after.output_counts, counts)
        np.testing.assert_array_equal(after.in_prompt, state.in_prompt)
        np.testing.assert_array_equal(after.bias, state.bias)

    def test_frequencies_under_all_of_them(self, rng):
        counts, in_prompt = rng.integers(0, 3, (1, VOCAB)), rng.random((1, VOCAB)) < 0.3
        bias = np.where(rng.random((1, VOCAB)) < 0.5, -np.inf, rng.normal(size=(1, VOCAB)))
        state = SamplerState(jnp.asarray(counts, jnp.int32), jnp.asarray(in_prompt), jnp.asarray(bias, jnp.float32))
        logits = np.tile(rng.normal(size=VOCAB).astype(np.float32), (DRAWS, 1))
        banned = np.tile([4, 17, VOCAB, VOCAB], (DRAWS, 1))
        inputs = make_inputs(
            DRAWS, slots=0, temperature=0.8, top_k=15, repetition=1.2, frequency=0.2, presence=0.3,
            penalised=True, biased=True, banned=banned, output_index=np.arange(DRAWS),
        )  # fmt: skip
        out, after = sample(logits, state, inputs)
        one = jax.tree.map(lambda x: x[:1] if np.ndim(x) else x, inputs)
        row = self.processed(logits[:1], one, counts, in_prompt, bias)[0]
        check_frequencies(np.asarray(out.tokens), probabilities(row, 0.8, 15))
        assert int(after.output_counts.sum()) == counts.sum() + DRAWS

    def test_load_slot(self):
        state = SamplerState(jnp.full((3, VOCAB), 9), jnp.ones((3, VOCAB), bool), jnp.full((3, VOCAB), 2.0))
        tokens = np.array([5, 6, 5, 8, 8, 6, 40, 41], np.int32)  # prompt 5 6 5, output 8 8 6, the rest is stale
        bias = np.linspace(-1, 1, VOCAB).astype(np.float32)
        got = jax.jit(sampler.load_slot)(state, np.int32(1), tokens, np.int32(3), np.int32(6), bias)
        counts, in_prompt = np.zeros(VOCAB, int), np.zeros(VOCAB, bool)
        counts[[8, 6]], in_prompt[[5, 6]] = [2, 1], True
        np.testing.assert_array_equal(got.output_counts[1], counts)
        np.testing.assert_array_equal(got.in_prompt[1], in_prompt)
        np.testing.assert_array_equal(got.bias[1], bias)
        for new, old in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(np.delete(new, 1, 0), np.delete(old, 1, 0))


class TestRowsDoNotMix:
    ROWS = 8

    def mixed(self, rng: np.random.Generator) -> tuple[np.ndarray, SamplerState, SamplerInputs]:
        """Eight rows that use all sorts of options, on slots of a ten-slot state (9: inert)."""
        logits = (2 * rng.normal(size=(self.ROWS, VOCAB))).astype(np.float32)
        counts = rng.integers(0, 3, (10, VOCAB))
        bias = rng.normal(size=(10, VOCAB))
        state = SamplerState(
            jnp.asarray(counts, jnp.int32), jnp.asarray(rng.random((10, VOCAB)) < 0.3), jnp.asarray(bias, jnp.float32)
        )
        banned = np.full((self.ROWS, 4), VOCAB)
        banned[2, :2] = [1, 2]
        inputs = make_inputs(
            self.ROWS,
            slots=rng.permutation(9)[: self.ROWS],
            seeds=rng.integers(0, 2**32, self.ROWS),
            output_index=rng.integers(0, 100, self.ROWS),
            temperature=[0, 1, 0.7, 2, 1, 0, 1.3, 0.9],
            top_k=[VOCAB, 5, VOCAB, 20, VOCAB, 3, VOCAB, VOCAB],
            top_p=[1, 1, 0.8, 0.9, 1, 0.2, 1, 1],
            min_p=[0, 0, 0, 0.01, 0, 0, 0.1, 0],
            repetition=[1, 1, 1.3, 1, 1.1, 1.2, 1, 1],
            frequency=[0, 0, 0.5, 0, 0, 0.1, 0, 0],
            penalised=[False, False, True, False, True, True, False, False],
            biased=[False, True, False, False, True, False, False, True],
            banned=banned,
            any_logprobs=True,
        )
        return logits, state, inputs

    def test_whatever_stands_in_padding_rows(self, rng):
        logits, state, inputs = self.mixed(rng)
        live = np.arange(self.ROWS) < 5
        inert = make_inputs(self.ROWS, slots=9)
        clean = jax.tree.map(
            lambda a, b: a if np.ndim(a) == 0 else np.where(live.reshape(-1, *[1] * (a.ndim - 1)), a, b), inputs, inert
        )
        want, want_state = sample(np.where(live[:, None], logits, 0).astype(np.float32), state, clean)
        bad_floats = [np.nan, -1.0, 1e38, np.inf, -np.inf, 0.0]
        bad_ints = [-1, 0, 2**31 - 1, -(2**31)]
        for turn in range(len(bad_floats)):
            dirty: dict[str, Any] = {"slots": clean.slots, "any_banned": clean.any_banned, "any_logprobs": np.True_}
            for number, field in enumerate(dataclasses.fields(clean)):
                if field.name in dirty:
                    continue
                value = np.array(getattr(clean, field.name))
                choices: list[Any] = bad_floats if value.dtype == np.float32 else bad_ints
                if value.dtype == np.bool_:
                    choices = [True, False]
                if value.dtype == np.uint32:
                    choices = [0, 2**32 - 1]
                value[~live] = choices[(turn + number) % len(choices)]
                dirty[field.name] = value
            noise = np.where(live[:, None], logits, bad_floats[turn]).astype(np.float32)
            got, got_state = sample(noise, state, SamplerInputs(**dirty))
            for name in ("tokens", "logprobs", "ranks", "top_tokens", "top_logprobs"):
                np.testing.assert_array_equal(np.asarray(getattr(got, name))[:5], np.asarray(getattr(want, name))[:5])
            for a, b in zip(jax.tree.leaves(got_state), jax.tree.leaves(want_state), strict=True):
                np.testing.assert_array_equal(np.asarray(a)[:9], np.asarray(b)[:9])
            tokens = np.asarray(got.tokens)[:5]
            assert ((tokens >= 0) & (tokens < VOCAB)).all()

    def test_same_seed_same_token_in_any_place_and_company(self, rng):
        logits, state, inputs = self.mixed(rng)
        together = np.asarray(sample(logits, state, inputs)[0].tokens)

        def rows(order: Any) -> np.ndarray:
            moved = jax.tree.map(lambda x: np.asarray(x)[order] if np.ndim(x) else x, inputs)
            return np.asarray(sample(logits[order], state, moved)[0].tokens)

        for _ in range(3):
            order = rng.permutation(self.ROWS)
            np.testing.assert_array_equal(rows(order), together[order])
        for row in range(self.ROWS):  # alone, in a program for one row
            assert rows([row]) == together[row]
        assert len(set(rows([1, 1, 1]).tolist())) == 1  # seed and index decide, not the row

    def test_index_and_seed_change_the_draw(self):
        logits = np.zeros((64, VOCAB), np.float32)
        for varied in ("output_index", "seeds"):
            fields: dict[str, Any] = {varied: np.arange(64)}
            inputs = make_inputs(64, temperature=1.0, **fields)
            tokens = np.asarray(sample(logits, state_for(64), inputs)[0].tokens)
            assert len(set(tokens.tolist())) > 20


class TestCost:
    """What nobody uses sits behind conditionals: in the program, and not run."""

    @staticmethod
    def outside_conditionals(jaxpr: Any) -> tuple[set[str], int]:
        """Names of the operations that always run, and how many conditionals there are among them."""
        names, conditionals = set(), 0
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name == "cond":
                conditionals += 1
                continue
            names.add(name)
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    more, count = TestCost.outside_conditionals(inner)
                    names |= more
                    conditionals += count
        return names, conditionals

    def test_only_argmax_always_runs(self):
        inputs = make_inputs(4)
        jaxpr = jax.make_jaxpr(sampler.sample)(jnp.zeros((4, VOCAB)), state_for(4), jax.tree.map(jnp.asarray, inputs))
        names, conditionals = self.outside_conditionals(jaxpr.jaxpr)
        costly = {"exp", "log", "div", "cumsum", "sort", "top_k", "while", "scan", "random_bits", "threefry2x32",
                  "random_fold_in", "gather"}  # fmt: skip
        assert not names & costly, names & costly
        # Edits (biases, penalties, bans inside) and the draw (filters inside), which stands in both branches;
        # log-probabilities.
        assert conditionals == 2
        text = str(jaxpr)
        assert text.count("cond[") == 9

    def test_conditionals_survive_compilation(self, monkeypatch):
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # `lower` fills dataclasses with no arrays
        compiled = sample.lower(np.zeros((4, VOCAB), np.float32), state_for(4), make_inputs(4)).compile()
        assert (compiled.as_text() or "").count(" conditional(") >= 6


class TestInverseTransform:
    VOCAB = 2 * sampler.BLOCK + 77
    ALMOST_ONE = float(np.nextafter(np.float32(1), np.float32(0)))

    @staticmethod
    def check(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """The token is possible, and the target lies in its interval but for rounding."""
        tokens = np.asarray(inverse_transform(weights, uniform))
        rows = np.arange(len(weights))
        assert ((tokens >= 0) & (tokens < weights.shape[1])).all()
        assert (weights[rows, tokens] > 0).all()
        cumulated = np.cumsum(weights.astype(np.float64), axis=1)
        total = cumulated[:, -1]
        upper = cumulated[rows, tokens]
        lower = upper - weights[rows, tokens]
        target = uniform.astype(np.float64) * total
        assert (lower <= target + 2e-6 * total).all() and (target <= upper + 2e-6 * total).all()
        return tokens

    @pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, VOCAB])
    def test_like_a_search_in_float64(self, vocab, rng):
        weights = rng.random((500, vocab)).astype(np.float32) ** 4
        uniform = rng.random(500).astype(np.float32)
        tokens = self.check(weights, uniform)
        cumulated = np.cumsum(weights.astype(np.float64), axis=1)
        want = np.array([np.searchsorted(c, u * c[-1], "right") for c, u in zip(cumulated, uniform, strict=True)])
        assert (tokens == want).mean() > 0.98

    def test_ends(self):
        weights = np.zeros((6, self.VOCAB), np.float32)
        for row, tokens in enumerate([[0], [self.VOCAB - 1], [3, 400], [255, 256], [0, self.VOCAB - 1], [300, 301]]):
            weights[row, tokens] = 1.0
        first = self.check(weights, np.zeros(6, np.float32))
        last = self.check(weights, np.full(6, self.ALMOST_ONE, np.float32))
        np.testing.assert_array_equal(first, [0, self.VOCAB - 1, 3, 255, 0, 300])
        np.testing.assert_array_equal(last, [0, self.VOCAB - 1, 400, 256, self.VOCAB - 1, 301])

    @pytest.mark.parametrize("share", [0.5, 0.97])
    def test_impossible_tokens_at_the_edges_of_intervals(self, share, rng):
        """Targets on and beside every kind of boundary, among zeros: sums in another order must not show."""
        rows = 4000
        weights = (rng.random((rows, self.VOCAB)) ** 6).astype(np.float32)
        weights[rng.random(weights.shape) < share] = 0
        weights[:, -40:] = 0
        weights[:, 100] = 1.0
        cumulated = np.cumsum(weights.astype(np.float64), axis=1)
        at = rng.integers(0, self.VOCAB, rows)
        exact = (cumulated[np.arange(rows), at] / cumulated[:, -1]).astype(np.float32)
        for shift in (-2, -1, 0, 1, 2):
            uniform = exact
            for _ in range(abs(shift)):
                uniform = np.nextafter(uniform, np.float32(np.sign(shift) * 2))
            self.check(weights, np.clip(uniform, 0, self.ALMOST_ONE).astype(np.float32))

    def test_a_large_vocabulary_keeps_its_tail(self, rng):
        vocab, rows = 150_001, 40
        weights = np.full((1, vocab), 1e-7, np.float32)
        weights[0, 0] = 1.0
        tail = 1e-7 * (vocab - 1) / (1 + 1e-7 * (vocab - 1))
        weights = np.repeat(weights, rows, axis=0)
        # Evenly through the tail: a float32 running sum from 1.0 would round every step.
        uniform = ((1 - tail) + tail * (np.arange(rows) + 0.5) / rows).astype(np.float32)
        tokens = self.check(weights, uniform)
        np.testing.assert_allclose(tokens, (np.arange(rows) + 0.5) / rows * vocab, atol=vocab * 1e-4)


class TestScore:
    @pytest.mark.parametrize("vocab", [12, 300])
    def test_against_numpy(self, vocab, rng):
        logits = np.round(4 * rng.normal(size=(9, vocab)), 1).astype(np.float32)  # with ties
        tokens = rng.integers(0, vocab, 9).astype(np.int32)
        own, ranks, top_tokens, top = map(np.asarray, jax.jit(sampler.score)(logits, tokens))
        wide = logits.astype(np.float64)
        logprobs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
        np.testing.assert_allclose(own, logprobs[np.arange(9), tokens], atol=1e-5)
        np.testing.assert_array_equal(ranks, 1 + (logits > logits[np.arange(9), tokens][:, None]).sum(-1))
        order = np.argsort(-logits, axis=-1, kind="stable")[:, : min(sampler.TOP_LOGPROBS, vocab)]
        np.testing.assert_array_equal(top_tokens, order)
        np.testing.assert_allclose(top, np.take_along_axis(logprobs, order, -1), atol=1e-5)

    def test_raw_distribution_whatever_the_options(self, rng):
        """Log-probabilities are the model's own: before penalties, temperature and filters."""
        logits = rng.normal(size=(4, VOCAB)).astype(np.float32)
        inputs = make_inputs(4, temperature=3.0, top_k=2, banned=np.full((4, 4), 1), any_logprobs=True)
        out, _ = sample(logits, state_for(4), inputs)
        want = sampler.score(jnp.asarray(logits), out.tokens)
        np.testing.assert_allclose(out.logprobs, want[0], atol=1e-6)
        np.testing.assert_array_equal(out.ranks, want[1])

    def test_not_asked_for(self, rng):
        out, _ = sample(rng.normal(size=(4, VOCAB)).astype(np.float32), state_for(4), make_inputs(4))
        assert out.top_logprobs.shape == (4, sampler.TOP_LOGPROBS)
        assert not np.asarray(out.logprobs).any()


def test_argmax_takes_the_lowest_index(rng):
    x = rng.integers(0, 5, (200, 33)).astype(np.float32)
    x[0] = -np.inf
    np.testing.assert_array_equal(jax.jit(sampler.argmax)(x), x.argmax(-1))
