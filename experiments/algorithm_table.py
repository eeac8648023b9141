"""Every named algorithm on one ragged batch: its loss, and who gets the gradient.

Claim: algorithms that share a name for their reduction or their ratio differ in which responses
they push, and by how much; the share of the gradient by response length shows it.
Setting: two prompts, four responses each, of 2, 4, 6 and 8 tokens; half of the responses are
correct; the policy has moved a little from the one that sampled. Everything is drawn from seed 0.
Time: under a minute on a CPU, nearly all of it compilation.
Expected: without a ratio, and with advantages of equal size, a sum or mean over tokens gives 2, 4,
6 and 8 tokens 0.1, 0.2, 0.3 and 0.4 of the gradient (REINFORCE, RLOO, OPO, GPG), and a mean per
response gives each 0.25 (TOPR, whose positive examples count in full). A miss exits with an error.
Command: python -m experiments.algorithm_table
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxrl_lm as rl
from jaxrl_lm import objectives

LENGTHS = (2, 4, 6, 8)
MAX_LENGTH = 16
TABLE_BEGINS = "<!-- the table of algorithms: make tables -->"
TABLE_ENDS = "<!-- end of the table -->"
PER_TOKEN_SHARES = (0.1, 0.2, 0.3, 0.4)
PER_RESPONSE_SHARES = (0.25, 0.25, 0.25, 0.25)
EXPECTED = dict.fromkeys(("REINFORCE", "RLOO", "OPO", "GPG"), PER_TOKEN_SHARES) | {
  "TOPR": PER_RESPONSE_SHARES
}


class Batch(NamedTuple):
  """One update batch of two groups of four; [2, 4] per response, [2, 4, 8] per token."""

  mask: jax.Array
  logprobs: jax.Array
  old_logprobs: jax.Array
  values: jax.Array
  rewards: jax.Array
  greedy_rewards: jax.Array


def ragged_batch(seed: int = 0) -> Batch:
  """The batch of the table, drawn from a seed."""
  rng = np.random.default_rng(seed)
  lengths = np.stack([LENGTHS, LENGTHS[::-1]])
  shape = (*lengths.shape, max(LENGTHS))
  old_logprobs = -rng.exponential(1.0, shape)
  return Batch(
    mask=jnp.asarray(np.arange(shape[-1]) < lengths[..., None]),
    logprobs=jnp.asarray(np.minimum(old_logprobs + rng.normal(0.0, 0.1, shape), -1e-3)),
    old_logprobs=jnp.asarray(old_logprobs),
    values=jnp.asarray(rng.uniform(0.0, 1.0, shape)),
    rewards=jnp.asarray([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]]),
    greedy_rewards=jnp.asarray([1.0, 0.0]),
  )


def named_objectives() -> dict[str, rl.Objective]:
  """The rows of `objectives`, in the order of the file; Dr. GRPO at a length of 16."""
  rows = {"DR_GRPO": rl.dr_grpo(MAX_LENGTH)}
  rows |= {name: x for name, x in vars(objectives).items() if isinstance(x, rl.Objective)}
  source = inspect.getsource(objectives)
  return dict(sorted(rows.items(), key=lambda row: _definition(row[0], source).start()))


def advantages_of(objective: rl.Objective, batch: Batch) -> jax.Array:
  """Calls the advantages slot with the arguments that its function needs; [2, 4, 1 or 8]."""
  rewards, mask = batch.rewards, batch.mask
  token_rewards = rl.terminal_rewards(rewards, mask)
  arguments: dict[Callable[..., Any], tuple[Any, ...]] = {
    rl.greedy_baseline: (rewards, batch.greedy_rewards),
    rl.length_weighted_baseline: (rewards, rl.lengths(mask)),
    rl.gae: (token_rewards, batch.values, mask),
    rl.whitened_returns: (token_rewards, mask),
    rl.whitened_group_centered: (rewards, mask),
  }
  advantages = objective.advantages(*arguments.get(objective.advantages, (rewards,)))
  return advantages if advantages.ndim == mask.ndim else advantages[..., None]


def selection_of(objective: rl.Objective, batch: Batch, advantages: jax.Array) -> jax.Array | None:
  """The batch-wide selection that the surrogate takes, if it takes one."""
  surrogate = getattr(objective.surrogate, "func", objective.surrogate)
  if surrogate is rl.kl_cov:
    return rl.kl_cov_selection(batch.logprobs, advantages, batch.mask, fraction=0.1)
  if surrogate is rl.clip_cov:
    log_ratio = rl.token_log_ratio(batch.logprobs, batch.old_logprobs, batch.mask)
    key = jax.random.key(0)
    return rl.clip_cov_selection(
      key, batch.logprobs, log_ratio, advantages, batch.mask, fraction=0.1, cov_low=0.0
    )
  return None


@partial(jax.jit, static_argnames="objective")
def loss_and_gradient(
  objective: rl.Objective, batch: Batch, advantages: jax.Array, selected: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Loss of the objective and its gradient in every token's log-prob."""

  def loss(logprobs: jax.Array) -> jax.Array:
    weights = objective.loss_weights(batch.mask)
    return rl.objective_loss(
      objective,
      logprobs,
      batch.old_logprobs,
      advantages,
      batch.mask,
      loss_weights=weights,
      selected=selected,
    )[0]

  return jax.value_and_grad(loss)(batch.logprobs)


