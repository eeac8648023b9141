"""config.json of Hugging Face <-> PolicyConfig.

Both spellings are read: `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5). A setting that the policy does not have is an error that names it: a model
that is nearly right gives plausible numbers, which is worse.
"""

from __future__ import annotations

from typing import Any

from jaxrl_lm.lm.config import PolicyConfig
from jaxrl_lm.lm.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling, yarn_magnitude

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

# Settings with one supported value; a missing one has it.
_ONLY = {
  "hidden_act": "silu",
  "mlp_bias": False,
  "partial_rotary_factor": 1.0,
  "quantization_config": None,
  "attn_logit_softcapping": None,
  "final_logit_softcapping": None,
}


def read_config(raw: dict[str, Any]) -> PolicyConfig:
  """The policy that a config.json describes, in float32.

  Args:
    raw: the parsed file. A setting that is missing has the default of its architecture in
      transformers, except for sizes.

  Returns:
    The configuration.

  Raises:
    ValueError: the architecture is unknown, a setting is unsupported, or a size is missing.
  """
  model_type = raw.get("model_type")
  if model_type not in MODEL_TYPES:
    raise ValueError(
      f"config.json: model_type {model_type!r} is not supported; it must be one of "
      f"{', '.join(MODEL_TYPES)}"
    )
  for key, value in _ONLY.items():
    if raw.get(key, value) not in (value, None):
      raise ValueError(f"config.json: {key} = {raw[key]!r} is not supported, only {value!r}")

  hidden_size, num_heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
  biased = bool(raw.get("attention_bias")) and model_type in ("llama", "qwen3")
  return PolicyConfig(
    vocab_size=_size(raw, "vocab_size"),
    hidden_size=hidden_size,
    intermediate_size=_size(raw, "intermediate_size"),
    num_layers=_size(raw, "num_hidden_layers"),
    num_heads=num_heads,
    num_kv_heads=_num_kv_heads(raw, model_type, num_heads),
    head_dim=raw.get("head_dim") or (128 if model_type == "qwen3" else hidden_size // num_heads),
    max_length=_size(raw, "max_position_embeddings"),
    rope=_rope(raw),
    norm_eps=raw.get("rms_norm_eps", 1e-6),
    tied=bool(raw.get("tie_word_embeddings", False)),
    qkv_bias=biased or model_type == "qwen2",
    output_bias=biased,
    qk_norm=model_type == "qwen3",
    sliding_window=_sliding_window(raw, model_type),
  )


def _size(raw: dict[str, Any], key: str) -> int:
  if raw.get(key) is None:
    raise ValueError(f"config.json: {key} is missing")
  return int(raw[key])


def _num_kv_heads(raw: dict[str, Any], model_type: str, num_heads: int) -> int:
  """Null means as many as query heads everywhere; a missing key only in Llama."""
  if "num_key_value_heads" not in raw and model_type != "llama":
    raise ValueError("config.json: num_key_value_heads is missing")
  return int(raw.get("num_key_value_heads") or num_heads)


def _sliding_window(raw: dict[str, Any], model_type: str) -> int | None:
  """The window of all layers. Qwen's is off unless switched on, and may begin at some layer."""
  if model_type == "mistral":
    return raw.get("sliding_window", 4096)
  if model_type == "llama" or not raw.get("use_sliding_window", False):
    return None
  layers = _size(raw, "num_hidden_layers")
  first = raw.get("max_window_layers", 28)
  kinds = raw.get("layer_types") or [
    "sliding_attention" if i >= first else "full_attention" for i in range(layers)
  ]
  window = raw.get("sliding_window", 4096)
  if window is None or set(kinds) == {"full_attention"}:
    return None
  if set(kinds) != {"sliding_attention"}:
    key = "layer_types" if raw.get("layer_types") else "max_window_layers"
    raise ValueError(
      f"config.json: {key} = {raw.get(key, first)!r} is not supported: layers with and without a "
      f"sliding window (of {layers})"
    )
  return window


def _rope(raw: dict[str, Any]) -> Rope:
  settings = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
  if any(isinstance(value, dict) for value in settings.values()):
    raise ValueError(
      f"config.json: rope_parameters = {settings!r} is not supported: one for each layer type"
    )
  if settings.get("partial_rotary_factor", 1.0) not in (1.0, None):
    raise ValueError(
      f"config.json: partial_rotary_factor = {settings['partial_rotary_factor']!r} is not "
      "supported, only 1.0"
    )
  theta = settings.get("rope_theta") or raw.get("rope_theta") or 10_000.0
  return Rope(float(theta), _scaling(settings, _size(raw, "max_position_embeddings")))


def _scaling(
  settings: dict[str, Any], max_length: int
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
  kind = settings.get("rope_type") or settings.get("type") or "default"
  if kind == "default":
    return None
  if kind not in ("linear", "llama3", "yarn"):
    raise ValueError(
      f"config.json: rope_type {kind!r} is not supported; it must be default, linear, llama3 or "
      "yarn"
    )

  def number(key: str) -> float:
    if settings.get(key) is None:
      raise ValueError(f"config.json: rope_type {kind!r} needs {key}")
    return float(settings[key])

  if kind == "linear":
    return LinearScaling(number("factor"))
  original = int(settings.get("original_max_position_embeddings") or max_length)
  if kind == "llama3":
    low, high = number("low_freq_factor"), number("high_freq_factor")
    return Llama3Scaling(number("factor"), low, high, original)
  factor = max_length / original if settings.get("factor") is None else number("factor")
  return YarnScaling(
    factor,
    original,
    float(settings.get("beta_fast") or 32.0),
    float(settings.get("beta_slow") or 1.0),
    _yarn_magnitude(settings, factor),
    bool(settings.get("truncate", True)),
  )


def _yarn_magnitude(settings: dict[str, Any], factor: float) -> float:
  if settings.get("attention_factor") is not None:
    return float(settings["attention_factor"])
  scale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
  if scale and all_dim:
    return yarn_magnitude(factor, scale) / yarn_magnitude(factor, all_dim)
  return yarn_magnitude(factor)


def write_config(config: PolicyConfig) -> dict[str, Any]:
  """A config.json that `read_config` and transformers (4 and 5) read as this policy.

  The dtypes, rematerialisation and scanning are how a policy is run, not what it is: of them the
  file holds the parameters' dtype only.

  Args:
    config: of the policy. Interleaved rotary pairs are written as half-split ones.

  Returns:
    The settings, to be written as JSON.

  Raises:
    ValueError: no architecture of Hugging Face is this policy.
  """
  model_type, extra = _architecture(config)
  class_name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
  return {
    "architectures": [f"{class_name[model_type]}ForCausalLM"],
    "model_type": model_type,
    "vocab_size": config.vocab_size,
    "hidden_size": config.hidden_size,
    "intermediate_size": config.intermediate_size,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "max_position_embeddings": config.max_length,
    "hidden_act": "silu",
    "rms_norm_eps": config.norm_eps,
    "tie_word_embeddings": config.tied,
    "rope_theta": config.rope.theta,
    "rope_scaling": _write_scaling(config.rope),
    "torch_dtype": config.param_dtype.name,
    **extra,
  }


def _architecture(config: PolicyConfig) -> tuple[str, dict[str, Any]]:
  """The model type that has the policy's biases, norms and window, and its own settings."""
  biases, window = (config.qkv_bias, config.output_bias), config.sliding_window
  qwen = {
    "use_sliding_window": window is not None,
    "sliding_window": window,
    "max_window_layers": config.num_layers if window is None else 0,
  }
  if config.qk_norm and biases in ((False, False), (True, True)):
    return "qwen3", {"attention_bias": config.qkv_bias, **qwen}
  if not config.qk_norm and biases == (True, False):
    return "qwen2", qwen
  if not config.qk_norm and window is None and biases in ((False, False), (True, True)):
    return "llama", {"attention_bias": config.qkv_bias, "mlp_bias": False}
  if not config.qk_norm and biases == (False, False):
    return "mistral", {"sliding_window": window}
  raise ValueError(
    f"no architecture of Hugging Face has qk_norm = {config.qk_norm}, qkv_bias = {biases[0]}, "
    f"output_bias = {biases[1]} and sliding_window = {window}"
  )


def _write_scaling(rope: Rope) -> dict[str, Any] | None:
  scaling = rope.scaling
  if scaling is None:
    return None
  if isinstance(scaling, LinearScaling):
    return {"rope_type": "linear", "factor": scaling.factor}
  original = {"original_max_position_embeddings": scaling.original_length}
  if isinstance(scaling, Llama3Scaling):
    ramp = {
      "low_freq_factor": scaling.low_freq_factor,
      "high_freq_factor": scaling.high_freq_factor,
    }
    return {"rope_type": "llama3", "factor": scaling.factor, **ramp, **original}
  return {
    "rope_type": "yarn",
    "factor": scaling.factor,
    "beta_fast": scaling.beta_fast,
    "beta_slow": scaling.beta_slow,
    "attention_factor": scaling.magnitude,
    "truncate": scaling.truncate,
    **original,
  }
