"""The control messages between ranks, nodes and the scheduler. Tensor data travels by other ways.

Every message is one MessagePack map with a ``type`` tag, encoded and validated by msgspec. `VERSION` is checked once
per connection (`Join`, `Attach`), so two versions never misread each other.

    rank  <-> node       a Unix stream socket, one length-prefixed message after another (`LocalMessage`)
    node  <-> scheduler  ZeroMQ DEALER/ROUTER under CURVE, one message a frame (`NodeMessage`, `SchedulerMessage`), long
                         ones compressed
"""
from __future__ import annotations

import zlib
from typing import Any, Literal

import msgspec

from .codec import CodecSpec
from .errors import DECODE_ERRORS, BpsError, MismatchError, ProtocolError
from .store import StoreSpec

#: Raised with every change of a message.
VERSION = 24
#: The longest message to the scheduler. Long declarations are sent in pieces (`long_lists`).
LONGEST_NBYTES = 16 << 20

#: The stage at which a wait is, in order: ranks "declare" a tensor and "push" their inputs; the "partial" sum of a node
#: travels to the owner, which makes the "sum", whose "result" travels back. Or a "barrier". "done": nothing is missing.
#: "unknown": the node that should know does not answer.
Stage = Literal["declare", "barrier", "push", "partial", "sum", "result", "done", "unknown"]
#: What a node found when it connected to another node's data port.
Outcome = Literal["answers", "refused", "silent"]


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all control messages; the class name is the tag on the wire."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the records that messages contain."""


# -- what is summed ---------------------------------------------------------------------------------------


