"""Control messages: what travels between ranks, nodes and the scheduler, and nothing of the data path.

Every message is one MessagePack map with a ``type`` tag, encoded and validated by msgspec.
`VERSION` is checked once per connection (`Join`, `Attach`): two versions never talk past each other.

Longer than other files on purpose: one protocol with one `VERSION` is read, and changed, as a whole.

    rank  <-> node       a Unix stream socket, one length-prefixed message after another (`LocalMessage`)
    node  <-> scheduler  ZeroMQ DEALER/ROUTER under CURVE, one message a frame (`NodeMessage`, `SchedulerMessage`)
"""
from __future__ import annotations

from typing import Literal

import msgspec

from .codec import CodecSpec
from .errors import DECODE_ERRORS, BpsError, ProtocolError
from .store import StoreSpec

#: Bumped whenever a field changes its meaning.
VERSION = 17
#: No message to the scheduler is longer; a declaration of 65536 tensors has about 10 MB.
LONGEST_NBYTES = 16 << 20

#: What a wait waits for, in the order in which it happens: ranks "declare" a tensor and "push" their inputs, the
#: "partial" of a machine travels to the owner, which makes the "sum", whose "result" travels back. Or for a "barrier".
#: "done": nothing any more. "unknown": who should know does not answer.
Stage = Literal["declare", "barrier", "push", "partial", "sum", "result", "done", "unknown"]
#: What a node has found at another one's data port.
Outcome = Literal["answers", "refused", "silent"]


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True, omit_defaults=True):
    """Root of all control messages; the class name is the tag on the wire."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Root of what messages are made of."""


# -- what is summed ---------------------------------------------------------------------------------------


class TensorSpec(Record):
    """One tensor as a rank declares it. All ranks must declare the same, field by field, but for the priority.

    `group` fuses small tensors: members of one group are listed in one order on all ranks, and packed by urgency into
    units of one round, which share dtype and `average`. `priority`: higher is sent first, and rank 0's counts; None:
    minus the order of declaration. `partition_nbytes` (at most so many in a partition) and `fusion_nbytes` (of a group,
    for all its members alike): 0 means the job's setting, as it does for `n_streams`, the connections that its
    partitions take turns on where a peer is reached by tcp. Tensors with the same `edition_of`, if it is not empty,
    take turns: only one edition is pushed at a time, so each is placed as if the others were not there.
    `op` is what is done with the inputs (`partition.OPS`); `average` goes with "sum" and "rows" only. `ranks`: the only
    ranks that declare and push it, in ascending order; empty: all of the job. `codec`: how it is compressed between
    nodes, None: not at all; what has one is fused with nothing. `store`: its owners keep it, and do more than sum.
    `islands`: ranks of one machine sum it among their GPUs first, as far as that machine's strategy says. `on_device`:
    its first rank has it there, and the CPU does not copy it.

    Or `op` is "rows" (`rows.py`): `shape` is that of a table, of which inputs and sum are only some rows, `max_rows`
    of them together; it is fused with nothing.
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


class MemberPlan(Record):
    """Where one tensor lies inside its unit. `offset` and `nbytes` in bytes, 64-byte aligned."""

    name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class PartPlan(Record):
    """One partition: `part` is its job-wide index (also its slot and board word), `owner` a node index.

    `frame_nbytes`: the most that travels between nodes each way, if that is not `nbytes` because of a codec; 0: it is.
    """

    part: int
    offset: int
    nbytes: int
    owner: int
    frame_nbytes: int = 0

    @property
    def wire_nbytes(self) -> int:
        """The most bytes that one node sends another of this partition."""
        return self.frame_nbytes or self.nbytes


class UnitPlan(Record):
    """What has one round: a tensor, or a group of small ones. `stride` is the bytes between its partitions.

    `n_streams`, `op`, `ranks`, `codec`, `store` and `islands`: as its members say (`TensorSpec`). `frame_rows`: of the
    op "rows" the most rows in a partition's frame; `nbytes` are then those of the frames' room. Of a store each worker
    has a unit with the same members, cut and placed alike; `ranks` are then the worker's, `store_unit` is the first
    worker's unit, `n_workers` how many there are. Rounds are counted modulo 2^32, from `first_round` on. `edition_of`:
    as its members say.
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


