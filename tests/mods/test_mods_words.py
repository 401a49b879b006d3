"""The policy language knows the mods that there are, and their parameters, by the same words."""

from __future__ import annotations

from loka.mods.registry import MODS, ModKind, mod_schemas, module_mod, names_of, planning_of
from loka.mods.selection import selected_for_all
from loka.policy.mod_schema import own_parameters

CHANGES_MODULES = names_of(ModKind.MODULES)
REWRITES_FORWARDS = tuple(name for name in MODS if name not in CHANGES_MODULES)


def test_the_schema_has_every_mod_and_no_other():
    schemas = mod_schemas()
    assert set(schemas) == set(MODS) == {*CHANGES_MODULES, *REWRITES_FORWARDS}
    assert {name: planning_of(name).name for name in MODS} == {name: name for name in MODS}
    assert {name: schema.model_fields["use"].annotation.__args__ for name, schema in schemas.items()} == {
        name: (name,) for name in MODS
    }


def test_every_mod_says_what_it_promises_on_one_line():
    descriptions = [planning_of(name).description for name in MODS]
    assert all(description and "\n" not in description for description in descriptions)
    assert all(planning_of(name).exact for name in REWRITES_FORWARDS)
    assert not any(planning_of(name).exact or module_mod(name).exact for name in CHANGES_MODULES)


def test_defaults_of_the_schema_are_what_a_mod_is_asked():
    assert dict(selected_for_all(planning_of("block_norm")).settings) == {"block": 256}
    assert dict(selected_for_all(planning_of("no_bias")).settings) == {"final": "keep"}
    for mod in map(planning_of, MODS):
        assert set(selected_for_all(mod).settings) == set(own_parameters(mod.setting))
