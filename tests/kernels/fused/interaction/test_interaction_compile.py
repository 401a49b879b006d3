"""Interactions of all sizes fit into the shared memory of a block on sm_90, whatever dtype passes."""

from __future__ import annotations

import pytest

from loka.devices.targets import DEFAULT
from loka.errors import InputError
from loka.kernels.fused.interaction.dot import dot_configuration
from loka.kernels.fused.interaction.fm import FmBackward, FmForward, FmSizes, fm_configuration, shared_bytes
from tests.support.kernels.interaction_cases import LARGEST, dot_specs
from tests.support.kernels.rendered_cases import write_package
from tests.support.kernels.sm90 import SHARED, launches, spilled

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("triton_cache")]

DOTS = ((128, 128), (16, 1024), (101, 100), (64, 64), (27, 128))  # the largest, and without masks
SIDES = (1, 16, 27, 64, 100, 128, 200, 256, 1000, 2048, 32768)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    specs = [spec for sizes in LARGEST for spec in (FmForward(sizes), FmBackward(sizes, True))]
    specs += [spec for sizes in DOTS for spec in dot_specs(sizes)]
    return write_package(tmp_path_factory.mktemp("interactions_sm90") / "interactions_sm90_package", specs)


def backwards(sizes: FmSizes) -> list[FmBackward]:
    return [FmBackward(sizes, passed) for passed in (False, True)]


@pytest.mark.parametrize(
    ("sizes", "passed"),
    [*((sizes, "bf16") for sizes in LARGEST), *((sizes, "fp32") for sizes in LARGEST[1:3])],
    ids=str,
)
def test_a_block_has_the_shared_memory_that_they_take(package, sizes, passed):
    wide = passed == "fp32"
    for spec in (FmBackward(sizes, True),) if wide else (FmForward(sizes), FmBackward(sizes, True)):
        launch = fm_configuration(spec)
        stages = launch.stages_wide if wide else launch.stages
        (launched,) = launches(package, spec, "bf16", passed=passed)
        assert launched.given["STAGES"] == stages
        binary = launched.compiled()
        assert binary.metadata.shared <= shared_bytes(spec, launch.chunk, stages, wide) <= SHARED, spec


@pytest.mark.parametrize("sizes", DOTS, ids=str)
def test_a_dot_interaction_compiles_without_a_spill(package, sizes, tmp_path):
    for spec in dot_specs(sizes):
        (launched,) = launches(package, spec, "bf16")
        assert launched.given["STAGES"] == dot_configuration(spec).stages
        binary = launched.compiled()
        assert binary.metadata.shared <= SHARED, spec
        assert spilled(binary, tmp_path) == 0, spec


def test_every_size_that_is_not_refused_has_a_launch():
    """Of each kernel, with either dtype of what passes."""
    found = 0
    for n in SIDES:
        for d in SIDES:
            for r in SIDES:
                for c in (0, *SIDES):
                    try:
                        sizes = FmSizes(n, d, r, c)
                    except InputError:
                        continue
                    found += 1
                    for spec in (FmForward(sizes), *backwards(sizes)):
                        launch = fm_configuration(spec)
                        for stages, wide in ((launch.stages, False), (launch.stages_wide, True)):
                            assert shared_bytes(spec, launch.chunk, stages, wide) <= DEFAULT.shared_bytes, spec
    assert found > 500
