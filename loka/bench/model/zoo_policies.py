"""The models that `loka bench model` knows by name: policies of the zoo's dense models at their benchmark sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loka.bench.options import did_you_mean
from loka.errors import InputError
from loka.mods.registry import INTERACTION_MOD, paper_mods

FP8_DEFAULTS = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"
SMALLEST = 64  # sites with K or N up to this stay native
SUFFIXES = (".yaml", ".yml")  # of policies


@dataclass(frozen=True, slots=True)
class ZooModel:
    """A model of the zoo, its batch size in benchmarks, and the mods of its policy beside those of all."""

    factory: str
    batch: int
    mods: tuple[str, ...] = ()


ZOO: Mapping[str, ZooModel] = {
    "wukong_small": ZooModel("wukong_small", 16384),
    "wukong_small_mods": ZooModel("wukong_small", 16384, paper_mods()),
    "wukong_large": ZooModel("wukong_large", 4096),
    "wukong_large_mods": ZooModel("wukong_large", 4096, paper_mods()),
    "dcnv2": ZooModel("dcnv2", 8192),
}


def zoo_policy(name: str) -> str:
    """The policy of a model of the zoo in FP8, as text."""
    model = ZOO[name]
    mods = [f"  - {{use: {mod}}}" for mod in model.mods]
    return "\n".join([
        "version: 1",
        f"name: {name}",
        f'model: {{factory: "loka.zoo:{model.factory}", inputs: "loka.zoo:{model.factory}_inputs", '
        f"batch_size: {model.batch}}}",
        f"defaults: {{{FP8_DEFAULTS}}}",
        "rules:",
        f"  - {{match: {{max_n: {SMALLEST}}}, compute: keep, optional: true}}",
        f"  - {{match: {{max_k: {SMALLEST}}}, compute: keep, optional: true}}",
        "mods:",
        *mods,
        f"  - {{use: {INTERACTION_MOD}, optional: true}}",
        "",
    ])  # fmt: skip


def checked_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of zoo models and files of policies; the whole zoo if there are none. Raises InputError."""
    for name in names:
        if name not in ZOO and not is_policy(name):
            raise InputError(
                f"loka bench model: there is no model {name!r}; write the path of a policy (.yaml), or one of "
                f"{', '.join(ZOO)}{did_you_mean(name, ZOO)}"
            )
    return names or tuple(ZOO)


def is_policy(name: str) -> bool:
    """True for the path of a policy."""
    return name.endswith(SUFFIXES) or (name not in ZOO and Path(name).is_file())
