"""Which implementation of verbs, without any device: choosing one, what is missing in words, that both are alike."""
from __future__ import annotations

import ast
import errno
import importlib.machinery
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bpsfast.base import settings
from bpsfast.hardware.verbs import PROVIDERS, provider, pyverbs_provider
from bpsfast.hardware.verbs.completions import CompletionError, raise_failure
from bpsfast.hardware.verbs.pyverbs_provider import verbs_object
from bpsfast.hardware.verbs.pyverbs_provider.completion_queue import RECV, PostedWork, QueueCapacity, Work, WorkQueue
from bpsfast.orchestration.errors import ConfigError
from bpsfast.pyx import verbs as native

STUB = Path(__file__).resolve().parents[2] / "pyx" / "verbs.pyi"


# -- choosing -----------------------------------------------------------------------------------------------

def test_the_setting_names_an_implementation():
    assert settings.load({}, {}).verbs == "native" == PROVIDERS[0]
    assert settings.load({}, {"BPSFAST_VERBS": "pyverbs"}).verbs == "pyverbs"
    with pytest.raises(ConfigError, match="BPSFAST_VERBS"):
        settings.load({}, {"BPSFAST_VERBS": "ibverbs"})


def test_an_unknown_implementation_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match="'ibverbs': expected one of native, pyverbs"):
        provider("ibverbs")


def test_the_native_one_is_the_compiled_module():
    try:
        assert provider("native") is native
    except native.VerbsMissing as exc:
        assert "libibverbs1" in str(exc)


# -- what is missing ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, said", [("libno-such-verbs.so.1", "install libibverbs and its providers"),
                                        ("libc.so.6", "has no ibv_")])
def test_no_libibverbs(name, said):
    code = f"from bpsfast.pyx import verbs\ntry: verbs.load({name!r})\nexcept verbs.VerbsMissing as exc: print(exc)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said in done.stdout and name in done.stdout


