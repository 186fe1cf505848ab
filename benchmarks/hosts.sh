#!/usr/bin/env bash
# Run a command once on each of N test hosts (network namespaces) whose links are limited to a rate.
#   bash benchmarks/hosts.sh 1gbit 2 python -m benchmarks.step_time --models transformer
# Needs root and iproute2. Each host has one core (taskset) and one address on a bridge of its own.
# Everything that it made is removed at the end, also after an error or Ctrl+C.
set -euo pipefail
rate=$1 hosts=$2
shift 2
tag=lean$$
net=10.77.$((RANDOM % 200 + 20))
cores=$(nproc)
pids=()

cleanup() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for ((i = 0; i < hosts; i++)); do
        ip netns del "$tag-$i" 2>/dev/null || true
    done
    ip link del "$tag" 2>/dev/null || true
}
trap cleanup EXIT
trap 'exit 130' INT TERM

ip link add "$tag" type bridge
ip link set "$tag" up
for ((i = 0; i < hosts; i++)); do
    ip netns add "$tag-$i"
    ip link add "v$$-$i" type veth peer name eth0 netns "$tag-$i"
    ip link set "v$$-$i" master "$tag" up
    ip -n "$tag-$i" link set lo up
    ip -n "$tag-$i" addr add "$net.$((i + 1))/24" dev eth0
    ip -n "$tag-$i" link set eth0 up
    if [ "$rate" != none ]; then
        # both directions of the link; the same settings for every contender
        ip netns exec "$tag-$i" tc qdisc add dev eth0 root tbf rate "$rate" burst 128kb latency 100ms
        tc qdisc add dev "v$$-$i" root tbf rate "$rate" burst 128kb latency 100ms
    fi
done
for ((i = 0; i < hosts; i++)); do
    ip netns exec "$tag-$i" env RANK="$i" LOCAL_RANK="$i" WORLD_SIZE="$hosts" \
        MASTER_ADDR="$net.1" MASTER_PORT=29531 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 \
        taskset -c $((i % cores)) "$@" --link "$rate" &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit "$status"
