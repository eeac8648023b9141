"""What an update is made of: frozen records of functions and numbers."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxrl_lm import checks, selection
from jaxrl_lm.lm import scoring
from jaxrl_lm.objectives import Objective


@dataclasses.dataclass(frozen=True)
class CriticConfig:
  """How a critic learns.

  Attributes:
    model: of a configuration with `scalar_head=True`; parameters apart from the policy's.
    optimizer: its own.
    value_clip: how far a value may move from `old_values`, in units of the return (see
      `clipped_value_loss`); inf = no clip.
    max_grad_norm: its gradient is clipped to this norm; None = not.
  """

  model: Any
  optimizer: optax.GradientTransformation
  value_clip: Any = 0.2
  max_grad_norm: Any = 1.0

  def __post_init__(self) -> None:
    """Checks what can be seen here."""
    _check_norm(self.max_grad_norm)


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
  """How a policy learns from a batch.

  Static under jit. A number may be traced all the same, put in where the trace is:
  `update(model, dataclasses.replace(config, kl_coef=coef), state, batch)`.

  Attributes:
    objective: a row of the table, or one of your own.
    optimizer: of `optimizer`, or any other of optax that is called with gradients and parameters
      alone: not one that asks for the value of the loss.
    micro_batches: how many equal parts the rows are scored in, one after the other. Changes memory
      and time, and numbers by rounding only; a run that is resumed to the bit keeps it.
    temperature: of the policy that is trained: the sampler's.
    kl: estimator of the KL term in the loss, such as `kl_k2`; None = no term.
    kl_coef: its weight.
    entropy_coef: weight of the entropy bonus.
    selection: which tokens a surrogate with `selected` treats apart, a function of (key, logprobs,
      log_ratio, advantages, mask) [R, T] at the parameters before the update, called on the whole
      batch: `partial(clip_cov_selection, fraction=2e-4)` or `partial(kl_cov_tokens,
      fraction=2e-3)`. None for all other surrogates.
    score: what scores responses: `response_scores`, `linear_response_scores`, or a function of
      their signature.
    max_grad_norm: the gradient is clipped to this norm; None = not.
    critic: for objectives whose advantages need values; None = no critic.
  """

  objective: Objective
  optimizer: optax.GradientTransformation
  micro_batches: int = 1
  temperature: Any = 1.0
  kl: Callable[..., jax.Array] | None = None
  kl_coef: Any = 0.0
  entropy_coef: Any = 0.0
  selection: Callable[..., jax.Array] | None = None
  score: Callable[..., scoring.TokenScores] = scoring.response_scores
  max_grad_norm: Any = 1.0
  critic: CriticConfig | None = None

  def __post_init__(self) -> None:
    """Checks what can be seen here."""
    checks.check_range("micro_batches", self.micro_batches, low=1)
    _check_norm(self.max_grad_norm)
    if self.selection is not None:
      parameters = inspect.signature(self.objective.surrogate).parameters
      if "selected" not in parameters:
        raise ValueError("selection is given, but the objective's surrogate takes no `selected`")


def _check_norm(max_grad_norm: Any) -> None:
  if max_grad_norm is not None:
    checks.check_range("max_grad_norm", max_grad_norm, low=0, open_low=True)


def kl_cov_tokens(
  key: jax.Array | None,
  logprobs: jax.Array,
  log_ratio: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  fraction: Any,
) -> jax.Array:
  """`kl_cov_selection` with the signature of the selection slot.

  Args:
    key, log_ratio: not used: nothing is drawn.
    logprobs, advantages, mask, fraction: as of `kl_cov_selection`.

  Returns:
    [R, T] bool.

  Raises:
    ValueError: as `kl_cov_selection`.
  """
  del key, log_ratio
  return selection.kl_cov_selection(logprobs, advantages, mask, fraction=fraction)
