"""An update on any mesh is the update on one device, with its state in shards."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxrl_lm as rl
from jaxrl_lm import lm
from jaxrl_lm.vocabulary_sharding import VocabularySharding
from tests import update_batches
from tests.update_batches import assert_trees_close, jit

NAMES = ("data", "fsdp", "tensor")
AUTO = (AxisType.Auto,) * 3
# SGD with momentum: a step of Adam is the sign of a gradient wherever that is rounding only.
SGD = optax.sgd(0.1, momentum=0.9)


def make_mesh(*sizes: int) -> jax.sharding.Mesh:
  devices = jax.devices()[: int(np.prod(sizes))]
  return jax.make_mesh(sizes, NAMES, axis_types=AUTO, devices=devices)


def config_of(optimizer: Any) -> lm.UpdateConfig:
  """A policy, a critic, and a choice of tokens that couples all rows."""
  critic, _ = update_batches.network(update_batches.WITH_VALUES, 1)
  return lm.UpdateConfig(
    rl.CLIP_COV,
    optimizer,
    micro_batches=2,
    kl=rl.kl_k2,
    kl_coef=0.1,
    entropy_coef=0.01,
    selection=partial(rl.clip_cov_selection, fraction=0.2, cov_low=0.0),
    critic=lm.CriticConfig(critic, optimizer),
  )


POLICY_ONLY = lm.UpdateConfig(rl.DAPO, SGD, micro_batches=2, entropy_coef=0.01)


@pytest.fixture(scope="module")
def start() -> Any:
  model, params = update_batches.network()
  _, critic_params = update_batches.network(update_batches.WITH_VALUES, 1)
  state = lm.init_state(config_of(SGD), params, critic_params)
  batch = update_batches.near_policy(update_batches.ragged(), model, params, spread=0.4)
  return model, state, jax.tree.map(np.asarray, batch)


def two_updates(step: Any, state: Any, batch: Any) -> Any:
  """On two batches: state and metrics of the first go into the second as they are."""
  other = jax.tree.map(lambda x: x[::-1].copy(), batch)
  state, first = step(state, batch, jax.random.key(0))
  state, second = step(state, other, jax.random.key(1))
  return state, first, second


def alone(model: Any, config: lm.UpdateConfig, state: Any, batch: Any) -> Any:
  return jax.device_get(two_updates(jit(partial(lm.update, model, config)), state, batch))


def assert_same_on(
  mesh: Any, want: Any, model: Any, config: lm.UpdateConfig, state: Any, batch: Any
) -> None:
  shardings = lm.state_shardings(mesh, model, config)
  step = lm.compile_update(model, config, mesh)
  found = two_updates(step, jax.device_put(state, shardings), batch)
  # float32: sums over rows and over halves of a matrix product in another order.
  assert_trees_close(jax.device_get(found), want, rtol=5e-6, atol=1e-6)
  same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), found[0], shardings)
  assert jax.tree.all(same)
  assert step._cache_size() == 1


def test_eight_devices_give_the_same_and_compile_once(start: Any) -> None:
  model, state, batch = start
  case = (model, POLICY_ONLY, state._replace(critic=None), batch)
  assert_same_on(make_mesh(2, 2, 2), alone(*case), *case)


@pytest.fixture(scope="module")
def everything_alone(start: Any) -> Any:
  model, state, batch = start
  return alone(model, config_of(SGD), state, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
  "sizes", [(1, 1, 1), (2, 1, 1), (1, 2, 2), (4, 1, 1), (2, 2, 2), (1, 4, 2)]
)
def test_any_mesh_gives_the_same(start: Any, everything_alone: Any, sizes: Any) -> None:
  """With a critic, and a selection over all rows."""
  model, state, batch = start
  assert_same_on(make_mesh(*sizes), everything_alone, model, config_of(SGD), state, batch)


def label(path: Any, _: Any) -> str:
  return "frozen" if "embed" in jax.tree_util.keystr(path) else "trained"


OPTIMIZERS = {
  "factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
  "partly frozen": optax.multi_transform(
    {"trained": optax.adamw(0.1), "frozen": optax.set_to_zero()},
    partial(jax.tree_util.tree_map_with_path, label),
  ),
  "several": optax.MultiSteps(optax.inject_hyperparams(optax.adam)(learning_rate=0.1), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimiser_state_finds_its_place(start: Any, name: str) -> None:
  """What is like its parameter lies as it does; the rest is whole everywhere."""
  model, state, _ = start
  config = dataclasses.replace(POLICY_ONLY, optimizer=OPTIMIZERS[name])
  state = lm.init_state(config, state.params)
  placed = jax.device_put(state, lm.state_shardings(make_mesh(2, 2, 1), model, config))
  update_batches.assert_same_bits(placed, state)
  where = {(x.shape, x.sharding.spec) for x in jax.tree.leaves(placed.params)}
  sharded = [x for x in jax.tree.leaves(placed.opt_state) if x.sharding.spec != PartitionSpec()]
  assert {(x.shape, x.sharding.spec) for x in sharded} <= where
  assert any(x.ndim == 2 for x in sharded) == (name != "factored")


def test_moments_lie_in_shards_as_their_parameters_do(start: Any) -> None:
  model, state, _ = start
  adam = lm.optimizer(1e-2, weight_decay=0.1)
  config = config_of(adam)
  mesh = make_mesh(2, 2, 2)
  state = lm.init_state(config, state.params, state.critic.params)
  state = jax.device_put(state, lm.state_shardings(mesh, model, config))
  adam_state = state.opt_state[0]
  up = lambda tree: tree["layers"][0]["mlp"]["up"]["kernel"]
  for moments in (adam_state.mu, adam_state.nu, state.critic.opt_state[0].mu):
    assert up(moments).sharding.spec == PartitionSpec("fsdp", "tensor")
    assert up(moments).addressable_shards[0].data.shape == (4, 4)
    assert moments["embedding"].sharding.spec == PartitionSpec("tensor", "fsdp")
    same = jax.tree.map(lambda m, p: m.sharding == p.sharding, adam_state.mu, state.params)
    assert jax.tree.all(same)
  assert adam_state.count.sharding.is_fully_replicated
  assert lm.batch_sharding(mesh).spec == PartitionSpec(("data", "fsdp"))


@pytest.mark.slow
def test_devices_exchange_parameters_and_never_rows(start: Any) -> None:
  """Each of eight devices of "fsdp" computes two of the 16 rows of a part, its logits included."""
  config = dataclasses.replace(
    update_batches.CONFIG, vocab_size=48, hidden_size=40, intermediate_size=56
  )
  model, params = update_batches.network(config)
  mesh = make_mesh(1, 8, 1)
  state = lm.init_state(POLICY_ONLY, params)
  state = jax.device_put(state, lm.state_shardings(mesh, model, POLICY_ONLY))
  batch = jax.device_put(update_batches.ragged(lengths=(5, 4, 3, 1) * 8), lm.batch_sharding(mesh))
  text = lm.compile_update(model, POLICY_ONLY, mesh).lower(state, batch).compile().as_text()
  lines = re.findall(r"= (.*) (?:all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", text)
  shapes = {shape for line in lines for shape in re.findall(r"\w+\[([\d,]*)\]", line)}
  assert {"40,56", "48,40"} <= shapes
  assert not {shape for shape in shapes if shape.startswith("16,")}


@pytest.mark.slow
def test_the_linear_scorer_on_a_mesh(start: Any) -> None:
  """Tiles over a sharded vocabulary: the same update."""
  model, state, batch = start
  mesh = make_mesh(2, 1, 4)
  sharding = VocabularySharding("tensor", PartitionSpec(("data", "fsdp")), mesh)
  score = partial(lm.linear_response_scores, sharding=sharding)
  config = dataclasses.replace(config_of(SGD), selection=None, objective=rl.GRPO)
  plain = lm.compile_update(model, config)(state, batch)
  linear = dataclasses.replace(config, score=score)
  state = jax.device_put(state, lm.state_shardings(mesh, model, linear))
  found = lm.compile_update(model, linear, mesh)(state, batch)
  assert_trees_close(jax.device_get(found), jax.device_get(plain), rtol=5e-6, atol=1e-6)


def test_another_mesh_is_an_error_that_says_which_is_right() -> None:
  model, _ = update_batches.network()
  explicit = jax.make_mesh((2, 2, 2), NAMES, axis_types=(AxisType.Explicit,) * 3)
  other = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  for mesh in (explicit, other):
    with pytest.raises(ValueError, match=r"Auto axes \['data', 'fsdp', 'tensor'\]"):
      lm.batch_sharding(mesh)
    with pytest.raises(ValueError, match="Auto axes"):
      lm.state_shardings(mesh, model, lm.UpdateConfig(rl.GRPO, SGD))
