"""Shared parts of the schema's models: their base, documented fields, sizes and patterns."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from loka.policy.schema import checks

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


Text = Annotated[str, Field(min_length=1)]
Size = Annotated[int, Field(ge=1, le=LARGEST)]
Pattern = Annotated[str, AfterValidator(checks.pattern)]
Names = Annotated[
    Annotated[Pattern, Tag("<pattern>")] | Annotated[list[Pattern], Field(min_length=1), Tag("<patterns>")],
    Discriminator(match_tag),
]
