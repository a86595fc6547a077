"""What a plan needs of the machine that serves it: packages, and modules that are in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from llmserve.builder.plan import Plan
from llmserve.errors import PluginError
from llmserve.importable import problem_with

_NEEDED_TO_IMPORT = ("pluggy",)


def check_runtimes(plan: Plan) -> None:
    """Refuse a component whose runtime class lies in no module: Triton would find out last."""
    for role, component in plan.components():
        if problem := problem_with(component.runtime):
            raise PluginError(
                f"{role} {component.name!r} cannot be run: {problem}",
                mend="install the plugin again, or tell its author",
            )


def needed_packages(plan: Plan) -> dict[str, str]:
    """Return the packages of the plan with the versions that are installed here.

    Whatever a component says it requires, the distribution it comes from is among them.
    """
    needed = {"llmserve", *plan.origins}
    for _, component in plan.components():
        needed.update(component.requires)
    found = {}
    for name in sorted({_normal(name) for name in needed}):
        try:
            # A local build's suffix, such as +cpu, is no version that an index has.
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            raise PluginError(
                f"{name} is needed by --plugin {plan.recipe.name} and not installed",
                mend=f"pip install {name}",
            ) from None
    return found


def with_own_needs(packages: Mapping[str, str]) -> dict[str, str]:
    """Add what llmserve cannot be imported without, for where dependencies are not installed."""
    return {**packages, **{name: version(name) for name in _NEEDED_TO_IMPORT}}


def _normal(name: str) -> str:
    """One spelling per package, as the packaging specifications have it."""
    return re.sub(r"[-_.]+", "-", name).lower()