class LagRow(Record):
    """How late the inputs of one rank, or of one node, were for `count` units (`pyx/lag.h`); the other number is -1.

    `n_last` times it was the last; `last_total_ns` is how late it was then, in all.
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
    """How late a rank was in the whole job: in `count` units, in the mean, and in which share of them it was last."""

    rank: int
    count: int
    mean_s: float
    last_share: float


# -- node -> scheduler ------------------------------------------------------------------------------------


class Join(Message):
    """A node asks to be admitted.

    `index` is the node's own wish (-1: none). `ranks` are its ranks' global numbers by local rank (-1: the
    scheduler counts). `server_processes` counts BytePS-style server processes found on this machine.
    `settings` must agree on all nodes (the fingerprint); `address` is where peers connect for data; `page_nbytes` is
    the machine's page size. Rates in bytes/s, 0: not known, not limited, more than enough; `copy_rate_bytes` of all
    summing threads. `room_nbytes`: memory for sums (-1: any).
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
    """This node, which `probes`, has found what its NIC carries: bytes/s, 0 if there was nobody to measure with."""

    nic_rate_bytes: float


class Declare(Message):
    """Rank `rank` declares tensors. `positions`: in the order of all that it ever declared, if this is said again."""

    rank: int
    tensors: tuple[TensorSpec, ...]
    positions: tuple[int, ...] = ()


class Retire(Message):
    """Rank `rank` will never push or read `units`, by number, again, and has seen their last rounds complete."""

    rank: int
    units: tuple[int, ...]


class Credit(Message):
    """Let every node have `nbytes` under way to one peer from now on; 0: what its own setting says. From rank 0."""

    rank: int
    nbytes: int


class Ready(Message):
    """This node has allocated, registered and bound everything of `generation`.

    `ownable_nbytes`: how many bytes of further partitions it can own, if its memory is bounded (-1: it is not).
    """

    generation: int
    ownable_nbytes: int = -1


class Room(Message):
    """This node, whose memory is bounded, has given back what units used. `ownable_nbytes`: as in `Ready`."""

    ownable_nbytes: int


class PrepareFailed(Message):
    """This node cannot prepare `generation`; nothing of it was kept. `ownable_nbytes`: as in `Ready`. `room_nbytes`: if
    it has no memory for what it was to own in place of lost nodes, about how much of that it could; else -1.
    """

    generation: int
    reason: str
    ownable_nbytes: int = -1
    room_nbytes: int = -1


class Frozen(Message):
    """Nothing is summed or passed on at this node, and nothing can come any more from those whom `Freeze` calls lost.

    `progress`: of partitions that those owned and ranks here push (if somebody has joined: of all partitions that ranks
    here push, or that are owned here), (part, the last round that was passed on from here, the last one that is
    complete here, the node in whose memory ranks here read results, -1 without such ranks). `near`: the nodes that this
    one shares memory with, those included that are lost.
    """

    epoch: int
    progress: tuple[tuple[int, int, int, int], ...] = ()
    near: tuple[int, ...] = ()


class Meets(Message):
    """This node expects the connections of node `node`, which comes late; `is_linked`: they are there.

    From node `node` itself: it is connected to all that it exchanges gradients with.
    """

    node: int
    is_linked: bool = False


class BarrierEnter(Message):
    """Rank `rank` has reached its `sequence`-th barrier."""

    rank: int
    sequence: int


class Heartbeat(Message):
    """Sent every heartbeat interval in both directions. `sent_ns`: a node's clock; it wants to be answered: `Echo`."""

    sequence: int
    sent_ns: int = 0


class Lost(Message):
    """This node saw `who` ("rank 3", "node 1", ...) go away."""

    who: str
    reason: str


