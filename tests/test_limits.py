"""Whatever a file holds, its reader gives a result or one line of our errors, in bounded time and memory."""

import io
import json
import math
import os
import re
import socket
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings, strategies as st
from tiny import save_tiny, tiny_tokenizer_config

from terra.config.files import config_dir
from terra.config.groups import Sampling
from terra.errors import CheckpointError, ConfigError, TerraError, TrajectoryError
from terra.rollout import track_actions
from terra.rollouts.manifest import count_rollouts, parse_line, read_line, read_lines
from terra.rollouts.settings import RolloutSettings
from terra.sampling import SamplingParams, window_seed
from terra.trajectory import Trajectory, load_trajectory
from terra.window_plan import check_frames
from terra.world_model import LlamaActionForCausalLM, load_config, load_world_model
from tokenizer import LFQTokenizer, LFQTokenizerConfig
from tokenizer.checkpoint import read_layout
from tokenizer.files import parse_json, read_bytes, read_json, read_text
from tokenizer.limits import LIMITS, Limits

pytestmark = pytest.mark.slow

SMALL = Limits(json_bytes=1000, json_depth=5, json_items=100, table_lines=10, table_bytes=1000, line_chars=100)
TIMES = np.arange(60) * 0.05
PATH = np.stack([5 * TIMES, 0 * TIMES], axis=-1)
EGO = {
    "format": "terra-trajectory",
    "frame": "ego",
    "axes": "x_forward_y_left",
    "units": {"position": "m", "time": "s"},
    "fps": 10,
    "times": TIMES.tolist(),
    "paths": [PATH.tolist()] * 2,
}
WORLD = {
    "format": "terra-trajectory",
    "frame": "world",
    "axes": "x_y_heading_ccw",
    "units": {"position": "m", "angle": "rad", "time": "s"},
    "fps": 10,
    "poses": [[second, 0, 0, 0] for second in range(0, 60, 3)],
}
ARRAYS = {key: value for key, value in EGO.items() if key not in ("units", "times", "paths")} | {
    "units_position": "m",
    "units_time": "s",
    "times": TIMES,
    "paths": np.stack([PATH] * 2),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


ANY_BYTES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def one_line(error: pytest.ExceptionInfo[TerraError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 2000
    return message


def refused(work, kind: type[TerraError] = TerraError) -> str:
    with pytest.raises(kind) as error:
        work()
    return one_line(error)


def tried(work) -> None:
    """Do what may be refused in one line, but in no other way."""
    message = ""
    try:
        work()
    except TerraError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 2000


def test_yaml_says_what_the_code_says():
    assert Limits(**yaml.safe_load((config_dir() / "limits/default.yaml").read_text())) == LIMITS


@pytest.mark.parametrize("value", [0, -1, (1 << 40) + 1, 10**20, True, 1.5, None])
@pytest.mark.parametrize("name", sorted(name for name, bound in vars(LIMITS).items() if isinstance(bound, int)))
def test_bounds_have_bounds(name, value):
    assert refused(lambda: Limits(**{name: value}), ConfigError).startswith(f"{name}: expected")


@pytest.mark.parametrize("name", ["video_fps", "context_seconds"])
@pytest.mark.parametrize("value", [0, 1e300, math.inf, math.nan])
def test_bounds_that_are_no_counts_have_bounds(name, value):
    assert refused(lambda: Limits(**{name: value}), ConfigError).startswith(f"{name}: expected")


class TestFiles:
    @pytest.fixture(params=["fifo", "zero", "socket", "folder", "loop", "long", "nothing"])
    def odd(self, request, tmp_path, monkeypatch):
        path = tmp_path / "odd"
        monkeypatch.chdir(tmp_path)
        match request.param:
            case "fifo":
                os.mkfifo(path)
            case "zero":
                path.symlink_to("/dev/zero")
            case "socket":
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind("odd")
            case "folder":
                path.mkdir()
            case "loop":
                path.symlink_to(path)
            case "long":
                path = tmp_path / ("n" * 300)
        return path

    def test_only_regular_files_are_opened(self, odd):
        for read in (read_json, read_text, read_bytes):
            assert str(odd) in refused(lambda read=read: read(odd, ConfigError))
        assert str(odd) in refused(lambda: list(read_lines(odd)))
        for suffix in (".json", ".csv", ".npz", ".jsonl"):
            link = odd.parent / f"link{suffix}"
            link.symlink_to(odd)
            assert str(link) in refused(lambda link=link: load_trajectory(link))

    def test_size_is_checked_before_reading(self, tmp_path):
        path = tmp_path / "huge.json"
        with path.open("wb") as file:
            file.truncate(1 << 40)  # sparse
        assert "at most 67108864 bytes, got 1099511627776" in refused(lambda: read_json(path, ConfigError))

    def test_a_file_that_grows_is_bounded(self):
        proc = Path("/proc/self/maps")  # its size is 0, and its content is longer
        if not proc.exists():
            pytest.skip("no /proc here")
        assert "at most 10 bytes" in refused(lambda: read_bytes(proc, ConfigError, max_bytes=10))


class TestJson:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ('{"a":' * 100_000, "lists or objects within each other"),
            ("[" * 1_000_000, "lists or objects within each other"),
            ('{"a":' * 65 + "1" + "}" * 65, "more than 64 lists or objects"),
            ('{"a": ' + "9" * 6000 + "}", "a number of 6000 digits"),
            ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' twice"),
            ('{"a": "\\ud800"}', "half a character"),
            ('{"a": ["\\u0000"]}', "half a character"),
            ('{"\\ud800": 1}', "half a character"),
            ("[" + "[]," * LIMITS.json_items + "1]", "at most 4194304 lists"),
        ],
    )
    def test_refused(self, text, words):
        assert words in refused(lambda: parse_json(text, "x.json", ConfigError))

    def test_a_repeated_key_is_found_in_linear_time(self):
        text = "{" + ",".join(f'"k{index}": 1' for index in range(60_000)) + ', "k59999": 2}'
        assert "'k59999' twice" in refused(lambda: parse_json(text, "x.json", ConfigError))

    def test_depth_is_that_of_the_limits(self):
        assert parse_json('{"a": [[[[1]]]]}', "x", ConfigError, limits=SMALL)
        assert "more than 5" in refused(lambda: parse_json('{"a": [[[[[1]]]]]}', "x", ConfigError, limits=SMALL))

    @ANY_BYTES
    @given(data=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
    def test_any_bytes(self, tmp_path, data):
        path = tmp_path / "any.json"
        path.write_bytes(data)
        tried(lambda: read_json(path, ConfigError, limits=SMALL))


class TestTrajectories:
    @ANY_BYTES
    @given(
        suffix=st.sampled_from([".json", ".csv", ".npz", ".jsonl"]),
        data=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()),
    )
    def test_any_bytes(self, tmp_path, suffix, data):
        path = tmp_path / f"any{suffix}"
        path.write_bytes(data)
        tried(lambda: load_trajectory(path))

    @ANY_BYTES
    @given(document=st.sampled_from([EGO, WORLD]), key=st.sampled_from([*EGO, "poses"]), value=JSON)
    def test_any_value_of_a_key(self, tmp_path, document, key, value):
        path = tmp_path / "any.json"
        path.write_text(json.dumps({**document, key: value}))
        tried(lambda: load_trajectory(path, seconds=1.0).resample(10.0, 5).actions(1))

    @ANY_BYTES
    @given(place=st.floats(0, 1), change=st.binary(max_size=4), length=st.integers(0, 40))
    def test_a_damaged_archive(self, tmp_path, place, change, length):
        path = tmp_path / "drive.npz"
        np.savez_compressed(path, **ARRAYS)
        data, start = path.read_bytes(), int(place * path.stat().st_size)
        path.write_bytes(data[:start] + change + data[start + length :])
        tried(lambda: load_trajectory(path))

    @pytest.mark.parametrize("fps", [1e-6, 1e-300, 5e-324, 1e300])
    def test_a_rate_that_no_camera_has(self, tmp_path, fps):
        path = tmp_path / "drive.json"
        path.write_text(json.dumps({**EGO, "fps": fps}))
        assert "fps: expected a number from 0.01 to 100" in refused(lambda: load_trajectory(path))

    def test_only_the_frames_that_are_needed_are_made(self):
        slow = Trajectory(np.stack([PATH] * 5000), TIMES, 0.01, "slow")  # six days: 50 million frames at 100 a second
        assert slow.resample(100.0, 24).num_frames == 24
        assert "49990001 frames at 100 fps: expected at most 4000000 numbers" in refused(
            lambda: slow.resample(100.0), TrajectoryError
        )

    @pytest.mark.parametrize("suffix", [".json", ".csv"])
    def test_a_day_of_parking(self, tmp_path, engine_spec, suffix):
        path, seconds = tmp_path / f"drive{suffix}", range(0, 60_000, 3)
        if suffix == ".json":
            poses = [[second, 0, 0, 0] for second in seconds]
            path.write_text(json.dumps({**WORLD, "fps": 100, "poses": poses}))
        else:
            rows = "".join(f"{second},0,0,0\n" for second in seconds)
            path.write_text("# fps: 100\ntime_s,x_m,y_m,heading_rad\n" + rows)
        assert "frames at 100 fps: expected at most" in refused(lambda: load_trajectory(path), TrajectoryError)
        drive = load_trajectory(path, seconds=2.5)
        assert drive.num_frames == 252
        actions, _ = track_actions(drive, 25, engine_spec)
        assert len(actions) == 24

    def test_what_is_cut_off_changes_no_action(self, tmp_path, engine_spec):
        path = tmp_path / "drive.json"
        seconds = np.arange(0, 30, 0.37)
        poses = np.column_stack([seconds, 5 * seconds, np.sin(seconds / 3), np.cos(seconds / 3) / 15])
        for fps in (3.7, 10.0, 99.0):
            path.write_text(json.dumps({**WORLD, "fps": fps, "poses": poses.tolist()}))
            whole, part = load_trajectory(path), load_trajectory(path, seconds=25 / engine_spec.fps)
            assert part.num_frames < whole.num_frames
            assert track_actions(part, 25, engine_spec)[0].equal(track_actions(whole, 25, engine_spec)[0])

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("\n" * 11 + "x", "at most 10 lines, got 12"),
            ("x" * 1001, "at most 1000 bytes, got 1001"),
            ("#" * 101, "line 1: expected at most 100 characters, got 101"),
        ],
    )
    def test_long_tables(self, tmp_path, text, words):
        path = tmp_path / "drive.csv"
        path.write_text(text)
        assert words in refused(lambda: load_trajectory(path, limits=SMALL))

    @pytest.mark.parametrize(
        ("header", "words"),
        [
            ("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}", "of which"),
            ("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}", "of which"),
            ("{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999999999, 0)}", "NPZ"),
            ("{'descr': '|O', 'fortran_order': False, 'shape': ()}", "an array of object"),
            ("{'descr': '<U9999999', 'fortran_order': False, 'shape': ()}", "of which"),
            ("(" * 5000, "NPZ"),
        ],
    )
    def test_archives_that_promise_more(self, tmp_path, header, words):
        path = tmp_path / "drive.npz"
        content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(8)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("paths.npy", content)
        assert words in refused(lambda: load_trajectory(path))

    def test_archives_that_unpack(self, tmp_path):
        path = tmp_path / "drive.npz"
        np.savez_compressed(path, paths=np.zeros(40_000_000))
        assert path.stat().st_size < 1 << 20
        assert "320000128 bytes unpacked" in refused(lambda: load_trajectory(path))
        np.savez_compressed(path, **{**ARRAYS, "paths": np.zeros((200_000, 60, 2), dtype=np.int8)})
        assert "at most 4000000 numbers, got 24000000" in refused(lambda: load_trajectory(path))

    def test_archives_of_many_members(self, tmp_path):
        path, data = tmp_path / "drive.npz", io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:
            for index in range(2000):
                archive.writestr(f"{index}.npy", b"")
        path.write_bytes(data.getvalue())
        assert "members, above the 64 that are read" in refused(lambda: load_trajectory(path))


