"""The command line of `experiments.train`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from configs.train import CONFIGS
from experiments.harness import compilation_cache, run
from experiments.train import main
from jaxrl_lm.lm.checkpoints import CheckpointError
from jaxrl_lm.lm.reward_errors import RewardError


def command(arguments: Sequence[str] | None = None) -> None:
  """Trains; what goes wrong is said in words.

  Raises:
    SystemExit: 1 when the golden is missed, 2 when something is wrong, 130 and 143 when the run was
      told to stop and has saved what it did.
  """
  compilation_cache.switch_on()
  try:
    run.cli(main, CONFIGS, arguments)
  except RewardError as error:
    if error.__cause__ is not None:  # the line of the reward function that failed
      traceback.print_exception(error.__cause__)
    print(f"{error}\nThe steps before are saved; the same command continues.", file=sys.stderr)
    raise SystemExit(2) from None
  except (CheckpointError, OSError, ValueError, TypeError, ImportError) as error:
    print(error, file=sys.stderr)
    raise SystemExit(2) from None
