# The parts of scripts/hosts_check.sh: what each needs, how it starts the ranks, and the expected result.

# A tiny model on real text. Rank 0 writes what the checks compare.
model=(--dataset "$here/../README.md" --embed-dim 64 --num-layers 2 --num-heads 4 --max-len 64 --batch-size 2 --max-steps 6
    --lr 0.01 --warmup-steps 2 --save-every 3 --no-sample --init-timeout 30 --comm-timeout 20)
# With experts that all four ranks share, of both hosts. The first has two.
experts=(--num-experts 5 --ff-hidden-dim 64 --ep-size 4)
limit=(timeout --kill-after 5 120)
table=()
port=29500

# train DIRECTORY: the command of a run that writes its results there; of a sparse model if the name ends in -ep.
train() {
    local more=()
    case $1 in *-ep) more=("${experts[@]}") ;; esac
    printf '%s\0' "$binary" "${model[@]}" "${more[@]}" --metrics-path "$LAB/$1/metrics.jsonl" --ckpt-dir "$LAB/$1/ckpt"
}

# The runs on one host.
reference() {
    local command run
    export XDG_CACHE_HOME=$LAB/cache TMPDIR=$LAB/tmp
    for run in one one-ep; do
        mkdir $run
        mapfile -d '' command < <(train $run)
        on node1 "${limit[@]}" "${command[@]}" --nproc-per-node 4 > $run/log 2>&1 ||
            { cat $run/log; echo "the run on one host failed"; exit 1; }
        numbers $run > $run/numbers
        [ "$(wc -l < $run/numbers)" -ge 6 ] || { cat $run/log; echo "the run on one host wrote no metrics"; exit 1; }
    done
}

# Losses and norms of a run, in full precision.
numbers() {
    sed -n -E 's/^\{"event":"step","step":([0-9]+),"loss":([^,]*),.*"grad_norm":([^,]*),.*/step \1 \2 \3/p
        s/^\{"event":"eval",(.*),"tokens".*/eval \1/p' "$1/metrics.jsonl"
}

# Prints why a part cannot run here, or nothing.
missing() {
    case $1 in
        torchrun) [ -n "$torchrun" ] || echo "no torchrun in PATH or TORCHRUN (Debian: python3-torch; pip install torch)" ;;
        mpirun | mpi-mpirun) command -v mpirun > /dev/null || echo "no mpirun (Debian: openmpi-bin)" ;;
        srun | het | requeue | mpi-srun) slurm_missing ;;
    esac
    case $1 in
        mpi-*) "$binary" --comm mpi --print-config > /dev/null 2>&1 || echo "run_fsdp was built without --features mpi" ;;
    esac
}

# start_PART COMMAND...: two hosts, two ranks each.
start_plain() { # by hand, with torchrun's variables
    local rank pids=() status=0
    for rank in 0 1 2 3; do
        on "node$((rank / 2 + 1))" "${limit[@]}" env RANK=$rank WORLD_SIZE=4 LOCAL_RANK=$((rank % 2)) LOCAL_WORLD_SIZE=2 \
            MASTER_ADDR=node1 MASTER_PORT=$port sh -c 'echo $$ > "$0"; exec "$@"' "$LAB/$part/pid.$rank" \
            "$@" > "$LAB/$part/log.$rank" 2>&1 &
        pids+=($!)
    done
    for rank in 0 1 2 3; do
        wait "${pids[$rank]}" || status=$?
    done
    cat "$LAB/$part"/log.*
    return $status
}
start_torchrun() {
    # Flags as old versions spell them. Debian's (1.13, Python 3.11) fails with zeros in --redirects and --tee.
    local n pids=()
    for n in 0 1; do
        on "node$((n + 1))" "${limit[@]}" "$torchrun" --nnodes 2 --nproc_per_node 2 --node_rank "$n" --rdzv_backend c10d \
            --rdzv_endpoint "node1:$port" --rdzv_id check --redirects 0:1,1:1 --tee 0:1,1:1 --no_python "$@" &
        pids+=($!)
    done
    wait "${pids[0]}" && wait "${pids[1]}"
}
start_mpirun() {
    # An agent that reaches the other host without ssh. Open MPI refuses to run as root by default.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_plm_rsh_agent="$here/hosts/agent.sh"
    on node1 "${limit[@]}" mpirun --host node1:2,node2:2 -np 4 "$@"
}
start_srun() {
    [ -n "${SLURM_CONF:-}" ] || slurm_start
    on node1 "${limit[@]}" srun --nodes 2 --ntasks-per-node 2 "$@"
}

