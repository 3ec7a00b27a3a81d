"""`[model]`: what is trained."""

from pathlib import Path

from pydantic import Field

from pearl.config.base import Section


class ModelConfig(Section):
    """`[model]`."""

    path: Path = Field(
        description="Folder of a Hugging Face checkpoint with tokenizer (config.json, model.safetensors, tokenizer.json); "
        "relative to the current directory."
    )
