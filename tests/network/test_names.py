"""Classes by name."""

import sys

import pytest

from dlcft.network.names import check_name, find_class, is_imported, qualified


class Animal:
    class Small:
        pass


class Dog(Animal):
    pass


KNOWN = {"dog": Dog, "animal": Animal}


def find(name):
    return find_class("animal", name, KNOWN, Animal)


def test_built_in_and_own_names():
    assert find("dog") is Dog
    assert find(qualified(Dog)) is Dog
    assert qualified(Dog) == "tests.network.test_names:Dog"
    assert find_class("size", qualified(Animal.Small), {}, object) is Animal.Small


def test_a_script_and_a_module_that_was_never_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "Cat", type("Cat", (Animal,), {}), raising=False)
    assert find("__main__:Cat").__name__ == "Cat"
    (tmp_path / "zoo_of_names.py").write_text("from tests.network.test_names import Animal\nclass Lion(Animal): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_imported("zoo_of_names:Lion")
    assert find("zoo_of_names:Lion").__name__ == "Lion"
    assert is_imported("zoo_of_names:Lion")
    del sys.modules["zoo_of_names"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dgo", r"unknown animal 'dgo'; did you mean 'dog'\? Known: dog, animal\."),
        ("x", r"unknown animal 'x'; known: dog, animal\."),
        ("no_such_module:Dog", "the animal 'no_such_module:Dog' cannot be imported: No module named 'no_such_module'"),
        ("tests.network.test_names:Cow", "'tests.network.test_names:Cow' does not exist: .* no attribute 'Cow'"),
        ("tests.network.test_names:KNOWN", "must be a subclass of Animal; it is a dict"),
        ("pathlib:Path", "must be a subclass of Animal; it is the class Path"),
        (":Dog", "animal ':Dog' is no 'module:Name'"),
        ("tests.network.test_names:", "is no 'module:Name'"),
        (".names:Dog", "is no 'module:Name'"),
    ],
)
def test_mistakes(name, message):
    with pytest.raises(ValueError, match=message):
        find(name)


def test_a_class_in_a_function_cannot_be_named():
    class Hidden(Animal):
        pass

    with pytest.raises(ValueError, match="Hidden is defined inside a function"):
        qualified(Hidden)


def test_known_names_pass():
    assert check_name("animal", "dog", KNOWN) is None
