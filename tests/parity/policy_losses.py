"""What the peers' policy losses share: `objective_loss` of a record, levels, KL terms, reductions.

`verl_losses`, `trl_losses` and `other_losses` fill the slots from a record's settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_lm as rl
from tests.parity.records import Record, pad

Arrays = Mapping[str, Any]


def value_and_gradients(record: Record, loss: Callable[..., jax.Array], *of: str) -> Arrays:
  """The loss at the recorded inputs, and its gradient in each named input."""
  value, gradients = jax.value_and_grad(loss, argnums=tuple(range(len(of))))(
    *(jnp.asarray(record.inputs[name]) for name in of)
  )
  return {"loss": value, **{f"grad_{name}": g for name, g in zip(of, gradients)}}


@partial(jax.jit, static_argnames=("surrogate", "level", "kl"))
def compiled(
  logprobs: Any, entropy: Any, old: Any, arrays: Any, constants: Any, *,
  surrogate: Any, level: Any, kl: Any,
) -> Any:  # fmt: skip
  """`objective_loss` and its gradients; the constants are traced, the functions static."""
  objective = rl.Objective(
    advantages=rl.raw_rewards,
    level=level,
    surrogate=partial(surrogate, **constants),
    loss_weights=rl.token_sum,
  )
  estimator = None if kl is None else kl(old)

  def loss(logprobs: jax.Array, entropy: Any) -> jax.Array:
    return rl.objective_loss(
      objective, logprobs, old, kl=estimator, entropy=entropy, **arrays
    )[0]  # fmt: skip

  return jax.value_and_grad(loss, argnums=0 if entropy is None else (0, 1))(logprobs, entropy)


def objective(
  record: Record,
  surrogate: Any,
  weights: Any,
  *,
  level: Any = rl.per_token,
  constants: Mapping[str, Any],
  old: str = "old_logps",
  importance_weights: Any = None,
  kl: Any = None,
  kl_coef: float = 0.0,
  entropy_coef: float = 0.0,
  selected: Any = None,
) -> Arrays:
  """Loss and gradients of a record; `weights` is the array of loss weights of its rows."""
  x = record.inputs
  factor = jnp.ones(x["mask"].shape) if importance_weights is None else importance_weights
  arrays = {
    "advantages": advantages(record),
    "mask": x["mask"],
    "loss_weights": pad(weights, 0.0),
    "importance_weights": factor,
  }
  if kl is not None:
    arrays |= {"ref_logprobs": x["ref_logps"], "kl_coef": kl_coef}
  if selected is not None:
    arrays["selected"] = selected
  entropy = x["entropies"] if entropy_coef else None
  if entropy is not None:
    arrays["entropy_coef"] = entropy_coef
  value, gradients = compiled(
    x["logps"], entropy, x[old], arrays, constants, surrogate=surrogate, level=level, kl=kl
  )
  if entropy is None:
    return {"loss": value, "grad_logps": gradients}
  return {"loss": value, "grad_logps": gradients[0], "grad_entropies": gradients[1]}


def advantages(record: Record) -> np.ndarray:
  """One per token; a peer's value per sequence stands at each of its tokens."""
  name = record.settings.get("advantages")
  if name is None:
    name = next(key for key in ("adv_seq", "adv_seq_neg", "adv_tok") if key in record.inputs)
  value = record.inputs[name]
  return value if value.ndim == 2 else pad(np.repeat(value[:, None], record.width, axis=1))


def after(inner: Callable[..., jax.Array], outer: Callable[..., jax.Array]) -> Any:
  """The level `outer` of the log-ratios that the level `inner` gives."""
  return lambda log_ratio, mask, *, segment_ids=None: outer(
    inner(log_ratio, mask, segment_ids=segment_ids), mask, segment_ids=segment_ids
  )


# Levels with the clamps of the peers.
TOKEN_20 = rl.clamped(rl.per_token, -20.0, 20.0)
SEQUENCE = rl.per_sequence_geometric
GSPO_TOKEN = rl.with_token_gradient(SEQUENCE)
GSPO_TOKEN_10 = rl.clamped(GSPO_TOKEN, -math.inf, 10.0)
GSPO_TOKEN_20_10 = rl.clamped(
  rl.with_token_gradient(after(TOKEN_20, SEQUENCE)), -math.inf, 10.0
)  # fmt: skip
SUM_20 = after(TOKEN_20, rl.per_sequence)
VESPO_SUM = rl.with_token_gradient(rl.clamped(SUM_20, math.log(1e-8), 20.0))


# KL terms, as a function of the old log-probs


@cache
def plain(estimator: Any) -> Any:
  """An estimator that does not look at the old policy."""
  return lambda old: estimator


def token_weighted_k3(old: Any) -> Any:
  return partial(rl.kl_k3_off_policy, old_logprobs=old)


def sequence_weighted_k3(old: Any) -> Any:
  """k3 times the differentiated ratio of the sequence."""

  def estimator(logprobs: Any, ref_logprobs: Any, mask: Any) -> jax.Array:
    log_ratio = SEQUENCE(rl.token_log_ratio(logprobs, old, mask), mask)
    return jnp.exp(log_ratio) * rl.kl_k3(logprobs, ref_logprobs, mask)

  return estimator


def clipped_k3(logprobs: Any, ref_logprobs: Any, mask: Any) -> jax.Array:
  return jnp.clip(rl.kl_k3(logprobs, ref_logprobs, mask), -10.0, 10.0)


# Reductions, one compilation per number of rows.
token_mean = jax.jit(rl.token_mean)
token_sum = jax.jit(rl.token_sum)
sequence_mean_of_all = jax.jit(partial(rl.sequence_mean, count_empty=True))
sequence_sum_of_all = jax.jit(partial(rl.sequence_sum, count_empty=True))
constant_length_of_all = jax.jit(partial(rl.constant_length, count_empty=True))
