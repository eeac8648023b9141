"""Claim: a response is an episode, which `experiments.mdp_walkthrough` shows exactly."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from configs import mdp_walkthrough as settings
from experiments import mdp_walkthrough
from experiments.mdp_walkthrough import page, terminal
from jaxrl_lm.exact import (
  count_pretrained_logits,
  enumerate_language,
  modular_sum_reward,
  tabular_policy,
)

CONFIG = settings.SMALL
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
  out = tmp_path_factory.mktemp("mdp_walkthrough")
  mdp_walkthrough.main(CONFIG, out=out)
  return out


@pytest.fixture(scope="module")
def walk(out):
  """What the page embeds."""
  html = (out / mdp_walkthrough.PAGE).read_text()
  return json.loads(re.search(r'id="walk">(.*?)</script>', html)[1])


def test_every_golden_comes_out(out):
  summary = json.loads((out / "summary.json").read_text())
  assert summary["missed"] == []
  assert sum(row["kind"] == "golden" for row in summary["expectations"]) == 8
  assert (out / summary["figures"][0]).stat().st_size > 10_000


def test_the_page_shows_the_exact_numbers(walk, x64):
  """Again by hand: sums over the responses that go on from a prefix."""
  language = enumerate_language(4, 3, end_token=3)
  logits = count_pretrained_logits(language, prompts=2, seed=4, concentration=0.6)
  rewards = modular_sum_reward(language, CONFIG.targets)[CONFIG.prompt]
  logprobs = np.asarray(tabular_policy(language, logits).logprobs())[CONFIG.prompt]
  probs = np.exp(logprobs.sum(axis=1))

  def through(prefix):
    return (language.tokens[:, : len(prefix)] == prefix).all(axis=1) & (
      language.lengths >= len(prefix)
    )

  def value(prefix):
    here = through(prefix)
    return (probs * rewards)[here].sum() / probs[here].sum()

  assert [step["action"] for step in walk["steps"]] == list(CONFIG.response)
  assert [step["reward"] for step in walk["steps"]] == [0.0, 0.0, walk["reward"]]
  for t, step in enumerate(walk["steps"]):
    prefix = list(CONFIG.response[:t])
    after = [[*prefix, token] for token in range(4)]
    share = [probs[through(x)].sum() / probs[through(prefix)].sum() for x in after]
    np.testing.assert_allclose(step["probs"], share, rtol=1e-12)
    np.testing.assert_allclose(step["action_values"], [value(x) for x in after], rtol=1e-12)
    assert step["value"] == pytest.approx(value(prefix), rel=1e-12)
    np.testing.assert_allclose(
      step["advantages"], np.array(step["action_values"]) - step["value"], atol=1e-15
    )
  assert walk["prob"] == pytest.approx(probs[through(list(CONFIG.response))].sum(), rel=1e-12)


def test_the_page_needs_no_network():
  """Nothing in it names another file; what would be fetched is forbidden, too."""
  html = page.TEMPLATE.read_text()
  assert not re.search(r"https?:|//\w+\.|\b(src|href)\s*=|url\(|\bimport\b|fetch\(", html)
  assert "default-src 'none'" in html


def test_text_cannot_end_its_element(walk):
  html = page.render(walk | {"prompt": "</script><b>"})
  assert "</script><b>" not in html
  assert json.loads(re.search(r'id="walk">(.*?)</script>', html)[1])["prompt"] == "</script><b>"


def test_the_terminal_shows_each_step(walk):
  console = Console(file=io.StringIO(), width=100)
  terminal.show(walk, console)
  shown = console.file.getvalue()
  assert walk["prompt"] in shown
  for t, step in enumerate(walk["steps"]):
    assert f"t = {t}: {walk['token_names'][step['action']]}" in shown
    assert f"V = {step['value']:.3f}" in shown
    for a, q in zip(step["advantages"], step["action_values"]):
      assert f"{q:.3f}" in shown
      assert f"{a:+.3f}" in shown
  assert f"{walk['reward'] - walk['steps'][0]['value']:+.3f}" in shown


@pytest.mark.parametrize("response", [(), (3, 0), (0, 9), (0, 0), (0, 0, 0, 3)])
def test_a_response_that_does_not_exist_is_named(response, tmp_path):
  with pytest.raises(ValueError, match="up to and including the end token 3"):
    mdp_walkthrough.main(replace(CONFIG, response=response), out=tmp_path / "out")
  assert not (tmp_path / "out").exists()


def test_a_prompt_that_does_not_exist_is_named(tmp_path):
  with pytest.raises(ValueError, match="prompt must lie in"):
    mdp_walkthrough.main(replace(CONFIG, prompt=2), out=tmp_path / "out")


class Browser:
  """Headless Chromium on one page; its protocol over two pipes, messages that end with a zero."""

  # The browser reads from 3 and writes to 4.
  START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
  )
  KEYS = {"End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}

  def __init__(self, profile, url):
    its_input, ours = os.pipe()
    ours_too, its_output = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}"]
    pipes = map(str, (its_input, its_output))
    self.process = subprocess.Popen(
      [sys.executable, "-c", self.START, *pipes, CHROMIUM, *options],
      pass_fds=(its_input, its_output),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    os.close(its_input)
    os.close(its_output)
    self.commands, self.answers = os.fdopen(ours, "wb", 0), os.fdopen(ours_too, "rb")
    self.number, self.session = 0, {}
    target = self.call("Target.createTarget", url=url)["targetId"]
    attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
    self.session = {"sessionId": attached["sessionId"]}
    deadline = time.monotonic() + 30
    while self.evaluate("document.readyState + ' ' + location.protocol") != "complete file:":
      assert time.monotonic() < deadline
      time.sleep(0.05)

  def call(self, method, **params):
    self.number += 1
    message = {"id": self.number, "method": method, "params": params, **self.session}
    self.commands.write(json.dumps(message).encode() + b"\0")
    while True:
      answer = bytearray()
      while (byte := self.answers.read(1)) != b"\0":
        assert byte, "the browser is gone"
        answer += byte
      answer = json.loads(answer)
      if answer.get("id") == self.number:
        assert "error" not in answer, answer
        return answer["result"]

  def evaluate(self, expression):
    answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
    assert "exceptionDetails" not in answer, answer
    return answer["result"].get("value")

  def press(self, key):
    for kind in ("rawKeyDown", "keyUp"):
      code = self.KEYS[key]
      self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

  def click(self, selector):
    x, y = self.evaluate(
      f"(box => [box.x + box.width / 2, box.y + box.height / 2])"
      f"(document.querySelector({selector!r}).getBoundingClientRect())"
    )
    for kind in ("mousePressed", "mouseReleased"):
      self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

  def text(self, selector):
    return self.evaluate(f"document.querySelector({selector!r}).textContent")

  def frame(self):
    return int(self.evaluate("document.getElementById('slider').value"))

  def close(self):
    self.process.terminate()
    self.process.wait(timeout=30)
    self.commands.close()
    self.answers.close()


@pytest.fixture
def browser(out, tmp_path):
  if CHROMIUM is None:
    pytest.skip("no Chromium on PATH: the page's stepping is not tested, only what it embeds")
  browser = Browser(tmp_path, (out / mdp_walkthrough.PAGE).as_uri())
  yield browser
  browser.close()


@pytest.mark.slow
def test_the_page_steps_by_keyboard_and_mouse(browser, walk):
  last = 4 * len(walk["steps"])
  assert browser.frame() == 0
  assert browser.evaluate("document.querySelectorAll('section.later').length") == 3
  assert browser.text("#value") == f"{walk['steps'][0]['value']:.3f}"

  for key, frame in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowDown", 4)):
    browser.press(key)
    assert browser.frame() == frame, key
  for key, frame in (("ArrowUp", 0), ("ArrowLeft", 0), ("End", last), ("ArrowRight", last)):
    browser.press(key)
    assert browser.frame() == frame, key
  credit = walk["reward"] - walk["steps"][0]["value"]
  assert f"{abs(credit):.3f}" in browser.text("#told")

  for selector, frame in (
    ("#first", 0),
    ("#next", 1),
    ("#back", 0),
    ("#last", last),
    ("#tape li:nth-child(3) button", 4),
  ):
    browser.click(selector)
    assert browser.frame() == frame, selector
  assert browser.text("#value") == f"{walk['steps'][1]['value']:.3f}"
  for token, prob in enumerate(walk["steps"][1]["probs"]):
    assert f"{prob:.3f}" in browser.text(f"#actions tr:nth-child({token + 1})")
  visibility = "getComputedStyle(document.getElementById('actions')).visibility"
  assert browser.evaluate(visibility) == "hidden"
  browser.press("ArrowRight")
  assert browser.evaluate(visibility) == "visible"

  browser.click("#slider")  # in its middle; then it has the focus
  middle = browser.frame()
  assert 0 < middle < last
  browser.press("ArrowRight")
  assert browser.frame() == middle + 1  # once, though the slider has keys of its own

  assert browser.evaluate("performance.getEntriesByType('resource').length") == 0
