"""Mods that only tests have, a file each as in `loka/mods`: one that changes modules, one sites, one owners."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import pytest
from pydantic import Field

from loka.mods import mod_settings, modules, registry, rewriting
from loka.mods.registry import MODS, ModKind
from loka.policy.mod_schema import ModFields

LINES = {"six_relu": ModKind.MODULES, "late_bias": ModKind.SITES, "tanh_sigmoid": ModKind.OWNERS}


class SixReluSetting(ModFields):
    """ReLU6 for ReLU. Matched: activations. A new model, to be trained."""

    use: Literal["six_relu"] = Field(title="Mod", description="ReLU6 for ReLU.")


class LateBiasSetting(ModFields):
    """A linear's bias by a statement of its own. Matched: sites. The same function."""

    use: Literal["late_bias"] = Field(title="Mod", description="Biases by statements of their own.")


class TanhSigmoidSetting(ModFields):
    """Sigmoids by way of tanh. Matched: owners. The same function."""

    use: Literal["tanh_sigmoid"] = Field(title="Mod", description="Sigmoids by way of tanh.")


SCHEMAS = {"six_relu": SixReluSetting, "late_bias": LateBiasSetting, "tanh_sigmoid": TanhSigmoidSetting}


@contextmanager
def registered() -> Iterator[None]:
    """The lines in the registry and the schemas, and the files where the others are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "MODS", MappingProxyType({**MODS, **LINES}))
        patch.setattr(mod_settings, "MOD_SCHEMAS", MappingProxyType({**mod_settings.MOD_SCHEMAS, **SCHEMAS}))
        for package in (modules, rewriting):
            patch.setattr(package, "__path__", [*package.__path__, str(Path(__file__).parent)])
        yield
    for package in (modules, rewriting):
        for name in LINES:
            vars(package).pop(name, None)
            sys.modules.pop(f"{package.__name__}.{name}", None)
