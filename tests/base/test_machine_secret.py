"""Tests the secret that all processes of one user on one machine share, and no others."""
from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from bpsfast.base.job_key import machine_secret
from bpsfast.orchestration.errors import ConfigError

_READER = """
import sys
from bpsfast.base.job_key import machine_secret
sys.stdin.readline()
print(machine_secret([sys.argv[1]]).hex())
"""


def folder(place):
    return place / f"bpsfast-{os.geteuid()}"


def test_processes_that_begin_together_get_the_same(tmp_path):
    readers = [subprocess.Popen([sys.executable, "-c", _READER, str(tmp_path)], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, text=True) for _ in range(6)]
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("\n")
        reader.stdin.flush()
    found = {reader.communicate(timeout=60)[0] for reader in readers}
    assert len(found) == 1 and len(found.pop().strip()) == 64
    assert os.listdir(folder(tmp_path)) == ["machine.key"], "no half of a file is left"


def test_only_this_user_can_read_it(tmp_path):
    secret = machine_secret([tmp_path])
    assert secret == machine_secret([tmp_path]) and len(secret) == 32
    assert stat.S_IMODE(folder(tmp_path).stat().st_mode) == 0o700
    assert stat.S_IMODE((folder(tmp_path) / "machine.key").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_use_is_not_used(tmp_path, mode):
    folder(tmp_path).mkdir()
    folder(tmp_path).chmod(mode)
    with pytest.raises(ConfigError, match=rf"other users may use it \(mode {mode:04o}\).*BPSFAST_JOB_KEY"):
        machine_secret([tmp_path])
    assert not os.listdir(folder(tmp_path))


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"Not a directory|Too many levels"):
        machine_secret([tmp_path])
    folder(tmp_path).unlink()
    folder(tmp_path).mkdir(mode=0o700)
    (tmp_path / "elsewhere" / "key").write_bytes(bytes(32))
    (folder(tmp_path) / "machine.key").symlink_to(tmp_path / "elsewhere" / "key")
    with pytest.raises(ConfigError, match="symbolic links"):
        machine_secret([tmp_path])


def test_half_a_file_is_none(tmp_path):
    folder(tmp_path).mkdir(mode=0o700)
    (folder(tmp_path) / "machine.key").touch(mode=0o600)
    with pytest.raises(ConfigError, match=r"machine\.key has not 32 bytes: remove it"):
        machine_secret([tmp_path])


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folder needs root to be made")
def test_another_users_folder_is_passed_over_for_the_next_place(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    folder(first).mkdir(mode=0o700)
    os.chown(folder(first), 12345, -1)
    assert machine_secret([first, second]) == machine_secret([second])
    with pytest.raises(ConfigError, match="it belongs to user 12345"):
        machine_secret([first])
