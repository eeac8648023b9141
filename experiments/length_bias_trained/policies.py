"""Where a run starts: sums with filler, on a model that pretrains itself, or stories that end.

A task has one reward, whether a response is right, and reports beside it how long the right and
the wrong ones are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxrl_lm as rl
from configs.length_bias_trained import Filler, Stories
from experiments.harness import run, small_models, training_run
from experiments.harness.small_models import Recipe
from jaxrl_lm.lm import number_tasks, optimizers, pretrained, story_tasks, verifiers
from jaxrl_lm.lm.characters import Characters
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.rollouts import RolloutConfig
from jaxrl_lm.lm.tasks import Component, Prompt, Responses, Reward, Task, if_finished, per_text
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.update_config import UpdateConfig

FILLER, GIVEN_UP = ".", "?"
ALPHABET = number_tasks.ADDITION_CHARACTERS + FILLER + GIVEN_UP
STORIES = "stories260K/stories260K.bin"
SEED = 99  # apart from those of the runs that are compared
RIGHT, IF_RIGHT, IF_WRONG = "right", "length if right", "length if wrong"


class Start(NamedTuple):
  """Model, parameters and tokenizer, and what they are trained on."""

  policy: Pretrained
  task: Task


def filler(settings: Filler, first: bool, say: Callable[[Any], None]) -> Start:
  """Sums of one digit, "3+4=", and filler behind or before the answer, as long if right as if not.

  Right: "7....", or "....7" with filler first. Wrong: "?....", or "....?": the policy gives up.
  With filler last the first token decides the reward, and all that follows sees which one it was.
  """
  tokenizer = Characters(ALPHABET)
  sums = number_tasks.addition(tokenizer, digits=1, prompts=75, held_out=25)
  train, held_out = (
    tuple(prompt for prompt in prompts if len(prompt.reference) == 1)
    for prompts in (sums.prompts, sums.held_out)
  )
  task = Task(train, held_out, _with_lengths(per_text(_is_right)))
  recipe = Recipe(
    f"filler_{'first' if first else 'last'}-{settings.most}-{settings.steps}-{settings.width}",
    ALPHABET,
    lambda rng, prompt, right: _solution(settings, first, rng, prompt, right),
    length=len("3+4=7") + settings.most + 1,
    steps=settings.steps,
    width=settings.width,
  )
  folder = run.RESULTS / "small_models"
  return Start(small_models.pretrained_on(recipe, task, folder, say=say), task)


def stories(settings: Stories, model: Path, folder: Path) -> Start:
  """stories260K, taught to end earlier; a story is right if it has the word and ends."""
  training, longest = settings.training, settings.longest
  policy = pretrained.load(model)
  task = story_tasks.stories(policy.tokenizer, word=settings.word)
  # Of what is beyond the longest response that is to come.
  early = partial(rl.overlong_penalty, max_length=longest, buffer=longest - training.max_new_tokens)
  config = TrainConfig(
    RolloutConfig(training.num_prompts, settings.group_size, longest, overlong=early),
    UpdateConfig(
      rl.dr_grpo(longest), optimizers.optimizer(training.learning_rate), max_grad_norm=None
    ),
    steps=settings.steps,
    seed=SEED,
    shown=0,
  )
  only_ending = task.weighted({"word": 0.0, "ending": 1.0})
  state = training_run.run(policy, only_ending, config, folder, say=lambda _: None).state
  rewards = _with_lengths(if_finished(per_text(verifiers.contains_word)))
  task = dataclasses.replace(task, rewards=rewards)
  return Start(policy._replace(params=state.params), task)


def _solution(
  settings: Filler, first: bool, rng: np.random.Generator, prompt: Prompt, right: bool
) -> str:
  answer = prompt.reference if right else GIVEN_UP
  # A geometric number has no memory: modulo one it is a geometric number below it.
  dots = FILLER * (int(rng.geometric(1 / (1 + settings.mean)) - 1) % (settings.most + 1))
  return dots + answer if first else answer + dots


def _is_right(text: str, reference: str) -> float:
  return float(text.strip(FILLER) == reference)


def _with_lengths(reward: Reward) -> tuple[Component, ...]:
  def length(right: bool) -> Reward:
    def of(responses: Responses) -> np.ndarray:
      lengths = responses.mask.sum(axis=-1)
      return np.where((np.asarray(reward(responses)) > 0) == right, lengths, np.nan)

    return of

  reported = (Component(IF_RIGHT, length(True), 0.0), Component(IF_WRONG, length(False), 0.0))
  return (Component(RIGHT, reward), *reported)
