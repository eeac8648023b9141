"""jaxrl_lm.advantages and jaxrl_lm.groups against the reference: all of it constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference as ref
from tests.ragged import TOLERANCE, Checker, Layout, assert_close, f32

_RNG = np.random.default_rng(1)
# A full group, equal rewards (which 1/10 is not a float of), binary ones, one sample excluded,
# two samples left, a group of one, one without a valid sample, negative rewards.
GROUPS = f32(
  [
    list(_RNG.normal(size=5)),
    [0.1, 0.1, 0.1, 0.1, 0.1],
    [1.0, 0.0, 0.0, 1.0, 1.0],
    list(_RNG.normal(size=4)),
    [0.25, 2.0],
    [2.0],
    [],
    [-1.0, -2.0, -3.0, -3.0, -1.0],
  ]
)
VALID = ([0, 1, 2, 3, 4],) * 3 + ([0, 1, 3, 4], [1, 4], [2], [], [0, 1, 2, 3, 4])
LAYOUT = Layout((8, 5), [((i,), list(p)) for i, p in enumerate(VALID)])

PER_GROUP = [
  ("raw_rewards", {}),
  ("group_centered", {}),
  ("group_normalized", {}),
  ("group_normalized", {"ddof": 0, "eps": 1e-4}),
  ("leave_one_out", {}),
  ("leave_one_out_normalized", {}),
  ("mean_normalized", {}),
  ("pass_at_k", {"k": 2}),
  ("pass_at_k", {"k": 3}),
  ("pass_at_k", {"k": 5}),
]


@pytest.mark.parametrize(("name", "constants"), PER_GROUP)
def test_group(name, constants):
  fn, truth = getattr(rl, name), getattr(ref, name)
  check = Checker(lambda r, mask: fn(r, where=mask, **constants), LAYOUT)
  check.tokens([truth(group, **constants) for group in GROUPS], r=GROUPS)


@pytest.mark.parametrize(("name", "constants"), PER_GROUP)
def test_group_of_valid_samples(name, constants):
  """No `where`: three full groups."""
  fn, truth = getattr(rl, name), getattr(ref, name)
  layout = Layout((3, 5), LAYOUT.places[:3])
  check = Checker(lambda r: fn(r, **constants), layout)
  check.tokens([truth(group, **constants) for group in GROUPS[:3]], r=GROUPS[:3])


@pytest.mark.parametrize("constants", [{}, {"ddof": 0, "eps": 1e-4}])
def test_batch_scaled(constants):
  check = Checker(lambda r, mask: rl.batch_scaled(r, where=mask, **constants), LAYOUT)
  check.tokens(ref.batch_scaled(GROUPS, **constants), r=GROUPS)


def test_batch_scaled_with_moments():
  mean, variance = ref.masked_moments(GROUPS)
  check = Checker(lambda r, m, v, mask: rl.batch_scaled(r, moments=(m, v), where=mask), LAYOUT)
  check.tokens(ref.batch_scaled(GROUPS), r=GROUPS, m=np.float64(mean), v=np.float64(variance))


def test_greedy_baseline():
  greedy = f32(list(_RNG.normal(size=8)))
  check = Checker(lambda r, g, mask: rl.greedy_baseline(r, g, where=mask), LAYOUT)
  expected = [ref.greedy_baseline(r, g) for r, g in zip(GROUPS, greedy, strict=True)]
  check.tokens(expected, r=GROUPS, g=np.array(greedy))


def test_length_weighted_baseline():
  lengths = [[float(n) for n in _RNG.integers(1, 50, size=len(group))] for group in GROUPS]
  expected = [ref.length_weighted_baseline(r, n) for r, n in zip(GROUPS, lengths, strict=True)]
  fn = lambda r, n, mask: rl.length_weighted_baseline(r, n, where=mask)
  Checker(fn, LAYOUT).tokens(expected, r=GROUPS, n=lengths)
  counts = [[int(n) for n in row] for row in lengths]
  Checker(fn, LAYOUT).tokens(expected, r=GROUPS, n=counts)


def test_signal_scaled():
  check = Checker(lambda r, mask: rl.signal_scaled(r, where=mask), LAYOUT)
  check.tokens(ref.signal_scaled(GROUPS), r=GROUPS)


@pytest.mark.parametrize("constants", [{}, {"ddof": 0, "eps": 1e-4}])
def test_multi_reward_normalized(constants):
  """Three rewards per sample, one of them equal throughout."""
  squares, equal = [[x * x + 1 for x in g] for g in GROUPS], [[0.3] * len(g) for g in GROUPS]
  components, weights = f32([GROUPS, squares, equal]), [0.5, 2.0, 1.0]
  check = Checker(
    lambda a, b, c, w, mask: rl.multi_reward_normalized(
      jnp.stack([a, b, c]), weights=w, where=jnp.stack([mask] * 3), **constants
    ),
    LAYOUT,
  )
  expected = [
    ref.multi_reward_normalized(list(parts), weights, **constants)
    for parts in zip(*components, strict=True)
  ]
  a, b, c = components
  check.tokens(expected, a=a, b=b, c=c, w=np.array(weights))


def test_has_signal():
  check = Checker(lambda r, mask: rl.has_signal(r, where=mask), LAYOUT)
  expected = [ref.has_signal(group) for group in GROUPS]
  assert expected == [True, False, True, True, True, False, False, True]
  check.reduced(expected, r=GROUPS)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_to_groups_and_back(dtype):
  """Groups of 4, 3 and 1 samples in any order, with any ids."""
  ids = np.array([7, 3, 7, 7, -5, 3, 7, 3])
  rewards = np.float32(_RNG.normal(size=8)).astype(dtype)
  members = {i: [float(r) for r in rewards[ids == i]] for i in ids.tolist()}
  with jax.enable_x64(dtype == "float64"):
    groups = rl.to_groups(rewards, ids, num_groups=3, group_size=5)
    assert groups.values.shape == groups.where.shape == (3, 5)
    rows = [np.asarray(v)[np.asarray(w)].tolist() for v, w in zip(groups.values, groups.where)]
    assert sorted(rows) == sorted(members.values())
    np.testing.assert_array_equal(rl.from_groups(groups.values, groups.slots), rewards)
    advantages = rl.group_normalized(groups.values, where=groups.where)
    truth = {i: iter(ref.group_normalized(m)) for i, m in members.items()}
    expected = [next(truth[i]) for i in ids.tolist()]
    assert_close(rl.from_groups(advantages, groups.slots), expected, dtype)


def test_to_groups_of_episodes():
  """The turns of a conversation, cut into rows, are one sample."""
  ids, episodes = np.array([1, 1, 1, 2, 2, 1]), np.array([0, 0, 1, 0, 1, 0])
  rewards = np.array([2.0, 2.0, 5.0, 1.0, 4.0, 2.0], np.float32)
  groups = rl.to_groups(rewards, ids, num_groups=2, group_size=2, episode_ids=episodes)
  rows = [np.asarray(v)[np.asarray(w)].tolist() for v, w in zip(groups.values, groups.where)]
  assert sorted(map(sorted, rows)) == [[1.0, 4.0], [2.0, 5.0]]
  centered = rl.from_groups(rl.group_centered(groups.values, where=groups.where), groups.slots)
  assert_close(centered, [-1.5, -1.5, 1.5, -1.5, 1.5, -1.5], "float32")
