"""Every overload of every call of torch's process group, by torch's own signatures, against gloo's results."""
from __future__ import annotations

import datetime
import itertools
import re
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

pytestmark = pytest.mark.matrix

SIZE = 3
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
SHAPES = {"0-dim": (), "1-dim": (3,), "transposed": (2, 3)}
_TIMEOUT = datetime.timedelta(seconds=40)
#: What is called by pairs of ranks, and what is no call of its own.
MESSAGES = ("send", "recv", "recv_anysource")
NO_CALLS = ("_end_coalescing", "reconfigure")


class Parameter(NamedTuple):
    name: str
    kind: str
    is_optional: bool

    @property
    def depth(self) -> int:
        """The depth of lists around tensors; -1 if the parameter takes no tensors."""
        return len(re.findall(r"\b(?:[Ll]ist|Sequence)\[", self.kind)) if "Tensor" in self.kind else -1


def signatures() -> dict[str, list[list[Parameter]]]:
    """Return the overloads, from pybind's docstrings, of each method of torch's `ProcessGroup` that returns a Work."""
    found: dict[str, list[list[Parameter]]] = {}
    for name in sorted(dir(dist.ProcessGroup)):
        text = getattr(getattr(dist.ProcessGroup, name), "__doc__", None) or ""
        for line in text.splitlines():
            match = re.match(rf"(?:\d+\. )?{name}\(self: [\w.:]+(?:, )?(.*)\) -> (?:\S*\bWork|c10d::Work)$", line)
            if match and name not in NO_CALLS:
                found.setdefault(name, []).append([_parameter(part) for part in _parts(match[1])])
    return found


