"""What `experiments.ratio_explosion` measures on the counting language: estimators, exactly.

Rewards: `majority`, more a's than b's; `first`, the first token is a. The ways from the behaviour
to the target, each followed up to a stated KL per token:

  constant    the logit of a is raised by the same amount in every state
  random      by an amount drawn for every state (or weight, where states share parameters)
  reverting   raised where there are fewer a's than b's so far, lowered where there are more
  gradient    a step along the exact gradient of the expected reward
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from configs.ratio_explosion import Counting, Network, States
from jaxrl_lm.exact import counting
from jaxrl_lm.exact.counting import GradientMoments, RatioExponents

REWARDS = {"majority": counting.majority_reward, "first": counting.first_a_reward}
# The ratio of the token and of what follows: all but those of the states.
TOKEN_AND_REST = RatioExponents(0.0, 1.0, 1.0)


def estimators(length: int) -> dict[str, RatioExponents]:
  """Name -> the ratios that weigh a token's score."""
  return {
    "none": counting.UNWEIGHTED,
    "token": counting.TOKEN,
    "prefix": counting.PREFIX,
    "token and rest": TOKEN_AND_REST,
    "sequence": counting.SEQUENCE,
    "geometric": counting.geometric(length),
  }


class Shift(NamedTuple):
  """A way from the behaviour to the target.

  Attributes:
    logits: of the target [T, T + 1], at a distance along the way; of the behaviour at 0.
    moments: of the estimator with these exponents, for the target at a distance.
  """

  logits: Callable[[float], np.ndarray]
  moments: Callable[[float, RatioExponents], GradientMoments]


def measure(
  settings: Counting, reward: str, length: int, *, track: Callable[..., Any] = iter
) -> list[dict[str, Any]]:
  """One row per shift, KL rate and estimator: bias and variance in units of the gradient."""
  gain = REWARDS[reward](length)
  make = table_shifts if isinstance(settings.policy, States) else network_shifts
  rows = []
  for shift, way in track(list(make(settings, gain))):
    for rate in settings.rates:
      distance = at_kl_rate(way, rate)
      moments = {name: way.moments(distance, x) for name, x in estimators(length).items()}
      for name, found in moments.items():
        size = float(np.linalg.norm(found.target))
        rows.append(
          {
            "reward": reward,
            "length": length,
            "shift": shift,
            "rate": rate,
            "estimator": name,
            "gradient": size,
            "relative_bias": found.relative_bias,
            # Share of the bias without a ratio that is gone.
            "removed": 1 - found.bias / moments["none"].bias,
            "log_relative_variance": found.log_variance - 2 * np.log(size),
            "log_variance_ratio": found.log_variance - moments["none"].log_variance,
            # Samples from which on the sequence ratio has the smaller squared error.
            "log_crossover": moments["sequence"].log_crossover(found),
          }
        )
  return rows


