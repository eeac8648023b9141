"""The loop: it learns, it resumes to the bit, and what is wrong is said before it is run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl_lm as rl
from jaxrl_lm.lm import batches, data_order, pure_training, rollouts, training
from jaxrl_lm.lm.optimizers import optimizer
from jaxrl_lm.lm.placement import Placement
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.rollouts import RolloutConfig
from jaxrl_lm.lm.settings import differences, settings
from jaxrl_lm.lm.tasks import Component, Prompt, Task
from jaxrl_lm.lm.token_tasks import modular_sum, modular_sum_reward
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.train_state import init_state
from jaxrl_lm.lm.training import train
from jaxrl_lm.lm.update_config import UpdateConfig
from tests.bigram import Bigram

END, VOCABULARY = 3, 4
PARAMS = jax.random.normal(jax.random.key(3), (VOCABULARY, VOCABULARY))
POLICY = Pretrained(Bigram(VOCABULARY), PARAMS, None)
TASK = modular_sum(VOCABULARY, [0, 1, 2], end_token=END)
CONFIG = TrainConfig(
  rollout=RolloutConfig(num_prompts=4, group_size=4, max_new_tokens=3, stop_tokens=(END,)),
  update=UpdateConfig(objective=rl.GRPO, optimizer=optimizer(0.1), micro_batches=2),
  steps=4,
  seed=7,
  epochs=2,
  minibatches=2,
)


def run(config: TrainConfig = CONFIG, task: Task = TASK, **options: Any) -> list[Any]:
  return list(train(POLICY, task, config, **options))


def with_(config: TrainConfig, **changes: Any) -> TrainConfig:
  """Fields of the config, or of its parts, whichever has them."""
  for part in ("rollout", "update"):
    own = {x: changes.pop(x) for x in list(changes) if hasattr(getattr(config, part), x)}
    changes[part] = replace(getattr(config, part), **own)
  return replace(config, **changes)


def assert_same_bits(a: Any, b: Any) -> None:
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def straight() -> list[Any]:
  return run()


# ---------------------------------------------------------------------------- state and resume


def test_a_run_that_goes_on_from_a_state_is_the_straight_run(straight: list[Any]) -> None:
  """Two steps, the state as NumPy arrays, two more: parameters, moments, counters, every number.

  Another process would hold the same arrays; everything random is a function of the numbers.
  """
  for stop in (1, 2, 3):
    begun = run(with_(CONFIG, steps=stop))
    kept = jax.tree.map(np.asarray, begun[-1][0])
    resumed = begun + run(state=kept)
    assert [r.step for _, r in resumed] == [0, 1, 2, 3]
    for (state, report), (want, seen) in zip(resumed, straight):
      assert_same_bits(state, want)
      assert report.samples == seen.samples
      assert_same_bits(
        (report.metrics, report.rewards, report.lengths), (seen.metrics, seen.rewards, seen.lengths)
      )


def test_a_finished_run_has_nothing_left(straight: list[Any]) -> None:
  assert run(state=straight[-1][0]) == []


def test_the_state_counts_steps_and_prompts(straight: list[Any]) -> None:
  assert [(int(s.step), int(s.cursor)) for s, _ in straight] == [(1, 4), (2, 8), (3, 12), (4, 16)]
  assert straight[0][0].step.dtype == straight[0][0].cursor.dtype == jnp.int32
  counts = [int(optax.tree_utils.tree_get(s.opt_state, "count")) for s, _ in straight]
  assert counts == sorted(counts)
  assert counts[-1] <= 4 * 2 * 2


def test_the_policy_that_was_given_is_not_touched(straight: list[Any]) -> None:
  np.testing.assert_array_equal(
    PARAMS, jax.random.normal(jax.random.key(3), (VOCABULARY, VOCABULARY))
  )
  assert (straight[-1][0].params != PARAMS).any()


def test_another_seed_is_another_run(straight: list[Any]) -> None:
  state, _ = run(with_(CONFIG, seed=8))[-1]
  assert (state.params != straight[-1][0].params).any()


def test_nothing_is_compiled_after_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
  """Of other prompts, lengths and numbers of excluded rows. The first step of all has an update."""
  steps = train(POLICY, TASK, CONFIG)
  _, report = next(steps)
  assert report.metrics is not None
  with jax.log_compiles(True), caplog.at_level("WARNING"):
    later = list(steps)
    assert not [r for r in caplog.records if "ompil" in r.message]
    jax.jit(lambda x: x + 1)(1.0)
  assert len(later) == 3
  assert [r for r in caplog.records if "ompil" in r.message]  # so the log does tell


# ------------------------------------------------------------------------------- what it learns


def test_the_reward_rises() -> None:
  """Of 14 seeds 13 rise by 0.28 to 0.38 in 40 steps, and one by 0.11; this is the first."""
  config = with_(CONFIG, steps=40, num_prompts=8, group_size=8, seed=0)
  rewards = [float(report.rewards["total"].mean()) for _, report in run(config)]
  assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.25


@pytest.mark.slow
def test_it_is_the_pure_run() -> None:
  """The same samples, and the same parameters, by a loop that shares only the mathematics.

  Plain SGD, both prompts in every step; the order of the two groups differs, and so the rounding.
  """
  key, targets = jax.random.key(5), [2, 1]
  seed = int(pure_training.seed_of(key))
  config = with_(
    CONFIG,
    num_prompts=1,
    steps=5,
    seed=seed,
    epochs=2,
    minibatches=1,
    optimizer=optax.sgd(0.5),
    max_grad_norm=None,
    kl=rl.kl_k2,
    kl_coef=0.1,
  )
  states = run(config, modular_sum(VOCABULARY, targets[:1], end_token=END))
  reward = partial(modular_sum_reward, target=2, vocabulary=VOCABULARY, end_token=END)
  pure = pure_training.make_train(
    pure_training.PureTrainConfig(
      model=POLICY.model,
      objective=rl.GRPO,
      reward=reward,
      prompts=((2,),),
      group_size=4,
      max_new_tokens=3,
      steps=5,
      stop_tokens=(END,),
      epochs=2,
      optimizer=optax.sgd,
      kl=rl.kl_k2,
    )
  )
  params, metrics = jax.jit(pure)(PARAMS, key, learning_rate=0.5, kl_coef=0.1)
  assert jnp.abs(params - PARAMS).max() > 0.1
  np.testing.assert_allclose(states[-1][0].params, params, rtol=1e-5, atol=1e-6)
  totals = [float(report.rewards["total"].total) for _, report in states]
  np.testing.assert_array_equal(metrics.rewards.total, totals)


# ---------------------------------------------------------------- groups that teach nothing, or NaN


def constant(value: float) -> Task:
  reward = lambda responses: np.full(len(responses.texts), value)
  return replace(TASK, rewards=(Component("constant", reward),))


@pytest.mark.parametrize(("value", "said"), [(1.0, ", 0 of 16 responses"), (np.nan, ", 16 of 16")])
def test_no_signal_is_a_warning_and_no_update(value: float, said: str, straight: list[Any]) -> None:
  """After a step that left momentum behind, and with a KL term that has a gradient."""
  state = straight[0][0]
  config = with_(CONFIG, steps=2, kl=rl.kl_k2, kl_coef=1.0)
  ((after, report),) = run(config, constant(value), state=state)
  assert_same_bits(after[2:], state[2:])
  assert (int(after.step), int(after.cursor)) == (2, 8)
  assert report.metrics is None
  assert len(report.warnings) == 1
  assert "no advantage of the 4 groups differs from 0 (0 have" in report.warnings[0]
  assert said in report.warnings[0]
  assert int(report.signal.total) == 0


def spoilt(rows: Any) -> Task:
  """The task, with rewards that are not to be had in these rows."""

  def reward(responses: Any) -> np.ndarray:
    values = np.array(TASK.rewards[0].function(responses), float)
    values[rows] = np.nan
    return values

  return replace(TASK, rewards=(Component("spoilt", reward),))


@pytest.mark.parametrize("rows", [[5], [4, 5, 6, 7]], ids=["one sample", "a whole group"])
def test_what_could_not_be_scored_is_left_out(rows: list[int], straight: list[Any]) -> None:
  ((state, report),) = run(with_(CONFIG, steps=1), spoilt(rows))
  assert np.isfinite(state.params).all()
  assert (state.params != PARAMS).any()
  assert (int(report.scored.total), int(report.scored.count)) == (16 - len(rows), 16)
  assert int(report.rewards["total"].count) == 16 - len(rows)
  # Lengths are of everything that was drawn.
  assert int(report.lengths.count) == 16
  assert_same_bits(report.lengths, straight[0][1].lengths)


def prepared(config: TrainConfig, task: Task = TASK, step: int = 0) -> tuple[Any, Any]:
  """A rollout and its batch."""
  call = {"seed": config.seed, "step": step, "cursor": 0}
  drawn = rollouts.rollout(POLICY, task, config.rollout, **call)
  state = init_state(config.update, PARAMS)
  reference = jnp.zeros_like(PARAMS)
  batch = batches.score_rollout(POLICY.model, config, state, reference, drawn, Placement())
  return drawn, batches.with_advantages(config, batch, drawn)


def test_an_excluded_sample_does_not_touch_its_group() -> None:
  drawn, batch = prepared(CONFIG, spoilt([5]))
  rewards = drawn.scores.total.reshape(4, 4)
  where = ~np.isnan(rewards)
  want = rl.group_normalized(jnp.asarray(rewards), where=jnp.asarray(where)).reshape(16, 1)
  np.testing.assert_array_equal(batch.advantages, want)
  assert not batch.mask[5].any()
  np.testing.assert_array_equal(np.delete(batch.mask, 5, 0), np.delete(drawn.samples.mask, 5, 0))


def gdpo(component_rewards: Any, where: Any) -> Any:
  where = jnp.broadcast_to(where, component_rewards.shape)
  return rl.multi_reward_normalized(component_rewards, weights=jnp.array([1.0, 0.5]), where=where)


def test_component_rewards_are_those_that_count_and_know_what_is_missing() -> None:
  """A component of weight 0 excludes nothing; a slot that cannot know of a NaN loses the group."""
  nothing = Component("nothing", lambda x: np.full(len(x.texts), np.nan), 0.0)
  second = Component("length", lambda x: x.mask.sum(axis=-1), 0.5)
  task = replace(spoilt([5]), rewards=(nothing, *spoilt([5]).rewards, second))
  config = with_(CONFIG, objective=replace(rl.GRPO, advantages=gdpo))
  drawn, batch = prepared(config, task)
  both = [drawn.scores.components[name].reshape(4, 4) for name in ("spoilt", "length")]
  where = np.broadcast_to(~np.isnan(both[0]), (2, 4, 4))
  want = gdpo(jnp.nan_to_num(jnp.asarray(both)), jnp.asarray(where[0])).reshape(16, 1)
  np.testing.assert_allclose(batch.advantages, want, rtol=1e-6)
  assert (batch.advantages != 0).any()
  blind = lambda component_rewards: gdpo(component_rewards, jnp.ones((4, 4), bool))
  _, unaware = prepared(with_(CONFIG, objective=replace(rl.GRPO, advantages=blind)), task)
  assert not unaware.advantages[4:8].any()
  others = np.delete(np.arange(16), range(4, 8))
  np.testing.assert_allclose(unaware.advantages[others], batch.advantages[others], rtol=1e-6)


def test_a_greedy_response_that_cannot_be_scored_costs_its_group_only() -> None:
  """Prompt 0 has no greedy reward: the first call of the rewards is of samples, 16 rows."""

  def reward(responses: Any) -> np.ndarray:
    values = np.array(TASK.rewards[0].function(responses), float)
    if len(values) == 4:
      values[0] = np.nan
    return values

  task = replace(TASK, rewards=(Component("odd", reward),))
  ((state, report),) = run(with_(CONFIG, steps=1, objective=rl.REMAX), task)
  assert np.isfinite(state.params).all()
  assert (state.params != PARAMS).any()
  assert (int(state.skipped), int(report.scored.total)) == (0, 16)
  call = {"seed": 7, "step": 0, "cursor": 0, "greedy": True}
  drawn = rollouts.rollout(POLICY, task, CONFIG.rollout, **call)
  assert drawn.scorable.tolist() == [False] * 4 + [True] * 12
  assert not batches.counted(CONFIG, drawn)[:4].any()
  assert not drawn.signal[0]


def test_rewards_too_large_to_square_are_named() -> None:
  task = replace(TASK, rewards=(Component("large", lambda x: 1e20 * TASK.rewards[0].function(x)),))
  ((_, report),) = run(with_(CONFIG, steps=1), task)
  assert any("a reward is 1e+20 in size" in text for text in report.warnings)


def test_unfinished_responses_can_be_dropped_from_the_loss_only() -> None:
  drawn, batch = prepared(with_(CONFIG, drop_unfinished=True))
  _, whole = prepared(CONFIG)
  finished = drawn.samples.finished
  assert 0 < finished.sum() < 16
  np.testing.assert_array_equal(batch.mask.any(axis=1), finished)
  np.testing.assert_array_equal(batch.advantages, whole.advantages)


# ------------------------------------------------------------------------- log-probs and batches


def test_old_logprobs_are_the_scorers_and_the_samplers_are_of_what_it_drew_from() -> None:
  config = with_(CONFIG, top_p=0.8, importance=partial(rl.truncated, cap=2.0), kl=rl.kl_k2)
  drawn, batch = prepared(config)
  np.testing.assert_allclose(batch.old_logprobs, drawn.samples.untruncated_logprobs, atol=1e-6)
  np.testing.assert_array_equal(batch.sampler_logprobs, drawn.samples.logprobs)
  gap = (batch.sampler_logprobs - batch.old_logprobs)[batch.mask]
  assert gap.min() > -1e-6
  assert gap.max() > 0.1
  weights = np.where(batch.mask, np.exp(batch.old_logprobs - batch.sampler_logprobs), 0)
  np.testing.assert_allclose(batch.importance_weights, weights, rtol=1e-6)
  uniform = np.where(batch.mask, -np.log(VOCABULARY), 0)
  np.testing.assert_allclose(batch.ref_logprobs, uniform, rtol=1e-6)


def test_the_sampler_and_the_scorer_share_a_temperature() -> None:
  """On-policy, the two log-probs differ by rounding; at another temperature by 0.1 nats or more."""

  class Caught(Exception):
    pass

  def update(state: Any, batch: Any, key: Any) -> Any:
    raise Caught(batch)

  config = with_(CONFIG, temperature=0.5)
  state = init_state(config.update, PARAMS)
  with pytest.raises(Caught) as caught:
    next(training._steps(POLICY, TASK, config, state, None, update, Placement()))
  (batch,) = caught.value.args
  np.testing.assert_allclose(batch.old_logprobs, batch.sampler_logprobs, atol=1e-5)
  plain = np.asarray(jax.nn.log_softmax(PARAMS, axis=-1))
  second = plain[batch.tokens[:, 0], batch.tokens[:, 1]]
  assert np.abs(second - batch.old_logprobs[:, 1])[batch.mask[:, 1]].max() > 0.1


def test_a_truncated_sampler_without_a_correction_is_one_warning(straight: list[Any]) -> None:
  reports = [report for _, report in run(with_(CONFIG, steps=2, top_p=0.8))]
  said = [sum("old_logprobs of the whole one" in x for x in r.warnings) for r in reports]
  assert said == [1, 0]
  assert straight[0][1].warnings == ()


def test_a_kl_in_the_reward_is_of_tokens_or_of_their_sum() -> None:
  terms = {"reward_kl": rl.kl_k1, "reward_kl_coef": 0.5}
  drawn, batch = prepared(with_(CONFIG, objective=rl.REINFORCE, **terms))
  kl = np.where(batch.mask, batch.old_logprobs - batch.ref_logprobs, 0)
  want = drawn.scores.total - 0.5 * kl.sum(axis=1)
  np.testing.assert_allclose(batch.advantages[:, 0], want, rtol=1e-5)
  drawn, batch = prepared(with_(CONFIG, objective=rl.REINFORCE_PP, **terms))
  mask = jnp.asarray(batch.mask)
  token_rewards = rl.terminal_rewards(jnp.asarray(drawn.scores.total), mask) - 0.5 * kl
  want = rl.whitened_returns(token_rewards, mask)
  np.testing.assert_allclose(batch.advantages, want, rtol=1e-4, atol=1e-6)


def test_advantages_can_be_transformed() -> None:
  _, plain = prepared(CONFIG)
  _, batch = prepared(with_(CONFIG, advantage_transform=rl.whiten))
  whole = jnp.broadcast_to(plain.advantages, plain.mask.shape)
  np.testing.assert_allclose(batch.advantages, rl.whiten(whole, jnp.asarray(plain.mask)), rtol=1e-5)


def test_minibatches_are_whole_groups_with_the_old_logprobs_of_the_step() -> None:
  """Old log-probs that were made anew for each minibatch would leave a ratio of 1 for ever."""
  config = with_(CONFIG, objective=replace(rl.GRPO, loss_weights=rl.token_mean), epochs=3)
  _, batch = prepared(config)
  batch = batch._replace(sampler_logprobs=np.arange(16.0)[:, None] + np.zeros((1, 3)))
  parts = list(batches.minibatches(config, batch, 0, Placement()))
  assert len(parts) == 6
  orders = []
  for part in parts:
    rows = np.asarray(part.sampler_logprobs[:, 0], int)
    assert rows.reshape(2, 4).tolist() == [list(range(r, r + 4)) for r in rows[::4]]
    np.testing.assert_array_equal(part.old_logprobs, batch.old_logprobs[rows])
    np.testing.assert_array_equal(part.advantages, batch.advantages[rows])
    np.testing.assert_allclose(part.loss_weights, part.mask / part.mask.sum(), rtol=1e-6)
    orders += (rows[::4] // 4).tolist()
  assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in np.reshape(orders, (3, 4)).tolist())
  later = list(batches.minibatches(config, batch, 1, Placement()))
  assert [p.sampler_logprobs[::4, 0].tolist() for p in later] != [
    p.sampler_logprobs[::4, 0].tolist() for p in parts
  ]


def test_weights_per_group_see_the_groups() -> None:
  weights = rl.group_token_mean
  config = with_(CONFIG, objective=replace(rl.GRPO, loss_weights=weights), minibatches=1, epochs=1)
  _, batch = prepared(config)
  (part,) = batches.minibatches(config, batch, 0, Placement())
  tokens = part.mask.reshape(4, -1).sum(axis=1)
  assert len(set(tokens.tolist())) > 1
  np.testing.assert_allclose(part.loss_weights.reshape(4, -1).sum(axis=1), 0.25, rtol=1e-6)


# ---------------------------------------------------------------------------------------- reports


def test_a_report_holds_sums_counts_and_texts(straight: list[Any]) -> None:
  for step, (_, report) in enumerate(straight):
    assert report.step == step
    assert set(report.rewards) == {"modular_sum", "total"}
    assert int(report.rewards["total"].count) == int(report.finished.count) == 16
    assert int(report.lengths.total) == report.tokens
    assert set(report.seconds) == {"sampling", "scoring", "update"}
    assert min(report.seconds.values()) > 0
    indices = data_order.prompt_indices(3, seed=7, cursor=4 * step, count=4)
    assert [sample.prompt for sample in report.samples] == [TASK.prompts[i].text for i in indices]
    for sample in report.samples:
      assert sample.length == len(sample.text.split())
      assert sample.rewards["total"] == sample.rewards["modular_sum"]
    if report.metrics is not None:
      assert int(report.metrics.loss.count) == 4


def test_dynamic_sampling_that_finds_nothing_ends(straight: list[Any]) -> None:
  ((state, report),) = run(with_(CONFIG, steps=1, attempts=3), constant(0.0))
  assert (int(state.cursor), report.discarded) == (12, 8)
  assert_same_bits(state.params, PARAMS)
  assert any("after 12 prompts only 0 of 4 groups" in text for text in report.warnings)


# -------------------------------------------------------------------------------------- bad input


class Untouchable(Bigram):
  def apply(self, *args: Any, **options: Any) -> Any:
    raise AssertionError("it was run")


LONG = Task((Prompt("short", (0,)), Prompt("long", (0,) * 254)), (), TASK.rewards)


@pytest.mark.parametrize(
  ("changes", "task", "message"),
  [
    ({"group_size": 1}, TASK, "with group_size = 1 .* 0 whatever the rewards"),
    ({}, LONG, "254 tokens, .* context of 256: 'long'"),
    ({"stop_tokens": None}, TASK, "there is no tokenizer"),
    ({"stop_tokens": (9,)}, TASK, r"stop_tokens must lie in the vocabulary \[0, 4\), got \[9\]"),
    ({"top_k": 5}, TASK, "top_k must lie in"),
    (
      {},
      Task((*TASK.prompts, Prompt("odd", (1, 4))), (), TASK.rewards),
      r"vocabulary \[0, 4\), got \[4\] in 'odd'",
    ),
    ({"objective": rl.PPO}, TASK, "take values, so update.critic must be given"),
    (
      {"overlong": lambda x: -x},
      Task(TASK.prompts, (), (Component("overlong", len),)),
      "called 'overlong'",
    ),
  ],
)
def test_what_cannot_run_is_said_before_anything_is_drawn(
  changes: dict[str, Any], task: Task, message: str
) -> None:
  policy = POLICY._replace(model=Untouchable(VOCABULARY))
  with pytest.raises(ValueError, match=message):
    train(policy, task, with_(CONFIG, **changes))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"minibatches": 3}, "minibatches = 3 does not divide num_prompts = 4"),
    ({"temperature": 0.0}, "temperature must lie in"),
    ({"seed": -1}, "seed must lie in"),
    ({"epochs": 0}, "epochs must lie in"),
    ({"micro_batches": 0}, "micro_batches must lie in"),
    ({"max_grad_norm": 0.0}, "max_grad_norm must lie in"),
    ({"top_p": 1.5}, "top_p must lie in"),
    ({"seed": 2**63}, "seed must lie in"),
    ({"selection": partial(rl.clip_cov_selection, fraction=0.1)}, "takes no `selected`"),
    (
      {"reward_kl": rl.kl_k1, "objective": replace(rl.GRPO, advantages=gdpo)},
      "component_rewards, which it is not taken off",
    ),
    ({"reward_kl_coef": 0.1}, "reward_kl_coef is given but reward_kl is None"),
  ],
)
def test_configs_that_cannot_be(changes: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    with_(CONFIG, **changes)


def test_a_group_of_one_is_fine_where_nothing_is_compared() -> None:
  policy = POLICY._replace(model=Untouchable(VOCABULARY))
  train(policy, TASK, with_(CONFIG, group_size=1, objective=rl.REINFORCE))


@pytest.mark.parametrize(
  "slot",
  [
    lambda rewards: jnp.maximum(rewards - 3, 0.0),
    lambda rewards, mask: rewards * mask * jnp.array([1.0, 0.5, 0.25])[None, None],
  ],
)
def test_any_slot_that_can_teach_is_taken(slot: Any) -> None:
  policy = POLICY._replace(model=Untouchable(VOCABULARY))
  train(policy, TASK, with_(CONFIG, objective=replace(rl.GRPO, advantages=slot)))


def test_a_run_can_be_made_longer_and_show_more() -> None:
  assert differences(settings(CONFIG), settings(with_(CONFIG, steps=9, shown=1))) == []
  assert differences(settings(CONFIG), settings(with_(CONFIG, micro_batches=1)))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"importance": lambda log_weights, mask: log_weights[0]}, r"\[N, T\] \(16, 3\) or"),
    ({"importance": lambda log_weights, mask: log_weights + jnp.inf}, "must return finite weights"),
    ({"overlong": lambda lengths: np.full(16, -np.inf)}, "overlong must return .* finite"),
    ({"overlong": lambda lengths: np.zeros(3)}, r"got shape \(3,\)"),
  ],
)
def test_functions_that_return_what_cannot_be_are_named(changes: Any, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    prepared(with_(CONFIG, **changes))


def test_a_slot_that_asks_for_what_there_is_not() -> None:
  mine = replace(rl.GRPO, advantages=lambda rewards, budget: rewards)
  with pytest.raises(TypeError, match="budget"):
    train(POLICY, TASK, with_(CONFIG, objective=mine))


def test_the_keys_of_selections_are_no_keys_of_samples() -> None:
  keys = [
    training._selection_key(seed, step, number)
    for seed in range(2)
    for step in range(3)
    for number in range(3)
  ]
  steps = [jax.random.fold_in(jax.random.key(seed), step) for seed in range(2) for step in range(3)]
  keys += steps + [jax.random.fold_in(key, row) for key in steps for row in range(3)]
  assert len(np.unique([jax.random.key_data(key) for key in keys], axis=0)) == len(keys)
