"""LoKA in trainers that own the loop: Lightning, Accelerate and Hugging Face's Trainer.

Each name is imported when it is first used. The frameworks are optional: a class whose framework is not installed
raises InputError, which says what to install.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from loka.errors import InputError

if TYPE_CHECKING:
    from loka.integrations.accelerate import AccelerateHook as AccelerateHook
    from loka.integrations.lightning import LightningCallback as LightningCallback
    from loka.integrations.transformers import TransformersCallback as TransformersCallback

_FRAMEWORKS = {"AccelerateHook": "accelerate", "LightningCallback": "lightning", "TransformersCallback": "transformers"}

__all__ = ["AccelerateHook", "LightningCallback", "TransformersCallback"]


def __getattr__(name: str) -> object:
    """A class, from the module of its framework (PEP 562). Raises InputError if the framework is not installed."""
    if name not in _FRAMEWORKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    framework = _FRAMEWORKS[name]
    if find_spec(framework) is None:
        raise InputError(f"loka.integrations.{name} needs {framework}, which is not installed: pip install {framework}")
    return getattr(import_module(f"loka.integrations.{framework}"), name)
