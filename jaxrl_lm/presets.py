r"""What other libraries compute under their own names, as compositions of this one.

  recipe  = trl_dapo(epsilon_high=0.28, beta=0.04)
  weights = recipe.objective.loss_weights(mask)
  loss, aux = recipe_loss(
    recipe, logprobs, old_logprobs, advantages, mask, loss_weights=weights, ref_logprobs=ref
  )

One function per library and loss: `trl_*`, `verl_*`, `openrlhf_*`, `tunix_*`, `nemo_rl_*`, in the
file of that library. Arguments have the library's names and defaults. Two rules:

* Where the library selects code by a string, the argument of that name takes our function:
  verl's loss_agg_mode="token-mean" is `loss_agg_mode=token_mean`.
* What the library spreads over micro-batches and devices (num_items_in_batch, global_batch_size,
  dp_size, gradient accumulation) is no argument: the loss weights are those of the whole batch.

A preset is a row of slots: `dataclasses.replace(recipe.objective, loss_weights=...)` ablates it.
Its advantages are those the library pairs with the loss in its GRPO. The first line of a docstring
says what differs from the paper's GRPO, and `docs/which_grpo.md` shows all of them on one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxrl_lm.objectives import Objective, ObjectiveAux, objective_loss


class Recipe(NamedTuple):
  """A library's loss: an `Objective` and what stands beside it.

  Attributes:
    objective: the slots of the policy term.
    kl: (logprobs, ref_logprobs, mask, *, old_logprobs, segment_ids) -> KL per token of the loss,
      or None.
    kl_coef: its coefficient.
    entropy_coef: coefficient of the entropy bonus.
    reward_kl: (logprobs, ref_logprobs, mask) -> KL per token that is taken off the reward, of the
      log-probs before the update, or None.
    reward_kl_coef: its coefficient (`kl_shaped_rewards`).
    correction: (log_weights, mask) -> importance weights of trainer against sampler, where
      log_weights = token_log_ratio(old_logprobs, sampler_logprobs, mask), or None.
    selection: the function of `selection` whose result is `selected`, or None.
  """

  objective: Objective
  kl: Callable[..., jax.Array] | None = None
  kl_coef: Any = 0.0
  entropy_coef: Any = 0.0
  reward_kl: Callable[..., jax.Array] | None = None
  reward_kl_coef: Any = 0.0
  correction: Callable[..., jax.Array] | None = None
  selection: Callable[..., jax.Array] | None = None


def recipe_loss(
  recipe: Recipe,
  logprobs: jax.Array,
  old_logprobs: jax.Array | None,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  loss_weights: jax.Array,
  importance_weights: jax.Array | None = None,
  ref_logprobs: jax.Array | None = None,
  entropy: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  selected: jax.Array | None = None,
) -> tuple[jax.Array, ObjectiveAux]:
  r"""Loss of a preset: `objective_loss` with the terms of the recipe.

  Correction and selection are made by the caller, once on the whole batch, like the weights.

  Args:
    recipe: of a preset. Static under jit, or closed over.
    logprobs: [..., T] of the current policy, nats. Differentiated.
    old_logprobs: [..., T] of the policy the ratio is taken against. Constant. None = on-policy.
    advantages: [..., T] or [..., 1]. Constant.
    mask: [..., T] bool, True = counts.
    loss_weights: [..., T] from `recipe.objective.loss_weights` on the whole batch. Constant.
    importance_weights: [..., T] or [..., 1], such as those of `recipe.correction`. Constant.
    ref_logprobs: [..., T] of the reference policy. Constant. Needed where `recipe.kl` is.
    entropy: [..., T] of `token_entropy`. Differentiated. Needed where entropy_coef is not 0.
    segment_ids: [..., T] int of packed rows, 0 = padding. None = a row is one sequence.
    selected: [..., T] bool of `recipe.selection`.

  Returns:
    loss, a scalar to be minimised, and `ObjectiveAux`.

  Raises:
    ValueError, TypeError: as `objective_loss`.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxrl_lm.trl_presets import trl_dapo
    >>> logprobs, mask = jnp.array([[-1.0, -2.0], [-0.5, 0.0]]), jnp.array([[1, 1], [1, 0]], bool)
    >>> recipe = trl_dapo()
    >>> advantages = recipe.objective.advantages(jnp.array([1.0, 0.0]))[..., None]
    >>> weights = recipe.objective.loss_weights(mask)
    >>> loss, _ = recipe_loss(recipe, logprobs, None, advantages, mask, loss_weights=weights)
    >>> loss.round(4)
    Array(-0.2357, dtype=float32)

  Reference: each preset names its own.
  """
  kl = recipe.kl
  if kl is not None:
    old = logprobs if old_logprobs is None else old_logprobs
    kl = partial(kl, old_logprobs=jax.lax.stop_gradient(old), segment_ids=segment_ids)
  return objective_loss(
    recipe.objective,
    logprobs,
    old_logprobs,
    advantages,
    mask,
    loss_weights=loss_weights,
    importance_weights=importance_weights,
    ref_logprobs=ref_logprobs,
    kl=kl,
    kl_coef=recipe.kl_coef,
    entropy=entropy,
    entropy_coef=recipe.entropy_coef,
    segment_ids=segment_ids,
    selected=selected,
  )
