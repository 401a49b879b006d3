"""Random models: a bound model is equal to the unbound one, or refused by name, and so are those that once were not.

LOKA_FUZZ_SEED repeats a run from the seed that a failure names; LOKA_FUZZ_SECONDS is how long it draws.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.random_models.generator import CORE, RandomModel, Step, draw
from benchmarks.random_models.judge import FAILURES, Verdict, Workplace

SECONDS = float(os.environ.get("LOKA_FUZZ_SECONDS", "60"))
SEED = int(os.environ.get("LOKA_FUZZ_SEED", str(int(time.time()))))

# Once silent, or a traceback; by seed, reduced to what it needed. Whatever is drawn later, these stay.
FAILED = {
    1046: (Step("functions", "clipped gradient", 1, 1),),
    5100: (Step(*CORE, 0, 1), Step("products", "matmul and bias", 0, 2)),
    30297: (Step("layouts", "split", 2, 4), Step("products", "joined norm", 0, 5)),
    5107: (Step(*CORE, 0, 1), Step("objects", "iterator", 1, 2)),
}


def assert_good(model: RandomModel, folder: Path) -> None:
    with Workplace(folder) as workplace:
        judged = workplace.judge(model)
    assert judged.verdict is not Verdict.INVALID, f"the generator made a model that does not run: {judged.reason}"
    again = f"LOKA_FUZZ_SEED={model.seed} LOKA_FUZZ_SECONDS=0"
    assert judged.verdict not in FAILURES, f"{judged.verdict}: {judged.reason}\nagain: {again}\n{model.source()}"


@pytest.mark.slow
def test_a_random_model_is_equal_or_refused(tmp_path: Path) -> None:
    end, seed = time.monotonic() + SECONDS, SEED
    while seed == SEED or time.monotonic() < end:
        assert_good(draw(seed), tmp_path)
        seed += 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", FAILED)
def test_a_model_that_failed_once_is_equal_or_refused(seed: int, tmp_path: Path) -> None:
    assert_good(RandomModel(seed, FAILED[seed]), tmp_path)
