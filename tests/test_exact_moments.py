"""jaxrl_lm.exact.moments: against the literal average over every group, closed forms, bad input."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from jaxrl_lm.exact import (
  bias_variance,
  enumerate_language,
  expected_reward,
  first_token_reward,
  modular_sum_reward,
  moments,
  pass_at_k,
  regularised_reward,
  tabular_policy,
)
from jaxrl_lm.exact.classes import classify, enumerate_groups, group_probs, kinds_of_groups
from jaxrl_lm.exact.problem import target_gradient
from tests.laboratory import LANGUAGE, binary_rewards, literal_moments, network, table
from tests.test_tabular import ENDING_TARGETS, ending_policy

SHAPE = (2, len(LANGUAGE.tokens))
REWARDS = {
  "binary": binary_rewards(LANGUAGE),
  "three values": np.random.default_rng(1).integers(0, 3, SHAPE) / 2.0,
  "all distinct": np.random.default_rng(2).normal(size=SHAPE),
}


def opo(rewards, mask):
  return rl.length_weighted_baseline(rewards, mask.sum(axis=-1))


def with_critic(rewards, mask):
  """Advantages per token: GAE against values that differ from token to token."""
  values = jnp.broadcast_to(jnp.linspace(0.2, 0.7, mask.shape[-1]).reshape(1, 1, -1), mask.shape)
  return rl.gae(rl.terminal_rewards(rewards, mask), values, mask, gae_lambda=0.8)


def half_power(mask):
  return rl.length_power(mask, alpha=0.5)


ADVANTAGES = {
  "OPO": opo,
  "REINFORCE_PP_BASELINE": rl.whitened_group_centered,
  "PPO": with_critic,
  "DUAL_CLIP_PPO": with_critic,
}
OBJECTIVES = {
  name: getattr(rl, name)
  for name in [
    *("GRPO", "DAPO", "BNPO", "GSPO", "GSPO_TOKEN", "LUSPO", "GMPO", "CISPO", "SAPO", "VESPO"),
    *("GPG", "DPPO_TV", "DPPO_KL", "REINFORCE", "RLOO", "OPO", "TOPR", "DRO", "PPO"),
    *("DUAL_CLIP_PPO", "REINFORCE_PP_BASELINE"),
  ]
} | {
  "DR_GRPO": rl.dr_grpo(3),
  "per prefix": replace(rl.GRPO, level=rl.per_prefix),
  "per sequence": replace(rl.GRPO, level=rl.per_sequence),
  "length power": replace(rl.GRPO, loss_weights=half_power),
  "group token mean": replace(rl.GRPO, loss_weights=rl.group_token_mean),
  "leave one out": replace(rl.RLOO, surrogate=rl.importance_weighted, level=rl.per_sequence),
}
DEFAULT = {
  ("GRPO", "on"),
  ("GRPO", "everything"),
  ("GSPO", "off"),
  ("OPO", "on"),
  ("REINFORCE_PP_BASELINE", "on"),
  ("VESPO", "KL"),
}


def scoring(regime):
  """Four policies apart by a nat or so: current, old, sampler, reference."""
  old, sampler, ref = (table(LANGUAGE, seed=s).logprobs() for s in (11, 12, 13))
  difference = jnp.where(LANGUAGE.mask, old - sampler, 0.0)
  mask = jnp.broadcast_to(LANGUAGE.mask, difference.shape)
  weights = rl.truncated(difference, mask, cap=1.5)
  return {
    "on": {},
    "off": {"old_logprobs": old},
    "sampler": {"old_logprobs": old, "sampler_logprobs": sampler},
    "KL": {"ref_logprobs": ref, "kl": rl.kl_k2, "kl_coef": 0.3},
    "everything": {
      "old_logprobs": old,
      "sampler_logprobs": sampler,
      "importance_weights": weights,
      "ref_logprobs": ref,
      "kl": rl.kl_k3,
      "kl_coef": 0.3,
    },
  }[regime]


def assert_literal(objective, policy, rewards, *, group_size, rtol=1e-10, **given):
  """Mean, total variance and variance along a direction, of each prompt."""
  direction = jax.tree.map(
    lambda x: 1.0 + jnp.sin(jnp.arange(x.size)).reshape(x.shape), policy.params
  )
  given |= {"direction": direction}
  found = bias_variance(objective, policy, rewards, group_size=group_size, **given)
  for p in range(policy.num_prompts):
    expected = literal_moments(objective, policy, rewards, p, group_size=group_size, **given)
    scale = max(np.abs(expected.mean).max(), np.sqrt(expected.variance))
    np.testing.assert_allclose(found.mean[p], expected.mean, rtol=0, atol=rtol * scale)
    np.testing.assert_allclose(found.variance[p], expected.variance, rtol=rtol, atol=1e-16)
    np.testing.assert_allclose(found.directional_variance[p], expected.along, rtol=rtol, atol=1e-16)
  return found


CASES = [
  pytest.param(name, regime, marks=() if (name, regime) in DEFAULT else pytest.mark.slow)
  for name, regime in sorted(
    DEFAULT
    | {(name, regime) for name in OBJECTIVES for regime in ("on", "everything")}
    | {("GMPO", "sampler")}
  )
]


@pytest.mark.parametrize(("name", "regime"), CASES)
def test_every_group(x64, name, regime):
  """15^3 groups; a class holds up to eight responses."""
  given = scoring(regime) | {"advantages": ADVANTAGES.get(name)}
  rewards = REWARDS["all distinct" if regime == "everything" else "binary"]
  assert_literal(OBJECTIVES[name], table(LANGUAGE), rewards, group_size=3, **given)


@pytest.mark.parametrize(
  ("language", "group_size"),
  [
    (enumerate_language(2, 2, end_token=1), 8),  # 3 responses, 6561 groups
    (enumerate_language(3, 2, end_token=0), 5),  # 7 responses, 16,807 groups
    (enumerate_language(3, 2), 4),  # 9 responses, 6561 groups
    (LANGUAGE, 2),
  ],
)
@pytest.mark.slow
def test_other_languages_and_group_sizes(x64, language, group_size):
  policy, old = table(language), table(language, seed=7).logprobs()
  rewards = np.random.default_rng(0).integers(0, 3, (2, len(language.tokens))) - 1.0
  given = {"group_size": group_size, "old_logprobs": old, "advantages": rl.whitened_group_centered}
  assert_literal(rl.REINFORCE_PP_BASELINE, policy, rewards, **given)


@pytest.mark.parametrize(
  "regime", ["everything", *(pytest.param(x, marks=pytest.mark.slow) for x in ("on", "sampler"))]
)
def test_every_group_of_a_shared_policy(x64, regime):
  """States and prompts share parameters, which are a nested pytree: the Gram is by autodiff."""
  given = scoring(regime)
  rewards = REWARDS["three values"]
  assert_literal(rl.GRPO, network(LANGUAGE), rewards, group_size=3, **given)


def test_table_without_its_closed_form(x64):
  policy = table(LANGUAGE)
  one, other = (
    bias_variance(rl.GRPO, x, REWARDS["binary"], group_size=5)
    for x in (policy, policy._replace(score_gram=None))
  )
  np.testing.assert_allclose(one.variance, other.variance, rtol=1e-13)
  np.testing.assert_array_equal(one.mean, other.mean)


# -- The language of the demonstrations ----------------------------------------------------------


@functools.cache
def demonstration(name, group_size=8):
  objectives = {
    "sequence_mean": replace(rl.GRPO, advantages=rl.group_centered),
    "with std": rl.GRPO,
    "constant_length": rl.dr_grpo(6),
    "sequence_sum": replace(rl.REINFORCE, advantages=rl.group_centered),
    "leave_one_out": rl.RLOO,
    "token_mean": replace(rl.GRPO, advantages=rl.group_centered, loss_weights=rl.token_mean),
  }
  with jax.enable_x64(True):
    policy = ending_policy()
    rewards = modular_sum_reward(policy.language, ENDING_TARGETS)
    # Sums over tokens do not depend on the lengths of the others.
    sums = name in ("constant_length", "sequence_sum", "leave_one_out")
    statistic = rewards if sums else None
    return bias_variance(
      objectives[name], policy, rewards, group_size=group_size, statistic=statistic
    )


def test_length_bias():
  """G = 8, four prompts, 5461 responses: the statements of the demonstration."""
  mean = demonstration("sequence_mean")
  assert np.all((mean.cosine > 0.86) & (mean.cosine < 0.96))
  for name, scale in [
    ("constant_length", 7 / 8 / 6),
    ("sequence_sum", 7 / 8),
    ("leave_one_out", 1.0),
  ]:
    found = demonstration(name)
    np.testing.assert_allclose(found.cosine, 1.0, rtol=1e-13)
    np.testing.assert_allclose(found.scale, scale, rtol=1e-12)
    np.testing.assert_allclose(found.rescaled().relative_bias, 0.0, atol=1e-11)
    np.testing.assert_allclose(
      found.relative_variance, demonstration("leave_one_out").relative_variance, rtol=1e-10
    )
  token = demonstration("token_mean").cosine
  assert np.all((token > 0.998) & (token < 1 - 1e-6))
  # The bias buys variance.
  assert np.all(mean.relative_variance < demonstration("sequence_sum").relative_variance)


@pytest.mark.slow
def test_std_changes_only_the_size_in_the_demonstration():
  std, mean = demonstration("with std"), demonstration("sequence_mean")
  np.testing.assert_allclose(std.cosine, mean.cosine, rtol=1e-12)
  assert np.all(std.scale > 1.5 * mean.scale)


@pytest.mark.slow
def test_length_power_interpolates(x64):
  policy = ending_policy()
  rewards = modular_sum_reward(policy.language, ENDING_TARGETS)
  cosines, variances = [], []
  for alpha in (0.0, 0.25, 0.5, 0.75, 1.0):
    weights = functools.partial(rl.length_power, alpha=alpha)
    found = bias_variance(
      replace(rl.GRPO, advantages=rl.group_centered, loss_weights=weights),
      policy,
      rewards,
      group_size=8,
    )
    cosines.append(found.cosine)
    variances.append(found.relative_variance)
  assert np.all(np.diff(cosines, axis=0) < 0)
  np.testing.assert_allclose(cosines[0], 1.0, rtol=1e-12)
  np.testing.assert_allclose(cosines[-1], demonstration("sequence_mean").cosine, rtol=1e-12)


def test_mean_centred_closed_form(x64):
  """1/|o|: (G - 1)/G (grad E[r/n] - J grad E[1/n]), n the length."""
  policy, rewards = network(LANGUAGE), REWARDS["three values"]
  objective = replace(rl.GRPO, advantages=rl.group_centered)
  lengths = LANGUAGE.lengths[None]
  value = np.asarray(expected_reward(LANGUAGE, policy.logprobs(), rewards))[:, None]
  part = target_gradient(policy, rewards / lengths)
  inverse = target_gradient(policy, np.broadcast_to(1.0 / lengths, rewards.shape))
  for size in (2, 5):
    found = bias_variance(objective, policy, rewards, group_size=size)
    expected = (size - 1) / size * (part - value * inverse)
    np.testing.assert_allclose(found.mean, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("group_size", [2, 8, 64])
def test_difficulty_weight_of_the_std(x64, group_size):
  """w_G(p) = E sqrt(K (G - K)) / (G p (1 - p)), K ~ Bin(G, p); 1 at G = 2, at most sqrt(G - 1)."""
  policy = table(LANGUAGE)
  rewards = first_token_reward(LANGUAGE, [0, 2])
  std = functools.partial(rl.group_normalized, ddof=0, eps=0.0)
  objective = replace(rl.REINFORCE, advantages=std)
  found = bias_variance(objective, policy, rewards, group_size=group_size, statistic=rewards)
  p = np.asarray(expected_reward(LANGUAGE, policy.logprobs(), rewards))[:, None]
  k = np.arange(group_size + 1)
  log_factorial = np.cumsum(np.log(np.maximum(k, 1)))
  choose = np.exp(log_factorial[-1] - log_factorial - log_factorial[::-1])
  binomial = choose * p**k * (1 - p) ** (group_size - k)
  expected = (binomial * np.sqrt(k * (group_size - k))).sum(axis=1)
  expected /= group_size * p[:, 0] * (1 - p[:, 0])
  np.testing.assert_allclose(found.cosine, 1.0, rtol=1e-12)
  np.testing.assert_allclose(found.scale, expected, rtol=1e-9)
  assert np.all(found.scale <= np.sqrt(group_size - 1) * (1 + 1e-12))
  if group_size == 2:
    np.testing.assert_allclose(found.scale, 1.0, rtol=1e-12)


# -- Moments -------------------------------------------------------------------------------------


def test_averages_and_errors(x64):
  policy, rewards = table(LANGUAGE), REWARDS["binary"]
  found = bias_variance(
    rl.GRPO, policy, rewards, group_size=4, direction=jnp.ones_like(policy.params)
  )
  np.testing.assert_allclose(found.mse(), found.bias**2 + found.variance)
  np.testing.assert_allclose(
    found.mse(np.array([[1], [10]])), found.bias**2 + found.variance / np.array([[1], [10]])
  )
  both = found.averaged()
  np.testing.assert_allclose(both.mean[0], found.mean.mean(axis=0))
  np.testing.assert_allclose(both.variance, found.variance.sum() / 4)
  np.testing.assert_allclose(both.directional_variance, found.directional_variance.sum() / 4)
  same = found.rescaled()
  np.testing.assert_allclose(same.scale, 1.0)
  np.testing.assert_allclose(same.cosine, found.cosine)
  np.testing.assert_allclose(same.relative_variance, found.relative_variance)
  # Prompts do not share parameters in a table: nothing of one appears in the other.
  apart = found.mean.reshape(2, 2, -1)
  assert np.all(apart[0, 1] == 0)
  assert np.all(apart[1, 0] == 0)


@pytest.mark.slow
def test_direction_is_scaled_to_length_1(x64):
  language = enumerate_language(2, 2, end_token=1)
  policy, rewards = table(language, prompts=1), np.array([[1.0, 0.0, 0.5]])
  measure = functools.partial(bias_variance, rl.GRPO, policy, rewards, group_size=3)
  variance = lambda direction: measure(direction=direction).directional_variance
  one, other = (variance(s * policy.params) for s in (1.0, -1e-3))
  np.testing.assert_allclose(one, other, rtol=1e-12)
  # A table does not move along a shift of all logits.
  np.testing.assert_allclose(variance(jnp.ones_like(policy.params)), 0.0, atol=1e-15)
  # Over an orthonormal basis they sum to the total.
  total = sum(variance(b.reshape(policy.params.shape)) for b in np.eye(policy.params.size))
  np.testing.assert_allclose(total, measure().variance, rtol=1e-12)


def test_named_targets(x64):
  policy, rewards = network(LANGUAGE), REWARDS["binary"]
  ref = table(LANGUAGE, seed=3).logprobs()
  targets = [
    functools.partial(pass_at_k, k=4),
    functools.partial(regularised_reward, ref_logprobs=ref, kl_coef=0.1),
  ]
  plain = bias_variance(rl.RLOO, policy, rewards, group_size=3)
  for target in targets:
    found = bias_variance(rl.RLOO, policy, rewards, group_size=3, target=target)
    np.testing.assert_array_equal(found.target, target_gradient(policy, rewards, target))
    np.testing.assert_array_equal(found.mean, plain.mean)
    assert np.all(found.relative_bias > 1e-3)


def test_pass_at_k_advantages_are_unbiased_for_pass_at_k(x64):
  """A published estimator, measured: Walder and Karkhanis 2025."""
  policy, rewards = network(LANGUAGE), REWARDS["binary"]
  objective = replace(rl.REINFORCE, advantages=functools.partial(rl.pass_at_k, k=3))
  target = functools.partial(pass_at_k, k=3)
  found = bias_variance(objective, policy, rewards, group_size=5, target=target)
  np.testing.assert_allclose(found.relative_bias, 0.0, atol=1e-12)


# -- Statistics ----------------------------------------------------------------------------------


def test_coarser_statistic_that_suffices(x64):
  """Nothing in a sum over tokens of centred rewards depends on the others' lengths."""
  policy, rewards = table(LANGUAGE), REWARDS["three values"]
  for objective in (
    replace(rl.GRPO, advantages=rl.group_centered, loss_weights=rl.token_sum),
    rl.dr_grpo(3),
  ):
    default, coarse, finest = (
      bias_variance(objective, policy, rewards, group_size=3, statistic=s)
      for s in (None, rewards, np.arange(30).reshape(2, 15))
    )
    for found in (coarse, finest):
      np.testing.assert_allclose(found.mean, default.mean, rtol=0, atol=1e-14)
      np.testing.assert_allclose(found.variance, default.variance, rtol=1e-12)


