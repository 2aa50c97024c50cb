"""The host's memory, where a device has memory of its own: how much of it a plan may use, and how much it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from memfit.errors import Infeasible, MemfitError
from memfit.levers.lever import trace_of
from memfit.levers.saved.elsewhere import has_place
from memfit.levers.saved.table import HOST, ops_of, tables_of
from memfit.planner.proposing import Proposal
from memfit.records import Ledger, PlannedLever
from memfit.units import format_bytes, parse_bytes


def host_room_of(plain: Ledger, host_budget: str | int | None) -> float:
    """Bytes that may be put there beside what the process and its workers take anyway."""
    if host_budget is None:
        return inf
    limit, taken = parse_bytes(host_budget), plain.process.host_bytes
    if not taken:
        raise MemfitError(
            f"A host budget is for devices with memory of their own, and this step is planned for {plain.device}, where the budget "
            "counts everything: leave the host budget out."
        )
    if taken > limit:
        raise Infeasible(
            f"This step does not fit a host budget of {format_bytes(limit)}: interpreter, libraries and loader workers take "
            f"{format_bytes(taken)} of the host's memory before anything is put there. Give the host more, or the loader fewer workers.",
            plain.process_high_bytes,
            {},
        )
    return limit - taken


def put_on_host(proposal: Proposal) -> int:
    """What a proposal puts there, taken to be there at once."""
    return _put_there(proposal.combination.ledger, proposal.table.ops)


def put_on_host_by(rows: Iterable[PlannedLever], fitted: Ledger) -> int:
    """The same of a plan, by the ledger of the step that has it on."""
    tables = (tables_of(row.settings) for row in rows if row.name == "saved")
    return sum(_put_there(fitted, ops_of(trace_of(fitted), table)) for table in tables)


def _put_there(ledger: Ledger, ops: Mapping[int, str]) -> int:
    trace = trace_of(ledger)
    away = (s for op, do in ops.items() if do == HOST for s in trace.ops[op].outputs if trace.storages[s].born == op)
    return sum(trace.storages[s].bytes for s in away) if has_place(trace.device, HOST) else 0
