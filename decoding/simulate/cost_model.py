"""How long a step takes on a device that isn't there: a roofline of memory traffic and arithmetic.

Williams, Waterman and Patterson, "Roofline", CACM 2009, with the terms of Pope et al., "Efficiently Scaling
Transformer Inference", MLSys 2023: weights and KV are read once per step; every token costs two operations per
parameter, and four per layer, head and head dimension for each position that it attends to.
"""

import dataclasses

from specax.decoding.scheduler import Plan
from specax.paged.page_table import PageCopy


@dataclasses.dataclass(frozen=True)
class CostModel:
    """A model on a machine. Rates are what is reached, not what is advertised."""

    weight_bytes: float  # read in every step
    kv_bytes: float  # per token of context
    parameters: float  # that multiply every token
    attention_flops: float  # per pair of a query and a position that it sees
    bytes_per_second: float  # of device memory
    flops_per_second: float
    link_bytes_per_second: float  # between device and host memory
    overhead: float = 0.0  # seconds per step: launches, sampling, the host

    def seconds(self, tokens: int, context_tokens: int, pairs: int) -> float:
        """Of a forward pass over `tokens`, whose rows have `context_tokens` of context in all."""
        memory = (self.weight_bytes + context_tokens * self.kv_bytes) / self.bytes_per_second
        arithmetic = (2 * self.parameters * tokens + self.attention_flops * pairs) / self.flops_per_second
        return max(memory, arithmetic) + self.overhead

    def step(self, plan: Plan, page_size: int) -> float:
        """Seconds of a step: page copies, saves and loads first, then the forward pass."""
        return self.ops(plan, page_size) + (self.forward(plan) if plan.work else 0.0)

    def forward(self, plan: Plan) -> float:
        context = pairs = sum([w.stop for w in plan.decodes])
        for work in plan.prefills:
            count = work.stop - work.start
            context += work.stop
            pairs += count * work.start + count * (count + 1) // 2
        return self.seconds(plan.num_tokens, context, pairs)

    def ops(self, plan: Plan, page_size: int) -> float:
        copies = sum(isinstance(op, PageCopy) for op in plan.ops)
        moves = len(plan.ops) - copies
        page = page_size * self.kv_bytes
        return 2 * copies * page / self.bytes_per_second + moves * page / self.link_bytes_per_second

    def worth_swapping(self, tokens: int) -> bool:
        """Whether saving and loading so many tokens' KV is faster than computing them again."""
        moving = 2 * tokens * self.kv_bytes / self.link_bytes_per_second
        computing = 2 * self.parameters * tokens + self.attention_flops * tokens * (tokens + 1) / 2
        return moving < computing / self.flops_per_second


COST_MODELS = {
    # Llama 3 8B in bfloat16 on an H200. 8.03 G parameters · 2 B; KV: 2 · 32 layers · 8 KV heads · 128 · 2 B =
    # 131,072 B; attention: 4 · 32 layers · 32 heads · 128. 4.8 TB/s of which 70 % are reached, 990 TFLOP/s dense
    # of which 50 %; PCIe 5.0 x16: 64 GB/s of which 80 %. (So a step decodes 256 rows of 1,000 tokens in 16 ms and
    # prefills 8,192 tokens in 0.30 s.)
    "h200-8b": CostModel(16.06e9, 131072, 8.03e9, 524288, 0.7 * 4.8e12, 0.5 * 990e12, 0.8 * 64e9, 1e-3),
    # SmolLM2 135M in float32 on two cores. 134.5 M parameters · 4 B; KV: 2 · 30 layers · 3 KV heads · 64 · 4 B =
    # 46,080 B; attention: 4 · 30 layers · 9 heads · 64. About 20 GB/s and 100 GFLOP/s are reached; "device" and
    # host memory are the same.
    "cpu-135m": CostModel(538e6, 46080, 134.5e6, 69120, 20e9, 100e9, 10e9, 1e-3),
}