def test_coarser_statistic_where_a_response_weighs_its_own_tokens(x64):
  """The level divides by the response's own length, which the others do not see."""
  objective = replace(rl.GSPO, loss_weights=rl.sequence_sum)
  policy, rewards = network(LANGUAGE), REWARDS["binary"]
  for given in ({}, {"old_logprobs": table(LANGUAGE, seed=4).logprobs()}):
    default, coarse = (
      bias_variance(objective, policy, rewards, group_size=3, statistic=s, **given)
      for s in (None, rewards)
    )
    np.testing.assert_allclose(coarse.mean, default.mean, rtol=0, atol=1e-14)
    np.testing.assert_allclose(coarse.variance, default.variance, rtol=1e-12)


@pytest.mark.parametrize("objective", [rl.GRPO, rl.DAPO], ids=["sequence_mean", "token_mean"])
def test_statistic_that_does_not_suffice(x64, objective):
  rewards = REWARDS["binary"]
  with pytest.raises(ValueError, match="statistic does not determine the loss weights"):
    bias_variance(objective, table(LANGUAGE), rewards, group_size=3, statistic=rewards)


def test_statistic_that_does_not_suffice_for_the_advantages(x64):
  rewards = REWARDS["all distinct"]
  lengths = np.broadcast_to(LANGUAGE.lengths, rewards.shape)
  for size in (1, 2):
    with pytest.raises(ValueError, match="statistic does not determine the advantages"):
      bias_variance(rl.REINFORCE, table(LANGUAGE), rewards, group_size=size, statistic=lengths)


