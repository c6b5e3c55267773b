"""The project itself: README, configuration, package."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from entry import load_script
from hydra import compose, initialize_config_dir
from PIL import Image

import decoder
import terra
import tokenizer
from decoder.video import probe_video, read_video
from terra.config.files import compose as compose_settings, config_dir, register_resolvers

ROOT = Path(__file__).parent.parent
README, CONTRIBUTING = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
DECODER_SETTINGS = "".join(path.read_text() for path in (ROOT / "conf/decoder").glob("*.yaml"))


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.splitlines()]


def test_packages_are_ours():
    assert Path(tokenizer.__file__).parent == ROOT / "tokenizer"
    assert Path(decoder.__file__).parent == ROOT / "decoder"


def test_file_map_is_the_tree():
    block = CONTRIBUTING.split("## The files")[1].split("```")[1]
    named, folder = set(), ""
    for line in block.strip().splitlines():
        names = re.split(r" {2,}", line.strip())[0].split()  # two spaces or more stand before the explanation
        if not line.startswith(" "):
            (folder,) = names
        named.update(folder + name if line.startswith(" ") else name for name in names)
    for name in named:
        assert (ROOT / name).exists(), name
    for path in (ROOT / "terra").iterdir():
        if path.name not in {"__init__.py", "py.typed", "__pycache__"}:
            assert f"terra/{path.name}{'/' if path.is_dir() else ''}" in named, path.name


def test_readme_files_exist():
    targets = [*re.findall(r"\]\((?!http)([^)#]+)\)", README), *re.findall(r'src="([^"]+)"', README)]
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_readme_is_a_page_for_newcomers():
    lines = README.splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 120] == []
    for command in ("make demo", "make test"):
        assert any(line.startswith(f"{command} ") for line in lines)
    subprocess.run([sys.executable, "scripts/readability.py", "README.md"], cwd=ROOT, check=True, timeout=30)


def test_sentences_are_counted_as_they_are_read():
    page = "# Title\n\nOne two. **Three four five.** [Six](a b.md): seven\neight.\n\n- Nine ten\n- Eleven\n\n"
    page += "| a b | c |\n"
    page += "\n```sh\nmake demo\n```\n\n![a picture](b.gif)\n\n*Twelve `a.py` is 14.5.*\n"
    found = [sentence.strip("*") for sentence in load_script("readability").sentences(page)]
    assert found == [
        "One two.",
        "Three four five.",
        "Six: seven eight.",
        "Nine ten",
        "Eleven",
        "Twelve `a.py` is 14.5.",
    ]


@pytest.mark.slow
def test_readme_python_runs(tmp_path):
    (snippet,) = (text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "pipeline.generate" in text)
    assert "num_frames=25" in snippet
    snippet = snippet.replace("num_frames=25", "num_frames=7")  # 7 frames show the same as 25
    subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, check=True, timeout=300)
    assert probe_video(tmp_path / "right.mp4").num_frames == 7


def test_readme_shows_the_video_of_make_demo():
    shown, made = probe_video(ROOT / "docs" / "first_video.gif"), compose_settings("generate", ["experiment=demo"])
    assert (shown.num_frames, shown.width, shown.height) == (made.num_frames, 256, 144)
    assert f"{made.num_frames - made.num_context} are imagined" in README
    first = Image.open(Path(made.context) / "frame_0000.png").convert("RGB").resize((256, 144))
    difference = np.abs(read_video(ROOT / "docs" / "first_video.gif", max_frames=1)[0] - np.asarray(first, float))
    assert difference.mean() < 12  # levels; a frame of another scene differs by 40 and more


def test_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == terra.__version__
    assert citation["license"] == "Apache-2.0"


def docstrings() -> list[tuple[str, str]]:
    """Each docstring of the packages and of scripts/, that of a constant too, and where it stands."""
    found = []
    for folder in ("terra", "tokenizer", "decoder", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno}", str(node.value.value)))
    assert len(found) > 2000
    return found


def missing_paths(text: str) -> list[str]:
    """The paths of the repository that a text names and that do not exist; words in capitals stand for any name."""
    named = re.findall(r"(?<![\w./<}$-])((?:conf|terra|tokenizer|decoder|scripts|tests|notebooks)/[\w./*-]*\w)", text)
    in_a_wheel = [re.sub(r"^terra/conf\b", "conf", name) for name in named]
    return [name for name in in_a_wheel if not list(ROOT.glob(re.sub(r"\b[A-Z][A-Z_]+\b", "*", name)))]


def missing_names(text: str) -> list[str]:
    """The dotted names in backticks that name no module of the packages, or nothing that its file speaks of."""
    missing = []
    for name in re.findall(r"`((?:terra|tokenizer|decoder)(?:\.\w+)+)", text):
        path, rest = ROOT, name.split(".")
        while rest and (path / rest[0]).is_dir():
            path /= rest.pop(0)
        if rest and (path / f"{rest[0]}.py").is_file():
            path /= f"{rest.pop(0)}.py"
        is_setting = path == ROOT / "decoder" and len(rest) == 1 and f"{rest[0]}:" in DECODER_SETTINGS
        file = path / "__init__.py" if path.is_dir() else path
        if not is_setting and not all(re.search(rf"\b{part}\b", file.read_text()) for part in rest):
            missing.append(name)
    return missing


def test_docstrings_name_what_exists():
    for where, text in docstrings():
        assert missing_paths(text) == [], where
        assert missing_names(text) == [], where


def test_what_does_not_exist_is_found():
    assert missing_paths("conf/train_world_model.yaml, conf/NAME.yaml, terra/conf, conf/train.yaml") == [
        "conf/train_world_model.yaml"
    ]
    names = "`terra.rollout.describe_inputs`, `terra.rollout.describe_outputs`, `terra.nowhere.Thing`"
    assert missing_names(names) == ["terra.rollout.describe_outputs", "terra.nowhere.Thing"]


@pytest.mark.parametrize("root", sorted(path.stem for path in (ROOT / "conf").glob("*.yaml")))
def test_every_root_config_composes(root):
    register_resolvers()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        assert compose(root)


@pytest.mark.parametrize(
    "override",
    [
        f"{group}={path.stem}"
        for group in ("engine", "model", "sampling", "decoder", "camera", "experiment")
        for path in sorted((ROOT / "conf" / group).glob("*.yaml"))
    ],
)
def test_every_choice_composes(override):
    register_resolvers()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = compose("generate", overrides=[override])
    assert config.num_frames > config.num_context


def test_help_is_quick_and_complete():
    code = (
        "import sys; sys.argv = ['terra-generate', '--help']\n"
        "from terra.cli import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "context frames and actions in" in done.stdout
    assert "engine: auto, graph, hf, jacobi, persistence, vllm" in done.stdout


@pytest.mark.slow
def test_wheel_holds_configuration_and_weights(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("terra_world_model-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"terra", "tokenizer", "decoder"}
    assert "terra/conf/generate.yaml" in names
    assert "terra/conf/hydra/help/generate.yaml" in names
    assert "terra/demo/world_model/config.json" in names
    assert not [name for name in names if name.endswith(".gif") or name.startswith("terra/benchmark/h200")]
    assert wheel.stat().st_size < 90e6
    (entries,) = (name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entries).decode()
    assert "terra = terra.cli:main" in text
    assert "terra-generate = terra.cli:main" in text
    assert "terra = terra.engine.vllm.plugin:register" in text


def test_no_registry_host_or_machine_path_is_named():
    forbidden = re.compile("pypi" + r"\.org|files\.pythonhosted|registry\.npm|/" + "work/|/" + "root/")
    for path in tracked():
        if path.suffix in {".py", ".md", ".toml", ".yaml", ".txt", ".json", ""} and path.is_file():
            assert not forbidden.search(path.read_text()), path
