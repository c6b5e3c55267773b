"""Turns settings into objects: Hydra composes YAML, pydantic models check, `PipelineSpec` builds.

`files` finds and composes conf/; `groups` has the settings that several commands share, and makes a part of its
`_target_`; `spec` checks a whole pipeline before any weight loads, and loads it. No other package sees a `DictConfig`.
"""
