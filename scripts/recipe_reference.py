"""Write docs/recipes.md, the reference of the recipe format, from the configuration classes.

python scripts/recipe_reference.py          # write the page
python scripts/recipe_reference.py --check  # exit status 1 when the page is not up to date
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from pearl.config.base import Section
from pearl.config.origins import toml_text
from pearl.config.recipe import Recipe
from pearl.config.schema import section_of, wanted

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"

PREAMBLE = """\
<!-- Written by scripts/recipe_reference.py from src/pearl/config; do not edit by hand. -->

# Recipes

A recipe is a TOML file that defines a whole run. Every value has one place in the tree below, and a key that is not in it
is an error with the nearest name. The smallest recipe names a model and an environment:

```toml
[model]
path = "models/tiny-qwen3"

[environment]
kind = "guess_number"
```

**Layers.** Later layers win: the files that a recipe names in `extends = ["base.toml"]` at its top (relative to itself),
the recipe, further recipes on the command line, then overrides such as `rollout.max_staleness=2`. Tables are merged value
by value; a list or a plain value replaces the one below it.

**Types are strict.** `"3"`, `true` and `2.5` are no integers. The value of an override is read as TOML, and as plain text
where it is no TOML.

**Look before you run.** `pearl config show RECIPE.toml` prints every value with the file and line that set it;
`pearl config check RECIPE.toml` names every mistake, one a line:

```text
recipes/x.toml: rollout.max_stalenes: unknown key; did you mean rollout.max_staleness? allowed in rollout: ... [line 12]
recipes/x.toml: train.clip_low: got 1.7, want a number > 0 and < 1 (pi / pi_prox is clipped at 1 - clip_low) [line 31]
```

**A run keeps its recipe.** The resolved tree goes into the run folder as `recipe.toml`, and the origin of every value as
`origins.json`. A resumed run (`pearl train --resume RUN`) takes overrides of `run.steps` and `cluster.*` only.
A model that has moved is the one thing to edit in the folder's `recipe.toml`: its configuration and tokenizer must be those
that the run began with, the weights come from the checkpoint.
"""

CHECKS = """\
## Across sections

Values that are fine one by one are also checked together:

- `environment.slots >= rollout.group_size`: the trajectories of a group run side by side.
- `engine.max_context_tokens >= rollout.max_context_tokens`: a worker must hold the longest trajectory.
- `sampling.max_new_tokens < rollout.max_context_tokens`: a turn needs room for its prompt.
- `engine.kv_budget_tokens >= rollout.max_context_tokens`, unless 0: a worker must hold the longest trajectory.
- Every one of `fleet.tp` is at most `fleet.gpus_per_node`: a worker never spans nodes. `fleet.overlap_tp` divides
  `fleet.gpus_per_node` and `fleet.training_gpus`, and is one of `fleet.tp` where there are training GPUs; `fleet.tp_pairs`
  names allowed tensor parallelisms only.
- `elastic.policy` `static` needs `elastic.shape`, `roll_large` needs `elastic.fixed_gpus`, `rlboost_plus_seeding` needs
  `elastic.seeding_s`. The shape of a `static` policy has one tensor parallelism for each role, all of them in `fleet.tp`, and
  those of prefill and decode in `fleet.tp_pairs`, where that is set.
- `engine.shape` must be a shape that the engine can be laid out in; each worker of the embedded engine has one GPU (or share
  of the CPU): `2C`, `1P2D`, `2P2D+1C`, ... See [shape](glossary.md#shape).
"""


def page() -> str:
    """The whole page."""
    parts = [PREAMBLE, _contents()]
    parts += [_section(name, section) for name, section in _sections()]
    return "\n".join([*parts, CHECKS])


def _sections() -> Iterator[tuple[str, type[Section]]]:
    for name, field in Recipe.model_fields.items():
        section = section_of(field)
        assert section is not None, f"{name}: every field of a recipe is a section"
        yield name, section


def _contents() -> str:
    links = " · ".join(f"[{name}](#{name})" for name, _ in _sections())
    return f"Sections: {links}\n"


def _section(name: str, section: type[Section]) -> str:
    lines = [f"## {name}", ""]
    if about := _about(name, section):
        lines += [about, ""]
    lines += ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [_row(key, field) for key, field in section.model_fields.items()]
    return "\n".join([*lines, ""])


def _about(name: str, section: type[Section]) -> str:
    """What the docstring of the class or else of its module says behind the section's name."""
    for text in (section.__doc__, inspect.getmodule(section).__doc__):
        first = (text or "").split("\n")[0]
        about = first.removeprefix(f"`[{name}]`").removeprefix(":").strip(" .")
        if first.startswith(f"`[{name}]`:") and about:
            return f"{about[0].upper()}{about[1:]}."
    return ""


def _row(key: str, field: FieldInfo) -> str:
    description = field.description or ""
    takes = wanted(field).removesuffix(f" ({description.rstrip('.')})")
    takes = re.sub("matching (.*)", r"matching `\1`", takes)
    cells = (f"`{key}`", _cell(takes), _default(field), _cell(description))
    return f"| {' | '.join(cells)} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    match value:
        case None:
            return "not set"
        case {}:
            return "`{}`"
        case tuple():
            return f"`{toml_text(list(value))}`"
        case Path():
            return f"`{toml_text(str(value))}`"
        case _:
            return f"`{toml_text(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write docs/recipes.md from the configuration classes.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when it is not up to date")
    check: bool = parser.parse_args(arguments).check
    text = page()
    if not check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE.name}: not up to date; run `python scripts/recipe_reference.py`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
