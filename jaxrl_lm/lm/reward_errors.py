"""The error of a reward, which shows the sample."""

from __future__ import annotations

from typing import Any

LONGEST_SHOWN = 2000  # characters of a text


class RewardError(ValueError):
  """A reward failed, or returned what no reward can be.

  Attributes:
    reason: what went wrong.
    component: name of the reward; None until `score` says it.
    prompt, text: of the sample; None where it is not one sample's fault.
  """

  def __init__(
    self,
    reason: str,
    *,
    component: str | None = None,
    prompt: Any = None,
    text: str | None = None,
  ):
    self.reason, self.component, self.prompt, self.text = reason, component, prompt, text
    lines = [f"reward {component!r}: {reason}" if component else f"reward: {reason}"]
    if prompt is not None:
      lines += [f"  prompt: {_shown(prompt.text)}", f"  reference: {_shown(prompt.reference)}"]
    if text is not None:
      lines += [f"  text: {_shown(text)}"]
    super().__init__("\n".join(lines))

  def of(self, component: str) -> RewardError:
    """The same error, of a component.

    Args:
      component: its name.

    Returns:
      The error.
    """
    return RewardError(self.reason, component=component, prompt=self.prompt, text=self.text)


def _shown(x: Any) -> str:
  shown = repr(x)
  left = len(shown) - LONGEST_SHOWN
  return shown if left <= 0 else f"{shown[:LONGEST_SHOWN]}... ({left} characters more)"
