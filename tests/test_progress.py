"""What a long task says of itself."""

import logging

import pytest

from terra.progress import frames_shown, rollouts_shown


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the progress line reads."""
    now = [0.0]
    monkeypatch.setattr("terra.progress.monotonic", lambda: now[0])
    return now


def test_a_line_every_ten_seconds_names_the_stage(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with rollouts_shown(num_generated=4, num_decoded=6) as shown:
        for generated, decoded in [(1, 3), (1, 1), (2, 0), (0, 1), (0, 1)]:
            clock[0] += 6
            shown(generated, decoded)
    assert capsys.readouterr().out.splitlines() == [
        "generating: 60 %, 2 of 4 frames, 4 of 6 decoded, 0.2 a second, 8 s left",
        "decoding: 90 %, 4 of 4 frames, 5 of 6 decoded, 0.2 a second, 3 s left",
        "decoding: 100 %, 4 of 4 frames, 6 of 6 decoded, 0.1 a second",
    ]


def test_long_times_are_minutes(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with frames_shown("recording", 100) as show:
        clock[0] += 60
        show(0)
        clock[0] += 60
        show(20)
    assert caplog.messages == [
        "recording: 0 %, 0 of 100 frames, 0.0 a second",
        "recording: 20 %, 20 of 100 frames, 0.2 a second, 8.0 min left",
    ]
