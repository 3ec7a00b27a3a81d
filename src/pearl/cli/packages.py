"""Optional packages by extra, as in pyproject.toml."""

from collections.abc import Mapping

EXTRAS: Mapping[str, Mapping[str, str]] = {
    "train": {
        "numba": "0.61",
        "psutil": "5.9",
        "ray": "2.50",
        "safetensors": "0.5",
        "tensorboard": "2.18",
        "tokenizers": "0.21",
        "torch": "2.6",
        "transformers": "4.57",
    },
    "report": {
        "matplotlib": "3.9",
    },
}
"""Extra -> distribution -> oldest version; each name is also the one that is imported."""


def pip_command(extra: str) -> str:
    """How to install an extra."""
    return f"pip install 'pearl-rl[{extra}]'"
