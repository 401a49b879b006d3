"""plan.json: the same bytes, the same plan back, and clear words for files that are none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import inf

import pytest

from loka.devices.spec import Execution
from loka.errors import InputError
from loka.graph.expression import PRODUCT, Call, Constant, Ref, RefKind, local, method
from loka.graph.fingerprint import Fingerprint, PlannedCall
from loka.graph.ir import ForwardIR, Region, SiteCall, Statement
from loka.kernels.measurements.parts import TimeSource
from loka.mods.adaptation import Adaptation, RewriteResult, Unchanged
from loka.numerics.enums import Accumulation, Format, Fuse, Range
from loka.numerics.recipe import OperandRecipe
from loka.plan.decide import Situation
from loka.plan.plan import (
    NATIVE,
    BindingKind,
    Evidence,
    Gain,
    KernelTime,
    ModPlan,
    PlannedBinding,
    Rejected,
    SiteTiming,
    Skipped,
    StepTime,
    TimedOption,
    TunedStep,
)
from loka.plan.resolve import resolve
from loka.plan.serialize import VERSION, from_json, to_json
from loka.policy.policy import ExecutionSpec
from loka.probe.profile.profile import Interval, Verdict
from tests.support.plan.plan_costs import MadeUp
from tests.support.plan.report_plans import interaction


@pytest.fixture
def whole_plan(make_plan, make_site, make_settings):
    """A plan that uses every type that a plan can hold."""
    x, rank = local("x"), Ref(RefKind.ATTRIBUTE, "self.rank")
    call = SiteCall("layers.0.rank", x, method(rank, "t"), out=method(PRODUCT, "transpose", -1, -2))
    odd = Call("odd", (x, None, True, 1, 1.0, -0.0, "1", (), (1, (x,)), Constant("torch.float32")), (("dim", -1),))
    forward = ForwardIR(
        owner="layers.0",
        owner_type="pkg.Layer",
        arguments=("x",),
        statements=(
            Statement("y", "matmul", Call("torch.matmul", (x, rank)), call, "fmb.0"),
            Statement("z", "odd", odd),
        ),
        result=(local("y"), None),
        inlined=("fmb",),
        regions=(Region("layers.0.rank", 0, 0, ("matmul",)),),
        fingerprint=Fingerprint((PlannedCall("((), ())", ("v0 = relu(x)", "return v0"), ("return x",)),), "float32"),
    )
    shapes = (("rank", (16, 8)),)
    binding = PlannedBinding(
        "Layers", BindingKind.FORWARD, ("layers.0",), "pkg.Layer", (("layers.0.rank",),), shapes, forward
    )
    settings = make_settings(recipe=OperandRecipe(Format.E4M3, range=Range.STATIC, amax=3.3000000000000003))
    plan = make_plan(
        make_site("layers.0.rank", share=1 / 3),
        make_site("größe.\u202e\n'\"", blocked='it\'s "blocked"'),
        settings=settings,
        bindings=(binding,),
        skipped=(Skipped("", "branch at models.py:44 'if x.size(0) > 1024'", 0.125),),
    )
    endless = Interval(inf, -inf, inf)
    evidence = Evidence(
        endless, Interval(30.0, 29.0, 31.0), 16, 40, 4, Verdict.UNSAFE, "MERE inf", Interval(0.1, 0.0, 0.2)
    )
    times = (KernelTime("torch.scaled_mm", 3.5, 0.01, TimeSource.MEASURED, 0.1, 31.5, Accumulation.FAST),)
    gemm = replace(plan.sites[0].gemms[0], evidence=evidence, times=times, m_buckets=((256, "k"), (4096, "l")))
    kept = replace(plan.sites[0].gemms[1], rejected=(Rejected("k", "slow"),))
    time = StepTime(1.25, 2.5, TimeSource.ESTIMATED, 10.0)
    timing = SiteTiming(time, time, time, True, (TimedOption(("k", NATIVE), time, "chosen", 0.1, 30.0),))
    first = replace(plan.sites[0], gemms=(gemm, kept), region=("layer_norm",), region_note="x", timing=timing)
    mod = ModPlan(
        use="block_norm",
        source="mod 1: block_norm",
        place="p.yaml:3",
        exact=False,
        promise="faster",
        settings=(("block", 32), ("eps", 1e-05), ("named", "x"), ("on", True)),
        adaptations=(Adaptation("block_norm", ("norm",), "LayerNorm", (("block", 32),)),),
        rewritten=(RewriteResult("merge_siblings", "layers.0", ("q", "k"), "q+k", "2 linears as one"),),
        unchanged=(Unchanged("a", "why"),),
        gain=Gain(-3.5, -0.1),
    )
    return replace(
        plan,
        sites=(first, replace(plan.sites[1], gains_by_fusing=True)),
        rule_notes=(("rule 1: layers.*", "why"),),
        profile=("profiles/ranker.safetensors", "b" * 64),
        mods=(mod,),
        interactions=(interaction("layers.0", sites=("layers.0.rank",)),),
        execution=ExecutionSpec(Execution.EAGER, 1.0, 0.5),
        ne_budget=0.02,
        tuned=TunedStep("t.json", "c" * 64, "FP8", 2.5, 4.0, None, None, False, "eager", "NVIDIA H200", "2026-01-01"),
    )


def test_a_plan_comes_back_equal_and_gives_the_same_bytes(whole_plan):
    text = to_json(whole_plan)
    again = from_json(text)
    assert again == whole_plan
    assert repr(again.bindings) == repr(whole_plan.bindings)  # 1 == True, but not in repr
    assert to_json(again) == text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert text.endswith("}\n")
    assert text.isascii()


def test_keys_are_sorted(whole_plan):
    def check(value):
        if isinstance(value, dict):
            assert list(value) == sorted(value)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            check(item)

    check(json.loads(to_json(whole_plan)))


@pytest.fixture
def timed_plan(make_plan, make_site, chain_settings):
    """A plan of sites that are alike, decided by made-up measurements."""
    made_up, settings = MadeUp(spread=0.001), chain_settings(fuse=Fuse.AUTO)
    situation = Situation("h100", 4096, costs=made_up)
    sites = [make_site(f"layers.{i}.up", followed_by=("silu",)) for i in range(9)]
    plans = resolve(sites, [settings] * len(sites), situation, {})
    return make_plan(sites=plans, measurements=(made_up.name, made_up.sha256))


def test_a_plan_by_measurements_comes_back_equal_with_the_times_once(timed_plan):
    text = to_json(timed_plan)
    again = from_json(text)
    assert again == timed_plan
    assert to_json(again) == text
    data = json.loads(text)
    assert (data["version"], len(data["timings"])) == (VERSION, 1)
    assert data["measurements"] == ["made-up.jsonl", "c" * 64]
    assert again.sites[0].gains_by_fusing
    assert again.sites[0].timing is again.sites[8].timing
    assert again.sites[0].history is again.sites[8].history
    assert (len(data["histories"]), len(data["decisions"])) == (1, 3)
    assert again.sites[0].timing.chosen.us > 0


def test_what_is_default_is_left_out(make_plan, make_site):
    data = json.loads(to_json(make_plan(make_site())))
    assert not {"measurements", "timings"} & set(data)
    assert not {"timing", "gains_by_fusing"} & set(data["sites"][0])


def test_one_site_is_one_line(make_plan, make_site):
    before = to_json(make_plan(*(make_site(f"layers.{i}.up") for i in range(9)))).splitlines()
    after = to_json(
        make_plan(*(make_site(f"layers.{i}.up", k=4096 if i == 4 else 2048) for i in range(9)))
    ).splitlines()
    assert len(before) == len(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_a_truncated_file_says_so_wherever_it_was_cut(whole_plan):
    text = to_json(whole_plan)
    for length in range(0, len(text) - 2, max(1, len(text) // 40)):
        with pytest.raises(InputError, match=r"^cut\.json:\d+:\d+: not a whole JSON file.*loka generate"):
            from_json(text[:length], "cut.json")


@pytest.mark.parametrize("text", ["[]", "{}", "3", '"x"', "null", '{"format": "loka.package", "version": 1}'])
def test_a_foreign_file_says_so(text):
    with pytest.raises(InputError, match=r"^p\.json: not a plan of LoKA; name a plan\.json"):
        from_json(text, "p.json")


@pytest.mark.parametrize("version", ["15", "17", '"16"', "null"])
def test_another_version_says_what_to_run(version, whole_plan):
    text = to_json(whole_plan).replace('"version": 16', f'"version": {version}')
    with pytest.raises(InputError, match=r"^p\.json: the plan has version .* reads 16: .* `loka generate POLICY`"):
        from_json(text, "p.json")


@pytest.mark.parametrize(
    ("pattern", "new", "place"),
    [
        ('"target": "h100"', '"target": "b300"', "at target"),
        ('"batch_size": 4096', '"batch_size": "many"', "at batch_size"),
        ('"batch_size": 4096', '"batch_size": 0', "at batch_size"),
        ('"batch_size": 4096', '"batch_size": ' + "9" * 5000, "Exceeds the limit"),
        ('"batch_size": 4096', '"batch_size": "4096"', "at batch_size"),
        ('"batch_size": 4096', '"batch_size": 4096.0', "at batch_size"),
        ('"batch_size": 4096', '"batch_size": 4096, "batch_sizes": 1', "at batch_sizes: there is no such field"),
        ('"kind": "linear"', '"kind": "quadratic"', r"at sites\.0\.site\.kind"),
        ('"history": 0', '"history": 7', "a site names a row"),
        ('"history": 0', '"history": -1', r"at sites\.0\.history"),
        ('"history": 0', '"history": 0, "note": ""', r"at sites\.0\.note: there is no such field"),
        ('"name": "ranker",\n', "", "at name"),
        ('"timing": 0', '"timing": 7', "a site names a row"),
        ('"timing": 0', '"timing": -1', r"at sites\.0\.timing"),
        ('"forward": [0-9.]+', '"forward": NaN', r"at timings\.0\."),
        ('"forward": [0-9.]+', '"forward": Infinity', r"at timings\.0\."),
        ('"forward": [0-9.]+', '"forward": 0.0', r"at timings\.0\."),
        ('"backward": [0-9.]+', '"backward": -5.0', r"at timings\.0\."),
        ('"share": [0-9.]+', '"share": 1e999', "the share of site"),
        ('"share": 0.', '"share": 7.', "the share of site"),
        ('"k": ', '"k": -', "a size or the share of site"),
        ('"name": "layers.1.up"', '"name": "layers.0.up"', "site 'layers.0.up' is there 2 times"),
        ('"calls": ', '"more": 1, "calls": ', r"at sites\.0\.site\.more: there is no such field"),
    ],
)
def test_a_damaged_file_says_where(pattern, new, place, timed_plan):
    text = to_json(timed_plan)
    edited = re.sub(pattern, new, text)
    assert edited != text
    with pytest.raises(InputError, match=rf"^p\.json: damaged.*{place}.*; make it again with `loka generate"):
        from_json(edited, "p.json")


@pytest.mark.parametrize(
    ("pattern", "new", "place"),
    [
        ('"kind": "local"', '"kind": "global"', r"result\..*\.0\.Ref\.kind: Input should be 'local', "),
        (r'"target": "torch\.matmul"', '"target": 7', r"statements\.0\.value\."),
    ],
)
def test_a_damaged_expression_says_where(pattern, new, place, whole_plan):
    edited = re.sub(pattern, new, to_json(whole_plan), count=1)
    with pytest.raises(InputError, match=rf"^p\.json: damaged at bindings\.0\.forward\.{place}"):
        from_json(edited, "p.json")
