"""The command `terra replay`: makes a rollout again from its `rollout.json`, and compares tokens and pixels.

The engine, its type and device, the sampling, the seed and the weights are those of the record. Models, adapters and
contexts that ship with Terra are found in the package, unpacked worlds in `worlds_folder`, other files at their
recorded location, beside the record, or where a setting says. All must have the recorded content. Inputs that came from
no file (an upload, a manifest's own paths) are taken from the stored tokens and actions.

Equal tokens may give unequal pixels: decoding with another number of threads rounds otherwise, and a
difference of one level in a few pixels becomes other bytes in H.264.
"""

from terra.replay.command import run

__all__ = ["run"]
