r"""Preferences over fresh samples: pairs from groups, optimism (XPO), Nash equilibria (Nash-MD).

A pair is two indices into the samples of a prompt, the last axis. Online DPO is three lines:

  pairs = preference_pairs(rewards)                                  # [P, G] -> [P]
  sums = sequence_logprob(logprobs, mask)                            # [P, G]
  chosen, rejected = (sample_at(sums, i) for i in (pairs.chosen, pairs.rejected))

and any loss of pairs, weighted with `pairs.where`. Everything else that is fresh about it (the
samples, the judge) happens outside.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm import categorical, checks, masks
from jaxrl_lm.advantages import has_signal


class PreferencePairs(NamedTuple):
  """The best and the worst sample of each group.

  Attributes:
    chosen, rejected: [...] int32, indices of the samples in their group.
    where: [...] bool, True = the two differ, so that there is a preference.
  """

  chosen: jax.Array
  rejected: jax.Array
  where: jax.Array


def preference_pairs(rewards: jax.Array, *, where: jax.Array | None = None) -> PreferencePairs:
  """Best against worst sample of each group, as online DPO trains on.

  Ties go to the earlier sample. A group whose rewards are equal up to rounding has no preference:
  a coin decides there in the codes, which is noise in the loss.

  Args:
    rewards: [..., G], of a reward model or wins against the others. Constant.
    where: [..., G] bool, True = the sample counts; None = all.

  Returns:
    PreferencePairs; `where` is False, and the indices mean nothing, in a group without spread or
    with a reward of NaN that is not excluded.

  Raises:
    ValueError: shapes differ.
    TypeError: `where` is not boolean.

  Example:
    >>> preference_pairs(jnp.array([[0.1, 0.9, 0.5], [1.0, 1.0, 1.0]]))
    PreferencePairs(chosen=Array([1, 0], dtype=int32), rejected=Array([0, 0], dtype=int32), \
where=Array([ True, False], dtype=bool))

  Reference: Guo et al. 2024 (OAIF), arXiv:2402.04792, algorithm 1, for a group of two; best
    against worst of more: Dong et al. 2024, arXiv:2405.07863, section 3.
  """
  signal = has_signal(rewards, where=where)
  rewards = checks.as_constant("rewards", rewards)
  valid = jnp.ones_like(rewards, dtype=jnp.bool_) if where is None else jnp.asarray(where)
  best = jnp.argmax(jnp.where(valid, rewards, -jnp.inf), axis=-1).astype(jnp.int32)
  worst = jnp.argmin(jnp.where(valid, rewards, jnp.inf), axis=-1).astype(jnp.int32)
  return PreferencePairs(best, worst, signal & ~jnp.any(valid & jnp.isnan(rewards), axis=-1))


def sample_at(values: jax.Array, index: jax.Array) -> jax.Array:
  """The value of one sample of each group.

  Selected by comparing indices, so that groups may be sharded; what the other samples hold does
  not matter.

  Args:
    values: [..., G], one per sample (rewards, sequence log-probs). Differentiated.
    index: [...] int in [0, G), as in `PreferencePairs`; outside gives NaN.

  Returns:
    [...].

  Raises:
    TypeError: index is not integer.
    ValueError: shapes do not match.

  Example:
    >>> sample_at(jnp.array([[1.0, 2.0], [3.0, jnp.nan]]), jnp.array([1, 0]))
    Array([2., 3.], dtype=float32)
  """
  values, index = checks.as_float("values", values), checks.check_integer("index", index)
  checks.check_rank("values", values, 1)
  checks.check_same_shape(
    **{"values[..., 0]": jax.ShapeDtypeStruct(values.shape[:-1], values.dtype), "index": index}
  )
  index = index.astype(jnp.promote_types(index.dtype, jnp.int32))[..., None]
  every = jnp.arange(values.shape[-1], dtype=index.dtype).reshape((1,) * (values.ndim - 1) + (-1,))
  hit = every == index
  chosen = jnp.sum(jnp.where(hit, values, 0.0), axis=-1)
  return jnp.where(jnp.any(hit, axis=-1), chosen, jnp.nan)


def xpo_loss(
  preference_loss: jax.Array, reference_sample_logprobs: jax.Array, *, alpha: Any
) -> jax.Array:
  r"""Exploratory preference optimisation: a preference loss and a bonus for leaving the reference.

  loss = DPO(y+, y-) + alpha log pi(y_ref | x)

  Of the pair, one sample is drawn from the policy and one, y_ref, from the reference; whichever
  was preferred, the log-prob of y_ref is lowered. That is optimism: probability moves to what the
  reference does not do.

  Args:
    preference_loss: [...], one per pair, of `preferences` (DPO in the paper; TRL: or IPO).
      Differentiated.
    reference_sample_logprobs: [...] log pi(y_ref | x) of the policy, a sum over the sequence
      (`sequence_logprob`), nats. Differentiated.
    alpha: strength of the bonus, >= 0.

  Returns:
    [...] loss, to be minimised.

  Raises:
    ValueError: shapes differ, or alpha is negative.

  Example:
    >>> xpo_loss(jnp.array([0.6931]), jnp.array([-20.0]), alpha=0.01).round(4)
    Array([0.4931], dtype=float32)

  Reference: Xie et al. 2024 (XPO), arXiv:2405.21046, algorithm 1.
  """
  checks.check_range("alpha", alpha, low=0.0)
  preference_loss = checks.as_float("preference_loss", preference_loss)
  bonus = checks.as_float("reference_sample_logprobs", reference_sample_logprobs)
  checks.check_same_shape(preference_loss=preference_loss, reference_sample_logprobs=bonus)
  return preference_loss + alpha * bonus


def nash_md_advantages(
  preferences: jax.Array,
  logprobs: jax.Array,
  ref_logprobs: jax.Array,
  mask: jax.Array,
  *,
  kl_coef: Any,
) -> jax.Array:
  r"""Advantage of a sample over one of the mixture policy: preference less the divergence.

  A = P(y > y') - 1/2 - kl_coef log(pi(y | x) / pi_ref(y | x)),  y ~ pi,  y' ~ geometric_mixture

  Used as `advantages[..., None]` with `reinforce` and `sequence_sum`, it is the paper's estimate
  of the gradient. The log-ratio is that of the whole sequence and multiplies the score of every
  token. TRL takes P - 1/2 (kl_coef = 0 here) and adds the penalty per token, as `kl_k2` does:
  per state, without credit for later ones.

  Args:
    preferences: [...] P(y > y' | x) of a judge or a pairwise model, in [0, 1]. Constant.
    logprobs: [..., T] of y under the policy, nats. Constant.
    ref_logprobs: [..., T] of y under the reference, nats. Constant.
    mask: [..., T] bool of y, True = counts.
    kl_coef: tau in the paper, >= 0.

  Returns:
    [...] advantages; 0 for a sequence without a token.

  Raises:
    ValueError: shapes differ, or kl_coef is negative.
    TypeError: the mask is not boolean.

  Example:
    >>> logprobs, mask = jnp.array([[-1.0, -2.0]]), jnp.array([[True, True]])
    >>> nash_md_advantages(jnp.array([0.9]), logprobs, logprobs - 0.5, mask, kl_coef=0.1).round(4)
    Array([0.3], dtype=float32)

  Reference: Munos et al. 2023, arXiv:2312.00886, section 7 (Nash-MD-PG).
  """
  checks.check_range("kl_coef", kl_coef, low=0.0)
  preferences = checks.as_constant("preferences", preferences)
  logprobs, mask = checks.masked_constant("logprobs", logprobs, mask)
  ref_logprobs, _ = checks.masked_constant("ref_logprobs", ref_logprobs, mask)
  checks.check_same_shape(**checks.row_shape(mask), preferences=preferences)
  divergence = masks.masked_sum(logprobs - ref_logprobs, mask, axis=-1)
  return jnp.where(jnp.any(mask, axis=-1), preferences - 0.5 - kl_coef * divergence, 0.0)


def geometric_mixture(
  logits: jax.Array,
  ref_logits: jax.Array,
  *,
  share: Any,
  mask: jax.Array | None = None,
  temperature: Any = 1.0,
) -> jax.Array:
  r"""Log-probs of the policy that Nash-MD plays against: between policy and reference, per token.

  log p = (1 - share) log pi + share log pi_ref - normaliser

  Between 0 and 1 a token is impossible where either excludes it; at the ends it is the one policy
  itself. To be sampled from: a constant.

  Args:
    logits: [..., T, V] of the policy. Constant.
    ref_logits: [..., T, V]. Constant.
    share: of the reference, in [0, 1] (beta in the paper).
    mask: [..., T] bool, True = counts; elsewhere everything is 0. None = all count.
    temperature: divides both logits, > 0.

  Returns:
    [..., T, V] log-probs in nats; NaN where the two share no token.

  Raises:
    ValueError: shapes differ, temperature <= 0, or share is outside [0, 1].

  Example:
    >>> policy, reference = jnp.log(jnp.array([[[0.2, 0.8]], [[0.8, 0.2]]]))
    >>> jnp.exp(geometric_mixture(policy, reference, share=0.5)).round(3)
    Array([[0.5, 0.5]], dtype=float32)

  Reference: Munos et al. 2023, arXiv:2312.00886, section 7 (the one-step-at-a-time mixture).
  """
  checks.check_range("share", share, low=0.0, high=1.0)
  logits = checks.as_constant("logits", logits)
  both = categorical.two_logprobs(logits, mask, temperature, ref_logits=ref_logits)
  share = jnp.asarray(share, both[0].dtype)
  parts = [jnp.where(w == 0, 0.0, w * x) for w, x in zip((1.0 - share, share), both, strict=True)]
  mixture = jax.lax.stop_gradient(jax.nn.log_softmax(sum(parts)))
  return mixture if mask is None else jnp.where(jnp.asarray(mask)[..., None], mixture, 0.0)
