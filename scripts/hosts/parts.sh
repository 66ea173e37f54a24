# The parts of scripts/hosts_check.sh: for each what it needs, how it starts the ranks, and what must come out.

# A tiny model on real text. What the checks compare is written by rank 0.
model=(--dataset "$here/../README.md" --embed-dim 64 --num-layers 2 --num-heads 4 --max-len 64 --batch-size 2 --max-steps 6
    --lr 0.01 --warmup-steps 2 --save-every 3 --no-sample --init-timeout 30 --comm-timeout 20)
limit=(timeout --kill-after 5 120)
table=()
port=29500

# train DIRECTORY: the flags of the run that leaves its results there.
train() {
    printf '%s\0' "$binary" "${model[@]}" --metrics-path "$LAB/$1/metrics.jsonl" --ckpt-dir "$LAB/$1/ckpt"
}

# What one host computes.
reference() {
    local command
    mkdir one
    export XDG_CACHE_HOME=$LAB/cache TMPDIR=$LAB/tmp
    mapfile -d '' command < <(train one)
    on node1 "${limit[@]}" "${command[@]}" --nproc-per-node 4 > one/log 2>&1 ||
        { cat one/log; echo "the run on one host failed"; exit 1; }
    numbers one > one/numbers
    [ "$(wc -l < one/numbers)" -ge 6 ] || { cat one/log; echo "the run on one host wrote no metrics"; exit 1; }
}

# Losses and norms of a run with all their digits.
numbers() {
    sed -n -E 's/^\{"event":"step","step":([0-9]+),"loss":([^,]*),.*"grad_norm":([^,]*),.*/step \1 \2 \3/p
        s/^\{"event":"eval",(.*),"tokens".*/eval \1/p' "$1/metrics.jsonl"
}

# Why a part cannot run here, or nothing.
missing() {
    case $1 in
        torchrun) [ -n "$torchrun" ] || echo "no torchrun in PATH or TORCHRUN (Debian: python3-torch; pip install torch)" ;;
        mpirun | mpi-mpirun) command -v mpirun > /dev/null || echo "no mpirun (Debian: openmpi-bin)" ;;
        srun | mpi-srun) slurm_missing ;;
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
    # Flags in the spelling that old ones know too. Debian's (1.13, Python 3.11) ends over zeros in these two.
    local n pids=()
    for n in 0 1; do
        on "node$((n + 1))" "${limit[@]}" "$torchrun" --nnodes 2 --nproc_per_node 2 --node_rank "$n" --rdzv_backend c10d \
            --rdzv_endpoint "node1:$port" --rdzv_id check --redirects 0:1,1:1 --tee 0:1,1:1 --no_python "$@" &
        pids+=($!)
    done
    wait "${pids[0]}" && wait "${pids[1]}"
}
start_mpirun() {
    # An agent that reaches the other host without ssh. Open MPI does not run as root unasked.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_plm_rsh_agent="$here/hosts/agent.sh"
    on node1 "${limit[@]}" mpirun --host node1:2,node2:2 -np 4 "$@"
}
start_srun() {
    [ -n "${SLURM_CONF:-}" ] || slurm_start
    on node1 "${limit[@]}" srun --nodes 2 --ntasks-per-node 2 "$@"
}

start() {
    local launcher=$1
    shift
    case $launcher in
        plain) start_plain "$@" --comm tcp ;;
        torchrun) start_torchrun "$@" --comm tcp ;;
        mpirun) start_mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=$port "$@" --comm tcp ;;
        srun) start_srun "$@" --comm tcp ;; # Slurm says where rank 0 is
        mpi-mpirun) start_mpirun "$@" --comm mpi ;;
        mpi-srun) start_srun --mpi pmix "$@" --comm mpi ;;
    esac
}

# Says nothing where the run in directory $1 is the reference's.
differs() {
    local file
    numbers "$1" > "$1/numbers"
    diff one/numbers "$1/numbers" || echo "losses and norms differ from one host's (left)"
    for file in $(cd one/ckpt && find . -name '*.safetensors'); do
        cmp "one/ckpt/$file" "$1/ckpt/$file" || true
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
        strangers) besiege "${command[@]}" ;;
        *) compare "${command[@]}" ;;
    esac
    [ $status = 0 ] && return
    failed=1
    tail -n 40 "$part/log"
    case $part in *srun) tail -n 20 "$LAB"/slurm/*.log ;; esac
}
seconds() { awk -v ns=$(($(date +%s%N) - began)) 'BEGIN { printf "%.1f s", ns / 1e9 }'; }

# The whole run, against one host's.
compare() {
    start "$part" "$@" > "$part/log" 2>&1 || status=$?
    [ $status = 0 ] || { say "$part" failed "exit status $status"; return; }
    why=$(differs "$part")
    if [ -z "$why" ]; then
        say "$part" passed "$(wc -l < one/numbers) lines of metrics and all checkpoints equal one host's ($(seconds))"
    else
        status=1
        say "$part" failed "$why"
    fi
}

# In the middle of a run rank 3 is killed, or node2 cut off: a rank of node1 names one of the lost, and all end.
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
    wait $run && status=1 && why="the run ended well"
    [ $part != cable ] || on node2 ip link set eth0 up
    grep -h "rank $lost on node2" "$part"/log.[01] > "$part/named" || { status=1; why="nobody on node1 names the lost rank"; }
    if [ $status = 0 ]; then
        say "$part" passed "all ended after $(seconds): $(tail -n 1 "$part/named" | cut -c 1-160)"
    else
        say "$part" failed "$why"
    fi
}

# Ports of TCP listeners on a host, as ADDRESS:PORT in hexadecimal (proc(5)), other than of the loopback.
listeners() { on "$1" awk '$4 == "0A" && $2 !~ /^0100007F/ { print $2 }' /proc/net/tcp /proc/net/tcp6; }

# attack SECONDS: from node2 to every port of node1 that listens, again and again: a connection on which nothing is said, and one on which
# a byte is said each second. A greeting of a rank as it was before there were secrets, too.
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

# Ranks find each other and train while strangers are at their ports, and a dead rank is known as soon as without them.
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
    wait $run && status=1 && why="the run ended well"
    [ $(($(date +%s%N) - began)) -lt 8000000000 ] || { status=1; why="a dead rank was known after $(seconds) only"; }
    [ "$everywhere" = 0 ] || { status=1; why="$everywhere ports are open on other interfaces than MASTER_ADDR's"; }
    grep -qh "rank $lost on node2" "$part"/log.[01] || { status=1; why="nobody on node1 names the lost rank"; }
    ! grep -q "no job secret" "$part"/log.* || { status=1; why="a job with a secret is told that it has none"; }
    if [ $status = 0 ]; then
        say "$part" passed "trained under attack, and all ended $(seconds) after a rank was killed"
    else
        say "$part" failed "$why"
    fi
    unset FLATSHARD_JOB_SECRET
    wait $attacks
}

# say PART RESULT NOTE, at once and in the table.
say() {
    local line
    line=$(printf '%-12s %-8s %s' "$1" "$2" "$3")
    echo "$line"
    table+=("$line")
}
