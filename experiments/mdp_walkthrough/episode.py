"""The episode of one response: what its page and its view in the terminal show."""

from __future__ import annotations

from typing import Any

import numpy as np

from configs.mdp_walkthrough import Config
from experiments.harness.shared_policy import reference_policy
from jaxrl_lm.exact import (
  Language,
  enumerate_language,
  expected_reward,
  modular_sum_reward,
  response_probs,
  token_values,
)

END = "end"


def episode(config: Config) -> dict[str, Any]:
  """All numbers of one response, exactly.

  Args:
    config: the settings.

  Returns:
    prompt, and token_names [V]: text. correct [prompts]: P(correct) of each prompt. reward: of the
    response, prob: of it. steps: one per token, each with action (a token id), reward, value of
    the state, and over all tokens that could have followed, [V]: probs, action_values, advantages.

  Raises:
    ValueError: there is no such prompt, or the language has no such response.
  """
  language, row = chosen(config)
  prompt, end = config.prompt, language.end_token
  policy = reference_policy(
    config.policy,
    language,
    prompts=len(config.targets),
    seed=config.seed,
    concentration=config.concentration,
  )
  rewards = modular_sum_reward(language, config.targets)
  logprobs = policy.logprobs()
  values, action_values, advantages = (
    np.asarray(x[prompt]) for x in token_values(language, logprobs, rewards)
  )
  steps = []
  for t, token in enumerate(config.response):
    taken = rows_after(language, config.response[:t]), t  # one response for each next token
    steps.append(
      {
        "action": token,
        "reward": float(rewards[prompt, row]) if t == len(config.response) - 1 else 0.0,
        "value": float(values[row, t]),
        "probs": np.exp(logprobs[prompt][taken]),
        "action_values": action_values[taken],
        "advantages": advantages[taken],
      }
    )
  return {
    "prompt": f"Write digits that sum to {config.targets[prompt]} modulo {end}, then end.",
    "token_names": [*map(str, range(end)), END],
    "correct": expected_reward(language, logprobs, rewards),
    "reward": float(rewards[prompt, row]),
    "prob": float(response_probs(language, logprobs)[prompt, row]),
    "steps": steps,
  }


def chosen(config: Config) -> tuple[Language, int]:
  """The language, and which of its responses is walked through.

  Raises:
    ValueError: there is no such prompt, or the language has no such response.
  """
  if not 0 <= config.prompt < len(config.targets):
    raise ValueError(f"prompt must lie in [0, {len(config.targets)}), got {config.prompt}")
  end = config.vocabulary - 1
  language = enumerate_language(config.vocabulary, config.horizon, end_token=end)
  response = config.response
  padded = np.full(language.horizon, language.end_token)
  if 0 < len(response) <= language.horizon:
    padded[: len(response)] = response
    found = np.flatnonzero(
      (language.tokens == padded).all(axis=1) & (language.lengths == len(response))
    )
    if len(found):
      return language, int(found[0])
  raise ValueError(
    f"the response must be tokens in [0, {config.vocabulary}), up to and including the end token "
    f"{end} or {config.horizon} of them without it, got {response}"
  )


def rows_after(language: Language, prefix: tuple[int, ...]) -> np.ndarray:
  """[V] one response that goes on with each token after the prefix."""
  t = len(prefix)
  through = (language.tokens[:, :t] == np.array(prefix, int)).all(axis=1) & language.mask[:, t]
  tokens, first = np.unique(language.tokens[through, t], return_index=True)
  assert len(tokens) == language.vocabulary
  rows: np.ndarray = np.flatnonzero(through)[first]
  return rows
