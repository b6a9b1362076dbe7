"""The decoder against Hugging Face transformers' numbers (tests/goldens), its two entry points against each
other, and loading."""

import dataclasses
import json
import pathlib
import shutil
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from specax import LLM, CheckpointError, EngineConfig, SamplingParams
from specax.model import Decoder, DecoderOutput, load_model
from specax.model.batch import DecodeSegment, ForwardBatch, PrefillSegment
from specax.paged import CacheSpec, KVCache, PagePool, PageTable
from specax.sharding import Layout
from tests.conftest import GOLDENS, TINY

CASES = sorted(path.name for path in GOLDENS.iterdir() if (path / "golden.npz").exists())
TIE = 1e-4  # two logits this close may be swapped by rounding


def golden_arrays(case: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / case / "golden.npz") as data:
        return dict(data)


def run(model: Decoder, *args: Any, **kwargs: Any) -> DecoderOutput:
    """The cache-less model under jit."""
    graphdef, state = nnx.split(model)
    capture = kwargs.pop("capture_layers", ())

    def call(s: Any, a: Any, k: Any) -> DecoderOutput:
        return nnx.merge(graphdef, s)(*a, **{**k, "capture_layers": capture})

    return jax.jit(call)(state, args, kwargs)


@pytest.mark.parametrize("case", CASES)
class TestAgainstTransformers:
    def test_logits_and_hidden_states(self, case):
        want = golden_arrays(case)
        model = load_model(GOLDENS / case, "float32")
        layers = range(model.config.num_layers) if "layer_hidden" in want else ()
        out = run(model, want["tokens"], capture_layers=layers)
        np.testing.assert_allclose(out.logits, want["logits"], atol=2e-4)
        np.testing.assert_allclose(out.hidden, want["hidden"], atol=2e-4)
        assert set(out.captured) == set(layers)
        for layer in layers:
            np.testing.assert_allclose(out.captured[layer], want["layer_hidden"][layer], atol=2e-4)

    def test_greedy_through_the_engine(self, case):
        want = golden_arrays(case)
        # Sizes that take two programs only; other tests vary chunks and batches.
        config = EngineConfig(page_size=8, num_pages=64, max_rows=3, max_batched_tokens=72)
        llm = LLM.from_pretrained(GOLDENS / case, dtype="float32", engine=config)
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        outs = llm.generate([row.tolist() for row in want["tokens"]], params)
        for out, tokens, gaps in zip(outs, want["greedy"], want["greedy_gap"], strict=True):
            sure = len(gaps) if gaps.min() > TIE else int(np.argmax(gaps <= TIE))
            assert out.outputs[0].token_ids[:sure] == tokens[:sure].tolist()
            assert sure == len(gaps)  # (These goldens hold no tie.)


