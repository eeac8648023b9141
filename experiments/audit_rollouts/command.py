"""The command line, whose arguments are files where the experiments' are names of settings."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

import experiments.audit_rollouts as audit
from configs.audit_rollouts import FULL, Config
from experiments.harness import folder


def cli(arguments: Sequence[str] | None = None) -> None:
  """Audits the files that are named.

  Args:
    arguments: default sys.argv[1:].

  Raises:
    SystemExit: 1 when a golden is missed, 2 when a log, the folder or an argument is wrong.
  """

  def settings(
    files: tyro.conf.Positional[tuple[Path, ...]],
    config: Annotated[Config, tyro.conf.arg(name="")] = FULL,
    out: Path | None = None,
    fresh: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
  ) -> tuple[tuple[Path, ...], Config, Path | None, bool]:
    """What the command line sets.

    Args:
      files: The logs.
      config: How they are read and judged.
      out: Folder of the results; by default one below results/audit_rollouts for these files.
      fresh: Delete the results in the folder first.
    """
    return files, config, out, fresh

  description = re.sub(r"\n(?=\w+: )", "\n\n", audit.__doc__ or "")
  files, config, out, fresh = tyro.cli(
    settings, args=arguments, prog="python -m experiments.audit_rollouts", description=description
  )
  try:
    summary = audit.main(files, config, out=out, fresh=fresh)
  except (audit.BadLog, folder.OccupiedFolder) as error:
    print(error, file=sys.stderr)
    raise SystemExit(2) from None
  except KeyboardInterrupt:
    print("Interrupted. Nothing is left half-written.", file=sys.stderr)
    raise SystemExit(130) from None
  if summary["missed"]:
    raise SystemExit(1)