def against_the_first(rewards):
  return rewards - rewards[..., :1]


def against_the_next(rewards):
  return rewards - jnp.roll(rewards, 1, axis=-1)


@pytest.mark.parametrize(("advantages", "size"), [(against_the_first, 2), (against_the_next, 3)])
def test_advantages_that_depend_on_the_place(x64, advantages, size):
  objective = replace(rl.GRPO, advantages=advantages)
  with pytest.raises(ValueError, match="advantages"):
    bias_variance(objective, table(LANGUAGE), REWARDS["binary"], group_size=size)


def unlikely_tokens(log_ratio, advantages, *, mask=None, old_logprobs=None, segment_ids=None):
  """An idea that is not in the table: only tokens of a probability below 1/4 learn."""
  gain = rl.reinforce(log_ratio, advantages, mask=mask, old_logprobs=old_logprobs)
  return jnp.where(jax.lax.stop_gradient(log_ratio + old_logprobs) < np.log(0.25), gain, 0.0)


def test_coefficients_that_depend_on_the_token(x64):
  """On-policy, yet members of a class differ: each of them is asked."""
  objective = replace(rl.GRPO, surrogate=unlikely_tokens)
  assert_literal(objective, table(LANGUAGE), REWARDS["binary"], group_size=3)


# -- Edges ---------------------------------------------------------------------------------------


