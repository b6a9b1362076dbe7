"""The device plane's door: compiled step functions over the model's parameters, cache and sampler state.

Each function is compiled once per bucket. Only the cache and the sampler state are donated. The functions
of an ordinary step (`forward`, `logits`, `sample`, `load_slot`, `move_pages`) do not wait for the device.
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specax.decoding import sampler
from specax.decoding.batch import empty_batch
from specax.decoding.buckets import Buckets
from specax.decoding.page_mover import PageMover
from specax.decoding.sampling_table import SamplerInputs, SamplingTable
from specax.model import Decoder
from specax.model.batch import ForwardBatch
from specax.paged import CacheSpec, KVCache, PageOp
from specax.pallas_kernels import Window

SCORE_ROWS = 32  # prompt tokens scored at a time


class CompileCounter:
    """Counts backend compilations, and their seconds, that happen inside `counting()` in this thread."""

    _active = threading.local()
    _listening = False

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        if not CompileCounter._listening:
            jax.monitoring.register_event_duration_secs_listener(CompileCounter._heard)
            CompileCounter._listening = True

    @staticmethod
    def _heard(event: str, duration_secs: float, **_: Any) -> None:
        counter = getattr(CompileCounter._active, "counter", None)
        if counter is not None and event == "/jax/core/compile/backend_compile_duration":
            counter.count += 1
            counter.seconds += duration_secs

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        before = getattr(CompileCounter._active, "counter", None)
        CompileCounter._active.counter = self
        try:
            yield
        finally:
            CompileCounter._active.counter = before


def step_functions(
    graphdef: nnx.GraphDef, tree: jax.tree_util.PyTreeDef, window: Window | None = None
) -> tuple[Callable[..., tuple[jax.Array, jax.Array, KVCache]], Callable[..., jax.Array]]:
    """What a step computes, over the model's flattened parameters; not compiled yet.

    Returns:
      forward(params, kv, batch) → hidden of logit rows, hidden, kv (to be donated); logits(params, hidden).
    """

    def merged(params: list[jax.Array]) -> Decoder:
        return nnx.merge(graphdef, jax.tree.unflatten(tree, params))

    def forward(params: list[jax.Array], kv: KVCache, batch: ForwardBatch) -> tuple[jax.Array, jax.Array, KVCache]:
        hidden, _, kv = merged(params).forward(kv, batch, window=window)
        return hidden[batch.logit_rows], hidden, kv

    def logits(params: list[jax.Array], hidden: jax.Array) -> jax.Array:
        decoder = merged(params)
        return decoder.layout.constrain(decoder.logits(hidden), "rows", None)

    return forward, logits


class Runner:
    """Runs steps of one model. `kv` and `sampler_state` are always the newest ones; the old are donated."""

    def __init__(
        self,
        model: Decoder,
        specs: tuple[CacheSpec, ...],
        num_pages: tuple[int, ...],
        slots: int,
        window: Window | None = None,
    ):
        """One spec and number of pages per KV group. `window`: StreamingLLM's, of all layers."""
        self.compiles = CompileCounter()
        self.vocab_size = model.config.vocab_size
        graphdef, state = nnx.split(model)
        # Flattened once: an nnx.State costs thousands of Python calls to flatten, and steps are short.
        self._params, tree = jax.tree.flatten(state)

        forward, logits = step_functions(graphdef, tree, window)

        def score(params: list[jax.Array], hidden: jax.Array, rows: jax.Array, targets: jax.Array) -> Any:
            values = logits(params, hidden[rows])
            return sampler.score(values, targets), jax.nn.log_softmax(values, axis=-1)

        self._forward = jax.jit(forward, donate_argnums=1)
        self._logits = jax.jit(logits)
        self._sample = jax.jit(sampler.sample, donate_argnums=1)
        self._candidates = jax.jit(sampler.candidates)
        self._load_slot = jax.jit(sampler.load_slot, donate_argnums=0)
        self._log_softmax = jax.jit(lambda x: jax.nn.log_softmax(x, axis=-1))
        self._score = jax.jit(score)
        self._mover = PageMover(model.layout)

        def fresh() -> tuple[KVCache, sampler.SamplerState]:
            create = partial(sampler.SamplerState.create, slots + 1, self.vocab_size)
            state = jax.jit(create, out_shardings=model.layout.placement((None, None)))()
            return KVCache.create(specs, num_pages, model.layout), state

        self._fresh = fresh
        with self.compiles.counting():
            self.kv, self.sampler_state = fresh()

    def check_weights(self, model: Decoder) -> None:
        """Raises ValueError unless a model's parameters have the shapes and dtypes of those in use."""
        params = jax.tree.leaves(nnx.split(model)[1])
        if (have := len(params)) != (need := len(self._params)):
            raise ValueError(f"the new model has {have} parameters, the engine's has {need}")
        for old, new in zip(self._params, params, strict=True):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ValueError(f"a parameter is {new.dtype}{new.shape} in the new model, {old.dtype}{old.shape} here")

    def replace_weights(self, model: Decoder) -> None:
        """Goes on with another model's parameters, which `check_weights` has found fitting, where the old ones lie."""
        new = jax.tree.leaves(nnx.split(model)[1])
        self._params = [jax.device_put(n, old.sharding) for n, old in zip(new, self._params, strict=True)]

    def fingerprint(self) -> str:
        """A digest of every parameter's bits, equal for equal weights whatever they were loaded from."""
        sums = jax.jit(lambda params: [_checksum(p) for p in params])(self._params)
        digest = hashlib.blake2b(digest_size=16)
        for param, value in zip(self._params, sums, strict=True):
            digest.update(f"{param.dtype}{param.shape}{np.asarray(value).tolist()}".encode())
        return digest.hexdigest()

    def recover(self) -> None:
        """After a call that raised: makes the cache and sampler state anew if they went with it."""
        try:
            jax.block_until_ready((self.kv, self.sampler_state))  # raises for what was deleted or never computed
        except Exception:
            del self.kv, self.sampler_state  # before the new ones are made: there may be no room for both
            with self.compiles.counting():
                self.kv, self.sampler_state = self._fresh()

    def forward(self, batch: ForwardBatch) -> tuple[jax.Array, jax.Array]:
        """One pass over the model; returns hidden states of the logit rows, and of every token."""
        with self.compiles.counting():
            rows, hidden, self.kv = self._forward(self._params, self.kv, batch)
        return rows, hidden

    def logits(self, hidden: jax.Array) -> jax.Array:
        with self.compiles.counting():
            return self._logits(self._params, hidden)

    def sample(self, logits: jax.Array, inputs: SamplerInputs) -> sampler.SamplerOutput:
        with self.compiles.counting():
            out, self.sampler_state = self._sample(logits, self.sampler_state, inputs)
        return out

    def candidates(self, logits: jax.Array, inputs: SamplerInputs) -> tuple[np.ndarray, np.ndarray]:
        """The next tokens of beams, int32 [rows, top], and their log-probabilities, on the host."""
        with self.compiles.counting():
            tokens, logprobs = self._candidates(logits, self.sampler_state, inputs)
        return np.asarray(tokens), np.asarray(logprobs)

    def log_softmax(self, logits: jax.Array) -> np.ndarray:
        """Log-probabilities of the whole vocabulary, on the host: float32 [rows, vocab]."""
        with self.compiles.counting():
            return np.asarray(self._log_softmax(logits))

    def load_slot(self, slot: int, tokens: np.ndarray, prompt_len: int, length: int, bias: np.ndarray) -> None:
        """Gives a sampler slot a sequence's history and biases."""
        with self.compiles.counting():
            ints = np.int32(slot), tokens, np.int32(prompt_len), np.int32(length)
            self.sampler_state = self._load_slot(self.sampler_state, *ints, bias)

    def score(self, hidden: jax.Array, rows: np.ndarray, targets: np.ndarray) -> Iterator[tuple[Any, jax.Array]]:
        """Scores prompt tokens in blocks of SCORE_ROWS, the last one padded.

        Yields what `sampler.score` gives, and the log-probabilities of the whole vocabulary, on the device.
        """
        for at in range(0, len(rows), SCORE_ROWS):
            padded = np.zeros((2, SCORE_ROWS), np.int32)
            part = slice(at, min(at + SCORE_ROWS, len(rows)))
            padded[0, : part.stop - at], padded[1, : part.stop - at] = rows[part], targets[part]
            with self.compiles.counting():
                yield self._score(self._params, hidden, padded[0], padded[1])

    def move_pages(self, ops: Sequence[PageOp]) -> None:
        """Copies, saves and loads pages, in order."""
        with self.compiles.counting():
            self.kv = self._mover.run(self.kv, ops)

    def bytes_per_second(self) -> float:
        """Between device and host memory; measured now."""
        rate, self.kv = self._mover.bytes_per_second(self.kv)
        return rate

    def warmup(
        self, buckets: Buckets, max_len: int, tiers: bool, progress: Callable[[int, int], None] | None = None
    ) -> float:
        """Compiles every program by running it on padding, and returns the seconds it took.

        Padding writes only to the trash page, so the cache of running requests is untouched.
        """
        start = time.monotonic()
        shapes = buckets.shapes()
        inert = SamplingTable(buckets.max_rows, self.vocab_size)
        for i, shape in enumerate(shapes):
            rows, hidden = self.forward(empty_batch(shape, len(self.kv.k)))
            logits = self.logits(rows)
            self.sample(logits, inert.inputs([], shape.logit_rows)).tokens.block_until_ready()
            self.candidates(logits, inert.inputs([], shape.logit_rows))
            self.log_softmax(logits)
            list(self.score(hidden, np.zeros(1, np.int32), np.zeros(1, np.int32)))
            if progress:
                progress(i + 1, len(shapes))
        self.load_slot(inert.inert, np.zeros(max_len, np.int32), 0, 0, np.zeros(self.vocab_size, np.float32))
        with self.compiles.counting():
            self.kv = self._mover.warmup(self.kv, tiers)
        return time.monotonic() - start



def _checksum(x: jax.Array) -> jax.Array:
    """Two sums over the bits of an array, one of them weighted by position, modulo 2³²."""
    bits = jax.lax.bitcast_convert_type(x.reshape(-1), jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    weights = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(2654435761) | jnp.uint32(1)
    return jnp.stack([bits.sum(dtype=jnp.uint32), (bits * weights).sum(dtype=jnp.uint32)])
