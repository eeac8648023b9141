"""The preference presets against recorded numbers, as in `test_presets.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxrl_lm as rl
from tests.parity import exceptions, results
from tests.parity.lookups import assert_close, recorded
from tests.parity.preference_losses import gradients, halves
from tests.parity.records import Record

RECORDS = results.all_records()

PAIRS = {
  ("trl", "dpo/sigmoid"): rl.trl_dpo,
  ("trl", "dpo/ipo"): rl.trl_ipo,
  ("tunix", "dpo"): rl.tunix_dpo,
  ("tunix", "orpo"): rl.tunix_orpo,
}
SCORES = {
  ("trl", "cpo/sigmoid"): rl.trl_cpo,
  ("trl", "cpo/simpo"): rl.trl_simpo,
  ("trl", "orpo"): rl.trl_orpo,
  ("openrlhf", "dpo/sigmoid"): rl.openrlhf_dpo,
  ("openrlhf", "dpo/ipo"): rl.openrlhf_dpo,
  ("liger", "dpo/sigmoid"): rl.liger_dpo,
  ("liger", "cpo"): rl.liger_cpo,
  ("liger", "simpo"): rl.liger_simpo,
  ("liger", "orpo"): rl.liger_orpo,
}
NO_ARGUMENT = ("ld_alpha", "use_weighting", "f_divergence_type")


def preference_records(table: Mapping[Any, Any]) -> list[str]:
  return [
    key for key, r in RECORDS.items()
    if (r.peer, r.objective) in table and key not in exceptions.BY_RECORD
    and not any(name in r.settings for name in NO_ARGUMENT) and not r.settings.get("alpha")
    and not (r.objective == "simpo" and r.settings.get("label_smoothing"))
  ]  # fmt: skip


def preference_recipe(preset: Callable[..., Any], record: Record) -> rl.PreferenceRecipe:
  parameters = inspect.signature(preset).parameters
  return preset(**{k: v for k, v in record.settings.items() if k in parameters})


@pytest.mark.parametrize("record_id", preference_records(PAIRS))
def test_a_loss_of_token_logprobs_is_reproduced(record_id, x64):
  record = RECORDS[record_id]
  recipe = preference_recipe(PAIRS[record.peer, record.objective], record)
  x, mask = record.inputs, jnp.asarray(record.inputs["mask"])
  against = [jnp.asarray(x["ref_logps"])] if recipe.nll_coef == 0 else []

  def loss(logps: jax.Array) -> jax.Array:
    pair = halves(record, recipe.score(logps, *against, mask))
    likelihood = jnp.mean(halves(record, rl.mean_logprob(logps, mask))[0])
    return recipe.loss_coef * jnp.mean(recipe.loss(*pair)) - recipe.nll_coef * likelihood

  assert_close(record, gradients(loss, logps=x["logps"]))


@pytest.mark.parametrize("record_id", preference_records(SCORES))
def test_a_loss_of_scores_is_reproduced(record_id, x64):
  record = RECORDS[record_id]
  recipe = preference_recipe(SCORES[record.peer, record.objective], record)
  x = record.inputs
  chosen, rejected = (
    x[f"{side}_logps"] - x.get(f"ref_{side}_logps", 0.0) for side in ("chosen", "rejected")
  )
  losses = recipe.loss_coef * recipe.loss(jnp.asarray(chosen), jnp.asarray(rejected))
  if record.function == "ORPOTrainer.odds_ratio_loss":  # which the trainer subtracts
    losses = -losses
  if "losses" in record.outputs:
    assert_close(record, {"losses": losses}, "losses")
  else:
    assert_close(record, {"loss": jnp.mean(losses)}, "loss")


@pytest.mark.parametrize("record", list(recorded("KTOTrainer._compute_loss")), ids=lambda r: r.id)
def test_kto_of_trl_is_reproduced(record, x64):
  recipe, x = preference_recipe(rl.trl_kto, record), record.inputs
  baseline: Any = 0.0
  if record.settings["loss_type"] == "kto":
    baseline = rl.kto_baseline(jnp.asarray(x["KL_logps"] - x["ref_KL_logps"]))

  def loss(logps: jax.Array) -> jax.Array:
    log_ratio = recipe.score(logps, x["ref_logps"], x["mask"])[: record.rows]
    return jnp.mean(recipe.loss(log_ratio, x["label"] > 0, baseline=baseline))

  assert_close(record, gradients(loss, logps=x["logps"]))


def test_kto_of_liger_is_reproduced(x64):
  for record in recorded("LigerFusedLinearKTOFunction.preference_loss_fn"):
    recipe, x = preference_recipe(rl.liger_kto, record), record.inputs
    baseline = (record.settings["kl"] or [0.0])[0]
    log_ratio = jnp.asarray(x["logps"] - x["ref_logps"])
    losses = recipe.loss(log_ratio, x["label"] > 0, baseline=baseline)
    assert_close(record, {"loss": jnp.mean(losses)}, "loss")
