"""Pages larger than a block of keys, which the kernels copy in parts; in Pallas' interpreter."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from specax.pallas_kernels import Window
from specax.pallas_kernels.dispatch import interpreted
from tests.pallas_kernels.reference import check, make_case, make_prefill_case

SIZES: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 64, "page_size": 128, "max_keys": 256}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def test_decode(rng: np.random.Generator) -> None:
    case = make_case(rng, contexts=[63, 128, 191, 192], dtype=BFLOAT16, **SIZES)
    with interpreted():
        check(case, "mosaic_gpu")


@pytest.mark.slow
def test_scales_and_a_window_that_begins_in_a_page(rng: np.random.Generator) -> None:
    options = {"dtype": np.dtype(np.int8), "query_dtype": BFLOAT16, "window": Window(50)}
    case = make_case(rng, contexts=[112, 113, 114, 177, 178, 230], **SIZES, **options)
    with interpreted():
        check(case, "mosaic_gpu")


@pytest.mark.slow
def test_prefill(rng: np.random.Generator) -> None:
    case = make_prefill_case(rng, lengths=[3, 70, 0, 1], contexts=[60, 64, 10, 127], tokens=80, dtype=BFLOAT16, **SIZES)
    with interpreted():
        check(case, "mosaic_gpu")
