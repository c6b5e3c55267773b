"""Records episodes of a Gymnasium environment: pictures, actions, and the state that the environment tells."""

import logging
import re
from collections.abc import Callable
from typing import Any, Self

from pydantic import Field

from terra.actions import TableSpace
from terra.dataset.format import FramesASecond
from terra.dataset.importing.fitting import crop_box, fit_picture
from terra.dataset.writing import ShardWriter, create_dataset
from terra.recording.gym_world import GymWorld, Play, load_policy
from terra.recording.record import MAX_EPISODES, Recording
from terra.recording.step_rate import StepRate
from tokenizer.settings import Text, checked

logger = logging.getLogger(__name__)

# Most of a recording's time was x264's: this preset is 4.5 times as fast as "medium", and doom's pictures lose 0.4 dB.
_PRESET = "superfast"


class GymSettings(Recording):
    """Settings of a recording of an environment. Episode e of place p is reset with the seed 100 p + e.

    Attributes:
        env, env_options: the environment, see `GymWorld`.
        policy: what acts, see `load_policy`.
        space: what the actions mean.
        fps: pictures a second, one for each step.
    """

    env: Text
    env_options: dict[str, Any]
    policy: Text
    space: TableSpace = Field(discriminator="kind")
    fps: FramesASecond

    @classmethod
    def of_world(
        cls,
        *,
        action_names: tuple[str, ...] | None,
        action_space: dict[str, Any] | None,
        fps: float | None,
        **values: Any,
    ) -> Self:
        """Settings with the space and the rate of the environment itself, of which one frame is tried.

        A line says what the rate was taken from.

        Args:
            action_names, action_space: see `GymWorld`.
            fps: pictures a second; None takes the environment's steps a second (`terra.recording.step_rate`).
            values: the other fields.

        Raises:
            ConfigError: an environment or a policy that can't be used, or no rate.
        """
        load_policy(values["policy"])
        world = GymWorld(values["env"], values["env_options"], action_names, action_space)
        try:
            size, steps = world.picture_size, world.step_rate
        finally:
            world.close()
        where = f"fps: env={values['env']} has steps by {steps.told_by}; fps="
        rate = fps if fps is not None else checked(FramesASecond, steps.per_second, where)
        settings = cls(**values, space=world.space, fps=float(rate))
        left, top, right, bottom = crop_box(size, settings.image_size, None)
        logger.info(
            "%s: %s; pictures of %d x %d pixels, of which %.0f x %.0f about the middle are kept",
            *(settings.env, settings.space.title, size[1], size[0], right - left, bottom - top),
        )
        _say_rate(settings.env, settings.fps, steps, is_given=fps is not None)
        return settings

    @property
    def source(self) -> str:
        """The environment's name without its module and namespace, in characters that files may have."""
        return re.sub(r"[^A-Za-z0-9._-]", "-", re.split("[:/]", self.env)[-1])

    def create(self) -> None:
        """Write dataset.json, or compare with the one that is there. Raises DatasetError, OutputError."""
        notice = f"pictures of the Gymnasium environment {self.env}; the terms of its makers go for them"
        create_dataset(self.output, self.fps, self.image_size, self.source, notice, self.space)

    def writer(self, place: str) -> ShardWriter:
        """The writer of a place's shard."""
        return ShardWriter(
            self.output,
            split=self.split,
            source=self.source,
            place=place,
            fps=self.fps,
            image_size=self.image_size,
            camera=None,
            recipe={
                "env": self.env,
                "env_options": self.env_options,
                "policy": self.policy,
                "episodes": self.episodes_per_place,
                "frames_per_episode": self.frames_per_episode,
            },
            space=self.space,
            preset=_PRESET,
        )

    def record_place(self, place: str, worker: int, advance: Callable[[int], None]) -> None:
        """Record the episodes of one place; call `advance` with the number of frames of each."""
        policy, held_frames = load_policy(self.policy)
        world = GymWorld(self.env, self.env_options, action_space=self.space.model_dump(mode="json"))
        try:
            with self.writer(place) as writer:
                left_out = 0
                for number in range(self.episodes_per_place):
                    seed = int(place) * MAX_EPISODES + number
                    play = Play(world, policy, held_frames, seed, self.frames_per_episode)
                    frames = (fit_picture(frame, self.image_size, None) for frame in play.frames())
                    name = f"{writer.name_prefix}_{number:02d}"
                    advance(writer.add(name, frames, play.actions, state=play.state))
                    left_out += play.left_out
                if left_out:
                    logger.info(
                        "%s: the last step of %d of %d episodes is left out: there is no picture after their end",
                        *(writer.name_prefix, left_out, self.episodes_per_place),
                    )
        finally:
            world.close()


def _say_rate(env: str, fps: float, steps: StepRate, *, is_given: bool) -> None:
    """Say in one line which rate the frames have, what it was taken from, and how to set another."""
    if not is_given and steps.is_known:
        logger.info("%s: %g frames/s, one a step: %s; fps= sets another", env, fps, steps.told_by)
    elif not is_given:
        logger.warning(
            "%s: %g frames/s, as %s says. That is the rate of showing, and nothing tells the rate of steps; "
            "fps= sets another",
            *(env, fps, steps.told_by),
        )
    elif steps.is_known and abs(steps.per_second - fps) > 1e-3 * fps:
        logger.warning(
            "%s: %g frames/s, as fps= says; by %s there are %g steps/s",
            *(env, fps, steps.told_by, steps.per_second),
        )
