"""The policy whose responses grow stale: stories260K or a small transformer, somewhat trained."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxrl_lm as rl
from configs import ratio_explosion
from configs.ratio_explosion_trained import Chain, Config
from experiments.harness import run, small_models, training_run
from experiments.harness.small_models import Recipe
from experiments.ratio_explosion.chains import pair
from jaxrl_lm.lm import optimizers, pretrained, story_tasks, token_tasks
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.rollouts import RolloutConfig
from jaxrl_lm.lm.tasks import Prompt, Task
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.train_state import TrainState
from jaxrl_lm.lm.update_config import UpdateConfig

STORIES = "stories260K/stories260K.bin"
ALPHABET = "abcde"
ABSENT = (
  f"{STORIES} was not found (set JAXRL_LM_DATA): instead of stories the responses are those of a "
  "small transformer that learns the Markov chain of ratio_explosion here"
)
WARMUP_SEED = 10**5  # apart from those of the rollouts


class Start(NamedTuple):
  """Where all updates start.

  Attributes:
    policy: as it was pretrained.
    task: prompts and rewards.
    state: parameters and moments after the warm-up.
  """

  policy: Pretrained
  task: Task
  state: TrainState


def possible(config: Config) -> Config:
  """The settings; on a chain, and of its lengths, where stories260K is not found."""
  if not config.stories or run.data_path(STORIES) is not None:
    return config
  longest = min(config.tokens, config.chain.tokens)
  lengths = tuple(length for length in config.lengths if length <= longest)
  return replace(config, stories=False, tokens=longest, lengths=lengths)


def start(config: Config, folder: Path, say: Callable[[Any], None]) -> Start:
  """Pretrained, and trained on-policy for the steps of the warm-up; a killed one goes on."""
  path = run.data_path(STORIES) if config.stories else None
  if path is not None:
    policy = pretrained.load(path)
    task = story_tasks.stories(policy.tokenizer, word=config.word)
  else:
    policy, task = _chain(config.chain, say)
  settings = train_config(config, config.warmup_rate, WARMUP_SEED, groups=config.minibatch_groups)
  history = training_run.run(policy, task, settings, folder, say=say)
  return Start(policy, task, history.state)


def train_config(config: Config, rate: Any, seed: int, *, groups: int) -> TrainConfig:
  """Of a rollout of so many groups, in minibatches of the usual size, for GRPO without a KL term.

  No token ends a response: those of at least T tokens would be a choice, and their ratios no
  longer have the mean 1.
  """
  return TrainConfig(
    rollout=RolloutConfig(groups, config.group_size, config.tokens, stop_tokens=()),
    update=update_config(rate),
    steps=config.warmup_steps,
    seed=seed,
    minibatches=groups // config.minibatch_groups,
  )


def update_config(rate: Any) -> UpdateConfig:
  """GRPO with the library's AdamW."""
  return UpdateConfig(rl.GRPO, optimizers.optimizer(rate))


def _chain(made: Chain, say: Callable[[Any], None]) -> tuple[Pretrained, Task]:
  size = 1 + len(ALPHABET)
  task = token_tasks.first_token(size, range(1, size))
  if made.steps == 0:
    return small_models.random_policy(size), task
  known = ratio_explosion.Chain()
  behaviour, _ = pair(known, known.rates[0])
  below = np.cumsum(np.exp(behaviour.transition), axis=1)[:, :-1].tolist()

  def sequence(rng: np.random.Generator, prompt: Prompt, right: bool) -> str:
    tokens = [prompt.tokens[0] - 1]
    for uniform in rng.random(made.tokens):
      tokens.append(bisect.bisect(below[tokens[-1]], uniform))
    return "".join(ALPHABET[token] for token in tokens[1:])

  name = f"chain-{made.tokens}-{made.steps}-{made.width}"
  recipe = Recipe(name, ALPHABET, sequence, made.tokens + 2, made.steps, made.width)
  policy = small_models.pretrained_on(recipe, task, run.RESULTS / "small_models", say=say)
  return policy, task
