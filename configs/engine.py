"""Engine sizes for `--config`: override one with `--config.page_size=32`. The fields are EngineConfig's."""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    config = config_dict.ConfigDict()
    config.page_size = 16
    config.num_pages = config_dict.placeholder(int)  # None: as memory allows
    config.max_rows = 64
    config.max_batched_tokens = 512
    config.max_model_len = config_dict.placeholder(int)  # None: what the model was made for
    config.policy = "fcfs"
    config.kv_dtype = config_dict.placeholder(str)  # None: the model's
    config.seed = 0
    return config