class TensorSpec(Record):
    """One tensor as a rank declares it. All ranks declare every field alike, except for the priority.

    Members of one `group` are small tensors that are fused: listed in one order on all ranks, and packed by urgency
    into units, which share dtype and `average`. `priority`: higher is sent first, rank 0's counts; None: minus the
    position in the order of declaration. `partition_nbytes` (the most bytes of a partition), `fusion_nbytes` (of a
    group, alike for all members) and `n_streams` (connections that the partitions are sent over, with tcp): 0 means the
    job's setting. Of the tensors with the same non-empty `edition_of` only one is pushed at a time, so each is placed
    as if the others did not exist. `op`: the reduction (`partition.OPS`); `average` goes with "sum" and "rows" only.
    `ranks`: the only ranks that declare and push it, ascending; empty: all. `codec`: how it is compressed between
    nodes; None: not. A tensor with a codec is fused with nothing. `store`: its owners keep it as weights. `islands`:
    the ranks of a machine sum it among their GPUs first, as that machine's strategy says. `on_device`: the first rank
    has it on a device, and the CPU does not copy it. `direct`: its ranks may sum it themselves, if all run on one
    machine, in shared memory which their node then adds; one rank that declares it without is enough that it does not.
    `separate`: its partitions are pushed one by one, each in rounds of its own.

    Or `op` is "rows" (`partition.ROWS`): `shape` is that of a table; an input, and the sum, are a few of its rows, at
    most `max_rows` together. It is fused with nothing.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    average: bool = True
    group: str | None = None
    priority: int | None = None
    partition_nbytes: int = 0
    fusion_nbytes: int = 0
    n_streams: int = 0
    edition_of: str = ""
    op: str = "sum"
    ranks: tuple[int, ...] = ()
    codec: CodecSpec | None = None
    max_rows: int = 0
    store: StoreSpec | None = None
    islands: bool = False
    on_device: bool = False
    direct: bool = False
    separate: bool = False


class MemberPlan(Record):
    """Where one tensor lies inside its unit. `offset` and `nbytes` in bytes, 64-byte aligned."""

    name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class PartPlan(Record):
    """One partition: `part` is its number in the job (also of its slot and board word), `owner` a node index.

    `frame_nbytes`: the most bytes that travel between nodes each way, if a codec makes that differ from `nbytes`; else
    0.
    """

    part: int
    offset: int
    nbytes: int
    owner: int
    frame_nbytes: int = 0

    @property
    def wire_nbytes(self) -> int:
        """The most bytes of this partition that one node sends to another."""
        return self.frame_nbytes or self.nbytes


class UnitPlan(Record):
    """The plan of one unit: a tensor, or a group of small ones. `stride`: bytes between its partitions.

    `n_streams`, `op`, `ranks`, `codec`, `store`, `islands`, `edition_of`, `direct`, `separate`: as of its members.
    `frame_rows`: of the op "rows" the most rows in a partition's frame; `nbytes` is then the room for the frames. With
    a store each worker has a unit with the same members, partitioned and placed alike: `ranks` are the worker's,
    `store_unit` is the first worker's unit, `n_workers` their number. Rounds are counted modulo 2^32, from
    `first_round` on.
    """

    unit: int
    name: str
    dtype: str
    average: bool
    priority: int
    nbytes: int
    stride: int
    members: tuple[MemberPlan, ...]
    parts: tuple[PartPlan, ...]
    n_streams: int = 0
    op: str = "sum"
    ranks: tuple[int, ...] = ()
    codec: CodecSpec | None = None
    frame_rows: int = 0
    store: StoreSpec | None = None
    store_unit: int = -1
    n_workers: int = 1
    first_round: int = 1
    edition_of: str = ""
    islands: bool = False
    direct: bool = False
    separate: bool = False


class LagRow(Record):
    """How late the inputs of one rank, or of one node, were over `count` units (`pyx/lag.h`); the other number is -1.

    It was the last `n_last` times, and then late by `last_total_ns` in all.
    """

    rank: int = -1
    node: int = -1
    count: int = 0
    total_ns: int = 0
    max_ns: int = 0
    p99_ns: int = 0
    n_last: int = 0
    last_total_ns: int = 0


class RankLag(Record):
    """How late a rank was in the whole job: the mean over `count` units, and the share in which it was last."""

    rank: int
    count: int
    mean_s: float
    last_share: float


# -- node -> scheduler ------------------------------------------------------------------------------------


class Join(Message):
    """A node asks to be admitted.

    `index`: the node index that it wants (-1: any). `ranks`: the global ranks by local rank (-1: the scheduler numbers
    them). `server_processes`: BytePS server processes found on this machine. `settings`: those that must agree on all
    nodes. `address`: where peers connect for data; `page_nbytes`: the machine's page size. Rates in bytes/s; 0 means
    unknown, unlimited, or more than enough. `copy_rate_bytes`: of all summing threads. `room_nbytes`: memory for sums
    (-1: not bounded).
    """

    version: int
    package: str
    host: str
    pid: int
    index: int
    ranks: tuple[int, ...]
    server_processes: int
    address: str
    shm_name: str
    nic_rate_bytes: float
    settings: dict[str, str]
    page_nbytes: int = 4096
    nic_limit_bytes: float = 0.0
    sum_rate_bytes: float = 0.0
    probes: bool = False
    room_nbytes: int = -1
    copy_rate_bytes: float = 0.0


class Measured(Message):
    """The rate that this node measured for its NIC, bytes/s; 0 if there was no node to measure with."""

    nic_rate_bytes: float


class Declare(Message):
    """Rank `rank` declares tensors. `positions`: on a repetition, their positions in all that it ever declared; empty
    also if it is not the first rank of any.

    `digest`: what identifies a long list (`long_lists`). From node to scheduler it stands for `tensors`.
    """

    rank: int
    tensors: tuple[TensorSpec, ...] = ()
    positions: tuple[int, ...] = ()
    digest: bytes = b""


class ListPiece(Message):
    """The next entries of the list that `digest` identifies, each as its own message: the reply to `ListWanted`.

    `entries` of the only piece is empty if the node does not have the list any more.
    """

    digest: bytes
    entries: tuple[msgspec.Raw, ...]
    is_last: bool


class Retire(Message):
    """Rank `rank` will not push or read `units` (numbers) again, and has seen their last rounds complete."""

    rank: int
    units: tuple[int, ...]


class Credit(Message):
    """Rank 0 sets the bytes that every node may have in flight to one peer; 0: the node's own setting."""

    rank: int
    nbytes: int


class Ready(Message):
    """This node has allocated, registered and bound all memory of `generation`.

    `ownable_nbytes`: bytes of further partitions that it can own (-1: its memory is not bounded).
    """

    generation: int
    ownable_nbytes: int = -1


