"""Tests roles of pods with one rank each, and the examples for them; whole jobs are in test_environments."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bpsfast.base.settings import load_with_origins
from bpsfast.launch.environments import POD_PORT as PORT
from bpsfast.launch.process_role import ProcessRole, scheduler_port
from bpsfast.launch.roles import detect
from bpsfast.orchestration.errors import ConfigError

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
PYTORCHJOB = POD | {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "digits-master-0", "MASTER_PORT": "23456",
                    "PET_NPROC_PER_NODE": "auto", "PET_NNODES": "4", "HOSTNAME": "digits-worker-1"}
INDEXED = POD | {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "HOSTNAME": "digits-2.digits.ns.svc.cluster.local"}


def place(environ: dict[str, str], key: str | None = "ab" * 32) -> ProcessRole:
    return detect(load_with_origins({"job_key": key}, environ)[0], environ)


def test_a_pod_of_pytorchjob_is_a_rank():
    found = place(PYTORCHJOB)
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == ("kubernetes", 2, 4, 0, 1)
    assert (found.node_index, found.num_nodes) == (2, 4)
    assert found.scheduler == ("digits-master-0", scheduler_port(23456))
    assert found.starts_node and not found.starts_scheduler and not found.is_joined_once
    assert place(PYTORCHJOB | {"RANK": "0"}).starts_scheduler


def test_the_master_that_is_told_localhost_has_the_same_job():
    """So older operators have it."""
    master = place(PYTORCHJOB | {"RANK": "0", "MASTER_ADDR": "localhost", "HOSTNAME": "digits-master-0"})
    assert master.scheduler == place(PYTORCHJOB).scheduler


@pytest.mark.parametrize("pod", [PYTORCHJOB, INDEXED], ids=["pytorchjob", "indexed"])
def test_several_pods_need_a_key_and_one_does_not(pod):
    with pytest.raises(ConfigError, match=r"no job key.*BPSFAST_JOB_KEY.*openssl rand -hex 32"):
        place(pod, None)
    alone = pod | {"WORLD_SIZE": "1", "HOSTNAME": "digits-0"} | (
        {"RANK": "0"} if "RANK" in pod else {"JOB_COMPLETION_INDEX": "0"})
    assert place(alone, None).scheduler == ("127.0.0.1", 0)


def test_a_pod_of_an_indexed_job_is_a_rank():
    found = place(INDEXED)
    assert (found.rank, found.size, found.local_size, found.node_index, found.num_nodes) == (2, 4, 1, 2, 4)
    assert found.scheduler == ("digits-0.digits.ns.svc.cluster.local", PORT)
    assert place(INDEXED | {"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "digits-0.digits.ns.svc.cluster.local"}
                 ).scheduler == found.scheduler


def test_pods_with_the_hosts_network_have_nodes_of_their_own():
    names = {place(PYTORCHJOB | {"RANK": str(rank), "MASTER_ADDR": master}).node_id
             for rank in range(3) for master in ("a-master-0", "b-master-0")}
    assert len(names) == 6


@pytest.mark.parametrize(("changes", "scheduler"), [
    ({"MASTER_ADDR": "pod0"}, ("pod0", PORT)),
    ({"MASTER_ADDR": "pod0", "MASTER_PORT": "5"}, ("pod0", scheduler_port(5))),
    ({"BPSFAST_SCHEDULER": "pod0:9"}, ("pod0", 9)),
    ({"WORLD_SIZE": "", "BPSFAST_SIZE": "4"}, ("digits-0.digits.ns.svc.cluster.local", PORT)),
    ({"WORLD_SIZE": "1", "JOB_COMPLETION_INDEX": "0", "HOSTNAME": "x"}, ("127.0.0.1", 0)),
])
def test_what_the_user_says_is_obeyed(changes, scheduler):
    assert place(INDEXED | changes).scheduler == scheduler


@pytest.mark.parametrize(("environ", "texts"), [
    (INDEXED | {"WORLD_SIZE": ""}, ["JOB_COMPLETION_INDEX", "WORLD_SIZE (the number of pods) not"]),
    (INDEXED | {"WORLD_SIZE": "2"}, ["JOB_COMPLETION_INDEX = 2", "WORLD_SIZE = 2"]),
    (INDEXED | {"RANK": "1", "MASTER_ADDR": "a"}, ["RANK = 1 and JOB_COMPLETION_INDEX = 2"]),
    (INDEXED | {"HOSTNAME": "digits-2"}, ["'digits-2'", "headless Service", "MASTER_ADDR"]),
    (INDEXED | {"HOSTNAME": "other.digits.ns"}, ["'other'", "headless Service"]),
    (PYTORCHJOB | {"MASTER_ADDR": ""}, ["RANK", "MASTER_ADDR not"]),
    (PYTORCHJOB | {"WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "2"}, ["PET_NPROC_PER_NODE = 2", "torchrun"]),
    (PYTORCHJOB | {"LOCAL_RANK": "1"}, ["RANK, LOCAL_RANK set, but LOCAL_WORLD_SIZE", "KUBERNETES_SERVICE_HOST"]),
    (PYTORCHJOB | {"KUBERNETES_SERVICE_HOST": ""}, ["RANK set, but LOCAL_RANK"]),
])
def test_what_is_left_out_or_contradicts_itself_is_named(environ, texts):
    with pytest.raises(ConfigError) as caught:
        place(environ)
    assert all(text in str(caught.value) for text in texts), str(caught.value)


# -- the examples ----------------------------------------------------------------------------------------------------


def documents(name: str) -> dict[str, list[dict[str, Any]]]:
    """Return the objects of an example by kind."""
    yaml = pytest.importorskip("yaml")
    found: dict[str, list[dict[str, Any]]] = {}
    for each in yaml.safe_load_all((_EXAMPLES / name).read_text()):
        found.setdefault(each["kind"], []).append(each)
    return found


def environment(container: dict[str, Any], secrets: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return what the container's own `env` gives; secrets by name."""
    found = {}
    for entry in container.get("env", []):
        if "value" in entry:
            assert isinstance(entry["value"], str), "Kubernetes takes text only"
            found[entry["name"]] = entry["value"]
        else:
            reference = entry["valueFrom"]["secretKeyRef"]
            found[entry["name"]] = secrets[reference["name"]][reference["key"]]
    return found


