"""Another model or another training, one that the user named as acceptable: fewer channels, lower resolution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from memfit.errors import MemfitError
from memfit.levers.lever import CannotApply
from memfit.levers.reading import is_word, reader
from memfit.levers.undo import Undo
from memfit.records import Ledger, Option
from memfit.step import Step
from memfit.step.running import Running
from memfit.users_code import users_code

_STAYS = ("variants",)
read_settings = reader({"variant": is_word})


class ArchitectureLever:
    """A step's variants, by name; `sized` holds the ledger of each, from a simulation of what its factory builds.

    >>> ArchitectureLever().exactness
    'altered'
    """

    name = "architecture"
    exactness = "altered"
    needs = "Step(variants={name: factory})"
    excludes: frozenset[str] = frozenset()

    def __init__(self, sized: Mapping[str, Ledger] | None = None) -> None:
        self._sized = dict(sized or {})

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """The variants that take less than the step itself, the largest first: as little altered as possible."""
        smaller = {name: variant for name, variant in self._sized.items() if variant.peak_bytes < ledger.peak_bytes}
        names = sorted(smaller, key=lambda name: -smaller[name].peak_bytes)
        return tuple(Option(self.name, name, "altered", {"variant": name}, "another model: not the same training") for name in names)

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """The variant's own ledger, whatever came before: so this lever is the first of a plan."""
        if option.settings["variant"] not in self._sized:
            raise MemfitError(f"The variant {option.name!r} was not sized yet: simulate what its factory builds.")
        return self._sized[option.settings["variant"]]

    def apply(self, step: Step, option: Option) -> Undo:
        """Let the step be what the variant's factory builds: model, losses, optimizers, batch, all but the levers that are on it."""
        name = option.settings["variant"]
        if name not in step.variants:
            known = ", ".join(map(repr, step.variants)) or "none"
            raise CannotApply(f"This step has no variant {name!r} (it has: {known}): give it as Step(…, variants={{name: factory}}).")
        with users_code(f"its variant {name!r}"):
            variant = step.variants[name]()
        if not isinstance(variant, Step):
            raise CannotApply(f"The factory of variant {name!r} returned a {type(variant).__name__}: let it return a Step.")
        if _in_use(step.running) != _in_use(variant.running):
            raise CannotApply(f"{name!r} is another model, and other levers are on the present one: put this lever on first.")
        with Undo.or_nothing() as undo:
            for field in fields(Step):
                if field.name not in _STAYS:
                    undo.then(object.__setattr__, step, field.name, getattr(step, field.name))
                    object.__setattr__(step, field.name, getattr(variant, field.name))  # frozen for users; people hold this very object
        return undo


def _in_use(running: Running) -> dict[str, Any]:
    """How much is on a step: a program may put mixed precision on by itself, on the step and on its variants alike."""
    used = {f.name: getattr(running, f.name) for f in fields(running) if f.compare}
    return {name: len(value) if isinstance(value, list) else True for name, value in used.items() if value}