def test_group_of_one(x64):
  """Its mean is itself: nothing is learnt, and nothing is NaN."""
  policy, rewards = table(LANGUAGE), REWARDS["binary"]
  found = bias_variance(rl.GRPO, policy, rewards, group_size=1, direction=policy.params)
  np.testing.assert_array_equal(found.mean, np.zeros((2, 42)))
  np.testing.assert_array_equal([found.variance, found.directional_variance], 0.0)
  np.testing.assert_array_equal(found.cosine, np.nan)
  np.testing.assert_array_equal(found.scale, 0.0)
  assert_literal(rl.REINFORCE, policy, rewards, group_size=1)


def test_equal_rewards(x64):
  """The target has no gradient."""
  policy = table(LANGUAGE)
  for value in (0.0, 1.0, -0.3):
    rewards = np.full(SHAPE, value)
    found = bias_variance(rl.GRPO, policy, rewards, group_size=4)
    np.testing.assert_array_equal(found.mean, 0.0)
    np.testing.assert_array_equal(found.variance, 0.0)
    np.testing.assert_allclose(found.target, 0.0, atol=1e-15)
    assert np.all(found.bias < 1e-14)
  found = bias_variance(rl.REINFORCE, policy, np.ones(SHAPE), group_size=4)
  np.testing.assert_allclose(found.mean, 0.0, atol=1e-15)
  assert np.all(found.variance > 0.1)


