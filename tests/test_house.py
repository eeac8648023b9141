"""The rules of the house: who may import whom, what a docstring states, what the text may say."""

import ast
import graphlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxrl_lm as rl

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxrl_lm"
MATHEMATICS = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
# One function per loss of another library; the arguments are explained once, in the module.
PRESETS = {name for name in MATHEMATICS if name.endswith("_presets")}
# Rows of slots: over the mathematics, not part of it.
COMPOSITIONS = {"linear_policy_loss", "objectives", "preset_parts", "presets"} | PRESETS

# numpy is JAX's own dependency: constants are checked with it while tracing.
THIRD_PARTY_OF_MATHEMATICS = {"jax", "chex", "numpy"}

# What each room may not import. (The mathematics has a stricter test of its own.)
FORBIDDEN = {
  "jaxrl_lm": {"configs", "experiments", "tests", "benchmarks"},
  "jaxrl_lm/exact": {"jaxrl_lm.lm"},
  "jaxrl_lm/lm": {"jaxrl_lm.exact"},
  "configs": {"experiments", "tests", "benchmarks"},
  "experiments": {"tests", "benchmarks"},
}

# Building blocks of the other modules, not part of `import jaxrl_lm as rl`.
UNEXPORTED_MODULES = {
  "categorical",
  "checks",
  "gains",
  "kept_tokens",
  "moments",
  "pairs",
  "preset_parts",
  "vocabulary_buckets",
  "vocabulary_divergence",
  "vocabulary_sharding",
  "vocabulary_statistics",
  "vocabulary_sweeps",
  "vocabulary_tiles",
}

# Public functions whose docstring need cite nothing. Modules: bookkeeping of arrays, definitions.
UNCITED_MODULES = {"groups", "logprobs", "masks"}
UNCITED_FUNCTIONS = {
  "token_sum": "all ones",
  "length_power": "between the sum and the mean of a sequence, which cite",
  "on_policy_log_ratio": "an identity of differentiation",
  "clamped": "a combinator of levels, which cite",
  "masked_moments": "mean and variance",
  "sample_at": "an index into an axis",
  "linear_token_logprobs": "a definition, as `token_logprobs`",
  "linear_weighted_logprobs": "linearity of the gradient",
  "linear_policy_loss": "the chain rule",
}


def imports(path: Path) -> set[str]:
  """Dotted names of everything a file imports, wherever in the file; names from jaxrl_lm too."""
  package = ".".join(path.relative_to(ROOT).parent.parts)
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      above = package.rsplit(".", node.level - 1)[0] if node.level else ""
      source = ".".join(filter(None, (above, node.module)))
      if source == "jaxrl_lm" or node.level:
        names |= {f"{source}.{alias.name}" for alias in node.names}
      else:
        names.add(source)
  return names


def own_modules(names: set[str]) -> set[str]:
  """The second part of each name below jaxrl_lm: masks of jaxrl_lm.masks.lengths."""
  return {
    name.partition(".")[2].split(".")[0] for name in names if name.split(".")[0] == "jaxrl_lm"
  }


@pytest.mark.parametrize("module", sorted(MATHEMATICS))
def test_mathematics_imports_only_jax_and_itself(module):
  names = imports(PACKAGE / f"{module}.py")
  third_party = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
  assert third_party - {"jaxrl_lm"} <= THIRD_PARTY_OF_MATHEMATICS
  allowed = MATHEMATICS if module in COMPOSITIONS else MATHEMATICS - COMPOSITIONS
  assert own_modules(names) <= allowed


