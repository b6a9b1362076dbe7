"""Traces: when requests came, how long they and their outputs were, and what their prompts shared.

The format is that of Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025: JSON lines
with a timestamp in ms, input and output length in tokens, and a number for every block of 512 prompt tokens; two
prompts have equal numbers as far as their blocks, and all before them, are the same.
"""

import dataclasses
import gzip
import json
import math
import pathlib
import zlib
from typing import Any

import numpy as np

from specax.decoding.errors import InvalidRequestError

BLOCK = 512  # prompt tokens per number
MAX_BLOCKS = 2**31 // BLOCK  # token ids are int32
SYNTHETIC_BLOCKS = 256  # per tenant, of the prefix that its prompts start with


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `tenant` and `priority` are ours: Mooncake's traces have none."""

    arrival: float  # seconds
    prompt_len: int
    output_len: int
    blocks: tuple[int, ...]  # one per 512 tokens of the prompt, the last one perhaps cut short
    tenant: str | None = None
    priority: int = 0

    def prompt(self) -> np.ndarray:
        """Token ids, int32 [prompt_len]: block b is b·512 … b·512 + 511, so equal blocks are equal tokens."""
        starts = np.asarray(self.blocks, np.int32) * BLOCK
        return (starts[:, None] + np.arange(BLOCK, dtype=np.int32)).ravel()[: self.prompt_len]


def read_trace(path: str, limit: int | None = None) -> list[TraceRequest]:
    """Reads JSON lines, gzipped if the name ends with .gz; the first `limit` requests, in order of arrival.

    Raises:
      InvalidRequestError: an unreadable file, or a line that is no request; the message names file and line.
    """
    try:
        raw = pathlib.Path(path).read_bytes()
        text = (gzip.decompress(raw) if path.endswith(".gz") else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InvalidRequestError(f"trace {path}: {error}") from error
    trace: list[TraceRequest] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if limit is not None and len(trace) == limit:
            break
        try:
            trace.append(_parse(json.loads(line)))
        except (ValueError, KeyError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise InvalidRequestError(f"trace {path}, line {number}: {what}") from error
    if not trace:
        raise InvalidRequestError(f"trace {path} holds no request")
    return sorted(trace, key=lambda r: r.arrival)  # stable


def _parse(entry: Any) -> TraceRequest:
    if not isinstance(entry, dict):
        raise ValueError(f"must be an object, got {entry!r}")
    time = entry["timestamp"]
    if not isinstance(time, int | float) or isinstance(time, bool) or not 0 <= time < math.inf:
        raise ValueError(f"timestamp must be milliseconds ≥ 0, got {time!r}")
    for key, low in (("input_length", 1), ("output_length", 1)):
        if not _is_integer(entry[key], low):
            raise ValueError(f"{key} must be an integer ≥ {low}, got {entry[key]!r}")
    prompt_len, blocks = entry["input_length"], entry["hash_ids"]
    if not isinstance(blocks, list) or not all(_is_integer(b, 0) and b < MAX_BLOCKS for b in blocks):
        raise ValueError(f"hash_ids must be a list of integers in 0…{MAX_BLOCKS - 1}")
    if len(blocks) != -(-prompt_len // BLOCK):
        count = -(-prompt_len // BLOCK)
        raise ValueError(f"input_length {prompt_len} needs {count} hash_ids, one per {BLOCK} tokens, got {len(blocks)}")
    tenant, priority = entry.get("tenant"), entry.get("priority", 0)
    if not isinstance(tenant, str | None):
        raise ValueError(f"tenant must be a string, got {tenant!r}")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ValueError(f"priority must be an integer, got {priority!r}")
    return TraceRequest(time / 1e3, prompt_len, entry["output_length"], tuple(blocks), tenant, priority)


def _is_integer(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def synthetic_trace(requests: int, rate: float, tenants: int, shared: float, seed: int = 0) -> list[TraceRequest]:
    """Poisson arrivals, log-normal lengths (medians 1,500 and 150 tokens), no file needed.

    Args:
      rate: requests per second.
      tenants: each has a prefix of its own, say a system prompt with examples.
      shared: which share of a prompt's blocks comes from that prefix, in 0…1.
    """
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, requests))
    prompts = np.clip(rng.lognormal(math.log(1500), 0.8, requests), 16, SYNTHETIC_BLOCKS * BLOCK).astype(int)
    outputs = np.clip(rng.lognormal(math.log(150), 0.8, requests), 1, 2000).astype(int)
    owners = rng.integers(tenants, size=requests)
    fresh = tenants * SYNTHETIC_BLOCKS  # the next block that nobody has had
    trace = []
    for arrival, prompt_len, output_len, owner in zip(arrivals, prompts, outputs, owners, strict=True):
        count = -(-int(prompt_len) // BLOCK)
        common = round(shared * count)
        first = int(owner) * SYNTHETIC_BLOCKS
        blocks = (*range(first, first + common), *range(fresh, fresh + count - common))
        fresh += count - common
        trace.append(TraceRequest(float(arrival), int(prompt_len), int(output_len), blocks, f"tenant-{owner}"))
    return trace


def assign_tenants(trace: list[TraceRequest], greedy: float, others: int, seed: int = 0) -> list[TraceRequest]:
    """Says whose requests these are: a share `greedy` of them tenant "greedy"'s, the rest spread over `others`."""
    rng = np.random.default_rng(seed)
    theirs = rng.random(len(trace)) < greedy
    names = rng.integers(others, size=len(trace))
    return [
        dataclasses.replace(request, tenant="greedy" if is_greedy else f"tenant-{name}")
        for request, is_greedy, name in zip(trace, theirs, names, strict=True)
    ]


def speed_up(trace: list[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests, arriving `factor` times as fast, the first one at 0."""
    start = trace[0].arrival
    return [dataclasses.replace(r, arrival=(r.arrival - start) / factor) for r in trace]
