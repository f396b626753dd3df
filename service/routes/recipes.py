"""What can be exported here. Always 200: a recipe that cannot run says why."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from exporter.contract.errors import NotFound
from exporter.contract.machine import RecipeReport
from service import schemas
from service.executor_table import ExecutorTable
from service.routes.access import Allowed, described

router = APIRouter(tags=["recipes"], dependencies=[Depends(described)])


@router.get("/recipes", response_model=schemas.RecipeList)
def list_recipes(request: Request, allowed: Allowed) -> Response:
    """Every recipe that an executor has described."""
    table: ExecutorTable = request.app.state.executors
    return JSONResponse({"items": [_view(recipe) for recipe in table.recipes().values()]})


@router.get("/recipes/{name}", response_model=schemas.RecipeView)
def get_recipe(request: Request, name: str, allowed: Allowed) -> Response:
    """One recipe: its options' schema, an example, and whether some executor can run it."""
    table: ExecutorTable = request.app.state.executors
    recipe = table.recipes().get(name)
    if recipe is None:
        raise NotFound(f"there is no recipe {name[:64]!r}", hint="GET /recipes lists them.")
    return JSONResponse(_view(recipe))


def _view(recipe: RecipeReport) -> dict[str, object]:
    return recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
