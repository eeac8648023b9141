"""jaxrl_lm.groups: any ids in any order, unequal groups, episodes of rows, what is too much."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_lm import advantages, groups


@functools.cache
def compiled(num_groups, group_size):
  def call(values, ids, episode_ids=None):
    return groups.to_groups(
      values, ids, num_groups=num_groups, group_size=group_size, episode_ids=episode_ids
    )

  return jax.jit(call)


def means(values, ids, num_groups, group_size):
  grouped = compiled(num_groups, group_size)(values, ids)
  return np.asarray(jnp.sum(grouped.values, -1) / jnp.sum(grouped.where, -1))


@pytest.mark.parametrize("names", [[0, 1, 2], [7, 3, 5], [-4, 9, 2**31 - 1]])
def test_group_means_of_the_prompt_major_layout(names):
  """[1, 0, 0, 1, 5, 7] for prompts A A B B C C: .5, .5, 6; read as tiled: 1, 2.5, 3.5."""
  ids = np.repeat(names, 2)
  np.testing.assert_array_equal(means(np.array([1, 0, 0, 1, 5, 7]), ids, 3, 2), [0.5, 0.5, 6.0])


def test_group_means_of_the_tiled_layout():
  np.testing.assert_array_equal(
    means(np.array([1, 0, 5, 0, 1, 7]), np.array([0, 1, 2, 0, 1, 2]), 3, 2), [0.5, 0.5, 6.0]
  )


def test_ids_need_not_be_places():
  """7, 3, 7, 3: a segment sum over two segments would drop everything."""
  grouped = compiled(2, 2)(jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([7, 3, 7, 3]))
  np.testing.assert_array_equal(grouped.values, [[1.0, 3.0], [2.0, 4.0]])  # first seen, first row
  np.testing.assert_array_equal(grouped.slots, [0, 2, 1, 3])
  assert np.all(grouped.where)
  assert grouped.slots.dtype == jnp.int32


def test_unequal_groups_and_spare_room():
  values = np.arange(1.0, 7.0, dtype=np.float32)
  grouped = compiled(4, 3)(values, np.array([5, 5, 0, 5, 9, 0]))
  np.testing.assert_array_equal(grouped.values, [[1, 2, 4], [3, 6, 0], [5, 0, 0], [0, 0, 0]])
  np.testing.assert_array_equal(grouped.where, np.asarray(grouped.values) > 0)
  np.testing.assert_array_equal(groups.from_groups(grouped.values, grouped.slots), values)


def test_round_trip_and_advantages_against_a_loop():
  rng = np.random.default_rng(0)
  ids = rng.integers(-3, 3, 40) * 1001
  values = rng.normal(size=40).astype(np.float32)
  call = compiled(6, 16)
  grouped = call(values, ids)
  np.testing.assert_array_equal(groups.from_groups(grouped.values, grouped.slots), values)
  result = groups.from_groups(
    advantages.leave_one_out(grouped.values, where=grouped.where), grouped.slots
  )
  expected = [values[i] - values[(ids == ids[i]) & (np.arange(40) != i)].mean() for i in range(40)]
  np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
  # Whatever the order of the batch, every row has its advantage.
  order = rng.permutation(40)
  shuffled = call(values[order], ids[order])
  result = groups.from_groups(
    advantages.leave_one_out(shuffled.values, where=shuffled.where), shuffled.slots
  )
  np.testing.assert_allclose(result, np.array(expected)[order], rtol=1e-5, atol=1e-6)


def test_rows_of_an_episode_are_one_sample():
  """Prompt 4: episodes 1 (three rows), 2; prompt 8: episodes 1 (another one), 1."""
  values = np.array([1.0, 0.0, 1.0, 3.0, 1.0, 3.0], np.float32)
  ids, episodes = np.array([4, 4, 4, 8, 4, 8]), np.array([1, 2, 1, 1, 1, 1])
  grouped = compiled(2, 2)(values, ids, episodes)
  np.testing.assert_array_equal(grouped.values, [[1, 0], [3, 0]])
  np.testing.assert_array_equal(grouped.where, [[True, True], [True, False]])
  np.testing.assert_array_equal(grouped.slots, [0, 1, 0, 2, 0, 2])
  # The mean of prompt 4 is that of two samples, 1/2, not that of four rows, 3/4.
  centered = advantages.group_centered(grouped.values, where=grouped.where)
  np.testing.assert_array_equal(
    groups.from_groups(centered, grouped.slots), [0.5, -0.5, 0.5, 0.0, 0.5, 0.0]
  )


def test_each_row_its_own_episode_is_no_episode():
  values, ids = np.arange(5, dtype=np.float32), np.array([2, 1, 2, 2, 1])
  expected = compiled(2, 3)(values, ids)
  actual = compiled(2, 3)(values, ids, np.array([9, 8, -7, 6, 5]))
  for a, b in zip(actual, expected, strict=True):
    np.testing.assert_array_equal(a, b)


def test_unscorable_samples_go_through_where():
  """A NaN stays where it is; the caller excludes it."""
  grouped = compiled(1, 3)(np.array([1.0, np.nan, 3.0], np.float32), np.array([0, 0, 0]))
  where = grouped.where & jnp.isfinite(grouped.values)
  centered = advantages.group_centered(grouped.values, where=where)
  np.testing.assert_array_equal(groups.from_groups(centered, grouped.slots), [-1.0, 0.0, 1.0])


# -- what does not fit -----------------------------------------------------------------------


def test_too_much_is_an_error_when_it_can_be_seen():
  values, ids = np.zeros(4, np.float32), np.array([1, 2, 3, 3])
  with pytest.raises(ValueError, match=r"num_groups is 2.*3 groups"):
    groups.to_groups(values, ids, num_groups=2, group_size=2)
  with pytest.raises(ValueError, match=r"group_size is 1.*2"):
    groups.to_groups(jnp.asarray(values), jnp.asarray(ids), num_groups=3, group_size=1)
  episodes = np.array([1, 1, 5, 5])
  groups.to_groups(values, ids, num_groups=3, group_size=1, episode_ids=episodes)
  with pytest.raises(ValueError, match="group_size is 1"):
    groups.to_groups(values, ids, num_groups=3, group_size=1, episode_ids=episodes * [1, 1, 1, 2])
  with pytest.raises(ValueError, match="values differ between rows of one episode"):
    groups.to_groups(
      np.arange(4.0), ids, num_groups=3, group_size=2, episode_ids=np.array([1, 1, 5, 5])
    )


def test_concrete_ids_under_jit_are_still_checked():
  ids = np.array([1, 2, 3])
  with pytest.raises(ValueError, match="num_groups"):
    jax.jit(lambda v: groups.to_groups(v, ids, num_groups=2, group_size=2))(jnp.zeros(3))


def test_too_many_groups_come_back_as_nan_when_traced():
  grouped = compiled(2, 2)(np.array([1.0, 2.0, 3.0, 4.0], np.float32), np.array([6, 5, 4, 6]))
  np.testing.assert_array_equal(grouped.slots, [0, 2, -1, 1])
  back = groups.from_groups(advantages.group_centered(grouped.values), grouped.slots)
  np.testing.assert_array_equal(np.isnan(back), [False, False, True, False])


def test_too_many_members_spoil_their_group_when_traced():
  """Statistics of a part of the group would look right and be wrong."""
  values, ids = np.array([1.0, 2.0, 3.0, 4.0, 0.0], np.float32), np.array([6, 6, 5, 6, 5])
  grouped = compiled(2, 2)(values, ids)
  np.testing.assert_array_equal(grouped.values, [[np.nan, np.nan], [3.0, 0.0]])
  assert np.all(grouped.where)
  centered = advantages.group_centered(grouped.values, where=grouped.where)
  back = groups.from_groups(centered, grouped.slots)
  np.testing.assert_array_equal(back, [np.nan, np.nan, 1.5, np.nan, -1.5])


def test_contradicting_rows_of_an_episode_are_nan_when_traced():
  values = np.array([0.0, 1.0, 2.0, np.nan, np.nan], np.float32)
  ids, episodes = np.array([0, 0, 0, 1, 1]), np.array([3, 3, 4, 5, 5])
  grouped = compiled(2, 2)(values, ids, episodes)
  np.testing.assert_array_equal(grouped.values, [[np.nan, 2.0], [np.nan, 0.0]])
  same = groups.to_groups(
    values[3:], ids[3:], num_groups=1, group_size=1, episode_ids=episodes[3:]
  )  # two rows of NaN agree
  np.testing.assert_array_equal(same.values, [[np.nan]])


# -- transformations and types ---------------------------------------------------------------


def test_values_are_constants():
  ids = jnp.array([0, 1, 0])

  def total(values):
    grouped = groups.to_groups(values, ids, num_groups=2, group_size=2)
    return jnp.sum(grouped.values**2) + jnp.sum(groups.from_groups(values[:2, None], ids))

  np.testing.assert_array_equal(jax.grad(total)(jnp.array([1.0, 2.0, 3.0])), 0.0)


def test_vmap_over_batches():
  rng = np.random.default_rng(1)
  values = rng.normal(size=(3, 6)).astype(np.float32)
  ids = rng.integers(0, 3, (3, 6))
  mapped = jax.vmap(compiled(3, 6))(values, ids)
  for i in range(3):
    for a, b in zip(mapped, compiled(3, 6)(values[i], ids[i]), strict=True):
      np.testing.assert_array_equal(a[i], b)


def test_types():
  ids = np.array([1, 1])
  shape = functools.partial(groups.to_groups, num_groups=1, group_size=2)
  assert shape(jnp.ones(2, jnp.bfloat16), ids).values.dtype == jnp.float32
  np.testing.assert_array_equal(shape(np.array([3, 4]), ids.astype(np.int16)).values, [[3.0, 4.0]])
  np.testing.assert_array_equal(shape([True, False], [8, 8]).values, [[1.0, 0.0]])


def test_double_precision_and_wide_ids(x64):
  ids = np.array([1, 2**40 + 1, 1])
  grouped = groups.to_groups(np.arange(3.0), ids, num_groups=2, group_size=2)
  assert grouped.values.dtype == jnp.float64
  assert grouped.slots.dtype == jnp.int32
  np.testing.assert_array_equal(grouped.values, [[0.0, 2.0], [1.0, 0.0]])


V, IDS = np.zeros(3, np.float32), np.arange(3)
fits = functools.partial(groups.to_groups, num_groups=3, group_size=3)


@pytest.mark.parametrize(
  ("call", "error", "message"),
  [
    (lambda: fits(V, IDS[:2]), ValueError, r"group_ids.*\(2,\).*\(3,\)"),
    (lambda: fits(V, V), TypeError, "group_ids must be integer"),
    (lambda: fits(V, jnp.asarray(V)), TypeError, "group_ids must be integer"),
    (lambda: fits(V, np.array(["a", "b", "c"])), TypeError, "group_ids must be integer"),
    (lambda: fits(V[None], IDS[None]), ValueError, "values must be flat"),
    (lambda: fits(V, IDS, episode_ids=IDS[:1]), ValueError, "episode_ids"),
    (lambda: fits(V, IDS, episode_ids=V), TypeError, "episode_ids"),
    (lambda: fits(V, IDS + 2**32), ValueError, "group_ids hold integers beyond 32 bits"),
    (lambda: fits(V, IDS, num_groups=0), ValueError, "num_groups"),
    (lambda: fits(V, IDS, group_size=0), ValueError, "group_size"),
    (lambda: groups.from_groups(V, IDS), ValueError, "grouped"),
    (lambda: groups.from_groups(V[None], V), TypeError, "slots"),
    (lambda: groups.from_groups(V[None], IDS[None]), ValueError, "slots"),
  ],
)
def test_bad_inputs(call, error, message):
  with pytest.raises(error, match=message):
    call()
