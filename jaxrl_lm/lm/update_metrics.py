"""What an update did, as sums and counts that merge over the updates of a step."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm import diagnostics, kl, objectives, values
from jaxrl_lm.lm.micro_batches import Batch
from jaxrl_lm.lm.optimizers import GradientSize
from jaxrl_lm.lm.update_config import UpdateConfig
from jaxrl_lm.statistics import Average, EffectiveSampleSize, Extremes
from jaxrl_lm.values import ExplainedVariance


class Seen(NamedTuple):
  """What the forward pass of the policy saw, [R, T] each.

  Attributes:
    logprobs: before the update, nats.
    entropy: nats, or None from a scorer without it.
    log_ratio: at the objective's level, nats.
  """

  logprobs: jax.Array
  entropy: jax.Array | None
  log_ratio: jax.Array


class Outcome(NamedTuple):
  """Loss of a model on the batch, and its gradient.

  Attributes:
    loss: scalar.
    size: of the gradient, before clipping.
  """

  loss: jax.Array
  size: GradientSize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CriticMetrics:
  """Of a critic. Merges by `+`.

  Attributes:
    loss: Average over updates.
    grad_norm: before clipping, Average over updates.
    clipped: share of the tokens that the value clip stops (`value_clip_fraction`).
    explained_variance: of the returns by the values before the update.
  """

  loss: Average
  grad_norm: Average
  clipped: Average
  explained_variance: ExplainedVariance

  def __add__(self, other: CriticMetrics) -> CriticMetrics:
    """Over two updates."""
    return CriticMetrics(*_fields_merged(self, other))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class UpdateMetrics:
  """Of one update, or by `+` of several. All at the parameters before it.

  Tokens are those of the mask, whatever their loss weight. An update that was not made because
  something was not finite counts in `skipped` and in `log_ratio_extremes`, and nowhere else.

  Attributes:
    loss: Average over updates.
    grad_norm: before clipping, Average over updates.
    skipped: share of the updates that were not made.
    idle: share of the updates whose gradient was exactly 0, so that nothing moved.
    clipped: {"low", "high", "clipped"}, shares of the tokens with a loss weight for which the
      surrogate has no gradient in spite of an advantage below 0, above 0, or either. Of PPO's
      surrogate these are `clip_fractions`.
    drift: {"k1", "k3"}, KL(old || current) of `policy_drift`, nats per token.
    ref_kl: {"k1", "k3"}, estimates of KL(current || reference), nats per token; None without
      reference log-probs.
    mismatch: `perplexity_gap` of current policy and sampler; None without sampler log-probs.
    entropy: nats per token; None from a scorer without it.
    ratio_ess: effective sample size of the ratios at the objective's level, over tokens.
    log_ratio_extremes: at the objective's level, nats; positions are those of [R, T] of one
      update, and after a merge of whichever update had the extreme.
    critic: None without one.
  """

  loss: Average
  grad_norm: Average
  skipped: Average
  idle: Average
  clipped: dict[str, Average]
  drift: dict[str, Average]
  ref_kl: dict[str, Average] | None
  mismatch: dict[str, Average] | None
  entropy: Average | None
  ratio_ess: EffectiveSampleSize
  log_ratio_extremes: Extremes
  critic: CriticMetrics | None

  def __add__(self, other: UpdateMetrics) -> UpdateMetrics:
    """Over two updates."""
    return UpdateMetrics(*_fields_merged(self, other))


def of_update(
  config: UpdateConfig,
  batch: Batch,
  selected: jax.Array | None,
  seen: Seen,
  outcome: Outcome,
  finite: jax.Array,
  critic: CriticMetrics | None,
) -> UpdateMetrics:
  """The metrics of one update, from arrays of the whole batch: no cut can change them.

  Args:
    config: of the update.
    batch: its rows.
    selected: [R, T] bool of `config.selection`, or None.
    seen: by the policy.
    outcome: of the policy.
    finite: whether the update was made, as far as that goes.
    critic: its metrics, or None.

  Returns:
    UpdateMetrics.
  """
  mask = batch.mask & finite
  old = seen.logprobs if batch.old_logprobs is None else batch.old_logprobs
  ref, sampler = batch.ref_logprobs, batch.sampler_logprobs
  estimators = {"k1": kl.kl_k1, "k3": kl.kl_k3}
  return UpdateMetrics(
    loss=once(outcome.loss, finite),
    grad_norm=once(outcome.size.norm, finite),
    skipped=once(~finite),
    idle=once(outcome.size.zero),
    clipped=_clipped(config, batch, selected, seen.logprobs, finite),
    drift=diagnostics.policy_drift(seen.logprobs, old, mask),
    ref_kl=None
    if ref is None
    else {k: Average.of(f(seen.logprobs, ref, mask), mask) for k, f in estimators.items()},
    mismatch=None if sampler is None else diagnostics.perplexity_gap(seen.logprobs, sampler, mask),
    entropy=None if seen.entropy is None else diagnostics.average(seen.entropy, mask),
    ratio_ess=diagnostics.token_effective_sample_size(seen.log_ratio, mask),
    log_ratio_extremes=diagnostics.ratio_extremes(seen.log_ratio, batch.mask),
    critic=critic,
  )


def of_critic(
  value_clip: Any, batch: Batch, seen: jax.Array, outcome: Outcome, finite: jax.Array
) -> CriticMetrics:
  """The metrics of a critic's update.

  Args:
    value_clip: of its configuration.
    batch: the rows.
    seen: [R, T] values before the update.
    outcome: of the critic.
    finite: whether the update was made.

  Returns:
    CriticMetrics.
  """
  if batch.old_values is None or batch.returns is None:
    raise ValueError("a critic needs old_values and returns in the batch")
  mask, old_values, returns = batch.mask & finite, batch.old_values, batch.returns
  return CriticMetrics(
    loss=once(outcome.loss, finite),
    grad_norm=once(outcome.size.norm, finite),
    clipped=values.value_clip_fraction(seen, old_values, returns, mask, clip=value_clip),
    explained_variance=values.explained_variance(seen, returns, mask),
  )


def once(x: jax.Array, counts: Any = True) -> Average:
  """One number of one update.

  Args:
    x: scalar.
    counts: bool scalar.

  Returns:
    Average of one entry, or of none.
  """
  return diagnostics.average(x[None], jnp.asarray(counts)[None])


def _clipped(
  config: UpdateConfig, batch: Batch, selected: jax.Array | None, logprobs: jax.Array, finite: Any
) -> dict[str, Average]:
  """Where the surrogate stands still: its gradient in the log-prob of each token is 0."""

  def loss(logprobs: jax.Array) -> jax.Array:
    return objectives.objective_loss(
      config.objective,
      logprobs,
      batch.old_logprobs,
      batch.advantages,
      batch.mask,
      loss_weights=batch.loss_weights,
      importance_weights=batch.importance_weights,
      segment_ids=batch.segment_ids,
      selected=selected,
    )[0]

  still = jax.grad(loss)(logprobs) == 0
  counted = batch.mask & finite & (batch.loss_weights != 0)
  if batch.importance_weights is not None:
    counted &= batch.importance_weights != 0
  sides = {"low": batch.advantages < 0, "high": batch.advantages > 0}
  sides["clipped"] = sides["low"] | sides["high"]
  return {name: diagnostics.average(still & side, counted) for name, side in sides.items()}


def _fields_merged(a: Any, b: Any) -> list[Any]:
  names = [field.name for field in dataclasses.fields(a)]
  return [_merged(getattr(a, name), getattr(b, name)) for name in names]


def _merged(a: Any, b: Any) -> Any:
  if a is None:
    return None
  if isinstance(a, dict):
    return {name: a[name] + b[name] for name in a}
  return a.merge(b) if isinstance(a, Extremes) else a + b
