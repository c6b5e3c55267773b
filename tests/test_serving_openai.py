"""OpenAI's own client makes, polls, lists, downloads and deletes videos of terra-serve."""

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai.types import Video
from tiny import COLS, ROWS
from tiny_serving import KEY, FailingEngine, Served

from decoder.video import probe_video
from terra.engine.persistence import PersistenceEngine

pytest_plugins = ["serving_fixtures"]
# The client's methods for videos say that OpenAI's own service of them ends.
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API is scheduled:DeprecationWarning")

SIZE = f"{4 * COLS}x{4 * ROWS}"
OURS = {"scene": "day", "trajectory_name": "left", "seed": 3}


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def make(client: openai.OpenAI, **changes) -> Video:
    given = {"prompt": "a left turn", "extra_body": OURS, "poll_interval_ms": 20} | changes
    return client.videos.create_and_poll(**given)


def as_declared(video: Video) -> None:
    """Fail where a field has not the type that the client's model declares; the client itself checks none."""
    assert isinstance(video.size, str)
    given = video.model_dump(include=set(Video.model_fields), warnings=False)
    Video.model_validate(given | {"size": "720x1280"}, strict=True)  # `size` lists those of OpenAI's models alone


class TestVideos:
    def test_from_prompt_to_file(self, client, tmp_path):
        made = make(client, model="terra-demo", seconds="1.2", size=SIZE)
        as_declared(made)
        assert (made.status, made.progress, made.error, made.prompt) == ("completed", 100, None, None)
        assert (made.model, made.size, made.seconds) == ("terra-demo", SIZE, "1.2")
        assert made.created_at <= made.completed_at < made.expires_at
        client.videos.download_content(made.id).write_to_file(tmp_path / "left.mp4")
        assert probe_video(tmp_path / "left.mp4").num_frames == 12
        assert client.videos.retrieve(made.id) == made

    def test_without_waiting(self, client):
        queued = client.videos.create(prompt="a left turn", extra_body=OURS)
        as_declared(queued)
        assert queued.status in ("queued", "in_progress")
        assert client.videos.poll(queued.id, poll_interval_ms=20).status == "completed"

    def test_the_prompt_changes_nothing(self, client):
        tokens = [
            client.videos.download_content(make(client, prompt=prompt).id, extra_query={"variant": "tokens"}).read()
            for prompt in ("a left turn", "snow", "")
        ]
        assert tokens[0] == tokens[1] == tokens[2]

    def test_a_file_and_a_trajectory(self, client, scenes):
        ours = {"trajectory": (scenes / "day" / "left.json").read_text(), "num_frames": 5}
        made = make(client, input_reference=scenes / "day" / "2.png", extra_body=ours)
        assert (made.status, made.seconds, made.num_context) == ("completed", "0.5", 1)

    def test_listed_in_pages_and_deleted(self, client):
        made = [make(client).id for _ in range(3)]
        listed = []
        for video in client.videos.list(limit=2):  # the client asks for the next page itself
            as_declared(video)
            listed.append(video.id)
        assert listed[:3] == made[::-1]
        gone = client.videos.delete(made[0])
        assert (gone.id, gone.deleted, gone.object) == (made[0], True, "video.deleted")
        with pytest.raises(openai.NotFoundError, match="expected the id of an existing video"):
            client.videos.retrieve(made[0])

    def test_models(self, client):
        (card,) = client.models.list()
        assert (card.id, card.object, card.owned_by) == ("terra-demo", "model", "terra")

    def test_the_async_client(self, server):
        async def both() -> list[Video]:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                make = client.videos.create_and_poll
                return await asyncio.gather(
                    *(make(prompt="", extra_body=OURS | {"seed": seed}, poll_interval_ms=20) for seed in (1, 2))
                )

        made = asyncio.run(both())
        assert [(each.status, each.seed) for each in made] == [("completed", 1), ("completed", 2)]


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "param", "message"),
        [
            ({"size": "1280x720"}, "size", f"size: expected {SIZE}, the model's, got 1280x720"),
            ({"seconds": "8"}, "seconds", "seconds: expected at most 40 frames at 10 frames/s, got 80"),
            ({"seconds": "long"}, "seconds", "could not convert string to float"),
            ({"seconds": "0"}, "seconds", "greater than 0"),
            ({"seconds": "0.3"}, "num_frames", "expected more than num_context=3, got 3"),
            ({"seconds": "1", "extra_body": OURS | {"num_frames": 6}}, None, "one of num_frames and seconds"),
            ({"extra_body": {"scene": "day"}}, None, "expected one of trajectory"),
            ({"extra_body": {"trajectory": {"format": "x"}}}, "trajectory", "expected JSON text in one part"),
            ({"extra_body": {"trajectory": {"a": [*range(50)]}}}, None, "as JSON text, each in one part"),
            ({"extra_body": {"input_reference": {"image_url": "x"}}}, "input_reference", "expected a file, got a part"),
        ],
    )
    def test_what_the_client_can_ask_for(self, client, changes, param, message):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            make(client, **changes)
        assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)

    def test_another_model(self, client):
        with pytest.raises(openai.NotFoundError, match="expected terra-demo, the model that is served"):
            make(client, model="sora-2")

    def test_an_unknown_scene_or_trajectory(self, client):
        with pytest.raises(openai.NotFoundError, match="scene: expected one of day, night"):
            make(client, extra_body=OURS | {"scene": "noon"})
        with pytest.raises(openai.NotFoundError, match="trajectory: expected one of left, straight"):
            make(client, extra_body=OURS | {"trajectory_name": "back"})

    def test_no_edits(self, client):
        made = make(client).id
        asked = {
            "remix": lambda: client.videos.remix(made, prompt="snow"),
            "edits": lambda: client.videos.edit(prompt="snow", video=b"mp4"),
            "extensions": lambda: client.videos.extend(prompt="snow", seconds="4", video=b"mp4"),
            "characters": lambda: client.videos.get_character("char_1"),
        }
        for name, call in asked.items():
            with pytest.raises(openai.BadRequestError, match=f"expected a new video .*, got {name}") as caught:
                call()
            assert caught.value.code == "unsupported"

    def test_no_thumbnail(self, client):
        with pytest.raises(openai.BadRequestError, match=r"variant: .*'video', 'gif' or 'tokens'"):
            client.videos.download_content(make(client).id, variant="thumbnail")

    def test_a_failed_job(self, tiny_model, tiny_tokenizer, scenes, tmp_path):
        engine = FailingEngine(PersistenceEngine.from_pretrained(tiny_model).spec)
        engine.release()
        with (
            Served(tiny_model, tiny_tokenizer, scenes, tmp_path, engine=engine) as served,
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
        ):
            made = make(client)
        as_declared(made)
        assert (made.status, made.error.code) == ("failed", "engine_error")

    def test_a_wrong_key(self, tiny_model, tiny_tokenizer, scenes, tmp_path):
        with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True, api_key=KEY) as locked:
            url = f"{locked.url}/v1"
            wrong = openai.OpenAI(base_url=url, api_key="wrong", max_retries=0)
            with wrong, pytest.raises(openai.AuthenticationError):
                wrong.videos.list()
            with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as right:
                assert make(right).status == "completed"
