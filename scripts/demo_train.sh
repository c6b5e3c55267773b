#!/usr/bin/env bash
# Train the weights that ship, from nothing: record, tokenizer, tokens, motion estimator, world model, sharper decoder.
#
#     OUTPUT=outputs/demo_training GPUS=4 LIMIT=560 bash scripts/demo_train.sh
#
# Every stage keeps what it has and goes on from there: LIMIT is how many seconds this call may take. Exit code: 0 all is done, 75 run it again. GPUS=0 trains on the CPU.
# Settings for the models: TOKENIZER, WORLD_MODEL, ESTIMATOR, DECODER ("key=value key=value").
set -euo pipefail
cd "$(dirname "$0")/.."
OUTPUT=${OUTPUT:-outputs/demo_training}
GPUS=${GPUS:-1}
FIRST_TOWNS=${FIRST_TOWNS:-320} # recorded before the tokenizer's training begins
TOWNS=${TOWNS:-1400}            # in all; the rest is recorded while the tokenizer trains
HELD_OUT_TOWNS=${HELD_OUT_TOWNS:-24}
FUTURES=${FUTURES:-64}
FRAMES=${FRAMES:-300}
RECORD=${RECORD:-}
TOKENIZER=${TOKENIZER:-}
WORLD_MODEL=${WORLD_MODEL:-}
ESTIMATOR=${ESTIMATOR:-}
DECODER=${DECODER:-}
DATA=$OUTPUT/town
source scripts/stages.sh
record() { "$PYTHON" -m terra record output="$DATA" workers="$WORKERS" max_seconds="$(left)" $RECORD "$@"; }

say "recording"
record split=held_out towns="$HELD_OUT_TOWNS" episodes_per_place=1 frames_per_episode="$FRAMES"
record split=held_out kind=counterfactuals seed=1000 towns="$FUTURES" episodes_per_place=1 frames_per_episode=70
record split=train towns="$FIRST_TOWNS" episodes_per_place=3 frames_per_episode="$FRAMES"
nice -n 15 "$PYTHON" -m terra record output="$DATA" workers="$WORKERS" max_seconds="$(left)" $RECORD \
  split=train towns="$TOWNS" episodes_per_place=3 frames_per_episode="$FRAMES" >"$OUTPUT/recording.log" 2>&1 &
recorder=$!
estimator=

if [ ! -f "$OUTPUT/tokenizer/metrics.json" ]; then
  say "tokenizer"
  module terra train-tokenizer data="$DATA" output="$OUTPUT/tokenizer" recipe=tokenizer_town device="$DEVICE" workers="$EACH" $TOKENIZER
  [ -f "$OUTPUT/tokenizer/metrics.json" ] || again
fi
say "waiting for the recorder"
while kill -0 $recorder 2>/dev/null; do [ "$(left)" -gt 5 ] || again; sleep 1; done

if [ ! -f "$OUTPUT/estimator/metrics.json" ]; then
  say "motion estimator, beside what follows"
  aside within "$PYTHON" -m terra train-estimator data="$DATA" output="$OUTPUT/estimator" checkpoint="$OUTPUT/tokenizer/tokenizer" \
    device="$DEVICE" workers="$EACH" $ESTIMATOR >"$OUTPUT/estimator.log" 2>&1
  estimator=$!
fi
say "tokens"
module terra tokenize data="$DATA" checkpoint="$OUTPUT/tokenizer/tokenizer" output="$OUTPUT/tokens" \
  device="$DEVICE" dtype="$([ "$DEVICE" = cuda ] && echo bfloat16 || echo float32)" workers="$EACH"

if [ ! -f "$OUTPUT/world_model/metrics.json" ]; then
  say "world model"
  module terra train data="$OUTPUT/tokens" output="$OUTPUT/world_model" recipe=world_model_town device="$DEVICE" \
    preview_tokenizer="$OUTPUT/tokenizer/tokenizer" $WORLD_MODEL
  [ -f "$OUTPUT/world_model/metrics.json" ] || again
fi
if [ ! -f "$OUTPUT/decoder/metrics.json" ]; then
  say "the tokenizer's decoder, alone"
  module terra train-tokenizer data="$DATA" output="$OUTPUT/decoder" recipe=tokenizer_town_decoder \
    decoder_of="$OUTPUT/tokenizer/tokenizer" device="$DEVICE" workers="$EACH" $DECODER
  [ -f "$OUTPUT/decoder/metrics.json" ] || again
fi
[ -z "$estimator" ] || wait "$estimator" || true
[ -f "$OUTPUT/estimator/metrics.json" ] || { say "the motion estimator is not done: see $OUTPUT/estimator.log"; again; }
say "done: $OUTPUT/decoder/tokenizer, $OUTPUT/world_model/world_model, $OUTPUT/estimator/estimator"
