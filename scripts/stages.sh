# Sourced by the scripts that train in stages: settings, and commands that end when LIMIT is reached.
#
# Before it is sourced OUTPUT is set. Settings: GPUS (0: the CPU), LIMIT (seconds that this call may take), PYTHON, CORES, WORKERS.
LIMIT=${LIMIT:-100000}
PYTHON=${PYTHON:-python3}
CORES=${CORES:-$(nproc --all)}
WORKERS=${WORKERS:-$((CORES > 2 ? CORES - 2 : 1))}
mkdir -p "$OUTPUT"

left() { echo $((LIMIT - SECONDS)); }
say() { echo "== $SECONDS s: $*"; }
again() { say "stopped by LIMIT=$LIMIT: run it again"; exit 75; }
# Run a command for at most the time left; SIGTERM makes a training save its state.
within() { [ "$(left)" -gt 5 ] || again; timeout --signal TERM --kill-after 30 "$(left)" "$@" || { [ "$(left)" -gt 5 ] && exit 1 || again; }; }
module() { # a module of Python over the GPUs
  if [ "$GPUS" -gt 1 ]; then within "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$GPUS" -m "$@"; else within "$PYTHON" -m "$@"; fi
}
DEVICE=$([ "$GPUS" -gt 0 ] && echo cuda || echo cpu)
EACH=$((CORES / (GPUS > 0 ? GPUS : 1)))
EACH=$((EACH > 0 ? EACH : 1))
