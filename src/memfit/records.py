"""The records that stages hand to each other: frozen, versioned, saved as JSON, readable without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from memfit.errors import RecordError
from memfit.record import Record

EXACTNESS = ("bitwise", "reordered", "redrawn", "rounded", "altered")  # from strict to loose
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "batch", "other")
COMPARED = ("gradients", "buffers", "rng", "optimizer_state", "parameters")  # what a verdict counts


def loosest(classes: Iterable[str]) -> str:
    """The class of several things together.

    >>> loosest(["reordered", "bitwise"]), loosest([])
    ('reordered', 'bitwise')
    """
    return max(classes, key=EXACTNESS.index, default="bitwise")


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call on the step's time line."""

    name: str
    phase: str  # "forward", "backward" or "optimizer"
    loss: str  # the name of the loss it belongs to, "" when there is only one
    module: str
    source: str  # the user's line, "file.py:42"
    inputs: tuple[int, ...]  # storages it read
    outputs: tuple[int, ...]  # storages it wrote or made
    workspace: int = 0  # bytes it took inside, beyond its outputs, at its own peak
    workspace_error: int = 0  # how far a predicted workspace may be off, either way
    seconds: float | None = None
    forward: int | None = None  # of a backward op: the forward op whose gradient it computes
    bfloat16_workspace: int | None = None  # what it would take inside in half precision, where that was asked for and measured
    float16_workspace: int | None = None
    parts: int = 0  # inside a kernel of memfit's own: how many runs of it this one stands for
    draws: bool = True  # random numbers, if its operator is one that can: dropout of rate 0 does not
    followed: bool = True  # by autograd: a gradient may flow back through it


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of memory: alive while ops number `born` to `died` run; -1 and None mean before and after the step."""

    bytes: int
    born: int
    died: int | None
    kind: str = ""  # a category the step itself gives: parameters, gradients, optimizer, batch; "" when made in the step
    shape: tuple[int, ...] = ()
    dtype: str = ""
    name: str = ""
    strides: tuple[int, ...] = ()  # () where the shape's last dimension runs fastest, as it mostly does


@dataclass(frozen=True, slots=True)
class Saved:
    """Autograd keeps `storage` for the gradient of forward op `op`; backward reads it before op `read` (None: never)."""

    storage: int
    op: int
    read: int | None


@dataclass(frozen=True, slots=True)
class Call:
    """A module's call and the forward ops that ran in it, first to last."""

    module: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Model:
    """What a ledger needs to know of one of the step's models, or of a network that only the loss holds."""

    name: str
    kind: str
    parameters_bytes: int
    trained: bool
    frozen: tuple[str, ...] = ()  # modules of it whose parameters all are frozen
    outside: bool = False  # only the loss holds it


@dataclass(frozen=True, slots=True)
class Process:
    """What the operating system sees beside torch's allocations."""

    base_bytes: int  # interpreter and libraries, warmed up
    slack_low_bytes: int = 0
    slack_bytes: int = 0
    slack_high_bytes: int = 0
    workers_bytes: int = 0  # what the workers add to the process tree, batches that wait included
    workers: int = 0
    pinned_bytes: int = 0
    measured_bytes: int | None = None  # the high-water mark, when the step really ran
    waiting_bytes: int = 0  # of workers_bytes: batches fetched ahead
    prefetch: int = 0  # batches each worker fetches ahead
    cached_bytes: int = 0  # of base_bytes: samples that the dataset keeps
    workers_draw: bool = False  # samples take random numbers, so that another number of workers draws others
    host_bytes: int = 0  # where the device has memory of its own: what the process and its workers take of the host's
    measured_peak_bytes: int | None = None  # by the device's own allocator, when the step really ran on one that tells


