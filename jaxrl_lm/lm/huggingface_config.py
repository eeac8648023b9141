"""config.json of Hugging Face <-> PolicyConfig.

Both spellings are read: `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5). A setting that the policy does not have is an error that names it: a model
that is nearly right gives plausible numbers, which is worse.
"""

from __future__ import annotations

from typing import Any

from jaxrl_lm import checks
from jaxrl_lm.lm.config import PolicyConfig
from jaxrl_lm.lm.rope import (
  LinearScaling,
  Llama3Scaling,
  Rope,
  YarnScaling,
  check_positive,
  yarn_magnitude,
)

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
    ValueError: the architecture is unknown, a setting is unsupported, out of its range or of
      another type, or a size is missing.
  """
  try:
    return _policy_config(raw)
  except (TypeError, ValueError) as error:
    raise ValueError(f"config.json: {error}") from error


def _policy_config(raw: dict[str, Any]) -> PolicyConfig:
  model_type = raw.get("model_type")
  if model_type not in MODEL_TYPES:
    raise ValueError(
      f"model_type {model_type!r} is not supported; it must be one of {', '.join(MODEL_TYPES)}"
    )
  for key, value in _ONLY.items():
    if raw.get(key, value) not in (value, None):
      raise ValueError(f"{key} = {raw[key]!r} is not supported, only {value!r}")

  hidden_size, num_heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
  biased = _flag(raw, "attention_bias") and model_type in ("llama", "qwen3")
  default_head = 128 if model_type == "qwen3" else max(hidden_size // num_heads, 1)
  return PolicyConfig(
    vocab_size=_size(raw, "vocab_size"),
    hidden_size=hidden_size,
    intermediate_size=_size(raw, "intermediate_size"),
    num_layers=_size(raw, "num_hidden_layers"),
    num_heads=num_heads,
    num_kv_heads=_num_kv_heads(raw, model_type, num_heads),
    head_dim=_size(raw, "head_dim", default_head),
    max_length=_size(raw, "max_position_embeddings"),
    rope=_rope(raw),
    norm_eps=_number({"rms_norm_eps": 1e-6} | raw, "rms_norm_eps"),
    tied=_flag(raw, "tie_word_embeddings"),
    qkv_bias=biased or model_type == "qwen2",
    output_bias=biased,
    qk_norm=model_type == "qwen3",
    sliding_window=_sliding_window(raw, model_type),
  )


def _size(raw: dict[str, Any], key: str, default: int | None = None) -> int:
  """A whole number above 0; missing or null is the default, without one an error."""
  value = default if raw.get(key) is None else raw[key]
  if value is None:
    raise ValueError(f"{key} is missing")
  return int(checks.check_whole(key, value, low=1))


def _number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
  """A finite number above 0; missing or null is the default, without one an error."""
  value: Any = default if raw.get(key) is None else raw[key]
  check_positive(key, value)
  return float(value)


def _flag(raw: dict[str, Any], key: str, *, default: bool = False) -> bool:
  value = default if raw.get(key) is None else raw[key]
  if not isinstance(value, bool):
    raise TypeError(f"{key} must be true or false, got {value!r}")
  return value


def _num_kv_heads(raw: dict[str, Any], model_type: str, num_heads: int) -> int:
  """Null means as many as query heads everywhere; a missing key only in Llama."""
  if "num_key_value_heads" not in raw and model_type != "llama":
    raise ValueError("num_key_value_heads is missing")
  return _size(raw, "num_key_value_heads", num_heads)


def _sliding_window(raw: dict[str, Any], model_type: str) -> int | None:
  """The window of all layers. Qwen's is off unless switched on, and may begin at some layer."""
  window = {"sliding_window": 4096} | raw
  if model_type == "mistral":
    return None if window["sliding_window"] is None else _size(window, "sliding_window")
  if model_type == "llama" or not _flag(raw, "use_sliding_window"):
    return None
  layers = _size(raw, "num_hidden_layers")
  first = checks.check_whole("max_window_layers", raw.get("max_window_layers", 28), low=0)
  kinds = raw.get("layer_types")
  if kinds is None:
    # Two of them say whether the layers differ, however many there are.
    kinds = ["full_attention"] * (first > 0) + ["sliding_attention"] * (first < layers)
  if window["sliding_window"] is None or set(kinds) == {"full_attention"}:
    return None
  if set(kinds) != {"sliding_attention"}:
    key = "layer_types" if raw.get("layer_types") else "max_window_layers"
    raise ValueError(
      f"{key} = {raw.get(key, first)!r} is not supported: layers with and without a sliding window "
      f"(of {layers})"
    )
  return _size(window, "sliding_window")


def _rope(raw: dict[str, Any]) -> Rope:
  """Of either spelling. Of both where they say the same: which one counts is not agreed on."""
  keys = [key for key in ("rope_parameters", "rope_scaling") if raw.get(key)]
  ropes = [_rope_of(raw, key) for key in keys or ["rope_scaling"]]
  if ropes[0] != ropes[-1]:
    raise ValueError("rope_parameters and rope_scaling contradict each other: keep one of them")
  return ropes[0]


def _rope_of(raw: dict[str, Any], name: str) -> Rope:
  settings = raw.get(name) or {}
  if not isinstance(settings, dict):
    raise TypeError(f"{name} must be an object, got {settings!r}")
  if any(isinstance(value, dict) for value in settings.values()):
    raise ValueError(f"{name} = {settings!r} is not supported: one for each layer type")
  if settings.get("partial_rotary_factor", 1.0) not in (1.0, None):
    raise ValueError(
      f"partial_rotary_factor = {settings['partial_rotary_factor']!r} is not supported, only 1.0"
    )
  theta = _number(settings, "rope_theta", _number(raw, "rope_theta", 10_000.0))
  return Rope(theta, _scaling(settings, _size(raw, "max_position_embeddings")))


def _scaling(
  settings: dict[str, Any], max_length: int
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
  kind = settings.get("rope_type") or settings.get("type") or "default"
  if kind == "default":
    return None
  if kind not in ("linear", "llama3", "yarn"):
    raise ValueError(
      f"rope_type {kind!r} is not supported; it must be default, linear, llama3 or yarn"
    )

  def number(key: str) -> float:
    if settings.get(key) is None:
      raise ValueError(f"rope_type {kind!r} needs {key}")
    return _number(settings, key)

  if kind == "linear":
    return LinearScaling(number("factor"))
  original = _size(settings, "original_max_position_embeddings", max_length)
  if kind == "llama3":
    low, high = number("low_freq_factor"), number("high_freq_factor")
    return Llama3Scaling(number("factor"), low, high, original)
  factor = max_length / original if settings.get("factor") is None else number("factor")
  return YarnScaling(
    factor,
    original,
    _number(settings, "beta_fast", 32.0),
    _number(settings, "beta_slow", 1.0),
    _yarn_magnitude(settings, factor),
    _flag(settings, "truncate", default=True),
  )


def _yarn_magnitude(settings: dict[str, Any], factor: float) -> float:
  if settings.get("attention_factor") is not None:
    return _number(settings, "attention_factor")
  if settings.get("mscale") and settings.get("mscale_all_dim"):
    scale, all_dim = _number(settings, "mscale"), _number(settings, "mscale_all_dim")
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