class Visited(Message):
    """What this node has found at the data port of node `node`: it "answers", nobody listens there ("refused"), or
    there was no answer ("silent"). The answer to `Visit`; "refused" also without, while another link is sought.
    """

    node: int
    outcome: Outcome


class Finished(Message):
    """`Finish` was read: the scheduler need not stay for this node any more."""


class RankLeft(Message):
    """Rank `rank` has called shutdown."""

    rank: int


#: What a `Stalled` names that asks who has not left the job yet.
THE_END = "shutdown:"


class Stalled(Message):
    """Rank `rank` waits too long for `round` of `part` (tensor `name`): who is missing?

    `question` is the rank's own number for it, which the answer repeats.
    """

    rank: int
    question: int
    part: int
    round: int
    name: str


class StallReport(Message):
    """What this node knows of a stalled partition: how far it has come here, and what it waits for.

    `missing_nodes`: in the stage "partial" those whose sums have not arrived at this owner, in "result" the owner.
    `gone_ranks` are those of `missing_ranks` that have left: what they did not announce before will never come.
    """

    part: int
    round: int
    stage: Stage
    missing_ranks: tuple[int, ...]
    missing_nodes: tuple[int, ...]
    gone_ranks: tuple[int, ...] = ()


class LagQuestion(Message):
    """Rank `rank` wants to know who is late in the whole job. `question`: as in `Stalled`."""

    rank: int
    question: int


class LagReport(Message):
    """The answer to `LagAsk`: ranks of this machine among each other, and all inputs of units that it owns."""

    number: int
    local: tuple[LagRow, ...]
    owned: tuple[LagRow, ...]


class Rejoin(Message):
    """Node `index` of the job named `job` says all it knows: to a new scheduler, or to one that has asked (`recall`).

    There follow its committed units, `n_units` of them (`Kept`), what its ranks have said and was not answered, as they
    said it, and `Recounted`. `version`, `package`, `settings`: as in `Join`. `rates`: as `Rates` said, `measured`: as
    this node did (-1: it has not). `epoch` and `lost`: as the last `Freeze` said, `frozen`: there was no commit since.
    `committed`: the last generation that was, `prepared`: the one that is neither committed nor dropped (0: none), with
    these new units; `seen`: the last number that was heard of, `next_unit` the first of a unit that was not. `lent`: of
    successions that have been committed, those with a round that some lacked. `gone_from`: ranks that have retired
    theirs of a store, by the number of its first unit. `failed`: names that cannot be committed. `barrier`: the last
    one that is done. `n_declared`: tensors that ranks here have ever declared. `ownable_nbytes`: as this
    node has said last (-2: it has not). `is_late`: it came to the running job, and knows only the units that it had to
    do with. `joining`: nodes that were expected to come late, and had not been taken in. `farewells`: nodes all of
    whose ranks have left, as they said themselves.
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
    frozen: bool = False
    committed: int = 0
    prepared: int = 0
    prepared_units: tuple[int, ...] = ()
    seen: int = 0
    next_unit: int = 0
    lent: tuple[Succession, ...] = ()
    gone_from: tuple[tuple[int, tuple[int, ...]], ...] = ()
    failed: tuple[tuple[str, str, str], ...] = ()
    barrier: int = 0
    n_declared: int = 0
    ownable_nbytes: int = -2
    is_late: bool = False
    joining: tuple[int, ...] = ()
    farewells: tuple[int, ...] = ()


class Kept(Message):
    """Some of the committed units of the node that says `Rejoin`, in the order of their commits."""

    units: tuple[UnitPlan, ...]


class Recounted(Message):
    """That was all: the end of what begins with `Rejoin`."""


class Publish(Message):
    """Rank `rank` leaves a notice for others to find. `question`: as in `Stalled`; answered by `Found`."""

    rank: int
    question: int
    key: str
    value: bytes


class Withdraw(Message):
    """Rank `rank` takes back its notices whose keys begin with `prefix`. Not answered."""

    rank: int
    prefix: str


class Lookup(Message):
    """Rank `rank` waits up to `timeout_s` for a notice. `who` publishes it, in words; if "rank 3" has left, in vain."""

    rank: int
    question: int
    key: str
    timeout_s: float
    who: str


# -- scheduler -> node ------------------------------------------------------------------------------------


class NodeInfo(Record):
    """One admitted node as everyone knows it; `ranks` by local rank, empty for a helper.

    Bytes/s: `nic_rate_bytes` of its NIC (0: not known), `nic_limit_bytes` that it may take of that (0: all),
    `sum_rate_bytes` of input that it sums (0: no matter), `copy_rate_bytes` that its summing threads copy. `probes`:
    it measures its NIC before anything is planned. `room_nbytes` of memory that it has for sums (-1: not bounded).
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
    """All have joined: your index, everybody in node order (the order of the association), the epoch.

    `is_late`: the job runs already; connect, answer `Meets`, and take part from the next `Freeze` on. `lost`: those of
    `nodes` that are not there any more, `joining`: not yet; `kinds`: (dtype, op) of what is summed; `share_nbytes`: how
    much of that you may get to own then. `job`: a name that no other job has.
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


class Recall(Message):
    """Say all you know (`Rejoin`), with this `number`: a node was cut off, and may have missed what others have heard.
    """

    number: int


class Resume(Message):
    """This scheduler knows all that the one before did. What you have prepared and it has not committed is dropped.

    `missed`: to a node with ranks, the nodes that have come late after all that it knows of, of which it was never
    told, and which the job goes on without.
    """

    missed: tuple[NodeInfo, ...] = ()


class Joined(Message):
    """A node without ranks comes late: expect its connections, answer `Meets`, and again once they are there."""

    node: NodeInfo


class NotComing(Message):
    """Node `node`, which was to come late, will not: expect it no more."""

    node: int


class Rates(Message):
    """All who measure have: what the NICs of all nodes carry, in node order, as placement counts on it from now on."""

    nic_rate_bytes: tuple[float, ...]


class Refuse(Message):
    """You are not admitted, or your request was refused. `error` is a class name of `errors`."""

    error: str
    reason: str


class Plan(Message):
    """First phase of a commit: prepare these new units. `remark`: what whoever runs the job should know of it.

    `choice`: what was compressed, if that was to be chosen, and why.
    """

    generation: int
    units: tuple[UnitPlan, ...]
    remark: str = ""
    choice: str = ""


class Commit(Message):
    """Second phase: everybody is ready. `order[part]` is each partition's integer rank, 0 is most urgent."""

    generation: int
    order: tuple[int, ...]


