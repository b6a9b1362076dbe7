"""What a network is: configuration, layers, decoder, checkpoints, tokenizer. The public names, each imported when used.

So an error class, or a `Decoder` with random weights, needs no reader of checkpoint formats.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specax.model.config import ModelConfig
    from specax.model.decoder import Decoder, DecoderOutput
    from specax.model.loading import load_model, load_tokenizer

_HOMES = {
    "ModelConfig": "specax.model.config",
    "Decoder": "specax.model.decoder",
    "DecoderOutput": "specax.model.decoder",
    "load_model": "specax.model.loading",
    "load_tokenizer": "specax.model.loading",
}

__all__ = ["Decoder", "DecoderOutput", "ModelConfig", "load_model", "load_tokenizer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specax.model' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
