"""Exact advantages along every response, and what each assignment of credit does to the update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_lm as rl
from configs.credit_assignment import Config
from configs.policies import Network, Table
from experiments.harness.shared_policy import reference_policy
from jaxrl_lm.exact import (
  Language,
  Moments,
  Policy,
  TokenValues,
  enumerate_language,
  first_token_reward,
  modular_sum_reward,
  response_probs,
  token_values,
)
from jaxrl_lm.exact.credit import credit_moments
from jaxrl_lm.exact.problem import target_gradient
from jaxrl_lm.exact.scores import score_gram

REWARDS = {"sum": modular_sum_reward, "first": first_token_reward}


class Problem(NamedTuple):
  """A policy, one reward [P, N] of every response, and what follows from both.

  probs: [P, N] of the responses. exact: values [P, N, T]. gram: [P, N, T, T] inner products of the
  token scores.
  """

  policy: Policy
  rewards: np.ndarray
  probs: np.ndarray
  exact: TokenValues
  gram: np.ndarray

  @property
  def start(self) -> np.ndarray:
    """[P] V(x) = P(correct)."""
    return self.exact.values[:, 0, 0]


def problems(config: Config, kind: Table | Network) -> dict[str, Problem]:
  """The reference policy by counting, or a network fitted to it, under either reward."""
  setting = config.setting
  language = enumerate_language(setting.vocabulary, setting.horizon)
  policy = reference_policy(
    kind,
    language,
    prompts=len(setting.targets),
    seed=setting.seed,
    concentration=setting.concentration,
  )
  logprobs = policy.logprobs()
  probs = np.asarray(response_probs(language, logprobs))
  gram = np.stack([np.asarray(score_gram(policy, p)) for p in range(policy.num_prompts)])
  found = {}
  for name, reward in REWARDS.items():
    rewards = reward(language, setting.targets)
    exact = jax.tree.map(np.asarray, token_values(language, logprobs, jnp.asarray(rewards)))
    found[name] = Problem(policy, rewards, probs, exact, gram)
  return found


def measure(config: Config, kind: Table | Network) -> dict[str, Any]:
  """Everything about one policy, by reward."""
  return {name: _of_reward(config, given) for name, given in problems(config, kind).items()}


def _of_reward(config: Config, given: Problem) -> dict[str, Any]:
  """Everything about one policy and one reward."""
  language, rewards = given.policy.language, given.rewards
  critics = values_of_critics(
    language, given.exact.values, error=config.critic_error, seed=config.critic_seed
  )
  wholes = whole_returns(given)
  grids = {
    f"{critic} critic": {x: credit(language, rewards, values, gae_lambda=x) for x in config.lambdas}
    for critic, values in critics.items()
  }
  wrong = critics["wrong"]
  grids["discount"] = {x: credit(language, rewards, wrong, discount=x) for x in config.lambdas}
  rows = {f"{name}, {x:g}": c for name, grid in grids.items() for x, c in grid.items()}
  moments = credit_moments(given.policy, {**wholes, **rows}, given.rewards)
  return {
    "advantages": along_responses(config, given),
    "rows": {name: described(moments[name]) for name in wholes},
    "baseline": worth_of_baseline(given),
    "decay": decay_error(given, grids["uninformative critic"]),
    "grids": {
      name: _stacked([moments[f"{name}, {x:g}"] for x in config.lambdas]) for name in grids
    },
  }


def along_responses(config: Config, given: Problem) -> dict[str, Any]:
  """Mean sizes of the advantages, whether they telescope, and some responses token by token.

  correct: [P] V(x). tokens: [P, T] E|A_t|. response: [P] E|r - V(x)|. telescoping: the largest
  |sum of A_t - (r - V(x))|. shown: probable responses to one prompt, half of them right.
  """
  centred = given.rewards - given.start[:, None]
  advantages = given.exact.advantages
  p, half = config.shown_prompt, (config.shown + 1) // 2
  order = np.argsort(-given.probs[p], kind="stable")
  right = given.rewards[p][order] == 1
  rows = np.concatenate([order[right][:half], order[~right][: config.shown - half]])
  return {
    "correct": given.start,
    "tokens": np.einsum("pn,pnt->pt", given.probs, np.abs(advantages)),
    "response": np.sum(given.probs * np.abs(centred), axis=-1),
    "telescoping": np.abs(advantages.sum(axis=-1) - centred).max(),
    "shown": {
      "tokens": given.policy.language.tokens[rows],
      "rewards": given.rewards[p, rows],
      "probs": given.probs[p, rows],
      "advantages": advantages[p, rows],
    },
  }


def whole_returns(given: Problem) -> dict[str, np.ndarray]:
  """[P, N, T] coefficients of the unbiased assignments without GAE.

  "b*(x)" is the best constant baseline, E[|S|^2 r] / E[|S|^2] with S the score of the response.
  "A - c*(s)" has the best state baseline, and so the least variance, where states share no
  parameters; else it is only a further unbiased one.
  """
  r = np.broadcast_to(given.rewards[..., None], given.exact.values.shape)
  values, advantages = given.exact.values, given.exact.advantages
  best, _ = best_baseline(given)
  return {
    "none": r,
    "V(x)": r - given.start[:, None, None],
    "b*(x)": r - best[:, None, None],
    "V(s)": r - values,
    "A": advantages,
    "A - c*(s)": advantages - best_state_baseline(given),
  }


def best_baseline(given: Problem) -> tuple[np.ndarray, np.ndarray]:
  """E[|S|^2 r] / E[|S|^2] and E[|S|^2], [P] each, S the score of the response."""
  weight = given.probs * given.gram.sum(axis=(2, 3))
  total = weight.sum(axis=-1)
  return np.sum(weight * given.rewards, axis=-1) / total, total


def best_state_baseline(given: Problem) -> np.ndarray:
  """[P, N, T] E[|s_t|^2 A_t | state] / E[|s_t|^2 | state]."""
  language = given.policy.language
  weight = given.probs[..., None] * given.gram.diagonal(axis1=2, axis2=3)  # [P, N, T]

  def at_state(x: np.ndarray) -> np.ndarray:
    return np.bincount(language.states.ravel(), x.ravel(), language.num_states)[language.states]

  pairs = zip(weight * given.exact.advantages, weight, strict=True)
  return np.stack([at_state(above) / at_state(below) for above, below in pairs])


def worth_of_baseline(given: Problem) -> dict[str, np.ndarray]:
  """V(x), b*(x), and by formula the variance that V(x) adds to none: V E|S|^2 (V - 2 b*)."""
  best, square = best_baseline(given)
  gradient = target_gradient(given.policy, given.rewards)
  added = given.start * square * (given.start - 2.0 * best)
  return {"best": best, "added": added / np.sum(gradient**2, axis=-1)}


def values_of_critics(
  language: Language, values: np.ndarray, *, error: float, seed: int
) -> dict[str, np.ndarray]:
  """Values of the states, by critic.

  Args:
    language: the language.
    values: [P, N, T] exact ones.
    error: standard deviation of a wrong critic's error, in units of the reward's at the prompt.
    seed: of the errors: normal, one per state.

  Returns:
    [P, N, T] by name: exact; V(x) everywhere; exact with the error, and with half of it.
  """
  start = values[:, 0, 0]
  rng = np.random.default_rng(seed)
  size = error * np.sqrt(start * (1.0 - start))  # of a reward of 0 or 1
  off = (size[:, None] * rng.normal(size=(len(start), language.num_states)))[:, language.states]
  return {
    "exact": values,
    "uninformative": np.broadcast_to(start[:, None, None], values.shape),
    "wrong": values + off,
    "half as wrong": values + 0.5 * off,
  }


def credit(
  language: Language,
  rewards: np.ndarray,
  values: np.ndarray,
  *,
  discount: float = 1.0,
  gae_lambda: float = 1.0,
) -> np.ndarray:
  """[P, N, T] the library's GAE on the reward [P, N] at the end."""
  return np.asarray(_gae(language, rewards, values, discount, gae_lambda))


