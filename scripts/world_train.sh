#!/usr/bin/env bash
# Train a world, doom, pusht or town_hd, from nothing: record, tokenizer, tokens and world model; beside both a decoder (pusht has none), then the action
# estimator. town_hd is then evaluated beside the shipped model, and driven live, while its estimator is trained; torch.compile's cache is warmed up for it.
#
#     WORLD=doom OUTPUT=outputs/doom_training GPUS=2 LIMIT=560 bash scripts/world_train.sh
#
# The same command goes on where it was stopped: each stage keeps what it has in OUTPUT. LIMIT is how many seconds a call may take; unset, a day.
# Exit code: 0 all is done, 75 run it again, 1 a stage failed or no WORLD was given, 2 another WORLD. GPUS=0 trains on the CPU.
# Settings for the models: TOKENIZER, DECODER, WORLD_MODEL, ESTIMATOR ("key=value key=value"); SCALE=0.01 records a hundredth;
# RECORD has further settings of terra record, SCENES is the number of scenes; PYTHON, CORES and WORKERS stand in stages.sh. Of town_hd alone: SIZE is the
# pictures' ("[288,512]"), FIRST and REST are the seconds in which the first part of the recording, and the rest, may begin new towns; EVALUATE ("key=value")
# is for terra evaluate, LIVE ("--frames 120 engine=graph engine.drafts=63") for scripts/drive_benchmark.py, which without it takes the default engine and drafts.
# Needs the extras train, and doom, pusht or record. The world is $OUTPUT/world: tokenizer/, world_model/, estimator/, contexts/, README.md.
set -euo pipefail
cd "$(dirname "$0")/.."
WORLD=${WORLD:?doom, pusht or town_hd}
OUTPUT=${OUTPUT:-outputs/${WORLD}_training}
GPUS=${GPUS:-1}
SCALE=${SCALE:-1}
SCENES=${SCENES:-4}
RECORD=${RECORD:-}
TOKENIZER=${TOKENIZER:-}
DECODER=${DECODER:-}
WORLD_MODEL=${WORLD_MODEL:-}
ESTIMATOR=${ESTIMATOR:-}
FIRST=${FIRST:-95}
REST=${REST:-360}
EVALUATE=${EVALUATE:-}
LIVE=${LIVE:-}
DATA=$OUTPUT/recording
COMPILED=false # the encoder of terra tokenize
source scripts/stages.sh
[ "$GPUS" -gt 0 ] || export CUDA_VISIBLE_DEVICES=

recordings=()
NICE=0
compiling=
scaled() { "$PYTHON" -c "print(max(1, round($1 * $SCALE)))"; }
# begin WORKERS SECONDS [SETTING...]: a recording beside other ones, in which no place is begun after SECONDS.
begin() {
  [ "$(left)" -gt 5 ] || again
  (exec timeout --signal TERM --kill-after 30 "$(left)" nice -n "$NICE" env OMP_NUM_THREADS=1 "$PYTHON" -W ignore -m terra record \
    workers="$(($1 > 0 ? $1 : 1))" max_seconds="$2" "${@:3}" $RECORD) &
  recordings+=($!)
}
# record SEEDS SEED SPLIT PLAYER: so many seeds, each a shard of four episodes, from the split's SEED on.
# Workers are shared out by the number of seeds, of which $ALL are recorded: short recordings spend most of their time on starting workers.
record() {
  begin $(((WORKERS * $1 + ALL / 2) / ALL)) "$(left)" output="$DATA" source=gym env="$ENV" image_size="$SIZE" frames_per_episode="$FRAMES" \
    episodes_per_place=4 seeds="$(scaled "$1")" seed="$2" split="$3" policy="$4"
}
# towns WORKERS SECONDS TOWNS SEED SPLIT FOLDER SIZE DRIVES FRAMES [SETTING...]: so many towns, each a shard, from the split's town SEED on.
towns() {
  begin "$1" "$2" output="$6" image_size="$7" towns="$(scaled "$3")" seed="$4" split="$5" episodes_per_place="$8" frames_per_episode="$9" "${@:10}"
}
recorded() { # wait for the recordings that were begun
  for process in "${recordings[@]}"; do wait "$process" || { [ "$(left)" -gt 5 ] && exit 1 || again; }; done
  recordings=()
}