def _parts(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += character in "[(<"
        depth -= character in "])>"
        if character == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def _parameter(text: str) -> Parameter:
    declared, _, default = text.partition(" = ")
    name, _, kind = declared.partition(": ")
    return Parameter(name, kind, bool(default))


def table(method: str) -> list[tuple[str, list[Parameter], tuple[str, ...], int]]:
    """Return the forms of *method*: a label, the parameters given, how each is varied, how many are positional."""
    forms = []
    for number, parameters in enumerate(signatures()[method]):
        needed = [each for each in parameters if not each.is_optional]
        optional = [each for each in parameters if each.is_optional]
        given = [optional[:n] for n in range(len(optional) + 1)]
        given += [[each] for each in optional[1:]]
        for more in given:
            chosen = [*needed, *more]
            is_prefix = more == optional[: len(more)]
            for ways in itertools.product(*(variants(each) for each in chosen)):
                for n_positional in range(len(chosen) + 1 if is_prefix else len(needed) + 1):
                    if any(each.name.startswith("arg") for each in chosen[n_positional:]):
                        continue  # has no name in Python
                    said = ", ".join(f"{'' if place < n_positional else each.name + '='}{way}"
                                     for place, (each, way) in enumerate(zip(chosen, ways)))
                    forms.append((f"{number + 1}. {method}({said})", chosen, ways, n_positional))
    return forms


def variants(parameter: Parameter) -> list[str]:
    if parameter.depth >= 0:
        return ["tensor", "list", "lists"][parameter.depth : parameter.depth + 1]
    if parameter.name == "opts":
        return ["options", "max, member 1"]
    if parameter.name == "timeout":
        return ["timedelta", *(["None"] if "None" in parameter.kind else [])]
    if parameter.name == "op":
        return ["MAX", "ReduceOp(PRODUCT)"]
    return {"root": ["1"], "output_split_sizes": ["[]"], "input_split_sizes": ["[]"]}.get(parameter.name, ["1"])


class Call:
    """One call of *method* on this rank: its arguments, and all tensors in them."""

    def __init__(self, method: str, chosen: list[Parameter], ways: tuple[str, ...], shape: tuple[int, ...]) -> None:
        self.rank, self.shape = dist.get_rank(), shape
        asked = dict(zip((each.name for each in chosen), ways))
        self.root = 1 if "root" in asked or asked.get("opts") == "max, member 1" else 0
        self.tensors: list[torch.Tensor] = []
        self.arguments = [self.value(method, parameter, way) for parameter, way in zip(chosen, ways)]

    def value(self, method: str, parameter: Parameter, way: str) -> Any:
        if parameter.depth >= 0:
            is_output = parameter.name.lower().startswith("out")
            return self.nested(method, parameter.depth, is_output)
        if parameter.name == "opts":
            options = getattr(_distributed_c10d, re.findall(r"\w+Options", parameter.kind)[0])()
            if way != "options":
                options.timeout = _TIMEOUT
                for field, what in (("reduceOp", dist.ReduceOp.MAX), ("rootRank", 1)):
                    if hasattr(options, field):
                        setattr(options, field, what)
            return options
        return {"timedelta": _TIMEOUT, "None": None, "MAX": dist.ReduceOp.MAX, "1": 1, "[]": [],
                "ReduceOp(PRODUCT)": dist.ReduceOp(dist.ReduceOp.PRODUCT)}[way]

    def nested(self, method: str, depth: int, is_output: bool) -> Any:
        is_many = method.startswith(("alltoall", "all_to_all")) or ("gather" if is_output else "scatter") in method
        if any(word in method for word in ("base", "single", "_tensor")):  # pieces lie in one tensor
            whole = self.tensor(is_output, SIZE if is_many else 1)
            return [whole] if depth else whole
        if is_many and method in ("gather", "scatter") and self.rank != self.root:
            return []
        pieces = [self.tensor(is_output) for _ in range(SIZE if is_many else 1)]
        if method == "allgather_coalesced" and is_output:
            return [[piece] for piece in pieces]
        if is_many:
            return [pieces] if depth == 2 else pieces
        return pieces if depth else pieces[0]

    def tensor(self, is_output: bool, n_pieces: int = 1) -> torch.Tensor:
        """Return zeros, or values of this rank; *n_pieces* times as many if that is not 1."""
        first, *rest = reversed(self.shape) if self.shape else (1,)
        made = torch.zeros(self.shape if n_pieces == 1 else (n_pieces * first, *rest))
        shape = made.shape
        if not is_output:
            made += torch.arange(float(made.numel())).reshape(shape) + 10.0 * self.rank + 2 * len(self.tensors) + 1
        self.tensors.append(made.t() if made.dim() == 2 and n_pieces == 1 else made)
        return self.tensors[-1]


def called(method: str) -> dict[str, Any]:
    """Make every call of *method* with every shape; return all tensors afterwards, or the class of the error."""
    group, found = dist.group.WORLD, {}
    is_whole = method in ("_reduce_scatter_base", "reduce_scatter_single") or "coalesced" in method
    for (label, chosen, ways, n_positional), (name, shape) in itertools.product(table(method), SHAPES.items()):
        if not shape and is_whole and "reduce_scatter" in method:
            continue  # gloo reads beyond the shape of a tensor without dimensions, and dies
        call = Call(method, chosen, ways, shape)
        keywords = {each.name: value for each, value in list(zip(chosen, call.arguments))[n_positional:]}
        try:
            getattr(group, method)(*call.arguments[:n_positional], **keywords).wait()
            is_said = method != "reduce" or call.rank == call.root  # of the others' tensors nothing is said
            found[f"{label}, {name}"] = [(tuple(each.shape), each.tolist()) for each in call.tensors if is_said]
        except Exception as exc:
            found[f"{label}, {name}"] = f"{type(exc).__name__}: {exc}"
    return found


def right(label, rank, gloos):
    """Return the tensors that *label* must give on *rank*: *gloos*, unless gloo of this torch is known to be wrong.

    Before torch 2.10 it gathers into transposed outputs as if they were contiguous, and its reduce-scatter into one
    tensor always computes the sum.
    """
    if TORCH >= (2, 10) or isinstance(gloos, str):
        return gloos
    tensors = [torch.tensor(values) for _, values in gloos]
    if "reduce_scatter" in label and "max, member 1" in label and len(tensors) == 2:
        n_rows = len(tensors[1]) // SIZE  # the inputs of the last rank are the largest
        tensors[0] = tensors[1][rank * n_rows:(rank + 1) * n_rows] + 10.0 * (SIZE - 1 - rank)
    elif "gather(" in label and "allgather" not in label and label.endswith(", transposed") and len(tensors) > SIZE:
        own_first = 10.0 * rank + 2 * SIZE + 1  # the root makes its outputs before its input
        tensors[:SIZE] = [tensors[-1] - own_first + (own_first if i == rank else 10.0 * i + 1) for i in range(SIZE)]
    return [(tuple(each.shape), each.tolist()) for each in tensors]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", [name for name in signatures() if name not in MESSAGES])
def test_all_forms_of_a_call_give_gloos_values(torch_ranks, method):
    n_values = 0
    for rank, (gloo, ours) in enumerate(torch_ranks(SIZE).compare(called, method, timeout_s=200.0)):
        assert gloo.keys() == ours.keys()
        # What gloo cannot do, as some coalesced calls, is no form that it takes.
        differing = {label: (gloo[label], ours[label]) for label in gloo
                     if not isinstance(gloo[label], str) and right(label, rank, gloo[label]) != ours[label]}
        assert not differing, "\n".join(f"{label}:\n  gloo {a}\n  ours {b}" for label, (a, b) in differing.items())
        assert not any(text.startswith(("TypeError", "AttributeError")) for text in gloo.values()
                       if isinstance(text, str)), "the table is wrong"
        n_values += sum(not isinstance(value, str) for value in gloo.values())
    print(f"{method}: {n_values // SIZE} forms")


def test_the_table_has_all_calls_of_torch_and_all_are_ours():
    from bpsfast.torch.backend import ProcessGroup

    found = signatures()
    assert {"allreduce", "broadcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter", "alltoall",
            "alltoall_base", "_allgather_base", "_reduce_scatter_base", "barrier", *MESSAGES} <= found.keys()
    theirs = [name for name in found if getattr(ProcessGroup, name) is getattr(dist.ProcessGroup, name)]
    assert not theirs, "torch has calls that bpsfast's group lacks"
    assert sum(len(table(name)) for name in found) >= 150


def several() -> dict[str, Any]:
    """Make calls with several tensors on each rank."""
    group, rank = dist.group.WORLD, dist.get_rank()

    def two() -> list[torch.Tensor]:
        return [torch.full((2,), rank + 1.0), torch.arange(8.0).reshape(4, 2)[::2, 0] * (rank + 1)]

    found: dict[str, Any] = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        x = two()
        group.allreduce(x, op).wait()
        found[str(op)] = [each.tolist() for each in x]
    for number in (0, 1):
        options, x = dist.BroadcastOptions(), two()
        options.rootRank, options.rootTensor = 1, number
        group.broadcast(x, options).wait()
        found[f"broadcast {number}"] = [each.tolist() for each in x]
    lists = [[torch.zeros(2) for _ in range(2 * SIZE)] for _ in range(2)]
    group.allgather(lists, two()).wait()
    found["allgather"] = [[each.tolist() for each in outputs] for outputs in lists]
    lists = [[torch.zeros(2), torch.zeros(2)] for _ in range(SIZE)]
    group.allgather_coalesced(lists, two()).wait()
    found["allgather_coalesced"] = [[each.tolist() for each in outputs] for outputs in lists]
    x = two()
    group.allreduce_coalesced(x).wait()
    found["allreduce_coalesced"] = [each.tolist() for each in x]
    return found


def test_calls_with_several_tensors_give_gloos_values(torch_ranks):
    for gloo, ours in torch_ranks(SIZE).compare(several):
        assert gloo == ours


def exchanged(method: str) -> dict[str, Any]:
    """Send from member 0 to member 1, one of them by each form of *method*."""
    group, rank, found = dist.group.WORLD, dist.get_rank(), {}
    for (label, chosen, _, n_positional), (name, shape) in itertools.product(table(method), SHAPES.items()):
        tensor = torch.full(shape, 7.0) if rank == 0 else torch.zeros(shape)
        peer = 0 if rank == 1 else 1
        values = [[tensor] if each.depth >= 0 else 5 if each.name in ("tag", "arg1") else peer for each in chosen]
        keywords = {each.name: value for each, value in list(zip(chosen, values))[n_positional:]}
        if rank == (0 if method == "send" else 1):
            getattr(group, method)(*values[:n_positional], **keywords).wait()
        elif rank == 1:
            group.recv([tensor], 0, 5).wait()
        elif rank == 0:
            group.send([tensor], 1, 5).wait()
        found[f"{label}, {name}"] = tensor.tolist()
    return found


@pytest.mark.parametrize("method", MESSAGES)
def test_all_forms_of_a_message_give_gloos_values(torch_ranks, method):
    (_, sent), (gloo, ours), _ = torch_ranks(SIZE).compare(exchanged, method)
    assert gloo == ours
    assert [ours[label] for label in ours] == [sent[label] for label in ours]


def roots() -> list[list[float]]:
    group, found = dist.group.WORLD, []
    for root in (1, True, torch.tensor(1)):
        tensor = torch.full((2,), 1.0 + dist.get_rank())
        group.broadcast(tensor, root).wait()
        found.append(tensor.tolist())
    return found


def test_whatever_is_a_number_is_a_root(torch_ranks):
    _, (gloo, ours), _ = torch_ranks(SIZE).compare(roots)
    assert gloo == ours == [[2.0, 2.0]] * 3


def gathered_in_one() -> list[Any]:
    """Gather into one tensor, as torch's own groups do from 2.14 on; also into a short one, and to other roots."""
    group, rank = dist.group.WORLD, dist.get_rank()
    options, output, x = dist.GatherOptions(), torch.zeros(2 * SIZE), torch.tensor([rank, rank + 0.5])
    options.rootRank = 1
    group.gather_single(output, x, options).wait()
    found: list[Any] = [output.tolist()]
    for call in (lambda: group.gather_into_tensor(output[1:], x), lambda: group.reconfigure(None)):
        try:
            call() if rank == 0 or len(found) == 2 else found.append("")
        except (ValueError, RuntimeError) as exc:
            found.append(f"{type(exc).__name__}: {exc}")
    return found


def test_inputs_are_gathered_into_one_tensor(torch_ranks):
    for rank, (output, short, others) in enumerate(torch_ranks(SIZE).grouped(gathered_in_one, timeout_s=40.0)):
        assert output == ([0.0, 0.5, 1.0, 1.5, 2.0, 2.5] if rank == 1 else [0.0] * (2 * SIZE))
        assert rank or "ConfigError: gather: the output" in short
        assert others.startswith("DistBackendError: UnsupportedError: bpsfast's process groups keep their members")


def stored() -> str:
    store = dist.group.WORLD.get_group_store()
    if dist.get_rank() == 0:
        store.set("said", "word")
    return store.get("said").decode()


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "get_group_store"), reason="this torch's groups have no store")
def test_a_group_has_its_store(torch_ranks):
    _, (gloo, ours), _ = torch_ranks(SIZE).compare(stored)
    assert gloo == ours == "word"


