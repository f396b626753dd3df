"""The recipes that an exporter offers, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ValidationError

from exporter.contract.errors import InvalidRequest
from exporter.contract.spec import Target
from exporter.recipes.exported_program import ExportedProgramRecipe
from exporter.recipes.huggingface import HuggingFaceRecipe
from exporter.source.captured import Captured
from exporter.source.ports import SourceTree


class Recipe(Protocol):
    """One way from a source to captured programs. `example` is a complete body of ``POST /exports``."""

    name: ClassVar[str]
    description: ClassVar[str]
    Options: ClassVar[type[BaseModel]]
    example: ClassVar[Mapping[str, Any]]

    def availability(self) -> str | None:
        """Why this machine cannot run the recipe; None where it can."""

    def capture(self, tree: SourceTree, options: Any, target: Target) -> Captured:
        """Programs, weights and samples of a source. `options` is an instance of `Options`.

        `InvalidRequest` for options or samples that do not fit the model, `UnsupportedModel` for a model that cannot be
        captured, `SourceNotFound` and `SourceUnsafe` for what is wrong with the source.
        """


_RECIPES: tuple[Recipe, ...] = (HuggingFaceRecipe(), ExportedProgramRecipe())
RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _RECIPES})


def find_recipe(name: str) -> Recipe:
    """The recipe of that name; `InvalidRequest` names those that there are."""
    if name not in RECIPES:
        raise InvalidRequest(f"there is no recipe {name!r}", hint=f"The recipes are: {', '.join(sorted(RECIPES))}.")
    return RECIPES[name]


def parse_options(recipe: Recipe, options: Mapping[str, Any]) -> BaseModel:
    """`options` as the recipe's own model; `InvalidRequest` names the first option that does not fit."""
    try:
        return recipe.Options.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "options"
        raise InvalidRequest(
            f"option {where} of recipe {recipe.name}: {first['msg']}",
            hint=f"Its options are: {', '.join(sorted(recipe.Options.model_json_schema()['properties']))}.",
            option=where,
        ) from error
