"""Rollouts: which prompts, which rows, which rewards, and what the advantages are called with."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxrl_lm as rl
from jaxrl_lm.lm import data_order
from jaxrl_lm.lm.objective_advantages import Given, advantages_of, needs
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.reward_errors import RewardError
from jaxrl_lm.lm.rollouts import RolloutConfig, check_rollout, rollout, stop_tokens
from jaxrl_lm.lm.tasks import Component, Prompt, Task
from tests.bigram import Bigram

# ------------------------------------------------------------------------------- order of data


@given(
  size=st.integers(1, 9),
  seed=st.integers(0, 5),
  cuts=st.lists(st.integers(1, 12), min_size=1, max_size=6),
)
def test_however_it_is_cut_the_order_is_the_same(size: int, seed: int, cuts: list[int]) -> None:
  whole = data_order.prompt_indices(size, seed=seed, cursor=0, count=sum(cuts))
  parts, cursor = [], 0
  for count in cuts:
    parts.append(data_order.prompt_indices(size, seed=seed, cursor=cursor, count=count))
    cursor += count
  np.testing.assert_array_equal(np.concatenate(parts), whole)
  for start in range(0, len(whole) - size + 1, size):
    assert sorted(whole[start : start + size].tolist()) == list(range(size))


def test_epochs_seeds_and_uses_have_orders_of_their_own() -> None:
  def order(seed: int, epoch: int) -> list[int]:
    indices = data_order.prompt_indices(20, seed=seed, cursor=20 * epoch, count=20)
    return indices.tolist()

  orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
  orders += [
    data_order.row_order(20, seed=seed, step=step, epoch=epoch).tolist()
    for seed in range(3)
    for step in range(3)
    for epoch in range(2)
  ]
  assert len({tuple(x) for x in orders}) == len(orders)
  assert all(sorted(x) == list(range(20)) for x in orders)


def test_every_order_is_as_likely() -> None:
  """All 6 orders of 3 rows in 3000 draws: 500 each, +- 20.4."""
  seen = [tuple(data_order.row_order(3, seed=0, step=step, epoch=0)) for step in range(3000)]
  _, counts = np.unique(seen, axis=0, return_counts=True)
  assert len(counts) == 6
  assert np.all(np.abs(counts - 500) < 4 * 20.4)


def test_the_order_is_that_of_all_versions() -> None:
  """A run that is resumed with another NumPy goes on in the same order."""
  got = data_order.prompt_indices(8, seed=1, cursor=0, count=10).tolist()
  assert got == ORDER_OF_SEED_1


ORDER_OF_SEED_1 = [3, 7, 4, 2, 1, 6, 5, 0, 1, 2]


def test_a_fingerprint_is_of_tokens_references_and_their_order() -> None:
  prompts = [((1, 2), "a"), ((3,), None)]
  one = data_order.fingerprint(prompts)
  assert one == data_order.fingerprint([([np.int32(1), 2], "a"), ([3], None)])
  others = [
    prompts[::-1],
    prompts[:1],
    [((1,), "a"), ((2, 3), None)],
    [((1, 2), "b"), ((3,), None)],
  ]
  assert one not in {data_order.fingerprint(x) for x in others}


@pytest.mark.parametrize(
  "bad", [{"size": 0}, {"count": 0}, {"seed": -1}, {"cursor": -1}], ids=lambda x: next(iter(x))
)
def test_orders_that_cannot_be(bad: dict[str, int]) -> None:
  arguments = {"size": 3, "seed": 0, "cursor": 0, "count": 2} | bad
  with pytest.raises(ValueError, match=f"{next(iter(bad))}.* must be at least"):
    data_order.prompt_indices(arguments.pop("size"), **arguments)


# ------------------------------------------------------------- what the advantages are called with

RNG = np.random.default_rng(0)
LENGTHS = np.array([[1, 3, 2], [3, 2, 2]])
MASK = np.arange(3) < LENGTHS[..., None]
REWARDS = RNG.normal(size=(2, 3)).astype(np.float32)
VALUES = RNG.normal(size=(2, 3, 3)).astype(np.float32)
WHERE = np.ones((2, 3), bool)
TOKEN_REWARDS = rl.terminal_rewards(jnp.asarray(REWARDS), jnp.asarray(MASK))
GIVEN = Given(
  rewards=jnp.asarray(REWARDS),
  where=jnp.asarray(WHERE),
  lengths=jnp.asarray(LENGTHS),
  mask=jnp.asarray(MASK),
  token_rewards=TOKEN_REWARDS,
  component_rewards=jnp.stack([jnp.asarray(REWARDS), jnp.asarray(REWARDS) ** 2]),
  greedy_rewards=jnp.array([0.5, -0.5]),
  values=jnp.asarray(VALUES),
)
DIRECT = {
  rl.group_normalized: lambda: rl.group_normalized(REWARDS),
  rl.group_centered: lambda: rl.group_centered(REWARDS),
  rl.leave_one_out: lambda: rl.leave_one_out(REWARDS),
  rl.raw_rewards: lambda: jnp.asarray(REWARDS),
  rl.signal_scaled: lambda: rl.signal_scaled(REWARDS),
  rl.greedy_baseline: lambda: rl.greedy_baseline(REWARDS, jnp.array([0.5, -0.5])),
  rl.length_weighted_baseline: lambda: rl.length_weighted_baseline(REWARDS, LENGTHS),
  rl.whitened_returns: lambda: rl.whitened_returns(TOKEN_REWARDS, MASK),
  rl.whitened_group_centered: lambda: rl.whitened_group_centered(REWARDS, MASK),
  rl.gae: lambda: rl.gae(TOKEN_REWARDS, VALUES, MASK),
}
TABLE = {
  name: getattr(rl, name) for name in rl.__all__ if isinstance(getattr(rl, name), rl.Objective)
}


@pytest.mark.parametrize("name", TABLE)
def test_every_objective_gets_what_it_asks_for(name: str) -> None:
  slot = TABLE[name].advantages
  want = DIRECT[slot]()
  want = want[..., None] if want.ndim == 2 else want
  np.testing.assert_array_equal(advantages_of(slot, GIVEN), want)


def test_a_slot_of_ones_own() -> None:
  weights = jnp.array([1.0, 2.0])
  gdpo = lambda component_rewards: rl.multi_reward_normalized(component_rewards, weights=weights)
  want = rl.multi_reward_normalized(GIVEN.component_rewards, weights=weights)[..., None]
  np.testing.assert_array_equal(advantages_of(gdpo, GIVEN), want)
  discounted = partial(rl.gae, gae_lambda=0.9)
  want = rl.gae(TOKEN_REWARDS, VALUES, MASK, gae_lambda=0.9)
  np.testing.assert_array_equal(advantages_of(discounted, GIVEN), want)
  assert needs(partial(rl.greedy_baseline, greedy_rewards=0)) == {"rewards", "where"}


def test_what_could_not_be_scored_has_no_advantage_whatever_the_slot_says() -> None:
  excluded = GIVEN._replace(where=GIVEN.where.at[0, 1].set(False))
  advantages = advantages_of(lambda rewards: rewards + 1, excluded)
  assert advantages[0, 1] == 0
  assert jnp.all(advantages[1] != 0)


@pytest.mark.parametrize(
  ("slot", "error", "message"),
  [
    (lambda rewards, budget: rewards, TypeError, r"bound nor optional: \['budget'\]"),
    (lambda rewards: rewards[0], ValueError, r"must be \[P, G\] \(2, 3\)"),
  ],
)
def test_slots_that_cannot_be_called(slot: Any, error: type[Exception], message: str) -> None:
  with pytest.raises(error, match=message):
    advantages_of(slot, GIVEN)


@pytest.mark.parametrize("field", ["values", "greedy_rewards"])
def test_what_there_is_not_is_named(field: str) -> None:
  slot = rl.gae if field == "values" else rl.greedy_baseline
  with pytest.raises(ValueError, match=rf"ask for \['{field}'\]"):
    advantages_of(slot, GIVEN._replace(**{field: None}))


# ------------------------------------------------------------------------------------- rollouts

# Token 7 ends. After 0 and 1 any of 2 .. 7 follows; after 4 and 5 always 6, and then 7.
VOCABULARY, END = 8, 7
LOGITS = np.full((VOCABULARY, VOCABULARY), -1e9, np.float32)
LOGITS[[0, 1, 2, 3], 2:] = 0.0
LOGITS[[4, 5], 6] = LOGITS[[6, 7], 7] = 0.0
SURE, OPEN = (4, 5), (0, 1)


def length(responses: Any) -> np.ndarray:
  return responses.mask.sum(axis=-1).astype(float)


def spelling(responses: Any) -> np.ndarray:
  """Another number for every response."""
  digits = np.where(responses.mask, responses.tokens, 0)
  return digits @ VOCABULARY ** np.arange(digits.shape[1]).astype(float)


def task_of(tokens: Any, *rewards: Component) -> Task:
  prompts = tuple(Prompt(f"p{t}", (t,) if isinstance(t, int) else t, t) for t in tokens)
  return Task(prompts, (), rewards or (Component("length", length),))


POLICY = Pretrained(Bigram(VOCABULARY), jnp.asarray(LOGITS), None)
CONFIG = RolloutConfig(num_prompts=2, group_size=3, max_new_tokens=4, stop_tokens=(END,))


def draw(task: Task, config: RolloutConfig = CONFIG, **options: Any) -> Any:
  return rollout(POLICY, task, config, **({"seed": 0, "step": 0, "cursor": 0} | options))


def with_(config: RolloutConfig, **changes: Any) -> RolloutConfig:
  return dataclasses.replace(config, **changes)


def test_a_group_is_consecutive_rows_of_one_prompt() -> None:
  drawn = draw(task_of(OPEN))
  names = [prompt.text for prompt in drawn.responses.prompts]
  assert names[0] != names[3]
  assert names == [names[0]] * 3 + [names[3]] * 3
  assert drawn.prompts[:, -1].tolist() == [p.tokens[0] for p in drawn.responses.prompts]
  rows = {tuple(row) for row in drawn.samples.tokens.tolist()}
  assert len(rows) > 3  # rows of a group draw noise of their own


def test_the_ids_that_are_trained_on_are_those_that_were_sampled() -> None:
  drawn = draw(task_of(OPEN))
  np.testing.assert_array_equal(drawn.responses.tokens, drawn.samples.tokens)
  shown = [list(map(int, text.split())) for text in drawn.responses.texts]
  want = [row[m].tolist() for row, m in zip(drawn.samples.tokens, drawn.samples.mask)]
  assert shown == want


def test_the_same_numbers_draw_the_same_and_others_do_not() -> None:
  task = task_of(OPEN)
  one = draw(task).samples.tokens
  np.testing.assert_array_equal(draw(task).samples.tokens, one)
  for other in ({"seed": 1}, {"step": 1}):
    assert (draw(task, **other).samples.tokens != one).any()


def test_prompts_fewer_than_a_step_stand_in_it_twice_and_differ() -> None:
  drawn = draw(task_of([0]))
  assert {p.text for p in drawn.responses.prompts} == {"p0"}
  groups = drawn.samples.tokens.reshape(2, -1)
  assert len(np.unique(groups, axis=0)) == 2


def test_prompts_of_unequal_length_share_a_width() -> None:
  drawn = draw(task_of([(3, 2, 1), 0]))
  assert drawn.prompts.shape == (6, 3)
  assert sorted(drawn.prompt_mask.sum(axis=1).tolist()) == [1, 1, 1, 3, 3, 3]
  assert drawn.prompt_mask[:, -1].all()


def test_dynamic_sampling_takes_the_next_prompts_for_groups_without_signal() -> None:
  task = task_of((*SURE, *OPEN), Component("spelling", spelling))
  config = with_(CONFIG, attempts=4)
  cursor = next(
    c
    for c in range(0, 400, 4)
    if set(data_order.prompt_indices(4, seed=0, cursor=c, count=2)) == {0, 1}
  )
  assert not draw(task, cursor=cursor).signal.any()
  drawn = draw(task, config, cursor=cursor)
  assert drawn.signal.all()
  assert {p.tokens[0] for p in drawn.responses.prompts} == set(OPEN)
  assert (drawn.consumed, drawn.discarded) == (4, 2)
  # The rows are those of the second draw, which has noise of its own.
  later = draw(task, cursor=cursor + 2)
  assert [p.text for p in drawn.responses.prompts] == [p.text for p in later.responses.prompts]
  assert (drawn.samples.tokens != later.samples.tokens).any()
  np.testing.assert_array_equal(drawn.scores.total, spelling(drawn.responses))


def test_dynamic_sampling_keeps_what_it_has_and_gives_up_in_the_end() -> None:
  drawn = draw(task_of(SURE), with_(CONFIG, attempts=3))
  assert not drawn.signal.any()
  assert (drawn.consumed, drawn.discarded) == (6, 4)
  assert drawn.samples.tokens.shape == (6, 4)
  # One open prompt in three, two attempts of two: one or two groups of it.
  task = task_of([4, 5, 0], Component("spelling", spelling))
  for cursor in range(0, 12, 4):
    indices = data_order.prompt_indices(3, seed=0, cursor=cursor, count=4)
    some = draw(task, with_(CONFIG, attempts=2), cursor=cursor)
    assert some.signal.sum() == min(2, np.sum(indices == 2))
    assert some.responses.prompts[0].text == "p0"


def test_a_penalty_is_a_component_and_part_of_the_total() -> None:
  penalty = partial(rl.overlong_penalty, max_length=4, buffer=2)
  drawn = draw(task_of(OPEN), with_(CONFIG, overlong=penalty))
  lengths = length(drawn.responses)
  want = np.select([lengths <= 2, lengths == 3], [0.0, -0.5], -1.0)
  np.testing.assert_allclose(drawn.scores.components["overlong"], want)
  np.testing.assert_allclose(drawn.scores.total, lengths + want)


def test_a_nan_is_of_its_own_row_and_is_no_signal() -> None:
  def odd(responses: Any) -> np.ndarray:
    values = np.zeros(len(responses.texts))
    values[1] = np.nan
    return values

  drawn = draw(task_of(OPEN, Component("odd", odd)))
  assert np.isnan(drawn.scores.total).tolist() == [False, True, False, False, False, False]
  assert not drawn.signal.any()


def test_the_greedy_response_is_rewarded_beside_the_group() -> None:
  drawn = draw(task_of(SURE), greedy=True)
  np.testing.assert_array_equal(drawn.greedy_rewards, [2.0, 2.0])
  assert draw(task_of(SURE)).greedy_rewards is None


def test_a_reward_that_raises_shows_the_sample() -> None:
  def fails(responses: Any) -> np.ndarray:
    raise KeyError("no such thing")

  with pytest.raises(RewardError, match="(?s)'broken'.*no such thing.*p[01]"):
    draw(task_of(OPEN, Component("broken", fails)))


# ------------------------------------------------------------------------------------ bad input


class NoEnd:
  bos_id, eos_ids, vocab_size = None, (), VOCABULARY


@pytest.mark.parametrize(
  ("policy", "task", "changes", "message"),
  [
    (POLICY, task_of([(0,) * 253]), {}, "253 tokens, which with max_new_tokens = 4 .* 256: 'p"),
    (POLICY, task_of([0]), {"stop_tokens": None}, "there is no tokenizer: name the ids"),
    (POLICY._replace(tokenizer=NoEnd()), task_of([0]), {"stop_tokens": None}, "has no EOS: name"),
  ],
)
def test_what_cannot_run_is_said_before(
  policy: Any, task: Task, changes: dict[str, Any], message: str
) -> None:
  with pytest.raises(ValueError, match=message):
    check_rollout(policy, task, with_(CONFIG, **changes))


@pytest.mark.parametrize("name", ["num_prompts", "group_size", "max_new_tokens", "attempts"])
def test_sizes_are_at_least_1(name: str) -> None:
  with pytest.raises(ValueError, match=f"{name} must lie in"):
    with_(CONFIG, **{name: 0})


def test_no_stop_token_has_to_be_said() -> None:
  check_rollout(POLICY, task_of(OPEN), with_(CONFIG, stop_tokens=()))
  assert stop_tokens(POLICY, with_(CONFIG, stop_tokens=())) == ()
