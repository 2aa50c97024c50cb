"""The optimizer's own memory: temporaries of its step, and gradients that wait for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.levers.eight_bit import KINDS as EIGHT_BIT_KINDS
from memfit.levers.eight_bit import in_eight_bits, is_installed, keep_eight_bits
from memfit.levers.lever import CannotApply, trace_of
from memfit.levers.optimizer_line import LOOPS, fused, has_lists_of_temporaries, in_backward, looped, reads_what_was_updated, updates_in
from memfit.levers.reading import are_words, one_of, reader
from memfit.levers.rewriting import rewritten
from memfit.levers.undo import Undo
from memfit.records import Ledger, Option, Trace
from memfit.step import Step, parameters_of
from memfit.torch_private import hooks_on_steps, why_not_fused

_REWRITES = {"loop": looped, "fused": fused, "in backward": in_backward, "eight bits": in_eight_bits}
read_settings = reader({"how": one_of(*_REWRITES)}, {"excludes": are_words})

_CAN_FUSE = ("Adam", "AdamW", "SGD", "Adagrad")
_LOOP_IN_ANOTHER_ORDER = ("NAdam", "RAdam")  # than through lists: measured
_ALONE = (*LOOPS, "ASGD")  # each parameter's update looks at no other
_NOT_IN_BACKWARD = ("microbatch", "precision")


class OptimizerLever:
    """The same update with less memory: parameter by parameter, in one kernel, or inside backward."""

    name = "optimizer"
    exactness = "bitwise"
    needs = "a torch.optim optimizer"
    excludes: frozenset[str] = frozenset()  # only "in backward" excludes others; its settings name them

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """What would change this step's optimizer."""
        return tuple(_options(trace_of(ledger)))

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """Temporaries go, and inside backward gradients go with them. Times stay as they are: none is known without a measurement."""
        return rewritten(ledger, _REWRITES[option.settings["how"]](trace_of(ledger)))

    def apply(self, step: Step, option: Option) -> Undo:
        """Set the optimizers' flags, or let them take their steps inside backward."""
        how = option.settings["how"]
        with Undo.or_nothing() as undo:
            if how == "in backward":
                _step_in_backward(step, undo)
            elif how == "eight bits":
                for optimizer in step.optimizers:
                    keep_eight_bits(optimizer, undo)
            else:
                _set_flags(step, how == "fused", undo)
        return undo


def _step_in_backward(step: Step, undo: Undo) -> None:
    _refuse_in_backward(step)
    added = [o for o in step.optimizers if o not in step.running.steps_in_backward]
    step.running.steps_in_backward += added
    undo.then(_take_out, step.running.steps_in_backward, added)


def _set_flags(step: Step, fused: bool, undo: Undo) -> None:
    if fused:
        _refuse_to_fuse(step)
    optimizers = [o for o in step.optimizers if "foreach" in o.defaults]
    if not optimizers:
        raise CannotApply("None of this step's optimizers has the choice between lists and single parameters: leave this lever out.")
    for optimizer in optimizers:
        flags = {"foreach": False, "fused": fused}
        _keep_flags(optimizer, {name: value for name, value in flags.items() if name in optimizer.defaults}, undo)


def _keep_flags(optimizer: Optimizer, flags: dict[str, bool], undo: Undo) -> None:
    """In its groups, in those that are added, and in those that take their place when a checkpoint is loaded."""
    own = [{name: group[name] for name in flags} for group in optimizer.param_groups]
    added = {name: optimizer.defaults[name] for name in flags}

    def put_back() -> None:
        optimizer.defaults.update(added)
        for number, group in enumerate(optimizer.param_groups):
            group.update(own[number] if number < len(own) else added)

    def loading(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"param_groups": [group | flags for group in state["param_groups"]]}

    undo.then(put_back)
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings.update(flags)
    undo.then(optimizer.register_load_state_dict_pre_hook(loading).remove)