@dataclass(frozen=True, slots=True)
class Trace(Record):
    """Everything that happened in one steady training step, on a line of ops."""

    schema: ClassVar[str] = "memfit.trace"

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    saved: tuple[Saved, ...]
    calls: tuple[Call, ...]
    models: tuple[Model, ...]
    process: Process
    predicted: bool
    device: str
    batch_size: int
    step_seconds: float | None = None
    growth_bytes: int = 0  # what each further step adds and never frees
    half_is_cheap: bool = False
    notes: tuple[str, ...] = ()
    fresh_bytes_a_second: float = 4e9  # memory given back to the system and asked for again
    gradients_in_parts: bool = False  # backward passes inside backward, as reentrant checkpoints run, give one gradient several times
    conditions: dict[str, str] = field(default_factory=dict)  # what it holds for beside the step: torch, machine, the batch's tensors
    part_costs: tuple[tuple[int, float], ...] = ()  # micro-batch sizes, and the seconds of all of that size beside the whole batch's


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds memory at the peak."""

    bytes: int
    category: str
    op: str
    module: str
    source: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A root cause in plain words."""

    kind: str
    bytes: int
    where: str
    why: str
    lever: str


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the time line: one phase of one loss, ops `first` to `last`."""

    phase: str
    loss: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Option:
    """One way a lever could act on a step."""

    lever: str
    name: str  # a few words for people: "4 micro-batches of 2"
    exactness: str  # one of EXACTNESS
    settings: dict[str, Any] = field(default_factory=dict)  # what `apply` needs, plain JSON
    why: str = ""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of a machine or a device: operations and bytes a second."""

    flops: float = 5e10
    bytes: float = 5e9
    disk: float = 1e9
    bits: float = 1e9  # packed to bits, or unpacked
    host: float = 1e10  # copied between a device and its host
    fresh: float = 4e9  # of memory that the kernel hands out, zeroed page by page, and takes back
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Ledger(Record):
    """Where every byte of a training step goes."""

    schema: ClassVar[str] = "memfit.profile"
    made_by: ClassVar[str] = "memfit profile TARGET --simulate --json > FILE"

    peak_bytes: int
    process_bytes: int
    predicted: bool
    low_bytes: int
    high_bytes: int
    process_low_bytes: int
    process_high_bytes: int
    step_seconds: float | None
    device: str
    batch_size: int
    by_category: dict[str, int]
    by_module: dict[str, int]
    by_op: dict[str, int]
    by_source: dict[str, int]
    at_peak: tuple[Owner, ...]
    findings: tuple[Finding, ...]
    process: Process
    peak_op: int
    timeline: tuple[int, ...]  # bytes alive while each op runs
    stretches: tuple[Stretch, ...]
    notes: tuple[str, ...]
    trace: Trace | None = field(default=None, repr=False, compare=False, metadata={"saved": False})
    growth_bytes: int = 0  # what each further step adds and never frees: nothing said of one step holds for many then
    most_by_module: dict[str, int] = field(default_factory=dict)  # each at its own highest moment, whenever the peak is
    conditions: dict[str, str] = field(default_factory=dict)  # what it holds for beside the step: torch, machine, the batch's tensors


@dataclass(frozen=True, slots=True)
class PlannedLever:
    """A lever of a plan; what it saves and costs is marginal, in the order of the plan."""

    name: str
    option: str  # a few words for people: "4 micro-batches of 2"
    exactness: str
    saves_bytes: int = 0  # of the peak
    costs_seconds: float | None = None  # below 0 where it saves time; None: not known
    settings: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    saves_process_bytes: int | None = None  # of the process, at the upper end that has to fit; None: not known


@dataclass(frozen=True, slots=True)
class Alternative:
    """What a plan could have used and did not."""

    name: str
    option: str
    exactness: str
    saves_bytes: int | None = None  # of the plain step's peak; None: not weighed
    costs_seconds: float | None = None  # beside the plan
    rejected_because: str = ""