def refused() -> list[str]:
    group, mine, x = dist.group.WORLD, dist.get_rank(), torch.zeros(2)
    calls = {
        "recv self": lambda: group.recv([x], mine, 0),
        "irecv self": lambda: dist.irecv(x, mine),
        "recv self of torch": lambda: dist.recv(x, mine),
        "recv of nobody": lambda: group.recv([x], 99, 0),
        "recv of -1": lambda: group.recv([x], -1, 0),
        "send self": lambda: group.send([x], mine, 0),
        "broadcast of nobody": lambda: group.broadcast(x, 99),
        "reduce to -1": lambda: group.reduce(x, -1),
        "allreduce of nothing": lambda: group.allreduce([]),
        "all_gather of another dtype": lambda: group.allgather([[x.int(), x.int()]], [x]),
        "all_gather of some of another dtype": lambda: group.allgather([[x, x.int()]], [x]),
        "coalesced allreduce of nothing": lambda: group.allreduce_coalesced([]),
        "no tensor": lambda: group.allreduce("x"),
        "one too many": lambda: group.allreduce(x, dist.ReduceOp.SUM, None, 3),
        "unknown word": lambda: group.allreduce(x, operation=dist.ReduceOp.SUM),
        "list and root": lambda: group.broadcast([x], 1),
        "root twice": lambda: group.broadcast(x, 1, root=1),
        "a message that is no list": lambda: group.send(x, (mine + 1) % dist.get_world_size(), 0),
    }
    found = []
    for name, call in calls.items():
        try:
            call()
            found.append(f"{name}: is taken")
        except (ValueError, TypeError, RuntimeError) as exc:
            found.append(f"{name}: {type(exc).__name__}")
    total = torch.ones(2)
    group.allreduce(total).wait()  # the group is as it was
    return [*found, str(total.tolist())]


def test_what_has_no_form_is_refused_at_once(torch_ranks):
    for found in torch_ranks(2).grouped(refused, timeout_s=40.0):
        assert found == [*(f"{name}: ConfigError" for name in (
            "recv self", "irecv self", "recv self of torch", "recv of nobody", "recv of -1", "send self",
            "broadcast of nobody", "reduce to -1", "allreduce of nothing", "all_gather of another dtype",
            "all_gather of some of another dtype", "coalesced allreduce of nothing"
        )), *(f"{name}: TypeError" for name in (
            "no tensor", "one too many", "unknown word", "list and root", "root twice", "a message that is no list"
        )), "[2.0, 2.0]"]
