r"""Responses of a step: sampled, decoded, rewarded, and chosen if only groups with signal count.

Row p G + g is sample g of prompt p, from here to the advantages: a group is never taken apart
before they are made. Everything drawn is a function of (seed, step, row); the prompts are one of
(seed, cursor). The ids that were sampled are the ids that are trained on: text is for rewards only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import advantages, checks, masks
from jaxrl_lm.lm import data_order, sampling, tasks
from jaxrl_lm.lm.decoding import Samples
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.tasks import Prompt, Responses, Scores, Task


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """How the responses of a step are drawn and what becomes of the odd ones.

  Attributes:
    num_prompts: P, groups in a step. With fewer prompts in the task some stand in it twice.
    group_size: G, responses to each prompt.
    max_new_tokens: T, the longest response, its stop token included.
    stop_tokens: ids that end a response; () = each has T tokens; None = those of the tokenizer.
    top_k, top_p, min_p: truncation of the sampler, as of `sampling.sample`; off. It makes the
      samples off-policy for the loss, which scores the whole distribution.
    attempts: times P prompts that are drawn, at most, for P groups whose rewards differ (dynamic
      sampling); 1 = every group is taken as it comes.
    overlong: lengths [N] -> what is added to the rewards (`overlong_penalty` with its constants
      bound); None = nothing.
    drop_unfinished: leave responses without a stop token out of the loss. Their rewards still
      count for the rest of their group.
  """

  num_prompts: int
  group_size: int
  max_new_tokens: int
  stop_tokens: tuple[int, ...] | None = None
  top_k: int | None = None
  top_p: float = 1.0
  min_p: float = 0.0
  attempts: int = 1
  overlong: Callable[[Any], Any] | None = None
  drop_unfinished: bool = False

  def __post_init__(self) -> None:
    """Checks the sizes."""
    for name in ("num_prompts", "group_size", "max_new_tokens", "attempts"):
      checks.check_range(name, getattr(self, name), low=1)
    for name in ("top_p", "min_p"):
      checks.check_range(name, getattr(self, name), low=0.0, high=1.0)

  @property
  def rows(self) -> int:
    """N = P G."""
    return self.num_prompts * self.group_size

  @property
  def truncated(self) -> bool:
    """Whether the sampler draws from less than the whole distribution."""
    return self.top_k is not None or self.top_p < 1 or self.min_p > 0


class Rollout(NamedTuple):
  """P groups of G responses, N = P G rows; arrays of NumPy.

  Attributes:
    prompts, prompt_mask: [N, W], padded on the left to the longest prompt of the task.
    samples: [N, T].
    responses: the same, decoded.
    scores: their rewards; "overlong" is a component where it is configured, and in the total.
    component_rewards: [N, K] those of them that are in the total, in the task's order, not
      weighted; "overlong" is the last one.
    signal: [P] bool, whether the rewards of a group differ and the greedy response, if there is
      one, has a reward.
    greedy_rewards: [P] total of the greedy response to each prompt, or None.
    consumed: prompts that were drawn, P for every attempt.
    discarded: groups that were drawn and left out.
  """

  prompts: np.ndarray
  prompt_mask: np.ndarray
  samples: Samples
  responses: Responses
  scores: Scores
  component_rewards: np.ndarray
  signal: np.ndarray
  greedy_rewards: np.ndarray | None
  consumed: int
  discarded: int

  @property
  def scorable(self) -> np.ndarray:
    """[N] whether a reward is known, and that of the greedy response it is compared with."""
    known = ~np.isnan(self.scores.total)
    if self.greedy_rewards is not None:
      known &= np.repeat(~np.isnan(self.greedy_rewards), len(known) // len(self.greedy_rewards))
    return known


def rollout(
  policy: Pretrained,
  task: Task,
  config: RolloutConfig,
  *,
  seed: int,
  step: int,
  cursor: int,
  temperature: float = 1.0,
  greedy: bool = False,
  place: Callable[[Any], Any] = jnp.asarray,
) -> Rollout:
  """Draws and rewards the responses of one step.

  With several attempts, groups without signal are replaced by the next prompts' until there are P
  with signal or the attempts are used up; what is then missing is filled with groups without. The
  prompts of all attempts are consumed.

  Args:
    policy: model, parameters and tokenizer (or None).
    task: prompts and rewards.
    config: sizes and truncation.
    seed: of the run.
    step: of the run.
    cursor: prompts consumed before this step.
    temperature: of the sampler, > 0.
    greedy: also reward the greedy response to each prompt.
    place: puts rows on the devices.

  Returns:
    The rollout.

  Raises:
    ValueError: as of `check_rollout`; a reward fails (`RewardError`).
  """
  run, size = _Run(policy, task, config, place), config.num_prompts
  drawn: list[Rollout] = []
  for attempt in range(config.attempts):
    taken = cursor + attempt * size
    indices = data_order.prompt_indices(len(task.prompts), seed=seed, cursor=taken, count=size)
    prompts = [task.prompts[i] for i in indices]
    # Rows are numbered through all attempts of a step: each has noise of its own.
    ids = attempt * config.rows + np.arange(config.rows)
    call = {"seed": seed, "step": step, "row_ids": ids, "temperature": temperature}
    drawn.append(_attempt(run, prompts, call, greedy))
    if sum(int(part.signal.sum()) for part in drawn) >= size:
      break
  return drawn[0] if len(drawn) == 1 else _selected(drawn, config)


def check_rollout(policy: Pretrained, task: Task, config: RolloutConfig) -> None:
  """What would fail in some step, or spoil every one, fails before the first.

  Args:
    policy: model, parameters and tokenizer.
    task: prompts and rewards.
    config: sizes.

  Returns:
    None.

  Raises:
    ValueError: a prompt leaves no room for T tokens in the context (the message names it), there
      is no stop token and the config does not say that there shall be none, a token or top_k is
      outside of the vocabulary, or two rewards would share a name.
  """
  context = policy.model.config.max_length
  longest = max(task.prompts, key=lambda prompt: len(prompt.tokens))
  if len(longest.tokens) + config.max_new_tokens > context:
    raise ValueError(
      f"a prompt has {len(longest.tokens)} tokens, which with max_new_tokens = "
      f"{config.max_new_tokens} is more than the model's context of {context}: {longest.text!r}"
    )
  _check_vocabulary(policy.model.config.vocab_size, task, stop_tokens(policy, config))
  if config.top_k is not None:
    checks.check_range("top_k", config.top_k, low=1, high=policy.model.config.vocab_size)
  if config.overlong is not None and any(reward.name == "overlong" for reward in task.rewards):
    raise ValueError("a reward of the task is called 'overlong', as the penalty of the config is")


def _check_vocabulary(size: int, task: Task, stop_tokens: tuple[int, ...]) -> None:
  for prompt in (*task.prompts, *task.held_out):
    if outside := [token for token in prompt.tokens if not 0 <= token < size]:
      raise ValueError(
        f"tokens of a prompt must lie in the vocabulary [0, {size}), got {outside[:8]} in "
        f"{prompt.text!r}"
      )
  if outside := [token for token in stop_tokens if not 0 <= token < size]:
    raise ValueError(f"stop_tokens must lie in the vocabulary [0, {size}), got {outside[:8]}")


def stop_tokens(policy: Pretrained, config: RolloutConfig) -> tuple[int, ...]:
  """The ids that end a response.

  Args:
    policy: whose tokenizer knows them.
    config: which may say otherwise.

  Returns:
    Ids.

  Raises:
    ValueError: neither names any.
  """
  if config.stop_tokens is not None:
    return tuple(config.stop_tokens)
  ids = () if policy.tokenizer is None else tuple(policy.tokenizer.eos_ids)
  if not ids:
    missing = "there is no tokenizer" if policy.tokenizer is None else "the tokenizer has no EOS"
    raise ValueError(
      f"stop_tokens is None and {missing}: name the ids that end a response, or () if every "
      f"response shall have {config.max_new_tokens} tokens"
    )
  return ids


def in_total(task: Task, config: RolloutConfig) -> list[str]:
  """The rewards that are summed.

  Args:
    task: its rewards.
    config: which may add a penalty.

  Returns:
    Names, in the order of `Rollout.component_rewards`.
  """
  names = [component.name for component in task.rewards if component.weight]
  return names if config.overlong is None else [*names, "overlong"]


class _Run(NamedTuple):
  """Of the arguments of `rollout`, those that all attempts share."""

  policy: Pretrained
  task: Task
  config: RolloutConfig
  place: Callable[[Any], Any]


def _attempt(run: _Run, prompts: list[Prompt], call: dict[str, Any], greedy: bool) -> Rollout:
  """G responses to each of P prompts, and their rewards."""
  config = run.config
  truncation = {"top_k": config.top_k, "top_p": config.top_p, "min_p": config.min_p}
  rows = [prompt for prompt in prompts for _ in range(config.group_size)]
  tokens, mask, samples = _drawn(run, rows, **truncation, **call)
  responses, scores = _judged(run, rows, samples)
  greedy_rewards, signal = None, _signal(scores.total, config.group_size)
  if greedy:
    *_, best = _drawn(run, prompts, seed=0, temperature=0.0)
    greedy_rewards = _judged(run, prompts, best)[1].total
    signal = signal & ~np.isnan(greedy_rewards)
  return Rollout(
    prompts=tokens,
    prompt_mask=mask,
    samples=samples,
    responses=responses,
    scores=scores,
    component_rewards=np.stack([scores.components[x] for x in in_total(run.task, config)], axis=-1),
    signal=signal,
    greedy_rewards=greedy_rewards,
    consumed=len(prompts),
    discarded=0,
  )


def _drawn(run: _Run, prompts: list[Prompt], **how: Any) -> tuple[Any, Any, Samples]:
  """Padded prompts, their mask and a response to each, as NumPy arrays."""
  # The width of the longest prompt of all: one shape, one compilation.
  width = max(len(prompt.tokens) for prompt in run.task.prompts)
  tokens, mask = sampling.pad_prompts([prompt.tokens for prompt in prompts], length=width)
  samples = sampling.sample(
    run.policy.model,
    run.policy.params,
    run.place(tokens),
    run.place(mask),
    max_new_tokens=run.config.max_new_tokens,
    stop_tokens=stop_tokens(run.policy, run.config),
    **how,
  )
  return np.asarray(tokens), np.asarray(mask), jax.tree.map(np.asarray, samples)


def _judged(run: _Run, prompts: list[Prompt], samples: Samples) -> tuple[Responses, Scores]:
  """Responses as text, and their rewards, the penalty for length included."""
  drawn = samples.tokens, samples.mask, samples.finished
  responses = tasks.decode_responses(prompts, *drawn, run.policy.tokenizer)
  scores = tasks.score(run.task, responses)
  if run.config.overlong is None:
    return responses, scores
  penalty = np.asarray(run.config.overlong(masks.lengths(samples.mask)), np.float32)
  if penalty.shape != scores.total.shape or not np.isfinite(penalty).all():
    raise ValueError(
      f"overlong must return {scores.total.shape} finite numbers, got shape {penalty.shape}: "
      f"{penalty.reshape(-1)[:8].tolist()}"
    )
  components = {**scores.components, "overlong": penalty}
  return responses, Scores(components, scores.total + penalty)


def _signal(total: np.ndarray, group_size: int) -> np.ndarray:
  """[P] whether the rewards of a group differ, those that could be given."""
  rewards = total.reshape(-1, group_size)
  return np.asarray(_has_signal(rewards, where=~np.isnan(rewards)))


_has_signal = jax.jit(advantages.has_signal)


def _selected(drawn: list[Rollout], config: RolloutConfig) -> Rollout:
  """P of the groups of all attempts: those with signal first, each kind as it came."""
  size = config.num_prompts
  signal = np.concatenate([part.signal for part in drawn])
  groups = np.argsort(~signal, kind="stable")[:size]
  rows = (groups[:, None] * config.group_size + np.arange(config.group_size)[None]).reshape(-1)

  def picked(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)[rows]

  def of(field: str) -> Any:
    return jax.tree.map(picked, *(getattr(part, field) for part in drawn))

  prompts = [prompt for part in drawn for prompt in part.responses.prompts]
  texts = [text for part in drawn for text in part.responses.texts]
  samples = of("samples")
  responses = Responses(
    [prompts[i] for i in rows],
    samples.tokens,
    samples.mask,
    samples.finished,
    [texts[i] for i in rows],
  )
  greedy = None
  if drawn[0].greedy_rewards is not None:
    greedy = np.concatenate([part.greedy_rewards for part in drawn])[groups]
  return Rollout(
    of("prompts"),
    of("prompt_mask"),
    samples,
    responses,
    of("scores"),
    of("component_rewards"),
    signal[groups],
    greedy,
    consumed=size * len(drawn),
    discarded=size * (len(drawn) - 1),
  )