@pytest.fixture(scope="module")
def engine_spec():
    from tiny import tiny_config

    from terra.engine.base import EngineSpec

    return EngineSpec.of(tiny_config())


class TestActBench:
    LIMITS = SMALL.replace(json_bytes=1 << 20, manifest_bytes=4 << 20)

    @pytest.mark.parametrize(
        ("size", "words"),
        [
            (100 << 30, "expected at most 4194304 bytes, got 107374182400"),
            (4 << 20, "line 1: expected at most 1048576 bytes, got more"),
        ],
    )
    def test_size_is_checked_before_a_line_is_looked_for(self, tmp_path, size, words):
        path = tmp_path / "a.jsonl"
        with path.open("wb") as file:
            file.write(b'{"sample_id": 3, ')
            file.truncate(size)
        for sample in (3, "3", None):
            message = refused(lambda sample=sample: load_trajectory(path, sample_id=sample, limits=self.LIMITS))
            assert message == f"{path}: {words}"

    def test_many_lines(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_bytes(b"\n" * 11)
        limits = SMALL.replace(manifest_lines=10)
        assert "at most 10 lines" in refused(lambda: load_trajectory(path, sample_id=3, limits=limits))


class TestManifest:
    def test_a_long_line_fails_alone(self, tmp_path):
        path = tmp_path / "m.jsonl"
        path.write_bytes(b'{"id": "a"}\n' + b"x" * 5000 + b'\n\n{"id": "b"}\n')
        lines = list(read_lines(path, SMALL))
        assert [(line.number, len(line.text)) for line in lines] == [(1, 12), (2, 1001), (4, 12)]
        assert all(read_line(path, line.number, line.offset, SMALL) == line for line in lines)

    def test_many_lines(self, tmp_path):
        path = tmp_path / "m.jsonl"
        path.write_bytes(b"\n" * 11)
        limits = SMALL.replace(manifest_lines=10)
        assert "at most 10 lines" in refused(lambda: list(read_lines(path, limits)), ConfigError)

    @pytest.fixture
    def requested(self, tmp_path):
        values = {"manifest": tmp_path / "m.jsonl", "output": tmp_path / "out", "context_root": None, "score": None}
        values |= {"num_frames": 8, "num_context": 2, "seed": 0, "num_samples": 1, "overlap": 3, "sampling": Sampling()}
        values |= {"at_once": 1, "workers": 1, "contexts": 1, "retries": 0, "retry_seconds": 0.0, "metrics": None}
        return RolloutSettings(**values, on_change="refuse", verify=False, grid=False, limits=SMALL)

    def read(self, settings, data: bytes) -> None:
        """Count the rollouts of a manifest, and read each of its lines: a bad one fails alone."""
        settings.manifest.write_bytes(data)
        tried(lambda: count_rollouts(settings))
        for line in read_lines(settings.manifest, settings.limits):
            jobs = []
            tried(lambda line=line, jobs=jobs: jobs.extend(parse_line(line, settings)))
            for job in jobs[:1]:
                json.dumps(job.request)
                if job.trajectory is None:
                    tried(lambda job=job: job.inline_trajectory(settings.limits))

    @ANY_BYTES
    @given(data=st.binary(max_size=300) | st.lists(JSON, max_size=4).map(lambda lines: b"\n".join(map(encoded, lines))))
    def test_any_bytes(self, requested, data):
        self.read(requested, data)

    def test_an_unknown_key_with_a_line_break(self, requested):
        self.read(requested, encoded({"id": "a", "context": "c", "trajectory": "t.json", "sampling": {"\n": None}}))

    @ANY_BYTES
    @given(data=st.data())
    def test_any_value_of_a_key(self, requested, data):
        line = {"id": "a", "context": "c", "trajectory": "t.json"}
        inline = {"sample_id": 3, "context_frames": ["0.png"], "instruction_trajs": [[[0, 0, 0]] * 60]}
        keys = ["actions", "sampling", "num_frames", "num_context", "seed", "num_samples", "other"]
        lines = []
        for start in (line, inline):
            key = data.draw(st.sampled_from([*start, *keys]))
            lines.append(start | {key: data.draw(JSON)})
        self.read(requested, b"\n".join(map(encoded, lines)))

    def test_frames(self):
        check_frames(36_000)
        assert refused(lambda: check_frames(10**9)) == "num_frames: expected at most 36000, got 1000000000"


class TestSeeds:
    def test_windows_of_large_seeds_have_their_own(self):
        seeds = [base + step for base in (0, 2**32, 2**33, 2**62) for step in range(8)]
        made = [window_seed(seed, window) for seed in seeds for window in range(8)]
        assert len(set(made)) == len(made)
        assert window_seed(7 + 2**32, 0) != window_seed(7, 1)

    def test_small_seeds_are_as_ever(self):
        old = np.random.SeedSequence([2**32 - 1, 3]).generate_state(1, np.uint64)[0] >> np.uint64(1)
        assert window_seed(2**32 - 1, 3) == old

    @pytest.mark.parametrize("top_k", [2**31, 10**30, -1, True, 2.5])
    def test_top_k(self, top_k):
        with pytest.raises(ValueError, match="top_k: expected"):
            SamplingParams(top_k=top_k)


@pytest.fixture(scope="module")
def world_model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("world_model"), LlamaActionForCausalLM)


