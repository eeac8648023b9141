"""Finding records by function and settings, and asserting that one is reproduced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.parity import compositions, exceptions, records, results
from tests.parity.records import Record


def recorded(function: str, **settings: Any) -> Iterator[Record]:
  for key, record in results.all_records().items():
    matches = all(record.settings.get(name) == value for name, value in settings.items())
    if record.function.endswith(function) and matches and key not in exceptions.BY_RECORD:
      yield record


def assert_close(record: Record, ours: Mapping[str, Any], *names: str) -> None:
  """Within the tolerance that its composition has."""
  composition = compositions.of(record)
  for name in names or ("loss", "grad_logps"):
    assert records.error(record, name, ours[name]) <= composition.tolerance(record), name
