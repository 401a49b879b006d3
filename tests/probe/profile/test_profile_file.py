"""The profile on the disk: what is saved comes back, and what is damaged is refused with what to do."""

from __future__ import annotations

import errno
import json
import math
import os
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from loka.errors import InputError
from loka.mods.fingerprint import ModFingerprint
from loka.numerics.enums import Format, Gemm, Operand, Range, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.probe.profile import header, profile_file
from loka.probe.profile.profile import (
    VERSION,
    Estimate,
    Finding,
    Interval,
    NeEstimate,
    OperandSummary,
    Profile,
    SiteProfile,
)
from loka.probe.stats.bins import MAGNITUDE_BINS, SPREAD_BINS
from loka.probe.stats.site_stats import (
    RecordedStats,
    SiteStats,
)
from tests.support.plan.made_profiles import (
    QUANTILES,
    as_version_1,
    floats,
    make_estimates,
    make_operand,
    make_profile,
    make_recorded,
    make_site,
    resealed,
)

pytestmark = pytest.mark.slow


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


def refused(path: Path, *words: str) -> str:
    """The message with which both ways of loading refuse a file; it names the file and holds the words."""
    with pytest.raises(InputError) as caught:
        profile_file.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert ";" in message  # what is wrong; what to do
    for word in words:
        assert word in message
    with pytest.raises(InputError):
        profile_file.load_profile(path)
    return message


def rewritten(path: Path, change_text: str | None = None, **tensors: Tensor | None) -> None:
    """Change the header or the tensors of a saved profile, as a valid safetensors file; None removes a tensor."""
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    contents = load_file(path)
    for name, tensor in tensors.items():
        name = name.replace("__", "/")
        contents.pop(name)
        if tensor is not None:
            contents[name] = tensor
    text = metadata["loka.profile"] if change_text is None else change_text
    save_file(contents, path, {"loka.profile": text})
    resealed(path)