class MemoryFreed(Message):
    """This node, whose memory is bounded, has freed units. `ownable_nbytes`: as in `Ready`."""

    ownable_nbytes: int


class PrepareFailed(Message):
    """This node cannot prepare `generation`, and kept nothing of it. `ownable_nbytes`: as in `Ready`.

    `room_nbytes`: if it lacks memory for what it was to own instead of lost nodes, about how much it could own; else
    -1.
    """

    generation: int
    reason: str
    ownable_nbytes: int = -1
    room_nbytes: int = -1


class FreezeReport(Message):
    """This node sums and forwards nothing, and nothing more can arrive from the nodes that `Freeze` calls lost.

    `progress`: (part, last round forwarded from here, last round complete here, node whose memory ranks here read
    results in, -1 without such ranks), of the partitions that lost nodes owned and ranks here push, or of more
    (`Freeze.reports_all`). `near`: nodes that this one shares memory with, lost ones included.
    """

    epoch: int
    progress: tuple[tuple[int, int, int, int], ...] = ()
    near: tuple[int, ...] = ()


class NewcomerReady(Message):
    """This node accepts connections of the late node `node`; `is_linked`: they are established.

    From node `node` itself: it is connected to all nodes that it exchanges gradients with.
    """

    node: int
    is_linked: bool = False


class BarrierEnter(Message):
    """Rank `rank` has reached its `sequence`-th barrier."""

    rank: int
    sequence: int


class Heartbeat(Message):
    """Sent every heartbeat interval in both directions. `sent_ns`: a node's clock, to be answered by `Echo`.

    `is_short`: this scheduler does not hear a majority, so decides nothing; nodes look for another one.
    """

    sequence: int
    sent_ns: int = 0
    is_short: bool = False


class Lost(Message):
    """This node saw `who` ("rank 3", "node 1", ...) disappear.

    `is_fatal`: sums may be wrong, because data made no sense: the job ends, even if it goes on without lost ranks.
    """

    who: str
    reason: str
    is_fatal: bool = False


class ProbeResult(Message):
    """What this node found at the data port of `node`: it "answers", the connection was "refused", or it was "silent".

    The reply to `ProbeRequest`; "refused" is also reported without one, while a node reconnects.
    """

    node: int
    outcome: Outcome


class FinishAck(Message):
    """This node has read `Finish`; the scheduler need not wait for it."""


class RankLeft(Message):
    """Rank `rank` has called shutdown."""

    rank: int


#: The name in a `StallQuestion` that asks which ranks have not called shutdown.
THE_END = "shutdown:"


class StallQuestion(Message):
    """Rank `rank` has waited too long for `round` of `part` (tensor `name`), and asks who is missing.

    `question`: the rank's own number, repeated in the reply. `missing`: those that the rank knows to be missing; empty:
    it does not know.
    """

    rank: int
    question: int
    part: int
    round: int
    name: str
    missing: tuple[int, ...] = ()


class StallReport(Message):
    """What this node knows of a stalled partition: the stage it is at here, and what it waits for.

    `missing_nodes`: in stage "partial" those whose sums have not arrived at this owner, in "result" the owner.
    `gone_ranks`: those of `missing_ranks` that have left, and will never push what they have not announced.
    """

    part: int
    round: int
    stage: Stage
    missing_ranks: tuple[int, ...]
    missing_nodes: tuple[int, ...]
    gone_ranks: tuple[int, ...] = ()


class LagQuestion(Message):
    """Rank `rank` asks which ranks of the job are late. `question`: as in `StallQuestion`."""

    rank: int
    question: int


class LagReport(Message):
    """The reply to `LagReportRequest`: ranks of this machine, and all inputs of units that it owns."""

    number: int
    local: tuple[LagRow, ...]
    owned: tuple[LagRow, ...]