@pytest.fixture
def no_pyverbs(monkeypatch, tmp_path):
    """Without any pyverbs; returns the folder where Debian's would be."""
    native_load = native.load
    try:
        native_load()
    except native.VerbsMissing as exc:
        pytest.skip(str(exc))
    for name in [name for name in sys.modules if name.split(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(verbs_object.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(verbs_object, "SYSTEM_FOLDER", tmp_path)
    folder = tmp_path / "pyverbs"
    folder.mkdir()
    return folder


def test_no_pyverbs(no_pyverbs):
    with pytest.raises(native.VerbsMissing, match=r"pip install bpsfast\[pyverbs\].*python3-pyverbs") as caught:
        provider("pyverbs")
    assert sys.executable in str(caught.value) and "pyverbs" not in sys.modules


def test_pyverbs_for_another_python(no_pyverbs):
    (no_pyverbs / "device.cpython-27-x86_64-linux-gnu.so").write_bytes(b"")
    with pytest.raises(native.VerbsMissing, match=r"another version \(device.cpython-27.*run with /usr/bin/python3"):
        provider("pyverbs")


def test_pyverbs_that_cannot_be_loaded(no_pyverbs):
    (no_pyverbs / "__init__.py").write_text("")
    (no_pyverbs / f"device{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"no ELF")
    with pytest.raises(native.VerbsMissing, match="pyverbs cannot be imported"):
        provider("pyverbs")
    assert "pyverbs" not in sys.modules


# -- alike --------------------------------------------------------------------------------------------------

def members(name: str | None = None) -> dict[str, ast.stmt]:
    """Return what the stub's module, or its class *name*, has."""
    body = ast.parse(STUB.read_text()).body
    if name is not None:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name).body
    found = {node.target.id: node for node in body if isinstance(node, ast.AnnAssign)}
    return found | {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def parameters(function: Callable | ast.FunctionDef) -> list[tuple[str, bool, bool]]:
    """Return name, keyword only, has a default, for each parameter."""
    if not isinstance(function, ast.FunctionDef):
        found = inspect.signature(function).parameters.values()
        return [(p.name, p.kind is p.KEYWORD_ONLY, p.default is not p.empty) for p in found
                if p.name not in ("self", "cls") and p.kind is not p.VAR_POSITIONAL]
    plain = function.args.args
    n_required = len(plain) - len(function.args.defaults)
    told = [(a.arg, False, i >= n_required) for i, a in enumerate(plain) if a.arg not in ("self", "cls")]
    return told + [(a.arg, True, value is not None)
                   for a, value in zip(function.args.kwonlyargs, function.args.kw_defaults)]


@pytest.mark.parametrize("name", ["Device", "ProtectionDomain", "MemoryRegion", "CompletionQueue", "QueuePair"])
def test_both_have_the_same_classes(name):
    ours = getattr(pyverbs_provider, name)
    source = inspect.getsource(sys.modules[ours.__module__])
    for member, node in members(name).items():
        if isinstance(node, ast.FunctionDef):
            assert parameters(node) == parameters(getattr(ours, member)), f"{name}.{member}"
        else:
            assert hasattr(ours, member) or f"self.{member}" in source, f"{name}.{member}"


def test_both_have_the_same_functions():
    for member, node in members().items():
        if isinstance(node, ast.FunctionDef) and member != "load":
            assert parameters(node) == parameters(getattr(pyverbs_provider, member)), member
    assert pyverbs_provider.VerbsMissing is native.VerbsMissing


# -- the account of what is posted --------------------------------------------------------------------------

def account(depth: int = 10, n: int = 4) -> PostedWork:
    places = QueueCapacity(depth)
    return PostedWork(WorkQueue(n, places), WorkQueue(n, places))


def post(queue: WorkQueue, wr_id: int, opcode: int = 0) -> int:
    return queue.reserve(Work(opcode, wr_id, 0, 100 + wr_id, 0))


def wc(wr_id: int, status: int = 0, opcode: int = 1) -> SimpleNamespace:
    return SimpleNamespace(wr_id=wr_id, status=status, opcode=opcode, vendor_err=7, byte_len=3)


def test_a_completion_retires_all_sends_before_it():
    a = account()
    assert [post(a.send, i) for i in range(5)] == [0, 0, 0, 0, errno.EXFULL]
    assert a.complete(wc(2)) == (1, 102)
    assert (len(a.send.items), a.send.places.pending) == (1, 1) and a.failed is None


def test_places_are_shared_by_both_directions():
    a = account(depth=3)
    assert [post(a.send, 0), post(a.recv, 1, RECV), post(a.send, 2)] == [0, 0, 0]
    assert post(a.recv, 3, RECV) == post(a.send, 3) == errno.EOVERFLOW
    a.send.cancel()
    assert post(a.recv, 3, RECV) == 0


def test_the_cause_of_a_failure_is_kept_not_its_flushes():
    a = account()
    for i in range(3):
        post(a.send, i)
        post(a.recv, 10 + i, RECV)
    assert a.complete(wc(10, status=5, opcode=77)) == (RECV, 0)
    assert a.complete(wc(0, status=12, opcode=77)) == (1, 0)
    assert a.complete(wc(1, status=5)) == (1, 0)
    assert a.failed == (12, 7, Work(0, 0, 0, 100, 0))
    assert a.forget() and not a.forget() and a.send.places.pending == 0


def test_a_bad_completion_of_one_number_in_both_queues_is_the_older_ones():
    a = account()
    post(a.send, 1), post(a.send, 5), post(a.recv, 5, RECV)
    assert a.complete(wc(5, status=5, opcode=0)) == (RECV, 0)
    assert a.complete(wc(5, status=5, opcode=0)) == (1, 0)


# -- a bad completion as an exception -----------------------------------------------------------------------

FAILURE = {"status": 12, "vendor_error": 129, "opcode": 1, "wr_id": 9, "address": 4096, "nbytes": 65536, "lkey": 1,
           "remote_address": 0x7f00, "rkey": 0xabc, "peer": "queue pair 17 at ::ffff:10.0.0.2", "device": "mlx5_0"}


def test_a_bad_completion_names_operation_slot_peer_status_and_cause():
    error = CompletionError.of(FAILURE, slot=3)
    for said in ("WRITE with immediate of 65536 bytes (slot 3, wr_id 9)", "from mlx5_0 to queue pair 17 at",
                 "address 0x7f00, rkey 0xabc", "IBV_WC_RETRY_EXC_ERR (12, vendor error 129", "did not acknowledge",
                 "usually a path", "bpsfast doctor --peer"):
        assert said in str(error), said
    assert (error.status, error.slot, error.wr_id, error.peer) == (12, 3, 9, FAILURE["peer"])
    assert isinstance(error, ConnectionError)


def test_a_receive_has_no_remote_address_and_a_queue_pair_no_peer_before_it_is_connected():
    text = str(CompletionError.of(FAILURE | {"opcode": 128, "status": 5, "peer": "", "vendor_error": 0}))
    assert text.startswith("receive of 65536 bytes (wr_id 9) from mlx5_0 to no peer yet failed with IBV_WC_WR_FLUSH")


def test_nothing_is_raised_while_all_is_well():
    raise_failure(SimpleNamespace(failure=None))
    with pytest.raises(CompletionError, match="slot 4"):
        raise_failure(SimpleNamespace(failure=FAILURE), slot=4)
