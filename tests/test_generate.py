"""`experiments.generate`: the text, its colours, the check, and what it says when wrong."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from rich.console import Console

from configs.generate import Config
from experiments import generate
from experiments.harness.run import data_path
from jaxrl_lm.lm.pretrained import Pretrained
from tests.bigram import Bigram

ROOT = Path(__file__).parents[1]


class Bytes:
  """Ids 1 and 2 are the two bytes of a character; 3 ends the text."""

  bos_id, eos_ids, vocab_size = None, (3,), 4

  def encode(self, text: str) -> list[int]:
    return [0] * len(text)

  def decode(self, ids: Any) -> str:
    whole = {0: b"-", 1: b"\xc3", 2: b"\xa9", 3: b""}
    return b"".join(whole[int(i)] for i in ids).decode(errors="replace")


# 0 -> 1 -> 2 -> 3, nearly certain.
CHAIN = 9.0 * jnp.eye(4, k=1)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(generate, "load", lambda config: Pretrained(Bigram(4), CHAIN, Bytes()))


@pytest.mark.usefixtures("toy")
def test_it_prints_the_text_and_the_check(capsys: pytest.CaptureFixture[str]) -> None:
  found = generate.main(Config(prompt="--", max_new_tokens=8, chunk=1))
  printed = capsys.readouterr().out
  assert printed.startswith("--é\n")
  assert "3 tokens at " in printed
  assert "ended by a stop token" in printed
  assert (found["text"], found["tokens"], found["finished"]) == ("--é", 3, True)
  # Each of the three has log-prob -log(1 + 3 e^-9).
  assert found["mean_logprob"] == pytest.approx(-3.7e-4, rel=0.01)
  assert found["ratio_error"] < generate.TOLERANCE


def test_a_character_of_two_tokens_comes_with_the_second_in_its_colour() -> None:
  stream = io.StringIO()
  console = Console(file=stream, force_terminal=True, color_system="standard", _environ={})
  writer = generate.Writer(console, Bytes(), [0], "-")
  writer.add(1, -0.1)
  assert "é" not in stream.getvalue()
  writer.add(2, -5.0)
  assert stream.getvalue().endswith("\x1b[31mé\x1b[0m")
  writer.add(1, -0.1)
  writer.close()
  assert stream.getvalue().endswith("\ufffd\n")


def test_a_terminal_is_not_told_what_to_do_and_a_file_gets_the_text_as_it_is() -> None:
  text = "a\x1b[2J\tb\rc\x9b1m[bold]\n"
  for terminal, shown in ((True, "a\\x1b[2J\tb\\rc\\x9b1m[bold]\n"), (False, text)):
    stream = io.StringIO(newline="")
    console = Console(file=stream, force_terminal=terminal, color_system=None, _environ={})
    generate.Writer(console, Bytes(), [0], text)
    assert stream.getvalue() == shown


def test_colours_go_by_probability() -> None:
  assert [generate.colour(x) for x in (-0.1, -1.0, -4.0, -9.0)] == [
    "cyan",
    "green",
    "yellow",
    "red",
  ]


def test_a_ratio_that_is_not_1_exits_with_1(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  class Warmer(Bigram):
    """Scores at another temperature than it samples at."""

    def apply(self, params: Any, tokens: Any, *, segment_ids: Any, cache: Any = None) -> Any:
      params = params if cache is not None else params / 2
      return super().apply(params, tokens, segment_ids=segment_ids, cache=cache)

  monkeypatch.setattr(generate, "load", lambda config: Pretrained(Warmer(4), CHAIN, Bytes()))
  arguments = ["--prompt", "-", "--max-new-tokens", "8"]
  with pytest.raises(SystemExit) as stop:
    generate.cli(arguments)
  assert stop.value.code == 1
  generate.cli([*arguments, "--bfloat16"])
  assert "not judged in bfloat16" in capsys.readouterr().out


def test_ids_that_the_tokenizer_lacks_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
  """Of six columns the tokenizer has four; the other two are the likeliest."""
  padded = jnp.zeros((6, 6)).at[:4, :4].set(CHAIN).at[:, 4:].set(20.0)
  monkeypatch.setattr(generate, "load", lambda config: Pretrained(Bigram(6), padded, Bytes()))
  found = generate.main(Config(prompt="-", max_new_tokens=8, chunk=4))
  assert (found["text"], found["tokens"]) == ("-é", 3)
  assert found["ratio_error"] < generate.TOLERANCE


def test_an_interrupt_ends_it_without_a_traceback(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  def interrupted(config: Config) -> Any:
    raise KeyboardInterrupt

  monkeypatch.setattr(generate, "main", interrupted)
  with pytest.raises(SystemExit) as stop:
    generate.cli([])
  assert stop.value.code == 130
  assert not "".join(capsys.readouterr())


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--temperature", "-1"], "temperature must lie in"),
    (["--top-p", "1.5"], "top_p must lie in"),
    (["--max-new-tokens", "300"], "leaves room for"),
    (["--prompt", ""], "prompts must not be empty"),
    (["--chunk", "0"], "chunk must lie in"),
    (["--seed", "99999999999999999999"], "seed must lie in"),
    (["--temperature", "1e-38"], "temperature must lie in"),
    (["--top-k", "5"], "top_k must lie in"),
    (["--temprature", "1"], "--temperature"),
  ],
)
def test_what_is_wrong_is_said(
  arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
  with pytest.raises(SystemExit) as stop:
    generate.cli(arguments)
  assert stop.value.code == 2
  out, err = capsys.readouterr()
  assert message in out + err
  if "--temprature" not in arguments:
    assert not out  # not even the prompt


def test_the_absence_of_the_default_model_says_what_to_do(
  monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  monkeypatch.setenv("JAXRL_LM_DATA", str(tmp_path))
  with pytest.raises(SystemExit) as stop:
    generate.cli([])
  assert stop.value.code == 2
  said = capsys.readouterr().err
  assert "stories260K.bin was not found. Set JAXRL_LM_DATA" in said
  assert "--model PATH" in said


def test_a_model_without_a_tokenizer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(generate.pretrained, "load", lambda path: Pretrained(Bigram(4), CHAIN, None))
  with pytest.raises(FileNotFoundError, match="comes without a tokenizer"):
    generate.load(Config(model=Path("x")))


@pytest.mark.slow
def test_the_command_runs() -> None:
  """With the real model where it is, and with the message about its absence where it is not."""
  command = [sys.executable, "-m", "experiments.generate", "--max-new-tokens", "8"]
  arguments = ["--temperature", "0", "--prompt", ""]
  done = subprocess.run(
    [*command, *arguments], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
  )
  if data_path(generate.DEFAULT_MODEL) is None:
    assert done.returncode == 2
    assert "was not found" in done.stderr
  else:
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time, there")
