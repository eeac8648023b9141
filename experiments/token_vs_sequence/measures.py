"""The identity, and what a critic, a penalty, a clip or a discount makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import jaxrl_lm as rl
from configs.length_bias import Setting
from configs.policies import Network, Table
from configs.token_vs_sequence import Clip, Config, Critic, Curl, Kl
from experiments.credit_assignment.measures import credit, values_of_critics
from experiments.length_bias.setting import Problem, drifts, lengths, reference_problem
from experiments.token_vs_sequence.gradients import (
  SEQUENCE,
  TOKEN,
  clipped,
  coefficients,
  compare,
  largest_distance,
  moved,
)
from jaxrl_lm.exact import (
  Policy,
  jacobian,
  regularised_reward,
  response_probs,
  token_values,
)
from jaxrl_lm.exact.problem import target_gradient

Track = Callable[[Iterable[Any]], Iterable[Any]]


def problem(config: Config, kind: Table | Network) -> Problem:
  """The language with an end token, and a policy; responses come one at a time."""
  return reference_problem(replace(config.setting, policy=kind), 1)


def probabilities(given: Problem) -> np.ndarray:
  """[P, N] of the responses."""
  return np.asarray(response_probs(given.policy.language, given.policy.logprobs()))


def value(probs: np.ndarray, returns: np.ndarray) -> np.ndarray:
  """[P, 1] expected return of each prompt, the baseline."""
  return np.sum(probs * returns, axis=-1, keepdims=True)


def spread(given: Problem, x: np.ndarray) -> np.ndarray:
  """[P, N] -> [P, N, T]: the same at every token."""
  return np.broadcast_to(x[..., None], (*x.shape, given.policy.language.horizon))


def identity(given: Problem) -> dict[str, Any]:
  """Both gradients of every response, and the policy's own numbers.

  parameters: largest distance of the gradients in the policy's parameters, relative. log-probs: of
  the coefficients of the log-probs, so in any parameters. one ratio: of TOKEN from SEQUENCE, both
  through their ratios.
  """
  policy = given.policy
  start = value(probabilities(given), given.rewards)
  centred = given.rewards - start
  same = spread(given, centred)
  # The Markov decision process: the library's GAE, whose critic knows the prompt's value only.
  tokens = credit(policy.language, given.rewards, spread(given, start + 0.0 * centred))
  mask = policy.language.mask
  summed, whole = (coefficients(x, policy, tokens) for x in (TOKEN, SEQUENCE))
  return {
    **lengths(policy.language, policy.logprobs(), given.rewards)._asdict(),
    "parameters": largest_distance(policy, centred, tokens),
    "log-probs": np.abs((summed - same)[:, mask]).max() / np.abs(same).max(),
    "one ratio": np.abs((summed - whole)[:, mask]).max() / np.abs(same).max(),
  }


def critics(given: Problem, settings: Critic) -> dict[str, Any]:
  """A critic in place of the prompt's value."""
  policy, rewards = given.policy, given.rewards
  language = policy.language
  exact = token_values(language, policy.logprobs(), jnp.asarray(rewards))
  values = values_of_critics(
    language, np.asarray(exact.values), error=settings.error, seed=settings.seed
  )
  rows = {"sequence": spread(given, rewards - value(probabilities(given), rewards))}
  for name in ("exact", "wrong"):
    for x in (1.0, settings.gae_lambda):
      rows[f"{name} critic, lambda {x:g}"] = credit(language, rewards, values[name], gae_lambda=x)
  rows["exact critic, lambda 0"] = credit(language, rewards, values["exact"], gae_lambda=0.0)
  return compare(given, rows, "sequence")[0]


def penalties(given: Problem, settings: Kl) -> dict[str, Any]:
  """A KL penalty per response, per token in the return, per token outside of it, in the loss.

  By the direction in which the policy has moved; the target is J - coefficient KL.
  """
  return {
    way: _penalties(given, moved(given.policy, direction, settings.nats), settings.coefficient)
    for way, direction in directions(given, settings.seed).items()
  }


