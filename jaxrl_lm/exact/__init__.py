"""The exact laboratory: enumerable languages, and expectations over them without sampling.

`bias_variance(objective, policy, rewards, group_size=...)` is the one call for a new idea. Long
responses live in the modules `chains`, `ratio_distributions` and `counting`.
"""

from jaxrl_lm.exact import chains, counting, ratio_distributions
from jaxrl_lm.exact.backward_induction import (
  TokenValues,
  entropy,
  expected_reward,
  kl_divergence,
  pass_at_k,
  regularised_optimum,
  regularised_reward,
  response_probs,
  token_values,
)
from jaxrl_lm.exact.credit import credit_moments
from jaxrl_lm.exact.language import (
  Language,
  enumerate_language,
  first_token_reward,
  modular_sum_reward,
  num_responses,
)
from jaxrl_lm.exact.moments import Moments, bias_variance
from jaxrl_lm.exact.problem import target_gradient
from jaxrl_lm.exact.sampled import sampled_bias_variance
from jaxrl_lm.exact.tabular import Policy, count_pretrained_logits, tabular_policy
from jaxrl_lm.exact.vector_field import curl, expected_update, jacobian, loop_work

__all__ = [
  "Language",
  "Moments",
  "Policy",
  "TokenValues",
  "bias_variance",
  "chains",
  "count_pretrained_logits",
  "counting",
  "credit_moments",
  "curl",
  "entropy",
  "enumerate_language",
  "expected_reward",
  "expected_update",
  "first_token_reward",
  "jacobian",
  "kl_divergence",
  "loop_work",
  "modular_sum_reward",
  "num_responses",
  "pass_at_k",
  "ratio_distributions",
  "regularised_optimum",
  "regularised_reward",
  "response_probs",
  "sampled_bias_variance",
  "tabular_policy",
  "target_gradient",
  "token_values",
]