def main(seed: int = 0) -> dict[str, dict[str, Any]]:
  """Evaluates every row of the table and prints it.

  Returns:
    {name: {"loss": float, "shares": [share of the gradient of each length]}}.
  """
  batch = ragged_batch(seed)
  edges = jnp.asarray(LENGTHS[1:])
  results = {}
  console = Console()
  rows = named_objectives()
  progress = partial(track, description="algorithms", console=console, transient=True)
  for name, objective in progress(rows.items()):
    advantages = advantages_of(objective, batch)
    selected = selection_of(objective, batch, advantages)
    loss, gradient = loss_and_gradient(objective, batch, advantages, selected)
    sums = np.asarray(rl.gradient_share_by_length(gradient, batch.mask, edges=edges))
    results[name] = {"loss": float(loss), "shares": (sums / sums.sum()).tolist()}
  table = Table(title="loss, and share of the gradient by response length")
  for column in ("algorithm", "loss", *(f"{n} tokens" for n in LENGTHS)):
    table.add_column(column, justify="left" if column == "algorithm" else "right", no_wrap=True)
  for name, row in results.items():
    table.add_row(name, f"{row['loss']:+.4f}", *(f"{share:.3f}" for share in row["shares"]))
  console.print(table)
  for name, shares in EXPECTED.items():
    if not np.allclose(results[name]["shares"], shares, atol=1e-5):
      raise SystemExit(f"{name}: expected shares {shares}, measured {results[name]['shares']}")
  console.print(f"as expected: shares of {', '.join(EXPECTED)} follow from the lengths alone")
  return results


def markdown() -> str:
  """The table of algorithms for the README: slots, and the comment of each row."""
  source = inspect.getsource(objectives)
  lines = ["| name | advantages | level | surrogate | loss weights | from |", "|---" * 6 + "|"]
  for name, objective in named_objectives().items():
    slots = (objective.advantages, objective.level, objective.surrogate, objective.loss_weights)
    cells = " | ".join(f"`{_spelled(slot)}`" for slot in slots)
    start = _definition(name, source).start()
    comment = re.search(r"(?:^#.*\n)+\Z", source[:start], re.MULTILINE)
    text = " ".join(line.lstrip("# ") for line in comment.group().splitlines())
    shown = "dr_grpo(length)" if name == "DR_GRPO" else name
    lines.append(f"| `{shown}` | {cells} | {text} |")
  return "\n".join(lines).replace(f"length={MAX_LENGTH}", "length")


def update_readme(readme: Path = Path(__file__).parents[1] / "README.md") -> None:
  """Writes the table of algorithms between its markers in the README (`make tables`)."""
  before, rest = readme.read_text().split(TABLE_BEGINS)
  after = rest.split(TABLE_ENDS)[1]
  readme.write_text(f"{before}{TABLE_BEGINS}\n{markdown()}\n{TABLE_ENDS}{after}")


def _definition(name: str, source: str) -> re.Match[str]:
  pattern = r"^def dr_grpo\(" if name == "DR_GRPO" else rf"^{name} = "
  return re.search(pattern, source, re.MULTILINE)


def _spelled(function: Any) -> str:
  """A function or a partial as one would write the call."""
  if not isinstance(function, partial):
    return function.__name__ if callable(function) else f"{function:g}"
  if function.func.__name__ == "_with_token_gradient":
    return f"with_token_gradient({_spelled(function.args[0])})"
  keywords = (f"{name}={_spelled(value)}" for name, value in function.keywords.items())
  return f"{function.func.__name__}({', '.join(keywords)})"


if __name__ == "__main__":
  main()
