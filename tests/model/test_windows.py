"""Models with windows, and StreamingLLM over a model without: the paged path against the cache-less model, and
the cache-less model against the paper's cache written out in NumPy."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specax.model import Decoder, load_model
from specax.model.batch import DecodeSegment, ForwardBatch, PrefillSegment
from specax.model.layers import rotary_frequencies
from specax.paged import CacheSpec, KVCache
from specax.pallas_kernels import Window
from specax.sharding import Layout, make_mesh
from tests.conftest import GOLDENS, TINY

PAGE = 4
COLUMNS, PAGES = 12, 64
STREAMING = Window(8, sinks=6, granularity=PAGE)
CASES: dict[str, tuple[Any, Window | None]] = {  # windows of TINY's two layers, and the one over all layers
    "interleaved": ((9, None), None),
    "two_sizes": ((3, 14), None),
    "streaming": ((), STREAMING),
}


def make(windows: Any, layout: Layout | None = None) -> Decoder:
    return Decoder(dataclasses.replace(TINY, windows=windows), rngs=nnx.Rngs(7), layout=layout or Layout())


@partial(jax.jit, donate_argnums=0)
def fill(kv: KVCache, pages: np.ndarray) -> KVCache:
    """NaN in these pages [groups, count]."""
    return KVCache(*(tuple(x.at[:, p].set(np.nan) for x, p in zip(xs, pages, strict=True)) for xs in (kv.k, kv.v)))


class Device:
    """A cache driven by hand: pages on each KV group's own table, given back once no query sees them.

    What is given back, and the trash page, is filled with NaN.
    """

    def __init__(self, model: Decoder, window: Window | None, rows: int):
        groups = model.config.kv_groups
        self.windows = [window if g.window is None else Window(g.window) for g in groups]
        specs = tuple(
            CacheSpec(len(g.layers), model.padded.num_kv_heads, TINY.head_dim, PAGE, "float32") for g in groups
        )
        self.kv = KVCache.create(specs, tuple(PAGES + i for i in range(len(groups))), model.layout)
        rng = np.random.default_rng(1)
        self.free = [rng.permutation(np.arange(1, PAGES + i)).tolist() for i in range(len(groups))]
        self.tables = np.zeros((len(groups), rows, COLUMNS), np.int32)
        self.kv = fill(self.kv, np.zeros((len(groups), COLUMNS), np.int32))
        graphdef, state = nnx.split(model)

        def step(state: Any, kv: KVCache, batch: ForwardBatch) -> Any:
            hidden, _, kv = nnx.merge(graphdef, state).forward(kv, batch, window=window)
            return hidden, kv

        self.step, self.state = jax.jit(step, donate_argnums=1), state

    def poison(self, pages: list[list[int]]) -> None:
        if any(pages):
            padded = np.zeros((len(pages), COLUMNS), np.int32)  # page 0 may be filled again
            for row, ids in zip(padded, pages, strict=True):
                row[: len(ids)] = ids
            self.kv = fill(self.kv, padded)

    def reserve(self, row: int, start: int, stop: int) -> np.ndarray:
        """Gives back what queries from `start` on don't see, grows the tables; slots [groups, stop − start]."""
        back: list[list[int]] = []
        for group, window in enumerate(self.windows):
            table, back = self.tables[group, row], [*back, []]
            for column in range(-(-stop // PAGE)):
                first, end = column * PAGE, (column + 1) * PAGE
                needed = window is None or end > window.start(start) or first < window.sinks
                if needed and not table[column]:
                    table[column] = self.free[group].pop()
                elif not needed and table[column]:
                    back[-1].append(int(table[column]))
                    table[column] = 0
        self.poison(back)
        positions = np.arange(start, stop)
        return (self.tables[:, row, positions // PAGE] * PAGE + positions % PAGE).astype(np.int32)

    def prefill(self, chunks: dict[int, tuple[np.ndarray, int]], width: int) -> list[np.ndarray]:
        """Runs each row's (tokens, position of the first); hidden states of each."""
        rows = self.tables.shape[1]
        flat, positions = np.zeros((2, width), np.int32)
        slots = np.zeros((len(self.windows), width), np.int32)
        starts, context, at = np.zeros(rows + 1, np.int32), np.zeros(rows, np.int32), 0
        for row in range(rows):
            tokens, first = chunks.get(row, (np.zeros(0, np.int32), 0))
            end = at + len(tokens)
            flat[at:end], positions[at:end] = tokens, np.arange(first, first + len(tokens))
            slots[:, at:end] = self.reserve(row, first, first + len(tokens))
            context[row], starts[row + 1], at = first, end, end
        prefill = PrefillSegment(starts, self.tables.copy(), context)
        batch = ForwardBatch(flat, positions, slots, np.zeros(1, np.int32), prefill=prefill)
        hidden, self.kv = self.step(self.state, self.kv, batch)
        return [np.asarray(hidden[a:b]) for a, b in itertools.pairwise(starts)]

    def decode(self, tokens: np.ndarray, contexts: list[int], parents: list[int]) -> np.ndarray:
        """One tree per row, tokens [rows, N], node i under parents[i]; context −N is padding. [rows, N, hidden]."""
        rows, n = tokens.shape
        sees = np.eye(n, dtype=bool)
        for i in range(1, n):
            sees[i] |= sees[parents[i]]
        depth = sees.sum(1) - 1
        slots, positions = np.zeros((len(self.windows), rows, n), np.int32), np.zeros((rows, n), np.int32)
        for row, context in enumerate(contexts):
            if context >= 0:
                slots[:, row] = self.reserve(row, context, context + n)
                positions[row] = context + depth
        packed = (sees * (1 << np.arange(n))).sum(1).astype(np.uint32)
        mask = np.broadcast_to(packed[None, :, None], (rows, n, 1)) if n > 1 else None
        segment = DecodeSegment(self.tables.copy(), np.asarray(contexts, np.int32), mask, query_len=n)
        batch = ForwardBatch(
            tokens.reshape(-1), positions.reshape(-1), slots.reshape(len(self.windows), -1),
            np.zeros(1, np.int32), decode=segment,
        )  # fmt: skip
        hidden, self.kv = self.step(self.state, self.kv, batch)
        return np.asarray(hidden).reshape(rows, n, -1)


@partial(jax.jit, static_argnums=(0, 3))
def dense_op(graphdef: Any, state: Any, tokens: jax.Array, window: Window | None) -> tuple[jax.Array, jax.Array]:
    out = nnx.merge(graphdef, state)(tokens, window=window)
    return out.hidden, out.logits


def dense(model: Decoder, tokens: np.ndarray, window: Window | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and logits of the cache-less model, padded so that few shapes are compiled."""
    rows, length = tokens.shape
    padded = np.zeros((-(-rows // 2) * 2, 44), np.int32)
    padded[:rows, :length] = tokens
    hidden, logits = dense_op(*nnx.split(model), jnp.asarray(padded), window)
    return np.asarray(hidden)[:rows, :length], np.asarray(logits)[:rows, :length]


@pytest.mark.parametrize("name", [*CASES, "interleaved_on_a_mesh", "streaming_on_a_mesh"])
def test_paged_forward_equals_the_cacheless_model(name: str) -> None:
    """Rows of different lengths, prefilled in chunks and decoded, while pages are given back behind them."""
    case, _, mesh = name.partition("_on_a_")
    windows, window = CASES[case]
    model = make(windows, Layout(make_mesh(tensor=2)) if mesh else None)
    tokens = np.random.default_rng(2).integers(0, TINY.vocab_size, (2, 44)).astype(np.int32)
    want, _ = dense(make(windows), tokens, window)
    device = Device(model, window, rows=3)
    done = [0, 0]
    for chunk in ((17, 2), (1, 0), (15, 6)):
        parts = {row: (tokens[row, done[row] : done[row] + c], done[row]) for row, c in enumerate(chunk)}
        got = device.prefill(parts, width=24)
        for row, c in enumerate(chunk):
            np.testing.assert_allclose(got[row], want[row, done[row] : done[row] + c], atol=2e-5)
            done[row] += c
    for _ in range(6):
        flat = np.array([tokens[0, done[0]], tokens[1, done[1]], 0], np.int32)[:, None]
        nodes = device.decode(flat, [*done, -1], [0])
        for row in range(2):
            np.testing.assert_allclose(nodes[row, 0], want[row, done[row]], atol=2e-5)
            done[row] += 1
    bounded = [w is not None for w in device.windows]
    held = (device.tables[:, 0] > 0).sum(1)
    assert all(h <= 6 if b else h == 10 for h, b in zip(held, bounded, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_draft_trees(name: str) -> None:
    """Each node's hidden state is that of its own path behind the context, which windows count by depth."""
    windows, window = CASES[name]
    model = make(windows)
    rng = np.random.default_rng(3)
    contexts, parents = [30, 5], [0, 0, 1, 1, 0, 3, 5]
    prompt = rng.integers(0, TINY.vocab_size, (2, 30)).astype(np.int32)
    tree = rng.integers(0, TINY.vocab_size, (3, len(parents))).astype(np.int32)
    device = Device(model, window, rows=3)
    device.prefill({row: (prompt[row, :c], 0) for row, c in enumerate(contexts)}, width=36)
    got = device.decode(tree, [*contexts, -len(parents)], parents)
    for row, context in enumerate(contexts):
        lines = np.zeros((len(parents), context + len(parents)), np.int32)
        lines[:, :context] = prompt[row, :context]
        depth = np.zeros(len(parents), int)
        for node in range(len(parents)):
            path = [node]
            while path[0]:
                path.insert(0, parents[path[0]])
            depth[node] = len(path) - 1
            lines[node, context : context + len(path)] = tree[row, path]
        want, _ = dense(model, lines, window)
        np.testing.assert_allclose(got[row], want[np.arange(len(parents)), context + depth], atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_windows_count_in_each_packed_segment(name: str) -> None:
    windows, window = CASES[name]
    model = make(windows)
    tokens = np.random.default_rng(4).integers(0, TINY.vocab_size, 36).astype(np.int32)
    segments = np.repeat([3, 1], [14, 22]).astype(np.int32)
    graphdef, state = nnx.split(model)
    call = jax.jit(lambda state, t, s: nnx.merge(graphdef, state)(t, segment_ids=s, window=window).hidden)
    packed = call(state, tokens, segments)
    for part in (slice(0, 14), slice(14, 36)):
        np.testing.assert_allclose(packed[part], dense(model, tokens[None, part], window)[0][0], atol=2e-5)


def streaming_llm(model: Decoder, tokens: np.ndarray, window: Window) -> np.ndarray:
    """StreamingLLM (Xiao et al. 2023, section 3.2) token by token in NumPy: logits [length, vocab].

    The cache of a layer is a list of keys before rotation, with their values. It keeps the sinks, and drops
    the oldest `granularity` others while `size` of them remain. Keys and query are rotated to the places that
    they have in the list.
    """
    c = model.config
    frequencies = np.asarray(rotary_frequencies(c))

    def rotated(x: np.ndarray, place: int) -> np.ndarray:
        turn = np.exp(1j * place * frequencies) * (x[..., : c.head_dim // 2] + 1j * x[..., c.head_dim // 2 :])
        return np.concatenate([turn.real, turn.imag], axis=-1)

    def norm(x: np.ndarray, weight: Any) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + c.rms_norm_eps) * np.asarray(weight[...], np.float64)

    def matrix(parameter: Any) -> np.ndarray:
        return np.asarray(parameter[...], np.float64)

    caches: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in model.layers]
    logits = []
    for token in tokens.tolist():
        x = matrix(model.embed)[token]
        for layer, cache in zip(model.layers, caches, strict=True):
            qkv = np.einsum("kgdh,h->kgd", matrix(layer.attention.qkv), norm(x, layer.input_norm.weight))
            cache.append((qkv[:, -2], qkv[:, -1]))
            while len(cache) - window.sinks - window.granularity >= window.size:
                del cache[window.sinks : window.sinks + window.granularity]
            query = rotated(qkv[:, :-2], len(cache) - 1)  # [kv_heads, group, head_dim]
            keys = np.stack([rotated(key, place) for place, (key, _) in enumerate(cache)])
            scores = np.einsum("kgd,nkd->kgn", query, keys) / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            heads = np.einsum("kgn,nkd->kgd", weights, np.stack([value for _, value in cache]))
            x = x + np.einsum("hkgd,kgd->h", matrix(layer.attention.out), heads)
            y = norm(x, layer.post_attention_norm.weight)
            gate = matrix(layer.mlp.gate) @ y
            x = x + matrix(layer.mlp.down) @ (gate / (1 + np.exp(-gate)) * (matrix(layer.mlp.up) @ y))
        logits.append(matrix(model.head) @ norm(x, model.norm.weight))
    return np.stack(logits)


@pytest.mark.parametrize("window", [Window(8, 4), Window(8, 4, 4), Window(5, 1), Window(6), Window(40, 4, 4)], ids=str)
def test_streaming_is_the_papers(window: Window, tiny_model: Decoder) -> None:
    tokens = np.random.default_rng(5).integers(0, TINY.vocab_size, 44).astype(np.int32)
    got, full = (dense(tiny_model, tokens[None], w)[1][0] for w in (window, None))
    np.testing.assert_allclose(got, streaming_llm(tiny_model, tokens, window), atol=1e-4)
    gap = np.abs(got - full).max(-1)
    bites = window.sinks + window.size + window.granularity - 1  # from this position on at the latest
    assert gap[: window.sinks + window.size].max() < 1e-5
    assert bites >= len(tokens) or gap[bites:].min() > 1e-3


@pytest.mark.parametrize("case", ["mistral_window", "ministral"])
def test_golden_windows_matter(case: str) -> None:
    """The transformers goldens are no test of windows if a model without them gives the same."""
    with np.load(GOLDENS / case / "golden.npz") as data:
        golden = dict(data)
    model = load_model(GOLDENS / case, "float32")
    assert 8 in model.config.windows
    model.config = dataclasses.replace(model.config, windows=())
    gap = np.abs(dense(model, golden["tokens"])[1] - golden["logits"]).max(-1)
    assert gap[:, :8].max() < 1e-4 and gap[:, 9:].min() > 1e-3


def test_streaming_over_a_model_with_windows_is_refused() -> None:
    model = make((6, None))
    with pytest.raises(ValueError, match=r"Window\(size=8.*windows of their own: \(6, None\)"):
        model(jnp.zeros(3, jnp.int32), window=STREAMING)
