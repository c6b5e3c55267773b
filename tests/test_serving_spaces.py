"""terra-serve for worlds of vectors, keys and choices: video jobs and live sessions over a fake model."""

import io
import json
import time

import httpx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("fastapi", reason="needs terra's extra serve")
from PIL import Image
from safetensors.torch import load
from serving_fake import CHOICE, DRIVING, KEYS, VECTOR, fake
from tiny_serving import Talk

from terra.actions import Choice, Keys, TableSpace, Vector
from terra.errors import ActionError
from terra.serving.client import Client, ServerError
from terra.serving.messages import Act, MessageError, read_message

# An action of each space, another one, and wrong ones with what their refusal says.
ACTIONS = {
    "vector": ({"pan": 0.5, "lift": 1.0, "grip": 0.0}, {"pan": -1.5, "lift": 2.0, "grip": 1.0}),
    "keys": (["forward", "left"], []),
    "choice": ("up_left", "fire"),
}
WRONG = {
    "vector": [
        ({"pan": 0.5, "lift": 1.0}, "expected pan, lift, grip, each once, got pan, lift"),
        ({"pan": 0.5, "lift": 1.0, "grip": 0.0, "x": 1}, "expected pan, lift, grip, each once"),
        ([0.5, 1.0], "expected 3 numbers (pan, lift, grip), got 2"),
        ([0.5, 2.5, 0.0], "lift: expected 0 to 2 m, got 2.5"),
        ([0.5, "1", 0.0], "lift: expected a number"),
        ([True, 1, 0], "pan: expected a number"),
        ([10**400, 1, 0], "pan: expected"),
        (["forward"], "expected 3 numbers"),
        (None, "action"),
    ],
    "keys": [
        (["forward", "jump"], "expected keys of forward, back, left, right, fire, got 'jump'"),
        ("forward", "expected a list"),
        ({"forward": 1}, "expected a list"),
        ([1, 0], "expected text"),
        ([["forward"]], "expected text"),
        (0.5, "expected a list"),
    ],
    "choice": [
        ("jump", "expected one of noop, up, right"),
        (["up"], "expected one of noop, up, right"),
        (1, "expected one of noop, up, right"),
        ({}, "expected one of noop, up, right"),
        (None, "expected one of noop, up, right"),
    ],
}


@pytest.fixture(scope="module", params=[VECTOR, KEYS, CHOICE], ids=lambda space: space.kind)
def served(request, tmp_path_factory):
    serving = fake(tmp_path_factory.mktemp("serving"), request.param, seconds_a_frame=0.0)
    yield serving
    serving.stop()


@pytest.fixture(scope="module")
def driven(tmp_path_factory):
    serving = fake(tmp_path_factory.mktemp("driven"), DRIVING, seconds_a_frame=0.0)
    yield serving
    serving.stop()


@pytest.fixture
def space(served) -> TableSpace:
    return served.service.model.spec.space


def document(space: TableSpace, count: int = 12) -> dict:
    """Actions that change with each frame."""
    one, other = ACTIONS[space.kind]
    actions = [one if index % 3 else other for index in range(count)]
    declared = space.model_dump(mode="json")
    return {"format": "terra-actions", "version": 1, "space": declared, "fps": 10, "actions": actions}


def rows_of(space: TableSpace, actions: list) -> np.ndarray:
    return space.rows(np.array([space.from_json(each, "test") for each in actions]))


def refusal(answer: httpx.Response) -> dict:
    assert answer.status_code == 400
    return answer.json()["error"]


