"""What the models of the schema have in common: their base, documented fields, sizes and patterns."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from loka.policy.schema import checks

LARGEST = 2**31 - 1


class SchemaModel(BaseModel):
    """A mapping whose keys are all known."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def doc(title: str, description: str, **more: Any) -> Any:
    """A field that may be left out."""
    return Field(default=None, title=title, description=description, **more)


def match_tag(value: object) -> str | None:
    """Which form of a match a value has; None for none of them."""
    # Angle brackets: a tag appears in pydantic's error locations, where it must not look like a key.
    if isinstance(value, str):
        return "<pattern>"
    if isinstance(value, list):
        return "<patterns>"
    return "<criteria>" if isinstance(value, dict) else None


Text = Annotated[str, Field(min_length=1)]
Size = Annotated[int, Field(ge=1, le=LARGEST)]
Pattern = Annotated[str, AfterValidator(checks.pattern)]
Names = Annotated[
    Annotated[Pattern, Tag("<pattern>")] | Annotated[list[Pattern], Field(min_length=1), Tag("<patterns>")],
    Discriminator(match_tag),
]
