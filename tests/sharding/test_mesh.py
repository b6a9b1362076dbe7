"""Meshes of 2 and 4 virtual CPU devices give what one device gives, and each holds only its part."""

import dataclasses
import json
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from specax import LLM, EngineConfig, SamplingParams
from specax.decoding.runner import step_functions
from specax.model import Decoder, load_model, loading
from specax.paged import CacheSpec, KVCache
from specax.sharding import DEFAULT_RULES, Layout, ShardingRules, make_mesh
from tests.conftest import GOLDENS, TINY

# Two programs per engine: all three prompts prefill in one step and then decode together.
ENGINE = EngineConfig(page_size=8, num_pages=64, max_rows=3, max_batched_tokens=72)
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
CASES = ("smollm2_tied", "llama2_mha", "biases")  # 3 KV heads: padded; 4; 2: padded on four devices


def golden_arrays(case: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / case / "golden.npz") as data:
        return dict(data)


def greedy(llm: LLM, prompts: np.ndarray) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts.tolist(), GREEDY)]


def shard_shapes(x: jax.Array) -> set[tuple[int, ...]]:
    return {shard.data.shape for shard in x.addressable_shards}


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_same_greedy_tokens_and_only_shards(case, tensor):
    want = golden_arrays(case)
    llm = LLM.from_pretrained(GOLDENS / case, dtype="float32", mesh=make_mesh(tensor=tensor), engine=ENGINE)
    assert greedy(llm, want["tokens"]) == want["greedy"].tolist()
    model, config = llm.model, llm.model.config
    heads = -(-config.num_kv_heads // tensor)
    group, dim, hidden = config.group_size, config.head_dim, config.hidden_size
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        assert shard_shapes(attention.qkv[...]) == {(heads, group + 2, dim, hidden)}
        assert shard_shapes(attention.out[...]) == {(hidden, heads, group, dim)}
        assert shard_shapes(mlp.gate[...]) == {(config.intermediate_size // tensor, hidden)}
        assert shard_shapes(mlp.down[...]) == {(hidden, config.intermediate_size // tensor)}
        assert shard_shapes(layer.input_norm.weight[...]) == {(hidden,)}
    for table in (model.embed, model.head):
        if table is not None:
            assert shard_shapes(table[...]) == {(config.vocab_size // tensor, hidden)}
    kv = llm.engine.runner.kv
    for pages in (*kv.k, *kv.v):  # as it is after steps, not only as it was made
        assert shard_shapes(pages) == {(config.num_layers, 64, heads, 8, dim)}
        assert len({shard.device for shard in pages.addressable_shards}) == tensor


def test_data_and_tensor():
    want = golden_arrays("llama2_mha")
    mesh = make_mesh(data=2, tensor=2)
    llm = LLM.from_pretrained(GOLDENS / "llama2_mha", dtype="float32", mesh=mesh, engine=ENGINE)
    assert greedy(llm, want["tokens"]) == want["greedy"].tolist()
    # The cache-less model splits its sequences over `data`.
    graphdef, state = nnx.split(llm.model)
    tokens = jnp.asarray(want["tokens"][[0, 1, 2, 0]])
    out = jax.jit(lambda s, t: nnx.merge(graphdef, s)(t))(state, tokens)
    np.testing.assert_allclose(out.logits, want["logits"][[0, 1, 2, 0]], atol=2e-4)


def test_an_odd_vocabulary(tmp_path):
    """131 rows on 2 and 4 devices; no padding row is ever sampled or returned."""
    folder = pathlib.Path(shutil.copytree(GOLDENS / "llama2_mha", tmp_path / "odd"))
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.concatenate([tensors[name], -tensors[name][5:8]])
    config = json.loads((folder / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 131}))
    prompts = np.random.default_rng(0).integers(0, 131, (3, 20))
    prompts[0, :3] = [130, 129, 128]
    flat = SamplingParams(temperature=1e9, max_tokens=64, seed=3, ignore_eos=True)
    want = None
    for tensor in (1, 2, 4):
        mesh = make_mesh(tensor=tensor) if tensor > 1 else None
        llm = LLM.from_pretrained(folder, dtype="float32", mesh=mesh, engine=ENGINE)
        assert llm.model.embed.shape[0] == {1: 131, 2: 132, 4: 132}[tensor]
        got = [out.outputs[0].token_ids for out in llm.generate(prompts.tolist(), [GREEDY, GREEDY, flat])]
        want = want or got
        assert got[:2] == want[:2]
        assert max(got[2]) <= 130
        assert llm.engine.runner.logits(jnp.ones((3, 48), jnp.float32)).shape == (3, 131)


class TestLoadingIntoShards:
    def test_no_device_ever_gets_a_whole_array(self, monkeypatch):
        """Arrays are made shard by shard, and nothing passes through `device_put`."""
        asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        make = jax.make_array_from_callback

        def spy(shape: tuple[int, ...], sharding: Any, data: Callable[..., np.ndarray], **kwargs: Any) -> jax.Array:
            def piece(index: Any) -> np.ndarray:
                asked.append((tuple(shape), data(index).shape))
                return data(index)

            return make(shape, sharding, piece, **kwargs)

        def refused(*_: Any, **__: Any) -> None:
            raise AssertionError("device_put of a whole parameter")

        monkeypatch.setattr(loading.jax, "make_array_from_callback", spy)
        monkeypatch.setattr(loading.jax, "device_put", refused)
        model = load_model(GOLDENS / "llama2_mha", "float32", make_mesh(tensor=4))
        split = {shape: part for shape, part in asked if len(shape) > 1}
        assert split
        for shape, part in split.items():
            assert np.prod(part) == np.prod(shape) // 4, (shape, part)
        for x in jax.tree.leaves(nnx.state(model)):
            assert len({shard.device for shard in x.addressable_shards}) == 4

    def test_padding_is_zeros(self):
        """3 KV heads on 2 devices: a fourth head, whose group's output weights are zero, adds exact zeros."""
        model = load_model(GOLDENS / "smollm2_tied", "float32", make_mesh(tensor=2))
        assert (model.config.num_kv_heads, model.padded.num_kv_heads) == (3, 4)
        for layer in model.layers:
            assert not np.asarray(layer.attention.qkv[...])[3:].any()
            assert not np.asarray(layer.attention.out[...])[:, 3:].any()
            assert np.asarray(layer.attention.qkv[...])[:3].any()

    def test_the_cacheless_model_on_a_mesh(self):
        want = golden_arrays("smollm2_tied")
        model = load_model(GOLDENS / "smollm2_tied", "float32", make_mesh(tensor=2))
        graphdef, state = nnx.split(model)
        out = jax.jit(lambda s, t: nnx.merge(graphdef, s)(t))(state, jnp.asarray(want["tokens"]))
        np.testing.assert_allclose(out.logits, want["logits"], atol=2e-4)


class TestEngineOnAMesh:
    CONFIG = EngineConfig(page_size=4, num_pages=40, max_rows=2, max_batched_tokens=16, max_model_len=64)

    @pytest.fixture(scope="class")
    def engines(self) -> tuple[LLM, LLM]:
        """One on one device, one on two, the latter warmed up."""
        alone = LLM.from_pretrained(GOLDENS / "llama2_mha", dtype="float32", engine=self.CONFIG)
        split = LLM.from_pretrained(
            GOLDENS / "llama2_mha", dtype="float32", mesh=make_mesh(tensor=2), engine=self.CONFIG
        )
        split.engine.warmup()
        return alone, split

    def test_samples_equal_one_devices(self, engines):
        prompts = [[1, 2, 3, 4, 5], [9] * 11, [100, 50, 25]]
        params = [
            SamplingParams(n=2, seed=5, temperature=1.0, top_k=20, top_p=0.9, max_tokens=12, ignore_eos=True),
            SamplingParams(seed=6, repetition_penalty=1.3, logit_bias={7: 3.0}, max_tokens=12, ignore_eos=True),
            SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, max_tokens=12, ignore_eos=True),
        ]
        alone, split = (llm.generate(prompts, params) for llm in engines)
        for a, b in zip(alone, split, strict=True):
            assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
        for a, b in zip(alone[2].outputs[0].logprobs, split[2].outputs[0].logprobs, strict=True):
            assert list(a) == list(b)
            np.testing.assert_allclose([x.logprob for x in a.values()], [x.logprob for x in b.values()], atol=1e-4)

    def test_nothing_compiles_after_warmup(self, engines):
        """In a first, a second and a mixed run: shardings of states must not drift from step to step."""
        _, split = engines
        rng = np.random.default_rng(0)
        for turn in range(3):
            prompts = [rng.integers(0, 128, int(rng.integers(1, 30))).tolist() for _ in range(4)]
            params = [
                SamplingParams(n=1 + turn % 2, seed=turn, max_tokens=6, ignore_eos=True),
                SamplingParams(temperature=0, logprobs=2, max_tokens=5),
                SamplingParams(presence_penalty=1.0, logit_bias={3: -100}, prompt_logprobs=1, max_tokens=5),
                SamplingParams(temperature=0.5, min_tokens=3, logprobs=-1, max_tokens=5),
            ]
            split.generate(prompts, params)
        assert split.stats()["compilations_after_warmup"] == 0
        assert split.stats()["pages_in_use"] == 0


class TestRules:
    def test_specs(self):
        rules = ShardingRules()
        assert rules.spec(("vocab", "hidden")) == PartitionSpec("tensor", None)
        assert rules.spec((None, "pages", "kv_heads", None, None)) == PartitionSpec(None, None, "tensor", None, None)
        assert rules.spec(()) == PartitionSpec()
        assert ShardingRules(hidden="data").spec(("mlp", "hidden")) == PartitionSpec("tensor", "data")
        with pytest.raises(AttributeError):
            rules.spec(("heads",))

    def test_without_a_mesh_a_layout_does_nothing(self):
        layout = Layout()
        x = jnp.zeros((2, 3))
        assert layout.sharding(("vocab", "hidden")) is None
        assert layout.constrain(x, "vocab", "hidden") is x
        assert layout.parts("vocab") == 1

    def test_parts(self):
        layout = Layout(make_mesh(data=2, tensor=2))
        assert {a: layout.parts(a) for a in ("batch", "tokens", "vocab", "kv_heads", "hidden")} == {
            "batch": 2, "tokens": 1, "vocab": 2, "kv_heads": 2, "hidden": 1,
        }  # fmt: skip
        whole = Layout(make_mesh(tensor=2), ShardingRules(vocab=None, kv_heads=None, mlp=None))
        assert [whole.parts(a) for a in ("vocab", "kv_heads", "mlp")] == [1, 1, 1]
        assert ShardingRules() == DEFAULT_RULES

    def test_the_cache_is_born_split(self):
        spec = CacheSpec(layers=2, kv_heads=4, head_dim=8, page_size=4, dtype="float32")
        kv = KVCache.create((spec,), (10,), Layout(make_mesh(tensor=4)))
        assert shard_shapes(kv.k[0]) == {(2, 10, 1, 4, 8)}
        assert not np.asarray(kv.v[0]).any()

    def test_a_random_model_pads_like_a_loaded_one(self, tiny_model):
        model = Decoder(tiny_model.config, rngs=nnx.Rngs(0), layout=Layout(make_mesh(tensor=4)))
        assert model.embed.shape == (100, 32)  # 97 rounded up
        assert model.layers[0].attention.qkv.shape == (4, 4, 8, 32)  # 2 KV heads rounded up


class TestMakeMesh:
    def test_shape_and_names(self):
        mesh = make_mesh(data=2, tensor=2)
        assert mesh.axis_names == ("data", "tensor")
        assert dict(mesh.shape) == {"data": 2, "tensor": 2}
        assert dict(make_mesh().shape) == {"data": 1, "tensor": 1}

    def test_chosen_devices(self):
        devices = jax.devices()[2:4]
        assert make_mesh(tensor=2, devices=devices).devices.flatten().tolist() == devices

    def test_too_few_devices(self):
        with pytest.raises(ValueError, match="needs 8 devices, 4 are here"):
            make_mesh(tensor=4, data=2)

    @pytest.mark.parametrize(("tensor", "data"), [(0, 1), (1, 0), (-1, 2), (-2, -1)])
    def test_nonsense(self, tensor, data):
        with pytest.raises(ValueError, match="mesh data="):
            make_mesh(tensor=tensor, data=data)


def test_meshes_made_by_others() -> None:
    """JAX's own meshes (Explicit axes), meshes without one of our axes, and batches that do not divide."""
    tokens = jnp.arange(6)[None]
    want = np.asarray(load_model(GOLDENS / "llama2_mha", dtype="float32")(tokens).logits)
    for mesh in (jax.make_mesh((2,), ("tensor",)), make_mesh(data=2), make_mesh(data=2, tensor=2)):
        model = load_model(GOLDENS / "llama2_mha", dtype="float32", mesh=mesh)
        np.testing.assert_allclose(np.asarray(jax.jit(lambda t, m=model: m(t).logits)(tokens)), want, atol=1e-5)
    with pytest.raises(ValueError, match="the sharding rules split over"):
        load_model(GOLDENS / "llama2_mha", mesh=jax.make_mesh((2,), ("rows",)))


def test_logits_are_gathered_and_not_the_head() -> None:
    """Wanted whole on every device, they travel; the parameters, which are far larger, stay where they are."""
    layout = Layout(make_mesh(tensor=2))
    config = dataclasses.replace(TINY, vocab_size=96)  # nothing is padded
    graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0), layout=layout))
    params, tree = jax.tree.flatten(state)
    shards = [layout.sharding(param.axes) for _, param in nnx.to_flat_state(state)]
    params = [jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s) for p, s in zip(params, shards, strict=True)]
    _, logits = step_functions(graphdef, tree)
    hidden = jax.ShapeDtypeStruct((4, config.hidden_size), np.float32, sharding=layout.sharding(("rows", "hidden")))
    hlo = jax.jit(logits).lower(params, hidden).compile().as_text()
    assert re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", hlo or "") == ["4,96"]