@pytest.fixture
def changed(world_model, tmp_path):
    """Write a copy of the world model's folder with another config.json, and return it."""

    def write(content: bytes | dict) -> Path:
        folder = tmp_path / "changed"
        folder.mkdir(exist_ok=True)
        for path in world_model.iterdir():
            if path.name != "config.json" and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
        if isinstance(content, dict):
            content = json.dumps({**json.loads((world_model / "config.json").read_text()), **content}).encode()
        (folder / "config.json").write_bytes(content)
        return folder

    return write


class TestWorldModelConfig:
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("num_attention_heads", 0),
            ("num_attention_heads", True),
            ("num_key_value_heads", 0),
            ("hidden_size", 10**12),
            ("hidden_size", 2**15),
            ("vocab_size", 2**24),
            ("vocab_size", 1),
            ("intermediate_size", 2**18),
            ("num_hidden_layers", 10**9),
            ("num_hidden_layers", 200),
            ("head_dim", 10**9),
            ("head_dim", 0),
            ("fps", None),
            ("fps", "ten"),
            ("fps", 1e-300),
            ("fps", 10**299),
            ("waypoint_times", "abc"),
            ("waypoint_times", [1]),
            ("waypoint_times", [2, 1, 3, 4, 5, 6]),
            ("waypoint_times", [0.5] * 100_000),
            ("hidden_act", "nosuch"),
            ("action_dim", 10**9),
            ("num_image_patches", -1),
            ("max_position_embeddings", 10**12),
            ("pad_token_id", 65),
            ("eos_token_id", [1]),
            ("rms_norm_eps", 0),
            ("rms_norm_eps", "1e-6"),
            ("rope_scaling", {"type": "yarn"}),
            ("rope_parameters", {"rope_type": "nosuch"}),
            ("rope_parameters", 7),
            ("rope_theta", -1),
            ("dtype", "float8"),
            ("torch_dtype", 5),
            ("architectures", 5),
            ("architectures", [["x"]]),
            ("architectures", ["os.system"]),
            ("model_type", ["x" * 10_000]),
            ("tokenizer_sha256", "x"),
            ("attn_implementation", "somebody/kernels"),
            ("_attn_implementation", "somebody/kernels"),
            ("quantization_config", {"quant_method": "bitsandbytes"}),
            ("trust_remote_code", True),
            ("custom_pipelines", {"a": {"impl": "x.py"}}),
            ("adapter_kwargs", {"a": 1}),
        ],
    )
    def test_refused(self, changed, key, value):
        folder = changed({key: value})
        message = refused(lambda: load_config(folder), CheckpointError)
        assert str(folder) in message

    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b"[]", b"null", b"\xff", b'{"a":' * 100_000, b'{"x": ' + b"9" * 6000 + b"}", b'{"a": 1, "a": 2}'],
    )
    def test_no_configuration(self, changed, content):
        folder = changed(content)
        assert str(folder / "config.json") in refused(lambda: load_config(folder), CheckpointError)

    def test_leftovers_and_unknown_keys(self, changed, world_model, caplog):
        folder = changed({"auto_map": {"AutoModel": "x--y.Z"}, "dropout": 0.1, "use_text": False, "num_labels": 10**9})
        for _ in range(2):
            config = load_config(folder)
        assert config.to_dict() == load_config(world_model).to_dict()
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert warnings == ["config.json of the world model: unknown keys are left out: num_labels"]

    @pytest.mark.parametrize("content", ["{", "[1]", '{"custom_generate": "a/b"}', '{"temperature": "abc"}'])
    def test_other_files_of_the_folder_are_not_read(self, changed, content):
        folder = changed({})
        for name in ("generation_config.json", "adapter_config.json"):
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_text(content)
        load_world_model(folder)

    @ANY_BYTES
    @given(data=st.data())
    def test_any_value(self, changed, world_model, data):
        keys = sorted(json.loads((world_model / "config.json").read_text()))
        folder = changed({data.draw(st.sampled_from(keys)): data.draw(JSON)})
        tried(lambda: load_config(folder))