def _penalties(given: Problem, policy: Policy, beta: float) -> dict[str, Any]:
  """Of a policy that has moved away from the reference, which is the given one."""
  rewards, ref_logprobs = given.rewards, given.policy.logprobs()
  given = given._replace(policy=policy)
  probs, logprobs = probabilities(given), policy.logprobs()
  mask = jnp.broadcast_to(policy.language.mask, logprobs.shape)
  kl, to_go = (np.asarray(x) for x in _to_go(rewards, logprobs, ref_logprobs, mask, beta))
  penalised = rewards - beta * kl.sum(axis=-1)
  start = value(probs, penalised)
  plain = spread(given, rewards - value(probs, rewards))
  rows = {
    "sequence": spread(given, penalised - start),
    "token, to go": to_go - start[..., None],
    "token, immediate": plain - beta * kl,
    "token, k3 in the loss": coefficients(
      TOKEN, policy, plain, ref_logprobs=ref_logprobs, kl=rl.kl_k3, kl_coef=beta
    ),
    "no penalty": plain,
  }
  target = partial(regularised_reward, ref_logprobs=ref_logprobs, kl_coef=beta)
  return compare(given, rows, "sequence", target=target)[0]


@jax.jit
def _to_go(
  rewards: Any, logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array, beta: Any
) -> tuple[jax.Array, jax.Array]:
  """[P, N, T] k1 of every token, and the return that is left, less the penalties that are left."""
  kl = rl.kl_k1(logprobs, ref_logprobs, mask)
  shaped = rl.kl_shaped_rewards(rl.terminal_rewards(rewards, mask), kl, mask, kl_coef=beta)
  return kl, rl.discounted_returns(shaped, mask)


def directions(given: Problem, seed: int) -> dict[str, np.ndarray]:
  """[D] each: the gradient of J, mean over prompts, and a random one."""
  gradient = target_gradient(given.policy, given.rewards).mean(axis=0)
  return {"gradient": gradient, "random": np.random.default_rng(seed).normal(size=gradient.shape)}


def clips(given: Problem, settings: Clip, track: Track) -> dict[str, Any]:
  """Ratios and clips per token and per response, as the policy moves from the sampler.

  By direction, and by row: [K, P] each over the distances. zero: share of the tokens whose
  coefficient is 0, as the sampler draws them.
  """
  policy = given.policy
  sampler, probs = policy.logprobs(), probabilities(given)
  credit_ = spread(given, given.rewards - value(probs, given.rewards))
  objectives = {
    "sequence ratio": SEQUENCE,
    "token ratio": TOKEN,
    "token clip": clipped(TOKEN, settings.width),
    "sequence clip": clipped(SEQUENCE, settings.width),
  }
  ways = directions(given, settings.seed)
  found: dict[str, Any] = {way: [] for way in ways}
  for way, nats in track([(way, nats) for way in ways for nats in settings.nats]):
    new = given._replace(policy=moved(policy, ways[way], nats))
    rows = {
      name: coefficients(x, new.policy, credit_, old_logprobs=sampler)
      for name, x in objectives.items()
    }
    row, _ = compare(new, rows, "sequence ratio", sampler_logprobs=sampler)
    for name, c in rows.items():
      row[name]["zero"] = _share_of_tokens(probs, policy.language.mask, c == 0.0)
    found[way].append(row)
  return {
    way: {
      name: {key: np.stack([x[name][key] for x in rows]) for key in rows[0][name]}
      for name in objectives
    }
    for way, rows in found.items()
  }


