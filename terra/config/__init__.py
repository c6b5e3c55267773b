"""From settings to objects: Hydra composes YAML, pydantic models check, `PipelineSpec` builds.

`files` finds and composes conf/; `groups` has the settings that several commands share, and makes a part of its
`_target_`; `spec` checks a whole pipeline before any weight loads, and loads it. `DictConfig` ends here.
"""
