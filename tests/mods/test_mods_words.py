"""The policy language knows the mods that there are, and their parameters, by the same words."""

from __future__ import annotations

from loka.mods.asked import asked_for_all
from loka.mods.catalogue import MODEL_MODS
from loka.mods.promises import FORWARD_MODS
from loka.policy.schema_mods import MODS, own_parameters


def test_the_schema_has_every_mod_and_no_other():
    assert {*MODEL_MODS, *FORWARD_MODS} == set(MODS)
    assert not set(MODEL_MODS) & set(FORWARD_MODS)
    assert {name: mod.name for name, mod in MODEL_MODS.items()} == {name: name for name in MODEL_MODS}


def test_every_mod_says_what_it_promises_on_one_line():
    promises = [mod.promise for mod in MODEL_MODS.values()] + [mod.text for mod in FORWARD_MODS.values()]
    assert all(promise and "\n" not in promise for promise in promises)
    assert all(mod.exact for mod in FORWARD_MODS.values())
    assert not any(mod.exact for mod in MODEL_MODS.values())


def test_defaults_of_the_schema_are_what_a_mod_is_asked():
    assert dict(asked_for_all("block_norm").settings) == {"block": 256}
    assert dict(asked_for_all("no_bias").settings) == {"final": "keep"}
    assert all(set(asked_for_all(use).settings) == set(own_parameters(MODS[use])) for use in MODS)
