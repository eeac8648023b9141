r"""The most reward that any policy can have at a KL to the start, from samples of the start.

  pi*(y | x) ~ pi_start(y | x) exp(r(y) / beta)            one beta for all prompts
  R*(beta)  = mean_x E*[r],   KL*(beta) = mean_x (E*[r] / beta - log Z_x)

needs no more than p_x(r), the distribution of the reward under the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from configs.stories import Config
from experiments.harness import held_out
from experiments.stories import runs
from experiments.train.policies import Start

TEMPERATURES = np.geomspace(100.0, 0.02, 300)  # beta, reward per nat
BEST_OF = 2 ** np.arange(1, 11)  # n


class Curve(NamedTuple):
  """Reward [B] against KL [B], nats per response, both rising."""

  kl: np.ndarray
  reward: np.ndarray

  def at(self, kl: Any) -> Any:
    """The reward at a KL."""
    return np.interp(kl, self.kl, self.reward)

  def least_kl(self, reward: Any) -> Any:
    """The KL that a reward needs; infinite where none reaches it."""
    return np.interp(reward, self.reward, self.kl, right=np.inf)

  def power(self) -> float:
    """a of gain ~ KL^a, from 10 to 90 % of the way to the most."""
    gains = (self.reward[-1] - self.reward[0]) * np.array([0.1, 0.9])
    return float(np.log(9) / np.diff(np.log(self.least_kl(self.reward[0] + gains)))[0])


def rewards_of_start(
  config: Config, start: Start, track: Callable[[Iterable[int]], Iterable[int]]
) -> dict[str, np.ndarray]:
  """The distribution of the reward under the start, by held-out prompt.

  Args:
    config, start: of the experiment.
    track: shows progress.

  Returns:
    {"levels" [L], "probabilities" [P, L], "resampled" [R, P, L]}, the last of samples of the
    responses with replacement.
  """
  shape, settings = runs.evaluation(config), config.frontier
  train = runs.train_config(config, start, config.algorithms[0], config.seeds[0])
  found = []
  for step in track(range(1, settings.rounds + 1)):  # step 0 is the noise of the evaluations
    drawn = held_out.draw(start.policy, start.task, train, shape, jnp.asarray, step=step)
    found.append(drawn.scores.total.reshape(-1, shape.samples).astype(float))
  levels, at = np.unique(np.concatenate(found, axis=1).round(6), return_inverse=True)
  hits = np.arange(len(levels)) == at.reshape(len(found[0]), -1)[..., None]  # [P, N, L]
  probabilities, count = hits.mean(axis=1), hits.shape[1]
  again = np.random.default_rng(0).multinomial(
    count, probabilities, size=(settings.resamples, len(probabilities))
  )
  return {"levels": levels, "probabilities": probabilities, "resampled": again / count}


def optimum(levels: np.ndarray, probabilities: np.ndarray) -> Curve:
  """The curve of the tilted policies.

  Args:
    levels: [L] rewards.
    probabilities: [P, L] of each, under the start.
  """
  with np.errstate(divide="ignore"):
    log_p = np.log(probabilities)
  tilted = log_p[None] + levels / TEMPERATURES[:, None, None]  # [B, P, L]
  log_z = np.logaddexp.reduce(tilted, axis=-1)
  reward = np.sum(np.exp(tilted - log_z[..., None]) * levels, axis=-1)
  kl = reward / TEMPERATURES[:, None] - log_z
  return Curve(kl.mean(axis=-1), reward.mean(axis=-1))


def best_of(levels: np.ndarray, probabilities: np.ndarray) -> Curve:
  """The best of n samples of the start, ties drawn by lot, for n of BEST_OF.

  It weighs responses by their reward alone, so that the KL is exact, not its bound
  log n - (n - 1) / n; and for one prompt and a reward of two values it is optimal.
  """
  below = np.cumsum(probabilities, axis=-1)
  below = np.concatenate([np.zeros_like(below[:, :1]), below / below[:, -1:]], axis=-1)
  q = np.diff(below[None] ** BEST_OF[:, None, None], axis=-1)  # [B, P, L]
  with np.errstate(divide="ignore", invalid="ignore"):
    kl = np.where(q > 0, q * np.log(q / probabilities), 0.0).sum(axis=-1)
  return Curve(kl.mean(axis=-1), (q @ levels).mean(axis=-1))
