"""`-o` replaces what the same verb wrote before, and no other file; a package has a name that Python imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

MINE = "mine = 1\n"


@pytest.mark.parametrize(
    ("verb", "kind"),
    [("probe", "a profile"), ("report", "a report"), ("schema", "a JSON Schema of policies")],
)
def test_a_file_of_another_kind_is_kept(verb, kind, shop, refuse):
    (shop.folder / "mine.py").write_text(MINE)
    policy = [] if verb == "schema" else [shop.policy]
    assert refuse(verb, *policy, "-o", "mine.py") == (
        f"-o: mine.py is there already, and is not {kind}; name another file, or remove that one\n"
    )


def test_a_full_form_of_another_kind_is_kept(shop, refuse):
    (shop.folder / "mine.full.safetensors").write_text(MINE)
    err = refuse("probe", shop.policy, "-o", "mine.safetensors")
    assert err.startswith("-o: mine.full.safetensors is there already, and is not a profile")


@pytest.mark.slow
def test_a_schema_and_a_report_replace_their_own(shop, loka):
    (shop.folder / "empty.json").touch()
    for _ in range(2):
        assert loka("schema", "-o", "empty.json").status == 0
        assert loka("report", shop.policy, "-o", "page.html").status == 0


@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("class", "Python cannot import a package of that name, a keyword; name another folder\n"),
        ("generated/None", "Python cannot import a package of that name, a keyword; name another folder\n"),
        ("generated/v1.2", "Python cannot import a package with a dot in its name"),
    ],
)
def test_a_package_has_a_name_that_can_be_imported(out, why, shop, refuse):
    assert refuse("generate", shop.policy, "--out", out).startswith(f"--out: {out}: {why}")


def test_a_probe_keeps_a_file_of_another_kind(shop, monkeypatch):
    import loka

    monkeypatch.syspath_prepend(str(shop.folder))
    from shopmodel import build

    before = shop.files()
    with pytest.raises(loka.InputError, match=r"^probe: path: .*shop\.yaml is there already, and is not a profile"):
        loka.Probe(build(), shop.policy, path=shop.policy)
    with pytest.raises(loka.InputError, match=r"^probe: model must be the nn\.Module that is trained, not a NoneType"):
        loka.Probe(None, shop.policy)
    assert shop.files() == before


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("/", "--out: /: a package cannot be imported from there; name a folder in it"),
        ("g" * 300, "cannot write the package: File name too long"),
    ],
)
def test_a_folder_that_cannot_be_one_of_a_package(out, message, shop, loka):
    ran = loka("generate", shop.policy, "--out", out)
    assert (ran.status, ran.out.count("wrote")) == (2, 0)
    assert message in ran.err


def test_a_draft_has_a_name(shop, loka):
    assert loka("init", "shopmodel:build", "-o", "").err.startswith("-o is empty; name a file")
    long = loka("init", "shopmodel:build", "-o", "n" * 300)
    assert (long.status, "cannot be written" in long.err or "use at most" in long.err) == (2, True)


@pytest.mark.slow
def test_a_profile_is_not_merged_with_itself(shop, loka):
    assert loka("probe", shop.policy, "--steps", "2", "--every", "1").status == 0
    full = "policies/profiles/shop.full.safetensors"
    ran = loka("probe", shop.policy, "--from", full, f"./{full}")
    assert ran.status == 2
    assert ran.err.startswith(f"--from: ./{full} is given twice")
    assert loka("probe", shop.policy, "--steps", "9" * 30).status == 2


@pytest.mark.slow
@pytest.mark.parametrize("redirect", [">/dev/full", ">&-"])
def test_a_stdout_that_takes_nothing(redirect):
    command = f"{sys.executable} -m loka schema {redirect}"
    ran = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    full = "stdout: cannot be written (No space left on device); free space, or send it elsewhere\n"
    assert (ran.returncode, ran.stderr) == ((2, full) if "full" in redirect else (0, ""))
