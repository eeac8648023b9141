"""The problem that `experiments.length_bias` measures, and the lengths of its responses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import jaxrl_lm as rl
from configs.length_bias import Setting
from experiments.harness.shared_policy import reference_policy
from jaxrl_lm.exact import Policy, enumerate_language, modular_sum_reward, response_probs
from jaxrl_lm.exact.language import Language

# What the advantages are divided by: nothing, or the group's standard deviation.
SCALINGS = {"centred": rl.group_centered, "group std": partial(rl.group_normalized, eps=0.0)}


class Problem(NamedTuple):
  """A policy, the reward [P, N] of every response, and the samples per group."""

  policy: Policy
  rewards: np.ndarray
  group_size: int


class Lengths(NamedTuple):
  """Of a policy, per prompt [P]: P(correct), mean length of wrong and of correct responses."""

  correct: jax.Array
  length_wrong: jax.Array
  length_correct: jax.Array


def reference_problem(setting: Setting, group_size: int) -> Problem:
  """The language, its reward, and the reference policy."""
  language = enumerate_language(
    setting.vocabulary, setting.horizon, end_token=setting.vocabulary - 1
  )
  policy = reference_policy(
    setting.policy,
    language,
    prompts=len(setting.targets),
    seed=setting.seed,
    concentration=setting.concentration,
  )
  return Problem(policy, modular_sum_reward(language, setting.targets), group_size)


def reductions(alphas: tuple[float, ...], horizon: int) -> dict[str, Callable[..., jax.Array]]:
  """Name -> loss weights, from the sum over tokens to their mean."""
  powers = {f"1/n^{a:g}": partial(rl.length_power, alpha=a) for a in alphas}
  return {
    "sum": rl.sequence_sum,
    "constant length": partial(rl.constant_length, length=horizon),
    "token mean": rl.token_mean,
    **powers,
    "sequence mean": rl.sequence_mean,
  }


def grpo(loss_weights: Any, advantages: Any = rl.group_centered) -> rl.Objective:
  """GRPO with another reduction and other advantages; on-policy its clip never acts."""
  return replace(rl.GRPO, loss_weights=loss_weights, advantages=advantages)


def lengths(language: Language, logprobs: jax.Array, rewards: Any) -> Lengths:
  """P(correct), and the mean lengths given that a response is wrong, or correct.

  Args:
    language: the language.
    logprobs: [P, N, T] of every enumerated token, nats. Differentiated.
    rewards: [P, N], 0 or 1.
  """
  probs, rewards = response_probs(language, logprobs), jnp.asarray(rewards)
  tokens = jnp.asarray(language.lengths, probs.dtype)[None]
  right, wrong = probs * rewards, probs * (1.0 - rewards)
  mean = lambda part: jnp.sum(part * tokens, axis=-1) / jnp.sum(part, axis=-1)  # noqa: E731
  return Lengths(jnp.sum(right, axis=-1), mean(wrong), mean(right))


def drifts(problem: Problem, directions: np.ndarray) -> Lengths:
  """How fast lengths move per unit of J, along one direction [P, D] for each prompt.

  Of prompt p along direction p: d length / d J, tokens. P(correct) moves by 1 by definition.
  """
  policy = problem.policy
  return _slopes(policy.score, policy.params, policy.language, problem.rewards, directions)


@partial(jax.jit, static_argnums=0)
def _slopes(score: Any, params: Any, language: Language, rewards: Any, directions: Any) -> Lengths:
  flat, unravel = ravel_pytree(params)
  policy = Policy(language, score, params, directions.shape[0])
  measured = lambda x: lengths(language, policy.logprobs(unravel(x)), rewards)  # noqa: E731
  along = jax.lax.map(lambda v: jax.jvp(measured, (flat,), (v,))[1], directions)
  own = jax.tree.map(jnp.diagonal, along)
  return jax.tree.map(lambda slope: slope / own.correct, own)


def one_prompt(policy: Policy, prompt: int) -> Policy:
  """The same policy with one of its prompts, over the same parameters."""

  def score(params: Any, language: Language, _: Any, rows: Any) -> jax.Array:
    return policy.score(params, language, prompt, rows)

  return Policy(policy.language, score, policy.params, 1)
