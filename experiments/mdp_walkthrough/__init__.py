"""One response as an episode: state, action, append, reward, step by step.

Claim: generating a response is a Markov decision process. The state is the prompt and the tokens
so far, the action is the next token, the transition appends it, the reward comes once, at the end.
Added here: the exact value of every state and the exact advantage of every token, beside the one
number that an outcome reward gives to all of them.

Setting: a language of 5 tokens (four digits and an end), up to 6 tokens; the prompt asks for digits
that sum to a target modulo 4; the policy is the reference by counting, as in
`experiments.length_bias`. Configs: `shared`, a network instead of the table; `small`, for the test.
Another response: `--response 2 1 0 4 --prompt 3`.

Time: 10 seconds on a CPU.

Command: python -m experiments.mdp_walkthrough [full | shared | small]

It prints the episode, and writes walkthrough.html: one page without a network, stepped through by
keyboard (arrows, Home, End) or mouse.

Expected (goldens):
  V of the prompt       P(correct): 0.1672 0.1968 0.1420 0.2901
  V(s_t)                sum_a pi(a | s_t) Q(s_t, a)
  Q(s_t, a_t)           V(s_{t+1}), or the reward: appending is deterministic
  sum_t A_t             r - V(x), what REINFORCE gives to every token
  GAE, exact critic     lambda 0: A_t, lambda 1: r - V(s_t)
  sum_t log pi          log pi(y | x), the one action of the sequence bandit
Hypothesis: every token of a right answer made it more likely. Contradicted: one of five halved it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import jaxrl_lm as rl
from configs.mdp_walkthrough import FULL, Config
from experiments.harness import run, storage
from experiments.mdp_walkthrough import episode, page, terminal

PAGE = "walkthrough.html"
ROUNDING = 1e-12


def main(config: Config = FULL, *, out: Path | None = None) -> dict[str, Any]:
  """Measures, compares with what is expected, draws, writes the page, prints the episode.

  Args:
    config: the settings.
    out: folder of the results; None = results/mdp_walkthrough.

  Returns:
    The summary.

  Raises:
    ValueError: there is no such prompt, or the language has no such response.
  """
  episode.chosen(config)  # a wrong one is told before anything is written
  with run.open("mdp_walkthrough", config, out) as experiment:
    walk = experiment.part("episode", lambda: episode.episode(config))
    _expect(experiment, config, walk)
    storage.write(experiment.out / PAGE, page.render(walk))
    experiment.figure("episode", page.draw(walk))
  terminal.show(walk)
  print(experiment.out / PAGE)
  return experiment.summary


def _expect(experiment: run.Experiment, config: Config, walk: dict[str, Any]) -> None:
  steps = walk["steps"]
  column = {name: np.array([step[name] for step in steps]) for name in steps[0]}
  chosen = np.arange(len(steps)), column["action"]
  mask = np.ones(len(steps), bool)

  def golden(name: str, measured: Any, expected: Any) -> None:
    experiment.golden(name, measured, expected, atol=ROUNDING)

  if config.known is not None:
    experiment.golden("V of every prompt is P(correct)", walk["correct"], config.known)
  golden("V(x) is P(correct) of this prompt", column["value"][0], walk["correct"][config.prompt])
  golden("pi sums to 1 in every state", column["probs"].sum(axis=1), np.ones(len(steps)))
  average = (column["probs"] * column["action_values"]).sum(axis=1)
  golden("V(s) is the mean of Q(s, a)", average, column["value"])
  after = np.append(column["value"][1:], walk["reward"])
  golden("Q(s, a) is V after appending a", column["action_values"][chosen], after)
  advantages = column["advantages"][chosen]
  golden("A_t sum to r - V(x)", advantages.sum(), walk["reward"] - column["value"][0])
  for decay, credit in ((0.0, advantages), (1.0, walk["reward"] - column["value"])):
    found = rl.gae(column["reward"], column["value"], mask, gae_lambda=decay)
    golden(f"GAE with the exact critic, lambda {decay:g}", found, credit)
  golden(
    "log pi of the tokens sum to log pi(y | x)",
    np.log(column["probs"][chosen]).sum(),
    np.log(walk["prob"]),
  )
  if walk["reward"] > 0:
    experiment.hypothesis(
      "advantages of the tokens of a right answer",
      "above 0: each token made it more likely, as the one reward for all of them says",
      advantages,
      np.all(advantages > 0),
      source="an outcome reward",
      explanation="one token can lower V and a later one make up for it: the outcome is of both",
    )
