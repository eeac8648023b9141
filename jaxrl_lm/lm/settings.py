"""A configuration as JSON, and where two of them differ."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import math
import os
import types
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LARGEST_WRITTEN_OUT = 64  # elements; of a larger array the digest is compared
_ABSENT = "absent"


def settings(value: Any) -> Any:
  """What a configuration says, in dicts, lists, numbers and text.

  A function is its module and qualified name, with its defaults, what a partial binds, and what a
  closure or a decorator such as jit holds: `partial(ppo_clip, clip_low=0.2)` and `optax.adam(1e-3)`
  differ from those of other constants. A lambda has no name of its own and is its bytecode too,
  which another version of Python writes differently.

  Args:
    value: dataclass, mapping, sequence, set, NamedTuple, function, partial, object with attributes,
      enum, dtype, path, array, mesh (its axes, not its devices), partition, number, text or None,
      nested. A dataclass field of `compare=False` is left out: it may differ.

  Returns:
    A value that JSON gives back as it is; NaN and infinities are text.

  Raises:
    TypeError: something in it cannot be compared; the message says where.
  """
  return _plain(value, "config", ())


def differences(then: Any, now: Any) -> list[str]:
  """The fields in which two results of `settings` differ.

  Args:
    then: earlier settings.
    now: present settings.

  Returns:
    Lines "field.of.field: old there, new now"; empty if all are equal.
  """
  return _differences(then, now, "")


def _plain(value: Any, where: str, outer: tuple[int, ...]) -> Any:
  if isinstance(value, enum.Enum):  # first: it may be a number or text as well
    return f"{type(value).__qualname__}.{value.name}"
  if value is None or isinstance(value, bool):
    return value
  if value is ... or isinstance(value, types.ModuleType):
    return str(getattr(value, "__name__", "..."))
  if isinstance(value, int | str):  # or of a class of NumPy or one's own, which JSON drops
    return int(value) if isinstance(value, int) else str(value)
  if isinstance(value, float):
    return float(value) if math.isfinite(value) else str(value)
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if (dtype := _dtype(value)) is not None:
    return str(dtype)
  if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
    return {"(key)": str(value.dtype), "data": _array(jax.random.key_data(value))}
  if isinstance(value, jax.Array | np.ndarray | np.generic):
    return _array(value)
  if id(value) in outer:  # a function can close over itself
    return "(itself)"
  parts = _parts(value, where)
  inner = (*outer, id(value))
  if isinstance(parts, list):
    return [_plain(item, f"{where}[{index}]", inner) for index, item in enumerate(parts)]
  return {key: _plain(item, f"{where}.{key}", inner) for key, item in parts.items()}


def _dtype(value: Any) -> np.dtype | None:
  """Of np.dtype("float32"), np.float32 and jnp.float32, which are of three types."""
  if isinstance(value, type) and issubclass(value, np.generic):
    return np.dtype(value)
  dtype = getattr(value, "dtype", None) if isinstance(value, type) else value
  return dtype if isinstance(dtype, np.dtype) else None


def _parts(value: Any, where: str) -> dict[str, Any] | list[Any]:
  """What the value is made of, one level down."""
  name = {"(class)": type(value).__qualname__}
  if isinstance(value, functools.partial):
    bound = {str(index): item for index, item in enumerate(value.args)} | value.keywords
    return {"(partial)": value.func, **bound}
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = [field.name for field in dataclasses.fields(value) if field.compare]
    return name | {field: getattr(value, field) for field in fields}
  if isinstance(value, Mapping):
    return {str(key): item for key, item in value.items()}
  if isinstance(value, tuple) and hasattr(value, "_asdict"):
    return name | value._asdict()
  if isinstance(value, list | tuple | jax.sharding.PartitionSpec):
    return list(value)
  if isinstance(value, jax.sharding.Mesh):
    return name | value.shape
  if isinstance(value, Set):
    return sorted(value, key=repr)
  if hasattr(value, "__qualname__"):
    return _function(value)
  if type(value) is object:  # a mark such as "not given", which holds nothing
    return name
  if hasattr(value, "__wrapped__"):  # a jitted partial
    return {"(wrapped)": value.__wrapped__}
  if hasattr(value, "__dict__"):
    return name | vars(value)
  raise TypeError(f"{where}: a {type(value).__name__} cannot be compared with that of another run")


def _function(function: Callable[..., Any]) -> dict[str, Any]:
  parts: dict[str, Any] = {"(function)": f"{function.__module__}.{function.__qualname__}"}
  if isinstance(function, type):
    return parts
  inner: Any = function
  while True:  # down to what a decorator wraps, such as jit, which may hold constants too
    parts |= _constants(inner)
    wrapped = getattr(inner, "__wrapped__", None)
    if not hasattr(wrapped, "__qualname__"):
      break
    inner = wrapped
  if wrapped is not None:
    parts["(wrapped)"] = wrapped
  bound = getattr(function, "__self__", None)
  return parts if bound is None or inspect.ismodule(bound) else parts | {"(self)": bound}


def _constants(function: Any) -> dict[str, Any]:
  """Default arguments, variables of a closure, and the code of a lambda."""
  if not isinstance(function, types.FunctionType):
    return {}
  code = function.__code__
  positional = code.co_varnames[: code.co_argcount]
  defaults = function.__defaults__ or ()
  parts = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
  parts |= function.__kwdefaults__ or {}
  cells = function.__closure__ or ()
  parts |= {name: _content(cell) for name, cell in zip(code.co_freevars, cells, strict=True)}
  return parts | ({"(code)": _code(code)} if function.__name__ == "<lambda>" else {})


def _code(code: types.CodeType) -> str:
  constants = [_code(x) if isinstance(x, types.CodeType) else repr(x) for x in code.co_consts]
  parts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)
  return hashlib.sha256(repr(parts).encode()).hexdigest()


def _content(cell: Any) -> Any:
  try:
    return cell.cell_contents
  except ValueError:  # not yet assigned
    return None


def _array(value: Any) -> Any:
  array = np.asarray(value)
  kind = f"{array.dtype}{list(array.shape)}"
  if array.size <= LARGEST_WRITTEN_OUT and array.dtype.kind in "biuf":
    # repr keeps NaN and all digits; the list would be of the widest type.
    return {"(array)": kind, "values": repr(array.tolist())}
  return {"(array)": kind, "sha256": hashlib.sha256(array.tobytes()).hexdigest()}


def _differences(then: Any, now: Any, where: str) -> list[str]:
  if isinstance(then, dict) and isinstance(now, dict):
    pairs = {key: (then.get(key, _ABSENT), now.get(key, _ABSENT)) for key in {**then, **now}}
    names = {key: f"{where}.{key}".lstrip(".") for key in pairs}
  elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
    pairs = {str(index): pair for index, pair in enumerate(zip(then, now, strict=True))}
    names = {key: f"{where}[{key}]" for key in pairs}
  elif isinstance(then, bool) == isinstance(now, bool) and then == now:  # 1 is 1.0, not True
    return []
  else:
    return [f"{where or 'config'}: {_short(then)} there, {_short(now)} now"]
  return [line for key in pairs for line in _differences(*pairs[key], names[key])]


def _short(value: Any) -> str:
  """A function by its name, whatever it holds; else the value."""
  if isinstance(value, dict):
    known = [
      value[key] for key in ("(class)", "(function)", "(partial)", "(array)") if key in value
    ]
    return _short(known[0]) if known else str(value)
  return value if value == _ABSENT else repr(value)