# The stages that use all GPUs: each reads the recording in its first argument, and what the stages before have left in its second one, where it writes.
tokenizer() {
  module terra train-tokenizer data="$1" output="$2/tokenizer" recipe="tokenizer_$WORLD" device="$DEVICE" workers="$EACH" $TOKENIZER "${@:3}"
}
decoder() {
  module terra train-tokenizer data="$1" output="$2/decoder" recipe="tokenizer_${WORLD}_decoder" decoder_of="$2/tokenizer/tokenizer" device="$DEVICE" \
    workers="$EACH" $DECODER "${@:3}"
}
tokens() { # an episode of 150 or 300 frames fills batches of 75
  module terra tokenize data="$1" checkpoint="$2/tokenizer/tokenizer" output="$2/tokens" batch_size=75 compile_model="$COMPILED" \
    device="$DEVICE" dtype="$([ "$DEVICE" = cuda ] && echo bfloat16 || echo float32)" workers="$EACH"
}
world_model() {
  module terra train data="$2/tokens" output="$2/world_model" recipe="world_model_$WORLD" device="$DEVICE" \
    preview_tokenizer="$2/tokenizer/tokenizer" $WORLD_MODEL "${@:3}"
}

# Warm up torch.compile's cache on disk (TORCHINDUCTOR_CACHE_DIR, else the user's temporary folder): two steps of each stage on a few short drives, while
# the world is recorded and its tokenizer trained. A stage that finds no compiled code there compiles, for one to two and a half minutes; no stage waits
# for the cache. On 32 cores the tokenizer's code should be in it when the tokenizer has read the first part of the recording.
AHEAD=$OUTPUT/compiled
ahead() {
  local small=$AHEAD/recording
  local each=(output="$small" image_size="$SIZE" episodes_per_place=1 frames_per_episode=26)
  recordings=()
  begin 1 "$(left)" "${each[@]}" split=train towns=$((GPUS > 2 ? GPUS : 2)) # one for each process, at least
  begin 1 "$(left)" "${each[@]}" split=held_out towns=1
  recorded
  tokenizer "$small" "$AHEAD" max_steps=2
  tokens "$small" "$AHEAD"
  world_model "$small" "$AHEAD" max_steps=2
  decoder "$small" "$AHEAD" max_steps=2 adversarial.start=0.0
}

# The tokenizer begins with the first part of the recording and the held-out one; the rest is recorded meanwhile.
say "recording"
case $WORLD in
doom)
  ENV=terra.recording.doom:Doom-v0 SIZE="[96,160]" FRAMES=300 # 26 s
  PLAYERS=terra.recording.doom.players ALL=260
  record 160 0 train $PLAYERS:explore
  record 60 10000 train $PLAYERS:wander
  record 30 0 held_out $PLAYERS:explore
  record 10 10000 held_out $PLAYERS:wander
  recorded
  ALL=330 NICE=15
  record 240 1000 train $PLAYERS:explore
  record 90 11000 train $PLAYERS:wander
  ;;
pusht)
  ENV=terra.recording.pusht:PushT-v0 SIZE="[128,128]" FRAMES=300 # 30 s
  ESTIMATOR="estimator.image_size=[128,128] $ESTIMATOR"
  PLAYERS=terra.recording.pusht.players ALL=270
  record 120 0 train $PLAYERS:expert
  record 60 10000 train $PLAYERS:disturbed
  record 20 20000 train $PLAYERS:weak
  record 60 0 held_out $PLAYERS:expert
  record 10 10000 held_out $PLAYERS:weak
  recorded
  ALL=500 NICE=15
  record 280 1000 train $PLAYERS:expert
  record 180 11000 train $PLAYERS:disturbed
  record 40 21000 train $PLAYERS:weak
  ;;
