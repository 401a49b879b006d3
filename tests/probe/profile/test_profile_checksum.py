"""A profile's checksum, and the ranges of its numbers: damage is refused, and older files say that they cannot tell."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from loka.errors import InputError, UncheckedWarning
from loka.probe.profile import profile_file
from tests.support.flips import flipped
from tests.support.plan.made_profiles import as_version_1, make_profile, make_recorded, make_site, resealed

ROOT = Path(__file__).parents[3]


@pytest.fixture
def summary(tmp_path: Path) -> Path:
    path = tmp_path / "p.safetensors"
    profile_file.save(path, make_profile((make_site("a", 24, 8),)))
    return path


@pytest.fixture
def full(tmp_path: Path) -> Path:
    path = tmp_path / "p.full.safetensors"
    profile_file.save(path, make_recorded((8, 6)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("form", ["summary", "full"])
def test_every_flipped_bit_is_refused(form: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    data = request.getfixturevalue(form).read_bytes()
    bad = tmp_path / "bad"
    for changed in flipped(data):
        bad.write_bytes(changed)
        for load in (profile_file.load, profile_file.load_profile):
            with pytest.raises(InputError, match=r"bad: .*; "):
                load(bad)


def test_the_message_says_what_to_do(summary: Path) -> None:
    data = bytearray(summary.read_bytes())
    data[-1] ^= 1
    summary.write_bytes(data)
    with pytest.raises(InputError, match="is damaged: its checksum does not match; make it again with `loka pr"):
        profile_file.load(summary)


def test_a_file_far_longer_than_its_header_says_is_refused_at_once(summary: Path) -> None:
    with summary.open("r+b") as file:
        file.truncate(1 << 40)  # a hole: hashing it would take an hour
    for load in (profile_file.load, profile_file.load_profile):
        with pytest.raises(InputError, match=r"is damaged or was cut short \(.*; make it again with `loka probe`"):
            load(summary)


def test_a_new_file_that_lost_its_checksum_is_damaged(summary: Path) -> None:
    summary.write_bytes(summary.read_bytes().replace(b"loka.sha256", b"loka.sha255", 1))
    with pytest.raises(InputError, match="is damaged: it lacks its checksum"):
        profile_file.load(summary)


@pytest.mark.parametrize("form", ["summary", "full"])
def test_a_file_of_before_loads_with_a_warning_and_is_saved_with_a_checksum(
    form: str, request: pytest.FixtureRequest, recwarn: pytest.WarningsRecorder
) -> None:
    path = request.getfixturevalue(form)
    data = path.read_bytes()
    profile_file.load(path)
    assert list(recwarn) == []
    as_version_1(path)
    with pytest.warns(UncheckedWarning, match="written by an earlier LoKA, without a checksum") as told:
        older = profile_file.load(path)
    assert told[0].filename == __file__
    profile_file.save(path, older)
    assert path.read_bytes() == data


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    with pytest.raises(InputError, match="p: cannot read the profile: it is a device or a pipe"):
        profile_file.load(tmp_path / "p")


def with_value(path: Path, place: tuple[str | int, ...], value: object) -> None:
    """Put a value into the header of a profile that is otherwise whole."""
    with safe_open(path, framework="pt") as opened:
        header = json.loads(opened.metadata()["loka.profile"])
    inner = header
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = value
    save_file(load_file(path), path, {"loka.profile": json.dumps(header)})
    resealed(path)


OPERAND = ("sites", 0, "operands", 0)
ESTIMATE = ("sites", 0, "estimates", 0)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ((*OPERAND, "amax"), -1.5, "site 'a': input.amax is -1.5, but must be 0 or more"),
        ((*OPERAND, "usual_amax"), -1.5, "input.usual_amax is -1.5"),
        ((*OPERAND, "rms"), -0.7, "input.rms is -0.7"),
        ((*OPERAND, "covariance_error"), -0.1, "input.covariance_error is -0.1"),
        ((*OPERAND, "row_spread", "p1"), -0.1, "input.row_spread.p1 is -0.1"),
        ((*OPERAND, "zeros"), 1.25, "input.zeros is 1.25, but must be 1 or less"),
        ((*OPERAND, "shares", 0, "underflow"), -0.25, "input.shares.underflow is -0.25, but must be 0 or more"),
        ((*OPERAND, "shares", 1, "subnormal"), 1.5, "input.shares.subnormal is 1.5, but must be 1 or less"),
        ((*OPERAND, "calls"), -1, "sites.0.operands.0.calls: "),
        ((*ESTIMATE, 3), ["inf", 0.0, 1.0], "site 'a': the fprop estimate.mere is inf within 0.0 to 1.0"),
        ((*ESTIMATE, 3), ["inf", "inf", "inf"], "the fprop estimate.mere.mean is inf, but its sqnr_db.mean is 25.1"),
        ((*ESTIMATE, 3), [0.1, -0.1, 0.3], "the fprop estimate.mere.low is -0.1, but must be 0 or more"),
        ((*ESTIMATE, 3), [0.1, 0.2, 0.3], "the fprop estimate.mere is 0.1 within 0.2 to 0.3, which is no interval"),
        ((*ESTIMATE, 4), [25.0, 24.0, 23.0], "the fprop estimate.sqnr_db is 25.0 within 24.0 to 23.0"),
        (("recipes", 0, "amax"), -3.0, "the fprop estimate.operands.amax is -3.0"),
    ],
)
def test_a_number_out_of_its_range(summary: Path, place: tuple[str | int, ...], value: object, words: str) -> None:
    with_value(summary, place, value)
    with pytest.raises(InputError) as caught:
        profile_file.load_profile(summary)
    assert f"{summary}: its header is damaged (" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("amax", -1.0), ("u_error", -0.5), ("amax", math.inf)])
def test_a_number_of_a_weight_out_of_its_range(full: Path, field: str, value: float) -> None:
    with_value(full, ("stats", 0, "weight", field), value)
    with pytest.raises(InputError, match=rf"site 'layers\.0\.mlp': weight\.{field} is {value}"):
        profile_file.load(full)


@pytest.mark.parametrize(
    "name",
    [
        "input/column_amax",
        "input/moments/diagonal",
        "joint/moments/diagonal",
        "weight/row_amax",
        "weight/column_amax",
        "weight/u/diagonal",
    ],
)
def test_a_negative_amax_or_sum_of_squares(full: Path, name: str) -> None:
    contents, name = load_file(full), f"sites/0/{name}"
    with safe_open(full, framework="pt") as opened:
        text = opened.metadata()["loka.profile"]
    contents[name] = contents[name].clone()
    contents[name][0] = -1e-9
    save_file(contents, full, {"loka.profile": text})
    resealed(full)
    with pytest.raises(InputError, match=f"the tensor {name} holds a negative number"):
        profile_file.load(full)


def test_nor_is_one_saved(tmp_path: Path) -> None:
    site = make_site("a", 8, 8)
    bad = replace(site, operands=(replace(site.operands[0], amax=-1.0), *site.operands[1:]))
    with pytest.raises(InputError, match=r"was not saved: site 'a': input\.amax is -1\.0, but must be 0 or more"):
        profile_file.save(tmp_path / "p", make_profile((bad,)))
    recorded = make_recorded((8, 6))
    stats, never = recorded.stats
    assert stats.input is not None
    worse = replace(stats, input=replace(stats.input, column_amax=torch.full((8,), -1.0)))
    with pytest.raises(InputError, match="input/column_amax holds a negative number"):
        profile_file.save(tmp_path / "p", replace(recorded, stats=(worse, never)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", sorted((ROOT / "policies" / "profiles").iterdir()), ids=lambda path: path.name)
def test_profiles_that_ship_have_a_checksum(path: Path, recwarn: pytest.WarningsRecorder) -> None:
    profile_file.load(path)
    assert list(recwarn) == []