@jax.jit
def _gae(language: Language, rewards: Any, values: Any, discount: Any, gae_lambda: Any) -> Any:
  mask = jnp.broadcast_to(language.mask, values.shape)
  at_end = rl.terminal_rewards(rewards, mask)
  return rl.gae(at_end, values, mask, discount=discount, gae_lambda=gae_lambda)


def decay_error(given: Problem, grid: dict[float, np.ndarray]) -> float:
  """Largest |GAE of the uninformative critic - lambda^(T-1-t) (r - V(x))|."""
  left = np.arange(given.policy.language.horizon)[::-1]
  centred = (given.rewards - given.start[:, None])[..., None]
  return max(float(np.abs(c - x**left * centred).max()) for x, c in grid.items())


def described(moments: Moments) -> dict[str, Any]:
  """Per prompt [P], relative to |grad J|: bias, variance; cosine; size, in gradients.

  batch_bias, batch_variance: of the mean over prompts, divided by its `size` along the gradient, so
  that directions are compared.
  """
  square = np.sum(moments.target**2, axis=-1)
  batch = moments.averaged()
  whole = float(np.sum(batch.target**2))
  # An update without a component along the gradient has no rescaled one.
  size = batch.scale[0] if abs(batch.scale[0]) > 1e-9 else np.nan
  return {
    "bias": moments.relative_bias,
    "cosine": moments.cosine,
    "size": moments.scale,
    "variance": moments.variance / square,
    "batch_raw_bias": batch.relative_bias[0],
    "batch_bias": float(np.linalg.norm(batch.mean / size - batch.target)) / np.sqrt(whole),
    "batch_variance": batch.variance[0] / (size**2 * whole),
  }


def _stacked(moments: list[Moments]) -> dict[str, Any]:
  """The same of several, [K] or [K, P]."""
  rows = [described(x) for x in moments]
  return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def squared_error(grid: dict[str, Any], samples: Iterable[int]) -> np.ndarray:
  """[K, n] of the mean of n batches, rescaled to the gradient's size and relative to it."""
  bias, variance = (np.asarray(grid[f"batch_{what}"])[:, None] for what in ("bias", "variance"))
  return bias**2 + variance / np.asarray(list(samples), float)
