"""`memfit plan`: the fastest plan that makes a step fit a budget."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import memfit
from memfit.commands.no import no_plan
from memfit.commands.screen import Screen, progress_on, stdout_for_json
from memfit.commands.target import load_step, step_errors
from memfit.errors import Infeasible, MemfitError
from memfit.records import EXACTNESS
from memfit.report.fit_terminal import print_largest_batch, print_plan
from memfit.units import format_bytes, parse_bytes


@click.command("plan")
@click.argument("target")
@click.option("--budget", required=True, metavar="BYTES", help="What the process may take, as in 6GiB.")
@click.option("--host-budget", metavar="BYTES", help="What it may take of the host's memory, where the device has memory of its own.")
@click.option("--allow", default="reordered", show_default=True, metavar="CLASS", help=f"The loosest exactness: {', '.join(EXACTNESS)}.")
@click.option("-o", "--output", metavar="FILE", help="Write the plan to a file, for memfit verify and for your repository.")
@click.option("--largest-batch", is_flag=True, help="Also find the largest batch that fits.")
@click.option("--device", metavar="NAME", help="The device to plan for, as in cuda; it need not be here.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def plan_command(
    target: str,
    budget: str,
    host_budget: str | None,
    allow: str,
    output: str | None,
    largest_batch: bool,
    device: str | None,
    as_json: bool,
) -> None:
    """Find the fastest plan that makes a step fit: exit 0 if there is one, 1 if there is none. The step is not run.

    TARGET is path/to/file.py:function or package.module:function; the function returns a memfit.Step.
    """
    budget_bytes, refused = parse_bytes(budget), list[MemfitError]()
    options: dict[str, Any] = {"allow": allow, "device": device, "host_budget": host_budget}
    if output is not None:
        _refuse_missing_folder(output)
    with _looking(as_json) as progress:
        progress("building the step")
        step = load_step(target, simulate=True)
        found = _found(step, budget_bytes, options | {"progress": progress})
    if not as_json:
        _show(found)
    if output is not None and isinstance(found, memfit.Plan):
        with _for_later(refused):
            _write(found, output)
    sizes = None
    if largest_batch:
        with _looking(as_json) as progress, _for_later(refused, "The largest batch could not be found. "), step_errors():
            sizes = _largest(step, budget_bytes, options | {"progress": progress})
    if as_json:
        click.echo(json.dumps(_record(found, budget_bytes) | ({"largest_batch": sizes} if largest_batch else {})))
    elif sizes:
        print_largest_batch(sizes, format_bytes(budget_bytes), Screen())
    if refused:
        raise refused[0]
    if isinstance(found, Infeasible):
        raise click.exceptions.Exit(Infeasible.exit_code)


@contextlib.contextmanager
def _looking(as_json: bool) -> Iterator[Callable[[str], None]]:
    with stdout_for_json() if as_json else contextlib.nullcontext(), progress_on(Console(stderr=True)) as progress:
        yield progress


@contextlib.contextmanager
def _for_later(refused: list[MemfitError], where: str = "") -> Iterator[None]:
    """What cannot be done after a plan was found is told once the plan is there."""
    try:
        yield
    except MemfitError as no:
        refused.append(MemfitError(f"{where}{no}"))


def _found(step: memfit.Step, budget: int, options: dict[str, Any]) -> memfit.Plan | Infeasible:
    with step_errors():
        try:
            return memfit.plan(step, budget, **options)
        except Infeasible as no:
            return no


def _show(found: memfit.Plan | Infeasible) -> None:
    if isinstance(found, memfit.Plan):
        print_plan(found, Screen())
    else:
        click.echo(found, err=True)


def _largest(step: memfit.Step, budget: int, options: dict[str, Any]) -> dict[str, int]:
    from memfit.fitting.largest_batch import largest_batch

    return dataclasses.asdict(largest_batch(step, budget, **options))


def _record(found: memfit.Plan | Infeasible, budget: int) -> dict[str, Any]:
    """A plan's keys, also where there is none."""
    return found.to_dict() if isinstance(found, memfit.Plan) else no_plan(found, budget)


def _refuse_missing_folder(path: str) -> None:
    """Before a plan is looked for, which takes a while."""
    if not path:
        raise MemfitError("The plan cannot be written: -o has an empty name. Give a file, as in -o plan.json, or leave -o out.")
    folder = Path(path).parent
    if Path(path).is_dir():
        raise MemfitError(f"The plan cannot be written to {path}: it is a folder. Give a file in it, as in -o {Path(path) / 'plan.json'}.")
    if not folder.is_dir():
        raise MemfitError(f"The plan cannot be written to {path}: there is no folder {folder}. Make it, or give another file with -o.")


def _write(plan: memfit.Plan, path: str) -> None:
    try:
        plan.save(path)
    except OSError as error:
        raise MemfitError(f"The plan cannot be written to {path}: {error.strerror}. Give another file with -o.") from error