def test_a_class_that_only_one_prompt_has(x64):
  rewards = REWARDS["binary"].copy()
  rewards[0] = 0.0
  rewards[1, :3] = 2.0
  found = assert_literal(rl.GRPO, table(LANGUAGE), rewards, group_size=3)
  np.testing.assert_array_equal(found.mean[0], 0.0)


@pytest.mark.parametrize("regime", ["on", "off"])
def test_responses_that_are_never_drawn(x64, regime):
  """The sampler excludes a token (top-p): its responses have no update, whatever their ratio."""
  policy = table(LANGUAGE)
  shut = policy._replace(params=policy.params.at[:, 0, 2].set(-jnp.inf))
  almost = policy._replace(params=policy.params.at[:, 0, 2].set(-80.0))
  rewards = REWARDS["all distinct"]
  # A clipped constant ratio: what is as good as never drawn counts for nothing.
  measure = functools.partial(bias_variance, rl.CISPO, rewards=rewards, group_size=3)
  if regime == "on":
    found, expected = (measure(policy=x) for x in (shut, almost))
  else:
    found, expected = (measure(policy=policy, old_logprobs=x.logprobs()) for x in (shut, almost))
  np.testing.assert_allclose(found.mean, expected.mean, atol=1e-12)
  np.testing.assert_allclose(found.variance, expected.variance, rtol=1e-9)


