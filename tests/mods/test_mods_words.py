"""The policy language knows the mods that there are, and their parameters, by the same words."""

from __future__ import annotations

from loka.mods.descriptions import FORWARD_MOD_DESCRIPTIONS

from loka.mods.registry import MODEL_MODS
from loka.mods.selection import selected_for_all
from loka.policy.schema.mod_schema import MODS, own_parameters


def test_the_schema_has_every_mod_and_no_other():
    assert {*MODEL_MODS, *FORWARD_MOD_DESCRIPTIONS} == set(MODS)
    assert not set(MODEL_MODS) & set(FORWARD_MOD_DESCRIPTIONS)
    assert {name: mod.name for name, mod in MODEL_MODS.items()} == {name: name for name in MODEL_MODS}


def test_every_mod_says_what_it_promises_on_one_line():
    promises = [mod.promise for mod in MODEL_MODS.values()] + [mod.text for mod in FORWARD_MOD_DESCRIPTIONS.values()]
    assert all(promise and "\n" not in promise for promise in promises)
    assert all(mod.exact for mod in FORWARD_MOD_DESCRIPTIONS.values())
    assert not any(mod.exact for mod in MODEL_MODS.values())


def test_defaults_of_the_schema_are_what_a_mod_is_asked():
    assert dict(selected_for_all("block_norm").settings) == {"block": 256}
    assert dict(selected_for_all("no_bias").settings) == {"final": "keep"}
    assert all(set(selected_for_all(use).settings) == set(own_parameters(MODS[use])) for use in MODS)
