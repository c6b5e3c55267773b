"""A world as one file, and back: what is kept, what is rounded, and what is refused."""

import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from entry import compose, read_settings
from tiny import COLS, ROWS, save_tiny, tiny_tokenizer_config

from terra.cli import main
from terra.config.files import check_paths
from terra.errors import CheckpointError, ConfigError, OutputError
from terra.pipeline import Pipeline
from terra.world_model import LlamaActionV2ForCausalLM, load_config
from terra.worlds.archive import UNPACKED, pack, unpack, unpack_once
from terra.worlds.places import archive_of
from terra.worlds.rounding import restored, rounded
from tokenizer import LFQTokenizer
from tokenizer.checkpoint import checkpoint_sha256, load_tensors
from tokenizer.lineage import tokens_sha256


@pytest.fixture
def world(tmp_path):
    folder = tmp_path / "world"
    torch.manual_seed(0)
    LFQTokenizer(tiny_tokenizer_config()).save_pretrained(folder / "tokenizer")
    save_tiny(
        folder / "world_model",
        LlamaActionV2ForCausalLM,
        tokenizer_sha256=checkpoint_sha256(folder / "tokenizer"),
    )
    (folder / "contexts" / "hall").mkdir(parents=True)
    (folder / "contexts" / "hall" / "frame_0000.png").write_bytes(b"a picture")
    (folder / "README.md").write_text("# A world\n")
    (folder / "page.json").write_text('{"line": "Look."}\n')
    (folder / "state").mkdir()
    (folder / "state" / "large").write_bytes(bytes(100))
    return folder


def packed(world, *more: str):
    archive = world.with_suffix(".zip")
    pack(read_settings("pack", [f"world={world}", f"output={archive}", *more]))
    return archive


def unpacked(archive, name: str = "again"):
    folder = archive.with_name(name)
    unpack(read_settings("unpack", [f"archive={archive}", f"output={folder}"]))
    return folder


def test_with_16_bits_nothing_changes(world, capsys):
    folder = unpacked(packed(world, "bits=16"))
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert "contexts/hall/frame_0000.png" in files
    assert not [name for name in files if name.startswith("state") or name == "world.json"]
    assert (folder / "README.md").read_text() == "# A world\n"
    assert (folder / "page.json").read_text() == '{"line": "Look."}\n'
    for name in ("tokenizer", "world_model"):
        before, after = load_tensors(world / name), load_tensors(folder / name)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert "model=folder model.path=" in capsys.readouterr().out


def test_with_8_bits_a_world_is_smaller_nearly_the_same_and_a_pair(world):
    sizes = [packed(world, f"bits={bits}", "overwrite=true").stat().st_size for bits in (16, 8)]
    assert sizes[1] < 0.5 * sizes[0]
    folder = unpacked(packed(world, "overwrite=true"))
    tokenizer = checkpoint_sha256(folder / "tokenizer")
    assert tokenizer != checkpoint_sha256(world / "tokenizer")
    assert load_config(folder / "world_model").tokenizer_sha256 == tokenizer
    before, after = load_tensors(world / "world_model"), load_tensors(folder / "world_model")
    for name, tensor in before.items():
        assert torch.allclose(tensor, after[name], atol=float(tensor.abs().max()) / 254 * 1.001), name
    with Pipeline.from_pretrained(folder, engine="hf", device="cpu", dtype="float32", overlap=2) as pipeline:
        assert pipeline.wait(pipeline.encode(torch.zeros(1, 3, 4 * ROWS, 4 * COLS))).shape == (1, ROWS, COLS)


@pytest.mark.parametrize("bits", [8, 16])
def test_an_unpacked_world_with_a_decoder_of_its_own_can_be_trained_further(world, bits):
    """Tokens of its tokenizer are those that its world model's config names, as `init_from` demands."""
    before = checkpoint_sha256(world / "tokenizer")
    tokenizer = LFQTokenizer.from_pretrained(world / "tokenizer")
    tokenizer.config = tokenizer.config.replace(same_tokens_as=before)
    with torch.no_grad():
        tokenizer.decoder.conv_out.bias.add_(0.1)
    tokenizer.save_pretrained(world / "tokenizer")
    folder = unpacked(packed(world, f"bits={bits}"))
    tokens = tokens_sha256(folder / "tokenizer")
    assert load_config(folder / "world_model").tokenizer_sha256 == tokens
    assert (tokens == before) == (bits == 16)
    with Pipeline.from_pretrained(folder, engine="hf", device="cpu", dtype="float32", overlap=2):
        pass  # they are a pair


