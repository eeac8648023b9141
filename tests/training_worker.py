"""A tiny training run that can be killed: `python -m tests.training_worker folder steps`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax

import jaxrl_lm as rl
from experiments.harness import training_run
from experiments.harness.held_out import Evaluation
from experiments.harness.training_run import Habits, History
from jaxrl_lm.lm.optimizers import optimizer
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.rollouts import RolloutConfig
from jaxrl_lm.lm.token_tasks import modular_sum
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.update_config import UpdateConfig
from tests.bigram import Bigram

END, VOCABULARY = 3, 4
POLICY = Pretrained(
  Bigram(VOCABULARY), jax.random.normal(jax.random.key(3), (VOCABULARY, VOCABULARY)), None
)
TASK = modular_sum(VOCABULARY, [0, 1, 2], end_token=END)
CONFIG = TrainConfig(
  rollout=RolloutConfig(num_prompts=4, group_size=4, max_new_tokens=3, stop_tokens=(END,)),
  update=UpdateConfig(objective=rl.GRPO, optimizer=optimizer(0.1), kl=rl.kl_k2, kl_coef=0.01),
  steps=6,
  seed=7,
  minibatches=2,
)
EVALUATION = Evaluation(prompts=3, samples=4, every=4)
HABITS = Habits(checkpoint_every=2, show_every=2)


def train(folder: Path, config: TrainConfig = CONFIG, **options: Any) -> History:
  settings = {"task": TASK, "say": print, "evaluation": EVALUATION, "habits": HABITS} | options
  return training_run.run(POLICY, config=config, folder=folder, **settings)


if __name__ == "__main__":
  import dataclasses

  def say(line: Any) -> None:
    print(line, flush=True)

  train(Path(sys.argv[1]), dataclasses.replace(CONFIG, steps=int(sys.argv[2])), say=say)
