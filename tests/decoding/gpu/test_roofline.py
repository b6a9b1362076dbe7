"""The roofline's arithmetic against figures worked out by hand."""

import pytest

from specax.decoding.gpu import roofline
from specax.decoding.gpu.check_steps import LLAMA_3_8B


def test_decode_attention() -> None:
    work = roofline.attention(LLAMA_3_8B, rows=64, query_len=1, context=4096)
    # 64 · 4097 keys · 8 heads · 128 · 2 B, twice; 64 · 32 · 128 · 2 B of queries, as much of outputs.
    assert work.bytes == 2 * 64 * 4097 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2
    assert work.flops == 4 * 64 * 4097 * 32 * 128
    assert work.bound == "memory"
    assert work.seconds == pytest.approx(250e-6, rel=0.01)


def test_quantised_pages_move_about_half() -> None:
    wide, narrow = (roofline.attention(LLAMA_3_8B, 64, 1, 4096, **kw) for kw in ({}, {"kv_bytes": 1, "scale_bytes": 4}))
    assert narrow.bytes / wide.bytes == pytest.approx((128 + 4) / 256, rel=0.01)


def test_step_counts_every_parameter_once() -> None:
    work = roofline.step(LLAMA_3_8B, rows=1, query_len=1, context=0)
    assert work.bytes / 2 == pytest.approx(8.03e9 - 128256 * 4096, rel=0.001)  # all but the embedding table
    assert roofline.step(LLAMA_3_8B, 1, 1, 0, devices=8).bytes == work.bytes / 8
    assert roofline.step(LLAMA_3_8B, rows=64, query_len=32, context=4096).bound == "arithmetic"


def test_latent_attention_reads_each_vector_once() -> None:
    work = roofline.latent_attention(heads=16, rows=1, context=1023)
    assert work.bytes == 1024 * 576 * 2 + 16 * 1088 * 2
    assert work.flops == 2 * 1024 * 16 * 1088
