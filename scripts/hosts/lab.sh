# Two test hosts on one machine, for scripts that source this file: node1 (10.77.0.1) and node2 (10.77.0.2), each with its own
# network, host name, /dev/shm and $LAB/tmp, connected only by a veth pair. The file system is shared, as on a cluster.
#
# Everything runs in namespaces of one process tree: it ends with the script, however that exits, leaves nothing behind, and labs
# can run concurrently. If the caller is not root, it uses a user namespace.

LAB_USER=
[ "$(id -u)" = 0 ] || LAB_USER="--user --map-root-user"

# Prints why a lab is not possible, or nothing.
lab_missing() {
    local tool why
    for tool in unshare nsenter ip mount; do
        command -v "$tool" > /dev/null || { echo "no $tool (Debian: util-linux, iproute2, mount)"; return; }
    done
    # shellcheck disable=SC2086
    why=$(unshare $LAB_USER --mount --net --uts --ipc --pid --fork --mount-proc true 2>&1) || { echo "no permission for namespaces: $why"; return; }
    # shellcheck disable=SC2086
    why=$(unshare $LAB_USER --net ip link add eth0 type veth peer name eth1 2>&1) || echo "no veth pair: $why"
}

# Runs "$@" as the first process of a lab. Needs $LAB, an empty directory that the caller removes.
lab_run() {
    # shellcheck disable=SC2086
    unshare $LAB_USER --mount --net --uts --ipc --pid --fork --kill-child --mount-proc "$@"
}

# Inside the lab: creates the hosts.
lab_start() {
    mount -t tmpfs lab "$LAB"
    mkdir "$LAB/hosts" "$LAB/tmp"
    printf '127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n' > "$LAB/etc_hosts"
    local n
    for n in 1 2; do
        unshare --mount --net --uts --ipc sleep infinity &
        echo $! > "$LAB/hosts/node$n"
    done
    for n in 1 2; do
        # The child is a host once its namespaces differ from ours.
        until [ "$(readlink "/proc/$(< "$LAB/hosts/node$n")/ns/ipc")" != "$(readlink /proc/self/ns/ipc)" ]; do sleep 0.01; done
        on "node$n" mount -t tmpfs shm /dev/shm
        on "node$n" mount -t tmpfs tmp "$LAB/tmp"
        on "node$n" mount --bind "$LAB/etc_hosts" /etc/hosts
        on "node$n" hostname "node$n"
        on "node$n" ip link set lo up
    done
    on node1 ip link add eth0 type veth peer name eth0 netns "$(< "$LAB/hosts/node2")"
    for n in 1 2; do
        on "node$n" ip address add "10.77.0.$n/24" dev eth0
        on "node$n" ip link set eth0 up
    done
}

# on HOST COMMAND...: runs a command on a host, in the caller's working directory.
on() {
    local pid
    pid=$(< "$LAB/hosts/$1")
    shift
    nsenter --target "$pid" --mount --net --uts --ipc env --chdir "$PWD" "$@"
}
