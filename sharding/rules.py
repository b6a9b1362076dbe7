"""Logical axes and their mapping to a mesh.

Every parameter, cache array and activation border names its axes logically (`("vocab", "hidden")`);
one `ShardingRules` object says over which mesh axis each of them is split, and `Layout` applies it.
"""

import dataclasses

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

type Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Mesh axis that splits each logical axis; None keeps the axis whole on every device."""

    batch: str | None = "data"  # sequences of the cache-less model
    tokens: str | None = None  # the engine's flat token stream
    rows: str | None = None  # rows of a batch: logits, sampler state
    hidden: str | None = None
    vocab: str | None = "tensor"
    kv_heads: str | None = "tensor"  # query heads ride along, grouped under their KV head
    mlp: str | None = "tensor"
    pages: str | None = None

    def spec(self, axes: Axes) -> PartitionSpec:
        """The PartitionSpec of an array with these logical axes (None: an axis that is never split)."""
        return PartitionSpec(*(None if axis is None else getattr(self, axis) for axis in axes))


DEFAULT_RULES = ShardingRules()


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where arrays live: a mesh and the rules. `mesh=None` is one device, and every method a no-op."""

    mesh: Mesh | None = None
    rules: ShardingRules = DEFAULT_RULES

    def sharding(self, axes: Axes) -> NamedSharding | None:
        """The NamedSharding of an array with these logical axes, or None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, self.rules.spec(axes))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Pins a traced array at an activation border to the sharding of its logical axes."""
        sharding = self.sharding(axes)
        return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)

    def parts(self, axis: str) -> int:
        """Over how many devices a logical axis is split."""
        name = getattr(self.rules, axis)
        return 1 if self.mesh is None or name is None else self.mesh.shape[name]
