"""Engine sizes for `--config`: override one with `--config.page_size=32`. The fields are EngineConfig's."""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    config = config_dict.ConfigDict()
    config.page_size = 16
    config.num_pages = config_dict.placeholder(int)  # None: as memory allows
    config.max_rows = 64
    config.max_batched_tokens = 512
    config.max_model_len = config_dict.placeholder(int)  # None: what the model was made for
    config.policy = "fcfs"  # priority, sjf, fair, lpm, predicted
    config.age_bound = 60.0  # seconds
    config.tenant_weights = config_dict.ConfigDict()  # shares under "fair": --config.tenant_weights='{"a": 2.0}'
    config.prefix_cache = True
    config.tenant_cache_share = 0.5
    config.host_cache_gb = 0.0
    config.disk_cache_dir = config_dict.placeholder(str)
    config.disk_cache_gb = 10.0
    config.cache_write = "back"  # or "through"
    config.preemption = "auto"  # or "recompute", "swap"
    config.streaming_window = config_dict.placeholder(int)  # StreamingLLM: approximate
    config.streaming_sinks = 4
    config.kv_dtype = config_dict.placeholder(str)  # None: the model's
    config.seed = 0
    return config
