"""How figures look: colours that the colour-blind can tell apart, labels, a legend off the data.

Figures are made as objects, without pyplot, so that nothing opens a window or stays in memory.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.artist import Artist
from matplotlib.figure import Figure

# Okabe and Ito, "Color Universal Design", 2008. Yellow is left out: it is too pale for lines.
PALETTE = {
  "blue": "#0072B2",
  "vermilion": "#D55E00",
  "green": "#009E73",
  "purple": "#CC79A7",
  "orange": "#E69F00",
  "sky": "#56B4E9",
  "black": "#000000",
}

_STYLE: dict[Any, Any] = {
  "axes.grid": True,
  "axes.prop_cycle": cycler(color=PALETTE.values()),
  "axes.spines.right": False,
  "axes.spines.top": False,
  "axes.titlelocation": "left",
  "axes.titlesize": "medium",
  "figure.constrained_layout.use": True,
  "figure.figsize": (9.0, 4.5),
  "figure.titlesize": "large",
  "grid.alpha": 0.25,
  "legend.frameon": False,
  "lines.linewidth": 1.8,
}


@contextmanager
def style() -> Iterator[None]:
  """The style, whatever the reader's own matplotlibrc says; also a decorator, `@style()`."""
  with mpl.rc_context():
    mpl.rcdefaults()
    mpl.rcParams.update(_STYLE)
    yield


def title(figure: Figure, claim: str) -> None:
  """Puts the claim over the whole figure, wrapped to its width."""
  characters = int(10 * figure.get_figwidth())
  figure.suptitle(textwrap.fill(claim, characters), x=0.01, ha="left")


def legend(figure: Figure, *, columns: int = 4) -> None:
  """Puts one legend of all axes below them, each label once."""
  entries: dict[str, Artist] = {}
  for axes in figure.axes:
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
      entries.setdefault(label, handle)
  handles, labels = list(entries.values()), list(entries)
  figure.legend(handles, labels, loc="outside lower left", ncols=columns)


def save(figure: Figure, path: Path) -> None:
  """Writes a PNG; the same figure gives the same bytes."""
  with style():
    figure.savefig(path, dpi=150, metadata={"Software": None})
