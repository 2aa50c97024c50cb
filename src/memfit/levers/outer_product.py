"""outer_product: contexts of the form c⊗c are attended to through c; nothing of size E×E ever exists."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from memfit.ledger import account
from memfit.levers.forwards import Adapter, adapter_for, exchange_attribute, modules_of
from memfit.levers.lever import CannotApply, trace_of
from memfit.levers.outer_product_trace import without_outer_products
from memfit.levers.reading import is_word, reader
from memfit.levers.undo import Undo
from memfit.records import Ledger, Option
from memfit.step import Step

read_settings = reader({}, {"where": is_word})

_ADAPTERS: dict[type[nn.Module], Adapter] = {}


def factored(module_class: type[nn.Module], adapter: Adapter) -> None:
    """Say how a class of yours uses its factors: `adapter(module)` gives the forward that takes the place of the module's own.

    Usually two classes are told: the one that makes c⊗c now hands on c (or a FactoredContext), and the one that attends to it calls
    `memfit.ops.outer_product.factored_attention`.

    >>> class Squares(nn.Module):
    ...     def forward(self, c):
    ...         return (c.unsqueeze(2) * c.unsqueeze(1)).sum((1, 2))
    >>> factored(Squares, lambda module: lambda c: c.sum(1) ** 2)
    """
    _ADAPTERS[module_class] = adapter


class OuterProduct:
    """The factored form, for the classes it was told of."""

    name, exactness, needs = "outer_product", "reordered", "an adapter for the model's class"
    excludes: frozenset[str] = frozenset()

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """One, if the profile found an outer product that is used as a product."""
        found = [f for f in ledger.findings if f.kind == "outer_product" and f.lever == self.name]
        if not found:
            return []
        where = "; ".join(f.where for f in found)
        why = f"c⊗c ({where}) is used through c: keys and values of its columns are (W c) c_j + b. Exact up to the order of sums."
        return [Option(self.name, "factored", "reordered", {"where": where}, why)]

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """The step without outer products and all that is made of their columns."""
        return account(without_outer_products(trace_of(ledger)))

    def apply(self, step: Step, option: Option) -> Undo:
        """Every module of a registered class gets its factored forward."""
        found = [(module, adapter) for _, module in modules_of(step) if (adapter := adapter_for(module, _ADAPTERS))]
        if not found:
            raise CannotApply(
                f"outer_product knows no factored form for this model: the outer product at {option.settings.get('where', 'some line')} "
                "is in code memfit cannot rewrite by itself. Describe its classes with memfit.levers.outer_product.factored(YourModule, "
                "adapter); docs/levers/outer_product.md has an example."
            )
        with Undo.or_nothing() as undo:
            for module, adapter in found:
                exchange_attribute(module, "forward", adapter(module), undo)
        return undo