town_hd)
  SIZE=${SIZE:-[288,512]}
  COMPILED=$([ "$DEVICE" = cuda ] && echo true || echo false)
  ESTIMATOR="max_frames=20000 max_seconds=60.0 $ESTIMATOR"
  if [ ! -f "$OUTPUT/tokenizer/metrics.json" ] && [ ! -f "$AHEAD/decoder/metrics.json" ]; then
    say "compiling ahead: see $AHEAD.log"
    rm -rf "$AHEAD"
    aside ahead >"$AHEAD.log" 2>&1
    compiling=$!
  fi
  # Which towns are recorded in time depends on the machine, so that a recording that has ended is not gone on with.
  if [ ! -f "$OUTPUT/recorded" ]; then
    towns $((WORKERS / 8)) "$FIRST" 16 5000 held_out "$DATA" "$SIZE" 1 100
    towns $((WORKERS * 7 / 8)) "$FIRST" 430 0 train "$DATA" "$SIZE" 1 150
    recorded
    NICE=15
    # The held-out towns of the shipped model's card, and futures of other towns, in the size of each model.
    for held_out in "shipped [144,256]" "town_hd $SIZE"; do
      towns $((WORKERS / 16)) "$(left)" 48 0 held_out "$OUTPUT/towns/${held_out% *}" "${held_out#* }" 1 140
      towns $((WORKERS / 8)) "$(left)" 64 1000 held_out "$OUTPUT/towns/${held_out% *}" "${held_out#* }" 1 70 kind=counterfactuals
    done
    # One drive in each town: with 450 towns and two drives in each the world model overfitted.
    towns "$WORKERS" "$REST" 1070 1000 train "$DATA" "$SIZE" 1 150
  fi
  ;;
*)
  echo "WORLD: expected doom, pusht or town_hd, got $WORLD" >&2
  exit 2
  ;;
esac

if [ ! -f "$OUTPUT/tokenizer/metrics.json" ]; then
  say "tokenizer"
  tokenizer "$DATA" "$OUTPUT"
  [ -f "$OUTPUT/tokenizer/metrics.json" ] || again
fi
say "waiting for the recorder"
recorded
touch "$OUTPUT/recorded"
[ -z "$compiling" ] || kill -0 "$compiling" 2>/dev/null || wait "$compiling" || say "not compiled ahead: see $AHEAD.log"
decoder=$OUTPUT/tokenizer/tokenizer
[ ! -f "conf/recipe/tokenizer_${WORLD}_decoder.yaml" ] || decoder=$OUTPUT/decoder/tokenizer
estimator() {
  [ ! -f "$OUTPUT/estimator/metrics.json" ] || return 0
  say "action estimator: see $OUTPUT/estimator.log"
  within "$PYTHON" -m terra train-estimator data="$DATA" output="$OUTPUT/estimator" checkpoint="$decoder" device="$DEVICE" workers="$EACH" \
    max_seconds=90.0 $ESTIMATOR >"$OUTPUT/estimator.log" 2>&1
  [ -f "$OUTPUT/estimator/metrics.json" ] || again
}
# Beside the tokens and the world model: the decoder, trained further for sharper pictures of the same tokens, then the estimator. town_hd's, which would
# halve the world model's speed, is trained beside the evaluation.
further() {
  if [ "$decoder" = "$OUTPUT/decoder/tokenizer" ] && [ ! -f "$OUTPUT/decoder/metrics.json" ]; then
    say "decoder: see $OUTPUT/decoder.log"
    decoder "$DATA" "$OUTPUT" >"$OUTPUT/decoder.log" 2>&1
    [ -f "$OUTPUT/decoder/metrics.json" ] || again
  fi
  [ "$WORLD" = town_hd ] || estimator
}
aside further
decoding=$!

