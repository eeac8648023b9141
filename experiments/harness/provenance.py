"""What a number may depend on besides the config."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
  """Versions, device, and a hash of the code."""
  code = [
    path for room in ("jaxrl_lm", "configs", "experiments") for path in ROOT.glob(f"{room}/**/*.py")
  ]
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  device = jax.devices()[0]
  return {
    "jaxrl_lm": project["version"],
    "code": hashlib.sha256(b"".join(path.read_bytes() for path in sorted(code))).hexdigest()[:12],
    "python": platform.python_version(),
    **{name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
    "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
  }


def git() -> dict[str, Any] | None:
  """Commit of the checkout, and whether all is committed; None outside of one."""
  command = ["git", "-C", str(ROOT), "status", "--porcelain=v2", "--branch"]
  try:
    status = subprocess.run(command, capture_output=True, text=True, check=True).stdout
  except (OSError, subprocess.CalledProcessError):
    return None
  commit = re.search(r"^# branch\.oid (\w+)$", status, re.MULTILINE)
  clean = all(line.startswith("#") for line in status.splitlines())
  return {"commit": commit[1] if commit else None, "clean": clean}