@pytest.mark.slow
def test_precision_of_the_parameters(x64):
  """Float32 parameters are scored in float32; the sums are in float64."""
  rewards = REWARDS["binary"]
  fine, coarse = (network(LANGUAGE, dtype=x) for x in (np.float64, np.float32))
  one, other = (bias_variance(rl.GRPO, x, rewards, group_size=4) for x in (fine, coarse))
  np.testing.assert_allclose(other.mean, one.mean, rtol=0, atol=2e-6)
  np.testing.assert_allclose(other.variance, one.variance, rtol=1e-5)


def test_many_samples(x64):
  """Of two kinds: leave-one-out stays exactly unbiased, the variance falls as 1 / G."""
  policy, rewards = table(LANGUAGE), REWARDS["binary"]
  found = [
    bias_variance(rl.RLOO, policy, rewards, group_size=size, statistic=rewards)
    for size in (32, 512)
  ]
  for x in found:
    np.testing.assert_allclose(x.relative_bias, 0.0, atol=1e-12)
  np.testing.assert_allclose(found[0].variance / found[1].variance, 16.0, rtol=0.05)


def test_large_variance_is_not_negative(x64):
  """A policy that is all but sure: nothing is left of the variance but rounding."""
  policy = table(LANGUAGE)
  policy = policy._replace(params=policy.params.at[..., 0].add(60.0))
  found = bias_variance(rl.RLOO, policy, REWARDS["binary"], group_size=4, direction=policy.params)
  assert np.all(found.variance >= 0)
  assert np.all(found.directional_variance >= 0)