class Freeze(Message):
    """First step into `epoch`: sum and pass on nothing, part with nodes `lost`, answer `Frozen`.

    `joined`: nodes that are taken in, unless they were before, and are to get their share of the sums.
    """

    epoch: int
    lost: tuple[int, ...]
    reason: str
    joined: tuple[int, ...] = ()


class Succession(Record):
    """`owner` sums `part` from the round after `kept_round` on, in the place of a node that is lost.

    The result of `kept_round` is there somewhere; nodes `lacking` get it from node `keeper`, which has sent it already
    if it is `lent`: at the recovery before.

    Or in the place of node `giver`, which lives and has summed `kept_round` last: then it is the keeper, and has sent
    that result. Nodes `pushed` have sent it their inputs of the next round, which they send the new owner as well. Who
    has sent what arrives before anybody is `Ready`, so that nothing of the partition is under way at the commit.
    """

    part: int
    owner: int
    kept_round: int
    keeper: int = -1
    lacking: tuple[int, ...] = ()
    lent: bool = False
    giver: int = -1
    pushed: tuple[int, ...] = ()


class Recover(Message):
    """Second step: prepare for these owners, and answer `Ready`. The `Commit` of `generation` is the third.

    `units`: those with partitions that have new owners, as they are from now on.
    """

    epoch: int
    generation: int
    units: tuple[UnitPlan, ...]
    successions: tuple[Succession, ...]


class Retired(Message):
    """All ranks have retired these units: give back what they use. Their partitions' numbers will be used again."""

    units: tuple[int, ...]