@dataclass(frozen=True, slots=True)
class Plan(Record):
    """Which levers make a step fit a budget, in the order they are applied, and for which step."""

    schema: ClassVar[str] = "memfit.plan"
    version: ClassVar[int] = 2
    oldest: ClassVar[int] = 2  # before, a plan knew its step by tensors and optimizers' names alone
    made_by: ClassVar[str] = "memfit plan TARGET --budget BYTES -o FILE"

    feasible: bool
    budget_bytes: int
    predicted_peak_bytes: int
    predicted_process_bytes: int
    predicted_slowdown: float | None  # a ratio, 1.20; None when nothing was timed
    exactness: str  # the loosest class among the levers
    levers: tuple[PlannedLever, ...]
    alternatives: tuple[Alternative, ...] = ()
    reachable_bytes: dict[str, int | None] = field(default_factory=dict)  # each class: the lowest process, its upper end; None: not weighed
    planning_seconds: float = 0.0
    step: dict[str, str] = field(default_factory=dict)  # readable facts that tell the step it was made for
    predicted_host_bytes: int = 0  # where the device has memory of its own: of the host's, with what is put away there
    device: str = ""  # what it was made for; "": for where its step is
    times: str = ""  # what costs rest on: "measured" on this machine op by op, "measured in part", "estimated"; "" where nothing costs
    gap: float | None = None  # no plan that was weighed and fits takes less than 1 - gap of its seconds; None: nothing was weighed
    not_weighed: dict[str, str] = field(default_factory=dict)  # why a class in reachable_bytes has none
    estimated: tuple[str, ...] = ()  # classes in reachable_bytes that were not allowed: weighed on paper, and not at their upper end
    growth_bytes: int = 0  # what each step leaves behind that nothing frees
    fits_steps: int | None = None  # how many steps stay inside the budget where each leaves something behind; None: any number

    def __post_init__(self) -> None:
        """Every class is there, the looser ones than allowed as well; None for all of them where the step fits as it is."""
        object.__setattr__(self, "reachable_bytes", dict.fromkeys(EXACTNESS) | self.reachable_bytes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` gave; what `memfit plan --json` says where nothing fits is no plan."""
        if values.get("feasible") is False:
            raise RecordError("This record says that nothing fits its budget, so there is nothing to apply: plan again with a larger one.")
        return super(Plan, cls).from_dict(values)


@dataclass(frozen=True, slots=True)
class Worst:
    """The comparison that came nearest to its bound, or farthest beyond it; distances are L2 norms."""

    what: str
    error: float | None  # None: not a finite number, or there was nothing to measure
    bound: float | None


@dataclass(frozen=True, slots=True)
class Verdict(Record):
    """Whether a fitted step is still the same training."""

    schema: ClassVar[str] = "memfit.verdict"

    equivalent: bool
    exactness: str  # the class the plan claims, and by whose rule it was judged
    loss: dict[str, float | None]  # reference and fitted: of the first step, summed over its phases
    worst: Worst
    compared: dict[str, int]  # how many gradients, buffers, rng, optimizer_state and parameters
    levers: tuple[str, ...] = ()  # those that were on; what is said holds for these
    culprit: str = ""  # the lever to blame
    trajectory: dict[str, tuple[dict[str, float | None], ...]] = field(default_factory=dict)  # reference and fitted: each step's losses
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    not_compared: tuple[str, ...] = ()  # levers of the plan that could not be on: nothing is said of them
    samples: int = 0  # on which both steps were run
    step_seconds: dict[str, float] = field(default_factory=dict)  # reference and fitted: of a step nobody looked into, where there was one
    culprit_because: str = ""  # what about the step it cannot do, where that was found
    by_design: bool = False  # levers that were asked for make it another training, and nothing else was found wrong

    @property
    def unproven(self) -> bool:
        """Nothing was found wrong, and not every lever could be compared: neither a yes nor a no."""
        error, bound = self.worst.error, self.worst.bound
        return bool(self.not_compared) and not self.culprit and error is not None and bound is not None and error <= bound