class TestTokenizerConfig:
    @pytest.mark.parametrize(
        ("part", "key", "value"),
        [
            ("encoder_decoder_config", "ch", 32 * 10**9),
            ("encoder_decoder_config", "num_res_blocks", 10**9),
            ("encoder_decoder_config", "ch_mult", [1] * 100_000),
            ("encoder_decoder_config", "ch_mult", [10**9]),
            ("encoder_decoder_config", "z_channels", 10**9),
            ("quantizer_config", "dim", 10**12),
            ("quantizer_config", "codebook_size", 10**299),
            (None, "image_size", [8192, 8192]),
            (None, "image_size", [16 * 10**9, 16]),
            (None, "quantizer_config", None),
            (None, "trust_remote_code", True),
        ],
    )
    def test_refused(self, tmp_path, part, key, value):
        content = tiny_tokenizer_config().to_dict()
        target = content if part is None else content[part]
        target[key] = value
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content))
        assert str(path) in refused(lambda: LFQTokenizerConfig.load(path), CheckpointError)

    def test_more_than_the_files_hold(self, tmp_path):
        LFQTokenizer(tiny_tokenizer_config()).save_pretrained(tmp_path)
        content = tiny_tokenizer_config().to_dict()
        content["encoder_decoder_config"]["ch"] = 4096
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert "of another shape" in refused(lambda: LFQTokenizer.from_pretrained(tmp_path), CheckpointError)


class TestWeights:
    def header(self, folder: Path, text: bytes) -> Path:
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
        return folder

    @pytest.mark.parametrize(
        "header",
        [
            b'{"a":' * 100_000,
            b'{"a": {"dtype": "F32", "shape": [' + b"9" * 6000 + b'], "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
            b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": "F32", "shape": "12", "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": "F32", "shape": [' + b"1," * 100_000 + b'1], "data_offsets": [0, 4]}}',
            b'{"a": 5}',
            b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        ],
    )
    def test_headers(self, tmp_path, header):
        refused(lambda: read_layout(self.header(tmp_path, header)), CheckpointError)

    @ANY_BYTES
    @given(value=JSON)
    def test_any_header(self, tmp_path, value):
        tried(lambda: read_layout(self.header(tmp_path, json.dumps({"a": value}).encode())))

    @pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/x.safetensors", 5, None, ["a"], "x" * 5000])
    def test_an_index_names_files_beside_it(self, tmp_path, shard):
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": shard}}))
        message = refused(lambda: read_layout(tmp_path), CheckpointError)
        assert re.search(r"expected a \.safetensors file beside it for a", message)