class TestHttp:
    def test_the_model_tells_its_space(self, served, space):
        (card,) = httpx.get(f"{served.url}/v1/models").json()["data"]
        assert card["action_space"] == space.model_dump(mode="json")

    def test_scenes_have_actions(self, served, space):
        listed = httpx.get(f"{served.url}/v1/scenes").json()["data"]
        assert listed[0] == {"id": "room", "num_frames": 3, "actions": ["look"]}
        given = httpx.get(f"{served.url}/v1/scenes/room/actions/look").json()
        assert (given["format"], given["space"]) == ("terra-actions", space.model_dump(mode="json"))
        assert httpx.get(f"{served.url}/v1/scenes/room/actions/none").status_code == 404

    def test_a_job_keeps_its_actions(self, served, space, tmp_path):
        given = document(space)
        with Client(served.url) as client:
            made = client.create_video(scene="room", actions=given, num_frames=9)
            client.wait(made["id"], timeout=60, every=0.02)
            tensors = load(client.download(made["id"], tmp_path / "tokens.safetensors", "tokens").read_bytes())
            named = client.create_video(scene="room", actions_name="look", num_frames=9)
            client.wait(named["id"], timeout=60, every=0.02)
        np.testing.assert_allclose(tensors["actions"].numpy(), rows_of(space, given["actions"][:8]), atol=1e-6)

    def test_a_form(self, served, space):
        data = {"context": "none", "actions": json.dumps(document(space)), "num_frames": "9"}
        answer = httpx.post(f"{served.url}/v1/videos", data=data, files={"x": b""})
        assert answer.json()["error"]["code"] == "invalid_request"  # x is no field
        picture = io.BytesIO()
        Image.new("RGB", (256, 144)).save(picture, "PNG")
        files = [("input_reference", (f"{index}.png", picture.getvalue())) for index in range(3)]
        data = {"actions": json.dumps(document(space)), "num_frames": "9"}
        assert httpx.post(f"{served.url}/v1/videos", data=data, files=files).status_code == 200

    def test_what_does_not_fit(self, served, space):
        other = KEYS if isinstance(space, Choice) else CHOICE
        given = document(space)
        wrong, message = WRONG[space.kind][0]
        instead = ("trajectory: expected actions", space.title)
        for changes, field, said in [
            ({"trajectory": {"format": "terra-trajectory"}}, "trajectory", instead),
            ({"trajectory_name": "look"}, "trajectory", instead),
            ({"actions": document(other)}, "actions", (f"model's {space.title}", f"got {other.title}")),
            ({"actions": given | {"actions": [wrong]}}, "actions", ("actions: actions[0]: ", message)),
            ({"actions": document(space, 4)}, "actions", ("actions: covers 0.4 s",)),
            ({"actions": given | {"actions": []}}, "actions", ("actions: expected rows of actions, got none",)),
            ({"actions": given | {"fps": 0}}, "actions", ("actions: fps",)),
            ({"actions": given | {"more": 1}}, "actions", ("actions: expected", "'more'")),
            ({"actions": given | {"actions": [None] * 36_001}}, "actions", ("actions: expected at most 36000, got",)),
            ({"actions": {}}, "actions", ("actions: expected format terra-actions version 1",)),
        ]:
            answer = httpx.post(f"{served.url}/v1/videos", json={"scene": "room", "num_frames": 9, **changes})
            error = refusal(answer)
            assert (error["code"], error["param"]) == (f"invalid_{field}", field)
            assert all(each in error["message"] for each in said), error["message"]
        for changes in ({}, {"actions": given, "actions_name": "look"}, {"actions_name": "look", "scene": None}):
            answer = httpx.post(f"{served.url}/v1/videos", json={"scene": "room", **changes})
            assert refusal(answer)["code"] == "invalid_request"
        missing = httpx.post(f"{served.url}/v1/videos", json={"scene": "room", "actions_name": "none"})
        assert missing.status_code == 404

    def test_a_driven_model_takes_no_actions(self, driven):
        for changes in ({"actions": document(KEYS)}, {"actions_name": "left"}):
            error = refusal(httpx.post(f"{driven.url}/v1/videos", json={"scene": "day", **changes}))
            assert (error["code"], error["param"]) == ("invalid_actions", "actions")
            assert "expected trajectory in its place, for the model's waypoints at" in error["message"]


def the_same(space: TableSpace, one: object, other: object) -> bool:
    return bool(np.allclose(space.from_json(one, "one"), space.from_json(other, "other"), atol=1e-6))


