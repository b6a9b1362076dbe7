
from specax.model.config import ModelConfig
from specax.model.decoder import Decoder, DecoderOutput
from specax.model.loading import load_model, load_tokenizer

__all__ = ["Decoder", "DecoderOutput", "ModelConfig", "load_model", "load_tokenizer"]
