"""What other libraries compute under their own names: the presets against recorded numbers.

A preset gets the settings of a record by the library's own keyword names. Records with settings
that are no argument of a preset (accumulation, micro-batches, corrections of the sampler) are in
`tests/parity`. NeMo-RL has no records: see `test_nemo_rl_presets.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from experiments import which_grpo
from jaxrl_lm import openrlhf_presets, trl_presets, verl_presets
from jaxrl_lm.objectives import _parts
from tests.parity import estimators as est
from tests.parity import exceptions, records, results
from tests.parity.lookups import assert_close, recorded
from tests.parity.policy_losses import advantages, objective
from tests.parity.records import Record
from tests.parity.trl_losses import trl_factor

RECORDS = results.all_records()

# The preset of a recorded function: by peer and objective.
POLICY = {
  **{
    ("verl", name): getattr(rl, f"verl_{name}")
    for name in (
      "vanilla", "gspo", "sapo", "cispo", "geo_mean", "dppo_tv", "dppo_kl", "gpg", "dro",
      "clip_cov", "kl_cov",
    )
  },
  ("verl", "vanilla+kl+entropy"): rl.verl_vanilla,
  **{
    ("trl", f"grpo/{name}"): getattr(rl, f"trl_{name}")
    for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")
  },
  ("trl", "gmpo"): rl.trl_gmpo,
  ("trl", "rloo"): rl.trl_rloo,
  ("openrlhf", "ppo"): rl.openrlhf_ppo,
  ("openrlhf", "gspo"): rl.openrlhf_gspo,
  ("tunix", "grpo"): rl.tunix_grpo,
  ("tunix", "gspo-token"): rl.tunix_gspo_token,
  ("tunix", "ppo"): rl.tunix_ppo,
}  # fmt: skip

# What a name that a library gives stands for.
NAMED = {
  "token-mean": rl.token_mean,
  "token-sum": rl.token_sum,
  "seq-mean-token-sum": rl.sequence_sum,
  "seq-mean-token-mean": rl.sequence_mean,
  "sequence-mean-token-mean": rl.sequence_mean,
  "sequence-mean-token-sum-norm": rl.sequence_sum,
  "token": rl.per_token,
  "sequence": rl.per_sequence_geometric,
  "kl": rl.kl_k1,
  "k1": rl.kl_k1,
  "mse_kl": rl.kl_k2,
  "k2": rl.kl_k2,
  "low_var_kl": rl.kl_k3,
}
VERL_KL = {"low_var_kl": verl_presets.LOW_VAR_KL, "k1": rl.kl_k1, "k2": rl.kl_k2,
           "k3+": rl.with_reverse_kl_gradient(verl_presets.LOW_VAR_KL)}  # fmt: skip
PADDED = ("seq-mean-token-sum-norm", "sequence-mean-token-scale")


def preset_of(record: Record) -> Callable[..., rl.Recipe] | None:
  return POLICY.get((record.peer, record.objective))


def takes(record: Record) -> bool:
  """Whether the settings of the record are arguments of a preset."""
  s = record.settings
  if record.id in exceptions.BY_RECORD or "grad_logps" not in record.outputs:
    return False
  if record.peer == "verl":
    return not s.get("global_batch_info")
  if record.peer == "trl":
    parts = s.get("gradient_accumulation_steps", 1) > 1 or s.get("steps_per_generation", 1) > 1
    total = s.get("loss_type") in ("dapo", "cispo", "vespo") and s.get("num_items_in_batch")
    # The bonus is a mean over its own tokens, which are those of the loss in one case.
    entropy = s.get("entropy_coef") and (s["loss_type"] != "dapo" or "top_entropy_quantile" in s)
    product = s.get("loss_type") == "vespo" and "is_weights" in record.inputs
    return not parts and not entropy and not product and total in (False, None, record.mask.sum())
  if record.peer == "openrlhf":
    return not any(name in s for name in ("dp_size", "batch_num_tokens", "is_correction_level"))
  return True


POLICY_RECORDS = [key for key, r in RECORDS.items() if r.rows and preset_of(r) and takes(r)]


def recipe_of(record: Record) -> rl.Recipe:
  s = dict(record.settings) | record.settings.get("policy_loss", {})
  if record.peer == "trl":
    s |= {"epsilon": s.get("epsilon_low")}
    s.setdefault("use_bias_correction_kl", False)  # recorded as such; 1.16.0's default is True
  s.setdefault("beta", 0.0)
  preset = preset_of(record)
  if s.get("loss_agg_mode") == "sequence-mean-token-scale":
    preset, s = rl.tunix_dr_grpo, s | {"norm": record.width}
  settings = {name: s[name] for name in inspect.signature(preset).parameters if name in s}
  if s.get("loss_agg_mode") == "seq-mean-token-sum-norm" and "loss_agg_mode" in settings:
    settings["loss_agg_mode"] = partial(rl.constant_length, length=record.width)
  if record.objective == "rloo":
    settings.pop("beta", None)
  settings = {k: NAMED.get(v, v) if isinstance(v, str) else v for k, v in settings.items()}
  recipe = preset(**settings)
  if record.objective == "vanilla+kl+entropy":
    terms = {name: s[name] for name in ("kl_loss_coef", "entropy_coeff")}
    recipe = rl.verl_with_terms(recipe, kl_loss_type=VERL_KL[s["kl_loss_type"]], **terms)
  return recipe


# Functions with equal parts are one static argument, so that they share a compilation.
LEVELS: dict[Any, Any] = {}
ESTIMATORS: dict[Any, Any] = {}
weights_of = jax.jit(lambda objective, mask: objective.loss_weights(mask), static_argnums=0)


def outputs(record: Record, recipe: rl.Recipe) -> Mapping[str, Any]:
  """Loss and gradients of the recipe on the record; constants are traced."""
  parts, x = recipe.objective, record.inputs
  constants = dict(getattr(parts.surrogate, "keywords", {}))
  slots: dict[str, Any] = {"level": LEVELS.setdefault(_parts(parts.level), parts.level)}
  if recipe.kl is not None:
    bound = lambda old, kl=recipe.kl: partial(kl, old_logprobs=old)
    slots |= {"kl": ESTIMATORS.setdefault(_parts(recipe.kl), bound), "kl_coef": recipe.kl_coef}
  if recipe.selection is not None:
    slots["selected"] = selected(record, recipe.selection)
  factor = trl_factor(record) if "loss_type" in record.settings else x.get("is_weights")
  if record.objective == "geo_mean" and factor is not None:
    factor = jnp.exp(rl.per_sequence_geometric(jnp.log(factor), x["mask"]))
  slots |= {"importance_weights": factor, "entropy_coef": recipe.entropy_coef}
  surrogate = getattr(parts.surrogate, "func", parts.surrogate)
  return objective(record, surrogate, weights_of(parts, record.mask), constants=constants, **slots)


def selected(record: Record, selection: Callable[..., jax.Array]) -> jax.Array:
  x = record.inputs
  arrays = {"logprobs": x["logps"], "advantages": advantages(record), "mask": x["mask"]}
  if "key" in inspect.signature(selection).parameters:
    log_ratio = rl.token_log_ratio(x["logps"], x["old_logps"], x["mask"])
    arrays |= {"key": jax.random.key(0), "log_ratio": log_ratio}
  return selection(**arrays)


@pytest.mark.parametrize("record_id", POLICY_RECORDS)
def test_a_policy_loss_is_reproduced(record_id, x64):
  record = RECORDS[record_id]
  assert_close(record, outputs(record, recipe_of(record)))


def test_every_preset_has_records():
  tested = {preset_of(RECORDS[key]) for key in POLICY_RECORDS} | {rl.tunix_dr_grpo}
  free = {rl.tunix_dapo} | {f for n, f in which_grpo.presets().items() if n.startswith("nemo_rl")}
  assert set(which_grpo.presets().values()) == tested | free
  assert len(POLICY_RECORDS) > 300


def test_recipe_loss_is_the_objective_with_its_terms(x64):
  """Including the KL that looks at the old policy and at segments."""
  sequence = rl.per_sequence_geometric
  found = [
    r for r in (RECORDS[key] for key in POLICY_RECORDS)
    if r.settings.get("use_bias_correction_kl") and r.objective in ("grpo/grpo", "grpo/dapo")
  ]  # fmt: skip
  assert sequence in {recipe_of(r).objective.level for r in found}
  for record in found:
    recipe, x = recipe_of(record), record.inputs
    weights = records.pad(weights_of(recipe.objective, record.mask), 0.0)
    arrays = {"loss_weights": weights, "ref_logprobs": x["ref_logps"]}
    loss, _ = rl.recipe_loss(
      recipe, x["logps"], x["old_logps"], advantages(record), x["mask"], **arrays
    )
    assert_close(record, {"loss": loss}, "loss")


# Advantages


@pytest.mark.parametrize(
  ("function", "settings", "estimator"),
  [
    ("compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": True}, "GRPO_ADVANTAGES"),
    ("compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}, "CENTERED_ADVANTAGES"),
    ("compute_rloo_outcome_advantage", {}, "RLOO_ADVANTAGES"),
  ],
)
def test_advantages_of_verl(function, settings, estimator, x64):
  found = list(recorded(f"core_algos.{function}", **settings))
  assert found
  for record in found:
    ours = est.verl_outcome(record, getattr(verl_presets, estimator))
    # verl's scale of a singleton is float32
    assert records.error(record, "advantages", ours["advantages"]) <= 2e-7


def test_advantages_of_verls_gpg(x64):
  """Its scale couples all groups, so that no row may be added."""
  found = list(recorded("core_algos.compute_gpg_outcome_advantage"))
  assert found
  for record in found:
    rewards = np.nansum(record.inputs["token_level_rewards"], axis=-1)[: record.rows]
    groups = rl.to_groups(rewards, record.inputs["index"], num_groups=6, group_size=8)
    ours = verl_presets.GPG_ADVANTAGES(groups.values, where=groups.where)
    ours = rl.from_groups(ours, groups.slots)[:, None] * record.mask
    assert records.error(record, "advantages", ours[:, : record.width]) <= 2e-7  # float32 scale


@pytest.mark.parametrize(
  ("scale_rewards", "estimator"),
  [("group", trl_presets.SCALED_BY_GROUP), ("batch", trl_presets.SCALED_BY_BATCH)],
)
def test_advantages_of_trl(scale_rewards, estimator, x64):
  settings = {"scale_rewards": scale_rewards, "multi_objective_aggregation": "sum_then_normalize"}
  found = list(recorded("[advantage block]", **settings))
  assert found
  for record in found:
    ours = est.in_groups(estimator, *est.trl_rewards(record))
    assert records.error(record, "advantages", ours) <= 1e-9


def test_advantages_of_openrlhf_and_tunix(x64):
  found = [r for r in recorded("returns", estimator="group_norm") if "kl" not in r.inputs]
  assert found
  for record in found:
    rewards = record.inputs["rewards"]
    everyone = np.ones(rewards.shape, bool)
    size = record.settings["n_samples_per_prompt"]
    ours = est.in_groups(openrlhf_presets.GROUP_NORM, rewards, everyone, size)
    theirs = np.asarray(record.outputs["advantages"], float)[:, 0]
    assert record.settings["gamma"] == 1.0  # so that the first token has the whole return
    np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-9)
  recipe = rl.tunix_grpo()
  found = list(recorded("rl.algo_core.compute_advantages"))
  assert found
  for record in found:
    ours = est.tunix_group(record, recipe.objective.advantages)
    assert_close(record, ours, "advantages")


def test_the_correction_of_trl(x64):
  found = list(recorded("[vLLM IS block]", mode="sequence_mask", clip_min=None, clip_max=3.0))
  assert found
  for record in found:
    x = record.inputs
    log_weights = rl.token_log_ratio(x["old_logps"], x["rollout_logps"], x["mask"])
    weights = rl.trl_dapo().correction(log_weights, x["mask"])
    one_per_row = np.max(np.asarray(weights), axis=-1, keepdims=True)
    assert records.error(record, "importance_sampling_ratio", one_per_row) <= 1e-9


# Defaults and quirks, with their arithmetic


def test_the_default_cap_of_trls_cispo_is_a_weight_of_a_fifth():
  log_ratio, old = jnp.log(jnp.array([0.1, 1.0, 3.0])), jnp.array([-2.0, -1.0, -3.0])
  gain = lambda x: trl.surrogate(x, jnp.array([2.0, 2.0, -1.0]), old_logprobs=old)
  trl = rl.trl_cispo().objective
  weights = np.array([0.1, 0.2, 0.2])
  np.testing.assert_allclose(
    gain(log_ratio), weights * [2, 2, -1] * np.asarray(log_ratio + old), 1e-5
  )
  gradient = jax.grad(lambda x: gain(x).sum())(log_ratio)
  np.testing.assert_allclose(gradient, weights * [2, 2, -1], 1e-5)


def test_tunix_dapo_is_its_grpo_with_three_other_values():
  same = rl.tunix_grpo(epsilon_high=0.28, beta=0.0, loss_agg_mode=rl.token_mean)
  assert rl.tunix_dapo().objective == same.objective
  assert rl.tunix_dapo().kl is None


def test_constants_may_be_traced():
  log_ratio, advantage = jnp.log(jnp.array([1.5, 1.1, 0.5])), jnp.array([1.0, 1.0, -1.0])
  mask = jnp.ones(3, bool)

  def loss(width: Any, coefficient: Any) -> jax.Array:
    recipe = rl.trl_dapo(epsilon=width, beta=coefficient)
    weights = recipe.objective.loss_weights(mask)
    return rl.recipe_loss(recipe, log_ratio, jnp.zeros(3), advantage, mask, loss_weights=weights,
                          ref_logprobs=log_ratio - 1.0)[0]  # fmt: skip

  found = jax.vmap(loss)(jnp.array([0.2, 0.4]), jnp.array([0.0, 0.5]))
  kl = (1.5 + 1.1 + 0.5) * np.exp(-1.0)  # the ratio times k3 at a difference of 1
  expected = [-(1.2 + 1.1 - 0.8) / 3, (-(1.4 + 1.1 - 0.6) + 0.5 * kl) / 3]
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_page_is_current():
  found = which_grpo.main()
  assert which_grpo.PATH.read_text() == which_grpo.markdown(found), "run `make tables`"