def test_the_indexed_job_of_the_examples():
    found = documents("job.yaml")
    secrets = {each["metadata"]["name"]: {"key": "ab" * 32} for each in found["Secret"]}
    (service,) = found["Service"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    ranks, helpers = found["Job"]
    for job in (ranks, helpers):
        spec = job["spec"]["template"]["spec"]
        assert spec["subdomain"] == service["metadata"]["name"]
        labels = job["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert ranks["spec"]["completionMode"] == "Indexed"
    n_ranks, n_helpers = ranks["spec"]["completions"], helpers["spec"]["completions"]
    name, domain = ranks["metadata"]["name"], f"{service['metadata']['name']}.default.svc.cluster.local"
    (container,) = ranks["spec"]["template"]["spec"]["containers"]
    places = [place(POD | environment(container, secrets) | {
        "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{name}-{index}.{domain}"}) for index in range(n_ranks)]
    assert [each.rank for each in places] == list(range(n_ranks)) and {each.size for each in places} == {n_ranks}
    assert {each.num_helpers for each in places} == {n_helpers} == {2}
    (container,) = helpers["spec"]["template"]["spec"]["containers"]
    assert container["command"][:3] == ["bpsfast", "node", "--helper"]
    variables = environment(container, secrets)
    settings = load_with_origins({}, variables)[0]
    host, port = places[0].scheduler
    short = f"{name}-0.{service['metadata']['name']}"
    assert host.startswith(f"{short}.") or host == short
    for each in (container, ranks["spec"]["template"]["spec"]["containers"][0]):
        probes = {name: probe["httpGet"] for name, probe in each.items() if name.endswith("Probe")}
        assert {probe["path"] for probe in probes.values()} <= {"/healthz", "/readyz"}
        assert all(probe["port"] == each["ports"][0]["name"] for probe in probes.values())
        assert ("livenessProbe" in probes) == (each is container), "a node of ranks runs from init to shutdown only"
        loaded = load_with_origins({}, environment(each, secrets))[0]
        assert (loaded.metrics_port, loaded.metrics_host) == (each["ports"][0]["containerPort"], "0.0.0.0")
    assert settings.scheduler == f"{short}:{port}" and bytes.fromhex(settings.job_key) == places[0].job_key


def test_the_pytorchjob_of_the_examples():
    (job,) = documents("pytorchjob.yaml")["PyTorchJob"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    n_ranks = sum(each["replicas"] for each in replicas.values())
    assert replicas["Master"]["replicas"] == 1
    places = []
    for kind, first in (("Master", 0), ("Worker", 1)):
        (container,) = replicas[kind]["template"]["spec"]["containers"]
        assert container["name"] == "pytorch", "the operator looks for that name"
        own = environment(container, {job["metadata"]["name"]: {"key": "ab" * 32}})
        operators = {"WORLD_SIZE": str(n_ranks), "MASTER_ADDR": f"{job['metadata']['name']}-master-0",
                     "MASTER_PORT": "23456", "PET_NPROC_PER_NODE": "auto", "PET_NNODES": str(n_ranks)}
        places += [place(POD | own | operators | {"RANK": str(first + index)})
            for index in range(replicas[kind]["replicas"])]
    assert [each.rank for each in places] == list(range(n_ranks))
    assert {each.job_key for each in places} == {bytes.fromhex("ab" * 32)}
