"""A guest with real RDMA devices, for machines that have none: Debian's kernel in QEMU, with Soft-RoCE.

    python -m tests.guest run -- ibv_devinfo
    python -m pytest tests/guest/suite_environment.py -k devices
    python -m tests.guest pytest tests/guest/suite_environment.py -k devices   # and see what pytest prints there

The guest sees this machine's file system read-only, with a layer in RAM on top, so commands, interpreters and this
working tree are there under their own paths. It has two devices, `rxe0` and `rxe1`, and two hosts: namespaces with a
network, a host name and a /dev/shm of their own (`on 0 COMMAND`, `on 1 COMMAND`). Nothing comes back but output,
exit status and what a command writes below `$OUT`.

The processor is emulated (TCG), even where KVM could be used: the same everywhere, privileges are not needed, and
KVM inside a virtual machine may hang instead of failing. Behaviour is the kernel's; times are the emulator's and
compare only with times of the same guest. Programs run 4 to 24 times slower than on this machine.

Plain `pytest` collects the files ``suite_*.py`` and has one guest run them, after all other tests; where no guest can
be had they are skipped with one line that says what is missing, and ``BPSTEST_GUEST=off`` skips them at once.

`kernel` fetches Debian's kernel and packs what boots it (`initramfs`), `machine` is a running guest, `suites` runs test
suites in it (`sender` is its end in there, `conftest` the hooks), `hosts` is what those suites know about the guest,
`agent.sh` and `init.sh` run inside.
"""
