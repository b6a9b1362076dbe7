"""Compiled programs persist under the user's cache directory, so that a second start is fast."""

import jax

from specax.model.demo_models import cache_root


def enable_compile_cache() -> None:
    """Turns JAX's persistent compilation cache on, for every program however small.

    In the user's cache directory, unless the environment has chosen another. For programs (and tests); the
    library itself leaves JAX's global configuration alone.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_root() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
