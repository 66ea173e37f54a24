# A Slurm cluster on the two test hosts, for scripts that source this file: munged and slurmctld on node1, slurmd on both. All its
# files are in $LAB; the configuration of an installed Slurm is not read.

slurm_missing() {
    local tool
    for tool in munged slurmctld slurmd srun sinfo; do
        command -v "$tool" > /dev/null || { echo "no $tool (Debian: slurm-wlm munge)"; return; }
    done
    # slurmd has to switch to the users of jobs, which a user namespace with one user does not allow.
    [ "$(awk '{ print $3; exit }' /proc/self/uid_map)" != 1 ] || echo "Slurm's daemons need root"
}

slurm_start() {
    local dir=$LAB/slurm n
    mkdir -p -m 755 "$dir"/{munge,state,node1,node2}
    dd if=/dev/urandom of="$dir/munge/key" bs=128 count=1 status=none
    chmod 600 "$dir/munge/key"
    cat > "$dir/slurm.conf" <<END
ClusterName=lab
SlurmctldHost=node1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/%n
TmpFS=$LAB/tmp
SlurmctldPidFile=$dir/ctld.pid
SlurmdPidFile=$dir/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=30
NodeName=node[1-2] CPUs=2 State=UNKNOWN
SchedulerParameters=bf_interval=1
PartitionName=all Nodes=ALL Default=YES State=UP
END
    printf "CgroupPlugin=autodetect\nIgnoreSystemd=yes\n" > "$dir/cgroup.conf"
    export SLURM_CONF=$dir/slurm.conf
    on node1 munged --foreground --force --key-file "$dir/munge/key" --socket "$dir/munge/socket" \
        --pid-file "$dir/munge/pid" --log-file "$dir/munge/log" --seed-file "$dir/munge/seed" &> "$dir/munged.out" &
    for n in $(seq 100); do
        [ ! -S "$dir/munge/socket" ] || break
        sleep 0.1
    done
    on node1 slurmctld -D -L "$dir/ctld.log" &> "$dir/ctld.out" &
    for n in 1 2; do
        on "node$n" slurmd -D -N "node$n" -L "$dir/node$n.log" &> "$dir/node$n.out" &
    done
    for n in $(seq 100); do
        [ "$(on node1 sinfo --noheader --format %T 2> /dev/null)" != idle ] || return 0
        sleep 0.1
    done
    tail -n 20 "$dir"/*.log "$dir"/*.out
    return 1
}
