"""`loka probe` on a GPU."""

from __future__ import annotations

from loka.probe.profile import profile_file
from tests.support.gpu import ON_GPU

pytestmark = ON_GPU


SUMMARY = "policies/profiles/shop.safetensors"


def test_on_a_gpu(shop, loka):
    ran = loka("probe", shop.policy, "--device", "cuda")
    assert ran.status == 0, ran.err
    assert profile_file.load_profile(shop.folder / SUMMARY).samples == 12