# batch FILE COMMAND...: a script of examples/hosts for the test hosts (two ranks each, no GPUs), with COMMAND for all that its
# run_fsdp has before --resume.
batch() {
    local file=$1 command
    shift
    [ -n "${SLURM_CONF:-}" ] || slurm_start
    printf -v command '%q ' "$@"
    sed -z -E "s|run_fsdp .*(--resume)|$command\\1|; s/( |#SBATCH )--gpus-per-node [0-9]+//g; s/ --constraint [a-z0-9]+//g
        s/per-node [0-9]+/per-node 2/g; s/--nodes 2 --ntasks/--nodes 1 --ntasks/" "$here/../examples/hosts/$file" > "$part/$file"
}
start_het() { # a component on each host
    batch slurm-het.sbatch "$@"
    on node1 "${limit[@]}" sbatch --wait --output "$LAB/$part/job.log" "$part/slurm-het.sbatch"
    cat "$part/job.log"
}

start() {
    local launcher=$1
    shift
    case $launcher in
        plain) start_plain "$@" --comm tcp ;;
        torchrun) start_torchrun "$@" --comm tcp ;;
        mpirun) start_mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=$port "$@" --comm tcp ;;
        srun) start_srun "$@" --comm tcp ;; # Slurm sets rank 0's address
        het) start_het "$@" --comm tcp ;;
        mpi-mpirun) start_mpirun "$@" --comm mpi ;;
        mpi-srun) start_srun --mpi pmix "$@" --comm mpi ;;
    esac
}

# Prints how the run in directory $1 differs from the one on one host in directory $2, or nothing.
differs() {
    local file
    numbers "$1" > "$1/numbers"
    diff "$2/numbers" "$1/numbers" || echo "losses and norms differ from one host's (left)"
    for file in $(cd "$2/ckpt" && find . -name '*.safetensors'); do
        cmp "$2/ckpt/$file" "$1/ckpt/$file" || true
    done 2>&1
}

run_part() {
    local part=$1 why command began status=0
    why=$(missing "$part")
    if [ -n "$why" ]; then
        say "$part" skipped "$why"
        return
    fi
    mkdir "$part"
    mapfile -d '' command < <(train "$part")
    began=$(date +%s%N)
    case $part in
        killed | cable) lose "${command[@]}" ;;
        requeue) requeue "${command[@]}" ;;
        strangers) besiege "${command[@]}" ;;
        *) compare ;;
    esac
    [ $status = 0 ] && return
    failed=1
    tail -n 40 "$part/log"
    case $part in *srun | het | requeue) tail -n 20 "$LAB"/slurm/*.log ;; esac
}
seconds() { awk -v ns=$(($(date +%s%N) - began)) 'BEGIN { printf "%.1f s", ns / 1e9 }'; }

# Compares whole runs with those on one host. With MPI also one that shares experts between the hosts; with TCP,
# tests/hosts/two_hosts.rs does.
compare() {
    local suffix suffixes=("")
    case $part in mpi-*) suffixes+=(-ep) ;; esac
    for suffix in "${suffixes[@]}"; do
        mkdir -p "$part$suffix"
        mapfile -d '' command < <(train "$part$suffix")
        start "$part" "${command[@]}" >> "$part/log" 2>&1 || status=$?
        [ $status = 0 ] || { say "$part" failed "exit status $status"; return; }
        why=$(differs "$part$suffix" "one$suffix")
        [ -z "$why" ] || { status=1; say "$part" failed "$why"; return; }
    done
    say "$part" passed "$(cat "$part"*/numbers | wc -l) lines of metrics and all checkpoints equal one host's ($(seconds))"
}

# patiently COMMAND...: retries the command until it succeeds, for up to 30 s.
patiently() {
    local n
    for n in $(seq 300); do
        ! "$@" || return 0
        sleep 0.1
    done
    return 1
}
# Sends the job the signal that Slurm sends before the time limit: it must save, be requeued, and resume. Not in the second in which it ended:
# credentials are revoked by the second, and Slurm would kill the new one.
requeue() {
    local id saved
    batch slurm.sbatch "$@" --max-steps 1000000 --save-every 0
    id=$(on node1 sbatch --parsable --output "$LAB/$part/log" "$part/slurm.sbatch")
    trained() { [ "$(numbers "$part" 2> /dev/null | wc -l)" -ge 5 ]; }
    pending() { [ "$(on node1 squeue --noheader --format %T)" = PENDING ]; }
    resumed() { [ "$(grep -c '"event":"run"' "$part/metrics.jsonl")" -ge 2 ] && [ "$(numbers "$part" | wc -l)" -gt "$saved" ]; }
    why="it did not train"
    if patiently trained && why="it was not queued again" && on node1 scancel --signal USR1 "$id" && patiently pending &&
        saved=$(numbers "$part" | wc -l) && why="it did not resume" && on node1 scontrol update jobid="$id" starttime=now+2seconds && patiently resumed; then
        say "$part" passed "saved after step $saved on USR1, queued again, and resumed"
    else
        status=1
        say "$part" failed "$why"
    fi
    on node1 scancel "$id"
}

