"""The profile on the disk: what is saved comes back, and what is damaged is refused with what to do."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from loka.errors import InputError
from loka.mods.adaptation import ModFingerprint
from loka.numerics.enums import Format, Gemm, Operand, Range, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.probe.profile import profile_file
from loka.probe.profile.profile import Estimate, Finding, Interval, NeEstimate, RecordedStats, SiteProfile
from loka.probe.stats.site_stats import MAGNITUDE_BINS, SiteStats
from tests.support.flips import flipped
from tests.support.plan.made_profiles import (
    QUANTILES,
    as_version_2,
    floats,
    make_estimates,
    make_operand,
    make_profile,
    make_recorded,
    make_site,
    rewritten,
)

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
Change = Callable[[str], str]
Load = Callable[[Path], object]
SITE = ("profile", "sites", 0)
NE = {
    "gemm": "fprop",
    "operands": [{}, {}],
    "ne_percent": {"mean": 0.01, "low": 0.005, "high": 0.02},
    "run_percent": 0.03,
    "varying_error": 0.002,
}


def flat(value: object) -> list[object]:
    """Everything within nested dataclasses, in order: tensors cannot be compared with ==."""
    if hasattr(value, "__dataclass_fields__"):
        return [item for name in value.__dataclass_fields__ for item in (name, *flat(getattr(value, name)))]
    return [value]


def assert_same_stats(a: SiteStats, b: SiteStats) -> None:
    for x, y in zip(flat(a), flat(b), strict=True):
        if isinstance(x, Tensor):
            assert isinstance(y, Tensor)
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert torch.equal(x.nan_to_num(99.0), y.nan_to_num(99.0)) if x.is_floating_point() else torch.equal(x, y)
        else:
            assert x == y


def refused(path: Path, *words: str, loads: tuple[Load, ...] = (profile_file.load, profile_file.load_profile)) -> None:
    """The ways of loading refuse a file, with a message that names it and holds the words."""
    for load in loads:
        with pytest.raises(InputError) as caught:
            load(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: ")
        assert ";" in message  # what is wrong; what to do
        for word in words:
            assert word in message


def put(place: tuple[str | int, ...], value: object) -> Change:
    """A change of a header: another value at a place, or none there (`...`)."""

    def change(text: str) -> str:
        header = inner = json.loads(text)
        for part in place[:-1]:
            inner = inner[part]
        if value is ...:
            del inner[place[-1]]
        else:
            inner[place[-1]] = value
        return json.dumps(header)

    return change


@pytest.fixture
def summary(tmp_path: Path) -> Path:
    path = tmp_path / "ranker.safetensors"
    profile_file.save(path, make_profile((make_site("a", 24, 8),)))
    return path


@pytest.fixture
def full(tmp_path: Path) -> Path:
    path = tmp_path / "ranker.full.safetensors"
    profile_file.save(path, make_recorded((24, 8)))
    return path


class TestRoundTrip:
    def test_summary(self, tmp_path: Path) -> None:
        profile = make_recorded((24, 8), (700, 33)).profile
        profile_file.save(tmp_path / "p.safetensors", profile)
        assert profile_file.load(tmp_path / "p.safetensors") == profile
        assert profile_file.load_profile(tmp_path / "p.safetensors") == profile

    def test_full(self, tmp_path: Path) -> None:
        recorded = make_recorded((24, 8), (700, 33), (1, 1))
        profile_file.save(tmp_path / "p.safetensors", recorded)
        loaded = profile_file.load(tmp_path / "p.safetensors")
        assert isinstance(loaded, RecordedStats)
        assert loaded.profile == recorded.profile
        assert profile_file.load_profile(tmp_path / "p.safetensors") == recorded.profile
        for mine, theirs in zip(recorded.stats, loaded.stats, strict=True):
            assert_same_stats(mine, theirs)

    def test_a_profile_without_sites(self, tmp_path: Path) -> None:
        profile = make_profile(())
        profile_file.save(tmp_path / "p.safetensors", profile)
        assert profile_file.load(tmp_path / "p.safetensors") == profile
        profile_file.save(tmp_path / "f.safetensors", RecordedStats(profile, ()))
        assert profile_file.load(tmp_path / "f.safetensors") == RecordedStats(profile, ())

    def test_infinite_intervals_survive(self, tmp_path: Path) -> None:
        inf = math.inf
        recipe = OperandRecipe(Format.E5M2, Scaling.ROWWISE, Range.STATIC, 3.5, True, transposed=True)
        one_draw = Estimate(Gemm.DGRAD, (recipe, recipe), Interval(0.5, 0.0, inf), Interval(9.0, -inf, inf), 1)
        not_finite = replace(one_draw, mere=Interval(inf, inf, inf), sqnr_db=Interval(-inf, -inf, -inf), draws=4)
        exact = replace(one_draw, mere=Interval(0.0, 0.0, 0.0), sqnr_db=Interval(inf, inf, inf), draws=4)
        profile = make_profile((replace(make_site("a", 8, 8), estimates=(one_draw, not_finite, exact)),))
        profile_file.save(tmp_path / "p.safetensors", profile)
        assert profile_file.load(tmp_path / "p.safetensors") == profile

    @given(
        name=st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
        number=st.floats(min_value=0.0, allow_infinity=False),
        ends=st.tuples(*[st.floats(min_value=0.0, allow_infinity=False)] * 3).map(sorted),
        count=st.integers(0, 2**62),
    )
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_contents(self, tmp_path: Path, name: str, number: float, ends: list[float], count: int) -> None:
        operand = replace(make_operand(Operand.INPUT, 8), rms=number, rows=count, magnitudes=(count,) * MAGNITUDE_BINS)
        estimate = replace(make_estimates(1)[0], mere=Interval(ends[1], ends[0], ends[2]), draws=count)
        site = SiteProfile(name, 8, 4, count, (operand,), (estimate,))
        profile = replace(make_profile((site,)), name=name, created=name, findings=(Finding(name, name, name, name),))
        profile_file.save(tmp_path / "p.safetensors", profile)
        assert profile_file.load(tmp_path / "p.safetensors") == profile

    def test_equal_contents_make_equal_bytes(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            profile_file.save(tmp_path / name, make_recorded((24, 8), (600, 5)))
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_tensors_that_share_memory_are_kept_apart(self, tmp_path: Path) -> None:
        stats, never = (recorded := make_recorded((8, 8))).stats
        assert stats.input is not None
        operand = replace(stats.input, block_spread=stats.input.row_spread)
        profile_file.save(tmp_path / "p", replace(recorded, stats=(replace(stats, input=operand), never)))
        loaded = profile_file.load(tmp_path / "p")
        assert isinstance(loaded, RecordedStats)
        assert loaded.stats[0].input is not None
        assert torch.equal(loaded.stats[0].input.block_spread, stats.input.row_spread)

    def test_mods_and_changes_of_ne(self, summary: Path) -> None:
        site = make_site("a", 24, 8)
        pairs = [each.operands for each in site.estimates[:2]]
        ne = (
            NeEstimate(Gemm.FPROP, pairs[0], Interval(0.01, 0.005, 0.02), 0.03, 0.002),
            NeEstimate(Gemm.FPROP, pairs[1], Interval(math.inf, math.inf, math.inf), 0.0, math.inf),
        )
        mods = (ModFingerprint("block_norm", "0123456789abcdef", "2 modules, a to b, block 32"),)
        profile = replace(make_profile((replace(site, ne=ne),)), mods=mods, synthetic=True)
        profile_file.save(summary, profile)
        assert profile_file.load_profile(summary) == profile

    def test_summary_of_a_ranker_stays_small(self, tmp_path: Path) -> None:
        sites = tuple(make_site(f"layers.{i}.factorisation.mlp.0", 2048, 2048) for i in range(20))
        assert len(sites[0].estimates) == 24
        profile_file.save(tmp_path / "p", make_profile(sites))
        assert (tmp_path / "p").stat().st_size < 500_000


class TestSave:
    def test_makes_missing_folders_and_leaves_only_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "er" / "p.safetensors"
        profile_file.save(path, make_profile(()))
        profile_file.save(path, make_profile((make_site("a", 8, 8),)))
        assert [found.name for found in path.parent.iterdir()] == ["p.safetensors"]
        assert len(profile_file.load_profile(path).sites) == 1

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
    def test_a_failure_leaves_what_was_there(
        self, summary: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
    ) -> None:
        before = summary.read_bytes()

        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(os, call, fail)
        expected = InputError if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(expected) as caught:
            profile_file.save(summary, make_profile(()))
        monkeypatch.undo()
        if isinstance(error, OSError):
            assert f"{summary}: cannot be written (No space left on device); free space" in str(caught.value)
        assert summary.read_bytes() == before
        assert [found.name for found in summary.parent.iterdir()] == [summary.name]

    def test_a_place_that_cannot_be(self, summary: Path) -> None:
        with pytest.raises(InputError, match="cannot be written"):
            profile_file.save(summary / "below" / "a file", make_profile(()))
        with pytest.raises(InputError, match="cannot be written"):
            profile_file.save(summary.parent, make_profile(()))
        assert [found.name for found in summary.parent.iterdir()] == [summary.name]

    def test_a_link_stays_one(self, summary: Path) -> None:
        link = summary.parent / "link.safetensors"
        link.symlink_to(summary)
        profile_file.save(link, make_profile(()))
        assert link.is_symlink()
        assert profile_file.load_profile(summary).sites == ()

    def test_numbers_that_cannot_be_are_refused(self, tmp_path: Path) -> None:
        site, (stats, never) = make_site("a", 8, 8), (recorded := make_recorded((8, 6))).stats
        bad_rms = replace(site, operands=(replace(site.operands[0], rms=math.nan),))
        bad_spread = replace(site, operands=(replace(site.operands[0], row_spread=replace(QUANTILES, p99=math.inf)),))
        bad_mere = replace(site, estimates=(replace(site.estimates[0], mere=Interval(math.nan, 0.0, 1.0)),))
        assert stats.weight is not None
        bad_weight = replace(stats, weight=replace(stats.weight, amax=math.nan))
        for bad, words in (
            (make_profile((bad_rms,)), "profile.sites.0.operands.0.rms: Input should be"),
            (make_profile((bad_spread,)), "profile.sites.0.operands.0.row_spread.p99: Input should be"),
            (make_profile((bad_mere,)), "profile.sites.0.estimates.0.mere: Value error, nan within 0.0 to 1.0"),
            (replace(recorded, stats=(bad_weight, never)), "stats.0.weight.amax: Input should be"),
        ):
            with pytest.raises(InputError, match="was not saved: ") as caught:
                profile_file.save(tmp_path / "p", bad)
            assert words in str(caught.value)
        assert list(tmp_path.iterdir()) == []

    def test_whole_numbers_as_ends_of_an_interval(self, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
        site = make_site("a", 8, 8)
        whole = replace(site, estimates=(replace(site.estimates[0], mere=Interval(1, 0, 2)),))
        profile_file.save(tmp_path / "p", make_profile((whole,)))
        assert profile_file.load_profile(tmp_path / "p").sites == (whole,)
        assert list(recwarn) == []

    def test_statistics_that_are_not_what_they_should_be_are_refused(self, tmp_path: Path) -> None:
        recorded = make_recorded((8, 6))
        site, never = recorded.stats
        assert site.input is not None
        moments = site.input.moments
        poisoned = replace(moments, mean=moments.mean * math.nan)
        for operand, words in (
            (replace(site.input, moments=poisoned), "'layers.0.mlp': input/moments/mean holds NaN"),
            (replace(site.input, values=site.input.values.int()), "input/values is torch.int32"),
            (replace(site.input, row_rms=-site.input.row_rms - 1), "input/row_rms holds a negative number"),
            (replace(site.input, column_amax=floats(9)), r"input/column_amax is torch.float64 of shape \(9,\)"),
        ):
            with pytest.raises(InputError, match=words):
                profile_file.save(tmp_path / "p", replace(recorded, stats=(replace(site, input=operand), never)))
        with pytest.raises(InputError, match="not those of its summary"):
            profile_file.save(tmp_path / "p", replace(recorded, stats=(never, site)))
        with pytest.raises(InputError, match=r"two sites are called 'layers\.0\.mlp'"):
            profile_file.save(tmp_path / "p", make_profile((recorded.profile.sites[0],) * 2))
        assert list(tmp_path.iterdir()) == []


class TestRefuses:
    def test_missing(self, tmp_path: Path) -> None:
        refused(tmp_path / "none.safetensors", "no such profile; make one with `loka probe POLICY`")

    def test_a_folder(self, tmp_path: Path) -> None:
        refused(tmp_path, "cannot read the profile")

    def test_empty(self, summary: Path) -> None:
        summary.write_bytes(b"")
        refused(summary, "the file is empty")

    @pytest.mark.parametrize("form", ["summary", "full"])
    def test_cut(self, form: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        data, cut = request.getfixturevalue(form).read_bytes(), tmp_path / "cut"
        for length in [*range(12), *range(12, len(data), len(data) // 100), len(data) - 1]:
            cut.write_bytes(data[:length])
            refused(cut)

    @pytest.mark.parametrize(
        "data", [b"hello", b"hello world, this is no profile", b"\x80\x04\x95" * 40, b"PK\3\4" * 99]
    )
    def test_something_else(self, tmp_path: Path, data: bytes) -> None:
        (tmp_path / "p").write_bytes(data)
        refused(tmp_path / "p", "no")

    def test_a_checkpoint(self, tmp_path: Path) -> None:
        save_file({"weight": torch.zeros(3)}, tmp_path / "p")
        refused(tmp_path / "p", "a safetensors file, but not a profile of LoKA")

    def test_a_pickle_is_not_run(self, tmp_path: Path) -> None:
        torch.save({"weight": torch.zeros(3)}, tmp_path / "p")
        refused(tmp_path / "p", "not a profile of LoKA")

    def test_another_version(self, summary: Path) -> None:
        as_version_2(summary)
        refused(summary, "of an earlier LoKA (version 2, and this one reads 3); make it again: loka probe POLICY")
        rewritten(summary, put(("version",), 4))
        refused(summary, "of a newer LoKA (version 4, and this one reads 3); upgrade LoKA")

    @pytest.mark.parametrize("form", ["summary", "full"])
    def test_every_flipped_bit(self, form: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        """Of a full file, `load_profile` reads the summary alone: it is refused, or as it was."""
        path, bad = request.getfixturevalue(form), tmp_path / "bad"
        profile = profile_file.load_profile(path)
        for changed in flipped(path.read_bytes()):
            bad.write_bytes(changed)
            refused(bad, loads=(profile_file.load,))
            if form == "full":
                with contextlib.suppress(InputError):
                    assert profile_file.load_profile(bad) == profile
            else:
                refused(bad, loads=(profile_file.load_profile,))

    def test_the_summary_of_a_full_file_needs_none_of_its_statistics(self, full: Path) -> None:
        profile = profile_file.load_profile(full)
        with safe_open(full, framework="pt") as opened:
            metadata = opened.metadata()
        lost = {name: each if name == "sha256" else torch.zeros_like(each) for name, each in load_file(full).items()}
        save_file(lost, full, metadata)
        assert profile_file.load_profile(full) == profile
        refused(full, "its checksum does not match", loads=(profile_file.load,))

    def test_the_message_of_a_checksum(self, summary: Path) -> None:
        data = bytearray(summary.read_bytes())
        data[-1] ^= 1
        summary.write_bytes(data)
        refused(summary, "is damaged: its checksum does not match; make it again with `loka probe`, or take it from")

    def test_a_file_far_longer_than_its_header_says(self, summary: Path) -> None:
        with summary.open("r+b") as file:
            file.truncate(1 << 40)  # a hole: hashing it would take an hour
        refused(summary, "is damaged or was cut short (")

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "p")
        refused(tmp_path / "p", "cannot read the profile: it is a device or a pipe")

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (("version",), 0),
            (("profile", "steps"), "6000"),
            (("profile", "steps"), -1),
            (("profile", "steps"), 1.5),
            (("profile", "steps"), True),
            (("profile", "steps"), 1 << 63),
            (("profile", "name"), 7),
            (("profile", "sites"), ...),
            ((*SITE, "operands", 0, "operand"), "bias"),
            ((*SITE, "operands", 0, "rms"), "0.7"),
            ((*SITE, "operands", 0, "rms"), None),
            ((*SITE, "operands", 0, "calls"), -1),
            ((*SITE, "operands", 0, "magnitudes"), [0] * 127),
            ((*SITE, "operands", 0, "magnitudes", 3), -1),
            *[
                ((*SITE, "operands", 0, name), -0.5)
                for name in ("amax", "usual_amax", "rms", "covariance_error", "zeros")
            ],
            ((*SITE, "operands", 0, "rms"), math.inf),
            ((*SITE, "operands", 0, "row_spread", "p1"), -0.1),
            ((*SITE, "operands", 0, "zeros"), 1.25),
            ((*SITE, "operands", 0, "shares", 0, "underflow"), -0.25),
            ((*SITE, "operands", 0, "shares", 1, "subnormal"), 1.5),
            ((*SITE, "estimates", 0), ["fprop"]),
            ((*SITE, "estimates", 0, "mere", "mean"), "nan"),
            ((*SITE, "estimates", 0, "mere", "mean"), math.nan),
            ((*SITE, "estimates", 0, "mere"), {"mean": math.inf, "low": 0.0, "high": math.inf}),
            ((*SITE, "estimates", 0, "mere"), {"mean": 0.1, "low": -0.1, "high": 0.3}),
            ((*SITE, "estimates", 0, "mere"), {"mean": 0.1, "low": 0.2, "high": 0.3}),
            ((*SITE, "estimates", 0, "sqnr_db"), {"mean": 25.0, "low": 24.0, "high": 23.0}),
            ((*SITE, "estimates", 0, "operands", 0, "amax"), -3.0),
            ((*SITE, "estimates", 0, "operands", 0, "scaling"), "columnwise"),
            ((*SITE, "ne"), [NE | {"run_percent": -0.1}]),
            ((*SITE, "ne"), [NE | {"varying_error": -0.1}]),
            ((*SITE, "ne"), [NE | {"ne_percent": {"mean": 0.01, "low": 0.02, "high": 0.03}}]),
        ],
    )
    def test_a_field_that_no_probe_writes(self, summary: Path, place: tuple[str | int, ...], value: object) -> None:
        rewritten(summary, put(place, value))
        refused(summary, "make it again")

    def test_statistics_of_no_site(self, summary: Path) -> None:
        rewritten(summary, put(("stats",), []))
        refused(summary, "the sites of its statistics are not those of its summary", loads=(profile_file.load,))

    @pytest.mark.parametrize(("field", "value"), [("amax", -1.0), ("amax", math.inf), ("u", {"error": -0.5})])
    def test_a_number_of_a_weight(self, full: Path, field: str, value: object) -> None:
        rewritten(full, put(("stats", 0, "weight", field), value))
        refused(full, f"is damaged: stats.0.weight.{field}", loads=(profile_file.load,))

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", '{"version": "x"}', "[" * 100_000, '{"a":' * 50_000])
    def test_a_header_that_is_none(self, summary: Path, text: str) -> None:
        rewritten(summary, lambda _: text)
        refused(summary, "is damaged: ")

    @pytest.mark.parametrize(
        ("name", "tensor", "words"),
        [
            ("input.moments.mean", None, "the file lacks its tensor"),
            ("input.moments.mean", torch.full((24,), math.nan, dtype=torch.float64), "holds NaN or infinity"),
            ("input.moments.comoment", torch.zeros(24, 72, dtype=torch.float64), "of shape (24, 72), but"),
            ("input.moments.diagonal", torch.full((24,), -1e-9, dtype=torch.float64), "holds a negative number"),
            ("input.column_amax", torch.full((24,), -1e-9, dtype=torch.float64), "holds a negative number"),
            ("input.row_rms", torch.full((513,), -1), "holds a negative number"),
            ("input.values", torch.zeros(24, 257, dtype=torch.bfloat16), "is torch.bfloat16 of shape"),
            ("weight.rows", torch.zeros(7, 24), "of shape (7, 24), but must be torch.float32 of shape (8, 24)"),
            ("weight.row_index", torch.arange(9), "of shape (9,), but must be torch.int64 of shape (8,)"),
            ("weight.row_index", torch.full((8,), 8), "holds 8, but must stay below 8"),
            ("weight.row_amax", torch.full((8,), -1e-9, dtype=torch.float64), "holds a negative number"),
            ("weight.u.diagonal", torch.full((8,), -1e-9, dtype=torch.float64), "holds a negative number"),
            ("weight.u.factor", torch.zeros(8, 9, dtype=torch.float64), "of shape (8, 9), but"),
            ("joint.grad_features", torch.full((9,), 0), "of shape (9,), but"),
        ],
    )
    def test_a_tensor_that_no_probe_writes(self, full: Path, name: str, tensor: Tensor | None, words: str) -> None:
        number: list[Any] = []

        def find(text: str) -> str:
            found = json.loads(text)["stats"][0]
            for part in name.split("."):
                found = found[part]
            number.append(found)
            return text

        rewritten(full, find)
        rewritten(full, **{number[0]: tensor})
        refused(full, words, loads=(profile_file.load,))


@pytest.mark.parametrize("path", sorted((ROOT / "policies" / "profiles").iterdir()), ids=lambda path: path.name)
def test_profiles_that_ship_are_of_this_version(path: Path) -> None:
    assert profile_file.load_profile(path).sites


def test_a_form_that_is_too_large_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = make_recorded((24, 8), (600, 5))
    whole = profile_file.save(tmp_path / "all", recorded)
    assert whole == (tmp_path / "all").stat().st_size

    def never(*_: object) -> bytes:
        raise AssertionError

    monkeypatch.setattr(profile_file, "_to_bytes", never)
    size = profile_file.save(tmp_path / "p", recorded, largest=1000)
    assert 0.9 * whole < size <= whole
    assert not (tmp_path / "p").exists()
