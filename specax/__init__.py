"""specax: compiled LLM inference in JAX that trains its own draft heads. The public names, and nothing else."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specax.decoding.config import EngineConfig
    from specax.decoding.engine import Engine
    from specax.decoding.errors import CapacityError, InvalidRequestError
    from specax.decoding.llm import LLM
    from specax.decoding.sampling_params import SamplingParams
    from specax.model.errors import CheckpointError, SpecaxError

_HOMES = {
    "LLM": "specax.decoding.llm",
    "Engine": "specax.decoding.engine",
    "EngineConfig": "specax.decoding.config",
    "SamplingParams": "specax.decoding.sampling_params",
    "SpecaxError": "specax.model.errors",
    "CheckpointError": "specax.model.errors",
    "InvalidRequestError": "specax.decoding.errors",
    "CapacityError": "specax.decoding.errors",
}

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "Engine",
    "EngineConfig",
    "InvalidRequestError",
    "SamplingParams",
    "SpecaxError",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that `specax.model.config` alone stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specax' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
