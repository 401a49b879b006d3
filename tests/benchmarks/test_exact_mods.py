"""The cases that mods of forwards are measured on: each is planned with its mod, and takes part in it."""

from __future__ import annotations

import runpy

import pytest
import torch

from benchmarks.exact_mods import exact_cases, exact_mods
from benchmarks.exact_mods.exact_cases import CASES, ModCase
from benchmarks.exact_mods.exact_mods import BF16, FP8
from benchmarks.packages import StudyWorkshop
from loka.errors import InputError


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU
def test_the_mod_of_a_case_finds_what_it_is_for(case: ModCase) -> None:
    with StudyWorkshop() as workshop:
        package = exact_mods.package(workshop, case, BF16 if case.bf16 else FP8, modded=True)
        model = exact_cases.build(case)
        given = exact_cases.inputs(case, 3)
        expected = model(*given)
        with package.apply(model):
            assert any("Rewritten by" in (type(each).__doc__ or "") for each in model.modules())
            limit = 1e-4 if case.bf16 else 0.1
            torch.testing.assert_close(model(*given), expected, rtol=limit, atol=limit)


def test_a_case_in_fp8_has_gemms_in_fp8_with_the_mod() -> None:
    case = exact_cases.named(["joined_13x512"])[0]
    with StudyWorkshop() as workshop:
        assert "'fprop'" in str(exact_mods.package(workshop, case, FP8, modded=True).BINDINGS)


def test_an_unknown_case_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="there is no case 'experts'; there are experts_8x512x1024"):
        exact_cases.named(["experts"])


@pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # that the module is imported already
def test_run_as_a_program_it_builds_the_model_that_it_plans_for() -> None:
    program = runpy.run_module("benchmarks.exact_mods.exact_mods", run_name="loka_program")
    case = exact_cases.named(["joined_13x512"])[0]
    with StudyWorkshop() as workshop:
        program["package"](workshop, case, BF16, modded=True).apply(program["build"](case)).remove()