class Rejoin(Message):
    """Node `index` of job `job` tells all it knows: to a new scheduler, or to one that asked for it (`recall`).

    It is followed by its `n_units` committed units (`CommittedUnits`), the unanswered messages of its ranks, and
    `RejoinComplete`. `version`, `package`, `settings`: as in `Join`. `rates`: as in `Rates`; `measured`: as this node
    reported (-1: not). `epoch`, `lost`, `lost_ranks`: of the last `Freeze`; `frozen`: no commit has followed.
    `committed`: the last committed generation; `prepared`: the one that is neither committed nor dropped (0: none),
    with these new units; `seen`: the highest number heard of; `next_unit`: the first unit number not heard of.
    `changes`: of each partition the last committed owner change. `gone_from`: by the number of a store's first unit,
    ranks that have retired theirs. `failed`: names that cannot be committed. `barrier`: the last one that is done.
    `n_declared`: tensors that ranks here have ever declared. `ownable_nbytes`: as last reported (-2: not). `is_late`:
    the node came to the running job, and knows only units that concern it. `joining`: nodes expected late that had not
    been taken in. `nodes_left`: nodes all of whose ranks have left, as they said themselves. `settled_epoch`: the last
    epoch that was committed here, without nodes `settled_lost`.
    """

    version: int
    package: str
    settings: dict[str, str]
    job: str
    index: int
    nodes: tuple[NodeInfo, ...]
    recall: int = 0
    n_units: int = 0
    rates: tuple[float, ...] = ()
    measured: float = -1.0
    epoch: int = 1
    lost: tuple[int, ...] = ()
    lost_ranks: tuple[int, ...] = ()
    frozen: bool = False
    committed: int = 0
    prepared: int = 0
    prepared_units: tuple[int, ...] = ()
    seen: int = 0
    next_unit: int = 0
    changes: tuple[OwnerChange, ...] = ()
    gone_from: tuple[tuple[int, tuple[int, ...]], ...] = ()
    failed: tuple[tuple[str, str, str], ...] = ()
    barrier: int = 0
    n_declared: int = 0
    ownable_nbytes: int = -2
    is_late: bool = False
    joining: tuple[int, ...] = ()
    nodes_left: tuple[int, ...] = ()
    settled_epoch: int = 1
    settled_lost: tuple[int, ...] = ()


class CommittedUnits(Message):
    """Some of the committed units of the node that sent `Rejoin`, in the order of their commits.

    `digest`: as in `Declare`.
    """

    units: tuple[UnitPlan, ...] = ()
    digest: bytes = b""


class RejoinComplete(Message):
    """The end of what begins with `Rejoin`."""


class Publish(Message):
    """Rank `rank` stores `value` under `key` for others. `question`: as in `StallQuestion`; reply: `KeyValueReply`."""

    rank: int
    question: int
    key: str
    value: bytes


class Withdraw(Message):
    """Rank `rank` removes its values whose keys begin with `prefix`. No reply."""

    rank: int
    prefix: str


class Lookup(Message):
    """Rank `rank` waits up to `timeout_s` for a value. `who` publishes it, in words.

    If `who` is "rank 3" and that rank has left, the lookup fails.
    """

    rank: int
    question: int
    key: str
    timeout_s: float
    who: str


# -- scheduler -> node ------------------------------------------------------------------------------------


class NodeInfo(Record):
    """One admitted node as all others know it; `ranks` by local rank, empty for a helper.

    Bytes/s: `nic_rate_bytes` of its NIC (0: unknown), `nic_limit_bytes` that it may use of that (0: all),
    `sum_rate_bytes` of input that it sums (0: not a limit), `copy_rate_bytes` that its summing threads copy. `probes`:
    it measures its NIC before anything is planned. `room_nbytes` of memory for sums (-1: not bounded).
    """

    index: int
    host: str
    pid: int
    address: str
    shm_name: str
    ranks: tuple[int, ...]
    nic_rate_bytes: float
    page_nbytes: int = 4096
    nic_limit_bytes: float = 0.0
    sum_rate_bytes: float = 0.0
    probes: bool = False
    room_nbytes: int = -1
    copy_rate_bytes: float = 0.0


