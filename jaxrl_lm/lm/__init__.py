"""The systems side: a policy to load, score, sample from and train; tasks; checkpoints."""

from jaxrl_lm.lm.characters import Characters
from jaxrl_lm.lm.checkpoints import CheckpointError, Checkpoints, Restored
from jaxrl_lm.lm.data_order import fingerprint
from jaxrl_lm.lm.decoding import Samples
from jaxrl_lm.lm.gathered import Gathered
from jaxrl_lm.lm.micro_batches import Batch, pad_rows
from jaxrl_lm.lm.number_tasks import addition, countdown, digits
from jaxrl_lm.lm.optimizers import optimizer
from jaxrl_lm.lm.packing import few_shapes, pack_rows, unpack_tokens
from jaxrl_lm.lm.partition import param_specs
from jaxrl_lm.lm.policy import Cache, Model, Output, PolicyConfig, abstract_params, init
from jaxrl_lm.lm.pretrained import Pretrained, load, save
from jaxrl_lm.lm.problem_tasks import gsm8k, word_problems
from jaxrl_lm.lm.processes import GracefulExit
from jaxrl_lm.lm.pure_training import PureMetrics, PureTrainConfig, make_train
from jaxrl_lm.lm.reports import Report, Sample
from jaxrl_lm.lm.reward_errors import RewardError
from jaxrl_lm.lm.rollouts import Rollout, RolloutConfig, rollout
from jaxrl_lm.lm.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from jaxrl_lm.lm.sampling import pad_prompts, sample, stream
from jaxrl_lm.lm.scoring import (
  TokenScores,
  linear_response_scores,
  response_logprobs,
  response_scores,
  response_values,
)
from jaxrl_lm.lm.story_tasks import stories
from jaxrl_lm.lm.tasks import (
  Component,
  Prompt,
  Responses,
  Scores,
  Task,
  decode_responses,
  if_finished,
  per_text,
)
from jaxrl_lm.lm.text import Tokenizer
from jaxrl_lm.lm.token_tasks import first_token, modular_sum
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.train_state import (
  CriticState,
  TrainState,
  batch_sharding,
  init_state,
  state_shardings,
)
from jaxrl_lm.lm.training import train
from jaxrl_lm.lm.update_config import CriticConfig, UpdateConfig, kl_cov_tokens
from jaxrl_lm.lm.update_metrics import CriticMetrics, UpdateMetrics
from jaxrl_lm.lm.updates import compile_update, update

__all__ = [
  "Batch",
  "Cache",
  "Characters",
  "CheckpointError",
  "Checkpoints",
  "Component",
  "CriticConfig",
  "CriticMetrics",
  "CriticState",
  "Gathered",
  "GracefulExit",
  "LinearScaling",
  "Llama3Scaling",
  "Model",
  "Output",
  "PolicyConfig",
  "Pretrained",
  "Prompt",
  "PureMetrics",
  "PureTrainConfig",
  "Report",
  "Responses",
  "Restored",
  "RewardError",
  "Rollout",
  "RolloutConfig",
  "Rope",
  "Sample",
  "Samples",
  "Scores",
  "Task",
  "TokenScores",
  "Tokenizer",
  "TrainConfig",
  "TrainState",
  "UpdateConfig",
  "UpdateMetrics",
  "YarnScaling",
  "abstract_params",
  "addition",
  "batch_sharding",
  "compile_update",
  "countdown",
  "decode_responses",
  "digits",
  "few_shapes",
  "fingerprint",
  "first_token",
  "gsm8k",
  "if_finished",
  "init",
  "init_state",
  "kl_cov_tokens",
  "linear_response_scores",
  "load",
  "make_train",
  "modular_sum",
  "optimizer",
  "pack_rows",
  "pad_prompts",
  "pad_rows",
  "param_specs",
  "per_text",
  "response_logprobs",
  "response_scores",
  "response_values",
  "rollout",
  "sample",
  "save",
  "state_shardings",
  "stories",
  "stream",
  "train",
  "unpack_tokens",
  "update",
  "word_problems",
]
