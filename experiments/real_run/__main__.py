"""Real run: GRPO on GSM8K with Qwen2.5-0.5B or Qwen3-0.6B, on one TPU v5e-8 or one H200.

Claim: none about rewards. No such run has been made: there were no weights and no such machine.
What is claimed is that every program of a step traces, is partitioned over the mesh and compiles
for it, and that its memory fits the devices; `--check` shows that, on any CPU, without weights.
Setting: GRPO with a KL to the start, float32 weights and moments in shards, bfloat16 activations,
each layer recomputed in the backward pass, log-probs from tiles of the logits.
Time: the check takes a minute for each configuration; the length of a run is not known.
Expected: every configuration fits nine tenths of its devices' memory; one that does not exits
with 1.
Command: python -m experiments.real_run --check [NAME ...]
  python -m experiments.real_run NAME --model FOLDER --problems gsm8k/train.jsonl --out FOLDER
FOLDER of --model is a local copy of the Hugging Face repository; the run goes on after a kill.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console

from configs.real_runs import CONFIGS
from experiments.real_run import loop, memory

HOST_DEVICES = max(config.machine.count for config in CONFIGS.values())


def check(names: Sequence[str]) -> bool:
  """Prints the memory of each; whether all fit."""
  console, fit = Console(), True
  for name in names:
    found = memory.need(CONFIGS[name])
    fit &= memory.fits(CONFIGS[name], found)
    console.print(memory.table(name, CONFIGS[name], found))
  console.print("Compiled for this CPU in place of the devices; nothing was allocated or run.")
  return fit


def cli(arguments: Sequence[str] | None = None) -> None:
  """The command line.

  Raises:
    SystemExit: 1 if a configuration does not fit, 2 if an argument is wrong.
  """

  def command(
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    check: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    model: Path | None = None,
    problems: Path | None = None,
    out: Path = Path("results/real_run"),
  ) -> tuple[tuple[str, ...], bool, Path | None, Path | None, Path]:
    """What the command line sets.

    Args:
      names: Configurations of configs/real_runs.py; of --check, default all.
      check: Compile, and compare memory with that of the devices.
      model: Folder of Hugging Face with the weights.
      problems: GSM8K's train.jsonl.
      out: Folder of checkpoints, steps.jsonl and the model; continued if it holds some.
    """
    return names, check, model, problems, out

  names, checks, model, problems, out = tyro.cli(
    command,
    args=arguments,
    prog="python -m experiments.real_run",
    description=re.sub(r"\n(?=\w+: )", "\n\n", __doc__),
  )
  try:
    if unknown := set(names) - set(CONFIGS):
      raise ValueError(
        f"no configuration {', '.join(sorted(unknown))}; there are {', '.join(CONFIGS)}"
      )
    if checks:
      jax.config.update("jax_platforms", "cpu")
      jax.config.update("jax_num_cpu_devices", HOST_DEVICES)
      raise SystemExit(0 if check(names or tuple(CONFIGS)) else 1)
    if len(names) != 1 or model is None or problems is None:
      raise ValueError("a run needs one configuration, --model and --problems; or --check")
    loop.main(CONFIGS[names[0]], model, problems, out)
  except (OSError, TypeError, ValueError, ImportError) as error:
    print(error, file=sys.stderr)
    raise SystemExit(2) from None


if __name__ == "__main__":
  cli()