def test_mathematics_imports_without_a_circle():
  graph = {name: own_modules(imports(PACKAGE / f"{name}.py")) for name in MATHEMATICS}
  tuple(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("room", sorted(FORBIDDEN))
def test_imports_run_one_way(room):
  for path in (ROOT / room).rglob("*.py"):
    for name in imports(path):
      assert not any(f"{name}.".startswith(f"{other}.") for other in FORBIDDEN[room]), (path, name)


def test_no_room_without_a_topic():
  names = {path.stem for path in PACKAGE.rglob("*") if "__pycache__" not in path.parts}
  assert not names & {"util", "utils", "common", "helpers", "misc", "types", "core"}


def run_python(code: str) -> str:
  """Standard output of a fresh interpreter, whose JAX knows nothing of this one's settings."""
  environment = {
    k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.startswith("JAX_")
  }
  command = [sys.executable, "-W", "error", "-c", code]
  done = subprocess.run(
    command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_import_stays_light():
  """The systems side and the laboratory are imported by those who use them."""
  code = "import jaxrl_lm.objectives, sys; print(*sys.modules, sep='\\n')"
  loaded = run_python(code).split()
  heavy = {"flax", "optax", "orbax", "torch", "tyro", "matplotlib", "jaxrl_lm.exact", "jaxrl_lm.lm"}
  assert not heavy & set(loaded)


def test_import_changes_no_setting_and_makes_no_array():
  """A backend can still be configured, so the import has not started one."""
  code = """
import jax
before = dict(jax.config.values)
import jaxrl_lm
assert dict(jax.config.values) == before
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)
print(jax.device_count())
"""
  assert run_python(code).strip() == "3"


def test_public_names_are_listed_once_and_exist():
  assert len(rl.__all__) == len(set(rl.__all__))
  assert all(hasattr(rl, name) for name in rl.__all__)


def module_of(name: str) -> str:
  return getattr(rl, name).__module__.rpartition(".")[2]


PUBLIC = [name for name in rl.__all__ if inspect.isfunction(getattr(rl, name))]
FUNCTIONS = [name for name in PUBLIC if module_of(name) not in PRESETS]
CLASSES = [name for name in rl.__all__ if inspect.isclass(getattr(rl, name))]


@pytest.mark.parametrize("module", sorted(MATHEMATICS - UNEXPORTED_MODULES))
def test_every_public_function_is_exported(module):
  for node in ast.parse((PACKAGE / f"{module}.py").read_text()).body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
      assert node.name in rl.__all__, f"{module}.{node.name}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_states_arguments_result_example_and_source(name):
  function = getattr(rl, name)
  doc = inspect.getdoc(function) or ""
  parameters = inspect.signature(function).parameters
  sections = dict.fromkeys(("Args:", "Returns:", ">>>"), True) | {"Args:": bool(parameters)}
  missing = [section for section, needed in sections.items() if needed and section not in doc]
  assert not missing

  described = doc.partition("Args:")[2].partition("Returns:")[0]
  undescribed = [p for p in parameters if not re.search(rf"^ *[\w*, ]*\b{p}\b.*:", described, re.M)]
  assert not undescribed

  module = function.__module__.rpartition(".")[2]
  if module not in UNCITED_MODULES and name not in UNCITED_FUNCTIONS:
    assert re.search(r"^References?:", doc, re.M), "cites nothing"


ROOMS = sorted(
  f"{room}/{x.stem}" for room in ("exact", "lm") for x in (PACKAGE / room).glob("[a-z]*.py")
)


@pytest.mark.parametrize("module", ROOMS)
def test_docstrings_of_laboratory_and_models_state_arguments_and_result(module):
  """Every public function and method with arguments, whether or not it is exported."""
  tree = ast.parse((PACKAGE / f"{module}.py").read_text())
  scopes = [tree, *(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_")]
  for node in (node for scope in scopes for node in scope.body):
    if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
      continue
    doc, arguments = ast.get_docstring(node) or "", node.args
    names = [x.arg for x in arguments.args + arguments.kwonlyargs if x.arg != "self"]
    assert doc, node.name
    assert not names or "Returns:" in doc, node.name
    described = doc.partition("Args:")[2].partition("Returns:")[0]
    missing = [x for x in names if not re.search(rf"^ *[\w*, \n]*\b{x}\b[^.]*?:", described, re.M)]
    assert not missing, (node.name, missing)


@pytest.mark.parametrize("name", [name for name in PUBLIC if module_of(name) in PRESETS])
def test_a_preset_names_its_source_and_its_module_explains_its_arguments(name):
  preset = getattr(rl, name)
  doc = inspect.getdoc(preset) or ""
  assert re.search(r"^Source: (TRL|verl|OpenRLHF|Tunix|NeMo-RL|Liger-Kernel)\b", doc, re.M)
  described = (inspect.getmodule(preset).__doc__ or "").partition("Arguments:")[2]
  parameters = inspect.signature(preset).parameters.values()
  undescribed = [
    p.name for p in parameters if not re.search(rf"^ .*\b{p.name}\b.*:", described, re.M)
  ]
  assert not undescribed


@pytest.mark.parametrize("name", CLASSES)
def test_public_class_has_a_docstring(name):
  doc = inspect.getdoc(getattr(rl, name))
  assert doc
  assert not doc.startswith(f"{name}(")  # what a dataclass writes by itself


def texts() -> dict[str, str]:
  """Every text file that is, or would be, under version control."""
  listed = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  if listed.returncode:
    return {}
  found = {}
  for name in listed.stdout.splitlines():
    try:
      found[name] = (ROOT / name).read_text()
    except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
      continue
  return found


# In pieces, so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:" + "work|root|home|Users|tmp" + ")/")
REGISTRY = re.compile(
  "|".join(
    first + second
    for first, second in [
      ("index", "-url"),
      ("find", "-links"),
      ("trusted", "-host"),
      ("pypi", r"\.org"),
      ("python", "hosted"),
      ("registry", r"\.npmjs"),
    ]
  )
)


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY], ids=["machine path", "registry"])
def test_text_is_at_home_on_every_machine(pattern):
  found = [
    f"{name}:{number}: {line.strip()[:80]}"
    for name, text in texts().items()
    for number, line in enumerate(text.splitlines(), 1)
    if pattern.search(line)
  ]
  assert not found


def test_slow_tests_exist():
  """A renamed test must not fall back into the default suite unnoticed."""
  for line in (ROOT / "tests" / "slow.txt").read_text().splitlines():
    if not line.startswith("#"):
      file, _, name = line.partition("::")
      assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), line


def test_versions_agree():
  version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
  assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
