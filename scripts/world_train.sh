#!/usr/bin/env bash
# Train a world, doom or pusht, from nothing: record, tokenizer, decoder (doom), tokens, action estimator, world model.
#
#     WORLD=doom OUTPUT=outputs/doom_training GPUS=2 LIMIT=560 bash scripts/world_train.sh
#
# The same command goes on where it was stopped: each stage keeps what it has in OUTPUT. LIMIT is how many seconds a call may take; unset, a day.
# Exit code: 0 all is done, 75 run it again (first look at OUTPUT/estimator.log if it says so), 1 a stage failed, 2 another WORLD. GPUS=0 trains on the CPU.
# Settings for the models: TOKENIZER, DECODER, WORLD_MODEL, ESTIMATOR ("key=value key=value"); SCALE=0.01 records a hundredth;
# RECORD has further settings of terra record, and SCENES is the number of scenes.
# Needs the extras train, and doom or pusht. The world is $OUTPUT/world: tokenizer/, world_model/, estimator/, contexts/, README.md.
set -euo pipefail
cd "$(dirname "$0")/.."
WORLD=${WORLD:?doom or pusht}
OUTPUT=${OUTPUT:-outputs/${WORLD}_training}
GPUS=${GPUS:-1}
SCALE=${SCALE:-1}
SCENES=${SCENES:-4}
RECORD=${RECORD:-}
TOKENIZER=${TOKENIZER:-}
DECODER=${DECODER:-}
WORLD_MODEL=${WORLD_MODEL:-}
ESTIMATOR=${ESTIMATOR:-}
DATA=$OUTPUT/recording
source scripts/stages.sh

# record SEEDS FIRST SPLIT PLAYER: so many seeds, each a shard of four episodes, from the split's seed FIRST on, beside other recordings.
# Workers are shared out by the number of seeds, of which $ALL are recorded: short recordings spend most of their time on starting workers.
recordings=()
NICE=0
estimator=
trap 'kill "${recordings[@]}" $estimator 2>/dev/null || true' EXIT
record() {
  local seeds workers
  seeds=$("$PYTHON" -c "print(max(1, round($1 * $SCALE)))")
  workers=$(((WORKERS * $1 + ALL / 2) / ALL))
  [ "$(left)" -gt 5 ] || again
  (exec timeout --signal TERM --kill-after 30 "$(left)" \
    nice -n "$NICE" env OMP_NUM_THREADS=1 "$PYTHON" -W ignore -m terra record output="$DATA" source=gym env="$ENV" image_size="$SIZE" frames_per_episode="$FRAMES" \
    episodes_per_place=4 workers="$((workers > 0 ? workers : 1))" seeds="$seeds" seed="$2" split="$3" policy="$4" max_seconds="$(left)" $RECORD) &
  recordings+=($!)
}
recorded() { # wait for the recordings that were begun
  for process in "${recordings[@]}"; do wait "$process" || { [ "$(left)" -gt 5 ] && exit 1 || again; }; done
  recordings=()
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
*)
  echo "WORLD: expected doom or pusht, got $WORLD" >&2
  exit 2
  ;;
esac

if [ ! -f "$OUTPUT/tokenizer/metrics.json" ]; then
  say "tokenizer"
  module terra train-tokenizer data="$DATA" output="$OUTPUT/tokenizer" recipe="tokenizer_$WORLD" device="$DEVICE" workers="$EACH" $TOKENIZER
  [ -f "$OUTPUT/tokenizer/metrics.json" ] || again
fi
tokenizer=$OUTPUT/tokenizer/tokenizer
if [ -f "conf/recipe/tokenizer_${WORLD}_decoder.yaml" ]; then
  if [ ! -f "$OUTPUT/decoder/metrics.json" ]; then
    say "decoder, for sharper pictures of the same tokens"
    module terra train-tokenizer data="$DATA" output="$OUTPUT/decoder" recipe="tokenizer_${WORLD}_decoder" decoder_of="$tokenizer" device="$DEVICE" \
      workers="$EACH" $DECODER
    [ -f "$OUTPUT/decoder/metrics.json" ] || again
  fi
  tokenizer=$OUTPUT/decoder/tokenizer
fi
say "waiting for the recorder"
recorded
say "tokens"
module terra tokenize data="$DATA" checkpoint="$tokenizer" output="$OUTPUT/tokens" \
  device="$DEVICE" dtype="$([ "$DEVICE" = cuda ] && echo bfloat16 || echo float32)" workers="$EACH"

if [ ! -f "$OUTPUT/estimator/metrics.json" ]; then
  say "action estimator, beside what follows"
  timeout --signal TERM "$(left)" "$PYTHON" -m terra train-estimator data="$DATA" output="$OUTPUT/estimator" \
    checkpoint="$tokenizer" device="$DEVICE" workers="$EACH" max_seconds=90.0 $ESTIMATOR >"$OUTPUT/estimator.log" 2>&1 &
  estimator=$!
fi
if [ ! -f "$OUTPUT/world_model/metrics.json" ]; then
  say "world model"
  module terra train data="$OUTPUT/tokens" output="$OUTPUT/world_model" recipe="world_model_$WORLD" device="$DEVICE" \
    preview_tokenizer="$tokenizer" $WORLD_MODEL
  [ -f "$OUTPUT/world_model/metrics.json" ] || again
fi
[ -z "$estimator" ] || wait "$estimator" || true
[ -f "$OUTPUT/estimator/metrics.json" ] || { say "the estimator is not done: see $OUTPUT/estimator.log"; again; }
rm -rf "$OUTPUT/world"
mkdir -p "$OUTPUT/world"
cp -r "$tokenizer" "$OUTPUT/world_model/world_model" "$OUTPUT/estimator/estimator" "$OUTPUT/world/"
cp "terra/worlds/$WORLD.md" "$OUTPUT/world/README.md"
"$PYTHON" scripts/world_contexts.py --data "$DATA" --output "$OUTPUT/world/contexts" --scenes "$SCENES"
say "done: $OUTPUT/world"
