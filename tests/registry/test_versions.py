"""Which distributions a requirement names, and which of them are there."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from flashdispatch_registry.versions import alternatives, installed, required_versions


def test_what_is_not_installed_has_no_version() -> None:
    assert installed("surely-not-installed") == ""
    assert installed("pluggy") == version("pluggy")


def test_alternatives_are_those_for_this_machine() -> None:
    found = alternatives("a>=1 | b; python_version < '3' | c<2")
    assert [str(requirement) for requirement in found] == ["a>=1", "c<2"]


@pytest.mark.parametrize("text", ["not a requirement!", "a>=1 |", "a | >=2"])
def test_alternatives_that_can_not_be_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"dependency specifier|requirement"):
        alternatives(text)


def test_of_alternatives_the_installed_ones_count() -> None:
    assert required_versions(["no-such>=1 | pluggy"]) == {"pluggy": version("pluggy")}
    assert required_versions(["no-such>=1 | nor-this"]) == {"no-such": "not installed"}
    assert required_versions(["no-such; python_version < '3'"]) == {}
