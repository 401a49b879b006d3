"""`-o` replaces what the same verb wrote before, and no other file; a package has a name that Python imports."""

from __future__ import annotations

import pytest

MINE = "mine = 1\n"


@pytest.mark.parametrize(
    ("verb", "kind"),
    [("probe", "a profile"), ("report", "a report"), ("schema", "a JSON Schema of policies")],
)
def test_a_file_of_another_kind_is_kept(verb, kind, shop, loka):
    (shop.folder / "mine.py").write_text(MINE)
    before = shop.files()
    policy = [] if verb == "schema" else [shop.policy]
    ran = loka(verb, *policy, "-o", "mine.py")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == (f"-o: mine.py is there already, and is not {kind}; name another file, or remove that one\n")
    assert shop.files() == before


def test_a_full_form_of_another_kind_is_kept(shop, loka):
    (shop.folder / "mine.full.safetensors").write_text(MINE)
    ran = loka("probe", shop.policy, "-o", "mine.safetensors")
    assert ran.status == 2
    assert ran.err.startswith("-o: mine.full.safetensors is there already, and is not a profile")


def test_a_schema_and_a_report_replace_their_own(shop, loka):
    (shop.folder / "empty.json").touch()
    for _ in range(2):
        assert loka("schema", "-o", "empty.json").status == 0
        assert loka("report", shop.policy, "-o", "page.md").status == 0


@pytest.mark.parametrize("out", ["class", "generated/None"])
def test_a_package_is_not_called_by_a_keyword(out, shop, loka):
    before = shop.files()
    ran = loka("generate", shop.policy, "--out", out)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == f"--out: {out}: Python cannot import a package of that name, a keyword; name another folder\n"
    assert shop.files() == before
