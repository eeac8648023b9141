"""One step of an optimiser, and when not to take it.

  gradients -> float32 -> their norm -> clipped -> optimiser, with float32 moments -> parameters

A step is not taken, and parameters, moments and step count keep every bit, where a gradient is not
finite (one NaN in the moments of Adam stays for ever) and where all of it is exactly 0 (momentum
and weight decay would move the weights without a reason in the data).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_lm import checks

_NOT_DECAYED = ("scale", "bias")


class GradientSize(NamedTuple):
  """What decides about a step. Scalars, of all leaves on all devices.

  Attributes:
    norm: Euclidean norm, float32 at least; NaN or inf where not finite.
    finite: bool, every entry is, and so is the norm.
    zero: bool, every entry is exactly 0.
  """

  norm: jax.Array
  finite: jax.Array
  zero: jax.Array


def optimizer(
  learning_rate: Any,
  *,
  weight_decay: Any = 0.0,
  b1: Any = 0.9,
  b2: Any = 0.999,
  eps: Any = 1e-8,
) -> optax.GradientTransformation:
  r"""AdamW that does not decay norms and biases.

  theta <- theta - lr (m / (sqrt(v) + eps) + weight_decay theta), m and v with bias correction

  Any other `optax.GradientTransformation` does as well: clipping is not part of it, and whatever it
  is, it sees float32.

  Args:
    learning_rate: number, traced if you like, or a schedule: optimiser steps taken -> number.
      A step that is not taken does not count.
    weight_decay: of matrices and embeddings, a fraction per step of size 1.
    b1, b2: decay of first and second moment, per step.
    eps: added to sqrt(v).

  Returns:
    The transformation.

  Reference: Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2.
  """
  return optax.adamw(
    learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask
  )


def decay_mask(params: Any) -> Any:
  """Which parameters weight decay is for: all but the scales of norms and the biases.

  By name, not by number of axes: where layers are scanned, a norm's scale is a matrix.

  Args:
    params: of a policy.

  Returns:
    The same structure with a bool at every leaf.
  """

  def decays(path: tuple[Any, ...], _: Any) -> bool:
    return not (path and str(getattr(path[-1], "key", "")) in _NOT_DECAYED)

  return jax.tree_util.tree_map_with_path(decays, params)


def widened(tree: Any) -> Any:
  """Every array in float32 at least: what an optimiser is given, and starts from.

  Args:
    tree: of floating arrays.

  Returns:
    The same structure; float64 stays float64.
  """
  return jax.tree.map(lambda x: checks.as_float("params", x), tree)


def gradient_size(gradients: Any) -> GradientSize:
  """Norm of all gradients together, and whether they are finite, or 0.

  The norm is taken relative to the largest entry, so that 1e30 does not overflow and 1e-30 does not
  vanish. Under jit every number is of the global arrays: all devices, and processes, decide alike.

  Args:
    gradients: of the parameters, any floating dtypes.

  Returns:
    GradientSize.
  """
  leaves = [checks.as_float("gradients", x) for x in jax.tree.leaves(gradients)]
  # Not from the maximum: whether that keeps a NaN depends on the device.
  finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]))
  peak = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in leaves]))
  unit = jnp.where(finite & (peak > 0), peak, 1.0)
  norm = unit * jnp.sqrt(sum(jnp.sum(jnp.square(x / unit)) for x in leaves))
  return GradientSize(norm, finite & jnp.isfinite(norm), finite & (peak == 0))


def clipped(gradients: Any, norm: jax.Array, max_norm: Any) -> Any:
  """Gradients scaled down to a norm of at most `max_norm`; below it they keep every bit.

  Args:
    gradients: of the parameters.
    norm: of all of them, from `gradient_size`.
    max_norm: > 0, or None = no clipping.

  Returns:
    The same structure.

  Raises:
    ValueError: max_norm <= 0.

  Reference: Pascanu et al. 2013, arXiv:1211.5063, algorithm 1.
  """
  if max_norm is None:
    return gradients
  checks.check_range("max_grad_norm", max_norm, low=0.0, open_low=True)
  scale = jnp.where(norm > max_norm, max_norm / norm, 1.0)
  return jax.tree.map(lambda x: x * scale.astype(x.dtype), gradients)


def step(
  transformation: optax.GradientTransformation,
  gradients: Any,
  opt_state: Any,
  params: Any,
  take: jax.Array,
) -> tuple[Any, Any]:
  """One step of an optimiser, or none.

  Args:
    transformation: the optimiser.
    gradients: of the parameters, clipped.
    opt_state: begun by `transformation.init(widened(params))`.
    params: to be moved. The sum is made in float32 and rounded to their dtype: in bfloat16 a step
      below 1/256 of a parameter is lost, so train float32 parameters (`param_dtype`) and compute
      in bfloat16 (`compute_dtype`).
    take: bool scalar; False = parameters and optimiser state keep every bit.

  Returns:
    Parameters and optimiser state.
  """
  wide = widened(params)
  updates, new_state = transformation.update(widened(gradients), opt_state, wide)
  new_params = jax.tree.map(lambda p, w, u: (w + u).astype(p.dtype), params, wide, updates)

  def taken(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(take, new, old)

  return jax.tree.map(taken, new_params, params), jax.tree.map(taken, new_state, opt_state)