class TestPackedSequences:
    @pytest.fixture(scope="class")
    def tokens(self) -> np.ndarray:
        return np.random.default_rng(3).integers(0, TINY.vocab_size, (1, 24)).astype(np.int32)

    def test_equal_separate_ones(self, tiny_model, tokens):
        segments = np.repeat([4, 2, 9], [7, 12, 5])[None].astype(np.int32)
        packed = run(tiny_model, tokens, segment_ids=segments)
        for a, b in ((0, 7), (7, 19), (19, 24)):
            alone = run(tiny_model, tokens[:, a:b])
            np.testing.assert_allclose(packed.logits[:, a:b], alone.logits, atol=1e-5)
            np.testing.assert_allclose(packed.hidden[:, a:b], alone.hidden, atol=1e-5)

    def test_an_id_used_twice_is_two_segments(self, tiny_model, tokens):
        segments = np.repeat([1, 2, 1], [7, 12, 5])[None].astype(np.int32)
        packed = run(tiny_model, tokens, segment_ids=segments)
        np.testing.assert_allclose(packed.logits[:, 19:], run(tiny_model, tokens[:, 19:]).logits, atol=1e-5)

    def test_padding_does_not_matter(self, tiny_model, tokens):
        rng = np.random.default_rng(4)
        segments = np.where(np.arange(24) < 15, 1, 0)[None].astype(np.int32)
        first = run(tiny_model, tokens, segment_ids=segments).logits[:, :15]
        other = np.where(segments == 1, tokens, rng.integers(0, TINY.vocab_size, (1, 24))).astype(np.int32)
        np.testing.assert_array_equal(first, run(tiny_model, other, segment_ids=segments).logits[:, :15])
        np.testing.assert_allclose(first, run(tiny_model, tokens[:, :15]).logits, atol=1e-5)
        # On the left too, as long as it is a segment of its own.
        left = run(tiny_model, tokens, segment_ids=1 - segments[:, ::-1]).logits[:, 9:]
        np.testing.assert_allclose(left, run(tiny_model, tokens[:, 9:]).logits, atol=1e-5)

    def test_positions_are_rotary_phases(self, tiny_model, tokens):
        """Only differences of positions matter; explicit ones replace those counted from the start."""
        order = np.arange(24, dtype=np.int32)[None]
        plain = run(tiny_model, tokens).logits
        np.testing.assert_array_equal(plain, run(tiny_model, tokens, positions=order).logits)
        np.testing.assert_allclose(plain, run(tiny_model, tokens, positions=order + 50).logits, atol=1e-3)
        assert np.abs(plain - run(tiny_model, tokens, positions=order * 2).logits).max() > 1e-2

    def test_causal(self, tiny_model, tokens):
        changed = tokens.copy()
        changed[0, 10] = (changed[0, 10] + 1) % TINY.vocab_size
        a, b = run(tiny_model, tokens).logits, run(tiny_model, changed).logits
        np.testing.assert_array_equal(a[:, :10], b[:, :10])
        assert np.abs(a[:, 10:] - b[:, 10:]).max(-1).min() > 0


