"""From a checkpoint to a Decoder: every parameter is read, assembled and put on its devices, one at a time."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from specax.model.checkpoint import Checkpoint, open_checkpoint
from specax.model.config import ModelConfig
from specax.model.decoder import Decoder
from specax.model.demo_models import DEMO_MODELS, fetch_demo_model
from specax.model.errors import CheckpointError
from specax.model.tokenizer import Tokenizer
from specax.sharding import DEFAULT_RULES, Layout, ShardingRules

SHOWN = 8  # names listed in an error

type Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a parameter comes from: checkpoint tensors by name and shape, and how they become one array."""

    tensors: Mapping[str, tuple[int, ...]]
    assemble: Callable[..., np.ndarray]


def resolve(path: str | pathlib.Path) -> pathlib.Path:
    """A checkpoint's path: as given, or that of a registered demo model (fetched if need be)."""
    if str(path) in DEMO_MODELS and not pathlib.Path(path).exists():
        return fetch_demo_model(str(path))
    return pathlib.Path(path)


def default_dtype() -> str:
    """bfloat16 on accelerators, float32 on the CPU, where it is the fast type."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def load_model(
    path: str | pathlib.Path | Checkpoint,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    rules: ShardingRules = DEFAULT_RULES,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Loads a Hugging Face style directory, a GGUF file, or a demo model by its name.

    Args:
      dtype: of the parameters and of what is computed; see `default_dtype`.
      mesh: where to; each device receives only its shards. None: one device.
      progress: called with (parameters done, parameters in all).

    Raises:
      CheckpointError: not a checkpoint, another architecture, tensors missing, left over or misshapen.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(resolve(path))
    name = default_dtype() if dtype is None else dtype
    if name not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(f"dtype is {name!r}; use 'float32', 'bfloat16' or 'float16'")
    layout = Layout(mesh, rules)
    # Shapes only: no parameter is initialised just to be replaced.
    model = nnx.eval_shape(lambda: Decoder(checkpoint.config, rngs=nnx.Rngs(0), dtype=name, layout=layout))
    graphdef, state = nnx.split(model)
    params = dict(nnx.to_flat_state(state))
    sources = {path: source(path, checkpoint.config) for path in params}
    _check(checkpoint, sources)
    for done, (where, param) in enumerate(params.items()):
        parts = [checkpoint.read(tensor) for tensor in sources[where].tensors]
        value = _pad(sources[where].assemble(*parts), param.shape).astype(jnp.dtype(name), copy=False)
        params[where] = param.replace(_put(value, layout.sharding(param.axes)))
        if progress:
            progress(done + 1, len(params))
    return nnx.merge(graphdef, nnx.from_flat_state(params))


def load_tokenizer(path: str | pathlib.Path) -> Tokenizer | None:
    """The tokenizer that lies with a checkpoint (for Engine's `tokenizer`); None if there is none.

    Raises:
      CheckpointError: not a checkpoint, or its tokenizer can't be used.
    """
    return open_checkpoint(resolve(path)).tokenizer()


def source(path: Path, config: ModelConfig) -> Source:
    """Which tensors of a Hugging Face Llama checkpoint make the parameter at this path of the Decoder."""
    c = config
    q, kv, inter = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size

    def per_kv_head(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(c.num_kv_heads, -1, c.head_dim, *rows.shape[1:])

    def qkv(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate([per_kv_head(part) for part in parts], axis=1)

    def out(part: np.ndarray) -> np.ndarray:
        return part.reshape(c.hidden_size, c.num_kv_heads, c.group_size, c.head_dim)

    def same(part: np.ndarray) -> np.ndarray:
        return part

    if path[0] != "layers":
        name = {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}[path[0]]
        shape = (c.hidden_size,) if path[0] == "norm" else (c.vocab_size, c.hidden_size)
        return Source({f"{name}.weight": shape}, same)
    prefix, block, leaf = f"model.layers.{path[1]}", path[2], path[3]
    if block in ("input_norm", "post_attention_norm"):
        return Source({f"{prefix}.{block.removesuffix('norm')}layernorm.weight": (c.hidden_size,)}, same)
    kind = "bias" if leaf.endswith("_bias") else "weight"
    inputs = () if kind == "bias" else (c.hidden_size,)
    match leaf.removesuffix("_bias"):
        case "qkv":
            rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
            return Source({f"{prefix}.self_attn.{n}.{kind}": (r, *inputs) for n, r in rows.items()}, qkv)
        case "out":
            shape = (c.hidden_size,) if kind == "bias" else (c.hidden_size, q)
            return Source({f"{prefix}.self_attn.o_proj.{kind}": shape}, same if kind == "bias" else out)
        case "down":
            shape = (c.hidden_size,) if kind == "bias" else (c.hidden_size, inter)
            return Source({f"{prefix}.mlp.down_proj.{kind}": shape}, same)
        case gate_or_up:
            return Source({f"{prefix}.mlp.{gate_or_up}_proj.{kind}": (inter, *inputs)}, same)


def _check(checkpoint: Checkpoint, sources: Mapping[Path, Source]) -> None:
    """Every tensor there, none left over, all of the right shape; the error names those that are not."""
    need = {name: shape for source in sources.values() for name, shape in source.tensors.items()}
    have = checkpoint.shapes
    ignored = {"lm_head.weight"} if checkpoint.config.tie_embeddings else set()
    extra = [n for n in have if n not in need and n not in ignored and not n.endswith("rotary_emb.inv_freq")]
    wrong = [f"{n} is {have[n]}, not {need[n]}" for n in need if n in have and have[n] != need[n]]
    problems = [
        f"{what}: {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}"
        for what, names in (
            ("missing tensors", [n for n in need if n not in have]),
            ("tensors of the wrong shape", wrong),
            ("tensors that this architecture does not have", extra),
        )
        if names
    ]
    if problems:
        raise CheckpointError("the checkpoint does not fit its configuration: " + "; ".join(problems))


def _pad(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Appends zeros where the mesh made an axis longer (see ModelConfig.padded)."""
    if value.shape == shape:
        return value
    return np.pad(value, [(0, new - old) for old, new in zip(value.shape, shape, strict=True)])


def _put(value: np.ndarray, sharding: NamedSharding | None) -> jax.Array:
    """To the device, or straight into shards. Waits, so that the host copy can go before the next one."""
    if sharding is None:
        return jax.device_put(value).block_until_ready()
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index]).block_until_ready()

