"""Functions by the names that a command line gives, with their constants: no table is kept.

  grpo                                  a value of a module, whatever its case
  dr_grpo(length=64)                    complete: it is called
  truncated(cap=2.0)                    not complete (log_weights is to come): constants are bound
  with_reverse_kl_gradient(kl_k3)       a function of a function
  my_module.my_task(words=['dog'])      of a module of your own

What is written is parsed, never evaluated: names, calls and literals.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any


def find(
  written: str,
  modules: Sequence[ModuleType],
  *,
  kind: str,
  accepts: Callable[[Any], bool],
  given: Mapping[str, Any] | None = None,
  complete: bool = False,
) -> Any:
  """What a text names.

  Args:
    written: a name, or a call with literals and names as its arguments.
    modules: where to look, in this order.
    kind: what is looked for, in error messages.
    accepts: whether a public value of a module is one.
    given: arguments that it gets if it has such parameters and the text does not say them.
    complete: a function must have all of its arguments, and is called.

  Returns:
    The value. Of a function, what it returns if no required argument is missing, else itself with
    what is known bound.

  Raises:
    ValueError: there is no such name (the message lists what there is), it has no such argument
      or lacks one, or the text is no name or call.
  """
  try:
    node = ast.parse(written.strip(), mode="eval").body
  except SyntaxError:
    raise ValueError(f"{kind} {written!r} is neither a name nor a call: name(constant=1)") from None
  value = _value(node, _Search(kind, modules, accepts, dict(given or {})))
  if complete and (isinstance(value, partial) or inspect.isfunction(value)):
    missing = [
      name
      for name, parameter in inspect.signature(value).parameters.items()
      if parameter.default is parameter.empty
    ]
    raise ValueError(f"{kind} {written!r} needs {', '.join(missing)}: name({missing[0]}=...)")
  return value


def function_name(
  written: str, modules: Sequence[ModuleType], *, kind: str, accepts: Callable[[Any], bool]
) -> str:
  """The name in a text, in lower case, known to be one of the modules' or to have a module.

  Raises:
    ValueError: there is no such name.
  """
  name = written.partition("(")[0].strip().lower()
  if "." not in name:
    _Search(kind, modules, accepts, {}).named(name)
  return name


def candidates(modules: Sequence[ModuleType], accepts: Callable[[Any], bool]) -> dict[str, Any]:
  """Public values of the modules that are accepted, by their names in lower case."""
  found: dict[str, Any] = {}
  for module in modules:
    for name, value in vars(module).items():
      if name[0] != "_" and not inspect.ismodule(value) and accepts(value):
        found.setdefault(name.lower(), value)
  return found


def returns(value: Any, name: str) -> bool:
  """Whether it is a function that says that it returns this."""
  if not inspect.isfunction(value):
    return False
  result = inspect.signature(value).return_annotation
  return getattr(result, "__name__", result) == name


def parameters(value: Any) -> list[str]:
  """Names of a function's parameters; none for what is no function."""
  return list(inspect.signature(value).parameters) if inspect.isroutine(value) else []


class _Search:
  """What the parts of one text have in common."""

  def __init__(
    self,
    kind: str,
    modules: Sequence[ModuleType],
    accepts: Callable[[Any], bool],
    given: dict[str, Any],
  ) -> None:
    self.kind, self.modules, self.given = kind, modules, given
    self.there = candidates(modules, accepts)

  def named(self, name: str) -> Any:
    if "." in name:
      return _of_module(name, self.kind)
    if name.lower() in self.there:
      return self.there[name.lower()]
    near = difflib.get_close_matches(name.lower(), self.there, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(f"there is no {self.kind} {name!r}{hint}; there are {', '.join(self.there)}")


def _of_module(name: str, kind: str) -> Any:
  module, _, attribute = name.rpartition(".")
  try:
    return getattr(importlib.import_module(module), attribute)
  except (ImportError, AttributeError) as error:
    raise ValueError(f"{kind} {name!r} was not found: {error}") from error


def _value(node: ast.expr, search: _Search) -> Any:
  if isinstance(node, ast.Name) and node.id == "inf":
    return float("inf")
  call = node if isinstance(node, ast.Call) else None
  if not isinstance(node, ast.Call | ast.Name | ast.Attribute):
    return _literal(node, search)
  function = search.named(ast.unparse(call.func if call else node))
  positional = [_value(x, search) for x in call.args] if call else []
  keywords = {x.arg: _value(x.value, search) for x in call.keywords if x.arg} if call else {}
  if not inspect.isroutine(function):
    if call:
      raise ValueError(f"{search.kind} {ast.unparse(call.func)} takes no arguments")
    return function
  return _bound(function, positional, keywords, search)


def _literal(node: ast.expr, search: _Search) -> Any:
  try:
    return ast.literal_eval(node)
  except ValueError:
    raise ValueError(
      f"{search.kind}: {ast.unparse(node)!r} is neither a name, a call nor a constant"
    ) from None


def _bound(
  function: Callable[..., Any], positional: list[Any], keywords: dict[str, Any], search: _Search
) -> Any:
  """The function with its arguments, called if none is missing."""
  signature = inspect.signature(function)
  names = list(signature.parameters)
  if unknown := sorted(set(keywords) - set(names)):
    raise ValueError(
      f"{search.kind} {function.__name__} has no argument {', '.join(unknown)}; "
      f"its arguments are {', '.join(names)}"
    )
  known = names[: len(positional)]
  keywords = {k: v for k, v in search.given.items() if k in names and k not in known} | keywords
  try:
    signature.bind(*positional, **keywords)
  except TypeError:
    return partial(function, *positional, **keywords) if positional or keywords else function
  return function(*positional, **keywords)
