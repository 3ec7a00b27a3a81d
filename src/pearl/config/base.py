"""What all configuration classes share: frozen, strict, no unknown keys."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of a recipe. Field descriptions are the reference documentation of the recipe format."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)
