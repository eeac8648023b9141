"""Memory of a run on each device, without the device, its weights, or an array of either.

Parameters, moments, reference and cache are counted from shapes and shardings: exact. The three
programs of a step are compiled for as many devices of this CPU as the machine has, from shapes
alone; XLA then says what each device needs for what is temporary. That is an estimate of another
backend's number: XLA for CPU computes bfloat16 products in float32, and fuses and orders
operations its own way.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.table import Table

from configs.real_runs import Config
from experiments.real_run import setup
from jaxrl_lm.lm import micro_batches, policy, sampling, train_state, updates
from jaxrl_lm.lm.gathered import whole_shardings
from jaxrl_lm.lm.micro_batches import Batch
from jaxrl_lm.lm.placement import Placement
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.train_state import TrainState

ALLOWED = 0.9  # of a device's memory; the rest is for the runtime and for what is fragmented


class Plan(NamedTuple):
  """A run in shapes, each with its place on the mesh."""

  model: policy.Model
  mesh: Mesh | None
  train: TrainConfig
  state: TrainState
  rows: Batch  # all of a step
  part: Batch  # of one optimiser step


class Need(NamedTuple):
  """Bytes on each device."""

  held: dict[str, int]
  """What stays through a step, by name."""
  programs: dict[str, int]
  """What each program of a step needs besides."""
  by_formula: dict[str, int]
  """What is contained in them, or would be."""

  @property
  def peak(self) -> int:
    """Of the program that needs most."""
    return sum(self.held.values()) + max(self.programs.values())


def plan(config: Config) -> Plan:
  """The run in shapes: nothing is allocated."""
  mesh = setup.make_mesh(config.machine)
  train = setup.train_config(config, mesh)
  model, params = policy.abstract_params(setup.policy_config(config))
  state = jax.eval_shape(partial(train_state.init_state, train.update), params)
  if mesh is not None:
    state = setup.placed(state, train_state.state_shardings(mesh, model, train.update))
  rows = train.rollout.rows
  whole = _batch(config, rows, mesh)
  return Plan(model, mesh, train, state, whole, _batch(config, rows // config.minibatches, mesh))


def need(config: Config) -> Need:
  """Bytes on each device; compiles the programs of a step."""
  made = plan(config)
  programs = {}
  for name, lowered in lower(made).items():
    used = lowered.compile().memory_analysis()
    programs[name] = used.temp_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes
  if made.mesh is not None:
    programs["sampling"] += _bytes(sampled_params(made))  # a second copy, while it runs
  return Need(held(made), programs, formulas(config, made))


def sampled_params(made: Plan) -> Any:
  """The parameters as the sampler has them: whole over fsdp."""
  if made.mesh is None:
    return made.state.params
  return setup.placed(made.state.params, whole_shardings(made.mesh, made.model.config))


def lower(made: Plan) -> dict[str, Any]:
  """The programs of a step, traced and partitioned over the mesh, by name."""
  model, mesh, train, state, rows, part = made
  settings, rollout = train.update, train.rollout
  responses = (rows.prompts, rows.prompt_mask, rows.tokens, rows.mask)

  @jax.jit
  def drawn(params: Any, prompts: Any, mask: Any, step: Any) -> Any:
    return sampling.sample(
      model,
      params,
      prompts,
      mask,
      seed=train.seed,
      step=step,
      max_new_tokens=rollout.max_new_tokens,
      stop_tokens=(0,),
    )

  @jax.jit
  def scored(params: Any, responses: Any) -> Any:
    def score(part: Any) -> Any:
      return settings.score(Placement(mesh).scored(model), params, *part).logprobs

    return micro_batches.over_parts(score, responses, train.minibatches * settings.micro_batches)

  update: Any = updates.compile_update(model, settings, mesh)
  if mesh is None:
    update = jax.jit(update)  # on one device it is a call that cannot be lowered
  step = jax.ShapeDtypeStruct((), jnp.int32)
  return {
    "sampling": drawn.lower(sampled_params(made), rows.prompts, rows.prompt_mask, step),
    "scoring": scored.lower(state.params, responses),
    "update": update.lower(state, part),
  }


def held(made: Plan) -> dict[str, int]:
  """Bytes on a device of what stays: exact."""
  params = _bytes(made.state.params)
  reference = params if made.train.needs_reference else 0
  return {"parameters": params, "moments": _bytes(made.state.opt_state), "reference": reference}


def formulas(config: Config, made: Plan) -> dict[str, int]:
  """Bytes on a device of the large arrays in the programs, by hand."""
  shape, machine = made.model.config, config.machine
  spread = machine.data * machine.fsdp
  rows = made.train.rollout.rows // spread
  micro = made.part.tokens.shape[0] // config.micro_batches // spread
  length = config.prompt_length + config.max_new_tokens
  number = jnp.dtype(shape.compute_dtype).itemsize
  slots = rows * (length - 1) * shape.num_kv_heads * shape.head_dim
  kept = shape.num_layers * micro * length * shape.hidden_size
  found = {
    "cache of the sampler": 2 * shape.num_layers * slots * number,
    "activations kept, one per layer": kept * number,
    "attention scores of one layer": 4 * micro * shape.num_heads * length**2,
    "logits, if they were in memory": 4 * micro * config.max_new_tokens * shape.vocab_size,
  }
  if machine.fsdp > 1:
    whole = sum(math.prod(x.shape) for x in jax.tree.leaves(made.state.params))
    found["parameters gathered over fsdp"] = 4 * whole // machine.tensor
  return found


def table(name: str, config: Config, found: Need) -> Table:
  """Gigabytes on a device, and the verdict."""
  machine = config.machine
  rows = Table(title=f"{name}: {machine.count} x {machine.device}")
  rows.add_column("on each device")
  rows.add_column("GB", justify="right")
  for part in (
    found.held,
    found.by_formula,
    {f"{k}, program": v for k, v in found.programs.items()},
  ):
    for label, size in part.items():
      rows.add_row(label, f"{size / 1e9:.2f}")
    rows.add_section()
  rows.add_row("peak: what is held + the largest program", f"{found.peak / 1e9:.2f}")
  rows.add_row("memory of the device", f"{machine.memory / 1e9:.0f}")
  rows.add_row("verdict", "fits" if fits(config, found) else "DOES NOT FIT")
  return rows


def fits(config: Config, found: Need) -> bool:
  """Whether the peak leaves a tenth of the device's memory free."""
  return found.peak <= ALLOWED * config.machine.memory


def _batch(config: Config, rows: int, mesh: Mesh | None) -> Batch:
  sharding = None if mesh is None else train_state.batch_sharding(mesh)
  prompt, response = (rows, config.prompt_length), (rows, config.max_new_tokens)

  def array(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  return Batch(
    prompts=array(prompt, jnp.int32),
    prompt_mask=array(prompt, jnp.bool_),
    tokens=array(response, jnp.int32),
    mask=array(response, jnp.bool_),
    advantages=array((rows, 1)),
    loss_weights=array(response),
    old_logprobs=array(response),
    sampler_logprobs=array(response),
    ref_logprobs=array(response) if config.kl_coef else None,
  )


def _bytes(tree: Any) -> int:
  """On one device."""

  def size(leaf: Any) -> int:
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize

  return sum(size(leaf) for leaf in jax.tree.leaves(tree))