class Welcome(Message):
    """All have joined: the receiver's index, all nodes in node order (the order of association), the epoch.

    `is_late`: the job runs already; the receiver connects, sends `NewcomerReady`, and takes part from the next `Freeze`
    on. `lost`: those of `nodes` that are gone; `joining`: not there yet; `kinds`: (dtype, op) of all units;
    `share_nbytes`: about how much of them the receiver will own. `job`: a unique name.
    """

    index: int
    epoch: int
    nodes: tuple[NodeInfo, ...]
    is_late: bool = False
    lost: tuple[int, ...] = ()
    joining: tuple[int, ...] = ()
    kinds: tuple[tuple[str, str], ...] = ()
    share_nbytes: int = 0
    job: str = ""


class RejoinRequest(Message):
    """Asks all nodes for a `Rejoin` with this `number`: a node was cut off, and may have missed messages."""

    number: int


class Resume(Message):
    """This scheduler knows all that the one before knew. Nodes drop what they have prepared and it has not committed.

    `missed`: to a node with ranks, late nodes that it was never told of and that the job goes on without.
    """

    missed: tuple[NodeInfo, ...] = ()


class Joined(Message):
    """A node without ranks comes late: nodes accept its connections, send `NewcomerReady`, and again once connected."""

    node: NodeInfo


class NewcomerGone(Message):
    """Node `node`, which was to come late, will not come."""

    node: int


class Rates(Message):
    """The measured rates of all NICs, in node order, as placement uses them from now on."""

    nic_rate_bytes: tuple[float, ...]


class Refuse(Message):
    """The receiver is not admitted, or its request was refused. `error`: a class name of `errors`."""

    error: str
    reason: str


class ListWanted(Message):
    """The scheduler does not know the list `digest` that this node has sent in place of one (`ListPiece`)."""

    digest: bytes


class Plan(Message):
    """First phase of a commit: all nodes prepare these new units.

    `remark`: a text for the user's log. `choice`: which tensors are compressed, if that was to be chosen, and
    why.
    """

    generation: int
    units: tuple[UnitPlan, ...]
    remark: str = ""
    choice: str = ""


class Commit(Message):
    """Second phase: all nodes are ready. `order[part]` is each partition's rank, 0 is most urgent."""

    generation: int
    order: tuple[int, ...]


class Freeze(Message):
    """First step into `epoch`: nodes sum and forward nothing, disconnect from nodes `lost`, send `FreezeReport`.

    `joined`: nodes that are taken in, unless they were before, and get their share of the sums. `lost_ranks`: all ranks
    that are lost by now, those of lost nodes and those that were lost alone. `reports_all`: the report is of all
    partitions that ranks here push or that this node owns, not only of those that lost nodes owned.
    """

    epoch: int
    lost: tuple[int, ...]
    reason: str
    joined: tuple[int, ...] = ()
    lost_ranks: tuple[int, ...] = ()
    reports_all: bool = False


class OwnerChange(Record):
    """`owner` sums `part` from the round after `kept_round` on, in place of a node that is lost.

    The result of `kept_round` exists somewhere; nodes `lacking` get it from node `keeper`, which has sent it already if
    it is `lent`: at the recovery before.

    Or in place of node `giver`, which lives and has summed `kept_round` last: then it is the keeper, and has sent that
    result. Nodes `pushed` have sent it their inputs of the next round, and send them to the new owner as well. What was
    sent arrives before any node is `Ready`, so nothing of the partition is in flight at the commit.
    """

    part: int
    owner: int
    kept_round: int
    keeper: int = -1
    lacking: tuple[int, ...] = ()
    lent: bool = False
    giver: int = -1
    pushed: tuple[int, ...] = ()


class Redo(Record):
    """The round after `kept_round` of `part` is summed again, by those that are left, because a rank is lost.

    `was_sent`: its owner, which lives, has summed that round, or has taken it over as complete. Nodes `again` send it
    another partial: theirs had the input of a lost rank, or the owner never got them. Nodes `leaving` live, and have no
    rank any more that pushes it. `stale`: what is under way and does not count, as (to, from, round); it arrives, and
    is dropped, before any node is `Ready`.
    """

    part: int
    kept_round: int
    was_sent: bool
    again: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    stale: tuple[tuple[int, int, int], ...] = ()


class NewKeeper(Record):
    """Nodes `lacking` get the result of `round` of `part` from node `keeper`: the one that was to send it is lost."""

    part: int
    round: int
    keeper: int
    lacking: tuple[int, ...]