class TestTransformations:
    @pytest.fixture(scope="class")
    def biased(self) -> Decoder:
        """Every kind of parameter: biases, an untied head, and norms and biases that are not constant."""
        config = dataclasses.replace(TINY, attention_bias=True, mlp_bias=True)
        model = Decoder(config, rngs=nnx.Rngs(1), layout=Layout())
        graphdef, state = nnx.split(model)
        keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(state))))
        noisy = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), state)
        return nnx.merge(graphdef, noisy)

    @staticmethod
    def loss(state: Any, graphdef: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, state)(tokens).logits[:, :-1]
        logprobs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], -1).mean()

    def test_grad(self, biased, rng):
        graphdef, state = nnx.split(biased)
        tokens = jnp.asarray(rng.integers(0, TINY.vocab_size, (2, 12)), jnp.int32)
        value_and_grad = jax.jit(jax.value_and_grad(lambda s: self.loss(s, graphdef, tokens)))
        _, grads = value_and_grad(state)
        flat = dict(nnx.to_flat_state(grads))
        assert len(flat) == 3 + TINY.num_layers * 12
        for path, grad in flat.items():
            value = np.asarray(grad[...])
            assert np.isfinite(value).all(), path
            assert np.abs(value).max() > 1e-8, path  # (A key's bias matters only through its rotation.)
        # Along each parameter's own gradient the loss rises at the gradient's rate.
        inner = ("layers", 0, "attention", "qkv"), ("layers", 1, "mlp", "down_bias")
        for path in (*inner, ("embed",), ("norm", "weight")):
            direction = flat[path][...] / jnp.linalg.norm(flat[path][...].reshape(-1))

            def shifted(epsilon: float, path: Any = path, direction: jax.Array = direction) -> Any:
                params = dict(nnx.to_flat_state(state))
                params[path] = params[path].replace(params[path][...] + epsilon * direction)
                return nnx.from_flat_state(params)

            step = 1e-2
            slope = (value_and_grad(shifted(step))[0] - value_and_grad(shifted(-step))[0]) / (2 * step)
            np.testing.assert_allclose(slope, jnp.linalg.norm(flat[path][...].reshape(-1)), rtol=2e-2, atol=1e-4)

    def test_vmap_over_inputs(self, biased, rng):
        graphdef, state = nnx.split(biased)
        tokens = jnp.asarray(rng.integers(0, TINY.vocab_size, (3, 2, 9)), jnp.int32)
        segments = jnp.asarray(np.sort(rng.integers(0, 3, (3, 2, 9))), jnp.int32)

        def call(t: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = nnx.merge(graphdef, state)(t, segment_ids=s, capture_layers=[0])
            return out.logits, out.captured[0]

        got = jax.jit(jax.vmap(call))(tokens, segments)
        for i in range(3):
            for many, one in zip(got, call(tokens[i], segments[i]), strict=True):
                np.testing.assert_allclose(many[i], one, atol=1e-5)

    def test_vmap_over_parameters(self, biased, rng):
        """Per-example gradients, and ensembles."""
        graphdef, state = nnx.split(biased)
        many = jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), state)
        tokens = jnp.asarray(rng.integers(0, TINY.vocab_size, (2, 9)), jnp.int32)
        losses = jax.jit(jax.vmap(lambda s: self.loss(s, graphdef, tokens)))(many)
        for i in range(2):
            one = jax.tree.map(lambda x, i=i: x[i], many)
            np.testing.assert_allclose(losses[i], self.loss(one, graphdef, tokens), atol=1e-5)
        each = jax.jit(jax.vmap(jax.grad(lambda s, t: self.loss(s, graphdef, t[None])), (None, 0)))(state, tokens)
        whole = jax.grad(lambda s: self.loss(s, graphdef, tokens))(state)
        mean = jax.tree.map(lambda x: x.mean(0), each)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), mean, whole)

    def test_an_nnx_training_step(self, biased, rng):
        """nnx's own transformations see the parameters as such."""
        tokens = jnp.asarray(rng.integers(0, TINY.vocab_size, (2, 9)), jnp.int32)
        grads = nnx.jit(nnx.grad(lambda m, t: m(t).logits.mean()))(biased, tokens)
        assert len(jax.tree.leaves(grads)) == 3 + TINY.num_layers * 12
        assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))

    @pytest.mark.parametrize(("layers", "bad"), [([2], 2), ([-1], -1), ([0, 7], 7)])
    def test_capture_layers_out_of_range(self, tiny_model, layers, bad):
        with pytest.raises(ValueError, match=rf"\[{bad}\] out of range.*layers 0\.\.1"):
            tiny_model(jnp.zeros((1, 3), jnp.int32), capture_layers=layers)


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("chunks", [(22,), (5, 7, 1, 9), (1, 1, 20)], ids=str)
def test_paged_forward_equals_the_cacheless_model(tiny_model, page_size, chunks):
    """Prefill in chunks, then decode, beside another sequence in the batch and one of padding."""
    length, decodes, width = sum(chunks), 4, 66
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, TINY.vocab_size, (2, length + decodes)).astype(np.int32)
    want = run(tiny_model, tokens, capture_layers=(1,))
    spec = CacheSpec(TINY.num_layers, TINY.num_kv_heads, TINY.head_dim, page_size, "float32")
    pool = PagePool(32)
    kv = KVCache.create((spec,), (32,), Layout())
    tables = [PageTable((pool,), page_size) for _ in range(2)]
    graphdef, state = nnx.split(tiny_model)
    step = jax.jit(lambda kv, b: nnx.merge(graphdef, state).forward(kv, b, (1,)), donate_argnums=0)

    def page_table(rows: int) -> np.ndarray:
        out = np.zeros((rows, 12), np.int32)
        for row, table in enumerate(tables):
            out[row, : len(table)] = table.pages[0]
        return out

    def check(out: Any, captured: Any, row: int, where: slice, positions: slice) -> None:
        np.testing.assert_allclose(out[where], want.hidden[row, positions], atol=2e-5)
        np.testing.assert_allclose(captured[1][where], want.captured[1][row, positions], atol=2e-5)

    at = 0
    for chunk in chunks:  # both rows take the same chunk; the third row and the last tokens are padding
        pages = [table.reserve(at, at + chunk) for table in tables]
        assert None not in pages
        flat, positions, slots = np.zeros((3, width), np.int32)
        flat[: 2 * chunk] = tokens[:, at : at + chunk].reshape(-1)
        positions[: 2 * chunk] = np.tile(np.arange(at, at + chunk), 2)
        slots[: 2 * chunk] = np.concatenate([t.slots(at, at + chunk)[0] for t in tables])
        starts = np.array([0, chunk, 2 * chunk, 2 * chunk], np.int32)
        segment = PrefillSegment(starts, page_table(3)[None], np.array([at, at, 0], np.int32))
        batch = ForwardBatch(flat, positions, slots[None], np.zeros(1, np.int32), prefill=segment)
        hidden, captured, kv = step(kv, batch)
        for row in range(2):
            check(hidden, captured, row, slice(row * chunk, (row + 1) * chunk), slice(at, at + chunk))
        at += chunk
    for at in range(length, length + decodes):
        for table in tables:
            assert table.reserve(at, at + 1) is not None
        slots = np.array([*(t.slots(at, at + 1)[0, 0] for t in tables), 0], np.int32)
        flat = np.array([*tokens[:, at], 0], np.int32)
        decode = DecodeSegment(page_table(3)[None], np.array([at, at, -1], np.int32))
        positions = np.array([at, at, 0], np.int32)
        batch = ForwardBatch(flat, positions, slots[None], np.zeros(1, np.int32), decode=decode)
        hidden, captured, kv = step(kv, batch)
        for row in range(2):
            check(hidden, captured, row, slice(row, row + 1), slice(at, at + 1))


