"""A construct: lines of a forward, and all that they need elsewhere in the model's file."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lines:
    """Text of a step (n, 16) -> (n, 16), as `string.Template`.

    `$x` and `$y` are the names of its input and result, `$k` is a number that no other step has, `$c` a factor, `$act`
    a function that activates, `$ids` the model's indices (n, 4), below 20. Names in `LAYERS` are attributes that are
    made where a text has them. `$f` is a block of norm, linear, activation and linear, of `$x`.
    """

    forward: str
    init: str = ""  # of the module, after its layers
    methods: str = ""
    top: str = ""  # of the file
    change: str = ""  # what training or serving changes after `apply`, on `self`
    restore: str = ""  # takes back what `change` did to the process

    def __contains__(self, name: str) -> bool:
        """True if a text has `$name`."""
        texts = (self.forward, self.init, self.methods, self.change)
        return any(re.search(rf"\${name}\b", text) for text in texts)


LAYERS = {
    "a": "nn.Linear(16, 16)",
    "b": "nn.Linear(16, 16)",
    "n": "nn.LayerNorm(16)",
    "w": "nn.Parameter(torch.randn(16, 16) / 4)",
    "v": "nn.Parameter(torch.randn(16))",
    "drop": "nn.Dropout(0.2)",
    "bn": "nn.BatchNorm1d(16)",
}
BLOCK = "$b($act($a($n($x))))"
ACTIVATIONS = ("F.silu", "torch.relu", "torch.tanh", "torch.sigmoid", "F.gelu", "F.elu")
FACTORS = (0.25, 0.5, 0.7, 1.5, 2.0)
