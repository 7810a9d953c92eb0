"""Recipes: settings belong to their parts; methods of one's own lose none."""

from dataclasses import dataclass

import numpy as np
import pytest

from dlcft import Learner
from dlcft.methods import RECIPES, Finetune, Quadratic, Recipe, Training
from dlcft.methods.recipes import named_recipe
from tests.learner.test_learner import backbone


@dataclass
class Own(Finetune):
    strength: float = 1.0
    shape: tuple[int, ...] = (1, 2)


@dataclass
class Needs(Finetune):
    strength: float


@dataclass
class Kind(Finetune):
    kind: str = "x"


@dataclass
class Rate(Finetune):
    lr: float = 1.0


class Undecorated(Finetune):
    strength: float = 1.0


class OwnInit(Finetune):
    def __init__(self, strength=1.0):
        super().__init__()
        self.strength = strength


@dataclass
class More(Quadratic):
    extra: float = 2.0


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_comes_back_from_json(name):
    recipe = RECIPES[name]
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert all(":" not in part["kind"] for part in recipe.to_dict().values())


def test_own_methods_come_back_with_their_settings():
    for method in (Own(3.0, (7,)), More("kfac", extra=5.0)):
        found = Recipe.from_dict(Recipe(method=method).to_dict())
        assert found.method == method
        assert type(found.method) is type(method)
    content = Recipe(method=Own()).to_dict()
    content["method"]["shape"] = [4, 5]
    assert Recipe.from_dict(content).method.shape == (4, 5), "JSON has lists"


def test_by_name_settings_without_a_default_are_taken():
    assert named_recipe(f"{__name__}:Needs", {"strength": 3.0, "lr": 0.1}).method == Needs(3.0)
    with pytest.raises(ValueError, match="Needs cannot be made with the settings none; it has strength"):
        named_recipe(f"{__name__}:Needs", {})
    content = Recipe(method=Own()).to_dict()
    content["method"]["gone"] = 1
    with pytest.raises(ValueError, match="Own cannot be made with the settings strength, shape, gone"):
        Recipe.from_dict(content)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Kind(), "Kind has a field 'kind', a name that is taken"),
        (Rate(), "Rate has a field 'lr', a name that is taken"),
        (Undecorated(), "Undecorated is not a dataclass"),
        (OwnInit(3.0), "OwnInit is not a dataclass"),
    ],
)
def test_methods_whose_settings_would_be_lost_are_refused(method, message):
    with pytest.raises(ValueError, match=message):
        Learner(backbone(), method)


def test_a_method_is_given_in_any_form():
    for given in (Own, Own(), f"{__name__}:Own", Recipe(method=Own())):
        assert Learner(backbone(), given).method == Own()
    for wrong in (None, 3):
        with pytest.raises(TypeError, match="it must be a name, a Method or a Recipe"):
            Learner(backbone(), wrong)


def test_numbers_of_numpy_are_numbers():
    settings = Training(lr=np.float32(0.5), epochs=np.int64(3))
    assert (settings.lr, type(settings.lr), type(settings.epochs)) == (0.5, float, int)


def test_old_names_say_the_new_ones():
    with pytest.raises(ValueError, match="joint training is 'none' on all data at once"):
        Learner(backbone(), "joint")
    with pytest.raises(ValueError, match="did you mean 'equal_classes'"):
        Learner(backbone(), "ridge", balanced=True)
    with pytest.raises(ValueError, match="did you mean 'head_start'"):
        Learner(backbone(), "dlcft", head="ridge")
    with pytest.raises(ValueError, match="curvature is 3; it must be a word"):
        Learner(backbone(), "dlcft", curvature=3)


def test_what_was_saved_before_there_were_solutions_is_ridge_regression():
    content = RECIPES["dlcft-exact"].to_dict()
    assert content["method"].pop("solution") == "shrunken-lda"
    assert content["method"].pop("equal_classes")
    for name in ("random_kind", "bandwidth"):
        del content["model"][name]
    found = Recipe.from_dict(content)
    assert (found.method.solution, found.method.equal_classes, found.model.random_kind) == ("ridge", False, "relu")
    assert RECIPES["ridge"].method.solution == RECIPES["ranpac"].method.solution == "ridge", "as published"


def test_fourier_features_stand_alone():
    for settings in ({"tangent_features": 40}, {"random_features": 0}):
        with pytest.raises(ValueError, match="random_kind='fourier' needs random_features, and no tangent_features"):
            Learner(backbone(), "klda", **settings)