def test_a_shipped_tokenizer_is_not_stored(world, monkeypatch):
    monkeypatch.setattr("terra.worlds.archive._SHIPPED", world / "tokenizer")
    file = packed(world)
    assert not [name for name in zipfile.ZipFile(file).namelist() if name.startswith("tokenizer")]
    folder = unpacked(file)
    for name in ("tokenizer/config.json", "tokenizer/model.safetensors"):
        assert (folder / name).read_bytes() == (world / name).read_bytes()
    sha256 = load_config(world / "world_model").tokenizer_sha256
    assert load_config(folder / "world_model").tokenizer_sha256 == sha256 == checkpoint_sha256(folder / "tokenizer")
    with zipfile.ZipFile(file, "a") as more:
        more.writestr("tokenizer/config.json", "{}")
    with pytest.raises(CheckpointError, match="expected tokenizer/ or the hash of a shipped tokenizer, got both"):
        unpacked(file, "third")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=f"expected a Terra with the tokenizer {sha256}, got one with"):
        unpacked(file, "third")
    assert not file.with_name("third").exists()


def test_packing_again_is_the_same_file_and_rounding_again_changes_nothing(world):
    first = packed(world).read_bytes()
    assert packed(world, "overwrite=true").read_bytes() == first
    folder = unpacked(packed(world, "overwrite=true"))
    again = unpacked(packed(folder), "third")
    for name, tensor in load_tensors(folder / "world_model").items():
        assert torch.allclose(tensor, load_tensors(again / "world_model")[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_keeps_small_tensors_zeros_and_whole_numbers(dtype):
    torch.manual_seed(0)
    tensors = {
        "large": torch.randn(64, 8, 8, 2).to(dtype),
        "zero": torch.zeros(64, 64, dtype=dtype),
        "small": torch.randn(8, 8).to(dtype),
        "vector": torch.randn(5000).to(dtype),
        "whole": torch.arange(5000).reshape(50, 100),
    }
    back = restored(rounded(tensors), dtype)
    assert back.keys() == tensors.keys()
    for name in ("zero", "small", "vector", "whole"):
        assert torch.equal(back[name], tensors[name])
    error = (back["large"].float() - tensors["large"].float()).flatten(1).abs().amax(1)
    step = tensors["large"].float().flatten(1).abs().amax(1) / 127
    assert (error <= step * (0.5 + (0 if dtype == torch.float32 else 0.6)) + 1e-6).all()


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        (["output=here"], ConfigError, "output: expected a name that ends with .zip, got here"),
        (["bits=4"], ConfigError, "bits: expected 8 or 16, got 4"),
    ],
)
def test_what_cannot_be_packed_is_one_line(world, more, error, message):
    with pytest.raises(error, match=message):
        packed(world, *more)


def test_another_tokenizer_is_refused_and_an_archive_is_kept(world):
    archive = packed(world)
    with pytest.raises(OutputError, match="exists already: choose another, or overwrite=true"):
        packed(world)
    torch.manual_seed(1)
    LFQTokenizer(tiny_tokenizer_config()).save_pretrained(world / "tokenizer")
    with pytest.raises(CheckpointError, match="the world model was trained with tokenizer"):
        packed(world, "overwrite=true")
    assert unpacked(archive).is_dir()


@pytest.mark.parametrize("name", ["../out", "/out", "tokenizer/../../out", "other/file", "a\\b"])
def test_an_archive_that_reaches_out_is_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr(name, b"")
    with pytest.raises(CheckpointError, match="expected files of a world, got"):
        unpacked(tmp_path / "bad.zip")
    assert not (tmp_path / "again").exists()


def test_no_archive(tmp_path):
    (tmp_path / "bad.zip").write_bytes(b"PK, but no more")
    with pytest.raises(CheckpointError, match=r"bad.zip: expected an archive of terra pack, got: File is not a zip"):
        unpacked(tmp_path / "bad.zip")
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    with pytest.raises(CheckpointError, match="expected an archive of terra pack"):
        unpacked(tmp_path / "empty.zip")
    assert not (tmp_path / "again").exists()


@pytest.fixture
def at_hand(tmp_path, monkeypatch, world):
    """The archive of the tiny world as that of doom in a clone, which nobody has unpacked; gives the folder to be."""
    packed(world).rename(tmp_path / "doom.zip")
    monkeypatch.setenv("TERRA_WORLDS", str(tmp_path / "worlds"))
    monkeypatch.setattr("terra.worlds.places._ARCHIVES", tmp_path)
    return tmp_path / "worlds" / "doom"