class CreditChanged(Message):
    """From now on `nbytes` may be under way to one peer; 0: what this node's setting says."""

    nbytes: int


class DeclareFailed(Message):
    """These names cannot be committed; every rank that declared one of them is told."""

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


class Visit(Message):
    """The scheduler does not hear node `node`: see whether its data port answers, and say so (`Visited`)."""

    node: int


class StallAsk(Message):
    """Report what you know of this partition."""

    part: int
    round: int


class StallAnswer(Message):
    """To the node of the rank that asked: who is missing, in words and numbers. `hopeless`: waiting on cannot help.

    `stage`: how far the slowest input has come. `ranks` are global, `nodes` are missing for themselves: not those that
    wait for their ranks.
    """

    rank: int
    question: int
    missing: str
    stage: Stage
    hopeless: bool = False
    ranks: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()


class LagAsk(Message):
    """Report how late inputs were."""

    number: int


class LagAnswer(Message):
    """To the node of the rank that asked: the ranks of all nodes but the silent ones."""

    rank: int
    question: int
    ranks: tuple[RankLag, ...]
    silent_nodes: tuple[int, ...] = ()


class Found(Message):
    """To the node of the rank that asked: a notice; or that its own was taken. Or `error`, a class name of `errors`."""

    rank: int
    question: int
    value: bytes = b""
    error: str = ""
    reason: str = ""


class Departed(Message):
    """The first rank has left the job: a wait that goes on should ask whether what it waits for can still come."""

    rank: int


class Abort(Message):
    """The job is over: raise `error` with `reason` on every rank. `goes_on`: for this node only, others do without it.
    """

    error: str
    reason: str
    goes_on: bool = False


class Finish(Message):
    """All ranks have left: close the connections and exit with 0."""


# -- rank <-> node ----------------------------------------------------------------------------------------


class Attach(Message):
    """A rank's first message, with its own pidfd. `proof` is the HMAC of `pid` under the job key.

    `cpus`: where it may run ("0-3,8"); `stays`: it is not to be put elsewhere; `gpu`: the number of its GPU, -1: none.
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
    """A BytePS-style server process that found its machine's node running: count me, tell me when it ends."""

    version: int
    pid: int
    proof: bytes


