"""Logical axes and their mapping to a mesh.

Every parameter, cache array and activation border names its axes logically (`("vocab", "hidden")`);
one `ShardingRules` object says over which mesh axis each of them is split, and `Layout` applies it.
"""

import dataclasses

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

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

# Logical axes of a KV cache array: [layers, pages, kv_heads, page_size, head_dim].
CACHE_AXES: Axes = (None, "pages", "kv_heads", None, None)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where arrays live: a mesh and the rules. `mesh=None` is one device, and every method a no-op.

    Any mesh will do (`make_mesh` of this package, or JAX's): mesh axes that the rules name and the mesh lacks
    split nothing. Arrays are constrained, not typed by their sharding, so the mesh's axes are made Auto.

    Raises:
      ValueError: a mesh with several devices and no axis that the rules name.
    """

    mesh: Mesh | None = None
    rules: ShardingRules = DEFAULT_RULES

    def __post_init__(self) -> None:
        if self.mesh is None:
            return
        names = self.mesh.axis_names
        known = {f.name: getattr(self.rules, f.name) for f in dataclasses.fields(self.rules)}
        used = {axis: name if name in names else None for axis, name in known.items()}
        if self.mesh.size > 1 and not any(used.values()):
            wanted = sorted({name for name in known.values() if name is not None})
            raise ValueError(f"the mesh has axes {names}, the sharding rules split over {wanted}: none is there")
        object.__setattr__(self, "rules", ShardingRules(**used))
        auto = Mesh(self.mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))
        object.__setattr__(self, "mesh", auto)

    def sharding(self, axes: Axes) -> NamedSharding | None:
        """The NamedSharding of an array with these logical axes, or None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, self.rules.spec(axes))

    def placement(self, axes: Axes) -> Sharding:
        """`sharding`, or without a mesh the default device: for arrays that are made on their own and stay there.

        (A step function whose inputs sometimes are bound to a device and sometimes are not would compile twice.)
        """
        return self.sharding(axes) or SingleDeviceSharding(jax.devices()[0])

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Pins a traced array at an activation border to the sharding of its logical axes.

        An axis that its devices do not divide (a batch of 1, say) stays whole.
        """
        fits = [a if a is None or n % self.parts(a) == 0 else None for a, n in zip(axes, x.shape, strict=True)]
        sharding = self.sharding(tuple(fits))
        return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)

    def parts(self, axis: str) -> int:
        """Over how many devices a logical axis is split."""
        name = getattr(self.rules, axis)
        return 1 if self.mesh is None or name is None else self.mesh.shape[name]
