# Runs in the guest, on the layered file system: sets up devices and hosts, then starts what it is told to.
#
# Lines on the control port, host to guest: "run N", "stop N"; guest to host: "ready", "done N STATUS".
# Job N is the script share/N/command; its output lies in share/N/stdout and share/N/stderr, complete before "done".
# When the port is closed, the process that wanted this guest is gone: the script ends, and the guest with it.

share=/run/guest/share
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

set_up() {
  ulimit -l unlimited; ulimit -n 1048576; ulimit -c 0
  hostname guest
  ip link set lo up
  sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0 net.ipv4.conf.all.accept_local=1 \
    net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2
  ip link add br0 type bridge
  ip addr add 10.9.1.254/24 dev br0
  ip link set br0 mtu 4200 up
  local i
  for ((i = 0; i < N_HOSTS; i++)); do
    # rxe$i on roce$i, in the root namespace: Linux 6.1's rxe sends and receives only there. A device bound to a
    # link of another namespace comes up ACTIVE and moves nothing. Ethernet MTU 4200 makes the RoCE MTU 4096.
    ip link add "roce$i" type veth peer name "p$i"
    ip link set "p$i" mtu 4200 master br0 up
    ip addr add "10.9.0.$((i + 1))/24" dev "roce$i"
    ip link set "roce$i" mtu 4200 up
    rdma link add "rxe$i" type rxe netdev "roce$i"
    # Host i: the namespace h$i with its own lo and eth0 (and, see `on`, host name and /dev/shm); sees all devices.
    ip netns add "h$i"
    ip link add "q$i" type veth peer name eth0 netns "h$i"
    ip link set "q$i" mtu 4200 master br0 up
    ip -n "h$i" addr add "10.9.1.$((i + 1))/24" dev eth0
    ip -n "h$i" link set eth0 mtu 4200 up
    ip -n "h$i" link set lo up
    mkdir -p "/run/guest/shm$i"
    mount -t tmpfs -o size=75%,mode=1777 "shm$i" "/run/guest/shm$i"
  done
  cat >/usr/local/bin/on <<'ON'
#!/bin/bash
# on I COMMAND...: run COMMAND on host I
export HOST=$1; shift
exec ip netns exec "h$HOST" unshare --mount --uts sh -c \
  'hostname "h$HOST"; mount --bind "/run/guest/shm$HOST" /dev/shm; exec "$@"' on "$@"
ON
  chmod +x /usr/local/bin/on
}

# A process namespace for each job, so that nothing a job leaves running outlives it or holds its output open.
# The output goes through fifos, not straight to the files, so that /dev/stdout can be opened again.
job() {
  local at=$share/$1 fifo=/run/guest/$1 command status
  mkfifo "$fifo.1" "$fifo.2"
  cat "$fifo.1" >"$at/stdout" &
  cat "$fifo.2" >"$at/stderr" &
  setsid unshare --pid --fork --kill-child --mount-proc bash "$at/command" \
    </dev/null >"$fifo.1" 2>"$fifo.2" {control}>&- &
  command=$!
  echo "$command" >"$fifo.pid"
  wait "$command"
  status=$?
  wait
  rm "$fifo".*
  echo "done $1 $status" >&"$control"
}

for port in /sys/class/virtio-ports/*; do
  [ "$(<"$port/name")" = control ] && exec {control}<>"/dev/${port##*/}"
done
set_up >"$share/setup.log" 2>&1
echo ready >&"$control"
while read -r verb n <&"$control"; do
  case $verb in
    run) job "$n" & ;;
    stop) kill -KILL "$(<"/run/guest/$n.pid")" ;;
  esac
done
