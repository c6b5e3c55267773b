#!/usr/bin/env bash
# Does a world model remember places? Record drives that come back, teach the shipped model to remember them in several ways, and put all into one table.
#
#     OUTPUT=outputs/memory GPUS=2 LIMIT=560 bash scripts/memory_experiment.sh
#
# Every stage keeps what it has and goes on from there: LIMIT is how many seconds this call may take. Exit code: 0 all is done, 75 run it again. GPUS=0 works on the CPU.
# Further settings: TRAIN, EVALUATE ("key=value key=value"); SCALE=0.01 records a hundredth; TRAIN_SECONDS is each training's time; MODELS are the trainings.
# Needs the extras record and train. The table is $OUTPUT/evaluation/compare.md; each model's figures with no memory, the newest frames and the oracle are in
# $OUTPUT/evaluation/MODEL/metrics.json (revisits, loops) and revisits.png.
set -euo pipefail
cd "$(dirname "$0")/.."
OUTPUT=${OUTPUT:-outputs/memory}
GPUS=${GPUS:-2}
SCALE=${SCALE:-1}
FRAMES=${FRAMES:-500}             # of a training drive
HELD_OUT_FRAMES=${HELD_OUT_FRAMES:-620} # 62 s
TRAIN_SECONDS=${TRAIN_SECONDS:-480}
TRAIN=${TRAIN:-}
EVALUATE=${EVALUATE:-}
MODELS=${MODELS:-m0 m4 m8 recent4}
DATA=$OUTPUT/recording
source scripts/stages.sh

# record FOLDER SPLIT FIRST TOWNS EPISODES FRAMES [SETTING...]: TOWNS towns from the split's number FIRST on.
record() {
  local towns
  towns=$("$PYTHON" -c "print(max(1, round($4 * $SCALE)))")
  within env OMP_NUM_THREADS=1 "$PYTHON" -W ignore -m terra record output="$DATA/$1" split="$2" seed="$3" towns="$towns" episodes_per_place="$5" \
    frames_per_episode="$6" workers="$WORKERS" max_seconds="$(left)" "${@:7}"
}

say "recording"
# The shipped model was taught in the training's first towns and is measured in the first held-out ones: these are others.
record loops held_out 20000 48 1 "$HELD_OUT_FRAMES" revisit=1 traffic=false
record drives held_out 30000 16 4 "$HELD_OUT_FRAMES" # two drives of a town are generated, two are what these are compared with
# One weather in a town, so that its drives look alike.
first=20000
for weather in day overcast fog dusk night; do
  record loops train $first 24 4 "$FRAMES" revisit=1 traffic=false weather=$weather
  record loops train $((first + 1000)) 12 4 "$FRAMES" revisit=0.5 weather=$weather
  first=$((first + 2000))
done

say "tokens"
module terra tokenize data="$DATA/loops" checkpoint=demo output="$OUTPUT/tokens" \
  device="$DEVICE" dtype="$([ "$DEVICE" = cuda ] && echo bfloat16 || echo float32)" workers="$EACH"

for model in $MODELS; do
  [ -f "$OUTPUT/$model/metrics.json" ] && continue
  case $model in
  m0) memory="memory.frames=null" ;; # the control: the same drives, no memory
  recent*) memory="memory.frames=${model#recent} memory.kind=recent" ;;
  m*) memory="memory.frames=${model#m}" ;;
  *) echo "MODELS: expected m0, mN or recentN, got $model" >&2; exit 2 ;;
  esac
  say "training: $model"
  module terra train data="$OUTPUT/tokens" output="$OUTPUT/$model" recipe=world_model_memory $memory device="$DEVICE" \
    max_seconds="$TRAIN_SECONDS" $TRAIN
  [ -f "$OUTPUT/$model/metrics.json" ] || again
done

EVALUATION=(data="$DATA/drives" revisit_data="$DATA/loops" device="$DEVICE" workers="$EACH" num_clips=128 drift_clips=32 drift_frames=600
  drift_reference_frames=10000 frechet_resamples=4 revisit_clips=48 revisit_loops=16 max_groups=0 requirements=false)
# evaluate OUTPUT MODEL; in the background, where exec leaves one process to be ended
evaluate() { exec "$PYTHON" -m terra evaluate "${EVALUATION[@]}" output="$1" world_model.pretrained="$2" $EVALUATE; }
base=${MODELS%% *}
others=$(for model in ${MODELS#"$base"}; do echo "$OUTPUT/$model"; done)
others=$(echo $others terra/demo/world_model | tr ' ' ',')

# Each model alone, as many at once as there are GPUs; the table below finds their figures in the same folders.
say "evaluation"
running=()
finish() { # wait for what is running
  for process in "${running[@]}"; do
    while kill -0 "$process" 2>/dev/null; do
      [ "$(left)" -gt 5 ] || again
      sleep 1
    done
    wait "$process" || { say "an evaluation failed: see $OUTPUT/evaluate_*.log"; exit 1; }
  done
  running=()
}
if [ "$GPUS" -gt 1 ]; then
  for model in $MODELS demo; do
    folder=$OUTPUT/evaluation/$([ "$model" = "$base" ] && echo base || echo "$model")
    grep -qs '"complete": true' "$folder/metrics.json" && continue
    [ "$(left)" -gt 5 ] || again
    weights=$([ "$model" = demo ] && echo terra/demo/world_model || echo "$OUTPUT/$model/world_model")
    CUDA_VISIBLE_DEVICES=${#running[@]} evaluate "$folder" "$weights" >"$OUTPUT/evaluate_$model.log" 2>&1 &
    running+=($!)
    [ ${#running[@]} -lt "$GPUS" ] || finish
  done
  [ ${#running[@]} -eq 0 ] || finish
fi
within "$PYTHON" -m terra evaluate "${EVALUATION[@]}" output="$OUTPUT/evaluation" world_model.pretrained="$OUTPUT/$base/world_model" \
  compare="[$others]" $EVALUATE
say "done: $OUTPUT/evaluation/compare.md"