class Recover(Message):
    """Second step: nodes prepare for these owners, and send `Ready`. The `Commit` of `generation` is the third.

    `units`: those with partitions that change owners or keepers, as they are from now on. `redone`: of units with lost
    ranks. `begins`: each unit with lost ranks, and its first round without them.
    """

    epoch: int
    generation: int
    units: tuple[UnitPlan, ...]
    owner_changes: tuple[OwnerChange, ...]
    redone: tuple[Redo, ...] = ()
    keepers: tuple[NewKeeper, ...] = ()
    begins: tuple[tuple[int, int], ...] = ()


class Retired(Message):
    """All ranks have retired these units: nodes free their memory. Their partition numbers will be used again."""

    units: tuple[int, ...]


class CreditChanged(Message):
    """From now on `nbytes` may be in flight to one peer; 0: as the node's own setting says."""

    nbytes: int


class DeclareFailed(Message):
    """These names cannot be committed; all ranks that declared one of them are told."""

    names: tuple[str, ...]
    error: str
    reason: str


class BarrierDone(Message):
    """All ranks have reached barrier `sequence`."""

    sequence: int


class Echo(Message):
    """A node's heartbeat of `sent_ns` was read when the scheduler's monotonic clock was at `there_ns`."""

    sent_ns: int
    there_ns: int


class ProbeRequest(Message):
    """The scheduler does not hear node `node`: the receiver connects to its data port, and reports (`ProbeResult`)."""

    node: int


class StallReportRequest(Message):
    """Asks a node what it knows of a stalled partition (`StallReport`)."""

    part: int
    round: int


class StallAnswer(Message):
    """To the node of the rank that asked: who is missing, in words and numbers. `hopeless`: waiting on cannot help.

    `stage`: that of the slowest input. `ranks` are global; `nodes` are missing themselves, not waiting for their ranks.
    """

    rank: int
    question: int
    missing: str
    stage: Stage
    hopeless: bool = False
    ranks: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()


class LagReportRequest(Message):
    """Asks a node how late inputs were (`LagReport`)."""

    number: int


class LagAnswer(Message):
    """To the node of the rank that asked: the ranks of all nodes but the silent ones."""

    rank: int
    question: int
    ranks: tuple[RankLag, ...]
    silent_nodes: tuple[int, ...] = ()


class KeyValueReply(Message):
    """The reply to `Lookup` (a value) or `Publish` (stored). Or `error`, a class name of `errors`."""

    rank: int
    question: int
    value: bytes = b""
    error: str = ""
    reason: str = ""


class FirstRankLeft(Message):
    """The first rank has left: a wait that goes on should ask whether what it waits for can still come."""

    rank: int


class Abort(Message):
    """The job is over: every rank raises `error` with `reason`.

    `goes_on`: for this node only; the others go on without it.
    """

    error: str
    reason: str
    goes_on: bool = False


class Finish(Message):
    """All ranks have left: nodes close their connections and exit with 0."""


# -- rank <-> node ----------------------------------------------------------------------------------------


class Attach(Message):
    """A rank's first message, sent with its own pidfd. `proof`: the HMAC of `pid` under the job key.

    `cpus`: where it may run ("0-3,8"); `stays`: it must not be moved; `gpu`: the number of its GPU, -1: none.
    """

    version: int
    package: str
    pid: int
    local_rank: int
    local_size: int
    rank: int
    size: int
    proof: bytes
    settings: dict[str, str]
    cpus: str = ""
    stays: bool = True
    gpu: int = -1


class AttachServer(Message):
    """A BytePS server process found its machine's node running: the node counts it, and tells it when the job ends."""

    version: int
    pid: int
    proof: bytes


