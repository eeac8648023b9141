r"""Exact moments of one response's update under any assignment of credit to its tokens.

  g(y) = sum_t c_t(y) grad log pi(y_t | s_t)

A critic, a discount, a penalty per token or a clip end in coefficients c that may differ from
response to response in any way. `bias_variance` is for groups, whose advantages follow from a few
statistics; here a response is its own batch, and c is given for every response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm.exact.backward_induction import expected_reward, response_probs
from jaxrl_lm.exact.moments import Moments
from jaxrl_lm.exact.problem import Scoring, check_problem, target_gradient
from jaxrl_lm.exact.scores import pull_back, score_gram
from jaxrl_lm.exact.tabular import Policy


def credit_moments(
  policy: Policy,
  coefficients: Mapping[str, Any],
  rewards: Any,
  *,
  sampler_logprobs: Any = None,
  target: Callable[..., jax.Array] = expected_reward,
) -> dict[str, Moments]:
  r"""Exact mean and variance of an update of one sample, for several assignments of credit.

  E[g] = sum_y mu(y) g(y),  Var = sum_y mu(y) c^T K(y) c - |E[g]|^2

  with K(y) the inner products of the token scores, which all assignments share. Moments of the
  difference of two assignments tell how far they are apart sample by sample: the root of
  `variance + |mean|^2`. Inside `with jax.enable_x64(True)`.

  Args:
    policy: P prompts, at the parameters where the gradient is taken.
    coefficients: name -> [P, N, T] coefficient of every token of every response, in units of the
      reward; what stands at masked positions is not read.
    rewards: [P, N] of the target.
    sampler_logprobs: [P, N, T] of the policy that draws the response; None = the policy.
    target: (language, logprobs [P, N, T], rewards) -> [P].

  Returns:
    name -> moments, one entry per prompt.

  Raises:
    ValueError: a shape is wrong, a coefficient is not finite, the policy's probabilities do not
      sum to 1, or numbers are not of 64 bits.

  Example:
    >>> from jaxrl_lm.exact import enumerate_language, first_token_reward, tabular_policy
    >>> language = enumerate_language(2, 1)
    >>> reward = first_token_reward(language, [1])
    >>> with jax.enable_x64(True):
    ...   policy = tabular_policy(language, np.zeros((1, 1, 2)))
    ...   credit = {"reward": reward[..., None], "centred": reward[..., None] - 0.5}
    ...   found = credit_moments(policy, credit, reward)
    >>> found["reward"].variance, found["centred"].variance
    (array([0.125]), array([0.]))

  Reference: Schulman et al. 2016, arXiv:1506.02438, eq. 1.
  """
  rewards = check_problem(policy, rewards, Scoring(), sampler_logprobs)
  language = policy.language
  shape = (*rewards.shape, language.horizon)
  mask = np.asarray(language.mask)
  arrays = {name: np.asarray(c, np.float64) for name, c in coefficients.items()}
  for name, array in arrays.items():
    if array.shape != shape:
      raise ValueError(
        f"coefficients[{name!r}] must be [prompts, responses, horizon] = {shape}: {array.shape}"
      )
    if not np.isfinite(array[:, mask]).all():
      raise ValueError(f"coefficients[{name!r}] must be finite where the mask is True")
  stacked = np.where(mask, np.stack(list(arrays.values())), 0.0)  # [B, P, N, T]
  logprobs = policy.logprobs() if sampler_logprobs is None else jnp.asarray(sampler_logprobs)
  probs = np.asarray(response_probs(language, logprobs))
  gradient = target_gradient(policy, rewards, target)
  done = [_of_prompt(policy, p, probs[p], stacked[:, p]) for p in range(policy.num_prompts)]
  mean, square = (np.stack(x, axis=1) for x in zip(*done, strict=True))  # [B, P, D], [B, P]
  variance = np.maximum(square - (mean**2).sum(axis=-1), 0.0)
  none = np.zeros(policy.num_prompts)
  return {
    name: Moments(mean[b], gradient, variance[b], None, none) for b, name in enumerate(arrays)
  }


def _of_prompt(
  policy: Policy, prompt: int, probs: np.ndarray, coefficients: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Mean [B, D] and mean square [B] of the update, coefficients [B, N, T]."""
  weighted = probs[:, None] * coefficients
  mean = pull_back(policy.score, policy.params, policy.language, prompt, weighted)
  gram = np.asarray(score_gram(policy, prompt))
  square = [
    np.einsum("nt,ntu,nu", w, gram, c, optimize=True)
    for w, c in zip(weighted, coefficients, strict=True)
  ]
  return np.asarray(mean), np.array(square)
