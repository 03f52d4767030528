"""The laboratory animals that the repository ships do their work, and say what they are."""

import json
from pathlib import Path

import pytest

from kvretain import load_model
from kvretain.lab.chains import series
from kvretain.lab.evaluate import solve
from kvretain.lab.recipe import Recipe

FOLDERS = sorted((Path(__file__).parents[2] / "models").glob("lab-*"))


def test_there_are_two_of_the_standard_recipe_with_their_curves():
    recipes = [json.loads((folder / "recipe.json").read_text()) for folder in FOLDERS]
    assert [recipe.pop("seed") for recipe in recipes] == [0, 1]
    assert all(recipe["stages"] == [vars(stage) for stage in Recipe().stages] for recipe in recipes)
    for folder in FOLDERS:
        assert (folder / "curve.csv").read_text().strip().splitlines()[-1].startswith(f"{Recipe().updates},")
        about = (folder / "README.md").read_text()
        assert "can do nothing else" in about and "did not begin with random weights" in about


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_it_solves_long_chains_with_the_full_cache(folder):
    model, tokenizer = load_model(str(folder))
    attempts = solve(model, tokenizer, series(20, steps=20, seed=7))
    assert sum(attempt.right for attempt in attempts) >= 18
