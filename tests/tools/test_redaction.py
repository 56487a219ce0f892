"""Reports hold no secret, whatever it is and wherever it stands; people and hosts become stand-ins, always the same."""
from __future__ import annotations

import ipaddress
import json
import re
import string

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.tools import bug_report, redaction
from bpsfast.tools.bug_report import Entry
from bpsfast.tools.redaction import RedactionRules, Redactor

_SECRET = st.one_of(
    st.text(min_size=4, max_size=24),
    st.text(string.ascii_letters + string.digits + "\"'\\%+/= ", min_size=4, max_size=24),
    st.sampled_from(["(hidden)", "hidden", "host-1", "user-1", "10.0.1.1", "1234", "bpsfast", "BPSFAST_JOB_KEY"]))
_NAME = st.sampled_from(["WANDB_API_KEY", "HF_TOKEN", "BPSFAST_JOB_KEY", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY",
                         "SLURM_JOB_TOKEN", "NCCL_AUTH", "MY_CREDENTIALS"])
_AROUND = st.sampled_from(["{}", "login {} now", "{}{}", "key={}", '{{"token": "{}"}}', "http://user:{}@host/",
                           "(hidden{})", "/home/ana/{}/x", "--password {}", "a{}b{}c", "10.0.0.1{}"])


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(_NAME, _SECRET, min_size=1), st.lists(st.tuples(_AROUND, st.integers(0, 7))))
def test_no_secret_of_the_environment_is_in_any_file(secrets: dict[str, str], said: list[tuple[str, int]]) -> None:
    environ = {**secrets, "BPSFAST_NODE_ID": "n7", "PATH": f"/opt/{next(iter(secrets.values()))}/bin"}
    values = set(redaction.found(environ).secrets)
    ordered = sorted(secrets.values())
    text = "\n".join(around.replace("{}", ordered[which % len(ordered)]) for around, which in said)
    files, left_out = bug_report.gather(
        [Entry("log", f"the log {ordered[0]}", lambda: text), Entry("environment", "variables",
                                                                   lambda: bug_report.variables(environ)),
         Entry("data", "as JSON", lambda: {"found": [text, {"path": environ["PATH"]}], "number": 1234, "none": None})],
        Redactor(redaction.found(environ)))
    assert len(files) + len(left_out) == 3
    for value in values:
        written = json.dumps(value)[1:-1].encode("utf-8", "replace"), value.encode("utf-8", "replace")
        for file in files:
            assert not any(form in file.content or form in file.about.encode("utf-8", "replace") for form in written), (
                value, file)


@pytest.mark.parametrize("text", [
    "Authorization: Bearer abcdefgh12345678", "--api-key sk-abcdefghijklmnopqrst", "password='correct horse'",
    "https://ana:letmein99@git.example.org/x", "token: ghp_abcdefghijklmnopqrstuvwxyz", "BPSFAST_JOB_KEY=" + "ab" * 16,
    '{"secret_key": "do not tell"}', "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl"])
def test_what_looks_like_a_secret_is_hidden(text: str) -> None:
    done = Redactor(RedactionRules()).text(text)
    for secret in ("abcdefgh12345678", "abcdefghijklmnopqrst", "correct horse", "letmein99", "ab" * 16, "do not tell",
                   "MIIE", "eyJzdWIi"):
        assert secret not in done
    assert "(hidden)" in done


@pytest.mark.parametrize("text", [
    "tokens: 4096", "partition_bytes=4096", "job_key (set)", "std::vector<int>", "12:34:56 pid 12", "libx.so.1.14.44.0",
    "0000:3b:00.0", "vm.max_map_count", "torch 2.13.0+cpu", "localhost 127.0.0.1 ::1 0.0.0.0 255.255.255.0",
    "/proc/sys/vm/overcommit_memory", "node 1 (which is slow) waits"])
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor(RedactionRules(hosts=("vm",))).text(text) == text


def test_one_stand_in_for_each_host_user_and_address_everywhere() -> None:
    scrub = Redactor(redaction.found({"USER": "anatol", "HOME": "/home/anatol",
                                      "SLURM_JOB_NODELIST": "gpu[08-10],login"}))
    first = scrub.text("anatol on gpu08: cd /home/anatol/x; ssh gpu08.cluster.internal; node 3 (far) 192.0.2.7 "
                       "/home/bo/y")
    again = scrub.text("GPU08 far 192.0.2.7/24 192.0.2.9 198.51.100.1 anatol@example.org gpu09 login")
    host, user = re.findall(r"host-\d+", first)[0], re.findall(r"user-\d+", first)[0]
    assert first == (f"{user} on {host}: cd ~/x; ssh {host}; node 3 (host-{_last(first)}) 10.0.1.1 "
                     f"/home/user-{_user(first)}/y")
    assert again.startswith(f"{host} host-{_last(first)} 10.0.1.1/24 10.0.1.2 10.0.2.1 someone@example.com host-")
    assert not re.search(r"anatol|gpu|login|far|192|198|bo/", first + again)


def _last(text: str) -> str:
    return re.findall(r"host-(\d+)\)", text)[0]


def _user(text: str) -> str:
    return re.findall(r"user-(\d+)/y", text)[0]


def test_addresses_of_one_network_stay_in_one_network_in_every_notation() -> None:
    scrub = Redactor(RedactionRules())
    gid = "0000:0000:0000:0000:0000:ffff:c000:0207"
    assert scrub.text("192.0.2.7") == "10.0.1.1"
    assert ipaddress.IPv6Address(scrub.text(gid)).ipv4_mapped == ipaddress.IPv4Address("10.0.1.1")
    assert len(scrub.text(gid)) == len(gid)
    one, other, far = (scrub.text(each).split("::") for each in ("2001:db8:1::1", "2001:db8:1::2", "2001:db8:2::1"))
    assert one[0] == other[0] != far[0] and one[1] != other[1]
    assert scrub.text("fe80::aa:bb 02:fc:00:00:00:99 248a:0703:00aa:bbcc") == (
        "fe80::1 02:00:00:00:00:01 0200:0000:0000:0001")
    assert scrub.text("nvidia-cublas==12.4.5.8", addresses=False) == "nvidia-cublas==12.4.5.8"


@pytest.mark.timeout(60)
def test_no_text_takes_for_ever() -> None:
    scrub = Redactor(RedactionRules(secrets=("topsecret",), hosts=("gpu08",), users=("anatol",)))
    for word in ("a-", "a.", "aa:", "eyJ", "a@", "1.", "--a ", "x=", "Zz9/", "a_b"):  # quadratic ones took minutes each
        text = word * (50_000 // len(word))
        assert len(scrub.text(text)) >= len(text) // 2
