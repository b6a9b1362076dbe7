"""Meshes, and the one table that maps logical array axes to mesh axes."""

from specax.sharding.mesh import make_mesh
from specax.sharding.rules import CACHE_AXES, DEFAULT_RULES, Layout, ShardingRules

__all__ = ["CACHE_AXES", "DEFAULT_RULES", "Layout", "ShardingRules", "make_mesh"]
