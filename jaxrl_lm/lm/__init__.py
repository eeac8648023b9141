"""The systems side: a policy to load, to score with and to sample from; tasks to train it on."""

from jaxrl_lm.lm.characters import Characters
from jaxrl_lm.lm.checkpoints import CheckpointError, Checkpoints, Restored
from jaxrl_lm.lm.decoding import Samples
from jaxrl_lm.lm.number_tasks import addition, countdown, digits
from jaxrl_lm.lm.partition import param_specs
from jaxrl_lm.lm.policy import Cache, Model, Output, PolicyConfig, abstract_params, init
from jaxrl_lm.lm.pretrained import Pretrained, load, save
from jaxrl_lm.lm.problem_tasks import gsm8k, word_problems
from jaxrl_lm.lm.processes import GracefulExit
from jaxrl_lm.lm.reward_errors import RewardError
from jaxrl_lm.lm.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from jaxrl_lm.lm.sampling import pad_prompts, sample, stream
from jaxrl_lm.lm.scoring import response_logprobs
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

__all__ = [
  "Cache",
  "Characters",
  "CheckpointError",
  "Checkpoints",
  "Component",
  "GracefulExit",
  "LinearScaling",
  "Llama3Scaling",
  "Model",
  "Output",
  "PolicyConfig",
  "Pretrained",
  "Prompt",
  "Responses",
  "Restored",
  "RewardError",
  "Rope",
  "Samples",
  "Scores",
  "Task",
  "Tokenizer",
  "YarnScaling",
  "abstract_params",
  "addition",
  "countdown",
  "decode_responses",
  "digits",
  "first_token",
  "gsm8k",
  "if_finished",
  "init",
  "load",
  "modular_sum",
  "pad_prompts",
  "param_specs",
  "per_text",
  "response_logprobs",
  "sample",
  "save",
  "stories",
  "stream",
  "word_problems",
]
