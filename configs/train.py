"""Settings of `experiments.train`.

Functions are named as `experiments.harness.names` reads them: `dr_grpo`, `kl_k3`,
`truncated(cap=2.0)`, `stories(word='dog')`, `my_module.my_task`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Critic:
  """The critic of objectives that need one (PPO): the policy with a scalar head."""

  learning_rate: float = 1e-3
  """Of its AdamW."""
  value_clip: float = 0.2
  """How far a value may move in a step, in units of the return; inf: as far as it likes."""


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Devices along each axis; rows go over data x fsdp, parameters over fsdp x tensor."""

  data: int = 1
  """Copies of the policy."""
  fsdp: int = 1
  """Shards of parameters and moments, gathered for use."""
  tensor: int = 1
  """Shards of heads, MLP width and vocabulary."""


@dataclasses.dataclass(frozen=True)
class Config:
  """Any task, any objective, any checkpoint."""

  task: str | None = None
  """stories, addition, digits, countdown, gsm8k, modular_sum, first_token, or a function of your
  own that takes a tokenizer. None: stories where its model is, else addition."""
  reward_weights: dict[str, float] = dataclasses.field(default_factory=dict)
  """Other weights of the task's rewards: ending 0 word 1."""
  model: Path | None = None
  """Folder of Hugging Face, or a model file of llama2.c. None: stories260K of the data folder; for
  tasks on digits a small transformer that is pretrained first, once; for tasks on tokens a random
  one."""
  objective: str = "grpo"
  """A row of the table of algorithms."""
  level: str | None = None
  """Another level of the ratio: per_token, per_prefix, per_sequence, per_sequence_geometric."""
  loss_weights: str | None = None
  """Another length normalisation: token_mean, sequence_mean, constant_length(length=96)."""
  selection: str | None = None
  """For clip_cov and kl_cov: the tokens they treat apart. None: as their paper does."""

  steps: int = 72
  """Until when to train. More steps than are done: the run goes on. Not part of what must match."""
  num_prompts: int = 8
  """Groups in a step."""
  group_size: int = 8
  """Responses to each prompt."""
  max_new_tokens: int | None = None
  """Longest response, its stop token included. None: 96, and 24 on a policy that is made here."""
  stop_tokens: tuple[int, ...] | None = None
  """Ids that end a response. None: those of the tokenizer."""
  temperature: float = 1.0
  """Of sampler and loss."""
  top_k: int | None = None
  """Draw from that many likeliest tokens only. It makes the samples off-policy."""
  top_p: float = 1.0
  """Draw from the fewest likeliest tokens of that probability."""
  attempts: int = 1
  """Dynamic sampling: at most that many times num_prompts prompts are drawn for groups whose
  rewards differ."""
  overlong: str | None = None
  """Penalty of long responses: overlong_penalty(max_length=96, buffer=16)."""
  drop_unfinished: bool = False
  """Leave responses without a stop token out of the loss."""

  kl: str | None = "kl_k2"
  """Estimator of the KL term in the loss. With kl_coef 0 it is only shown. None: no reference."""
  kl_coef: float = 0.05
  """Its weight."""
  reward_kl: str | None = None
  """Estimator of a KL penalty in the reward, such as kl_k1."""
  reward_kl_coef: float = 0.0
  """Reward per nat."""
  entropy_coef: float = 0.0
  """Of the entropy bonus."""
  importance: str | None = None
  """Correction of a sampler that differs from the trainer: truncated(cap=2.0), banded(low=0.5,
  high=2.0), rejected(...)."""

  epochs: int = 1
  """Passes over the responses of a step."""
  minibatches: int = 1
  """Optimiser steps in a pass, each on whole groups."""
  micro_batches: int = 1
  """Parts in which rows are scored, one after the other: less memory, the same numbers."""
  packed: int | None = None
  """Tokens in a row that holds several responses and their prompts, in scoring and updates: less
  time where lengths differ much, the same numbers. None: a row is one response."""
  score: str = "response_scores"
  """How responses are scored; linear_response_scores holds no logits in memory."""
  optimizer: str = "optimizer"
  """The library's AdamW, optimizer(weight_decay=0.1), which does not decay norms and biases; or
  one of optax, such as sgd(momentum=0.9)."""
  learning_rate: float = 3e-4
  """At the end of the warm-up."""
  warmup: int = 0
  """Optimiser steps in which it grows from 0."""
  schedule: str = "constant_schedule"
  """What follows, of optax: cosine_decay_schedule(decay_steps=500), linear_schedule(end_value=0.0,
  transition_steps=500). Steps are those of the optimiser."""
  max_grad_norm: float | None = 1.0
  """Gradients are clipped to it."""
  critic: Critic = Critic()
  bfloat16: bool = False
  """Compute in it; parameters and moments stay in float32."""
  remat: bool = False
  """Recompute activations in the backward pass instead of keeping them."""
  mesh: Mesh = Mesh()
  seed: int = 0
  """Of samples, order and minibatches."""

  evaluate_every: int = 24
  """Steps from one evaluation on held-out prompts to the next; 0: only at the beginning and end."""
  held_out_prompts: int = 64
  """At most that many of the task's."""
  held_out_samples: int = 16
  """Responses to each, at least 2."""
  show_every: int = 12
  """Steps from one table of samples to the next; 0: none."""
  shown: int = 3
  """Responses in it."""
  checkpoint_every: int = 8
  """Steps from one checkpoint to the next. There is one at each evaluation, too."""
  tensorboard: bool = False
  """Event files, too; needs the package tensorboardX."""


DEFAULT = Config()

SMALL = replace(
  DEFAULT,
  task="first_token(targets=[1, 2, 3])",
  steps=8,
  num_prompts=3,
  group_size=4,
  max_new_tokens=2,
  learning_rate=0.03,
  held_out_samples=4,
  evaluate_every=4,
  show_every=4,
  checkpoint_every=2,
)

QWEN = replace(
  DEFAULT,
  task="gsm8k(path='gsm8k/train.jsonl', held_out_path='gsm8k/test.jsonl')",
  steps=1000,
  num_prompts=32,
  max_new_tokens=512,
  minibatches=2,
  micro_batches=8,
  score="linear_response_scores",
  learning_rate=1e-6,
  warmup=20,
  kl_coef=0.001,
  bfloat16=True,
  remat=True,
  evaluate_every=50,
  held_out_samples=4,
  show_every=10,
  checkpoint_every=25,
)

CONFIGS = {
  "default": (DEFAULT, "stories260K learns to write of a dog: 4 minutes on two cores."),
  "small": (SMALL, "A random policy of one layer: seconds."),
  "qwen_gsm8k": (QWEN, "For --model of 0.5B parameters, on one accelerator: not run by us."),
  "qwen_gsm8k_slice": (
    replace(QWEN, mesh=Mesh(fsdp=8)),
    "The same over eight devices, parameters in shards: not run by us.",
  ),
}
