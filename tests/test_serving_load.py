"""scripts/serving_load.py and serving_overhead.py: what they see of a good server and of bad ones."""

import asyncio
import json
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import httpx
import pytest
import torch
from entry import load_script
from safetensors.torch import save_file
from tiny_serving import wait_until
from websockets.sync.server import serve

from terra.benchmark.model import SHAPES
from terra.benchmark.passes import Kernel
from terra.engine.base import EngineCounters
from terra.errors import ConfigError
from terra.serving.messages import frame_message
from terra.serving.metrics import Metrics
from terra.world_model import LlamaActionConfig

pytest_plugins = ["serving_fixtures"]

script = load_script("serving_load")


@pytest.fixture
def faulty():
    """Loses a frame, sends one twice, and breaks off."""

    def talk(session):
        session.recv()
        session.send(json.dumps({"type": "opened"}))
        session.recv()  # a key
        for index in (0, 1, 3, 4, 4):
            session.send(
                frame_message({"index": index, "generated": index > 1, "latency_ms": 2.0, "action": [[0, 1, 0.1]]}, b"")
            )
            session.recv()
        session.close()

    with serve(talk, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield script.Target(f"http://127.0.0.1:{server.socket.getsockname()[1]}", "", "day")
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_a_good_server(server):
    target = script.Target(server.url, "", "day")
    bar = script.frames_bar(asyncio.run(script.drive_all(target, 3, 1.0)), 3, 1.0)
    assert bar["ok"], bar
    bar = asyncio.run(script.cycles_part(target, 20))
    assert bar["after"]["sessions"] == 0
    assert bar["after"]["tasks"] == bar["before"]["tasks"]
    assert not bar["failures"]
    samples, answers = script.probe(target, 0.5)
    assert samples[0]["memory_mib"] > 1
    assert all(answers.values())


def test_lost_and_repeated_frames_are_seen(faulty):
    tally = asyncio.run(script.drive_all(faulty, 2, 30.0))
    assert (tally.frames, tally.disorder, tally.failures.total()) == (6, 4, 2)
    assert not script.frames_bar(tally, 2, 30.0)["ok"]


def test_a_server_that_refuses(server):
    tally = asyncio.run(script.drive_all(script.Target(server.url, "", "none"), 2, 1.0))
    assert tally.failures == {"scene: expected one of day, night": 2}


@pytest.mark.parametrize(("slope", "left", "ok"), [(0.0, 0, True), (0.9, 2, True), (1.1, 0, False), (0.0, 3, False)])
def test_memory_that_grows_after_the_first_third_and_files_that_stay(slope, left, ok):
    memory = [500 + max(0, 20 - at) + slope * at / 60 for at in range(60)]
    samples = [{"at": float(at), "memory_mib": each} for at, each in enumerate(memory)]
    assert script.memory_bar(samples, 60.0, {"files": 20.0}, {"files": 20.0 + left})["ok"] is ok


def test_what_fails_beside_the_drives_is_counted(faulty, tmp_path):
    counts = script.use_all(faulty, 0.1, tmp_path)
    assert not script.others_bar(counts)["ok"]
    assert any(name.startswith("failed") for name in counts)
    assert script.others_bar(Counter(rounds=2))["ok"]
    assert not script.others_bar(Counter({"rounds": 2, "wrong frames": 1}))["ok"]


def test_one_slow_route_misses_the_bar():
    answers = {"/health": [0.001] * 100, "/v1/videos": [0.001] * 97 + [0.2] * 3}
    assert not script.routes_bar(answers)["ok"]
    assert script.routes_bar({"/health": [0.001] * 100, "/": [0.09] * 100})["ok"]


def test_overhead_is_told_against_both():
    overhead = load_script("serving_overhead")
    found = overhead.report({"live": [0.120] * 5, "bare": [0.100] * 5, "shown": [0.106] * 5})
    assert found["ok"]
    assert (found["added_ms"], found["added_to_bare_ms"]) == (pytest.approx(14), pytest.approx(20))
    assert not overhead.report({"live": [0.122] * 5, "bare": [0.1] * 5, "shown": [0.106] * 5})["ok"]


@pytest.mark.slow
def test_drives_are_measured_from_key_to_picture(server):
    target = script.Target(server.url, "", "day")
    row = script.drives_row(asyncio.run(script.drive_all(target, 2, 3.0)), cpu_seconds=0.5, passes=0.0, busy=[])
    assert row["ok"], row
    assert len(row["frames_per_second"]) == 2
    assert row["key_to_picture_ms"]["count"] > 0
    assert row["gpu_idle_percent"] is None
    assert script.counts("1,4") == [1, 4]


def test_how_busy_a_gpu_is_comes_from_nvidia_smi(tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nprintf '0\\n0\\n0\\n0\\n0\\n60\\n[N/A]\\n80\\n'\n: > $0.printed\nexec sleep 60\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    busy = script.GpuBusy()
    wait_until((tmp_path / "nvidia-smi.printed").exists)
    assert busy.stop() == [60.0, 80.0]
    monkeypatch.setenv("PATH", "")
    assert script.GpuBusy().stop() == []


def test_passes_are_read_from_a_servers_metrics():
    engine = SimpleNamespace(counters=EngineCounters(passes=(0, 3, 2)), failure=None)

    async def text():
        return Metrics().text(engine, {})

    answers = httpx.MockTransport(lambda request: httpx.Response(200, content=asyncio.run(text())))
    with httpx.Client(transport=answers, base_url="http://server") as http:
        assert script.read_metrics(http)["passes"] == 5.0


def test_a_drive_with_lost_frames_is_no_measurement(faulty):
    tally = asyncio.run(script.drive_all(faulty, 1, 30.0))
    row = script.drives_row(tally, cpu_seconds=0.3, passes=12.0, busy=[60.0, 80.0])
    assert not row["ok"]
    assert (row["frames"], row["cpu_ms_a_frame"], row["gpu_idle_percent"]) == (3, 100.0, 30.0)
    assert row["passes_a_frame"] == 4.0


@pytest.mark.slow
def test_drivers_without_a_server_are_measured(tmp_path, monkeypatch, capsys):
    given = ["experiment=demo", "engine=persistence", "device=cpu"]
    report = tmp_path / "drivers.json"
    options = ["--drivers", "2", "--seconds", "3", "--warm", "1", "--output", str(report)]
    monkeypatch.setattr(sys, "argv", ["x", *options, *given])
    load_script("drivers_benchmark").main()
    found = json.loads(report.read_text())
    assert len(found["frames_per_second"]) == found["drivers"] == 2
    assert 0.0 < found["least"] <= found["most"] < found["all"] == pytest.approx(sum(found["frames_per_second"]))
    assert found["gpu"] is None
    assert "frames/s each" in capsys.readouterr().out


def test_what_a_gpu_did_beside_drivers():
    kernels = [Kernel("_gemm", 0.0, 30.0), Kernel("copy", 20.0, 40.0), Kernel("_gemm", 50.0, 100.0)]
    found = load_script("drivers_benchmark").used(kernels)
    assert (found["idle_percent"], found["longest_ms"]) == (10.0, 0.01)
    assert found["kernel_percent"] == {"_gemm": 80.0, "copy": 20.0}

    with pytest.raises(ConfigError, match="--trace: expected kernels of a GPU, found none"):
        load_script("drivers_benchmark").used([])


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU to trace")
def test_a_trace_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--trace", "1", "experiment=demo", "engine=persistence", "device=cpu"])
    with pytest.raises(SystemExit, match="2"):
        load_script("drivers_benchmark").main()
    assert "--trace: expected a CUDA GPU, found none" in capsys.readouterr().err


def test_futures_of_one_context_are_timed(tmp_path, monkeypatch, capsys):
    size = ["--shape", "tiny", "--futures", "3", "--context", "2", "--frames", "2", "--rounds", "2"]
    where = ["--output", str(tmp_path), "--device", "cpu", "--dtype", "float32"]

    def rows(*arguments):
        monkeypatch.setattr(sys, "argv", ["x", *size, *where, *arguments])
        load_script("futures_benchmark").main()
        return [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]

    found = rows()
    layout = LlamaActionConfig(**SHAPES["tiny"]).layout
    assert [row[0].strip() for row in found] == ["warm-up", "1"]
    assert [float(row[5]) for row in found] == [layout.block] * 2  # passes a frame, without drafts
    frames = torch.randint(0, 30, (layout.max_frames, 1, layout.image_tokens))
    drive = tmp_path / "tokens.safetensors"
    save_file({"tokens": frames, "actions": torch.zeros(len(frames) - 1, layout.action_slots, 3)}, drive)
    trained = ["--checkpoint", str(tmp_path / "random_tiny"), "--drive", str(drive), "--drafts", "3"]
    assert all(layout.block / 4 <= float(row[5]) < layout.block for row in rows(*trained))
    with pytest.raises(SystemExit, match="2"):
        rows("--context", "40")
    assert "--context: expected 1 to 6 frames before 2, got 40" in capsys.readouterr().err


@pytest.mark.slow
def test_a_drive_without_a_server_is_measured(tmp_path, monkeypatch, capsys):
    given = ["experiment=demo", "engine=persistence", "device=cpu"]
    report = tmp_path / "drive.json"
    monkeypatch.setattr(sys, "argv", ["x", "--frames", "3", "--warm", "1", "--output", str(report), *given])
    load_script("drive_benchmark").main()
    found = json.loads(report.read_text())
    assert found["frames"] == len(found["seconds"]) == 3
    assert found["frames_per_second"] == pytest.approx(3 / sum(found["seconds"]))
    assert found["gpu"] is None
    assert "frames/s" in capsys.readouterr().out