class Attached(Message):
    """All have joined. With it come four descriptors: lane, board, doorbell, the node's pidfd.

    `machines`: of each node, in node order, its number of ranks and what is known of its rate (bytes/s, 0: nothing).
    `cpus`: those that the rank is to keep to ("0-3,8"); "": to none. `job`: as of `Welcome`.
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


class SegmentShared(Message):
    """Segment `segment` of `owner` ("rank": your inputs, "result:N": node N's results); its descriptor comes along."""

    owner: str
    segment: int
    nbytes: int


class Allocate(Message):
    """Give me `nbytes` of input memory."""

    request: int
    nbytes: int


class Allocated(Message):
    """Your input memory: in your segment `segment` at `offset`."""

    request: int
    segment: int
    offset: int


class ShareDevice(Message):
    """Register `nbytes` of my device's memory, whose descriptor comes along, with the cards that you use.

    The first `result_nbytes` are for results, which you place; where inputs lie in what follows I say. `gpu`: the
    address on PCIe of the GPU whose dma-buf it is; "": it is a memfd, the host device's.
    """

    request: int
    nbytes: int
    result_nbytes: int
    gpu: str = ""


class DeviceShared(Message):
    """It is your segment `segment` from now on, its results' part mine to give; with an `error` nothing is."""

    request: int
    segment: int = 0
    error: str = ""
    reason: str = ""


class Direct(Message):
    """The tensors `names`, which I declare next, lie on my device: cards may take them there, and bring their sums."""

    names: tuple[str, ...]


class StateAsk(Message):
    """Copy this node's state of the compressed unit `unit` to my input memory, or take it from there.

    `action` "size": only say how long it is. Nothing of the unit is under way.
    """

    request: int
    unit: int
    action: Literal["size", "save", "load"]
    segment: int = 0
    offset: int = 0
    nbytes: int = 0


class StateDone(Message):
    """It has `nbytes` bytes, and was copied; with an `error` nothing was."""

    request: int
    nbytes: int = 0
    error: str = ""
    reason: str = ""


class Extent(Record):
    """A run of result bytes: segment `segment` of node `node`, byte offsets of the even and the odd round's copy."""

    node: int
    segment: int
    offset_even: int
    offset_odd: int
    nbytes: int
    on_device: bool = False  # in a segment that one of the ranks has shared by `ShareDevice`


class UnitReady(Record):
    """A committed unit and where its results appear, part by part."""

    plan: UnitPlan
    extents: tuple[Extent, ...]


class Declared(Message):
    """A generation was committed; these units may be pushed."""

    generation: int
    units: tuple[UnitReady, ...]


class Detach(Message):
    """This rank leaves. `clean` False: it is dying of an exception (`reason`)."""

    clean: bool
    reason: str = ""


class Detached(Message):
    """The whole job has left, or the node lets you go."""


class Ask(Message):
    """A rank asks for the node's counters (request ids are the rank's own)."""

    request: int


class Told(Message):
    """The node's counters, and how late its ranks were compared to each other."""

    request: int
    counters: dict[str, int]
    lags: tuple[LagRow, ...] = ()


NodeMessage = (
    Join | Measured | Declare | Retire | Credit | Ready | PrepareFailed | Room | Frozen | Meets | BarrierEnter
    | Heartbeat | Lost | RankLeft | Stalled | StallReport | LagQuestion | LagReport | Publish | Withdraw | Lookup
    | Rejoin | Kept | Recounted | Finished | Visited
)
SchedulerMessage = (
    Welcome | Joined | NotComing | Recall | Resume | Rates | Refuse | Plan | Commit | Freeze | Recover | Retired
    | CreditChanged | Visit
    | DeclareFailed | BarrierDone | Heartbeat | Echo | StallAsk | StallAnswer | LagAsk | LagAnswer | Found | Departed
    | Abort | Finish
)
LocalMessage = (
    Attach | AttachServer | Attached | Refuse | SegmentShared | Allocate | Allocated | Declare | Declared | Retire
    | Credit | DeclareFailed | BarrierEnter | BarrierDone | Stalled | StallAnswer | Departed | Detach | Detached | Ask
    | Told | ShareDevice | DeviceShared | Direct
    | StateAsk | StateDone | LagQuestion | LagAnswer | Publish | Withdraw | Lookup | Found
)

#: Messages with the connections that they go to, in the order to be sent.
Outgoing = list[tuple[bytes, Message]]

_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = {
    "node": msgspec.msgpack.Decoder(NodeMessage),
    "scheduler": msgspec.msgpack.Decoder(SchedulerMessage),
    "local": msgspec.msgpack.Decoder(LocalMessage),
}


def refusal(error: BpsError) -> Refuse:
    """Return the message that refuses a request because of *error*."""
    return Refuse(error=type(error).__name__, reason=str(error))


def connection_id(process: str, number: int) -> bytes:
    """Return the ZeroMQ identity of a node's connection: the *number*-th, from 1 on, that its *process* has dialled."""
    return f"{process}#{number}".encode()


def dialled_as(connection: bytes) -> tuple[bytes, int]:
    """Return the process and the number that `connection_id` got; the number is 0 of what is no such identity."""
    process, separator, number = connection.rpartition(b"#")
    return (process, int(number)) if separator and number.isdigit() else (connection, 0)


def encode(message: Message) -> bytes:
    """Return the bytes of *message*."""
    return _ENCODER.encode(message)


def decode(data: bytes, sender: str) -> Message:
    """Return the message in *data* as *sender* ("node", "scheduler" or "local") may have sent it.

    Raises
    ------
    ProtocolError
        If the bytes are no such message.
    """
    try:
        return _DECODERS[sender].decode(data)
    except DECODE_ERRORS as exc:
        raise ProtocolError(f"{len(data)} bytes from a {sender} are no control message: {exc}") from exc