def select(rows: list[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
  """The rows that have these values, in their order."""
  return [row for row in rows if all(row[name] == value for name, value in values.items())]


def squared_error(row: dict[str, Any], samples: np.ndarray) -> np.ndarray:
  """Mean squared error of the average over n samples, in units of the squared gradient."""
  return row["relative_bias"] ** 2 + np.exp(row["log_relative_variance"] - np.log(samples))


def table_shifts(settings: Counting, gain: np.ndarray) -> Iterator[tuple[str, Shift]]:
  """From a fair coin; one logit per state."""
  length = gain.shape[1] - 1
  behaviour = np.zeros((length, length + 1))
  noise = np.random.default_rng(settings.seed).normal(size=behaviour.shape)
  directions = {
    "constant": np.ones_like(behaviour),
    "random": noise,
    "reverting": -np.tanh(2 * _excess(length)),
    "gradient": counting.table_gradient_moments(
      behaviour, behaviour, gain, counting.UNWEIGHTED
    ).target,
  }

  def moments(direction: np.ndarray, distance: float, exponents: RatioExponents) -> GradientMoments:
    return counting.table_gradient_moments(
      behaviour + distance * direction, behaviour, gain, exponents, baseline=settings.baseline
    )

  for name, direction in directions.items():
    size = np.max(np.abs(direction))
    direction = direction / size
    logits = functools.partial(_along, behaviour, direction)
    yield name, Shift(logits, functools.partial(moments, direction))


def network_shifts(settings: Counting, gain: np.ndarray) -> Iterator[tuple[str, Shift]]:
  """From a network of random weights, along directions of its weights."""
  length = gain.shape[1] - 1
  policy, params = network(settings.policy, length)
  flat, unravel = ravel_pytree(params)
  behaviour = np.asarray(policy(params))
  rng = np.random.default_rng(settings.policy.seed + 1)
  constant = jax.tree.map(jnp.zeros_like, params) | {"out_bias": jnp.ones_like(params["out_bias"])}
  gradient = counting.shared_gradient_moments(
    policy, params, behaviour, gain, counting.UNWEIGHTED
  ).target
  directions = {
    "constant": np.asarray(ravel_pytree(constant)[0]),
    "random": rng.normal(size=flat.shape),
    "gradient": gradient,
  }

  def logits(direction: np.ndarray, distance: float) -> np.ndarray:
    return np.asarray(policy(unravel(flat + distance * direction)))

  def moments(direction: np.ndarray, distance: float, exponents: RatioExponents) -> GradientMoments:
    target = unravel(flat + distance * direction)
    return counting.shared_gradient_moments(
      policy, target, behaviour, gain, exponents, baseline=settings.baseline
    )

  for name, direction in directions.items():
    direction = direction / np.linalg.norm(direction)
    yield name, Shift(functools.partial(logits, direction), functools.partial(moments, direction))


def network(settings: Network, length: int) -> tuple[Callable[[Any], jax.Array], dict[str, Any]]:
  """A network from position and count to logits [T, T + 1], and its random weights."""
  position = np.broadcast_to(np.linspace(-1, 1, length)[:, None], (length, length + 1))
  features = np.stack([position, 2 * _excess(length)], axis=-1)
  rng = np.random.default_rng(settings.seed)
  params = {
    "in": rng.normal(size=(2, settings.width)) / np.sqrt(2),
    "bias": rng.normal(size=settings.width),
    "out": rng.normal(size=settings.width) / np.sqrt(settings.width),
    "out_bias": np.zeros(()),
  }

  def policy(params: dict[str, Any]) -> jax.Array:
    hidden = jnp.tanh(features @ params["in"] + params["bias"][None, None])
    return hidden @ params["out"] + params["out_bias"]

  return policy, jax.tree.map(jnp.asarray, params)


def at_kl_rate(way: Shift, rate: float) -> float:
  """The distance at which KL(behaviour || target) is `rate` nats per token."""
  behaviour = way.logits(0.0)
  visits = state_frequencies(behaviour)
  distance = 1e-3
  for _ in range(200):
    found = kl_per_token(behaviour, way.logits(distance), visits)
    if abs(found / rate - 1) < 1e-10:
      return distance
    distance *= np.sqrt(rate / found)  # exact where the KL is quadratic
  raise ValueError(f"no target at {rate} nats per token was found")


def state_frequencies(logits: np.ndarray) -> np.ndarray:
  """[T, T + 1] probability of the number of a's before token t."""
  probability = 1 / (1 + np.exp(-logits))
  visits = np.zeros_like(logits)
  visits[0, 0] = 1
  for t in range(len(logits) - 1):
    visits[t + 1] = visits[t] * (1 - probability[t])
    visits[t + 1, 1:] += (visits[t] * probability[t])[:-1]
  return visits


def kl_per_token(behaviour: np.ndarray, target: np.ndarray, visits: np.ndarray) -> float:
  """KL(behaviour || target) of a response over its tokens, nats."""
  terms = []
  for sign in (-1, 1):  # the tokens b and a
    q, p = (-np.logaddexp(0, -sign * x) for x in (behaviour, target))
    terms.append(np.exp(q) * (np.expm1(p - q) - (p - q)))
  return float(np.sum(visits * (terms[0] + terms[1])) / len(behaviour))


def _along(start: np.ndarray, direction: np.ndarray, distance: float) -> np.ndarray:
  return start + distance * direction


def _excess(length: int) -> np.ndarray:
  """[T, T + 1] a's beyond half of the tokens so far, over sqrt(T)."""
  return (np.arange(length + 1)[None] - np.arange(length)[:, None] / 2) / np.sqrt(length)