class TestLive:
    def test_each_frame_has_the_last_action(self, served, space):
        one, other = ACTIONS[space.kind]
        with served.open(scene="room") as talk:
            assert talk.opened["action_space"] == space.model_dump(mode="json")
            assert "camera" not in talk.opened
            neutral = talk.opened["neutral"]
            assert [frame["action"] is None for frame in talk.context] == [True, False, False]
            assert "pose" not in talk.context[0]
            talk.say(type="pause")
            talk.hear("paused")
            assert the_same(space, talk.step()["action"], neutral)
            talk.say(type="act", action=one)
            assert all(the_same(space, talk.step()["action"], one) for _ in range(3))
            talk.say(type="act", action=other)
            assert the_same(space, talk.step()["action"], other)
            (session,) = served.service.sessions.values()
            made = [moment.action for moment in session.rollout.moments[-4:]]
            np.testing.assert_array_equal(made, rows_of(space, [one, one, one, other]))

    def test_an_act_starts_a_session_and_is_held(self, served, space):
        one, _ = ACTIONS[space.kind]
        with served.open(scene="room") as talk:
            talk.say(type="act", action=one)
            talk.hear("resumed")
            assert all(the_same(space, frame["action"], one) for frame in talk.drive(5))

    def test_actions_of_the_context(self, served, space):
        one, other = ACTIONS[space.kind]
        with served.open(scene="room", actions=[one, other]) as talk:
            assert the_same(space, talk.context[1]["action"], one)
            assert the_same(space, talk.context[2]["action"], other)

    def test_rewound_and_forked_it_makes_the_same_again(self, served, space):
        one, other = ACTIONS[space.kind]
        with Client(served.url) as client, client.open(scene="room", format="png") as drive:
            first = [drive.step(action=one if index % 2 else other) for index in range(6)]
            assert drive.rewind(4).picture == first[1].picture
            held = drive.step()  # the action that was held there
            assert the_same(space, held.header["action"], one)
            drive.rewind(4)
            again = [drive.step(action=one if index % 2 else other) for index in range(2, 6)]
            assert [frame.picture for frame in again] == [frame.picture for frame in first[2:]]
            with client.open(fork=drive.fork(5), format="png") as fork:
                assert fork.step(action=one).picture == first[3].picture

    def test_headers_actions_give_the_same_rows(self, served, space):
        one, other = ACTIONS[space.kind]
        with served.open(scene="room") as talk:
            talk.say(type="pause")
            talk.hear("paused")
            for action in (one, other):
                talk.say(type="act", action=action)
                told = talk.step()["action"]
                np.testing.assert_array_equal(rows_of(space, [told]), rows_of(space, [action]))

    def test_mistakes_are_told_and_the_session_goes_on(self, served, space):
        one, _ = ACTIONS[space.kind]
        with served.open(scene="room") as talk:
            for wrong, said in WRONG[space.kind]:
                talk.socket.send(json.dumps({"type": "act", "action": wrong}))
                error = talk.hear("error")
                assert error["code"] in ("invalid_action", "invalid_message")
                assert said in error["message"]
                assert "\n" not in error["message"]
            for order in (
                {"type": "control", "steering": 0.1, "speed": 3.0},
                {"type": "path", "points": [[1, 0]], "times": [1]},
                {"type": "step", "action": [[0, 1, 0.5]]},
            ):
                talk.say(**order)
                error = talk.hear("error")
                assert error["code"] == "invalid_action"
                assert space.title in error["message"]
            talk.say(type="act")
            assert talk.hear("error")["code"] == "invalid_message"
            talk.say(type="act", action=one)
            talk.hear("resumed")
            assert the_same(space, talk.frame()["action"], one)

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"speed": 3.0}, "invalid_message"),
            ({"actions": []}, "invalid_actions"),
            ({"actions": [[[0, 1, 0.5]]] * 2}, "invalid_actions"),
            ({"actions": ["jump", "jump"]}, "invalid_actions"),
        ],
    )
    def test_what_does_not_open(self, served, space, changes, code):
        with Client(served.url) as client, pytest.raises(ServerError) as refused:
            client.open(scene="room", **changes)
        assert refused.value.code == code

    def test_a_client_that_steers(self, served, space):
        refused = pytest.raises(ServerError, match="control: expected act, for the model's")
        with Client(served.url) as client, client.open(scene="room") as drive, refused:
            drive.step(steering=0.1, speed=3.0)

    def test_a_driven_model_takes_no_act(self, driven):
        with driven.open(scene="day") as talk:
            assert talk.opened["action_space"] == DRIVING.model_dump(mode="json")
            assert "neutral" not in talk.opened
            assert talk.opened["camera"]
            talk.say(type="act", action=["forward"])
            error = talk.hear("error")
            assert error["code"] == "invalid_action"
            assert "expected control or path, for the model's waypoints" in error["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(KEYS.names),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(JSON | st.lists(st.sampled_from(KEYS.names)) | st.sampled_from(CHOICE.names))
def test_an_act_is_read_as_json_has_it(action):
    text = json.dumps({"type": "act", "action": action})
    try:
        message = read_message(text)
    except MessageError:
        return
    assert isinstance(message, Act)
    assert json.dumps(message.action) == json.dumps(action)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(["act", "step", "rewind", "pause", "resume"]), JSON), max_size=8))
def test_no_act_breaks_a_session(served, messages):
    with served.open(scene="room") as talk:
        for kind, value in messages:
            name = "frame" if kind == "rewind" else "action"
            talk.socket.send(
                json.dumps({"type": kind, name: value} if kind in ("act", "step", "rewind") else {"type": kind})
            )
        talk.say(type="fork", frame=2)
        talk.say(type="close")
        assert closing(talk) == "client"


def closing(talk: Talk) -> str:
    deadline = time.monotonic() + 30
    kinds = set()
    while (message := talk.listen())["type"] != "closed":
        kinds.add(message["type"])
        assert time.monotonic() < deadline
    assert "forked" in kinds
    return message["reason"]


@given(st.data())
def test_values_survive_the_models_rows(data):
    """What a header tells of an action is again an action of the space."""
    low = data.draw(st.floats(-1e6, 1e6))
    space = Vector(names=["x"], units=[""], low=[low], high=[low + data.draw(st.floats(1e-3, 1e6))])
    value = data.draw(st.floats(space.low[0], space.high[0]))
    told = space.to_json(space.values(space.rows(np.array([[value]])))[0])
    np.testing.assert_allclose(space.from_json(told, "told"), [value], atol=1e-6 * (space.high[0] - low))


def test_keys_are_a_set():
    assert isinstance(KEYS, Keys)
    np.testing.assert_array_equal(KEYS.from_json(["fire", "left"], "x"), KEYS.from_json(["left", "fire"], "x"))
    with pytest.raises(ActionError, match=r"x: expected each key once, got \['fire', 'fire'\]"):
        KEYS.from_json(["fire", "fire"], "x")
