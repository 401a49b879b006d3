"""A run of `loka probe` that is killed leaves what it had saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from loka.probe.profile import profile_file
from loka.probe.profile.profile import RecordedStats

KEPT = "policies/profiles/shop.interrupted.safetensors"
WAIT = 100.0  # seconds


@pytest.mark.slow
def test_killed_while_training_keeps_what_was_saved_last(shop, loka):
    path = shop.folder / "shopmodel.py"
    text = path.read_text(encoding="utf-8")
    hang = "            if _ == 11:\n                import time\n                time.sleep(600)\n"
    place = "            x = torch.randn(self"
    path.write_text(text.replace(place, hang + place), encoding="utf-8")
    before = set(shop.files())
    running = subprocess.Popen(
        [sys.executable, "-B", "-m", "loka", "probe", shop.policy],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        kept, limit = shop.folder / KEPT, time.monotonic() + WAIT
        while not kept.exists() and running.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert running.returncode == -signal.SIGKILL
    assert {name for name in set(shop.files()) - before if not name.endswith(".tmp")} == {KEPT}
    saved = profile_file.load(kept)
    assert isinstance(saved, RecordedStats)
    assert saved.profile.samples in (5, 10)
    path.write_text(text, encoding="utf-8")
    assert loka("probe", shop.policy, "--from", KEPT, "--draws", "2").status == 0
    assert (
        profile_file.load_profile(shop.folder / "policies/profiles/shop.safetensors").samples == saved.profile.samples
    )
