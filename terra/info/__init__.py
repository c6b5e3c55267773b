"""What `terra info` tells: versions, machine, engines, extras and worlds, for a bug report.

command.py    collects the sections, and prints them
machine.py    Terra, Python, packages, CPU, memory and GPUs
models.py     engines, extras, worlds and adapters
settings.py   the settings of the command
"""