class Attached(Message):
    """All have joined. Four descriptors come along: lane, board, doorbell, the node's pidfd.

    `machines`: of each node, in node order, its number of ranks and its rate (bytes/s, 0: unknown). `cpus`: those that
    the rank has to keep to ("0-3,8"); "": any. `job`: as in `Welcome`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_pid: int
    node: int
    n_nodes: int
    n_helpers: int
    transports: dict[str, str]
    settings: dict[str, str]
    machines: tuple[tuple[int, float], ...] = ()
    cpus: str = ""
    job: str = ""


class RanksLost(Message):
    """The job goes on without `ranks`, all that it has lost by now, because of `reason`. Before any such sum is there.

    `begins`: each unit that one of the newly lost ranks pushed, and its first round without them. `pause_s`: for how
    long this node has summed nothing.
    """

    ranks: tuple[int, ...]
    reason: str
    begins: tuple[tuple[int, int], ...]
    pause_s: float


class SegmentShared(Message):
    """Segment `segment` of `owner`, with its descriptor.

    "rank": your inputs, "result:N": node N's results, "channel": memory for direct sums.
    """

    owner: str
    segment: int
    nbytes: int


class Allocate(Message):
    """A rank asks its node for `nbytes` of input memory."""

    request: int
    nbytes: int


class Allocated(Message):
    """The node has given a rank input memory: in the rank's segment `segment` at `offset`."""

    request: int
    segment: int
    offset: int


class ShareDevice(Message):
    """A rank has its node register `nbytes` of its device's memory with NICs; the descriptor comes along.

    The first `result_nbytes` are for results, which the node places; the rank tells where inputs lie in the rest.
    `gpu`: the PCIe address of the GPU whose dma-buf it is; "": it is a memfd, the host device's.
    """

    request: int
    nbytes: int
    result_nbytes: int
    gpu: str = ""


class DeviceShared(Message):
    """The reply to `ShareDevice`: it is the rank's segment `segment` from now on; with an `error` it is not."""

    request: int
    segment: int = 0
    error: str = ""
    reason: str = ""


class GpuDirectTensors(Message):
    """The tensors `names`, which a rank declares next, lie on its device: NICs may read and write them there."""

    names: tuple[str, ...]


class StateAsk(Message):
    """A rank has the node's state of a compressed unit copied to its input memory ("save"), or from there ("load").

    `action` "size": only return its size. Nothing of the unit is in flight.
    """

    request: int
    unit: int
    action: Literal["size", "save", "load"]
    segment: int = 0
    offset: int = 0
    nbytes: int = 0


class StateDone(Message):
    """The state has `nbytes` bytes, and was copied; with an `error` nothing was."""

    request: int
    nbytes: int = 0
    error: str = ""
    reason: str = ""


class Extent(Record):
    """A run of result bytes: segment `segment` of node `node`, offsets of the even and the odd round's copy."""

    node: int
    segment: int
    offset_even: int
    offset_odd: int
    nbytes: int
    on_device: bool = False  # in a segment that one of the ranks has shared by `ShareDevice`


class UnitReady(Record):
    """A committed unit, and where its results appear, part by part.

    `channel`: (segment, byte offset) of the memory in which its ranks may sum it directly; empty: there is none.
    """

    plan: UnitPlan
    extents: tuple[Extent, ...]
    channel: tuple[int, ...] = ()


class Declared(Message):
    """A generation was committed; these units may be pushed."""

    generation: int
    units: tuple[UnitReady, ...]


class Detach(Message):
    """This rank leaves. `clean` False: it ends by an exception (`reason`)."""

    clean: bool
    reason: str = ""


class Detached(Message):
    """All ranks have left, or the node lets the rank go."""


class CountersRequest(Message):
    """A rank asks for the node's counters (request numbers are the rank's own)."""

    request: int


class Counters(Message):
    """The node's counters, and how late its ranks were compared to each other."""

    request: int
    counters: dict[str, int]
    lags: tuple[LagRow, ...] = ()