say "tokens"
tokens "$DATA" "$OUTPUT"
done_beside() { wait "$1" || { code=$?; say "a stage that runs beside others is not done: see $OUTPUT/*.log"; exit "$code"; }; }
kill -0 "$decoding" 2>/dev/null || done_beside "$decoding" # it has failed early, or there was nothing to do
if [ ! -f "$OUTPUT/world_model/metrics.json" ]; then
  say "world model"
  world_model "$DATA" "$OUTPUT"
  [ -f "$OUTPUT/world_model/metrics.json" ] || again
fi
done_beside "$decoding"
rm -rf "$OUTPUT/world"
mkdir -p "$OUTPUT/world"
cp -r "$decoder" "$OUTPUT/world_model/world_model" "$OUTPUT/world/"
cp "terra/worlds/$WORLD.md" "$OUTPUT/world/README.md"
HELD_OUT=$DATA
[ "$WORLD" != town_hd ] || HELD_OUT=$OUTPUT/towns/town_hd
"$PYTHON" scripts/world_contexts.py --data "$HELD_OUT" --output "$OUTPUT/world/contexts" --scenes "$SCENES"

# Both models on the same clips of the same towns, each in its own size, measured at 144 x 256 pixels; a decode step of all clips may be wide.
WIDE=$([ "$DEVICE" = cpu ] || echo engine=graph engine.step_tokens=2048)
evaluate() { # NAME GPU [SETTING...]
  grep -qs '"complete": true' "$OUTPUT/evaluation/$1/metrics.json" || CUDA_VISIBLE_DEVICES=$2 OMP_NUM_THREADS=8 within "$PYTHON" -m terra evaluate \
    data="$OUTPUT/towns/$1" output="$OUTPUT/evaluation/$1" measured_size=[144,256] num_clips=48 drift_clips=0 max_groups=24 \
    frechet_resamples=20 requirements=true workers=8 $WIDE "${@:3}" $EVALUATE >"$OUTPUT/evaluation_$1.log" 2>&1
}
live() { # GPU; a video of the first scene's drive, and its frames/s
  local scene=$OUTPUT/world/contexts/scene_1
  local drive=(model=folder model.path="$OUTPUT/world" context="$scene" trajectory="$scene/recorded.json" num_frames=30)
  export CUDA_VISIBLE_DEVICES=$1 OMP_NUM_THREADS=8
  [ -f "$OUTPUT/drive/tokens.safetensors" ] || within "$PYTHON" -m terra generate "${drive[@]}" output="$OUTPUT/drive" overwrite=true >"$OUTPUT/live.log" 2>&1
  [ -f "$OUTPUT/live.json" ] || within "$PYTHON" scripts/drive_benchmark.py --output "$OUTPUT/live.json" "${drive[@]}" $LIVE >>"$OUTPUT/live.log" 2>&1
}
if [ "$WORLD" = town_hd ]; then
  say "evaluation beside the shipped model's, and a live drive: see $OUTPUT/evaluation_*.log, $OUTPUT/live.log"
  IFS=, read -r first second _ <<<"${CUDA_VISIBLE_DEVICES-0,1}"
  [ "$GPUS" -gt 1 ] || second=$first
  compared() { live "$second"; evaluate shipped "$second" model=demo; } # of two GPUs the drive has one for itself
  aside compared
  comparing=$!
  CUDA_VISIBLE_DEVICES=$first aside estimator
  estimating=$!
  evaluate town_hd "$first" model=folder model.path="$OUTPUT/world" sampling.temperature=1.1 # drifts less than 0.9
  done_beside "$comparing"
  done_beside "$estimating"
fi
cp -r "$OUTPUT/estimator/estimator" "$OUTPUT/world/"
say "done: $OUTPUT/world"
