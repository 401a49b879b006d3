"""The policy language knows the mods that there are, and their parameters, by the same words."""

from __future__ import annotations

from loka.mods.mod_settings import MOD_SCHEMAS
from loka.mods.modded_model import selected_for_all
from loka.mods.registry import MODS, ModKind, mod_of, names_of
from loka.policy.mod_schema import own_parameters

CHANGES_MODULES = names_of(ModKind.MODULES)
REWRITES_FORWARDS = tuple(name for name in MODS if name not in CHANGES_MODULES)


def test_the_schema_has_every_mod_and_no_other():
    schemas = MOD_SCHEMAS
    assert set(schemas) == set(MODS) == {*CHANGES_MODULES, *REWRITES_FORWARDS}
    assert {name: mod_of(name).name for name in MODS} == {name: name for name in MODS}
    assert {name: schema.model_fields["use"].annotation.__args__ for name, schema in schemas.items()} == {
        name: (name,) for name in MODS
    }


def test_every_mod_says_what_it_promises_on_one_line():
    descriptions = [mod_of(name).description for name in MODS]
    assert all(description and "\n" not in description for description in descriptions)
    assert all(mod_of(name).exact for name in REWRITES_FORWARDS)
    assert not any(mod_of(name).exact for name in CHANGES_MODULES)


def test_defaults_of_the_schema_are_what_a_mod_is_asked():
    assert dict(selected_for_all("block_norm").settings) == {"block": 256}
    assert dict(selected_for_all("no_bias").settings) == {"final": "keep"}
    for name in MODS:
        assert set(selected_for_all(name).settings) == set(own_parameters(MOD_SCHEMAS[name]))
