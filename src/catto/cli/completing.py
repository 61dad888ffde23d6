"""What the shell offers after a Tab: recipes, methods and tasks by name. Where nothing fits it offers files."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["methods", "recipes", "tasks"]


def recipes(incomplete: str) -> list[str]:
    """The shipped recipes that begin so."""
    from catto.recipe_file import shipped

    return _beginning(shipped(), incomplete)


def methods(incomplete: str) -> list[str]:
    """The methods that begin so."""
    from catto.methods import METHODS

    return _beginning(METHODS, incomplete)


def tasks(incomplete: str) -> list[str]:
    """The tasks that begin so."""
    from catto.tasks import TASKS

    return _beginning(TASKS, incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
