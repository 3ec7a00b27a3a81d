"""The tables that pearl ships: where they come from and how exact they are stands in `tables/README.md`.

They are package data, read once each. Nothing else is read here, and nothing written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from types import MappingProxyType

from pearl.core.profile import PlatformProfile, parse_profile
from pearl.errors import ProfileError

_NAME = re.compile(r"(?P<model>.+)-(?P<gpu>[^-]+)-tp(?P<tp>\d+)\.json")


def silicon_profiles(model: str, gpu: str, tps: Iterable[int]) -> dict[int, PlatformProfile]:
    """Tensor parallelism -> profile, in the order asked for, of a model on a kind of GPU; names as in `shipped`, in any case.

    Raises:
        ProfileError: one of them is not shipped; the message names those that are.
    """
    known, key = shipped(), (model.lower(), gpu.lower())
    if key not in known:
        names = ", ".join(" on ".join(pair) for pair in known)
        raise ProfileError(
            f"iteration times: got {model} on {gpu}, want one of {names}; or measure with `pearl profile`"
        )
    wanted = tuple(tps)
    for tp in wanted:
        if tp not in known[key]:
            raise ProfileError(
                f"iteration times of {model} on {gpu}: got tp {tp}, want one of {', '.join(map(str, known[key]))}; "
                "or measure with `pearl profile`"
            )
    return {tp: _table(*key, tp) for tp in wanted}


@cache
def shipped() -> Mapping[tuple[str, str], tuple[int, ...]]:
    """(model, GPU) -> tensor parallelisms, ascending; names in lower case, as in files: `qwen3-8b`, `h100`."""
    found: dict[tuple[str, str], list[int]] = {}
    for name in sorted(path.name for path in _folder().iterdir()):
        if match := _NAME.fullmatch(name):
            found.setdefault((match["model"], match["gpu"]), []).append(int(match["tp"]))
    return MappingProxyType({key: tuple(sorted(tps)) for key, tps in found.items()})


@cache
def _table(model: str, gpu: str, tp: int) -> PlatformProfile:
    name = f"{model}-{gpu}-tp{tp}.json"
    return parse_profile(_folder().joinpath(name).read_text(encoding="utf-8"), name)


def _folder() -> Traversable:
    return resources.files("pearl.silicon").joinpath("tables")