NodeMessage = (
    Join | Measured | Declare | Retire | Credit | Ready | PrepareFailed | MemoryFreed | FreezeReport | NewcomerReady
    | BarrierEnter | Heartbeat | Lost | RankLeft | StallQuestion | StallReport | LagQuestion | LagReport | Publish
    | Withdraw | Lookup | Rejoin | CommittedUnits | RejoinComplete | FinishAck | ProbeResult | ListPiece
)
SchedulerMessage = (
    Welcome | Joined | NewcomerGone | RejoinRequest | Resume | Rates | Refuse | Plan | Commit | Freeze | Recover
    | Retired | CreditChanged | ProbeRequest | DeclareFailed | BarrierDone | Heartbeat | Echo | StallReportRequest
    | StallAnswer | LagReportRequest | LagAnswer | KeyValueReply | FirstRankLeft | ListWanted | Abort | Finish
)
LocalMessage = (
    Attach | AttachServer | Attached | Refuse | SegmentShared | Allocate | Allocated | Declare | Declared | Retire
    | Credit | DeclareFailed | BarrierEnter | BarrierDone | StallQuestion | StallAnswer | FirstRankLeft | RanksLost
    | Detach
    | Detached | CountersRequest | Counters | ShareDevice | DeviceShared | GpuDirectTensors | StateAsk | StateDone
    | LagQuestion | LagAnswer | Publish | Withdraw | Lookup | KeyValueReply
)

#: Messages with the connections that they go to, in the order to be sent.
Outgoing = list[tuple[bytes, Message]]

#: A byte with which no MessagePack begins: what follows is compressed.
_COMPRESSED = b"\xc1"
#: Shorter messages are sent as they are. A plan of 16,000 tensors has 3.7 MB, compressed a twelfth of that.
_LEAST_COMPRESSED_NBYTES = 16 << 10
#: The most bytes of a message before it was compressed, by sender.
_MOST_NBYTES = {"node": LONGEST_NBYTES, "scheduler": 256 << 20}

_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    "node": msgspec.msgpack.Decoder(NodeMessage),
    "scheduler": msgspec.msgpack.Decoder(SchedulerMessage),
    "local": msgspec.msgpack.Decoder(LocalMessage),
}


def refusal(error: BpsError) -> Refuse:
    """Return the message that refuses a request because of *error*."""
    return Refuse(error=type(error).__name__, reason=str(error))


def dropped(reason: object) -> Abort:
    """Return the message that tells one node that the job goes on without it, because of *reason*."""
    return Abort(error="PeerLostError", goes_on=True, reason=str(reason))


def version_mismatch(version: int, where: str) -> MismatchError:
    """Return the error of a node (*where*) whose protocol has another *version* than the scheduler's."""
    return MismatchError(f"protocol version differs: {version} on {where}, {VERSION} on the scheduler; install one "
                         "version of bpsfast everywhere")


def connection_id(process: str, number: int) -> bytes:
    """Return the ZeroMQ identity of a node's *number*-th connection (from 1 on), made by *process*."""
    return f"{process}#{number}".encode()


def dialled_as(connection: bytes) -> tuple[bytes, int]:
    """Return the process and number in a `connection_id`; the number is 0 for any other identity."""
    process, separator, number = connection.rpartition(b"#")
    return (process, int(number)) if separator and number.isdigit() else (connection, 0)


def encode(message: Message) -> bytes:
    """Return the bytes of *message*."""
    return _ENCODER.encode(message)


def compressed(data: bytes) -> bytes:
    """Return *data*, an encoded message, for the network: compressed if it is long."""
    return data if len(data) < _LEAST_COMPRESSED_NBYTES else _COMPRESSED + zlib.compress(data, 3)


def decode(data: bytes, sender: str) -> Message:
    """Return the message in *data* as *sender* ("node", "scheduler" or "local") may have sent it.

    Raises `ProtocolError` if the bytes are no such message.
    """
    try:
        return _DECODERS[sender].decode(uncompressed(data, sender))
    except DECODE_ERRORS as exc:
        raise ProtocolError(f"{len(data)} bytes from a {sender} are no control message: {exc}") from exc


def uncompressed(data: bytes, sender: str) -> bytes:
    """Return the message in *data*, of *sender* as for `decode`, before it was compressed. Raises `ProtocolError`."""
    if data[:1] != _COMPRESSED or sender not in _MOST_NBYTES:
        return data
    stream = zlib.decompressobj()
    why = f"they are cut off, followed by others, or more than {_MOST_NBYTES[sender]} bytes uncompressed"
    try:
        found = stream.decompress(memoryview(data)[1:], _MOST_NBYTES[sender])
        if stream.eof and not stream.unused_data:
            return found
    except zlib.error as exc:
        why = str(exc)
    raise ProtocolError(f"{len(data)} bytes from a {sender} are no control message: {why}")