def header_of(path: Path) -> dict[str, object]:
    with safe_open(path, framework="pt") as opened:
        loaded: dict[str, object] = json.loads(opened.metadata()["loka.profile"])
        return loaded


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
        recipe = OperandRecipe(Format.E5M2, Scaling.ROWWISE, Range.STATIC, 3.5, True)
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
        recorded = make_recorded((8, 8))
        both = torch.arange(2 * SPREAD_BINS)
        site = recorded.stats[0]
        assert site.input is not None
        operand = replace(site.input, row_spread=both[:SPREAD_BINS], block_spread=both[SPREAD_BINS:])
        profile_file.save(tmp_path / "p", replace(recorded, stats=(replace(site, input=operand), recorded.stats[1])))
        loaded = profile_file.load(tmp_path / "p")
        assert isinstance(loaded, RecordedStats)
        assert loaded.stats[0].input is not None
        assert loaded.stats[0].input.row_spread.tolist() == list(range(SPREAD_BINS))
        assert loaded.stats[0].input.block_spread.tolist() == list(range(SPREAD_BINS, 2 * SPREAD_BINS))

    def test_float32_statistics_are_widened(self, tmp_path: Path) -> None:
        recorded = make_recorded((8, 8))
        weight = recorded.stats[0].weight
        assert weight is not None
        narrow = replace(weight, row_amax=weight.row_amax.float())
        profile_file.save(
            tmp_path / "p", replace(recorded, stats=(replace(recorded.stats[0], weight=narrow), recorded.stats[1]))
        )
        loaded = profile_file.load(tmp_path / "p")
        assert isinstance(loaded, RecordedStats)
        assert loaded.stats[0].weight is not None
        assert torch.equal(loaded.stats[0].weight.row_amax, weight.row_amax.float().double())

    @pytest.mark.parametrize(
        ("whole", "written", "apart"),
        [
            (OperandSummary, header._OperandRow, {"magnitudes"}),
            (SiteProfile, header._ProfileSiteRow, set()),
            (Profile, header._Header, {"-format", "-version", "-form", "-recipes", "-stats"}),
        ],
    )
    def test_no_field_is_forgotten(self, whole: type, written: type, apart: set[str]) -> None:
        """A field that is added to a profile must be added to its file. `apart`: kept elsewhere; -: the file's own."""
        mine, theirs = ({field.name for field in fields(kind)} for kind in (whole, written))
        assert mine - {name for name in apart if name[0] != "-"} == theirs - {name[1:] for name in apart}

    def test_the_mods_are_kept_and_an_older_file_is_of_a_model_without(self, summary: Path) -> None:
        mods = (ModFingerprint("block_norm", "0123456789abcdef", "2 modules, a to b, block 32"),)
        profile_file.save(summary, replace(profile_file.load_profile(summary), mods=mods))
        assert profile_file.load_profile(summary).mods == mods
        header = header_of(summary)
        del header["mods"]
        rewritten(summary, json.dumps(header))
        assert profile_file.load_profile(summary).mods == ()

    def test_changes_of_ne_are_kept_and_an_older_file_has_none(self, summary: Path) -> None:
        site = make_site("a", 24, 8)
        pairs = [each.operands for each in site.estimates[:2]]
        ne = (
            NeEstimate(Gemm.FPROP, pairs[0], Interval(0.01, 0.005, 0.02), 0.03, 0.002),
            NeEstimate(Gemm.FPROP, pairs[1], Interval(math.inf, math.inf, math.inf), 0.0, math.inf),
        )
        assert profile_file.load_profile(summary).sites[0].ne == ()
        profile_file.save(summary, make_profile((replace(site, ne=ne),)))
        assert profile_file.load_profile(summary).sites[0].ne == ne
        older = header_of(summary)
        for row in older["sites"]:
            del row["ne"]
        rewritten(summary, json.dumps(older))
        assert profile_file.load_profile(summary) == make_profile((site,))

    @pytest.mark.parametrize(
        "wrong",
        [
            {"ne_percent": Interval(0.01, 0.02, 0.03)},
            {"ne_percent": Interval(math.nan, math.nan, math.nan)},
            {"run_percent": -0.1},
            {"varying_error": -0.1},
        ],
    )
    def test_a_change_of_ne_that_cannot_be_is_refused(self, wrong: dict[str, object], summary: Path) -> None:
        site = make_site("a", 24, 8)
        good = NeEstimate(Gemm.FPROP, site.estimates[0].operands, Interval(0.01, 0.005, 0.02), 0.03, 0.002)
        with pytest.raises(InputError, match="the NE estimate of fprop"):
            profile_file.save(summary, make_profile((replace(site, ne=(replace(good, **wrong),)),)))

    def test_summary_of_a_ranker_stays_small(self, tmp_path: Path) -> None:
        sites = tuple(make_site(f"layers.{i}.factorisation.mlp.0", 2048, 2048) for i in range(20))
        assert len(sites[0].estimates) == 24
        profile_file.save(tmp_path / "p", make_profile(sites))
        assert (tmp_path / "p").stat().st_size < 500_000

    def test_the_summary_of_a_full_file_needs_none_of_its_statistics(self, full: Path) -> None:
        profile = profile_file.load_profile(full)
        rewritten(full, sites__0__input__values=None)
        assert profile_file.load_profile(full) == profile
        with pytest.raises(InputError, match="sites/0/input/values is missing"):
            profile_file.load(full)


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

        monkeypatch.setattr(os if call == "fsync" else Path, call, fail)
        expected = InputError if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(expected) as caught:
            profile_file.save(summary, make_profile(()))
        monkeypatch.undo()
        if isinstance(error, OSError):
            assert f"{summary}: cannot write the profile: No space left on device; free space" in str(caught.value)
        assert summary.read_bytes() == before
        assert [found.name for found in summary.parent.iterdir()] == [summary.name]

    def test_a_place_that_cannot_be(self, summary: Path) -> None:
        with pytest.raises(InputError, match="cannot write the profile"):
            profile_file.save(summary / "below" / "a file", make_profile(()))
        with pytest.raises(InputError, match="cannot write the profile"):
            profile_file.save(summary.parent, make_profile(()))
        assert [found.name for found in summary.parent.iterdir()] == [summary.name]

    def test_a_link_stays_one(self, summary: Path) -> None:
        link = summary.parent / "link.safetensors"
        link.symlink_to(summary)
        profile_file.save(link, make_profile(()))
        assert link.is_symlink()
        assert profile_file.load_profile(summary).sites == ()

    def test_nan_and_misplaced_infinity_are_refused(self, tmp_path: Path) -> None:
        site = make_site("a", 8, 8)
        bad_rms = replace(site, operands=(replace(site.operands[0], rms=math.nan),))
        bad_spread = replace(site, operands=(replace(site.operands[0], row_spread=replace(QUANTILES, p99=math.inf)),))
        bad_mere = replace(site, estimates=(replace(site.estimates[0], mere=Interval(math.nan, 0.0, 1.0)),))
        for bad, words in (
            (bad_rms, "'a': input.rms is nan"),
            (bad_spread, "'a': input.row_spread.p99 is inf"),
            (bad_mere, "'a': the fprop estimate.mere.mean is nan, but must be one"),
        ):
            with pytest.raises(InputError) as caught:
                profile_file.save(tmp_path / "p", make_profile((bad,)))
            assert words in str(caught.value)
        assert list(tmp_path.iterdir()) == []

    def test_numbers_of_a_weight_that_are_not_finite_are_refused(self, tmp_path: Path) -> None:
        recorded = make_recorded((8, 6))
        site, never = recorded.stats
        assert site.weight is not None
        bad = replace(site, weight=replace(site.weight, amax=math.nan))
        with pytest.raises(InputError, match=r"'layers\.0\.mlp': weight\.amax is nan, but must be finite"):
            profile_file.save(tmp_path / "p", replace(recorded, stats=(bad, never)))

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

    def test_cut_at_every_length(self, tmp_path: Path) -> None:
        path, cut = tmp_path / "p", tmp_path / "cut"
        profile_file.save(path, make_profile((make_site("a", 4, 4),)))
        data = path.read_bytes()
        for length in range(len(data)):
            cut.write_bytes(data[:length])
            with pytest.raises(InputError):
                profile_file.load(cut)

    def test_full_form_cut(self, full: Path) -> None:
        data = full.read_bytes()
        cut = full.parent / "cut"
        for length in range(0, len(data), len(data) // 150):
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

    def test_newer(self, summary: Path) -> None:
        rewritten(summary, json.dumps({"format": "loka.profile", "version": VERSION + 1, "what": ["is", "new"]}))
        refused(summary, f"version {VERSION + 1} and this LoKA reads up to {VERSION}; upgrade LoKA")

    def test_another_format(self, summary: Path) -> None:
        rewritten(summary, json.dumps({"format": "somebody.else", "version": 1}))
        refused(summary, "holds 'somebody.else', not a profile of LoKA")

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (("steps",), "6000"),
            (("steps",), -1),
            (("steps",), 1.5),
            (("steps",), True),
            (("name",), 7),
            (("version",), 0),
            (("form",), "full"),
            (("stats",), []),
            (("sites", 0, "operands", 0, "rms"), "0.7"),
            (("sites", 0, "operands", 0, "rms"), None),
            (("sites", 0, "operands", 0, "rms"), 1e999),
            (("sites", 0, "operands", 0, "rms"), math.nan),
            (("sites", 0, "operands", 0, "operand"), "bias"),
            (("sites", 0, "estimates", 0, 1), 99),
            (("sites", 0, "estimates", 0, 1), -1),
            (("sites", 0, "estimates", 0, 3, 0), "nan"),
            (("sites", 0, "estimates", 0, 3, 0), math.nan),
            (("sites", 0, "estimates", 0), ["fprop"]),
            (("recipes", 0, "scaling"), "columnwise"),
        ],
    )
    def test_a_header_with_a_wrong_field(self, summary: Path, place: tuple[str | int, ...], value: object) -> None:
        header = header_of(summary)
        inner: object = header
        for part in place[:-1]:
            inner = inner[part]  # type: ignore[index]
        inner[place[-1]] = value  # type: ignore[index]
        rewritten(summary, json.dumps(header))
        refused(summary, "its header is damaged (", "make the profile again")

    def test_a_header_without_a_field(self, summary: Path) -> None:
        header = header_of(summary)
        del header["sites"]
        rewritten(summary, json.dumps(header))
        refused(summary, "its header is damaged (sites:")

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", '{"format": 1}', "[" * 100_000, '{"a":' * 50_000])
    def test_a_header_that_is_none(self, summary: Path, text: str) -> None:
        rewritten(summary, text)
        refused(summary, "its header is damaged (")

    @pytest.mark.parametrize(
        ("name", "tensor", "words"),
        [
            ("magnitudes", None, "magnitudes is missing"),
            ("magnitudes", torch.zeros(3, 127, dtype=torch.int64), "of shape (3, 127), but must be"),
            ("magnitudes", torch.zeros(2, 128, dtype=torch.int64), "of shape (2, 128), but must be"),
            ("magnitudes", torch.zeros(3, 128), "is torch.float32"),
            ("magnitudes", torch.zeros(3, 128, dtype=torch.bfloat16), "is BF16"),
            ("magnitudes", torch.full((3, 128), -1), "holds a negative number"),
        ],
    )
    def test_wrong_magnitudes(self, summary: Path, name: str, tensor: Tensor | None, words: str) -> None:
        rewritten(summary, **{name: tensor})
        refused(summary, words)

    @pytest.mark.parametrize(
        ("name", "tensor", "words"),
        [
            ("sites/0/input/moments/mean", None, "is missing"),
            ("sites/0/input/moments/mean", torch.full((24,), math.nan, dtype=torch.float64), "holds NaN or infinity"),
            ("sites/0/input/moments/comoment", torch.zeros(24, 72, dtype=torch.float64), "of shape (24, 72), but"),
            ("sites/0/weight/rows", torch.zeros(7, 24), "of shape (7, 24), but must be torch.float32 of shape (8, 24)"),
            (
                "sites/0/weight/row_index",
                torch.arange(9),
                "of shape (9,), but must be torch.int64 of shape (at most 8)",
            ),
            ("sites/0/weight/row_index", torch.full((8,), 8), "holds 8, but must stay below 8"),
            ("sites/0/joint/grad_features", torch.full((9,), 0), "of shape (9,), but"),
        ],
    )
    def test_wrong_statistics(self, full: Path, name: str, tensor: Tensor | None, words: str) -> None:
        rewritten(full, **{name: tensor})
        with pytest.raises(InputError) as caught:
            profile_file.load(full)
        assert str(caught.value).startswith(f"{full}: the tensor {name} ")
        assert words in str(caught.value)

    @pytest.mark.filterwarnings("ignore::loka.errors.UncheckedWarning")
    @given(st.data())
    @settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_damaged_bytes_raise_nothing_else(self, tmp_path: Path, data: st.DataObject) -> None:
        path = tmp_path / "good"
        if not path.exists():
            recorded = make_recorded((3, 2))
            profile_file.save(path, recorded)
            as_version_1(path)  # a checksum would refuse it before anything is read
        damaged = bytearray(path.read_bytes())
        header = 8 + int.from_bytes(damaged[:8], "little")
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(
                st.one_of(st.integers(0, 7), st.integers(8, header - 1), st.integers(0, len(damaged) - 1))
            )
            damaged[place] = data.draw(st.integers(0, 255))
        bad = tmp_path / "bad"
        bad.write_bytes(bytes(damaged))
        tracemalloc.start()
        message = f"{bad}: "
        try:
            profile_file.load(bad)  # may be whole: the damage can hit a count
        except InputError as error:
            message = str(error)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert message.startswith(f"{bad}: ")
        assert peak < 50_000_000
