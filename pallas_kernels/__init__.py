"""One public function per op; beside it an XLA reference and, on GPUs, Mosaic kernels."""

from specax.pallas_kernels.block_sizes import BlockSizes
from specax.pallas_kernels.dispatch import Implementation, interpreted
from specax.pallas_kernels.kv_write import copy_pages, write_kv, write_kv_scales
from specax.pallas_kernels.paged_attention import paged_attention, paged_latent_attention, paged_prefill_attention
from specax.pallas_kernels.quantized_kv import quantize_kv
from specax.pallas_kernels.window import Window

__all__ = [
    "BlockSizes",
    "Implementation",
    "Window",
    "copy_pages",
    "interpreted",
    "paged_attention",
    "paged_latent_attention",
    "paged_prefill_attention",
    "quantize_kv",
    "write_kv",
    "write_kv_scales",
]