def test_a_world_that_is_not_there_says_where_it_is_to_be_had(at_hand, tmp_path):
    (tmp_path / "doom.zip").rename(tmp_path / "elsewhere")
    source = "archives are in terra/worlds of Terra's repository"
    told = f"model=doom: no folder {at_hand}: unpack its archive, once: terra unpack doom.zip; {source}"
    with pytest.raises(CheckpointError) as error:
        Pipeline.from_pretrained("doom", engine="hf", device="cpu")
    assert str(error.value) == told
    with pytest.raises(ConfigError) as error:
        check_paths(compose("generate", ["model=doom", "context=.", "trajectory=.", "output=out"]), ())
    assert str(error.value) == told
    with pytest.raises(ConfigError, match="expected an archive of terra pack, such as those in terra/worlds of"):
        unpack(read_settings("unpack", ["archive=doom"]))


def test_a_world_at_hand_is_unpacked_where_it_is_first_used(at_hand, capsys):
    for said in (f"unpacking doom (1 MB) to {at_hand}, once\n", ""):
        with Pipeline.from_pretrained("doom", engine="hf", device="cpu", dtype="float32", overlap=2) as pipeline:
            assert pipeline.tokenizer.rows == ROWS
        assert capsys.readouterr().err == said
    assert read_settings("serve", ["model=doom"]).scenes == at_hand / "contexts"


def test_a_command_unpacks_a_world_at_hand_before_it_looks_for_its_scenes(at_hand, monkeypatch, capsys):
    arguments = ["model=doom", f"context={at_hand}/contexts/hall", f"trajectory={at_hand}/README.md"]
    for more, line in (
        ("seed=-1", "seed: expected a whole number from 0"),
        ("seed=1", "README.md: expected a file that"),
    ):
        monkeypatch.setattr(sys, "argv", ["terra", "generate", *arguments, more])
        assert not at_hand.exists()
        with pytest.raises(SystemExit):
            main()
        assert line in capsys.readouterr().err
    assert at_hand.is_dir()


def test_processes_that_unpack_at_once_make_one_folder(at_hand):
    archive = archive_of(str(at_hand))
    assert archive is not None
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(unpack_once, archive, at_hand) for _ in range(4)]:
            done.result()
    before = at_hand.stat().st_ino
    unpack_once(archive, at_hand)  # another was faster
    assert at_hand.stat().st_ino == before
    assert [path.name for path in at_hand.parent.iterdir()] == ["doom"]
    (at_hand / UNPACKED).unlink()
    with pytest.raises(OutputError, match="exists already"):
        unpack_once(archive, at_hand)


def test_worlds_are_unpacked_by_name_and_what_is_there_is_left(at_hand, tmp_path, monkeypatch, capsys):
    shutil.copy(tmp_path / "doom.zip", tmp_path / "pusht.zip")
    shutil.copy(tmp_path / "doom.zip", tmp_path / "it's.zip")

    def say(*names: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["terra", "unpack", *names])
        main()
        return capsys.readouterr().out.splitlines()

    pusht, third = at_hand.with_name("pusht"), at_hand.with_name("it's")
    assert say("doom", "pusht") == [f"{at_hand}: model=doom", f"{pusht}: model=pusht"]
    assert say("doom", str(tmp_path / "it's.zip")) == [
        f"is there already: {at_hand}: model=doom",
        f"{third}: model=it's",
    ]
    assert say("archive=doom") == [f"is there already: {at_hand}: model=doom"]
    (at_hand / "world_model/model.safetensors").unlink()
    monkeypatch.setattr(sys, "argv", ["terra", "unpack", "doom"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "got another: remove it first, or choose another place with output=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["archive=nowhere"], r"or a world at hand \(doom\), found nothing at nowhere"),
        (["archive=[doom,nowhere]"], r"or a world at hand \(doom\), found nothing at nowhere"),
        (["archive=[doom,doom]", "output=here"], "output: expected null with 2 archives, got here"),
        (["archive=[]"], "archive: expected names of worlds or paths of archives, got"),
    ],
)
def test_what_cannot_be_unpacked_is_one_line(at_hand, overrides, message):
    with pytest.raises(ConfigError, match=message):
        unpack(read_settings("unpack", overrides))
    assert not at_hand.exists()
