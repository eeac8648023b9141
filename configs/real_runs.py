"""Settings of `experiments.real_run`: models of half a billion parameters on GSM8K.

None of these runs has been made: there were no weights and no such machine. What was checked is
in `python -m experiments.real_run --check`. The numbers of the models are those of config.json in
the repositories Qwen/Qwen2.5-0.5B and Qwen/Qwen3-0.6B of the Hugging Face hub; learning rate and
sizes of batches are our choice, not tuned.
"""

from __future__ import annotations

import dataclasses
from typing import Any

QWEN2_5_05B: dict[str, Any] = {
  "model_type": "qwen2",
  "vocab_size": 151936,
  "hidden_size": 896,
  "intermediate_size": 4864,
  "num_hidden_layers": 24,
  "num_attention_heads": 14,
  "num_key_value_heads": 2,
  "max_position_embeddings": 32768,
  "rms_norm_eps": 1e-6,
  "rope_theta": 1000000.0,
  "tie_word_embeddings": True,
  "use_sliding_window": False,
  "hidden_act": "silu",
}

QWEN3_06B: dict[str, Any] = {
  "model_type": "qwen3",
  "vocab_size": 151936,
  "hidden_size": 1024,
  "intermediate_size": 3072,
  "num_hidden_layers": 28,
  "num_attention_heads": 16,
  "num_key_value_heads": 8,
  "head_dim": 128,
  "max_position_embeddings": 40960,
  "rms_norm_eps": 1e-6,
  "rope_theta": 1000000,
  "rope_scaling": None,
  "tie_word_embeddings": True,
  "attention_bias": False,
  "use_sliding_window": False,
  "hidden_act": "silu",
}


@dataclasses.dataclass(frozen=True)
class Machine:
  """Devices of one host, and how the run lies on them."""

  device: str
  """Its name."""
  memory: int
  """Bytes of each device, as its maker states them."""
  data: int = 1
  """Copies of parameters and moments; rows are spread over them."""
  fsdp: int = 1
  """Parts that parameters and moments are cut into; rows are spread over them too."""
  tensor: int = 1
  """Parts that heads, MLP and vocabulary are cut into."""

  @property
  def count(self) -> int:
    """Devices."""
    return self.data * self.fsdp * self.tensor


# 16 GB of HBM a chip (docs.cloud.google.com/tpu/docs/v5e); 141 GB (MLPerf system descriptions).
TPU_V5E_8 = Machine("TPU v5e", 16 * 10**9, fsdp=8)
H200 = Machine("H200", 141 * 10**9)


@dataclasses.dataclass(frozen=True)
class Config:
  """GRPO on GSM8K, on one machine."""

  published: dict[str, Any]
  """The model's config.json."""
  machine: Machine
  """Where it runs."""
  prompt_length: int = 256
  """Longest prompt that memory was checked for, tokens; a longer one is an error."""
  max_new_tokens: int = 1024
  """Longest response, tokens."""
  num_prompts: int = 32
  """Groups in a step."""
  group_size: int = 8
  """Responses to a prompt."""
  minibatches: int = 2
  """Optimiser steps in a step."""
  micro_batches: int = 4
  """Parts that the rows of an optimiser step are scored in. Memory and time only."""
  learning_rate: float = 1e-6
  """Constant after the warm-up."""
  warmup: int = 10
  """Optimiser steps."""
  kl_coef: float = 1e-3
  """Weight of the KL to the start in the loss; 0 = no reference policy in memory."""
  steps: int = 500
  """Steps of training."""
  seed: int = 0
  """Of samples and data order."""
  save_every: int = 25
  """Steps between checkpoints."""


CONFIGS = {
  "qwen2.5-0.5b-v5e-8": Config(QWEN2_5_05B, TPU_V5E_8),
  "qwen2.5-0.5b-h200": Config(QWEN2_5_05B, H200, num_prompts=64, micro_batches=8),
  "qwen3-0.6b-v5e-8": Config(QWEN3_06B, TPU_V5E_8, micro_batches=8),
  "qwen3-0.6b-h200": Config(QWEN3_06B, H200, num_prompts=64, micro_batches=16),
}