def discounted(given: Problem, discounts: tuple[float, ...], track: Track) -> dict[str, Any]:
  """Three meanings of a discount, [K, P] over its values; `none` without one.

  returns: gamma^(n-1-t) r, what libraries compute. objective: the gradient of E[gamma^(n-1) r].
  prefactor: gamma^t r, which with discounted returns would be the objective's again: twice is the
  largest difference of the two. own: cosine with the gradient of E[gamma^(n-1) r]; other numbers
  are against the gradient of E[r].
  """
  policy, rewards = given.policy, given.rewards
  language, probs = policy.language, probabilities(given)
  start = value(probs, rewards)
  place = np.arange(language.horizon)
  none = spread(given, rewards - start)
  rows, discounted_rewards = {"none": none}, {}
  twice = []
  for x in discounts:
    shrunk = rewards * x ** (np.asarray(language.lengths) - 1.0)
    discounted_rewards[x] = shrunk
    returns = credit(language, rewards, spread(given, np.zeros_like(rewards)), discount=x)
    rows[f"returns {x:g}"] = returns - start[..., None]
    rows[f"objective {x:g}"] = spread(given, shrunk - value(probs, shrunk))
    rows[f"prefactor {x:g}"] = none * x**place
    apart = np.abs(returns * x**place - shrunk[..., None])[:, language.mask]
    twice.append(apart.max())
  found, means = compare(given, rows, "none")
  table: dict[str, Any] = {"twice": max(twice)}
  gradients = {x: target_gradient(policy, r) for x, r in discounted_rewards.items()}
  for name in track(list(rows)):
    along = drifts(given, means[name].mean)
    found[name] |= {"drift_correct": along.length_correct, "drift_wrong": along.length_wrong}
  for meaning in ("returns", "objective", "prefactor"):
    each = [found[f"{meaning} {x:g}"] for x in discounts]
    table[meaning] = {key: np.stack([np.asarray(row[key]) for row in each]) for key in each[0]}
    table[meaning]["own"] = np.stack(
      [_cosine(means[f"{meaning} {x:g}"].mean, gradients[x]) for x in discounts]
    )
  return {**table, "none": found["none"]}


def curls(settings: Curl, setting: Setting, discounts: tuple[float, ...]) -> dict[str, Any]:
  """Relative antisymmetric part of the Jacobian of each meaning's expected update, [K]."""
  table: dict[str, Any] = {}
  policies = {"table": Table(), "network": Network(width=settings.width, steps=150)}
  for name, kind in policies.items():
    small = Setting(
      vocabulary=settings.vocabulary,
      horizon=settings.horizon,
      targets=(settings.target,),
      seed=setting.seed,
      concentration=setting.concentration,
      policy=kind,
    )
    given = reference_problem(small, 1)
    mask = given.policy.language.mask
    place = np.arange(mask.shape[1])
    last = mask.sum(axis=1, keepdims=True) - 1
    powers = {"returns": last - place, "objective": last + 0 * place, "prefactor": 0 * last + place}
    weights = [
      given.rewards[..., None] * np.where(mask, x ** np.where(mask, power, 0), 0.0)
      for power in powers.values()
      for x in discounts
    ]
    found = _curls(given.policy, np.stack(weights))
    table[name] = dict(zip(powers, np.split(found, len(powers)), strict=True))
  return table


def _curls(policy: Policy, weights: np.ndarray) -> np.ndarray:
  """[B] curl of params -> E[sum_t weight_t grad log pi(y_t | s_t)], weights [B, P, N, T] fixed."""

  def fields(params: Any) -> Any:
    logprobs, pull = jax.vjp(policy.logprobs, params)
    probs = response_probs(policy.language, logprobs)
    return jax.vmap(lambda w: ravel_pytree(pull(probs[..., None] * w)[0])[0])(weights)

  matrices = jacobian(fields, policy.params)  # of all at once: one compilation
  matrices = matrices.reshape(len(weights), -1, matrices.shape[-1])
  turned = np.linalg.norm(matrices - matrices.swapaxes(1, 2), axis=(1, 2))
  return turned / (2.0 * np.linalg.norm(matrices, axis=(1, 2)))


def _share_of_tokens(probs: np.ndarray, mask: np.ndarray, chosen: np.ndarray) -> np.ndarray:
  """[P] expected number of chosen tokens over that of all."""
  count = lambda x: np.sum(probs * (x & mask).sum(axis=-1), axis=-1)  # noqa: E731
  return count(chosen) / count(np.ones_like(chosen))


def _cosine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  return np.sum(x * y, axis=-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
