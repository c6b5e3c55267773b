"""The console scripts without an installation: `python -m terra train data=... output=...`.

Launchers take this form for several processes: `accelerate launch --num_processes 4 --module terra train ...`.
"""

import sys

from terra import cli

COMMANDS = ("generate", "train", "train-tokenizer", "evaluate", "rollout", "serve", "check", "act-bench")


def main() -> None:
    """Run the command named by the first argument on the rest, as `terra-COMMAND` does."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"error: expected python -m terra {{{','.join(COMMANDS)}}} [key=value ...]", file=sys.stderr)
        sys.exit(2)
    name = sys.argv.pop(1)
    sys.argv[0] = f"terra-{name}"
    getattr(cli, name.replace("-", "_"))()


if __name__ == "__main__":
    main()