class TestLoading:
    @pytest.fixture
    def folder(self, tmp_path: pathlib.Path) -> pathlib.Path:
        return pathlib.Path(shutil.copytree(GOLDENS / "llama2_mha", tmp_path / "model"))

    @staticmethod
    def rewrite(folder: pathlib.Path, **changes: np.ndarray | None) -> None:
        """Replaces, adds or (None) drops tensors of a checkpoint; `__` in a name stands for a dot."""
        tensors = load_file(folder / "model.safetensors")
        for name, value in changes.items():
            name = name.replace("__", ".")
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value
        save_file(tensors, folder / "model.safetensors")

    @staticmethod
    def configure(folder: pathlib.Path, **changes: Any) -> None:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | changes))

    def test_missing_tensors_are_named(self, folder):
        self.rewrite(folder, model__layers__1__mlp__up_proj__weight=None, model__norm__weight=None)
        with pytest.raises(CheckpointError, match="missing tensors") as error:
            load_model(folder)
        assert "model.layers.1.mlp.up_proj.weight" in str(error.value)
        assert "model.norm.weight" in str(error.value)
        assert "not have" not in str(error.value)

    def test_extra_tensors_are_named(self, folder):
        self.rewrite(folder, model__layers__0__self_attn__q_norm__weight=np.ones(12, np.float32))
        with pytest.raises(CheckpointError, match=r"does not have: model.layers.0.self_attn.q_norm.weight"):
            load_model(folder)

    def test_more_layers_than_configured_are_extra(self, folder):
        self.configure(folder, num_hidden_layers=1)
        with pytest.raises(CheckpointError, match=r"does not have: model.layers.1.*and 1 more"):
            load_model(folder)

    def test_misshapen_tensors_are_named_with_both_shapes(self, folder):
        self.rewrite(folder, model__layers__0__mlp__gate_proj__weight=np.ones((40, 47), np.float32))
        with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.gate_proj.weight is \(40, 47\), not \(40, 48\)"):
            load_model(folder)

    def test_biases_that_the_configuration_denies(self, tmp_path):
        folder = pathlib.Path(shutil.copytree(GOLDENS / "biases", tmp_path / "model"))
        self.configure(folder, attention_bias=False, mlp_bias=True)
        with pytest.raises(CheckpointError, match=r"does not have: .*self_attn.k_proj.bias"):
            load_model(folder)

    def test_left_over_rotary_buffers_and_tied_heads_are_no_error(self, tmp_path):
        folder = pathlib.Path(shutil.copytree(GOLDENS / "smollm2_tied", tmp_path / "model"))
        embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        inverse = np.ones(8, np.float32)
        self.rewrite(folder, lm_head__weight=embed, model__layers__0__self_attn__rotary_emb__inv_freq=inverse)
        want = golden_arrays("smollm2_tied")
        np.testing.assert_allclose(run(load_model(folder), want["tokens"]).logits, want["logits"], atol=2e-4)

    def test_wrong_architecture(self, folder):
        self.configure(folder, architectures=["GPT2LMHeadModel"])
        with pytest.raises(CheckpointError, match=r"GPT2LMHeadModel.*LlamaForCausalLM"):
            load_model(folder)

    def test_truncated_file(self, folder):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match="truncated"):
            LLM.from_pretrained(folder)

    def test_unknown_dtype(self, folder):
        with pytest.raises(ValueError, match=r"int8.*bfloat16"):
            load_model(folder, "int8")

    def test_progress(self, folder):
        calls: list[tuple[int, int]] = []
        model = load_model(folder, progress=lambda done, total: calls.append((done, total)))
        count = len(jax.tree.leaves(nnx.state(model)))
        assert calls == [(i + 1, count) for i in range(count)]

    def test_bfloat16_is_close(self):
        want = golden_arrays("llama2_mha")
        model = load_model(GOLDENS / "llama2_mha", "bfloat16")
        assert {p.dtype for p in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("bfloat16")}
        logits = np.asarray(run(model, want["tokens"]).logits)
        assert logits.dtype == np.float32
        error = np.abs(logits - want["logits"]).max() / want["logits"].std()
        assert error < 0.25
        config = EngineConfig(page_size=8, num_pages=64, max_rows=1, max_batched_tokens=24)
        llm = LLM(model, engine=config)
        assert llm.engine.runner.kv.k[0].dtype == jnp.dtype("bfloat16")
        (out,) = llm.generate(want["tokens"][0].tolist(), SamplingParams(temperature=0, max_tokens=1))
        assert out.outputs[0].token_ids == [int(want["greedy"][0, 0])]

    def test_host_memory_stays_near_the_models_size(self, tmp_path):
        """Parameter by parameter: beside the model there is room for one parameter, read and assembled."""
        layers, hidden, mlp, vocab = 24, 64, 128, 256
        config = {
            "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": hidden,
            "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": 4,
            "num_key_value_heads": 4, "tie_word_embeddings": True,
        }  # fmt: skip
        shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
        for i in range(layers):
            prefix = f"model.layers.{i}."
            shapes |= {prefix + f"self_attn.{n}_proj.weight": (hidden, hidden) for n in "qkvo"}
            shapes |= {prefix + f"mlp.{n}_proj.weight": (mlp, hidden) for n in ("gate", "up")}
            shapes |= {prefix + "mlp.down_proj.weight": (hidden, mlp)}
            shapes |= {prefix + f"{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({n: np.ones(s, np.float32) for n, s in shapes.items()}, tmp_path / "model.safetensors")
        load_model(tmp_path)  # (what the first call imports and caches is not the checkpoint's)
        tracemalloc.start()
        try:
            model = load_model(tmp_path)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        sizes = [p.nbytes for p in jax.tree.leaves(nnx.state(model))]
        # JAX may adopt a NumPy buffer on the CPU, so the model itself can count.
        assert peak < sum(sizes) + 3 * max(sizes) + 1_000_000, (peak, sum(sizes), max(sizes))


def test_one_sequence_without_a_batch_axis() -> None:
    """Also of as many tokens as there are heads."""
    model = load_model(GOLDENS / "llama2_mha", dtype="float32")
    for length in (model.config.num_heads, 7):
        tokens = jnp.arange(length)
        one, row = model(tokens, capture_layers=(0,)), model(tokens[None], capture_layers=(0,))
        np.testing.assert_array_equal(np.asarray(one.logits), np.asarray(row.logits[0]))
        np.testing.assert_array_equal(np.asarray(one.captured[0]), np.asarray(row.captured[0][0]))