def _options(trace: Trace) -> Iterator[Option]:
    updates = updates_in(trace)
    kinds = {u.optimizer or "SGD" for u in updates}  # the one that has no states
    lists = {u.optimizer or "SGD" for u in updates if has_lists_of_temporaries(trace, u)}
    if lists and lists <= LOOPS.keys():
        exactness = "reordered" if lists & set(_LOOP_IN_ANOTHER_ORDER) else "bitwise"
        yield Option("optimizer", "parameter by parameter", exactness, {"how": "loop"}, "lists of parameters make lists of temporaries")
    if any(trace.storages[s].shape for u in updates for s in u.temporaries) and kinds <= set(_CAN_FUSE):
        yield Option("optimizer", "fused", "reordered", {"how": "fused"}, "one kernel needs no temporaries")
    if is_installed() and updates and kinds <= set(EIGHT_BIT_KINDS):
        yield Option("optimizer", "states in eight bits", "rounded", {"how": "eight bits"}, "a byte a number instead of four")
    if updates and kinds <= set(_ALONE) and _can_step_in_backward(trace):
        settings = {"how": "in backward", "excludes": list(_NOT_IN_BACKWARD)}
        yield Option("optimizer", "step inside backward", "bitwise", settings, "each gradient goes as soon as its parameter is updated")


def _can_step_in_backward(trace: Trace) -> bool:
    """As far as a trace tells: no norm of all gradients is taken, each gradient comes whole, and its parameter is needed no more."""
    takes_a_norm = any("norm" in op.name for op in trace.ops if op.phase == "optimizer")
    return not (takes_a_norm or trace.gradients_in_parts or reads_what_was_updated(trace))


def _take_out(optimizers: list[Optimizer], added: Sequence[Optimizer]) -> None:
    for optimizer in added:
        optimizers.remove(optimizer)


def _refuse_to_fuse(step: Step) -> None:
    for optimizer in step.optimizers:
        kind = type(optimizer).__name__
        if kind not in _CAN_FUSE or not _is_torchs(optimizer):
            raise CannotApply(f"{kind} has no fused form: torch has one for {', '.join(_CAN_FUSE)}. Leave its flags as they are.")
        for parameter in parameters_of([optimizer]):
            _refuse_unfusable(kind, parameter, optimizer.state.get(parameter, {}))


def _refuse_unfusable(kind: str, parameter: torch.Tensor, state: dict[str, Any]) -> None:
    if why := why_not_fused(parameter, cuda=kind != "Adagrad"):
        raise CannotApply(f"{kind} cannot be fused here: {why}. Leave its flags as they are.")
    count = state.get("step")
    if isinstance(count, torch.Tensor) and count.device.type != parameter.device.type:
        raise CannotApply(
            f"{kind} has taken steps already and counts them on {count.device}; fused, it counts on {parameter.device}: "
            "ask for it before the first step."
        )


def _refuse_in_backward(step: Step) -> None:
    """Inside backward a parameter's update sees its own gradient and nothing else."""
    holders = Counter(p for optimizer in step.optimizers for p in parameters_of([optimizer]))
    if any(phase.clip_grad_norm is not None for phase in step.all_phases):
        why = "this step clips the norm of all gradients together, which is known only after the last of them"
    elif step.running.split is not None:
        why = "this step's batch is split, and its gradients are sums that are known only after the last part"
    elif step.running.guard is not None:
        why = "this step scales its loss, and whether its gradients are finite is known only after the last of them"
    elif strange := [type(o).__name__ for o in step.optimizers if not (_is_torchs(o) and type(o).__name__ in _ALONE)]:
        why = f"{strange[0]} is not known to treat each parameter alone, as {', '.join(_ALONE)} of torch do"
    elif max(holders.values()) > 1:
        why = "a parameter is held by several optimizers, and its gradient would be gone after the first"
    elif hooked := [type(o).__name__ for o in step.optimizers if hooks_on_steps(o)]:
        why = f"{hooked[0]} has hooks on its step, as moving averages of weights use them, which would be called for every parameter"
    else:
        return
    raise CannotApply(f"The optimizer's step cannot be taken inside backward: {why}. Let it come after backward, as it is.")


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")