def test_multinomial_probabilities(x64):
  """They sum to 1 over the groups, absent classes included, and weigh orderings."""
  classes = classify(LANGUAGE, REWARDS["three values"])
  groups = enumerate_groups(len(classes.members), 3, limit=10**4)
  kinds = kinds_of_groups(rl.GRPO, LANGUAGE, REWARDS["three values"], classes, groups, None)
  class_probs = np.random.default_rng(0).dirichlet(np.ones(len(classes.members)))
  class_probs[[1, 4]] = 0.0
  class_probs /= class_probs.sum()
  found = group_probs(kinds, class_probs)
  orderings = [len(set(itertools.permutations(g))) for g in groups.tolist()]
  np.testing.assert_allclose(found, orderings * class_probs[groups].prod(axis=1), rtol=1e-12)
  np.testing.assert_allclose(found.sum(), 1.0, rtol=1e-12)
  np.testing.assert_array_equal(np.bincount(kinds.group, kinds.copies), 3)


# -- Bad input -----------------------------------------------------------------------------------


def call(objective=rl.GRPO, policy=None, rewards=None, group_size=2, **given):
  policy = table(LANGUAGE) if policy is None else policy
  rewards = REWARDS["binary"] if rewards is None else rewards
  return bias_variance(objective, policy, rewards, group_size=group_size, **given)


def test_bad_shapes(x64):
  logprobs = table(LANGUAGE).logprobs()
  for rewards in (np.zeros(15), np.zeros((15, 2)), np.zeros((3, 15))):
    with pytest.raises(
      ValueError, match=r"rewards must be \[prompts, responses\] = \(2, 15\), got"
    ):
      call(rewards=rewards)
  for name in ("old_logprobs", "sampler_logprobs", "importance_weights"):
    with pytest.raises(ValueError, match=rf"{name} must be .* = \(2, 15, 3\), got \(15, 3\)"):
      call(**{name: logprobs[0]})
  for statistic in (np.zeros(15), np.zeros((15, 2)), np.zeros((3, 15))):
    with pytest.raises(ValueError, match=r"statistic must be .* = \(2, 15\), got"):
      call(statistic=statistic)
  with pytest.raises(ValueError, match=r"advantages of rewards \(1, 2\) and mask \(1, 2, 3\)"):
    call(advantages=lambda rewards, mask: rewards[0])
  with pytest.raises(ValueError, match="direction must be finite and not 0"):
    call(direction=jnp.zeros((2, 7, 3)))


def test_bad_numbers(x64):
  rewards = REWARDS["binary"].copy()
  for bad in (np.nan, np.inf):
    rewards[0, 3] = bad
    with pytest.raises(ValueError, match="rewards must be finite"):
      call(rewards=rewards)
    with pytest.raises(ValueError, match="statistic must be finite"):
      call(statistic=rewards)
  with pytest.raises(ValueError, match="advantages of a group are not finite"):
    call(advantages=lambda rewards, mask: rewards / rewards.sum())
  policy = table(LANGUAGE)
  with pytest.raises(ValueError, match="15 responses must sum to 1"):
    call(policy=policy._replace(score=lambda *x: 0.99 * policy.score(*x)))
  for name in ("old_logprobs", "sampler_logprobs"):
    with pytest.raises(ValueError, match="15 responses must sum to 1"):
      call(**{name: 0.99 * policy.logprobs()})
  for bad in (np.nan, np.inf):
    weights = np.ones((*SHAPE, 3))
    weights[1, 4] = bad
    with pytest.raises(ValueError, match="update of response 4 is not finite"):
      call(rl.RLOO, importance_weights=weights)


