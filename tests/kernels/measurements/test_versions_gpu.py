"""The versions of a machine with a Hopper GPU are known in full."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from loka.kernels.measurements.lookup import Versions

pytestmark = pytest.mark.gpu  # nothing else: it fails where torch sees no GPU


def test_a_gpu_is_known_in_full():
    here = Versions.here()
    assert all(astuple(here)[:-1]), here
    assert here.capability == "9.0"
    assert here.cuda.split(".")[0] == here.cublas.split(".")[0]
    assert here.is_of("h100") or here.is_of("h200")
