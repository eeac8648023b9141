r"""Losses of preference pairs that depend on the margin between chosen and rejected alone.

A pair enters as two numbers, the log-ratios of its responses against the reference policy:

  chosen   = sequence_log_ratio(logprobs of chosen,   ref_logprobs of chosen,   mask)
  rejected = sequence_log_ratio(logprobs of rejected, ref_logprobs of rejected, mask)

With x = beta (chosen - rejected), e = label_smoothing and sig the sigmoid,

  dpo_loss               -log sig(x)
  conservative_dpo_loss  -(1 - e) log sig(x) - e log sig(-x)
  robust_dpo_loss        (-(1 - e) log sig(x) + e log sig(-x)) / (1 - 2 e)
  hinge_dpo_loss         max(0, 1 - x)
  ipo_loss               (chosen - rejected - 1 / (2 beta))^2
  exo_loss               KL(sig(x) || 1 - e), of two outcomes
  discopop_loss          -log sig(x) and exp(-x), mixed by sig(x / tau)

Those that push each response against the reference are in `anchored_preferences`, those that sort
the batch in `transport_preferences`, those of single labelled responses in
`unpaired_preferences`, those without a reference in `reference_free`.

The length convention is the caller's: `sequence_log_ratio` is the sum of the papers,
`mean_log_ratio` in its place makes any loss length-normalised. Token weights (LD-DPO), scores of
other divergences and pair weights (WPO) are in `preference_transforms`.

One signature serves all:

  loss(chosen_log_ratio, rejected_log_ratio, *, beta, <constants>) -> loss

  chosen_log_ratio, rejected_log_ratio: [B] log pi / ref, nats. Differentiated. Any shape, the
    same for both; one entry is one pair.
  beta: how strongly the policy is held to the reference, > 0.

Losses are unreduced, [B], to be minimised; finite for log-ratios of any size a float has, but
for the squares.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_lm import checks, pairs, ratios
from jaxrl_lm import logprobs as lp
from jaxrl_lm.statistics import Average


def sequence_log_ratio(logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  r"""log pi(y | x) / ref(y | x): the sum of the token log-ratios.

  Args:
    logprobs: [..., T] of the policy, nats. Differentiated.
    ref_logprobs: [..., T] of the reference, nats. Constant.
    mask: [..., T] bool, True = counts.

  Returns:
    [...] log-ratio of each sequence in nats; 0 for an empty one.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean, or ref_logprobs is None.

  Example:
    >>> on = jnp.array([True, True, False])
    >>> sequence_log_ratio(jnp.array([-1.0, -1.0, 0.0]), jnp.array([-2.0, -2.5, jnp.nan]), on)
    Array(2.5, dtype=float32)

  Reference: Rafailov et al. 2023 (DPO), arXiv:2305.18290, eq. 7.
  """
  return lp.sequence_logprob(_token_log_ratio(logprobs, ref_logprobs, mask), mask)


def mean_log_ratio(logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  r"""(1 / |y|) log pi(y | x) / ref(y | x): the log-ratio per counted token.

  Args:
    logprobs: [..., T] of the policy, nats. Differentiated.
    ref_logprobs: [..., T] of the reference, nats. Constant.
    mask: [..., T] bool, True = counts.

  Returns:
    [...] nats per token; 0 for an empty sequence.

  Raises:
    ValueError: shapes differ.
    TypeError: the mask is not boolean, or ref_logprobs is None.

  Example:
    >>> on = jnp.array([True, True, False])
    >>> mean_log_ratio(jnp.array([-1.0, -1.0, 0.0]), jnp.array([-2.0, -2.5, jnp.nan]), on)
    Array(1.25, dtype=float32)

  Reference: length-normalised DPO of Lambert et al. 2024 (Tulu 3), arXiv:2411.15124, section 5.
  """
  return lp.mean_logprob(_token_log_ratio(logprobs, ref_logprobs, mask), mask)


def dpo_loss(
  chosen_log_ratio: jax.Array, rejected_log_ratio: jax.Array, *, beta: Any = 0.1
) -> jax.Array:
  r"""Direct preference optimisation, per pair.

  loss = -log sig(x),  x = beta (chosen - rejected)

  A logistic regression: it never stops pushing, so beta sets the pace more than a distance to
  the reference. Of `mean_log_ratio` it is length-normalised DPO, with a much larger beta (5).

  Args:
    chosen_log_ratio, rejected_log_ratio, beta: see the module.

  Returns:
    [B] loss, log 2 where both log-ratios agree.

  Raises:
    ValueError: shapes differ, or beta <= 0.

  Example:
    >>> dpo_loss(jnp.array([3.0]), jnp.array([1.0]))
    Array([0.5981389], dtype=float32)

  Reference: Rafailov et al. 2023 (DPO), arXiv:2305.18290, eq. 7.
  """
  return pairs.logistic_loss(pairs.scaled_margin(chosen_log_ratio, rejected_log_ratio, beta))


def conservative_dpo_loss(
  chosen_log_ratio: jax.Array,
  rejected_log_ratio: jax.Array,
  *,
  label_smoothing: Any,
  beta: Any = 0.1,
) -> jax.Array:
  r"""DPO with smoothed labels (cDPO), per pair.

  loss = -(1 - e) log sig(x) - e log sig(-x),  x = beta (chosen - rejected)

  It stops at x = log((1 - e) / e). Biased if labels are flipped with probability e, bounded
  below; `robust_dpo_loss` is the opposite. SimPO and CPO with smoothing: this on log-probs.

  Args:
    chosen_log_ratio, rejected_log_ratio, beta: see the module.
    label_smoothing: e, in [0, 0.5).

  Returns:
    [B] loss, >= 0.

  Raises:
    ValueError: shapes differ, beta <= 0, or label_smoothing is outside [0, 0.5).

  Example:
    >>> two, zero = jnp.array([2.0]), jnp.array([0.0])
    >>> conservative_dpo_loss(two, zero, label_smoothing=0.1, beta=1.0).round(6)
    Array([0.326928], dtype=float32)

  Reference: Mitchell 2023, "A note on DPO with noisy preferences & relationship to IPO".
  """
  x = pairs.scaled_margin(chosen_log_ratio, rejected_log_ratio, beta)
  return pairs.smoothed_logistic_loss(x, pairs.smoothing(label_smoothing, x))


def robust_dpo_loss(
  chosen_log_ratio: jax.Array,
  rejected_log_ratio: jax.Array,
  *,
  label_smoothing: Any,
  beta: Any = 0.1,
) -> jax.Array:
  r"""DPO that is unbiased under flipped labels (rDPO), per pair.

  loss = (-(1 - e) log sig(x) + e log sig(-x)) / (1 - 2 e),  x = beta (chosen - rejected)

  In expectation over labels that are flipped with probability e it is the loss of the true
  labels. The price is that it has no lower bound: negative values are right.

  Args:
    chosen_log_ratio, rejected_log_ratio, beta: see the module.
    label_smoothing: e, the rate of flipped labels, in [0, 0.5).

  Returns:
    [B] loss.

  Raises:
    ValueError: shapes differ, beta <= 0, or label_smoothing is outside [0, 0.5).

  Example:
    >>> two, zero = jnp.array([2.0]), jnp.array([0.0])
    >>> robust_dpo_loss(two, zero, label_smoothing=0.1, beta=1.0).round(6)
    Array([-0.123072], dtype=float32)

  Reference: Chowdhury et al. 2024 (rDPO), arXiv:2403.00409, section 3.
  """
  x = pairs.scaled_margin(chosen_log_ratio, rejected_log_ratio, beta)
  e = pairs.smoothing(label_smoothing, x)
  kept = (1.0 - e) * pairs.logistic_loss(x)
  return (kept - e * pairs.logistic_loss(-x)) / (1.0 - 2.0 * e)


def hinge_dpo_loss(
  chosen_log_ratio: jax.Array, rejected_log_ratio: jax.Array, *, beta: Any = 0.1
) -> jax.Array:
  r"""Hinge loss of the margin (SLiC, RSO), per pair.

  loss = max(0, 1 - x),  x = beta (chosen - rejected)

  Pairs beyond a margin of 1 / beta nats have no gradient.

  Args:
    chosen_log_ratio, rejected_log_ratio, beta: see the module.

  Returns:
    [B] loss, >= 0.

  Raises:
    ValueError: shapes differ, or beta <= 0.

  Example:
    >>> hinge_dpo_loss(jnp.array([3.0, 30.0]), jnp.array([1.0, 1.0]))
    Array([0.8, 0. ], dtype=float32)

  Reference: Zhao et al. 2023 (SLiC-HF), arXiv:2305.10425; with the reference: Liu et al. 2023
    (RSO), arXiv:2309.06657.
  """
  return jax.nn.relu(1.0 - pairs.scaled_margin(chosen_log_ratio, rejected_log_ratio, beta))


def ipo_loss(
  chosen_log_ratio: jax.Array, rejected_log_ratio: jax.Array, *, beta: Any = 0.1
) -> jax.Array:
  r"""Identity preference optimisation: the margin regressed on 1 / (2 beta), per pair.

  loss = (chosen - rejected - 1 / (2 beta))^2

  It stops at a margin of 1 / (2 beta) nats, so the length convention changes the optimum itself,
  by a factor of the length: `sequence_log_ratio` is the paper, OpenRLHF and ROLL,
  `mean_log_ratio` is TRL (1.x), AReaL and ms-swift.

  Args:
    chosen_log_ratio, rejected_log_ratio: see the module.
    beta: the paper's tau, > 0.

  Returns:
    [B] loss, >= 0.

  Raises:
    ValueError: shapes differ, or beta <= 0.

  Example:
    >>> ipo_loss(jnp.array([3.0]), jnp.array([1.0]))
    Array([9.], dtype=float32)

  Reference: Azar et al. 2023 (IPO), arXiv:2310.12036, eq. 17.
  """
  margin = pairs.scaled_margin(chosen_log_ratio, rejected_log_ratio, 1.0)
  return jnp.square(margin - 0.5 / pairs.positive("beta", beta, margin))


def exo_loss(
  chosen_log_ratio: jax.Array,
  rejected_log_ratio: jax.Array,
  *,
  label_smoothing: Any = 1e-3,
  beta: Any = 0.1,
) -> jax.Array:
  r"""Exact optimisation (EXO) of a pair: the reverse KL to the smoothed label.

  loss = q log(q / (1 - e)) + (1 - q) log((1 - q) / e),  q = sig(beta (chosen - rejected))

  DPO minimises the forward KL, which covers; this one seeks the mode. Its gradient vanishes for
  a pair that is far on the wrong side too.

  Args:
    chosen_log_ratio, rejected_log_ratio, beta: see the module.
    label_smoothing: e, in (0, 0.5); at 0 the loss is infinite.

  Returns:
    [B] loss, in [0, -log e].

  Raises:
    ValueError: shapes differ, beta <= 0, or label_smoothing is outside (0, 0.5).

  Example:
    >>> exo_loss(jnp.array([-1e3]), jnp.array([0.0]), label_smoothing=0.25)
    Array([1.3862944], dtype=float32)

  Reference: Ji et al. 2024 (EXO), arXiv:2402.00856, eq. 16.
  """
  x = pairs.scaled_margin(chosen_log_ratio, rejected_log_ratio, beta)
  e = pairs.smoothing(label_smoothing, x, open_low=True)
  right = pairs.sigmoid(x) * (-pairs.logistic_loss(x) - jnp.log1p(-e))
  return right + pairs.sigmoid(-x) * (-pairs.logistic_loss(-x) - jnp.log(e))


def discopop_loss(
  chosen_log_ratio: jax.Array,
  rejected_log_ratio: jax.Array,
  *,
  tau: Any = 0.05,
  beta: Any = 0.1,
) -> jax.Array:
  r"""DiscoPOP's log-ratio modulated loss, found by a language model, per pair.

  loss = (1 - m) (-log sig(x)) + m exp(-x),  m = sig(x / tau),  x = beta (chosen - rejected)

  Not convex: for small tau it has a local minimum at slightly negative margins.

  Args:
    chosen_log_ratio, rejected_log_ratio, beta: see the module.
    tau: width of the switch between the two losses, > 0; bounded by DPO's loss + 1 if tau <= 1.

  Returns:
    [B] loss, >= 0.

  Raises:
    ValueError: shapes differ, beta <= 0, or tau <= 0.

  Example:
    >>> discopop_loss(jnp.array([3.0]), jnp.array([1.0])).round(6)
    Array([0.814763], dtype=float32)

  Reference: Lu et al. 2024 (DiscoPOP), arXiv:2406.08414, eq. 5.
  """
  x = pairs.scaled_margin(chosen_log_ratio, rejected_log_ratio, beta)
  z = x / pairs.positive("tau", tau, x)
  # m exp(-x) with its exponents joined: 0 exp(1e3) would be NaN.
  exponential = jnp.exp(-pairs.logistic_loss(z) - x)
  return pairs.sigmoid(-z) * pairs.logistic_loss(x) + exponential


def preference_statistics(
  chosen_rewards: jax.Array, rejected_rewards: jax.Array, *, where: jax.Array | None = None
) -> dict[str, Average]:
  r"""What to log of preference pairs: how often and by how much chosen is above rejected.

  The implicit reward of a policy is beta times the log-ratio of the sequence; the rewards of a
  reward model are what they are. A tie is not a success.

  Args:
    chosen_rewards, rejected_rewards: [B]. Constant.
    where: [B] bool, True = the pair counts; None = all.

  Returns:
    {"accuracy", "margin", "chosen", "rejected"}: Averages over the counted pairs.

  Raises:
    ValueError: shapes differ.
    TypeError: `where` is not boolean.

  Example:
    >>> found = preference_statistics(jnp.array([1.0, 2.0]), jnp.array([0.0, 4.0]))
    >>> found["accuracy"].mean(), found["margin"].mean()
    (Array(0.5, dtype=float32), Array(-0.5, dtype=float32))

  Reference: implicit reward: Rafailov et al. 2023 (DPO), arXiv:2305.18290, section 4.
  """
  rows = pairs.same_rows(chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards)
  chosen, rejected = map(jax.lax.stop_gradient, rows)
  where = jnp.ones_like(chosen, dtype=jnp.bool_) if where is None else where
  where = checks.check_mask(where, name="where", chosen_rewards=chosen)
  above = (chosen > rejected).astype(chosen.dtype)
  margin = jnp.where(where, chosen, 0) - jnp.where(where, rejected, 0)
  found = {"accuracy": above, "margin": margin, "chosen": chosen, "rejected": rejected}
  return {name: Average.of(x, where) for name, x in found.items()}


def _token_log_ratio(logprobs: Any, ref_logprobs: Any, mask: Any) -> jax.Array:
  """`token_log_ratio` whose errors name the reference."""
  logprobs = checks.as_float("logprobs", logprobs)
  ref_logprobs = checks.as_float("ref_logprobs", pairs.required("ref_logprobs", ref_logprobs))
  checks.check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
  return ratios.token_log_ratio(logprobs, ref_logprobs, mask)
