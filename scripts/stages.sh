# Sourced by the scripts that train in stages: settings, commands that end when LIMIT is reached, and what runs beside them, which ends with the script.
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

beside=() # subshells in the background
# aside FUNCTION: run a function's stages one after the other in the background; $! is the subshell. On SIGTERM it exits; a terminal's SIGINT is for the script.
aside() {
  (trap - EXIT; trap '' INT; trap 'exit 75' TERM; "$@") &
  beside+=($!)
}
# Stop this shell's children (the stage in front, recordings, subshells) and the subshells' own, and wait until trainings have saved their states.
stop() {
  local children= each
  for each in $$ "${beside[@]}"; do children+=" $(cat "/proc/$each/task/$each/children" 2>/dev/null || true)"; done
  kill $children 2>/dev/null || true
  wait || true
  for each in $children; do while kill -0 "$each" 2>/dev/null; do sleep 0.2; done; done
}
trap stop EXIT
trap 'exit 130' INT

# Run a command for at most the time left; SIGTERM makes a training save its state. The shell waits for it, and so can be stopped meanwhile.
within() {
  [ "$(left)" -gt 5 ] || again
  timeout --signal TERM --kill-after 30 "$(left)" "$@" &
  wait $! || { [ "$(left)" -gt 5 ] && exit 1 || again; }
}
module() { # a module of Python over the GPUs
  if [ "$GPUS" -gt 1 ]; then within "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$GPUS" -m "$@"; else within "$PYTHON" -m "$@"; fi
}
DEVICE=$([ "$GPUS" -gt 0 ] && echo cuda || echo cpu)
EACH=$((CORES / (GPUS > 0 ? GPUS : 1)))
EACH=$((EACH > 0 ? EACH : 1))
