"""Every record against its composition, computed once per process: test and report share it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax

from tests.parity import compositions, records
from tests.parity.records import Record

# What a peer reports beside its result.
METRICS = (
  "metrics", "std_rewards", "clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio",
  "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl",
)  # fmt: skip
# Not a result: "returns is advantages", and the message of an exception.
REMARKS = ("returns_equal_advantages", "error")


@cache
def all_records() -> Mapping[str, Record]:
  return {record.id: record for peer in records.PEERS for record in records.load(peer)}


@cache
def outputs(record_id: str) -> Mapping[str, Any]:
  """Ours, in 64 bits."""
  record = all_records()[record_id]
  composition = compositions.of(record)
  assert composition is not None
  with jax.enable_x64(True):
    return composition.run(record)


def errors(record_id: str) -> Mapping[str, float]:
  """The error of every result of the peer; a result that we do not give is a KeyError."""
  record, ours = all_records()[record_id], outputs(record_id)
  names = [name for name in record.outputs if name not in METRICS + REMARKS]
  return {name: records.error(record, name, ours[name]) for name in names}


def tolerance(record_id: str) -> float:
  record = all_records()[record_id]
  composition = compositions.of(record)
  assert composition is not None
  return composition.tolerance(record)


def reproduced(record_id: str) -> bool:
  """Whether the peer gave a result and ours is within the tolerance of all of it."""
  found = errors(record_id)
  return bool(found) and max(found.values()) <= tolerance(record_id)
