"""The schema of `mods`: common fields, and one model for each mod, discriminated by `use`.

The models are passed in by the caller (`loka.mods.registry`), as this room does not know the mods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Union

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from loka.policy import checks

_NAMES_DOC = (
    'a glob over fully qualified names ("layers.*"; * crosses dots), "re:..." for a regular expression that matches '
    "the whole name, or a list of these (any of them)."
)


LARGEST = 2**31 - 1


class SchemaModel(BaseModel):
    """Base of all models: unknown keys are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def doc(title: str, description: str, **more: Any) -> Any:
    """An optional field."""
    return Field(default=None, title=title, description=description, **more)


def match_tag(value: object) -> str | None:
    """Tag of a match's form; None for a value of no such form."""
    # Angle brackets: a tag appears in pydantic's error locations, where it must not look like a key.
    if isinstance(value, str):
        return "<pattern>"
    if isinstance(value, list):
        return "<patterns>"
    return "<criteria>" if isinstance(value, dict) else None


Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Size = Annotated[int, Field(ge=1, le=LARGEST)]
Pattern = Annotated[str, AfterValidator(checks.pattern)]
Names = Annotated[
    Annotated[Pattern, Tag("<pattern>")] | Annotated[list[Pattern], Field(min_length=1), Tag("<patterns>")],
    Discriminator(match_tag),
]


class ModFields(SchemaModel):
    """Common fields of all mods. A mod's own model adds `use`, a literal, and its own parameters."""

    match: Names | None = doc("Match", f"What the mod is for: {_NAMES_DOC} Left out: all that it can take.")
    except_: Names | None = Field(
        default=None, alias="except", title="Except", description=f"What it leaves alone: {_NAMES_DOC}"
    )
    optional: bool | None = doc(
        "Optional", "The mod may find nothing to change. Default: false, so that a typing error shows."
    )
    note: str | None = doc("Note", "Why the mod is there; shown by loka explain.")


class AutoModsSetting(SchemaModel):
    """Whether mods that keep the function are planned without being asked for."""

    auto: bool = Field(
        title="Auto",
        description="Mods that compute the same function are planned where measurements say that they are faster, "
        "under defaults with fuse: auto. Default: true.",
    )


ModSchemas = Mapping[str, type[ModFields]]  # by the mod's name in policies, in the order of messages


def power_of_two(least: int, largest: int, default: int, title: str, description: str) -> Any:
    """A field for a power of two from `least` to `largest`; its type also has both, for error messages."""
    sizes = [size for size in checks.POWERS_OF_TWO if least <= size <= largest]
    return Field(default=default, title=title, description=description, json_schema_extra={"enum": sizes})


def own_parameters(model: type[ModFields]) -> tuple[str, ...]:
    """The names of a mod's own parameters, in the order of its model."""
    return tuple(name for name in model.model_fields if name not in ModFields.model_fields and name != "use")


_AUTO = "<auto>"


def entry_model(use: str, mods: ModSchemas) -> type[SchemaModel]:
    """The model of an entry of `mods` by its tag in pydantic's locations, without the brackets."""
    return AutoModsSetting if use == _AUTO.strip("<>") else mods[use]


def any_mod(mods: ModSchemas) -> Any:
    """The type of one entry of `mods`: the model selected by its `use`, or `auto`."""

    def tag(value: object) -> str | None:
        use = value.get("use") if isinstance(value, dict) else None
        if isinstance(value, dict) and use is None and "auto" in value:
            return _AUTO
        return f"<{use}>" if isinstance(use, str) and use in mods else None

    tagged = tuple(Annotated[model, Tag(f"<{use}>")] for use, model in mods.items())
    models = (Annotated[AutoModsSetting, Tag(_AUTO)], *tagged)
    return Annotated[Union[models], Discriminator(tag)]  # noqa: UP007 - of as many as there are
