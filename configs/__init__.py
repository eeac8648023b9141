"""Named settings of the experiments: frozen dataclasses, values only."""
