"""What a table does to a step's time line: which ops run again before which, and how long each piece of memory lives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memfit.levers.saved.line import Line
from memfit.levers.saved.table import BITS, DISK, DROP, HOST, STORED, TIMES
from memfit.ops.spill import WAITING

ITSELF = 2**31  # the place of an op, after all the remakings before it
Moment = tuple[int, int]  # an op, and the place among its remakings, or ITSELF
_NEVER = (-1, ITSELF)


@dataclass
class Piece:
    """Memory on the new line."""

    bytes: int
    born: Moment
    died: Moment
    source: int  # the storage it is a copy or remaking of
    node: int | None = None  # the forward op whose running again made it, the last one that wrote to it
    stays: bool = False  # until nobody needs it any more


@dataclass
class Schedule:
    """The new line, told by its differences from the old one."""

    again: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # before op: the forward ops that run again
    died: dict[int, Moment] = field(default_factory=dict)  # storage: the last moment of its first form
    pieces: list[Piece] = field(default_factory=list)

    def position(self, moment: Moment, moved: Sequence[int]) -> int:
        """Where a moment is on the new line, given where the old ops have moved to."""
        op, place = moment
        return moved[op] if place == ITSELF else moved[op] - len(self.again.get(op, ())) + place


def schedule(line: Line, ops: Mapping[int, str]) -> Schedule:
    """Follow the mechanism: nodes, handles, remakings in the order backward asks for them."""
    return _Follower(line, ops).follow()


class _Follower:
    def __init__(self, line: Line, ops: Mapping[int, str]) -> None:
        self.line = line
        self.ops = {op: BITS if op in line.once and do not in (*STORED, DROP) else do for op, do in ops.items()}
        self.result = Schedule()
        self.times: dict[int, int] = {}  # of each node: after so many remakings it stays; 0: never
        self.noded = {s for op, do in self.ops.items() if do != DROP for s in line.made.get(op, ()) if _can_be(line, s, do)}
        for s in self.noded:
            for writer in self._writers(s):
                self.times[writer] = TIMES.get(self.ops[line.writers[s][0]], 0) if writer == line.writers[s][-1] else 0
        self.dropped = {op for op, do in self.ops.items() if do == DROP}
        self.sources: dict[int, list[int]] = {}
        self.holds: dict[int, list[int]] = {}
        self.makes: dict[int, list[int]] = {}
        for node in sorted(self.times):
            self._connect(node)
        self.runs: dict[int, int] = defaultdict(int)
        self.kept_since: dict[int, Moment] = {}
        self.ends: dict[int, Moment] = defaultdict(lambda: _NEVER)

    def _writers(self, s: int) -> list[int]:
        """The nodes of a storage: what is put away has one, in its last form."""
        writers = self.line.writers[s]
        return writers[:1] if self.ops[writers[0]] in STORED else writers

    def _connect(self, node: int) -> None:
        needs = () if self.ops.get(node) in STORED else self.line.needs[node]
        self.sources[node] = [self._node_at(s, node - 1) for s in needs if s in self.noded and self.line.writers[s][0] < node]
        self.holds[node] = [s for s in needs if s not in self.noded]
        written = [s for s in self.line.trace.ops[node].outputs if node in self.line.writers.get(s, ())]
        self.makes[node] = self.line.made.get(node) or written

    def _node_at(self, s: int, op: int) -> int:
        return max(writer for writer in self._writers(s) if writer <= op)

    def follow(self) -> Schedule:
        trace = self.line.trace
        keeps: dict[int, Moment] = defaultdict(lambda: _NEVER)
        handles = []
        unread = {trace.ops[op].inputs[0] for op in self.dropped}
        for row in (row for s in self.noded | unread for row in self.line.kept.get(s, ())):
            kept = trace.saved[row]
            if kept.op in self.dropped and kept.storage == trace.ops[kept.op].inputs[0]:
                self.result.died.setdefault(kept.storage, _NEVER)
            elif kept.storage in self.noded and self._made_before(kept.storage, kept.op):
                handles.append((kept.read if kept.read is not None else len(trace.ops), row))
            else:
                keeps[kept.storage] = max(keeps[kept.storage], (self.line.ends[row], ITSELF))
        for read, row in sorted(handles):
            if read < len(trace.ops):
                self._read(row)
        self._hold_inputs(keeps)
        return self.result

    def _made_before(self, s: int, op: int) -> bool:
        return self.line.writers[s][0] <= op

    def _read(self, row: int) -> None:
        """Backward asks for a tensor: run what it takes, sources first, each freed when nothing here needs it any more."""
        kept = self.line.trace.saved[row]
        assert kept.read is not None
        wanted = self._node_at(kept.storage, kept.op)
        end = (self.line.ends[row], ITSELF)
        self.ends[wanted] = max(self.ends[wanted], end)
        order = self._order(wanted)
        if not order:
            return
        before = self.result.again[kept.read]
        uses: dict[int, int] = defaultdict(int)
        for node in order:
            for source in self.sources[node]:
                uses[source] += 1
        local: dict[int, list[Piece]] = {}
        for node in order:
            now = (kept.read, len(before))
            before.append(node)
            self.runs[node] += 1
            if self.runs[node] == self.times[node]:
                self.kept_since[node] = now
            local[node] = self._overwritten(node, local, uses) or self._new_pieces(node, now)
            for piece in local[node]:
                piece.died, piece.stays = now, node in self.kept_since
            for source in self.sources[node]:
                uses[source] -= 1
                if source in local and source not in self.kept_since:
                    _live_until(local[source], now)
        if wanted in local and wanted not in self.kept_since:
            _live_until([piece for piece in local[wanted] if piece.source == kept.storage], end)

    def _overwritten(self, node: int, local: dict[int, list[Piece]], uses: dict[int, int]) -> list[Piece] | None:
        """An in-place op writes over what was made before it, if nothing else here needs that."""
        earlier = [writer for writer in self._writers(self.makes[node][0]) if writer < node]
        pieces = local.get(earlier[-1]) if earlier and uses[earlier[-1]] == 1 else None
        for piece in pieces or ():
            piece.node = node
        return pieces

    def _new_pieces(self, node: int, moment: Moment) -> list[Piece]:
        pieces = [Piece(self.line.trace.storages[s].bytes, moment, moment, s, node) for s in self.makes[node]]
        self.result.pieces.extend(pieces)
        return pieces

    def _order(self, wanted: int) -> list[int]:
        order: list[int] = []
        entered: set[int] = set()
        stack = [(wanted, False)]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif node not in entered and node not in self.kept_since:
                entered.add(node)
                stack.append((node, True))
                stack.extend((source, False) for source in self.sources[node])
        return order

    def _hold_inputs(self, keeps: dict[int, Moment]) -> None:
        """How long nodes live, and with them what they hold: as long as a handle or another node waits for them."""
        released: dict[int, Moment] = {}
        dead = self.ends
        for node in sorted(self.times, reverse=True):
            released[node] = self.kept_since.get(node, dead[node])
            for source in self.sources[node]:
                dead[source] = max(dead[source], released[node])
            for s in self.holds[node]:
                keeps[s] = max(keeps[s], released[node])
        for piece in self.result.pieces:
            if piece.stays and piece.node is not None:
                piece.died = dead[piece.node]
        self._put_away(dead)
        self._first_forms(keeps)

    def _put_away(self, dead: dict[int, Moment]) -> None:
        """What is packed takes its fewer bytes all the while; one on its way elsewhere lives until two more have followed it."""
        stored = sorted(op for op, do in self.ops.items() if do in STORED and op in self.makes)
        for op in stored:
            if self.ops[op] == BITS and dead[op] > _NEVER:
                for s in self.makes[op]:
                    self.result.pieces.append(Piece(_packed_bytes(self.line, s), (self.line.writers[s][-1], ITSELF), dead[op], s))
        trace = self.line.trace
        first_users: dict[int, int] = {}
        for node in sorted(self.times):
            for source in self.sources[node]:
                first_users.setdefault(source, node)
        queue = sorted((self._put_away_at(s, first_users), s) for op in stored if self.ops[op] in (DISK, HOST) for s in self.makes[op])
        for place, (moment, s) in enumerate(queue):
            end = self.line.turns[self.line.writers[s][0]]
            followed = [later for later, _ in queue[place + WAITING : place + WAITING + 1]]
            if moment < len(trace.ops):
                self.result.died[s] = (min([end, *followed]) - 1, ITSELF)

    def _put_away_at(self, s: int, first_users: Mapping[int, int]) -> int:
        """Before this op: it is the first that needs the storage for later; one past the last where none does."""
        made = self.line.writers[s][0]
        saved = (self.line.trace.saved[row].op for row in self.line.kept.get(s, ()))
        never = len(self.line.trace.ops)
        return min([*(op + 1 if op == made else op for op in saved if op >= made), first_users.get(made, never), never])

    def _first_forms(self, keeps: dict[int, Moment]) -> None:
        trace = self.line.trace
        for s in {*self.noded, *self.result.died}:
            passing = (self.line.passing.get(s, trace.storages[s].born), ITSELF)
            self.result.died[s] = max(passing, keeps[s], self.result.died.get(s, _NEVER))
        for s, until in keeps.items():
            died = trace.storages[s].died
            if s not in self.result.died and died is not None and until > (died, ITSELF):
                self.result.died[s] = until


def _live_until(pieces: list[Piece], moment: Moment) -> None:
    for piece in pieces:
        piece.died = moment


def _can_be(line: Line, s: int, do: str) -> bool:
    """Only truth values, whole numbers and what a bernoulli drew fit into fewer bits."""
    dtype = line.trace.storages[s].dtype
    drawn = any("bernoulli" in line.trace.ops[writer].name for writer in line.writers[s])
    return do != BITS or drawn or dtype in ("bool", "int64", "int32", "int16")


def _packed_bytes(line: Line, s: int) -> int:
    storage = line.trace.storages[s]
    size = {"bool": 1, "int64": 8, "int32": 4, "int16": 2, "float64": 8, "float32": 4}.get(storage.dtype, 2)
    return storage.bytes // 2 if storage.dtype in ("int64", "int32", "int16") else storage.bytes // (8 * size)
