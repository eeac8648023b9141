"""The episode in a terminal: a panel per step, and what it adds up to."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_BAR = 20  # characters of a probability of 1


def show(walk: dict[str, Any], console: Console | None = None) -> None:
  """Prints the episode.

  Args:
    walk: from `episode`.
    console: where to; None = standard output.
  """
  console = console or Console(highlight=False)
  console.print(f"prompt: {walk['prompt']}")
  for t in range(len(walk["steps"])):
    console.print(_step(walk, t))
  console.print(_sum(walk))


def _step(walk: dict[str, Any], t: int) -> Panel:
  step, names = walk["steps"][t], walk["token_names"]
  written = [names[s["action"]] for s in walk["steps"][: t + 1]]
  state = Text.assemble(("state   ", "dim"), "prompt ", (" ".join(written[:-1]), "bold"))
  state.append(f"   V = {step['value']:.3f}", style="cyan")
  table = Table("", "token", "pi", "", "Q", "A", box=None, pad_edge=False)
  for token, (name, prob, q, a) in enumerate(
    zip(names, step["probs"], step["action_values"], step["advantages"], strict=True)
  ):
    taken = token == step["action"]
    bar = Text("█" * round(_BAR * prob), style="cyan" if taken else "dim")
    numbers = f"{prob:.3f}", bar, f"{q:.3f}", _signed(a)
    table.add_row("→" if taken else "", name, *numbers, style="bold" if taken else "")
  appended = Text.assemble(("append  ", "dim"), "prompt ", (" ".join(written), "bold"))
  after = f"V = {step['action_values'][step['action']]:.3f}"
  appended.append(f"   {'complete' if t == len(walk['steps']) - 1 else after}", "cyan")
  reward = Text.assemble(("reward  ", "dim"), f"{step['reward']:g}", ("   A = ", "dim"))
  reward.append(_signed(step["advantages"][step["action"]]))
  title = f"t = {t}: {written[-1]}"
  return Panel(Group(state, Text("action", "dim"), table, appended, reward), title=title, width=78)


def _sum(walk: dict[str, Any]) -> Table:
  """Credit of each token: exact, and what an outcome reward gives."""
  whole = walk["reward"] - walk["steps"][0]["value"]
  table = Table("t", "token", "log pi", "V", "A", "r - V(x)", title="credit", show_footer=True)
  total = 0.0
  for t, step in enumerate(walk["steps"]):
    a = step["advantages"][step["action"]]
    total += a
    name, logprob = walk["token_names"][step["action"]], _log(step["probs"][step["action"]])
    table.add_row(str(t), name, logprob, f"{step['value']:.3f}", _signed(a), _signed(whole))
  footers = ("", "sum", _log(walk["prob"]), "", _signed(total), "")
  for column, footer in zip(table.columns, footers, strict=True):
    column.footer = footer
  return table


def _signed(x: float) -> Text:
  return Text(f"{x:+.3f}", style="green" if x > 0 else "red" if x < 0 else "")


def _log(prob: float) -> str:
  return f"{math.log(prob):.3f}"