# During a run, rank 3 is killed or node2 is cut off: a rank of node1 must name a lost rank, and all must exit.
lose() {
    local run lost=3
    start plain "$@" --max-steps 1000000 --save-every 0 --comm-timeout 3 > "$part/log" 2>&1 &
    run=$!
    until [ "$(numbers "$part" 2> /dev/null | wc -l)" -ge 5 ] || ! kill -0 $run 2> /dev/null; do sleep 0.05; done
    began=$(date +%s%N)
    case $part in
        killed) kill -KILL "$(< "$part/pid.3")" ;;
        cable) on node2 ip link set eth0 down && lost=[23] ;;
    esac
    wait $run && status=1 && why="the run succeeded"
    [ $part != cable ] || on node2 ip link set eth0 up
    grep -h "rank $lost on node2" "$part"/log.[01] > "$part/named" || { status=1; why="no rank of node1 names the lost rank"; }
    if [ $status = 0 ]; then
        say "$part" passed "all exited after $(seconds): $(tail -n 1 "$part/named" | cut -c 1-160)"
    else
        say "$part" failed "$why"
    fi
}

# TCP listeners of a host, except on loopback, as ADDRESS:PORT in hexadecimal (proc(5)).
listeners() { on "$1" awk '$4 == "0A" && $2 !~ /^0100007F/ { print $2 }' /proc/net/tcp /proc/net/tcp6; }

# attack SECONDS: from node2, repeatedly opens to every listening port of node1 a connection that sends nothing, one that sends a byte
# per second, and one with the greeting of the protocol without a secret.
attack() {
    local until=$((SECONDS + $1)) at
    while [ $SECONDS -lt "$until" ]; do
        for at in $(listeners node1); do
            on node2 timeout 10 bash -c 'exec 3<> "/dev/tcp/10.77.0.1/$((16#$0))" && sleep 20' "${at##*:}" &
            on node2 timeout 10 bash -c 'exec 3<> "/dev/tcp/10.77.0.1/$((16#$0))" && while printf f >&3; do sleep 1; done' "${at##*:}" &
            on node2 timeout 10 bash -c 'exec 3<> "/dev/tcp/10.77.0.1/$((16#$0))" && printf flatshrd12345678\\001\\0\\0\\0 >&3 && sleep 20' \
                "${at##*:}" &
        done
        sleep 0.5
    done 2> /dev/null
    wait
}

# Ranks must rendezvous and train while others connect to their ports, and detect a dead rank as fast as without them.
besiege() {
    local run attacks lost=3 everywhere others
    others=$(listeners node1; listeners node2) # Slurm's daemons
    export FLATSHARD_JOB_SECRET=of-the-hosts-check-$RANDOM$RANDOM$RANDOM
    attack 12 &
    attacks=$!
    start plain "$@" --max-steps 1000000 --save-every 0 > "$part/log" 2>&1 &
    run=$!
    until [ "$(numbers "$part" 2> /dev/null | wc -l)" -ge 20 ] || ! kill -0 $run 2> /dev/null; do sleep 0.05; done
    everywhere=$({ listeners node1; listeners node2; } | grep -vxF -e "${others:-none}" | grep -cv -e '^01004D0A' -e '^02004D0A' || true)
    began=$(date +%s%N)
    kill -KILL "$(< "$part/pid.$lost")"
    wait $run && status=1 && why="the run succeeded"
    [ $(($(date +%s%N) - began)) -lt 8000000000 ] || { status=1; why="a dead rank was detected only after $(seconds)"; }
    [ "$everywhere" = 0 ] || { status=1; why="$everywhere ports are open on interfaces other than MASTER_ADDR's"; }
    grep -qh "rank $lost on node2" "$part"/log.[01] || { status=1; why="no rank of node1 names the lost rank"; }
    ! grep -q "no job secret" "$part"/log.* || { status=1; why="a job with a secret warns that it has none"; }
    if [ $status = 0 ]; then
        say "$part" passed "trained under attack; all exited $(seconds) after a rank was killed"
    else
        say "$part" failed "$why"
    fi
    unset FLATSHARD_JOB_SECRET
    wait $attacks
}

# say PART RESULT NOTE: prints the line, and adds it to the table.
say() {
    local line
    line=$(printf '%-12s %-8s %s' "$1" "$2" "$3")
    echo "$line"
    table+=("$line")
}
