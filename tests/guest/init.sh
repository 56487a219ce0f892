#!/bin/busybox sh
# First program of the guest, in the initramfs: load modules, mount the other machine's file system below a layer
# in RAM, hand over to agent.sh there. When that ends, for whatever reason, the guest is off.
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*.ko; do insmod "$module" || echo "insmod $module failed"; done

mkdir -p /lower /upper /new
mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro root /lower
mount -t tmpfs -o size=75% upper /upper
mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /new

mount -t proc proc /new/proc
mount -t sysfs sys /new/sys
mount -t devtmpfs dev /new/dev
mkdir -p /new/dev/shm /new/dev/pts
mount -t devpts devpts /new/dev/pts
ln -s pts/ptmx /new/dev/ptmx 2>/dev/null
ln -s /proc/self/fd /new/dev/fd
ln -s fd/0 /new/dev/stdin
ln -s fd/1 /new/dev/stdout
ln -s fd/2 /new/dev/stderr
mount -t tmpfs -o size=75%,mode=1777 shm /new/dev/shm
mount -t tmpfs run /new/run
mkdir -p /new/run/lock /new/run/guest/share
mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576 share /new/run/guest/share
chroot /new /bin/bash /run/guest/share/agent.sh
echo o >/proc/sysrq-trigger
sleep 60
