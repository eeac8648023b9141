"""Small random checkpoints in the layout of Hugging Face, from a seed.

Between them: every architecture, both spellings of the rotary settings, every scaling, grouped
queries, a head_dim of its own, QK-norm, biases, windows, tied and separate heads. The weights are
large enough for attention to be far from uniform, and biases and norms are random too: with the
usual initialisation a model computes nearly the same without them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

_SIZES = {
  "vocab_size": 32,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
  "hidden_act": "silu",
}


def _case(model_type: str, **settings: Any) -> dict[str, Any]:
  name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}[model_type]
  return {"architectures": [f"{name}ForCausalLM"], "model_type": model_type} | _SIZES | settings


CASES: dict[str, dict[str, Any]] = {
  "llama2": _case("llama", rms_norm_eps=1e-5, rope_scaling=None),
  "llama3": _case(
    "llama",
    rope_theta=500_000.0,
    rope_scaling={
      "rope_type": "llama3",
      "factor": 8.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 32,
    },
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
  ),
  "llama_biased": _case(
    "llama",
    attention_bias=True,
    head_dim=6,
    num_key_value_heads=4,
    rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
    dtype="float32",
  ),
  "qwen2": _case(
    "qwen2",
    rope_theta=1_000_000.0,
    use_sliding_window=False,
    sliding_window=4,
    max_window_layers=1,
    tie_word_embeddings=True,
  ),
  "qwen2_yarn": _case(
    "qwen2",
    num_key_value_heads=1,
    rope_theta=1_000_000.0,
    rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
  ),
  "qwen3": _case(
    "qwen3",
    head_dim=8,
    rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    rms_norm_eps=1e-6,
  ),
  "qwen3_window": _case(
    "qwen3",
    head_dim=8,
    attention_bias=True,
    rope_theta=10_000.0,
    use_sliding_window=True,
    sliding_window=5,
    max_window_layers=0,
    tie_word_embeddings=True,
  ),
  "mistral": _case("mistral", rope_theta=10_000.0, sliding_window=4, head_dim=4),
}


def tokens(seed: int) -> np.ndarray:
  """[2, 24] ids; longer than every window and than qwen2_yarn's context of pretraining."""
  return np.random.RandomState(seed).randint(0, _SIZES["vocab_size"], (2, 24))  # noqa: NPY002


def tensors(case: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
  """The weights of a checkpoint, in float32."""
  # The legacy generator, because its numbers are the same in every version of NumPy.
  rng = np.random.RandomState(seed)  # noqa: NPY002
  hidden, width, vocabulary = (
    case[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
  )
  head_dim = case.get("head_dim", hidden // case["num_attention_heads"])
  heads, shared = (case[key] * head_dim for key in ("num_attention_heads", "num_key_value_heads"))
  biased = case["model_type"] == "qwen2", case.get("attention_bias", False)

  shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
  for i in range(case["num_hidden_layers"]):
    layer = {
      "input_layernorm.weight": (hidden,),
      "self_attn.q_proj.weight": (heads, hidden),
      "self_attn.k_proj.weight": (shared, hidden),
      "self_attn.v_proj.weight": (shared, hidden),
      "self_attn.o_proj.weight": (hidden, heads),
      "post_attention_layernorm.weight": (hidden,),
      "mlp.gate_proj.weight": (width, hidden),
      "mlp.up_proj.weight": (width, hidden),
      "mlp.down_proj.weight": (hidden, width),
    }
    if any(biased):
      layer |= {f"self_attn.{name}_proj.bias": (heads,) for name in "q"}
      layer |= {f"self_attn.{name}_proj.bias": (shared,) for name in "kv"}
    if biased[1]:
      layer["self_attn.o_proj.bias"] = (hidden,)
    if case["model_type"] == "qwen3":
      layer |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
  shapes["model.norm.weight"] = (hidden,)
  if not case.get("tie_word_embeddings", False):
    shapes["lm_head.weight"] = (vocabulary, hidden)

  def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    normal = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("norm.weight"):
      return 1 + np.float32(0.2) * normal
    return normal * np.float32(0.5 if name.endswith("bias") else shape[-1] ** -0.5 * 1.5)

  return {name: draw(name, shape) for name, shape in shapes.items()}


def write_checkpoint(folder: Path, name: str, seed: int) -> Path:
  """config.json and model.safetensors of a case; returns the folder."""
  from safetensors.numpy import save_file

  folder.mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(CASES[name]))
  save_file(tensors(CASES[name], seed), folder / "model.safetensors", metadata={"format": "pt"})
  return folder
