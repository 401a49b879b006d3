"""A forward as it was read and printed, bit for bit the module's own, before its canonical form."""

from __future__ import annotations

from typing import Any

import pytest

from loka.graph.ir import ForwardIR
from loka.graph.trace import trace


def as_written(*args: Any, **kwargs: Any) -> ForwardIR:
    """What `trace_forward` prints of a module, without the calls of sites. Fails where that is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_canonical", lambda traced, weights, lines: (traced.forward, {}))
        found = trace.trace_forward(*args, **kwargs)
    assert isinstance(found, ForwardIR), found
    return found