def test_old_policy_that_excludes_what_is_drawn(x64):
  policy = table(LANGUAGE)
  shut = policy._replace(params=policy.params.at[:, 0, 2].set(-jnp.inf)).logprobs()
  objective = replace(rl.RLOO, surrogate=rl.importance_weighted)
  with pytest.raises(ValueError, match="not finite, and the sampler draws it.*old_logprobs.*-inf"):
    call(objective, old_logprobs=shut, sampler_logprobs=policy.logprobs())


def test_too_many_groups(x64):
  # 30 different rewards: (37 choose 8).
  with pytest.raises(ValueError, match="group_size 8 over 30 classes .* makes 38,608,020 groups"):
    call(rewards=REWARDS["all distinct"], group_size=8)
  with pytest.raises(ValueError, match=r"makes 21 groups, more than the limit of 20"):
    call(
      rewards=np.arange(30).reshape(2, 15) // 5.0,
      group_size=2,
      max_groups=20,
      statistic=np.arange(30).reshape(2, 15) // 5,
    )
  with pytest.raises(ValueError, match=r"makes about 10\^\d+ groups.*sampled_bias_variance"):
    call(rewards=REWARDS["all distinct"], group_size=64)
  with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
    call(group_size=0)


def test_too_many_different_updates(x64, monkeypatch):
  """What is held in memory: a vector of parameters per class, or per advantage off-policy."""
  monkeypatch.setattr(moments, "_NUMBERS", 600)
  with pytest.raises(ValueError, match=r"15 different terms of 42 parameters .* limit of 600"):
    call(rl.REINFORCE, rewards=REWARDS["all distinct"], group_size=1)


def test_needs_64_bits():
  with pytest.raises(ValueError, match="64 bits: call inside"):
    bias_variance(rl.GRPO, table(LANGUAGE), REWARDS["binary"], group_size=2)


@pytest.mark.parametrize("name", ["OPO", "PPO", "REMAX", "REINFORCE_PP"])
def test_advantages_that_need_more_than_rewards(x64, name):
  with pytest.raises(TypeError, match="need more than the rewards .*: pass `advantages=`"):
    call(getattr(rl, name))


def test_terms_go_together(x64):
  ref = table(LANGUAGE, seed=3).logprobs()
  for given in ({"kl_coef": 0.1}, {"ref_logprobs": ref}, {"ref_logprobs": ref, "kl_coef": 0.1}):
    with pytest.raises(ValueError, match="ref_logprobs or kl_coef is given but kl is None"):
      call(**given)
  with pytest.raises(ValueError, match="kl and ref_logprobs go together"):
    call(kl=rl.kl_k2, kl_coef=0.1)
  with pytest.raises(TypeError, match="selected"):
    call(rl.KL_COV)


@pytest.mark.slow
def test_one_response_of_one_token(x64):
  """The smallest language there is, and classes of one response."""
  language = enumerate_language(2, 1)
  policy = tabular_policy(language, np.zeros((1, 1, 2)))
  # Two samples of a fair coin differ half of the time: +-1/2 each; score (-+1/2, +-1/2).
  found = bias_variance(rl.RLOO, policy, [[0.0, 1.0]], group_size=2)
  np.testing.assert_allclose(found.mean, [[-0.25, 0.25]], atol=1e-15)
  np.testing.assert_allclose(found.target, [[-0.25, 0.25]], atol=1e-15)
  # g = (-1/2, 1/2) with probability 1/2, else 0: E|g|^2 - |E g|^2 = 1/4 - 1/8.
  np.testing.assert_allclose(found.variance, [0.125], rtol=1e-13)
