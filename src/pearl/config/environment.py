"""`[environment]`: what the model acts in."""

from pydantic import Field

from pearl.config.base import Section


class EnvironmentConfig(Section):
    """`[environment]`."""

    kind: str = Field(description="Built-in name (`guess_number`), or `package.module:Name` of your own class.")
    params: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="Keyword arguments of the environment."
    )
    processes: int = Field(1, ge=1, description="Processes that the environments share.")
    slots: int = Field(128, ge=1, description="Environments open at once, over all processes.")
    process_isolated: bool = Field(
        False, description="One environment per process at a time, for classes that use global random state."
    )
    allow_special_tokens: bool = Field(
        False,
        description="Special tokens that an observation spells out become those tokens; otherwise they are ordinary text.",
    )

    @property
    def open_at_once(self) -> int:
        """Environments that can be open at the same time."""
        return min(self.slots, self.processes) if self.process_isolated else self.slots
