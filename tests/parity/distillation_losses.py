"""Distillation and supervised losses of three libraries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_lm as rl
from tests.parity.policy_losses import Arrays
from tests.parity.records import Record

IGNORED = -100


def divergence(beta: float) -> Callable[..., jax.Array]:
  """The end points are other functions than the middle."""
  ends = {0.0: rl.forward_kl, 1.0: rl.exact_kl}
  return ends[beta] if beta in ends else partial(rl.jensen_shannon, beta=beta)


def both(record: Record) -> tuple[jax.Array, jax.Array]:
  return tuple(jnp.asarray(record.inputs[f"{x}_logits"]) for x in ("student", "teacher"))


def scalar_loss(loss: Callable[[Any], jax.Array], x: jax.Array, name: str) -> Arrays:
  value, gradient = jax.jit(jax.value_and_grad(loss))(x)
  return {"loss": value, f"grad_{name}": gradient}


def trl_gkd(record: Record) -> Arrays:
  """batchmean divides by the labelled tokens, or by the rows where there are no labels."""
  s, labels = record.settings, record.inputs.get("labels")
  student, teacher = both(record)
  shape = student.shape[:-1]
  mask = np.ones(shape, bool) if labels is None else labels != IGNORED
  divisor = {
    "batchmean": shape[0] if labels is None else max(mask.sum(), 1),
    "mean": mask.sum() * student.shape[-1],
    "sum": 1,
  }[s["reduction"]]
  divisor = s.get("num_items_in_batch") or divisor

  def loss(z: jax.Array) -> jax.Array:
    each = divergence(s["beta"])(z, teacher, mask=jnp.asarray(mask), temperature=s["temperature"])
    return jnp.sum(each) / divisor

  return scalar_loss(loss, student, "student_logits")


def trl_self_distillation(record: Record) -> Arrays:
  """Of all tokens, or of the student's top k with or without the rest."""
  s = record.settings
  student, teacher = both(record)
  k = s.get("distillation_topk")
  ids = jnp.argsort(-student, axis=-1)[..., :k]
  kept = jnp.take_along_axis(jax.nn.log_softmax(teacher), ids, axis=-1)

  def per_token(z: jax.Array) -> jax.Array:
    pair: Any = (z, teacher)
    if k is not None:
      pair = rl.top_k_with_tail(z, kept, ids)
      pair = pair if s["distillation_add_tail"] else [x[..., :-1] for x in pair]
    return divergence(s["distillation_alpha"])(*pair)

  def pulled(z: jax.Array) -> Any:
    value, pull = jax.vjp(per_token, z)
    return value, pull(jnp.ones_like(value))[0]

  value, gradient = jax.jit(pulled)(student)
  return {"per_token": value, "grad_student_logits": gradient}


def liger_jsd(record: Record) -> Arrays:
  """A sum over the rows whose target is not ignored."""
  target = record.inputs["target"]
  student, teacher = both(record)
  mask = np.ones(len(student), bool) if target is None else target != IGNORED
  jsd = partial(divergence(record.settings["beta"]), mask=jnp.asarray(mask))
  return scalar_loss(lambda z: jnp.sum(jsd(z, teacher)), student, "student_logits")


def openrlhf_sft(record: Record) -> Arrays:
  mask = jnp.asarray(record.inputs["mask"])
  weights = (rl.token_mean if record.settings["token_level_loss"] else rl.sequence_mean)(mask)
  logps = jnp.asarray(record.inputs["logps"])
  return scalar_loss(lambda lp: jnp.sum(weights * rl.sft_loss(lp, mask)), logps, "logps")
