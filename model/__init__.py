
from specax.model.config import ModelConfig
from specax.model.decoder import Decoder, DecoderOutput
from specax.model.loading import load_model

__all__ = ["Decoder", "DecoderOutput", "ModelConfig", "load_model"]
