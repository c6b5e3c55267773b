"""The commands without an installation: `python -m terra train data=... output=...`.

Launchers take this form for several processes: `accelerate launch --num_processes 4 --module terra train ...`.
"""

from terra.cli import main

if __name__ == "__main__":
    main()
