"""Keys and values in eight bits: the error of a vector, scales in their slots, attention over what was written."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specax.pallas_kernels import copy_pages, paged_attention, quantize_kv, write_kv, write_kv_scales
from tests.pallas_kernels.reference import FLOAT8, INT8

DTYPES = [INT8, FLOAT8]
quantize = jax.jit(quantize_kv, static_argnums=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None)
@given(
    new=hnp.arrays(np.float32, (3, 2, 4), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False))
)
def test_the_error_of_a_vector(dtype: np.dtype, new: np.ndarray) -> None:
    values, scales = (np.asarray(x) for x in quantize(new, dtype))
    assert (values.dtype, values.shape, scales.dtype, scales.shape) == (dtype, new.shape, np.float32, new.shape[:2])
    assert np.isfinite(scales).all() and (scales > 0).all()
    wide, scale = values.astype(np.float64), scales.astype(np.float64)[..., None]
    error, tiny = np.abs(wide * scale - new), 2.0**-118  # (vectors of less than that become zeros)
    # Half the distance between neighbours: of integers 1, of float8 2⁻³ of the power of two below, at least 2⁻⁹.
    half = 0.5 if dtype == INT8 else np.maximum(np.abs(new / scale) * 2.0**-4, 2.0**-10)
    assert (error <= half * scale * (1 + 1e-5) + tiny).all()
    largest = np.abs(new).max(-1)
    np.testing.assert_array_equal(np.abs(wide).max(-1)[largest > tiny], 127 if dtype == INT8 else 448)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vectors_without_a_scale(dtype: np.dtype) -> None:
    new = np.zeros((4, 1, 3), np.float32)
    new[1], new[2, 0, 1], new[3, 0, 2] = 1e-42, np.nan, -np.inf
    values, scales = (np.asarray(x) for x in quantize(new, dtype))
    got = values.astype(np.float32) * scales[..., None]
    np.testing.assert_array_equal(got[:2], 0)
    assert np.isnan(got[2:]).all()  # a request that overflows is to be seen, not hidden


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="are int8 or float8_e4m3fn, got int16"):
        quantize_kv(jnp.zeros((1, 1, 2)), np.int16)
    with pytest.raises(ValueError, match="pages of int8 take what quantize_kv gives, got float32"):
        write_kv(jnp.zeros((1, 2, 1, 4, 2), jnp.int8), 0, jnp.zeros((1, 1, 2)), jnp.array([4]))


def test_scales_go_beside_their_values(rng: np.random.Generator) -> None:
    scales = rng.normal(size=(3, 6, 2, 4)).astype(np.float32)
    slots = np.array([4, 7, 22, 9, 0, 0, 3], np.int32)  # two padding tokens on the trash page
    new = rng.normal(size=(7, 2)).astype(np.float32)
    got = np.asarray(jax.jit(write_kv_scales, static_argnums=1)(scales, 1, new, slots))
    want = scales.copy()
    for token, slot in zip(new, slots.tolist(), strict=True):
        want[1, slot // 4, :, slot % 4] = token
    np.testing.assert_array_equal(got[:, 1:], want[:, 1:])
    np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])
    copied = np.asarray(copy_pages(jnp.asarray(got), jnp.array([2, 0]), jnp.array([5, 0])))
    np.testing.assert_array_equal(copied[:, 5], got[:, 2])
    np.testing.assert_array_equal(copied[:, :5], got[:, :5])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_what_was_written(dtype: np.dtype, rng: np.random.Generator) -> None:
    """Close to attention over the same keys and values in float32, for vectors of very different sizes."""
    sizes = np.exp(rng.uniform(-3, 1, size=(2, 40, 2, 1)))
    k, v = (rng.normal(size=(2, 40, 2, 16)) * sizes).astype(np.float32)
    slots, shape = jnp.arange(8, 48), (1, 6, 2, 8, 16)
    q = jnp.asarray(rng.normal(size=(1, 1, 4, 16)), jnp.float32)
    where: Any = (jnp.arange(1, 6)[None], jnp.array([39]))

    def plain(pages: jax.Array) -> jax.Array:
        kv = [write_kv(pages, 0, jnp.asarray(new), slots) for new in (k, v)]
        return paged_attention(q, *kv, *where, layer=0, scale=0.25)

    def quantized(pages: jax.Array, scales: jax.Array) -> jax.Array:
        new = [quantize_kv(jnp.asarray(x), dtype) for x in (k, v)]
        kv = [write_kv(pages, 0, values, slots) for values, _ in new]
        k_scales, v_scales = (write_kv_scales(scales, 0, of_tokens, slots) for _, of_tokens in new)
        named: Any = {"layer": 0, "scale": 0.25, "k_scales": k_scales, "v_scales": v_scales}
        return paged_attention(q, *kv, *where, **named)

    want = np.asarray(jax.jit(plain)(jnp.zeros(shape)))
    got = np.asarray(jax.jit(quantized)(jnp.zeros(shape, dtype), jnp.full(shape[:-1], jnp.nan)))
    # (The largest keys' scores are off by about 0.015 in int8, and their weights by as much of themselves.)
    assert np.abs(got - want).max() < (0.02 if dtype == INT8 else 0.05) * np.abs(want).max()
